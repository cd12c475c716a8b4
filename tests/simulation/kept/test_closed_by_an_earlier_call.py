"""Found by the simulator: second-payment, at step 928, which was its own: a call with ``pay_again`` closes what others buy."""

from x402guard.testing.simulator import Case, play


def test_run_920002005_holds():
    off = frozenset(("redirects", "rpc_elsewhere", "rpc_lies"))
    assert play(Case(920_002_005, 400, off=off, store="memory", version=3, flavour="forks")).violations == []

"""Found by the simulator: second-payment, at step 131."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again cancel_tx cancelled censor clock close closing crash cut delayed disk_full doubled elsewhere
late ledger lost no_logs offers outside owner power reorg rpc_down rpc_fork rpc_hops rpc_lag
rpc_limit rpc_nonsense signer slow_chain twist unsent wrapped
"""
KEPT = """
125 128 150 157 221
"""


def test_run_264471399484_holds():
    case = Case(
        264471399484,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="midnight",
    )
    assert play(case).violations == []

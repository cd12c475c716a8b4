"""Found by the simulator: false-alarm, at step 518."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again cancel_tx cancelled censor close closing crash cut delayed disk_full doubled elsewhere late
ledger lost no_logs outside owner power rpc_down rpc_fork rpc_lag rpc_limit rpc_nonsense signer
unsent wrapped
"""
KEPT = """
2 5 6 11 16 17 18 19 27
"""


def test_run_766184977986_holds():
    case = Case(
        766184977986,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="mixed",
    )
    assert play(case).violations == []

"""Found by the simulator: second-payment, at step 539."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again cancel_tx cancelled censor clock close closing crash delayed disk_full doubled late ledger
lost no_logs offers outside owner power reorg rpc_down rpc_fork rpc_lag rpc_limit rpc_nonsense
signer stalled twist unsent wrapped
"""
KEPT = """
0 1 2 4 5 11 13 17 22 23 32 47 79 98 130
"""


def test_run_766184976514_holds():
    case = Case(
        766184976514,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="midnight",
    )
    assert play(case).violations == []

"""Found by the simulator: illegal-transition, at step 525."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again away cancel_tx cancelled censor clock close closing crash cut delayed disk_full doubled elsewhere
late ledger lost no_logs outside power reorg rpc_fork rpc_hops rpc_lag rpc_limit rpc_nonsense signer
slow_chain stalled twist unsent wrapped
"""
KEPT = """
0 1 7 12 13 18 118
"""


def test_run_668977895650_holds():
    case = Case(
        668977895650,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="fleet",
        version=3,
        flavour="mixed",
    )
    assert play(case).violations == []

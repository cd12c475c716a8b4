"""Found by the simulator: illegal-transition, at step 568."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again away cancel_tx cancelled censor close closing crash cut delayed disk_full doubled elsewhere late
ledger lost no_logs offers outside power reorg rpc_down rpc_fork rpc_hops rpc_lag rpc_limit
rpc_nonsense signer slow_chain stalled twist unsent wrapped
"""
KEPT = """
41 44 121 127 128 131 133 137 158 162 165 213
"""


def test_run_668977895608_holds():
    case = Case(
        668977895608,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="fleet",
        version=3,
        flavour="mixed",
    )
    assert play(case).violations == []

"""Found by the simulator: error-SendFailed, at step 29."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again cancel_tx censor close closing crash cut delayed disk_full doubled elsewhere ledger lost
no_logs outside owner power reorg rpc_down rpc_fork rpc_hops rpc_lag rpc_limit rpc_nonsense signer
slow_chain stalled twist unsent wrapped
"""
KEPT = """
14 17
"""


def test_run_766184978100_holds():
    case = Case(
        766184978100,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="midnight",
    )
    assert play(case).violations == []

"""Found by the simulator: false-alarm, at step 272."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again cancel_tx cancelled censor clock close closing crash cut delayed disk_full doubled elsewhere
late ledger lost no_logs offers outside owner power reorg rpc_down rpc_fork rpc_lag rpc_limit
rpc_nonsense signer slow_chain stalled twist unsent
"""
KEPT = """
3 4 72 146
"""


def test_run_138984615155_holds():
    case = Case(
        138984615155,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="nodes",
    )
    assert play(case).violations == []

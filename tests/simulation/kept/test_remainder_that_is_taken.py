"""A remainder that an undone block had left, and the next one took, was still summed with those of others (a false alarm)."""

from x402guard.testing.simulator import Case, play

OFF = """
again away cancel_tx cancelled censor clock close closing crash cut delayed disk_full doubled late
ledger lost no_logs outside owner power redirects rpc_down rpc_elsewhere rpc_fork rpc_lag rpc_lies
rpc_limit rpc_nonsense signer stalled unsent wrapped
"""
KEPT = """
0 1 2 3 10 12 15 16 35 37 38 44 45 46 52 56 98 109
"""


def test_run_470796066058_holds():
    case = Case(
        470796066058, 400, off=frozenset(OFF.split()), kept=tuple(map(int, KEPT.split())), store="memory", version=3
    )
    assert play(case).violations == []

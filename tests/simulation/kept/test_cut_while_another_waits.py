"""Found by the simulator: second-payment, at step 345."""

from x402guard.testing.simulator import Case, play

OFF = """
again away cancel_tx cancelled censor close closing crash delayed disk_full doubled late lost
no_logs offers outside owner power redirects reorg rpc_down rpc_elsewhere rpc_fork rpc_hops rpc_lag
rpc_lies rpc_limit rpc_nonsense signer slow_chain stalled twist unsent wrapped
"""
KEPT = """
254 310 313 321
"""


def test_run_1670002540_holds():
    case = Case(
        1670002540,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="busy",
    )
    assert play(case).violations == []

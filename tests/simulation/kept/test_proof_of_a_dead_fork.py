"""Found by the simulator: false-alarm, at step 1,824."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again cancel_tx censor clock close closing crash cut disk_full late ledger no_logs owner power
rpc_down rpc_lag rpc_limit slow_chain twist
"""
KEPT = """
0 1 4 6 8 9 16 20 22 27 28 30 31 32 34 39 49 51 52 57 62 66 73 87 92 96 100 101 104 109 114 115 124
143 149 152 155 156 157 162 170 177
"""


def test_run_766184976151_holds():
    case = Case(
        766184976151,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="midnight",
    )
    assert play(case).violations == []

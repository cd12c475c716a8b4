"""Found by the simulator: one node named the final block, another one had no logs of it, and a theft was never told."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again cancel_tx cancelled censor close closing cut delayed late lost offers power reorg rpc_down
rpc_lag rpc_limit rpc_nonsense signer slow_chain twist wrapped
"""
KEPT = """
6 7 8 9 12 13 14 18 19 20 23 24 25 26 44 45 61 62 65 66 77 78 82 88 89 90 105 106 107 116 119 124
125 126 132 140 141 148 199 200 201 202 203 210 211 212 235 239 240 241 242 243 256 260 261 262 266
267 268 269 270 271 272 282 283 284 285 286 287 288 289 302 303 304
"""


def test_run_5020_holds():
    case = Case(
        5020,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="mixed",
    )
    assert play(case).violations == []

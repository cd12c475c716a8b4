"""Found by the simulator: one node named the block that was final, another one what had used a nonce before it."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again away cancel_tx cancelled censor clock close closing crash delayed disk_full doubled late
ledger no_logs offers outside owner power rpc_down rpc_limit rpc_nonsense signer slow_chain stalled
wrapped
"""
KEPT = """
57 58 59 90 93 94 106 107 164 165 166 167 176 177 185 191 192 211 212 213 214 215 216 217 218 219
220 221 254 255 256 257 260 261 268 269 270 271 272 273 276 277 280 281 282 283 284 285 292 293 304
305 306 307 308 309 310 311 312 313 318 322 325 326 327
"""


def test_run_274755949603_holds():
    case = Case(
        274755949603,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="fleet",
        version=3,
        flavour="forks",
    )
    assert play(case).violations == []

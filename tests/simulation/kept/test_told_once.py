"""Found by the simulator: false-alarm, at step 899."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again cancel_tx cancelled censor clock close closing crash cut disk_full doubled elsewhere late
ledger lost no_logs offers owner reorg rpc_down rpc_fork rpc_hops rpc_lag rpc_limit rpc_nonsense
signer stalled twist unsent
"""
KEPT = """
3 9 15 34 94 95 115 165 166 176 226 238 241 244 247 248 253 254 256 257 261 280 281 284 285 286 294
295 297 298 307 339 340
"""


def test_run_264471399055_holds():
    case = Case(
        264471399055,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="mixed",
    )
    assert play(case).violations == []

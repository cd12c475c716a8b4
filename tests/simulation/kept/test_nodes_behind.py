"""Found by the simulator: claim-unchecked, at step 5,032."""

from x402guard.testing.simulator import Case, play

OFF = """
redirects rpc_elsewhere rpc_lies
again cancel_tx cancelled censor clock close closing crash cut delayed disk_full doubled elsewhere
late ledger lost no_logs offers outside owner power rpc_down rpc_fork rpc_hops rpc_lag rpc_limit
rpc_nonsense signer slow_chain stalled twist unsent wrapped
"""
KEPT = """
171 172 174 175 176 177 221 224 234 235 236 239 240 243 257 259 261 262 263 264 270 272 274 275 276
279 280 281 288
"""


def test_run_264471398498_holds():
    case = Case(
        264471398498,
        400,
        off=frozenset(OFF.split()),
        kept=tuple(map(int, KEPT.split())),
        store="memory",
        version=3,
        flavour="dense",
    )
    assert play(case).violations == []

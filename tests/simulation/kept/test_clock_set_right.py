"""Found by the simulator: cannot-buy, at step 155."""

from x402guard.testing.simulator import Case, play


def test_run_31338_holds():
    case = Case(
        31338,
        400,
        off=frozenset(
            [
                "redirects",
                "rpc_elsewhere",
                "rpc_lies",
                "again",
                "cancel_tx",
                "cancelled",
                "censor",
                "close",
                "closing",
                "cut",
                "delayed",
                "disk_full",
                "doubled",
                "elsewhere",
                "late",
                "ledger",
                "lost",
                "no_logs",
                "offers",
                "outside",
                "owner",
                "power",
                "reorg",
                "rpc_down",
                "rpc_fork",
                "rpc_hops",
                "rpc_lag",
                "rpc_limit",
                "rpc_nonsense",
                "signer",
                "slow_chain",
                "stalled",
                "twist",
                "unsent",
                "wrapped",
            ]
        ),
        kept=(173, 203),
        store="memory",
        version=3,
        flavour="mixed",
    )
    assert play(case).violations == []

"""Found by the simulator: false-alarm, at step 1,336."""

from x402guard.testing.simulator import Case, play


def test_run_31396_holds():
    case = Case(
        31396,
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
                "cut",
                "delayed",
                "disk_full",
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
                "rpc_nonsense",
                "signer",
                "slow_chain",
                "stalled",
                "twist",
                "unsent",
            ]
        ),
        kept=(4, 16, 67, 143, 314, 320, 321, 332, 343, 361, 363, 378),
        store="memory",
        version=3,
        flavour="mixed",
    )
    assert play(case).violations == []

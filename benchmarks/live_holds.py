"""Ten thousand live holds: what a charge and a report cost beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.scenes import on_disk, session
from benchmarks.timing import Figure, interleaved
from tests.support.ledger import a_hold
from x402guard import Session
from x402guard.frozen import replace
from x402guard.ledger.authorize import authorize
from x402guard.ledger.view import LedgerView, Scope

_HOLDS = 10_000
_AT_ONCE = 500


def measure() -> Iterator[Figure]:
    """Yield a charge with and without them in memory, and the report on disk."""
    with session() as empty, session() as full:
        _fill(full)
        found = interleaved({"none": lambda n: _charge(empty, n), "many": lambda n: _charge(full, n)}, warm=250)
        ratio = found["many"].least / found["none"].least
        peer = f"{found['many'].least:.0f} ÷ {found['none'].least:.0f} µs"
        yield Figure("charge beside 10,000 live holds ÷ none, memory", ratio, "×", "1", peer)
    with on_disk() as url, session(url) as payer:
        _fill(payer)
        began = time.perf_counter()
        payer.report()
        yield Figure("report beside 10,000 live holds, disk", (time.perf_counter() - began) * 1000, "ms", "≤ 300")


def _charge(payer: Session, number: int) -> None:
    payer.charge(f"tool{number % 200}", "$0.000001", arguments={"n": number})


def _fill(payer: Session) -> None:
    until = int(time.time()) + 86_400
    for start in range(0, _HOLDS, _AT_ONCE):
        holds = [
            replace(a_hold(f"{number:064x}", "$0.01", node=payer.id), deadline_unix=until)
            for number in range(start, start + _AT_ONCE)
        ]

        def change(view: LedgerView, holds: list = holds) -> None:
            for each in holds:
                authorize(view, each, {"kind": str(each.kind)})

        payer.shell.store.transact(
            Scope(nodes=(payer.id,), holds=tuple(each.id for each in holds), durable=True), change
        )

"""Brings the times that guards have noted back to the present, after a clock that was ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from x402guard.kernel.change_set import MarkKey
from x402guard.ledger.store import LedgerReads
from x402guard.ledger.view import LedgerView
from x402guard.policy.prices import PRICES
from x402guard.policy.windows import NEW_PAYEES, SELLER, VELOCITY, bucket_ms

_BREAKER: Final = "breaker"
_TIMES: Final = ("failed_ms", "opened_ms", "tried_ms")


def stamps_ahead(ledger: LedgerReads) -> tuple[MarkKey, ...]:
    """Return the keys of the rows of breakers, prices and velocity that hold a time in the future.

    They would refuse honest calls until that time comes. Loops and spikes pass over such rows by themselves.
    """
    now_ms = ledger.now_ms()
    return tuple(
        (kind, name)
        for kind in (_BREAKER, PRICES, VELOCITY, NEW_PAYEES, SELLER)
        for name, row in ledger.marks(kind, "").items()
        if brought_back((kind, name), row, now_ms) != row
    )


def bring_back(view: LedgerView, keys: tuple[MarkKey, ...]) -> None:
    """Take the times in these rows that are in the future for the present. What they count still counts."""
    for key in keys:
        row = view.mark(key)
        if row is not None:
            view.put_mark(key, brought_back(key, row, view.clock_ms))


def brought_back(key: MarkKey, row: Mapping[str, Any], now_ms: int) -> dict[str, Any]:
    """Return a row without times after *now_ms* (unix milliseconds)."""
    kind = key[0]
    if kind == _BREAKER:
        return {**row, **{each: min(row[each], now_ms) for each in _TIMES if row.get(each) is not None}}
    if kind == PRICES:
        return {
            **row,
            "prices": _prices(row["prices"], now_ms),
            **(
                {"classes": {label: _prices(own, now_ms) for label, own in row["classes"].items()}}
                if "classes" in row
                else {}
            ),
            **({"models": [min(at_ms, now_ms) for at_ms in row["models"]]} if "models" in row else {}),
        }
    now, sums = now_ms // bucket_ms(key), dict[str, list[int]]()
    for at, (spent, made) in row["buckets"].items():
        before = sums.get(slot := str(min(int(at), now)), [0, 0])
        sums[slot] = [before[0] + spent, before[1] + made]
    return {**row, "now": min(int(row["now"]), now), "buckets": sums}


def _prices(prices: list[list[int]], now_ms: int) -> list[list[int]]:
    return [[price, min(at_ms, now_ms), *more] for price, at_ms, *more in prices]

"""Rings of buckets: what was spent and how often within a minute, an hour or a day.

Windows only move forward. An amount may count up to one bucket too long, and never too short.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Nanos
from x402guard.ledger.view import LedgerView

WINDOWS: Final[Mapping[str, tuple[int, int]]] = {"minute": (5, 12), "hour": (60, 60), "day": (3600, 24)}
"""Window → (seconds of a bucket, buckets)."""
VELOCITY: Final = "velocity"
"""The kind of the marks with what a run has spent in a window. Their keys end with its name."""
NEW_PAYEES: Final = "new_payees"
"""The kind of the marks with how many new sellers a run has paid within a day, and new payees of one."""
SELLER: Final = "seller"
"""The kind of the marks with what a whole ledger has spent at the hosts of a pattern within a day."""


def _ring(view: LedgerView, key: MarkKey, window: str) -> tuple[int, dict[str, list[int]]]:
    seconds, count = WINDOWS[window]
    row: Mapping[str, Any] = view.mark(key) or {"now": 0, "buckets": {}}
    now = max(view.now_ms // (seconds * 1000), int(row["now"]))  # a window never moves back
    return now, {at: sums for at, sums in row["buckets"].items() if int(at) >= now - count}


def sums_in(view: LedgerView, key: MarkKey, window: str) -> tuple[int, int]:
    """Return the nano-dollars and the calls that count in a window now."""
    if view.mark(key) is None:
        return 0, 0
    _, buckets = _ring(view, key, window)
    return sum(map(itemgetter(0), buckets.values())), sum(map(itemgetter(1), buckets.values()))


def bucket_ms(key: MarkKey) -> int:
    """Return the length of one bucket of a ring, in milliseconds; without a window in its key it is one of a day."""
    kind, name = key
    window = "day" if kind in (NEW_PAYEES, SELLER) else name.rpartition(" ")[2]
    return WINDOWS.get(window, WINDOWS["day"])[0] * 1000


def counted_within(row: Mapping[str, Any], name: str, now_ms: int) -> tuple[int, int]:
    """Return the nano-dollars and the calls of a ring that still count at *now_ms*; none of an empty row.

    *name* is the key of the ring, which ends with its window.
    """
    seconds, count = WINDOWS[name.rpartition(" ")[2]]
    first = now_ms // (seconds * 1000) - count
    sums = [bucket for at, bucket in row.get("buckets", {}).items() if int(at) >= first]
    return sum(map(itemgetter(0), sums)), sum(map(itemgetter(1), sums))


def add(view: LedgerView, key: MarkKey, window: str, amount: Nanos) -> None:
    """Count a step of *amount* nano-dollars in a window."""
    now, buckets = _ring(view, key, window)
    spent, made = buckets.get(str(now), [0, 0])
    view.put_mark(key, {"now": now, "buckets": {**buckets, str(now): [spent + amount, made + 1]}})


def remove(view: LedgerView, key: MarkKey, window: str, amount: Nanos, at_ms: int) -> None:
    """Take a step of *at_ms* (unix milliseconds) out of a window, if its bucket is still there."""
    seconds, _ = WINDOWS[window]
    now, buckets = _ring(view, key, window)
    at = str(at_ms // (seconds * 1000))
    if at in buckets:
        spent, made = buckets[at]
        view.put_mark(key, {"now": now, "buckets": {**buckets, at: [max(0, spent - amount), max(0, made - 1)]}})


def wait_s(view: LedgerView, key: MarkKey, window: str) -> int | None:
    """Return after how many seconds the oldest of what counts in a window counts no more; it may still be too much then."""
    seconds, count = WINDOWS[window]
    _, buckets = _ring(view, key, window)
    oldest = min((int(at) for at, (_, made) in buckets.items() if made), default=None)
    return None if oldest is None else max(1, (oldest + count + 1) * seconds - view.now_ms // 1000)

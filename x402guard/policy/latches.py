"""Latches: what guards have seen and hold against later calls until it ages, and how an owner clears it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import WALLET
from x402guard.ledger.authorize import Latch
from x402guard.ledger.store import LedgerReads
from x402guard.ledger.view import LedgerView
from x402guard.policy.windows import bucket_ms

LATCH_CLEARED: Final = "latch_cleared"
"""The event of a latch that its owner has cleared."""

_DAY_MS: Final = 86_400_000

_CLEARED: Final[Mapping[str, tuple[str, object]]] = {
    "look_alike_host": ("host", ""),
    "version_downgrade": ("v2", False),
    "payee_change": ("paid", False),
    "facilitators": ("facilitators", []),
    "upto_at_ceiling": ("full", []),
    "new_payees_per_day": ("buckets", {}),
    "price_ratio": ("prices", []),
    "breaker_open": ("opened_ms", None),
    "needs_review": ("nanos", 0),
}
"""Rule → the field of its mark that refuses, and the value with which it refuses nothing."""


class HeldLatch(Struct, frozen=True):
    """A latch that has refused a call and would refuse the next one.

    Attributes:
        id: its name for ``Owner.clear_latch``.
        rule, reason: of the last refusal because of it.
        key: of the mark that holds it.
        session: where that refusal was.
        since_ms: when what it holds was seen, in unix milliseconds: first for a window, last for a host or an origin.
        refused_ms, ends_ms: when it has refused last, and when it ages (None: never), in unix milliseconds.
    """

    id: str
    rule: str
    reason: str
    key: MarkKey
    session: str
    since_ms: int
    refused_ms: int
    ends_ms: int | None


def seen(view: LedgerView, key: MarkKey, days: int | None) -> Mapping[str, Any] | None:
    """Return the mark of what was seen within *days*, or None. It ages by its ``at_ms``; with None it does not."""
    row = view.mark(key)
    if row is None:
        return None
    at_ms = row.get("at_ms")
    if at_ms is None or at_ms > view.now_ms:  # of an earlier version, or of a clock that was ahead: it ages from now on
        at_ms = view.now_ms
        view.put_mark(key, row := {**row, "at_ms": at_ms})
    return row if days is None or view.now_ms - at_ms <= days * _DAY_MS else None


def seen_at(view: LedgerView, row: Mapping[str, Any] | None) -> int:
    """Return the ``at_ms`` of what is seen again: that of its mark for a day, so that few payments write it."""
    at_ms = 0 if row is None else row.get("at_ms") or 0
    return at_ms if 0 <= view.now_ms - at_ms < _DAY_MS else view.now_ms


def aging(key: MarkKey, row: Mapping[str, Any], days: int | None) -> Latch:
    """Return the latch of a mark that ages by its ``at_ms``."""
    return Latch(key, None if days is None else int(row["at_ms"]) + days * _DAY_MS)


def latches_of(ledger: LedgerReads, refusals: Mapping[str, Mapping[str, Any]] | None = None) -> list[HeldLatch]:
    """Return the latches that would refuse the next call, the last refusal first.

    *refusals* are rows of refusals by key; by default all that the ledger has kept.
    """
    found: dict[str, HeldLatch] = {}
    rows, now_ms = ledger.marks("refusal", "") if refusals is None else refusals, ledger.now_ms()
    for name, row in sorted(rows.items(), key=lambda item: -int(item[1]["at_ms"])):
        if row.get("latch") is None:
            continue
        kind, key, ends_ms = row["latch"]
        rule = row["rule"]
        latch_id = hashlib.sha256(f"{rule} {kind} {key}".encode()).hexdigest()[:12]
        if latch_id in found or (ends_ms is not None and now_ms >= ends_ms):
            continue
        mark = ledger.marks(kind, key).get(key)
        if mark is not None and mark.get(_CLEARED[rule][0]):
            found[latch_id] = HeldLatch(
                id=latch_id,
                rule=rule,
                reason=row["reason"],
                key=(kind, key),
                session=name.partition(" ")[0],
                since_ms=_since_ms((kind, key), mark),
                refused_ms=int(row["at_ms"]),
                ends_ms=ends_ms,
            )
    return list(found.values())


def _since_ms(key: MarkKey, row: Mapping[str, Any]) -> int:
    if "buckets" in row:
        return min(map(int, row["buckets"])) * bucket_ms(key)
    if "prices" in row:
        return min(int(price[1]) for price in row["prices"])
    return int(row.get("opened_ms") or row.get("since_ms") or row.get("at_ms") or 0)


def clear(view: LedgerView, latch: HeldLatch, by: str) -> None:
    """Clear a latch: its mark refuses nothing until something is seen again. The journal keeps who did it."""
    field, nothing = _CLEARED[latch.rule]
    row = view.mark(latch.key)
    if row is not None:
        view.put_mark(latch.key, {**row, field: nothing})
        view.record(WALLET, "event", facts={"name": LATCH_CLEARED, "rule": latch.rule, "why": latch.reason, "by": by})

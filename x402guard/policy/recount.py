"""Counts the steps of a ledger again, from its journals, and compares with what its guards have counted.

The counters are rows beside the journals, which no hash covers. They depend on the policy, which no journal has, so the
owner says under which one to count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from x402guard.ledger.model import Entry, HoldKind
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.money import Nanos, format_dollars
from x402guard.policy.counts import Counts
from x402guard.policy.settings import Policy
from x402guard.policy.steps import Step, short_route
from x402guard.policy.velocity import Velocity, counted_within

COUNTERS: Final = ("steps", "calls", "paid_to", "payee", "velocity")
"""The kinds of marks that follow from the journals alone. Rings of the last minute and the ends of calls do not."""

_COUNTING: Final = (Counts, Velocity)


def recount(policy: Policy, entries: Iterable[Entry]) -> dict[MarkKey, Mapping[str, Any]]:
    """Return the least that the guards of a policy have counted for the holds of a ledger, by the keys of their rows.

    *entries* are those of the events ``STEPS`` of all journals, oldest first. A void gives its step back, as most do. A
    payee whose payment was given back is counted as new no second time, and its own row is left out.
    """
    guards = [guard for guard in policy.guards if isinstance(guard, _COUNTING)]
    rows: dict[MarkKey, Mapping[str, Any]] = {}
    begun: dict[str | None, tuple[Step, int]] = {}
    given_back: set[MarkKey] = set()
    for entry in entries:
        is_new = entry.event == "authorize"
        step = _step(entry) if is_new else None
        if step is not None:
            begun[entry.hold_id] = step, entry.at_ms
        known = begun.get(entry.hold_id) if is_new else begun.pop(entry.hold_id, None)
        if known is None:
            continue
        step, at_ms = known
        for guard in guards:
            keys = guard.marks(step, (step.payee,) if step.payee else (), ending=False)
            view = LedgerView(now_ms=entry.at_ms, marks={key: rows[key] for key in keys if key in rows})
            if is_new:
                guard.taken(view, step, entry.hold_id or "")
            else:
                guard.given_back(view, step, at_ms)
            changed = dict(view.mark_rows())
            if not is_new:
                given_back |= {key for key in changed if key[0] == "payee"}
                changed = {key: row for key, row in changed.items() if key[0] != "payee"}
            rows |= changed
    return {key: row for key, row in rows.items() if key not in given_back}


def _step(entry: Entry) -> Step | None:
    """Return the step that a hold was written for; None for one that no guard counts."""
    facts = entry.facts()
    kind = facts.get("kind")
    if kind not in (HoldKind.PAYMENT, HoldKind.LLM, HoldKind.TOOL) or facts.get("recorded"):
        return None  # a recorded call that is a loop is in the journal and not counted
    method, _, url = str(facts.get("request") or "").partition(" ")
    name = str(facts.get("tool") or facts.get("model") or "")
    if method:
        name = short_route(method, str(facts.get("host") or ""), urlsplit(url).path)
    amount = 0 if entry.held == 1 else entry.held  # a call that is free is held for with the least amount
    return Step(HoldKind(kind), name, "", entry.node_id, Nanos(amount), str(facts.get("payee") or ""), priced=True)


def understated(
    counted: Mapping[MarkKey, Mapping[str, Any]],
    rows: Mapping[MarkKey, Mapping[str, Any]],
    now_ms: int,
) -> list[str]:
    """Return a sentence for each row that says less than what was *counted*, and so lets more pass.

    *rows* are those of the ledger, and *now_ms* its time: what has left its window is not compared.
    """
    found = (_understated(key, value, rows.get(key) or {}, now_ms) for key, value in sorted(counted.items()))
    return [sentence for sentences in found for sentence in sentences]


def _understated(key: MarkKey, counted: Mapping[str, Any], row: Mapping[str, Any], now_ms: int) -> Iterator[str]:
    kind, name = key
    where = f"counter {kind} {name!r}"
    for field, shown in _PLAIN.get(kind, ()):
        is_less = row.get(field) is None if kind == "payee" else int(row.get(field) or 0) < int(counted[field])
        if counted[field] is not None and is_less:
            yield f"{where} says {shown(row.get(field))}, and the journals say {shown(counted[field])}"
    # Which run or host was the first to name a payee cannot be told within one millisecond.
    if kind == "velocity" and not name.startswith(("new payees of ", "new payees at ")):
        says, known = counted_within(row, key, now_ms), counted_within(counted, key, now_ms)
        if says[0] < known[0] or says[1] < known[1]:
            yield f"{where} says {_sums(*says)}, and the journals say {_sums(*known)}"


def _sums(nanos: int, calls: int) -> str:
    return f"${format_dollars(Nanos(nanos))} in {calls} calls"


def _dollars(nanos: int | None) -> str:
    return f"${format_dollars(Nanos(nanos or 0))}"


def _number(count: int | None) -> str:
    return str(count or 0)


def _payee(since_ms: int | None) -> str:
    return "that it was never paid" if since_ms is None else "that it was"


_PLAIN: Final[Mapping[str, tuple[tuple[str, Callable[[int | None], str]], ...]]] = {
    "steps": (("count", _number),),
    "calls": (("count", _number),),
    "paid_to": (("nanos", _dollars),),
    "payee": (("since", _payee),),
}

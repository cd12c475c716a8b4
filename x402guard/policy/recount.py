"""Counts the steps of a ledger again, from its journals, and compares with what its guards have counted.

The counters are rows beside the journals, which no hash covers. They depend on the policy, which no journal has, so the
owner says under which one to count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Entry, HoldKind, Nanos
from x402guard.ledger.store import LedgerReads
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars
from x402guard.policy.counts import Counts
from x402guard.policy.sellers import SellerLimits
from x402guard.policy.settings import Policy
from x402guard.policy.steps import Step, short_route, whole_routes
from x402guard.policy.velocity import Velocity
from x402guard.policy.windows import VELOCITY, counted_within

_COUNTING: Final = (Counts, Velocity, SellerLimits)


def too_low(policy: Policy, entries: Iterable[Entry], ledger: LedgerReads) -> list[str]:
    """Return a sentence for each counter of a ledger that says less than its journals, and so lets more pass.

    *entries* are those with the events ``STEPS`` of all journals, in any order; others are passed over. Compared is what
    follows from the journals alone: steps, calls, payees, and what has not left its window. Rings of the last minute and
    the ends of calls do not.
    """
    counted = _count_again(policy, sorted(entries, key=lambda entry: (entry.at_ms, entry.node_id, entry.seq)))
    kinds = {kind for kind, _ in counted}
    rows = {(kind, key): row for kind in kinds for key, row in ledger.marks(kind, "").items()}
    now_ms = ledger.now_ms()
    found = {key: _compare(key, counted[key], rows.get(key, {}), now_ms) for key in sorted(counted)}
    return [f"counter {kind} {name!r} {said}" for (kind, name), said in found.items() if said]


def _count_again(policy: Policy, entries: Iterable[Entry]) -> dict[MarkKey, Mapping[str, Any]]:
    """Return the least that the guards of a policy have counted, by the keys of their rows. Entries are oldest first.

    A void gives its step back, as most do. A payee whose payment was given back is counted as new no second time, and
    its own row is left out.
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
        known = (
            begun.get(entry.hold_id) if is_new else begun.pop(entry.hold_id, None) if entry.event == "void" else None
        )
        if known is None:
            continue
        step, at_ms = known
        for guard in guards:
            keys = guard.marks(step, (step.payee,) if step.payee else (), ending=False)
            view = LedgerView.of_marks(entry.at_ms, {key: rows[key] for key in keys if key in rows})
            if is_new:
                guard.taken(view, step, entry.hold_id or "")
            else:
                guard.given_back(view, step, at_ms)
            for key, row in view.change_set(durable=True).marks:
                if is_new or key[0] != "payee":
                    rows[key] = row
                else:
                    given_back.add(key)
    return {key: row for key, row in rows.items() if key not in given_back}


def _step(entry: Entry) -> Step | None:
    """Return the step that a hold was written for; None for one that no guard counts."""
    facts = entry.facts()
    kind = facts.get("kind")
    if kind not in (HoldKind.PAYMENT, HoldKind.LLM, HoldKind.TOOL) or facts.get("recorded"):
        return None  # a recorded call that is a loop is in the journal and not counted
    method, _, url = str(facts.get("request") or "").partition(" ")
    routes: tuple[str, ...] = ()
    name = str(facts.get("tool") or facts.get("model") or "")
    if method:
        where = (method, str(facts.get("host") or ""), urlsplit(url).path)
        name, routes = short_route(*where), whole_routes(*where)
    amount = 0 if entry.held == 1 else entry.held  # a call that is free is held for with the least amount
    payee = str(facts.get("payee") or "")
    return Step(HoldKind(kind), name, "", entry.node_id, Nanos(amount), payee, priced=True, routes=routes)


def _compare(key: MarkKey, counted: Mapping[str, Any], row: Mapping[str, Any], now_ms: int) -> str:
    """Return what a row says and what was *counted*, if the row says less; else ""."""
    kind, name = key
    if kind == "payee":
        return "" if row.get("since") is not None else "says that it was never paid, and the journals say that it was"
    if kind in _NUMBERS:
        field, shown = _NUMBERS[kind]
        says, known = int(row.get(field, 0)), int(counted[field])
        return f"says {shown(says)}, and the journals say {shown(known)}" if says < known else ""
    # Which run was the first to name a payee, or which price came last, cannot be told within one millisecond.
    if kind != VELOCITY:
        return ""
    said, seen = counted_within(row, name, now_ms), counted_within(counted, name, now_ms)
    is_less = said[0] < seen[0] or said[1] < seen[1]
    return f"says {_sums(*said)}, and the journals say {_sums(*seen)}" if is_less else ""


def _sums(nanos: int, calls: int) -> str:
    return f"{_dollars(nanos)} in {calls} calls"


def _dollars(nanos: int) -> str:
    return f"${format_dollars(nanos)}"


_NUMBERS: Final[Mapping[str, tuple[str, Callable[[int], str]]]] = {
    "steps": ("count", str),
    "calls": ("count", str),
    "paid_to": ("nanos", _dollars),
}

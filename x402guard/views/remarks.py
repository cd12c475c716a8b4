"""Says in sentences what a report has beside its sums: schemes, allowances, spikes, questions, shadow mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from x402guard.ledger.authorize import WOULD_REFUSE
from x402guard.money import format_dollars
from x402guard.views.books import Books
from x402guard.views.model import Remark
from x402guard.views.taken import Period, Taken
from x402guard.views.words import dollars

_MOST: Final = 20


def remarks_of(books: Books, found: Sequence[Taken], period: Period) -> tuple[Remark, ...]:
    """Return what is to be said beside the sums, a sentence each."""
    entries = sorted((each for each in books.entries if each.event == "event"), key=lambda entry: entry.at_ms)
    events = [entry.facts() for entry in entries if period.holds(entry.at_ms)]
    return (
        *_forgotten(books.forgotten),
        *_corrected(found),
        *_schemes(found),
        *_disputed(found),
        *_allowances(books.allowances),
        *_of_events(events),
        *_shadow(shadow_of(books, period)),
    )


def _forgotten(gone: tuple[int, int]) -> Iterable[Remark]:
    count, nanos = gone
    if count:
        yield Remark(
            "forgotten",
            f"{count:,} sessions that have ended are forgotten (memory_sessions); the {dollars(nanos)} that they captured are in "
            "what is spent, and in no list",
        )


def _corrected(found: Iterable[Taken]) -> Iterable[Remark]:
    later = [one.captured for one in found if not one.is_call]
    if later:
        yield Remark("corrected", f"{dollars(sum(later))} is what calls from before this time were corrected by, in it")


def _schemes(found: Iterable[Taken]) -> Iterable[Remark]:
    schemes: dict[str, int] = {}
    for one in found:
        if one.kind == "payment" and one.captured:
            name = str(one.facts.get("scheme") or "unknown")
            schemes[name] = schemes.get(name, 0) + one.captured
    if schemes:
        yield Remark("schemes", ", ".join(f"{name} {dollars(sum_)}" for name, sum_ in sorted(schemes.items())))


def _disputed(found: Iterable[Taken]) -> Iterable[Remark]:
    if disputed := sum(one.line.disputed for one in found):
        yield Remark("disputed", f"${format_dollars(disputed)} more than was booked is claimed for LLM calls")
    # Of the whole payment, and as it stands now: what of it was captured in one period says nothing of its remainder.
    exposed = {
        one.line.hold_id: one.line for one in found if one.kind == "payment" and one.line.evidence == "chain_head"
    }
    at_risk = sum(int(line.facts["amount"]) - line.captured for line in exposed.values())
    if at_risk:
        yield Remark("reorg", f"${format_dollars(at_risk)} of remainders is in use before its blocks are final")


def _allowances(rows: Iterable[Mapping[str, Any]]) -> Iterable[Remark]:
    for row in rows:
        seen = datetime.fromtimestamp(row["at_ms"] / 1000, UTC)
        words = (
            f"Permit2 may move ${format_dollars(row['exposed'])} of {row['symbol']} on {row['network']}, by signature "
            f"(as reconcile saw it at {seen:%Y-%m-%d %H:%M} UTC)"
        )
        yield Remark("allowance", words)


def _of_events(events: Sequence[Mapping[str, Any]]) -> list[Remark]:
    found, waits = [], dict[str, list[int]]()
    for facts in events:
        name = facts.get("name")
        if name == "unmetered":
            fix = "add its host to Metering(endpoints=…), or list it as free"
            found.append(Remark("unmetered", f"{facts['place']} looks like an LLM call but is not held: {fix}"))
        elif name == "slot_waited":
            waits.setdefault(str(facts["place"]), []).append(int(facts["seconds"]))
        elif name in ("spend_spike", "token_spike"):
            found.append(Remark("spike", str(facts["reason"])))
    for place, seconds in waits.items():
        calls = "1 call" if len(seconds) == 1 else f"{len(seconds)} calls"
        found.append(
            Remark("waited", f"{calls} waited for a slot of {place}, the longest {max(seconds)} s (policy.bulkhead)")
        )
    found = found[-_MOST:]
    answers = [facts for facts in events if facts.get("name") == "approval"]
    if answers:
        allowed, last = sum(1 for facts in answers if facts["allowed"]), answers[-1]
        by = f" by {', '.join(last['by'])}" if last["by"] else ""
        word = "allowed" if last["allowed"] else "denied"
        counts = f"{allowed} × allowed, {len(answers) - allowed} × denied"
        found.append(Remark("asked", f"{counts}; the last, {last['what']}: {word}{by}"))
    return found


class Shadow:
    """What passed in shadow mode although a rule would have refused it: by rule, with what it counts in nano-dollars."""

    def __init__(self) -> None:
        self.calls = self.total = 0
        self.rules: dict[str, dict[str, Any]] = {}


def shadow_of(books: Books, period: Period) -> Shadow:
    """Return the calls that passed in shadow mode in a period although a rule would have refused them."""
    shadow = Shadow()
    for entry in sorted(books.entries, key=lambda each: each.at_ms):
        facts = entry.facts() if entry.event == "event" and period.holds(entry.at_ms) else {}
        if facts.get("name") != WOULD_REFUSE:
            continue
        line = books.lines.get(entry.hold_id or "")
        amount = 0 if line is None else line.captured + line.held
        row = shadow.rules.setdefault(facts["rule"], {"rule": facts["rule"], "calls": 0, "amount": 0})
        row["calls"], row["amount"], row["reason"] = row["calls"] + 1, row["amount"] + amount, facts["reason"]
        shadow.calls, shadow.total = shadow.calls + 1, shadow.total + amount
    return shadow


def _shadow(shadow: Shadow) -> Iterable[Remark]:
    if not shadow.calls:
        return
    calls = "1 call" if shadow.calls == 1 else f"{shadow.calls} calls"
    yield Remark("shadow", f"with these rules {calls}, ${format_dollars(shadow.total)}, would have been refused:")
    for row in shadow.rules.values():
        last = "" if row["calls"] == 1 else ", the last"
        yield Remark("", f"{row['calls']} × {row['rule']}, ${format_dollars(row['amount'])}{last}: {row['reason']}")

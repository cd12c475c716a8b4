"""Lists what happened and when: the curve of the money, marks on it, a lane for each agent, and the calls."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from x402guard.kernel.rows import NodeKind
from x402guard.money import format_dollars
from x402guard.views.books import Books
from x402guard.views.model import MOST_CALLS, Call, Lane, Mark, Point
from x402guard.views.taken import Home, Period, Refused, Taken

_MOST_POINTS: Final = 600
_MOST_MARKS: Final = 100
_MOST_LANES: Final = 12
_MOST_STROKES: Final = 300
_MARKS: Final = frozenset({"trip", "reset", "limit", "close", "event"})


def series_of(books: Books, found: Sequence[Taken], period: Period) -> tuple[Point, ...]:
    """Return what was spent and held, from moment to moment: at most 600 points, of which each keeps the peak around it."""
    tokens = {node.id for node in books.below if node.kind is NodeKind.TOKENS}
    changes = [
        (entry.at_ms, 0, entry.held)
        for entry in books.entries
        if entry.held and entry.hold_id is not None and entry.node_id not in tokens
    ]
    changes += [
        (max(at_ms, one.line.at_ms), amount, 0)
        for one in found
        for at_ms, amount, _ in (one.line.changes if period.is_all else period.inside(one.line))
    ]
    changes.sort(key=lambda change: change[0])
    spent = held = 0
    points: list[Point] = []
    begun = period.since_ms
    for at_ms, captured, more in changes:
        if period.until_ms is not None and at_ms >= period.until_ms:
            break
        held += more
        if begun is not None and at_ms < begun:
            continue
        if begun is not None and not points:
            points.append(Point(begun, 0, held - more))
        spent += captured
        if points and points[-1].ms == at_ms:
            points[-1] = Point(at_ms, spent, held)
        else:
            points.append(Point(at_ms, spent, held))
    return _thinned(points)


def _thinned(points: list[Point]) -> tuple[Point, ...]:
    if len(points) <= _MOST_POINTS:
        return tuple(points)
    size = -(-len(points) * 2 // _MOST_POINTS)
    kept = [points[0]]
    for start in range(0, len(points), size):
        part = points[start : start + size]
        peak = max(part, key=lambda point: point.spent + point.held)
        kept.extend((peak, part[-1]) if peak is not part[-1] else (peak,))
    return tuple(kept)


def marks_of(books: Books, period: Period) -> list[Mark]:
    """Return the soft limits, trips, resets, changed limits and the end of a period, in order; of many, the last 100."""
    found = []
    for entry in books.entries:
        if entry.event not in _MARKS:
            continue
        facts, name = entry.facts(), books.nodes[entry.node_id].name
        if entry.event == "event":
            if facts.get("name") == "soft_limit" and entry.node_id == books.node_id:
                found.append(
                    Mark(
                        entry.at_ms, "soft_limit", entry.node_id, name, f"{facts['percent']} % of the budget is reached"
                    )
                )
        elif entry.event == "trip":
            found.append(Mark(entry.at_ms, "trip", entry.node_id, name, f"{facts['word']}: {facts['reason']}"))
        elif entry.event == "reset":
            found.append(Mark(entry.at_ms, "reset", entry.node_id, name, f"reset by {facts['by']}"))
        elif entry.event == "limit" and entry.node_id == books.node_id:
            found.append(Mark(entry.at_ms, "limit", entry.node_id, name, _limit_words(facts), facts["to"]))
        elif entry.event == "close" and entry.node_id == books.node_id:
            found.append(Mark(entry.at_ms, "close", entry.node_id, name, "closed"))
    found.sort(key=lambda mark: mark.ms)
    return [mark for mark in found if period.holds(mark.ms)][-_MOST_MARKS:]


def _limit_words(facts: Mapping[str, Any]) -> str:
    was, limit = ("no limit" if facts[key] is None else f"${format_dollars(facts[key])}" for key in ("from", "to"))
    return f"the limit was {was} and is {limit}"


def lanes_of(found: Iterable[Taken], refusals: Iterable[Refused], where: Mapping[str, Home]) -> tuple[Lane, ...]:
    """Return when each agent has made calls and was refused; of many agents, those with the most calls."""
    calls: dict[str, list[int]] = {}
    refused: dict[str, list[tuple[int, int, int, str]]] = {}
    names: dict[str, str] = {}
    for one in found:
        names[one.home.agent] = one.home.agent_name
        calls.setdefault(one.home.agent, []).append(one.line.at_ms)
    for row in refusals:
        home = where[row.node]
        names[home.agent] = home.agent_name
        refused.setdefault(home.agent, []).append((row.first_ms, row.last_ms, row.count, row.rule))
    busiest = sorted(names, key=lambda agent: -len(calls.get(agent, ())) - len(refused.get(agent, ())))[:_MOST_LANES]
    first = {agent: min([*calls.get(agent, ()), *(span[0] for span in refused.get(agent, ()))]) for agent in busiest}
    return tuple(
        Lane(agent, names[agent], _strokes(calls.get(agent, [])), tuple(sorted(refused.get(agent, ()))))
        for agent in sorted(busiest, key=first.__getitem__)
    )


def _strokes(times: list[int]) -> tuple[int, ...]:
    ordered = sorted(times)
    return tuple(ordered[:: -(-len(ordered) // _MOST_STROKES) or 1])


def calls_of(
    books: Books, found: Sequence[Taken], where: Mapping[str, Home], period: Period
) -> tuple[tuple[Call, ...], int]:
    """Return the calls, refusals, stops and resets in order, and how many calls there are in all.

    Of more than 500 calls these are the dearest and the latest; of more than 100 refusals the latest.
    """
    chosen: Iterable[Taken] = found
    if len(found) > MOST_CALLS:
        half = MOST_CALLS // 2
        dear = heapq.nlargest(half, found, key=lambda one: one.captured + one.out)
        late = heapq.nlargest(half, found, key=lambda one: one.line.at_ms)
        chosen = {one.line.hold_id: one for one in (*dear, *late)}.values()
    refused = [_refusal(row, where[row["node"]]) for row in books.samples if period.holds(int(row["at_ms"]))]
    stops = [
        Call(entry.at_ms, home.agent_name, home.session_name, entry.event, entry.facts()["word"], None, "",
             words=str(entry.facts().get("reason") or f"by {entry.facts().get('by')}"))
        for entry in books.entries
        if entry.event in ("trip", "reset") and period.holds(entry.at_ms) and (home := where[entry.node_id])
    ]  # fmt: skip
    listed = [
        *map(_call, chosen),
        *sorted(refused, key=lambda call: call.ms)[-_MOST_MARKS:],
        *sorted(stops, key=lambda call: call.ms)[-_MOST_MARKS:],
    ]
    return tuple(sorted(listed, key=lambda call: call.ms)), sum(one.is_call for one in found)


def _refusal(row: Mapping[str, Any], home: Home) -> Call:
    return Call(
        int(row["at_ms"]), home.agent_name, home.session_name, "refusal", str(row["rule"]), row["requested"], "",
        words=str(row["reason"]),
    )  # fmt: skip


def _call(one: Taken) -> Call:
    line, facts = one.line, one.facts
    method, _, url = str(facts.get("request") or "").partition(" ")
    is_payment = one.kind == "payment"
    return Call(
        ms=line.at_ms,
        agent=one.home.agent_name,
        session=one.home.session_name,
        kind=one.kind,
        to=line.to,
        amount=one.captured + one.out,
        evidence="out" if one.out else one.evidence if line.evidence is not None else "nothing",
        host=str(facts.get("host") or ""),
        path=f"{method} {urlsplit(url).path}".strip() if is_payment else "",
        scheme=str(facts.get("scheme") or ""),
        method=str(facts.get("method") or ""),
        payee=str(facts.get("payee") or ""),
        provider=str(facts.get("provider") or ""),
        tokens_in=line.tokens_in,
        tokens_out=line.tokens_out,
        network=str(facts.get("network") or ""),
        transaction=line.known_transaction,
        hold=line.hold_id,
        words=(line.doubt or "") if one.is_call else "the correction of an earlier call",
    )

"""Builds the view of a session, a named budget, the wallet or a period out of the rows of the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from x402guard.errors import ConfigError
from x402guard.kernel.rows import Node, NodeKind
from x402guard.kernel.windows import window_end_ms
from x402guard.ledger.authorize import BUDGET
from x402guard.ledger.budgets import ACKNOWLEDGED, UNEXPLAINED
from x402guard.ledger.lines import HoldLine, fold_holds
from x402guard.ledger.sessions import COMPLETED, ERROR, NOT_VERIFIED
from x402guard.ledger.token_budget import tokens_left
from x402guard.ledger.tree import path, plain_room, remaining
from x402guard.views import groups
from x402guard.views.books import Books, TokenAccount
from x402guard.views.happened import calls_of, lanes_of, marks_of, series_of
from x402guard.views.model import (
    MOST_ROWS,
    VIEW_SCHEMA,
    Bound,
    Chain,
    Mark,
    Out,
    RefusalRow,
    Row,
    Stop,
    Sums,
    Tokens,
    View,
)
from x402guard.views.remarks import remarks_of
from x402guard.views.taken import Home, Period, Refused, Taken, exposed_until, homes, refusals_in, taken

_MOST_SESSIONS: Final = 20
_MOST_OUT: Final = 200
_DAY_MS: Final = 86_400_000


def build_view(books: Books, *, since_ms: int | None = None, until_ms: int | None = None) -> View:
    """Return the view of the books' node.

    With *since_ms* or *until_ms* (unix milliseconds, the second not included) it is that of the period, with what was
    captured in it. Raises ``ConfigError`` for a period that ends before it begins.
    """
    if since_ms is not None and until_ms is not None and until_ms <= since_ms:
        raise ConfigError("--until: it is not after --since")
    asked = Period(since_ms, until_ms)
    period = _window_of(books.node) if asked.is_all else asked
    where = homes(books)
    found = list(taken(books, period, where))
    sums = groups.Groups(found)
    refused = refusals_in(books, period)
    sums.count_refusals(books, where, refused, period)
    refusals = _refusals(refused, where)
    marks = marks_of(books, period)
    days = _days(books, found, period, refused)
    calls, calls_count = calls_of(books, found, where, period)
    out = sorted((one for one in found if one.out > 0), key=lambda one: _until_ms(one.line))
    view = _frame(books, period, sums.all.sums, _chain(books, found, period))
    sessions = () if _is_session(books.node) else groups.session_rows(books, sums, where, period)
    return replace(
        view,
        customer=where[books.node_id].customer_name if _is_session(books.node) else "",
        stopped=_stop(books, marks),
        stops=() if _is_session(books.node) else _stopped_words(books, sessions, period),
        outstanding=tuple(_out(one) for one in out[:_MOST_OUT]),
        outstanding_count=len(out),
        refusals=refusals,
        refused=sum(row.count for row in refusals),
        kinds=groups.kind_rows(sums),
        agents=groups.agent_rows(books, sums),
        sellers=groups.seller_rows(sums),
        models=groups.named_rows(sums.models),
        tools=groups.named_rows(sums.tools),
        customers=groups.customer_rows(books, sums, where, days),
        sessions=tuple(sessions[:_MOST_SESSIONS]),
        sessions_count=len(sessions),
        days=days.rows(),
        series=series_of(books, found, period),
        marks=tuple(marks),
        lanes=lanes_of(found, refused, where),
        calls=calls,
        calls_count=calls_count,
        tokens=None if books.tokens is None else _tokens(books.tokens),
        remarks=remarks_of(books, found, period),
    )


def _is_session(node: Node) -> bool:
    return node.kind not in (NodeKind.WALLET, NodeKind.BUDGET)


def _frame(books: Books, period: Period, sums: Sums, chain: Chain) -> View:
    """Return what a view says of the node itself and of its limit."""
    node, asked = books.node, not (period.is_all or period.window)
    return View(
        schema=VIEW_SCHEMA,
        kind=str(node.kind),
        id=node.id,
        name=node.name,
        state=books.standing(node),
        now_ms=books.now_ms,
        opened_ms=node.created_ms,
        closed_ms=node.closed_ms,
        since_ms=period.since_ms,
        until_ms=_window_end(node, books.now_ms) if period.window else period.until_ms,
        asked=asked,
        per=None if node.window is None else f"{node.window.per} {node.window.tz}",
        tz=_tz(node),
        customer="",
        wallet=books.payer,
        limit=None if asked else node.limit,
        spent=sums.spent if asked else node.spent,
        spent_total=node.used - node.live,
        left=None if asked else node.room,
        remaining=remaining(books.nodes, node.id),
        bound_by=bound_of(books),
        reserve=node.reserve,
        soft=node.soft,
        chain=chain,
        sums=sums,
    )


def _tz(node: Node) -> str:
    return "UTC" if node.window is None else node.window.tz


def _days(books: Books, found: Sequence[Taken], period: Period, refused: Iterable[Refused]) -> groups.Days:
    """Return the days: with each refusal on its own, as far as it is kept one by one."""
    first_ms, last_ms = _ends(books, period, found)
    is_recent = period.until_ms is None and (period.since_ms is None or last_ms - first_ms >= 2 * _DAY_MS)
    days = groups.Days(groups.Calendar(_tz(books.node), first_ms, last_ms, is_recent=is_recent), found, period)
    for at_ms, _ in _stops(books, period):
        days.stopped(at_ms)
    on_one_day = {
        (row.node, row.rule): row
        for row in refused
        if not row.is_least and days.calendar.name(row.first_ms) == days.calendar.name(row.last_ms)
    }
    for row in on_one_day.values():
        days.refused(row.last_ms, row.count)
    for sample in books.samples:
        if period.holds(int(sample["at_ms"])) and (sample["node"], str(sample["rule"])) not in on_one_day:
            days.refused(int(sample["at_ms"]), 1)
    return days


def _window_of(node: Node) -> Period:
    return Period() if node.window is None else Period(since_ms=node.since_ms, window=True)


def _window_end(node: Node, now_ms: int) -> int | None:
    return None if node.window is None else window_end_ms(node.window, now_ms)


def _ends(books: Books, period: Period, found: Sequence[Taken]) -> tuple[int, int]:
    """Return the first and the last moment of a view, in unix milliseconds."""
    first = min((one.line.at_ms for one in found), default=books.node.created_ms)
    ends = [change[0] for one in found for change in one.line.changes[-1:]]
    last = max([books.node.closed_ms or books.now_ms, *ends])
    return (
        first if period.since_ms is None else min(max(period.since_ms, books.node.created_ms), last),
        last if period.until_ms is None else min(last, period.until_ms - 1),
    )


def _stops(books: Books, period: Period) -> Iterable[tuple[int, str]]:
    """Yield when outermost sessions were stopped, in unix milliseconds, and why."""
    for entry in books.entries:
        if entry.event in ("trip", "close") and period.holds(entry.at_ms) and "/" not in entry.node_id:
            word = entry.facts().get("word" if entry.event == "trip" else "terminated_by")
            is_stop = entry.event == "trip" or word == "budget_exhausted"
            if is_stop and books.nodes[entry.node_id].kind is NodeKind.SESSION:
                yield entry.at_ms, str(word)


_NO_STOPS: Final = frozenset({COMPLETED, ERROR, NOT_VERIFIED})
"""The words of ends that no budget, rule or owner has brought about."""


def _stopped_words(books: Books, sessions: Iterable[Row], period: Period) -> tuple[tuple[str, int], ...]:
    """Return how many sessions were stopped, by the reason: for all time as they stand, in a period as it happened."""
    found = (
        [row.word for row in sessions if row.word and row.word not in _NO_STOPS]
        if period.is_all
        else [word for _, word in _stops(books, period)]
    )
    return tuple(Counter(found).most_common())


def _stop(books: Books, marks: Iterable[Mark]) -> Stop | None:
    """Return why the node can spend no more, in words as well."""
    node, word = books.node, groups.ended_by(books.node)
    if word is None:
        return None
    if word != "budget_exhausted":
        trips = [mark.ms for mark in marks if mark.kind == "trip" and mark.key == node.id]
        return Stop(word, node.trip_reason, trips[-1] if trips else node.closed_ms)
    last = last_short(books)
    if last is None:
        return Stop(word, None, node.closed_ms)
    return Stop(word, str(last["reason"]), int(last["at_ms"]), last["requested"], last["available"])


def last_short(books: Books) -> Mapping[str, Any] | None:
    """Return the last refusal in a node or below because it, or a budget above it, had too little left; or None."""
    above = {node.id for node in path(books.nodes, books.node_id)}
    short = [row for row in books.counters if row["rule"] == BUDGET and row.get("short_of", books.node_id) in above]
    return max(short, key=lambda row: int(row["at_ms"]), default=None)


def bound_of(books: Books) -> Bound | None:
    """Return the budget above that leaves less than the node has left itself; None if there is none."""
    own, *above = path(books.nodes, books.node_id)
    rooms = [(room, node) for node in above if (room := plain_room(node)) is not None]
    if not rooms:
        return None
    left, tightest = min(rooms, key=itemgetter(0))
    own_left = plain_room(own)
    if own_left is not None and own_left <= left:
        return None
    return Bound(str(tightest.kind), tightest.id, tightest.name, max(0, left))


def _refusals(refused: Iterable[Refused], where: Mapping[str, Home]) -> tuple[RefusalRow, ...]:
    """Return one row for each rule, the most frequent first."""
    found: dict[str, list[Refused]] = {}
    for row in refused:
        found.setdefault(row.rule, []).append(row)
    made = []
    for rule, of_rule in found.items():
        last = max(of_rule, key=lambda row: row.last_ms)
        made.append(
            RefusalRow(
                rule=rule,
                count=sum(row.count for row in of_rule),
                first_ms=min(row.first_ms for row in of_rule),
                last_ms=last.last_ms,
                requested=last.requested,
                available=last.available,
                reason=last.reason,
                agents=tuple(dict.fromkeys(where[row.node].agent_name for row in of_rule))[:MOST_ROWS],
                is_least=any(row.is_least for row in of_rule),
            )
        )
    return tuple(sorted(made, key=lambda row: (-row.count, row.rule)))


def _chain(books: Books, found: Sequence[Taken], period: Period) -> Chain:
    payments = [one for one in found if one.kind == "payment" and one.captured and one.is_call]
    counts = Counter(one.evidence for one in payments)
    networks = dict.fromkeys(str(one.facts.get("network") or "") for one in found if one.kind == "payment")
    events = [(entry.at_ms, entry.facts()) for entry in books.entries if entry.event == "event"]
    known = {facts["id"] for _, facts in events if facts.get("name") == ACKNOWLEDGED}
    foreign = [
        facts
        for at_ms, facts in events
        if period.holds(at_ms) and facts.get("name") == UNEXPLAINED and facts.get("id") not in known
    ]
    return Chain(
        payments=len(payments),
        proven=counts["proven"],
        claimed=counts["claimed"],
        assumed=counts["assumed"],
        networks=tuple(networks),
        asked_ms=books.scanned_ms,
        unexplained=len(foreign),
        unexplained_amount=sum(int(facts.get("amount") or 0) for facts in foreign),
    )


def _out(one: Taken) -> Out:
    facts, home = one.facts, one.home
    method, _, url = str(facts.get("request") or "").partition(" ")
    return Out(
        hold=one.line.hold_id,
        kind=one.kind,
        amount=one.out,
        to=one.line.to,
        payee=str(facts.get("payee") or ""),
        path=f"{method} {urlsplit(url).path}".strip(),
        agent=home.agent_name,
        session=home.session_name,
        customer=home.customer_name,
        why=one.line.doubt,
        until_ms=_until_ms(one.line),
        transaction=one.line.transaction,
        cancellable=facts.get("method") == "eip3009",
    )


def _until_ms(line: HoldLine) -> int:
    return (exposed_until(line.facts.get("deadline"), line.facts.get("method")) or 0) * 1000


def _tokens(account: TokenAccount) -> Tokens:
    llm, by_tool, other = tokens_used(account)
    entries = sorted(account.entries, key=lambda entry: entry.at_ms)
    soft = [entry.facts() for entry in entries if entry.event == "event"]
    limits = [int(facts["soft_tokens"]) for facts in soft if facts.get("name") == "tokens_soft_limit"]
    node = account.node
    return Tokens(
        total=node.limit or 0,
        used=node.captured,
        reserved=node.held,
        left=tokens_left(node),
        rows=tuple((name, count) for name, count in (("llm", llm), *by_tool.items(), ("other", other)) if count),
        soft=limits[-1] if limits else None,
    )


def tokens_used(account: TokenAccount) -> tuple[int, dict[str, int], int]:
    """Return what LLM calls, each tool and all else have used of a token budget."""
    by_tool: dict[str, int] = {}
    llm = sum(entry.captured for entry in account.entries if entry.hold_id is None)
    for line in fold_holds(account.entries).values():
        tool = line.facts.get("tool")
        if line.facts.get("llm"):
            llm += line.captured
        elif tool and line.captured:
            by_tool[tool] = by_tool.get(tool, 0) + line.captured
    return llm, dict(sorted(by_tool.items())), account.node.captured - llm - sum(by_tool.values())

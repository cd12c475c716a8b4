"""Sums what was used by kind, agent, seller, model, tool, customer and session, and by day."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from x402guard.kernel.rows import Node, NodeKind, NodeState
from x402guard.kernel.windows import zone
from x402guard.ledger.tree import path
from x402guard.views.books import Books
from x402guard.views.model import EVIDENCE, MOST_ROWS, Customer, Day, Row, Sums
from x402guard.views.taken import Home, Period, Refused, Taken

_OUT: Final = EVIDENCE.index("out")
_PLACE: Final = {name: place for place, name in enumerate(EVIDENCE)}
_KINDS: Final = {"payment": "payments", "llm": "models", "tool": "tools"}
_MOST_DAYS: Final = 92
_MOST_AGENTS: Final = 60  # of a tree; more of them are summed by name


@dataclass(slots=True)
class Tally:
    """Sums that grow: by evidence in nano-dollars, with calls and tokens."""

    amounts: list[int] = field(default_factory=lambda: [0] * len(EVIDENCE))
    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    refused: int = 0

    def add(self, one: Taken) -> None:
        """Count a hold."""
        self.amounts[_PLACE[one.evidence]] += one.captured
        self.amounts[_OUT] += one.out
        if one.is_call:
            self.calls += 1
            self.tokens_in += one.line.tokens_in
            self.tokens_out += one.line.tokens_out

    def join(self, other: Tally) -> None:
        """Count what another one has counted."""
        self.amounts = [mine + its for mine, its in zip(self.amounts, other.amounts, strict=True)]
        self.calls += other.calls
        self.tokens_in += other.tokens_in
        self.tokens_out += other.tokens_out
        self.refused += other.refused

    @property
    def sums(self) -> Sums:
        """The amounts."""
        return Sums(*self.amounts)

    def row(self, key: str, name: str, detail: str = "", limit: int | None = None) -> Row:
        """Return it as a row of a group."""
        return Row(key, name, self.sums, self.calls, detail, limit, self.tokens_in, self.tokens_out, self.refused)


class Groups:
    """All sums of a view, out of one pass over what it counts."""

    def __init__(self, found: Iterable[Taken]) -> None:
        self.all = Tally()
        self.kinds: defaultdict[str, Tally] = defaultdict(Tally)
        self.agents: defaultdict[str, Tally] = defaultdict(Tally)
        self.sellers: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        self.models: defaultdict[str, Tally] = defaultdict(Tally)
        self.tools: defaultdict[str, Tally] = defaultdict(Tally)
        self.customers: defaultdict[str, Tally] = defaultdict(Tally)
        self.sessions: defaultdict[str, Tally] = defaultdict(Tally)
        for (kind, name, payee), home, tally in _by_use(found):
            used = self.sellers[name, payee] if kind == "payment" else self._named(kind)[name]
            for each in (
                used, self.all, self.kinds[kind], self.agents[home.agent], self.customers[home.customer],
                self.sessions[home.session],
            ):  # fmt: skip
                each.join(tally)

    def _named(self, kind: str) -> defaultdict[str, Tally]:
        return self.models if kind == "llm" else self.tools

    def count_refusals(
        self, books: Books, where: Mapping[str, Home], refused: Iterable[Refused], period: Period
    ) -> None:
        """Add the refusals to agents, sessions and customers; to models and tools only for all time, as they are kept."""
        for row in refused:
            home = where[row.node]
            for tally in (self.agents[home.agent], self.sessions[home.session], self.customers[home.customer]):
                tally.refused += row.count
        for named in books.refused if period.is_all else ():
            self._named(named["kind"])[str(named["what"])].refused += int(named["count"])


def _by_use(found: Iterable[Taken]) -> Iterator[tuple[tuple[str, str, str], Home, Tally]]:
    """Yield (kind, name, payee), where it belongs and the sums of each use: many calls are few uses."""
    tallies: defaultdict[tuple[str, str, str, str], Tally] = defaultdict(Tally)
    homes: dict[str, Home] = {}
    for one in found:
        payee = str(one.facts.get("payee") or "") if one.kind == "payment" else ""
        tallies[one.kind, one.line.to, payee, one.line.node_id].add(one)
        homes[one.line.node_id] = one.home
    for (kind, name, payee, node_id), tally in tallies.items():
        yield (kind, name, payee), homes[node_id], tally


def dearest(rows: Collection[Row], most: int = MOST_ROWS) -> tuple[Row, ...]:
    """Return the rows, dearest first; those beyond *most* are summed in a last one."""
    ordered = sorted(rows, key=lambda row: (-row.sums.total, -row.calls, -row.refused, row.name))
    if len(ordered) <= most:
        return tuple(ordered)
    rest = Tally()
    for row in ordered[most:]:
        amounts = [amount for _, amount in row.sums.parts()]
        rest.join(Tally(amounts, row.calls, row.tokens_in, row.tokens_out, row.refused))
    return (*ordered[:most], rest.row("", f"and {len(ordered) - most} more"))


def kind_rows(groups: Groups) -> tuple[Row, ...]:
    """Return payments, models and tools, as far as there are any."""
    return tuple(groups.kinds[kind].row(kind, name) for kind, name in _KINDS.items() if kind in groups.kinds)


def seller_rows(groups: Groups) -> tuple[Row, ...]:
    """Return the sellers: host and payee together."""
    return dearest([tally.row(f"{host} {payee}", host, payee) for (host, payee), tally in groups.sellers.items()])


def named_rows(tallies: Mapping[str, Tally]) -> tuple[Row, ...]:
    """Return models or tools."""
    return dearest([tally.row(name, name) for name, tally in tallies.items()])


def agent_rows(books: Books, groups: Groups) -> tuple[Row, ...]:
    """Return the sessions below one as a tree, parents first; below the wallet or a named budget, by name."""
    listed = [books.nodes[node_id] for node_id in dict.fromkeys(books.agents.values())]
    if books.node.kind in (NodeKind.WALLET, NodeKind.BUDGET) or len(listed) > _MOST_AGENTS:
        names: defaultdict[str, Tally] = defaultdict(Tally)
        for node in listed:
            if node.id in groups.agents:
                names[node.name].join(groups.agents[node.id])
        return dearest([tally.row(name, name) for name, tally in names.items()])
    children: dict[str, list[Node]] = {}
    for node in listed:
        above = [each.id for each in path(books.nodes, node.id)[1:] if books.agents.get(each.id) == each.id]
        children.setdefault(above[0] if above and node.id != books.node_id else "", []).append(node)
    rows: list[Row] = []

    def grow(node: Node, depth: int) -> None:
        rows.append(replace(_node_row(books, groups.agents.get(node.id, Tally()), node), depth=depth))
        for child in children.get(node.id, ()):
            grow(child, depth + 1)

    for node in children.get("", ()):
        grow(node, 0)
    return tuple(rows)


def _node_row(books: Books, tally: Tally, node: Node, detail: str = "") -> Row:
    row = tally.row(node.id, node.name, detail, node.limit)
    return replace(row, state=books.standing(node), word=ended_by(node), opened_ms=node.created_ms)


def session_rows(books: Books, groups: Groups, where: Mapping[str, Home], period: Period) -> tuple[Row, ...]:
    """Return every session with all below it, the dearest first."""
    rows = []
    for node_id in dict.fromkeys(home.session for home in where.values()):
        node, home = books.nodes[node_id], where[node_id]
        tally = groups.sessions.get(node_id)
        is_quiet = node.kind is not NodeKind.SESSION or not (period.is_all or period.holds(node.last_ms))
        if tally is None and is_quiet:
            continue
        rows.append(_node_row(books, tally or Tally(), node, home.customer_name))
    return tuple(sorted(rows, key=lambda row: (-row.sums.total, row.opened_ms)))


# -- days -------------------------------------------------------------------------------------------------------------


class Calendar:
    """The days of a view in its time zone; months, if they are many.

    Args:
        tz: the name of a time zone.
        from_ms, to_ms: the first and the last moment, in unix milliseconds.
        is_recent: True if the days reach from yesterday to now, as far as there was anything.
    """

    def __init__(self, tz: str, from_ms: int, to_ms: int, *, is_recent: bool = True) -> None:
        self.is_recent = is_recent
        self._zone = zone(tz)
        first, last = self._date(from_ms), self._date(max(from_ms, to_ms))
        self.has_months = (last - first).days >= _MOST_DAYS
        self._cache: dict[int, str] = {}
        days = (first + dt.timedelta(days=number) for number in range((last - first).days + 1))
        self.names = tuple(dict.fromkeys(self._name(day) for day in days))
        self.today = self._date(to_ms).isoformat()
        self.yesterday = (self._date(to_ms) - dt.timedelta(days=1)).isoformat()

    def name(self, at_ms: int) -> str:
        """Return the day or month of a moment; the first or the last one for a moment beyond them."""
        quarter = at_ms // 900_000  # time zones differ by quarters of an hour
        found = self._cache.get(quarter)
        if found is None:
            found = min(max(self._name(self._date(at_ms)), self.names[0]), self.names[-1])
            self._cache[quarter] = found
        return found

    def date(self, at_ms: int) -> str:
        """Return the day of a moment."""
        return self._date(at_ms).isoformat()

    def _date(self, at_ms: int) -> dt.date:
        return dt.datetime.fromtimestamp(at_ms / 1000, self._zone).date()

    def _name(self, day: dt.date) -> str:
        return f"{day:%Y-%m}" if self.has_months else day.isoformat()


class Days:
    """What was captured on each day, in all and by customer."""

    def __init__(self, calendar: Calendar, found: Iterable[Taken], period: Period) -> None:
        self.calendar = calendar
        self._all = {name: Tally() for name in calendar.names}
        self._customers: dict[str, dict[str, int]] = {}
        self._stops: dict[str, int] = {}
        self._refusals: dict[str, int] = {}
        recent = {calendar.yesterday, calendar.today}
        for one in found:
            days = self._customers.setdefault(one.home.customer, {})
            for at_ms, amount, _ in one.line.changes if period.is_all else period.inside(one.line):
                name = calendar.name(at_ms)
                self._all[name].amounts[_PLACE[one.evidence]] += amount
                days[name] = days.get(name, 0) + amount
                if calendar.has_months and (date := calendar.date(at_ms)) in recent:
                    days[date] = days.get(date, 0) + amount

    def stopped(self, at_ms: int) -> None:
        """Count a session that was stopped."""
        name = self.calendar.name(at_ms)
        self._stops[name] = self._stops.get(name, 0) + 1

    def refused(self, at_ms: int, count: int) -> None:
        """Count refusals."""
        name = self.calendar.name(at_ms)
        self._refusals[name] = self._refusals.get(name, 0) + count

    def rows(self) -> tuple[Day, ...]:
        """Return every day, also those on which nothing happened."""
        return tuple(
            Day(name, tally.sums, self._stops.get(name, 0), self._refusals.get(name, 0))
            for name, tally in self._all.items()
        )

    def of(self, customer: str, name: str) -> int:
        """Return what a customer has spent on a day or in a month, in nano-dollars."""
        return self._customers.get(customer, {}).get(name, 0)


def customer_rows(books: Books, groups: Groups, where: Mapping[str, Home], days: Days) -> tuple[Customer, ...]:
    """Return each named budget below, the dearest first, and what belongs to none, if anything does."""
    budgets = {node.id: node for node in books.below if node.kind is NodeKind.BUDGET}
    if not budgets or set(budgets) == {books.node_id}:
        return ()
    nested = {above.id for node in budgets.values() for above in path(books.nodes, node.id)[1:]}
    recent = days.calendar.is_recent
    keys = [*budgets, *([""] if "" in groups.customers else [])]
    sessions: dict[str, int] = {}
    for home in {home.session: home for home in where.values()}.values():
        node = books.nodes[home.session]
        if node.kind is NodeKind.SESSION:
            sessions[home.customer] = sessions.get(home.customer, 0) + 1
    found = []
    for key in keys:
        node_or_none = budgets.get(key)
        name, limit = ("no customer", None) if node_or_none is None else (node_or_none.name, node_or_none.limit)
        if key in nested:  # its limit counts what is below it, which stands in rows of its own
            name, limit = f"{name} itself", None
        window = None if node_or_none is None else node_or_none.window
        found.append(
            Customer(
                groups.customers.get(key, Tally()).row(key, name, limit=limit),
                None if window is None else f"{window.per} {window.tz}",
                0 if node_or_none is None else node_or_none.spent,
                days.of(key, days.calendar.yesterday) if recent else None,
                days.of(key, days.calendar.today) if recent else None,
                sessions.get(key, 0),
                tuple(days.of(key, name) for name in days.calendar.names),
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.row.sums.total, each.row.name)))


def ended_by(node: Node) -> str | None:
    """Return why a session has ended; for one that is open, why it can spend no more."""
    if node.terminated_by is None and node.starved and node.state is NodeState.OPEN:
        return "budget_exhausted"
    return node.terminated_by

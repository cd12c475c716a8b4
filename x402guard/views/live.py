"""Builds the live view of a ledger: what is under way now in all of its sessions, without folding a journal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from x402guard.kernel.rows import WALLET, Entry, Hold, HoldKind, Node, NodeKind, NodeState
from x402guard.kernel.windows import rolled
from x402guard.ledger.evidence import named_transaction
from x402guard.ledger.queries import ABANDONED, Gone, ended_instances, standing
from x402guard.ledger.questions import question_id, waiting
from x402guard.ledger.store import LedgerReads, LedgerStore
from x402guard.ledger.tree import is_outermost, left_of, path
from x402guard.policy.latches import HeldLatch, latches_of
from x402guard.views.groups import ended_by
from x402guard.views.model import Out
from x402guard.views.taken import NAMES, exposed_until

_JOURNALS: Final = 16
_TAIL: Final = 12
_MOST_LINES: Final = 20
_NEWEST: Final = 200
"""Budgets that a live view has beside those that have not ended."""
_AGENTS: Final = (NodeKind.SESSION, NodeKind.SCOPE)
_BUDGETS: Final = (NodeKind.WALLET, NodeKind.BUDGET)
STATES: Final = ("asks", "stopped", "open", "closed")
"""What a session can be in a live view, the most urgent first."""


class LiveSession(Struct, frozen=True):
    """An outermost session with all below it. Amounts are in nano-dollars, times in unix ms.

    Attributes:
        agents: the names of the sessions below it that are open.
        state: one of ``STATES``; word and reason say why it was stopped or has ended.
        allocated: what open agents below may still take, at most what is left.
        left: below zero past the limit, None without one.
    """

    id: str
    name: str
    customer: str
    agents: tuple[str, ...]
    state: str
    word: str | None
    reason: str | None
    limit: int | None
    spent: int
    out: int
    allocated: int
    left: int | None
    opened_ms: int
    last_ms: int


class Ask(Struct, frozen=True):
    """A question of an agent that waits for a person. Silence is a no at ``until_ms``."""

    id: str
    what: str
    words: str
    session: str
    agent: str
    customer: str
    left: int | None
    until_ms: int
    said: int
    approvers: int


class LiveCustomer(Struct, frozen=True):
    """A named budget: what is spent of its limit now."""

    name: str
    per: str | None
    limit: int | None
    spent: int
    out: int
    left: int | None
    stopped: str | None = None
    """Why it is stopped, or None."""


class Line(Struct, frozen=True):
    """Something that has happened: a capture by its evidence, ``refused``, ``stopped``, ``reset`` or ``out``."""

    at_ms: int
    kind: str
    to: str
    amount: int | None
    agent: str
    session: str
    customer: str
    words: str = ""


class LiveLatch(Struct, frozen=True):
    """What has refused a call because of something seen before, and refuses the next one until ``ends_ms`` (None: ever)."""

    id: str
    rule: str
    reason: str
    session: str
    since_ms: int
    ends_ms: int | None


class Totals(Struct, frozen=True):
    """The figures of a whole ledger. ``spent``, ``out`` and ``left`` are those of the wallet.

    Attributes:
        counts: how many outermost sessions are in each of ``STATES``.
        outstanding: how many holds are live. *asks*: how many questions wait.
        refused: what each rule has refused in all: (rule, how often).
    """

    spent: int
    out: int
    left: int | None
    stopped: str | None
    customers: tuple[LiveCustomer, ...]
    counts: dict[str, int]
    outstanding: int
    asks: int
    refused: tuple[tuple[str, int], ...]


class LiveView(Struct, frozen=True):
    """One moment of a whole ledger. ``spent``, ``out`` and ``left`` are those of the wallet.

    Attributes:
        allocated: what open sessions may still take, at most what is left.
        sessions: the outermost sessions that have not ended, the newest that have, and those that were looked for; the
            most urgent first.
        ever: how many outermost sessions there have been.
        refused: what each rule has refused in all: (rule, how often).
        latches: of each rule and session the latch that refused last, if it still holds.
    """

    now_ms: int
    limit: int | None
    spent: int
    out: int
    allocated: int
    left: int | None
    stopped: str | None
    sessions: tuple[LiveSession, ...]
    ever: int
    asks: tuple[Ask, ...]
    outstanding: tuple[Out, ...]
    customers: tuple[LiveCustomer, ...]
    lines: tuple[Line, ...]
    refused: tuple[tuple[str, int], ...]
    latches: tuple[LiveLatch, ...]

    def counts(self) -> dict[str, int]:
        """Return how many sessions are in each of ``STATES``."""
        return _counted(self.sessions, self.ever)


def _counted(sessions: Iterable[LiveSession], ever: int) -> dict[str, int]:
    counts = dict.fromkeys(STATES, 0)
    for session in sessions:
        counts[session.state] += 1
    return counts | {"closed": max(0, ever - sum(counts[state] for state in STATES if state != "closed"))}


def live_of(store: LedgerStore, *, find: str = "", gone: Gone = ended_instances) -> LiveView:
    """Return the live view of a ledger at one moment. *find*: with the sessions whose id, name or budget has it, too.

    *gone* returns the instances that are known to have ended.
    """
    with store.at_one_moment() as ledger:
        now_ms = ledger.now_ms()
        looked_for = ledger.fitting(find.strip(), _NEWEST) if find.strip() else ()
        found = {node.id: node for node in (*ledger.current(_NEWEST), *looked_for)}
        nodes = {node.id: rolled(node, now_ms) for node in found.values()}
        live = _Live(nodes, ledger, waiting(ledger.marks("approval", ""), now_ms), gone(ledger))
        return live.view(store.tally()[0])  # of the store, which counts only what is newer: maybe of a moment later


def totals_of(store: LedgerStore, *, gone: Gone = ended_instances) -> Totals:
    """Return the figures of a ledger at one moment. No session that has ended is read for it."""
    with store.at_one_moment() as ledger:
        now_ms = ledger.now_ms()
        nodes = {node.id: rolled(node, now_ms) for node in ledger.current(0)}
        live = _Live(nodes, ledger, waiting(ledger.marks("approval", ""), now_ms), gone(ledger))
        return live.totals(*store.tally())


class _Live:
    """The rows of one moment, and where each of its nodes belongs."""

    def __init__(
        self,
        nodes: dict[str, Node],
        ledger: LedgerReads,
        questions: Mapping[str, Mapping[str, Any]],
        gone: Collection[str],
    ) -> None:
        self.nodes, self.ledger, self.questions, self.gone = nodes, ledger, questions, gone
        self.now_ms = ledger.now_ms()
        self.refusals = ledger.marks("refusals", "")
        self.children: dict[str, list[Node]] = {}
        for node in nodes.values():
            if node.parent_id is not None:
                self.children.setdefault(node.parent_id, []).append(node)
        self.asking = {self._names(row["session"])[0] for row in questions.values()}

    def totals(self, ever: int, outstanding: int) -> Totals:
        """Return the figures: of *ever* so many outermost sessions, and so many live holds."""
        wallet = self.nodes.get(WALLET)
        return Totals(
            spent=0 if wallet is None else wallet.spent,
            out=0 if wallet is None else wallet.live,
            left=None if wallet is None else left_of(wallet),
            stopped=None if wallet is None else _why(wallet),
            customers=self._customers(),
            counts=_counted(self._sessions(), ever),
            outstanding=outstanding,
            asks=len(self.questions),
            refused=self._refused(),
        )

    def view(self, ever: int) -> LiveView:
        """Return the view: of *ever* so many outermost sessions."""
        wallet = self.nodes.get(WALLET)
        holds = [hold for hold in self.ledger.outstanding() if hold.kind is not HoldKind.TOKENS]
        self._read_above({hold.node_id for hold in holds} | {key.partition(" ")[0] for key in self._last_refusals()})
        return LiveView(
            now_ms=self.now_ms,
            limit=None if wallet is None else wallet.limit,
            spent=0 if wallet is None else wallet.spent,
            out=0 if wallet is None else wallet.live,
            allocated=0 if wallet is None else self._promised(wallet),
            left=None if wallet is None else left_of(wallet),
            stopped=None if wallet is None else _why(wallet),
            sessions=tuple(sorted(self._sessions(), key=_urgency)),
            ever=ever,
            asks=tuple(sorted(map(self._ask, self.questions.items()), key=lambda ask: ask.until_ms)),
            outstanding=tuple(sorted(map(self._out, holds), key=lambda row: row.until_ms)),
            customers=self._customers(),
            lines=tuple(sorted(self._lines(), key=lambda line: -line.at_ms)[:_MOST_LINES]),
            refused=self._refused(),
            latches=tuple(map(self._latch, latches_of(self.ledger, self.refusals))),
        )

    def _read_above(self, node_ids: Iterable[str]) -> None:
        """Read the nodes that are missing, with all above them: the names of what has ended."""
        for node_id in node_ids:
            if node_id not in self.nodes:
                self.nodes |= {each.id: rolled(each, self.now_ms) for each in self.ledger.path(node_id)}

    def _last_refusals(self) -> list[str]:
        return sorted(self.refusals, key=lambda key: -int(self.refusals[key]["at_ms"]))[:_MOST_LINES]

    def _sessions(self) -> list[LiveSession]:
        outer = [node for node in self.nodes.values() if node.kind is NodeKind.SESSION]
        return [self._session(node) for node in outer if is_outermost(self.nodes, node)]

    def _refused(self) -> tuple[tuple[str, int], ...]:
        refused: dict[str, int] = {}
        for row in self.refusals.values():
            refused[row["rule"]] = refused.get(row["rule"], 0) + int(row["count"])
        return tuple(sorted(refused.items()))

    def _customers(self) -> tuple[LiveCustomer, ...]:
        budgets = [node for node in self.nodes.values() if node.kind is NodeKind.BUDGET]
        customers = [
            LiveCustomer(
                node.name,
                None if node.window is None else node.window.per,
                node.limit,
                node.spent,
                node.live,
                left_of(node),
                _why(node),
            )
            for node in budgets
        ]
        return tuple(sorted(customers, key=_fullness))

    def _names(self, node_id: str) -> tuple[str, str, str, str]:
        """Return the outermost session's id and name, the agent's and the customer's names."""
        if node_id not in self.nodes:
            return "", "", "", ""
        above = path(self.nodes, node_id)
        sessions = [node for node in above if node.kind is NodeKind.SESSION] or above[:1]
        budget = next((node.name for node in above if node.kind is NodeKind.BUDGET), "")
        return sessions[-1].id, sessions[-1].name, sessions[0].name, budget

    def _session(self, node: Node) -> LiveSession:
        below = self._below(node)
        above = [each for each in path(self.nodes, node.id)[1:] if each.state is NodeState.TRIPPED]
        stopped = node if node.state is NodeState.TRIPPED else above[0] if above else None
        is_left = standing(node, self.gone) == ABANDONED
        if node.state is NodeState.CLOSED or not node.openers or is_left:
            state = "closed"
        elif stopped is not None:
            state = "stopped"
        else:
            state = "asks" if node.id in self.asking else "open"
        return LiveSession(
            id=node.id,
            name=node.name,
            customer=self._names(node.id)[3],
            agents=tuple(dict.fromkeys(child.name for child in below if child.state is NodeState.OPEN)),
            state=state,
            word=ABANDONED if is_left else ended_by(node if stopped is None else stopped),
            reason=None if stopped is None else stopped.trip_reason,
            limit=node.limit,
            spent=node.spent,
            out=node.live,
            allocated=self._promised(node) if state in ("open", "asks") else 0,
            left=node.room if stopped is None else 0,
            opened_ms=node.created_ms,
            last_ms=max([node.last_ms, *(child.last_ms for child in below)]),
        )

    def _promised(self, node: Node) -> int:
        """Return what open nodes below one may still take, in nano-dollars, at most what it has left itself.

        A child without a limit may take whatever is left above it; 0 if nothing above has a limit either.
        """
        if node.state is not NodeState.OPEN:
            return 0
        found = min(sum(map(self._may_take, self.children.get(node.id, ()))), _left(node))
        return found if found < _NO_LIMIT else 0

    def _may_take(self, node: Node) -> int:
        if node.state is not NodeState.OPEN or node.kind is NodeKind.TOKENS:
            return 0
        if node.kind is NodeKind.BUDGET:
            return min(_left(node), sum(map(self._may_take, self.children.get(node.id, ()))))
        return _left(node) if node.openers else 0

    def _below(self, node: Node) -> list[Node]:
        found = list(self.children.get(node.id, ()))
        for child in found:
            found.extend(self.children.get(child.id, ()))
        return [child for child in found if child.kind is NodeKind.SESSION]

    def _ask(self, item: tuple[str, Mapping[str, Any]]) -> Ask:
        key, row = item
        outer, session, agent, customer = self._names(row["session"])
        node = self.nodes.get(row["session"]) or self.nodes.get(outer)
        return Ask(
            id=question_id(key, row),
            what=str(row["what"]),
            words=str(row["words"]),
            session=session,
            agent=agent,
            customer=customer,
            left=None if node is None else node.room,
            until_ms=int(row["until_ms"]),
            said=len(row["said"]),
            approvers=int(row["approvers"]),
        )

    def _latch(self, latch: HeldLatch) -> LiveLatch:
        _, session, _, _ = self._names(latch.session)
        return LiveLatch(latch.id, latch.rule, latch.reason, session, latch.since_ms, latch.ends_ms)

    def _out(self, hold: Hold) -> Out:
        _, session, agent, customer = self._names(hold.node_id)
        intent = hold.intent
        method = None if intent is None else intent.method
        return Out(
            hold=hold.id,
            kind=str(hold.kind),
            amount=hold.amount,
            to=_to(hold),
            payee="" if intent is None else intent.payee,
            path="",
            agent=agent,
            session=session,
            customer=customer,
            why=hold.doubt,
            until_ms=(exposed_until(hold.deadline_unix, method) or 0) * 1000,
            transaction=named_transaction(hold),
            cancellable=method == "eip3009",
        )

    def _lines(self) -> Iterable[Line]:
        """Yield what the journals that were written last say, and the last refusals."""
        of_agents = [node for node in self.nodes.values() if node.kind in _AGENTS]
        stopped = [node for node in self.nodes.values() if node.kind in _BUDGETS and _why(node)]
        latest = sorted(of_agents, key=lambda node: -node.last_ms)[:_JOURNALS]
        for node in (*latest, *stopped[:_JOURNALS]):
            _, session, agent, customer = self._names(node.id)
            # After the stop of a budget its journal has only what was under way then.
            tail = _TAIL if node.kind in _AGENTS else _TAIL * 10
            for entry in self.ledger.tail(node.id, max(0, node.seq - tail)):
                yield from self._line(entry, agent, session, customer)
        for key in self._last_refusals():
            row = self.refusals[key]
            _, session, agent, customer = self._names(key.partition(" ")[0])
            times = f"{row['count']:,} × " if int(row["count"]) > 1 else ""
            yield Line(
                int(row["at_ms"]), "refused", str(row["rule"]), row["requested"], agent, session, customer,
                f"{times}{row['reason']}",
            )  # fmt: skip

    def _line(self, entry: Entry, agent: str, session: str, customer: str) -> Iterable[Line]:
        facts = entry.facts()
        if entry.event in ("trip", "reset"):
            words = str(facts.get("reason") or f"by {facts.get('by')}")
            kind = "stopped" if entry.event == "trip" else "reset"
            yield Line(entry.at_ms, kind, str(facts["word"]), None, agent, session, customer, words)
        elif entry.hold_id is not None and entry.event in ("capture", "lapse", "correct"):
            hold = self.ledger.hold(entry.hold_id)
            kind = NAMES.get(str(facts.get("evidence")), "assumed")
            if hold is not None and hold.kind is not HoldKind.TOKENS:
                yield Line(entry.at_ms, kind, _to(hold), int(facts["amount"]), agent, session, customer)


_NO_LIMIT: Final = 10**24


def _left(node: Node) -> int:
    """Return what a node has left, in nano-dollars: a number above all others without a limit."""
    return _NO_LIMIT if node.room is None else max(0, node.room)


def _why(node: Node) -> str | None:
    """Return why a budget or the wallet is stopped, or None."""
    return None if node.state is not NodeState.TRIPPED else node.trip_reason or "by its owner"


def _to(hold: Hold) -> str:
    if hold.kind is HoldKind.PAYMENT:
        return hold.purpose.host or "unknown"
    return hold.purpose.tool or hold.purpose.host or "unknown"


def _urgency(session: LiveSession) -> tuple[int, float, int]:
    """Order sessions: those that ask, those that were stopped, open ones by what is left, then closed ones, last first."""
    share = 1.0 if session.left is None or not session.limit else session.left / session.limit
    return STATES.index(session.state), share if session.state == "open" else 0.0, -session.last_ms


def _fullness(customer: LiveCustomer) -> tuple[float, str]:
    share = 1.0 if customer.left is None or not customer.limit else customer.left / customer.limit
    return share, customer.name


def chosen(
    sessions: Sequence[LiveSession], *, find: str = "", customer: str = "", agent: str = "", state: str = ""
) -> list[LiveSession]:
    """Return the sessions that fit: *find* is part of an id or a name, in any case; "" fits all. No state: not closed ones."""
    text = find.strip().casefold()
    return [
        session
        for session in sessions
        if (session.state == state if state else bool(text) or session.state != "closed")
        and (not customer or session.customer == customer)
        and (not agent or agent in session.agents or agent == session.name)
        and (
            not text
            or any(text in word.casefold() for word in (session.id, session.name, session.customer, *session.agents))
        )
    ]

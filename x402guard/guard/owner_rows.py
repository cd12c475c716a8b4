"""What an owner is shown: budgets, holds, questions, allowances, and the change of a limit. Each row has a plain form for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from x402guard.errors import ConfigError
from x402guard.evm import parse_address
from x402guard.frozen import replace
from x402guard.guard.arguments import gone_here, gone_instances
from x402guard.kernel.rows import NOTHING, WALLET, Hold, Nanos, Node
from x402guard.ledger.actions import Action
from x402guard.ledger.budgets import unlent
from x402guard.ledger.delegations import Delegation, read_delegation, standing_of
from x402guard.ledger.owner import KEEP, change_payer, known_budget, restarted, set_limit
from x402guard.ledger.purchases import DEFAULT_FLIGHT_S, in_doubt
from x402guard.ledger.queries import STANDINGS, find_budget, last_nodes, nodes_of, standing
from x402guard.ledger.questions import question_id
from x402guard.ledger.sessions import PAYER_MARK, check_window
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.tree import plain_room, remaining
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars, nanos_to_decimal
from x402guard.policy.checks import check_choice, check_name, check_whole
from x402guard.policy.latches import HeldLatch
from x402guard.views.words import printable

R = TypeVar("R")


class _Row:
    """A row whose plain form has text for amounts."""

    def to_dict(self) -> dict[str, Any]:
        """Return its fields as JSON can hold them: amounts are decimal text, in dollars."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: format(value, "f") if isinstance(value, Decimal) else value for name, value in values.items()}


def _dollars(nanos: Nanos | None) -> Decimal | None:
    return None if nanos is None else nanos_to_decimal(nanos)


@dataclass(frozen=True, slots=True)
class BudgetRow(_Row):
    """A session, a named budget or the wallet. Amounts are in dollars; ``remaining`` is None without a limit.

    ``spent`` and ``held`` are those of its window, if it has one (``per``). ``reserve`` is kept for a session's last LLM
    calls. ``created`` is ISO 8601.
    """

    id: str
    parent: str | None
    name: str
    kind: str
    state: str
    terminated_by: str | None
    budget: Decimal | None
    per: str | None
    spent: Decimal
    held: Decimal
    remaining: Decimal | None
    reserve: Decimal
    created: str

    @classmethod
    def of(cls, node: Node, nodes: dict[str, Node], gone: Collection[str]) -> BudgetRow:
        """Return the row of a node. *gone* are instances known to have ended."""
        return cls(
            id=node.id,
            parent=node.parent_id,
            name=node.name,
            kind=str(node.kind),
            state=standing(node, gone),
            terminated_by=node.terminated_by,
            budget=_dollars(node.limit),
            per=None if node.window is None else f"{node.window.per} {node.window.tz}",
            spent=nanos_to_decimal(node.spent),
            held=nanos_to_decimal(node.live),
            remaining=_dollars(remaining(nodes, node.id)),
            reserve=nanos_to_decimal(node.reserve),
            created=datetime.fromtimestamp(node.created_ms / 1000, UTC).isoformat(timespec="seconds"),
        )


def budget_rows(
    store: LedgerStore, *, name: str | None, state: str | None, parent: str | None, since_ms: int, limit: int | None
) -> list[BudgetRow]:
    """Return the rows of budgets: see ``Owner.sessions``. Raises ``ConfigError``."""
    above = None if parent is None else find_budget(store, parent)
    if state is not None:
        check_choice("state", state, STANDINGS)
    check_whole("limit", limit, 0, optional=True)
    gone = gone_here(store)
    wanted = None if name is None else check_name("name", name)

    def fits(node: Node) -> bool:
        is_named = wanted is None or fnmatchcase(node.name, wanted)
        return is_named and (state is None or standing(node, gone) == state) and node.created_ms >= since_ms

    return [BudgetRow.of(node, path, gone) for node, path in last_nodes(store, fits, limit, above)]


@dataclass(frozen=True, slots=True)
class HoldRow(_Row):
    """A live hold: the dollars that may still be taken, by whom, and until when (ISO 8601)."""

    id: str
    session: str
    kind: str
    amount: Decimal
    payee: str | None
    scheme: str | None
    network: str | None
    deadline: str
    in_doubt: bool
    doubt: str | None
    claimed: Decimal | None
    request: str

    @classmethod
    def of(cls, view: LedgerView, hold: Hold) -> HoldRow:
        """Return the row of a hold; *view* has the marks of its instance."""
        intent = hold.intent
        return cls(
            id=hold.id,
            session=hold.node_id,
            kind=str(hold.kind),
            amount=nanos_to_decimal(hold.amount),
            payee=None if intent is None else intent.payee,
            scheme=None if intent is None else f"{intent.scheme}/{intent.method}",
            network=None if intent is None else intent.network,
            deadline=datetime.fromtimestamp(hold.deadline_unix, UTC).isoformat(),
            in_doubt=in_doubt(view, hold, flight_ms=DEFAULT_FLIGHT_S * 1000),
            doubt=hold.doubt,
            claimed=None if hold.claim is None else nanos_to_decimal(hold.claim.amount),
            request=f"{hold.purpose.method} {hold.purpose.url}".strip() or hold.purpose.tool,
        )


@dataclass(frozen=True, slots=True)
class QuestionRow(_Row):
    """A question of an agent. ``id`` has the question's number, so that an answer cannot count for the next one.

    ``yes`` says how many of the approvers have allowed it; ``words`` is the whole question.
    """

    id: str
    session: str
    what: str
    ends: str
    until: str
    yes: str
    words: str
    missing: int = dataclasses.field(repr=False, default=0)
    key: str = dataclasses.field(repr=False, default="")

    @classmethod
    def of(cls, key: str, row: Mapping[str, Any], now_ms: int) -> QuestionRow:
        """Return the row of a question's mark."""
        return cls(
            id=question_id(key, row),
            session=row["session"],
            what=row["what"],
            ends=f"in {max(0, row['until_ms'] - now_ms) // 1000} s",
            until=datetime.fromtimestamp(row["until_ms"] / 1000, UTC).isoformat(),
            yes=f"{len(row['said'])} of {row['approvers']}",
            words=printable(row["words"]),
            missing=row["approvers"] - len(row["said"]),
            key=key,
        )

    def is_meant_by(self, text: str) -> bool:
        """True for its id, or a beginning of it."""
        return self.id == text if "." in text else self.key.startswith(text)

    def to_dict(self) -> dict[str, Any]:
        """Return its fields, without those that only serve to answer it."""
        return {name: value for name, value in _Row.to_dict(self).items() if name not in ("missing", "key")}


@dataclass(frozen=True, slots=True)
class LatchRow(_Row):
    """What refuses calls because of something seen before. Times are ISO 8601; ``ends`` is None for one that does not age."""

    id: str
    rule: str
    reason: str
    session: str
    since: str
    refused: str
    ends: str | None

    @classmethod
    def of(cls, latch: HeldLatch) -> LatchRow:
        """Return the row of a latch."""
        since, refused, ends = (
            None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
            for ms in (latch.since_ms, latch.refused_ms, latch.ends_ms)
        )
        return cls(latch.id, latch.rule, printable(latch.reason), latch.session, since or "", refused or "", ends)


@dataclass(frozen=True, slots=True)
class TransferRow(_Row):
    """A Transfer out of the wallet that no payment explains. The amount is in dollars; ``seen`` is ISO 8601."""

    id: str
    network: str
    token: str
    symbol: str
    transaction: str
    payee: str
    amount: Decimal
    seen: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> TransferRow:
        """Return the row of what ``reconcile`` has found."""
        seen = datetime.fromtimestamp(row["at_ms"] / 1000, UTC).isoformat(timespec="seconds")
        same = {name: row[name] for name in ("id", "network", "token", "symbol", "transaction", "payee")}
        return cls(**same, amount=nanos_to_decimal(row["amount"]), seen=seen)


@dataclass(frozen=True, slots=True)
class ActionRow(_Row):
    """An action that can be undone: its state, and what its undo gets. ``at`` is ISO 8601; ``error`` is why it failed."""

    id: str
    number: int
    session: str
    state: str
    function: str
    undo: str
    at: str
    error: str
    arguments: Mapping[str, Any]
    result: Any
    returned: bool

    @classmethod
    def of(cls, action: Action) -> ActionRow:
        """Return the row of an action."""
        return cls(
            id=action.id,
            number=action.number,
            session=action.session,
            state=str(action.state),
            function=action.name,
            undo=action.undo,
            at=datetime.fromtimestamp(action.at_ms / 1000, UTC).isoformat(timespec="seconds"),
            error=action.error,
            arguments=action.arguments,
            result=action.result,
            returned=action.returned,
        )


@dataclass(frozen=True, slots=True)
class DelegationRow(_Row):
    """A task that a session has given to another agent. Amounts are in dollars, times ISO 8601.

    ``state`` is ``offered``, ``working``, ``answered``, ``taken``, ``denied``, ``revoked``,
    ``expired``, ``tripped``, ``abandoned`` (its worker has ended, and its token opens it again), or ``asking``: its worker
    has ended with a question, and its token opens it again.
    """

    request_id: str
    session: str
    issuer: str
    task_type: str
    state: str
    worker: str
    budget: Decimal
    spent: Decimal
    deadline: str
    reason: str

    @classmethod
    def of(
        cls, delegation: Delegation, node: Node, now_ms: int, *, gone: Callable[[str], bool], asks: Collection[str]
    ) -> DelegationRow:
        """Return the row of a delegation; *node* is the worker's session. The others are those of ``standing_of``."""
        return cls(
            request_id=delegation.request_id,
            session=delegation.session,
            issuer=str(delegation.request["issuer_id"]),
            task_type=delegation.task_type,
            state=standing_of(delegation, node, now_ms, gone=gone, asks=asks),
            worker=delegation.worker,
            budget=nanos_to_decimal(node.limit or NOTHING),
            spent=nanos_to_decimal(node.spent),
            deadline=datetime.fromtimestamp(delegation.until_ms / 1000, UTC).isoformat(),
            reason=delegation.reason,
        )


@dataclass(frozen=True, slots=True)
class LimitChange(_Row):
    """The change of a budget's limit, in dollars; ``was`` is None if it had none.

    ``used`` is that of its window, if it has one; ``reserve`` is kept for the session's last LLM calls.
    """

    id: str
    name: str
    kind: str
    was: Decimal | None
    limit: Decimal | None
    used: Decimal
    left: Decimal | None
    state: str
    reserve: Decimal

    @classmethod
    def of(cls, node: Node, limit: Nanos | None) -> LimitChange:
        """Return the change before it is made."""
        left = None if limit is None else Nanos(max(0, limit - node.counted - node.reserve))
        used, reserve = nanos_to_decimal(node.counted), nanos_to_decimal(node.reserve)
        was, new = _dollars(node.limit), _dollars(limit)
        return cls(node.id, node.name, str(node.kind), was, new, used, _dollars(left), str(node.state), reserve)

    @property
    def stops(self) -> bool:
        """True if the new limit leaves nothing to spend: it is zero, or below what is used and kept."""
        if self.limit is None or self.limit == self.was:
            return False
        return self.limit == 0 or self.limit < self.used + self.reserve

    def question(self) -> str:
        """Return what a change that ``stops`` does, as a sentence."""
        used = f"${self.used} is used" if self.used else "nothing can be spent then"
        if self.reserve and (self.limit or 0) >= self.used:
            used = f"${self.used} is used, and ${self.reserve} is kept for its last LLM calls"
        what = "the wallet" if self.id == WALLET else f"{self.kind} {self.id} ({self.name})"
        return f"{self.old_to_new()} stops {what}: {used}"

    def old_to_new(self) -> str:
        """Return ``$5.00 → $20.00``."""
        was, new = ("no limit" if each is None else f"${each}" for each in (self.was, self.limit))
        return f"{was} → {new}"

    def done(self, node: Node) -> LimitChange:
        """Return the change as it was made; *node* is the budget afterwards."""
        room = plain_room(node)
        return replace(self, left=None if room is None else _dollars(Nanos(max(0, room))), state=str(node.state))


class ChangesKey:
    """What an owner does with the key of a ledger."""

    _store: LedgerStore
    by: str

    def change_key(self, address: str) -> str:
        """Let the ledger belong to the account of another key, and return the one of before. Budgets and history go on.

        From then on the key of before signs nothing. What it has signed stays and counts, and ``reconcile`` reads both
        accounts. Raises ``ConfigError``.
        """
        payer = parse_address(address)
        scope = Scope(nodes=(WALLET,), marks=(PAYER_MARK,), durable=True)
        return self._store.transact(scope, lambda view: change_payer(view, PAYER_MARK, payer, self.by))


@dataclass(frozen=True, slots=True)
class AllowanceRow(_Row):
    """What Permit2 may move of one token, in dollars.

    Attributes:
        network, token, symbol: which token.
        balance: what the wallet has of it.
        allowance: what Permit2 may move; None for more than a billion dollars, which is without limit.
        exposed: the lesser of both.
        transaction: the transaction that set it now, or None.
    """

    network: str
    token: str
    symbol: str
    balance: Decimal
    allowance: Decimal | None
    exposed: Decimal
    transaction: str | None = None


def amount_text(hold: Hold) -> str:
    """Return what a live hold may still take, from whom and until when, as one line."""
    until = datetime.fromtimestamp(hold.deadline_unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    whom = hold.payment().payee if hold.intent is not None else hold.purpose.tool or "a call"
    return f"out until {until}: ${format_dollars(hold.amount)} to {whom} ({hold.id[:16]}…)"


Restarts = tuple[str | None, str]
"""When a budget restarts, as its owner writes it: ``day``, ``week``, ``month``, or None as it is; and a time zone."""


def limited(
    view: LedgerView, node_id: str, limit: Nanos | None, by: str, restarts: Restarts, *, stops: bool
) -> LimitChange:
    """Set a limit. Raises ``ConfigError`` for one that stops the budget, unless *stops*."""
    per, tz = restarts
    window = KEEP if per is None else check_window(per, tz)
    known_budget(view, node_id)
    node = unlent(view, node_id)
    change = LimitChange.of(node if window is KEEP else restarted(view, node, window), limit)
    if not stops and change.stops:
        raise ConfigError(f"limit: {change.question()}; if that is meant, give --yes (in Python stops=True)")
    set_limit(view, node_id, limit, by, window)
    return change.done(unlent(view, node_id))


def delegation_rows(ledger: LedgerStore, below_id: str = "") -> list[DelegationRow]:
    """Return the delegations of sessions whose ids begin with *below_id*, the oldest session first."""
    nodes, now_ms, instances = nodes_of(ledger), ledger.now_ms(), ledger.marks("instance", "")
    found = [read_delegation(row) for row in ledger.marks("delegation", below_id).values()]
    found.sort(key=lambda each: nodes[each.session].created_ms)
    gone = gone_instances(instances, now_ms, ledger.lives)
    asks = {row["sender"] for row in ledger.marks("input", "").values() if not row["taken"]}
    return [DelegationRow.of(each, nodes[each.session], now_ms, gone=gone.__contains__, asks=asks) for each in found]


def delegation_named(ledger: LedgerStore, text: str) -> DelegationRow:
    """Return the delegation of a session, or of a request by its id or a unique beginning of it. Raises ``ConfigError``."""
    known = {row.session: row for row in delegation_rows(ledger)}
    named = [row for row in known.values() if row.request_id == text]
    named = named or [row for row in known.values() if text and row.request_id.startswith(str(text))]
    least = min((row.session.count("/") for row in named), default=0)
    fitting = [known[text]] if text in known else [row for row in named if row.session.count("/") == least]
    return only_one("delegation", text, fitting, "x402guard delegations list", "name it by its session")


def only_one(what: str, text: str, found: Sequence[R], look: str, several: str = "give more of it") -> R:
    """Return the only one of *found*. Raises ``ConfigError`` if *text* names none of them (where to *look*), or *several*."""
    if not found:
        raise ConfigError(f"{what}: no {what} has the id {text!r:.200}; see {look}")
    if len(found) > 1:
        raise ConfigError(f"{what}: {len(found)} {what}s have the id {text!r:.200}; {several}")
    return found[0]

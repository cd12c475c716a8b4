"""Defines the states of a delegation, every transition between them, and what becomes of its result.

A delegation is a task that a session gives to another agent, with a session of its own inside it. Each has a mark,
keyed by the id of that session. A transition that is not in ``DELEGATIONS`` cannot happen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct, ValidationError, to_builtins

from x402guard.errors import ConfigError, IllegalTransition
from x402guard.frozen import read_struct, readable, replace
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Node, NodeState
from x402guard.ledger.authorize import check_open
from x402guard.ledger.budgets import OVER
from x402guard.ledger.inputs import input_mark, inputs_mark, withdraw
from x402guard.ledger.owner import trip_node
from x402guard.ledger.view import LedgerView


class DelegationState(StrEnum):
    """What has become of a delegation."""

    OFFERED = "offered"
    WORKING = "working"
    ANSWERED = "answered"
    TAKEN = "taken"
    DENIED = "denied"
    REVOKED = "revoked"


_S = DelegationState

DELEGATIONS: Final[Mapping[DelegationState, frozenset[DelegationState]]] = MappingProxyType(
    {
        _S.OFFERED: frozenset({_S.WORKING, _S.ANSWERED, _S.REVOKED}),
        _S.WORKING: frozenset({_S.WORKING, _S.ANSWERED, _S.REVOKED}),
        _S.ANSWERED: frozenset({_S.TAKEN, _S.DENIED}),
        _S.TAKEN: frozenset(),
        _S.DENIED: frozenset(),
        _S.REVOKED: frozenset(),
    }
)
"""State → the states that may follow it. A worker that has ended without a result may be followed by another one."""

UNANSWERED: Final = frozenset({_S.OFFERED, _S.WORKING})
"""The states in which a result can still come."""

MOST_KEYS: Final = 20
"""The most tokens of one delegation. One that was handed over stays good, so there are no more then."""


@readable
class Delegation(Struct, frozen=True):
    """A delegation, as the ledger keeps it.

    Attributes:
        session: the id of the worker's session.
        parent: the id of the session that has delegated.
        request: the request as it was granted, as JSON holds it.
        asked: SHA-256 of the request as it was made, in hex.
        keys: the public keys (Ed25519, hex) of its tokens. The private ones are in no ledger.
        until_ms: its deadline, in unix milliseconds.
        reach: what each session around it narrows the policy to, and the request, as lists by name.
        quotes: (pattern of routes, nano-dollars): the prices that the sessions around it expect.
        removed: field of the request → what was taken out of it, because the parent does not have it.
        state: what has become of it.
        at_ms: when it came into this state, in unix milliseconds.
        worker: the process instance that works on it, or "".
        result: the result, as JSON holds it, or None.
        reason: why it was revoked, and by whom; or "".
    """

    session: str
    parent: str
    request: Mapping[str, Any]
    asked: str
    keys: tuple[str, ...]
    until_ms: int
    reach: tuple[Mapping[str, Any], ...] = ()
    quotes: tuple[tuple[str, int], ...] = ()
    removed: Mapping[str, Any] = {}
    state: DelegationState = DelegationState.OFFERED
    at_ms: int = 0
    worker: str = ""
    result: Mapping[str, Any] | None = None
    reason: str = ""

    def __repr__(self) -> str:
        return f"Delegation({self.request_id!r}, session={self.session!r}, state={self.state!r})"  # not its payload

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("request_id", self.request_id), ("session", self.session), ("state", self.state)]

    @property
    def request_id(self) -> str:
        """The id of its request."""
        return str(self.request["request_id"])

    @property
    def task_type(self) -> str:
        """What the request asks for, in a word."""
        return str(self.request["task_type"])


def delegation_mark(session_id: str) -> MarkKey:
    """Return the key of the mark that keeps a delegation."""
    return "delegation", session_id


def read_delegation(row: Mapping[str, Any]) -> Delegation:
    """Return the delegation in a mark. Raises ``ConfigError`` for one that no version of this library writes."""
    try:
        return read_struct(row, Delegation)
    except ValidationError as error:
        raise ConfigError(f"delegation: its row cannot be read: {error}") from None


def known_delegation(view: LedgerView, session_id: str) -> Delegation:
    """Return a delegation in view. Raises ``IllegalTransition`` for one outside the scope."""
    row = view.mark(delegation_mark(session_id))
    if row is None:
        raise IllegalTransition(f"delegation {session_id} is not in the scope of this change")
    return read_delegation(row)


def offer(view: LedgerView, delegation: Delegation) -> Delegation:
    """Write a new delegation, and what was granted and removed into its journal."""
    granted = {name: value for name, value in delegation.request.items() if name not in _NOT_IN_JOURNAL}
    facts = {"name": "delegation_scope_narrowed", "removed": delegation.removed, "granted": granted}
    view.record(delegation.session, "event", facts=facts)
    return _put(view, delegation)


_NOT_IN_JOURNAL: Final = frozenset({"payload", "withheld"})


def add_key(view: LedgerView, delegation: Delegation, public: str) -> Delegation:
    """Add the key of another token for a delegation, and return it; unchanged if it has the most tokens already."""
    if len(delegation.keys) >= MOST_KEYS:
        return delegation
    keyed = replace(delegation, keys=(*delegation.keys, public))
    view.put_mark(delegation_mark(delegation.session), to_builtins(keyed))
    return keyed


def delegation_marks(delegation: Delegation) -> tuple[MarkKey, ...]:
    """Return the keys of the rows that a step of a delegation may change."""
    session, parent = delegation.session, delegation.parent
    return delegation_mark(session), input_mark(parent, session), inputs_mark(parent)


def move(view: LedgerView, session_id: str, to: DelegationState, **changes: Any) -> Delegation:
    """Bring a delegation into another state, with other *changes* of its row, and return it.

    From its end on, nothing is authorized in its session, also after a reset, and it waits for no reply. Raises
    ``IllegalTransition`` if ``DELEGATIONS`` forbids it.
    """
    delegation = known_delegation(view, session_id)
    if to not in DELEGATIONS[delegation.state]:
        raise IllegalTransition(f"delegation {session_id} is {delegation.state}, so it cannot become {to}")
    moved = _put(view, replace(delegation, state=to, **changes))
    facts = {"name": f"delegation_{to}", "request": moved.request_id}
    said = {} if moved.result is None else {"status": moved.result["status"]}
    view.record(session_id, "event", facts={**facts, **said, **({"reason": moved.reason} if moved.reason else {})})
    if to in (_S.ANSWERED, _S.REVOKED):
        node = view.node(session_id)
        view.put_node(replace(node, until_ms=OVER))
        withdraw(view, delegation.parent, session_id)
    return moved


def keep_result(view: LedgerView, delegation: Delegation, result: Mapping[str, Any]) -> None:
    """Keep what was said of a revoked delegation, so that it is the same each time."""
    view.put_mark(delegation_mark(delegation.session), to_builtins(replace(delegation, result=result)))


def _put(view: LedgerView, delegation: Delegation) -> Delegation:
    delegation = replace(delegation, at_ms=view.now_ms)
    view.put_mark(delegation_mark(delegation.session), to_builtins(delegation))
    return delegation


def revoke(view: LedgerView, session_id: str, reason: str) -> Delegation:
    """Revoke a delegation that is not answered, and trip its session. Again, it changes nothing.

    Raises ``ConfigError`` for one that is answered.
    """
    delegation = known_delegation(view, session_id)
    if delegation.state is _S.REVOKED:
        return delegation
    if delegation.state not in UNANSWERED:
        raise ConfigError(f"delegation: {delegation.request_id!r} is {delegation.state} already; it cannot be revoked")
    moved = move(view, session_id, _S.REVOKED, reason=reason)
    trip_node(view, session_id, f"its delegation is revoked: {reason}")
    return moved


def lost(view: LedgerView, delegation: Delegation) -> str | None:
    """Return why no result can come any more, as a sentence; None if one can still come, or is there."""
    if delegation.state is _S.REVOKED:
        return f"it was revoked: {delegation.reason}"
    if delegation.state not in UNANSWERED:
        return None
    refusal = check_open(view, delegation.session, resumes=True)
    return None if refusal is None else refusal.reason


def standing_of(
    delegation: Delegation, node: Node, now_ms: int, *, gone: Callable[[str], bool], asks: Collection[str]
) -> str:
    """Return the state of a delegation for its owner: also ``expired``, ``tripped``, ``abandoned`` and ``asking``.

    *gone* tells whether an instance is known to have ended; *asks* are the sessions that wait for a reply. A token opens
    an abandoned one again, and one whose worker has ended with a question.
    """
    if delegation.state in UNANSWERED and node.state is NodeState.TRIPPED:
        return "tripped"
    if delegation.state in UNANSWERED and now_ms >= delegation.until_ms:
        return "expired"
    if delegation.state is _S.WORKING and all(gone(each.rpartition("#")[0]) for each in node.openers):
        return "asking" if delegation.session in asks else "abandoned"
    return str(delegation.state)

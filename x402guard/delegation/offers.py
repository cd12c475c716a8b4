"""The conversations in which a task is offered, redeemed and revoked."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from x402guard.delegation.scope import narrowed, reach_rows, tokens_above
from x402guard.delegation.token import Token, TokenKey
from x402guard.errors import ConfigError
from x402guard.flow.admission import check_standing
from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, Transact
from x402guard.flow.refusals import refused
from x402guard.flow.surroundings import here
from x402guard.frozen import replace
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Nanos, Node, NodeKind
from x402guard.ledger.authorize import Refusal, check_open, note_granted
from x402guard.ledger.budgets import TASK_STARVED
from x402guard.ledger.delegations import (
    UNANSWERED,
    Delegation,
    DelegationState,
    add_key,
    delegation_mark,
    delegation_marks,
    known_delegation,
    move,
    offer,
    revoke,
)
from x402guard.ledger.owner import owner_mark
from x402guard.ledger.sessions import NodeRequest, leave_unopened, open_node, opening_scope
from x402guard.ledger.token_budget import open_tokens, tokens_node
from x402guard.ledger.view import LedgerView, Scope

if TYPE_CHECKING:
    from x402guard.delegation.messages import TaskRequest

LEDGER_ID: Final[MarkKey] = ("ledger", "id")
"""The key of the mark with the ledger's own id, so that a token is for one ledger."""


def child_of(parent_id: str, request_id: str) -> str:
    """Return the id of the session for a request: the same for the same request of the same session."""
    digest = hashlib.sha256(request_id.encode("utf-8", "backslashreplace")).hexdigest()
    return f"{parent_id}/session-{digest[:16]}"


def offer_task(context: Context, request: TaskRequest) -> Flow[tuple[Delegation, str]]:
    """Open a session for a request, cut down to the scope of the session that delegates; return it, and its token.

    The same request again is the same delegation: with another token, or none once it is answered. Raises
    ``ConfigError`` naming the field, and the refusal of a budget of which nothing is left; nothing is delegated then.
    """
    asked = request.checked(issuer_id=request.issuer_id or context.session_id)
    digest = hashlib.sha256(asked.to_json().encode()).hexdigest()
    child, key, new_id = child_of(context.node_id, asked.request_id), TokenKey(), here().random_bytes(16).hex()
    opener = f"{context.instance}#{here().random_bytes(4).hex()}"
    opening = NodeRequest(child, context.node_id, NodeKind.SESSION, asked.task_type, Nanos(0), opener)

    def change(view: LedgerView) -> tuple[Delegation, str] | Refusal:
        ledger_id = _ledger_id(view, new_id)
        if view.mark(delegation_mark(child)) is None:
            first = Delegation(child, context.session_id, {}, digest, (key.public,), 0)
            offered = _offered(view, context, asked, opening, first)
            return offered if isinstance(offered, Refusal) else (offered, ledger_id)
        known = known_delegation(view, child)
        if known.asked != digest and known.request != asked.to_dict():
            raise ConfigError(f"request_id: {asked.request_id!r} is another request of this session; give a new one")
        return _keyed(view, known, key), ledger_id

    nodes = (tokens_node(child), *(() if context.tokens is None else (context.tokens.node_id,)))
    around = opening_scope(opening, *nodes)
    decided = yield Transact(replace(around, marks=(*around.marks, LEDGER_ID, delegation_mark(child))), change)
    if isinstance(decided, Refusal):
        raise (yield from refused(context, decided, starves=TASK_STARVED))
    return _with_token(key, *decided)


def find_task(context: Context, request_id: str) -> Flow[tuple[Delegation, str] | None]:
    """Return what this session has delegated under an id, with another token while it can be answered; or None."""
    child, key, new_id = child_of(context.node_id, request_id), TokenKey(), here().random_bytes(16).hex()

    def change(view: LedgerView) -> tuple[Delegation, str] | None:
        if view.mark(delegation_mark(child)) is None:
            return None
        return _keyed(view, known_delegation(view, child), key), _ledger_id(view, new_id)

    scope = Scope(nodes=(context.node_id, child), marks=(LEDGER_ID, delegation_mark(child)), durable=True)
    found: tuple[Delegation, str] | None = yield Transact(scope, change)
    return None if found is None else _with_token(key, *found)


def _ledger_id(view: LedgerView, new: str) -> str:
    """Return the id of the ledger, which gets one with its first delegation."""
    if view.mark(LEDGER_ID) is None:
        view.put_mark(LEDGER_ID, {"id": new})
    return str((view.mark(LEDGER_ID) or {})["id"])


def _keyed(view: LedgerView, known: Delegation, key: TokenKey) -> Delegation:
    return add_key(view, known, key.public) if _may_answer(view, known) else known


def _with_token(key: TokenKey, delegation: Delegation, ledger_id: str) -> tuple[Delegation, str]:
    good = key.public in delegation.keys
    return delegation, key.token(ledger_id, delegation.session, delegation.until_ms // 1000) if good else ""


def _may_answer(view: LedgerView, delegation: Delegation) -> bool:
    return delegation.state in UNANSWERED and check_open(view, delegation.session, resumes=True) is None


def _offered(
    view: LedgerView, context: Context, asked: TaskRequest, opening: NodeRequest, delegation: Delegation
) -> Delegation | Refusal:
    refusal = check_standing(view, context)
    cut = refusal or narrowed(view, context, asked)
    if isinstance(cut, Refusal):
        return cut
    granted, removed = cut
    until_ms, soft = granted.deadline * 1000, context.policy.soft_parts
    node = open_node(view, replace(opening, limit=granted.limit, soft=soft, until_ms=until_ms))
    leave_unopened(view, node)  # it is open in no process until its token is redeemed
    note_granted(view, context.node_id, TASK_STARVED)
    total = granted.token_budget or tokens_above(view, context)
    open_tokens(view, tokens_node(node.id), total, node.name, soft)
    quotes = tuple((pattern, int(price)) for pattern, price in context.quotes)
    request, reach = granted.checked().to_dict(), reach_rows(context, granted)
    written = replace(delegation, request=request, until_ms=until_ms, reach=reach, quotes=quotes, removed=removed)
    return offer(view, written)


def redeem(context: Context, token: Token, opener: str, gone: frozenset[str]) -> Flow[tuple[Delegation, Node]]:
    """Open the session of a token for this instance, and return its task and its node. Another worker has to be *gone*.

    Raises ``ConfigError`` for a token that is old, revoked, used up or for another ledger; the refusal of a session
    around it that is tripped or has ended. Nothing is opened then.
    """
    session_id = token.session

    def change(view: LedgerView) -> tuple[Delegation, Node] | Refusal:
        _check_token(view, token)
        node = view.node(session_id)
        alive = [each for each in node.openers if each.rpartition("#")[0] not in gone]
        if alive:
            raise ConfigError(f"token: {alive[0].rpartition('#')[0]} works on its task, and is not known to have ended")
        refusal = check_open(view, session_id, resumes=True)
        if refusal is not None:
            return refusal
        opening = NodeRequest(session_id, node.parent_id or "", node.kind, node.name, None, opener, gone)
        return move(view, session_id, DelegationState.WORKING, worker=context.instance), open_node(view, opening)

    marks = (owner_mark(session_id), LEDGER_ID, delegation_mark(session_id))
    decided = yield Transact(Scope((session_id,), marks=marks, durable=True), change)
    if isinstance(decided, Refusal):
        raise (yield from refused(replace(context, node_id=session_id, session_id=session_id), decided))
    opened: tuple[Delegation, Node] = decided
    return opened


def _check_token(view: LedgerView, token: Token) -> None:
    here_id = (view.mark(LEDGER_ID) or {"id": ""})["id"]
    if token.ledger != here_id:
        raise ConfigError("token: it is for another ledger; open the ledger of the session that has delegated")
    row = view.mark(delegation_mark(token.session))
    if row is None or not token.is_signed_by(known_delegation(view, token.session).keys):
        raise ConfigError("token: this ledger has not issued it, or it was changed; its signature does not hold")
    delegation = known_delegation(view, token.session)
    if delegation.state is DelegationState.REVOKED:
        raise ConfigError(f"token: it is revoked: {delegation.reason}")
    if delegation.state not in UNANSWERED:
        raise ConfigError(f"token: its task {delegation.request_id!r} is {delegation.state} already")
    until_unix = min(token.until_unix, delegation.until_ms // 1000)
    if view.now_unix >= until_unix:
        raise ConfigError(f"token: it ended {view.now_unix - until_unix} s ago, with the deadline of its task")


def revoke_task(context: Context, delegation: Delegation, reason: str) -> Flow[None]:
    """Revoke a delegation, and trip its session. Raises ``ConfigError`` if it is answered."""
    session_id = delegation.session
    scope = Scope((session_id,), marks=delegation_marks(delegation), durable=True)
    yield Transact(scope, lambda view: revoke(view, session_id, f"{reason} (by {context.session_id})"))

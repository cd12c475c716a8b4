"""The conversations around an action that can be undone: it is written before it begins, and its end after it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from x402guard.errors import SessionClosed
from x402guard.flow.admission import check_standing
from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, Transact
from x402guard.flow.refusals import refused
from x402guard.frozen import replace
from x402guard.kernel.rows import HoldKind, NodeState
from x402guard.ledger.actions import (
    Action,
    ActionState,
    action_mark,
    actions_mark,
    begin_action,
    commit_actions,
    is_ending,
    known_action,
    move_action,
)
from x402guard.ledger.authorize import Refusal, check_open
from x402guard.ledger.view import LedgerView, Scope
from x402guard.policy.steps import run_of

_AT_ONCE: Final = 500


def begin(context: Context, action: Action, delay_ms: int = 0) -> Flow[Action]:
    """Write an action that begins now, or is staged for *delay_ms* milliseconds from now, and return it.

    Raises the refusal of a session that is tripped, closed, or ending abnormally: nothing has begun then.
    """
    run_id = run_of(action.session)

    def change(view: LedgerView) -> Action | Refusal:
        state = ActionState.STAGED if delay_ms else ActionState.BEGUN
        wanted = replace(action, state=state, due_ms=view.now_ms + delay_ms if delay_ms else 0)
        refusal = check_standing(view, context) or _ending(view, action)
        return refusal or begin_action(view, run_id, wanted)

    scope = Scope(nodes=(context.node_id,), marks=(actions_mark(run_id), action_mark(action.id)), durable=True)
    begun: Action | Refusal = yield Transact(scope, change)
    if isinstance(begun, Refusal):
        raise (yield from refused(context, begun, of=(HoldKind.TOOL, action.name)))
    return begun


def begin_staged(context: Context, action: Action) -> Flow[Action | None]:
    """Write that a staged action begins now, and return it; None if it is not staged any more.

    Where something around it is tripped, or its run has ended, it is undone and never begins: raises that refusal. The
    end of the child or scope in which it was staged does not stop it.
    """
    run_id = run_of(action.session)

    def change(view: LedgerView) -> Action | Refusal | None:
        if known_action(view, action.id).state is not ActionState.STAGED:
            return None
        tripped = any(node.state is NodeState.TRIPPED for node in view.path(context.node_id))
        stopped = check_open(view, context.node_id) if tripped else None
        refusal = stopped or check_standing(view, replace(context, node_id=run_id)) or _ending(view, action)
        begun = move_action(view, action.id, ActionState.BEGUN if refusal is None else ActionState.UNDONE)
        return refusal or begun

    scope = Scope(nodes=(context.node_id,), marks=(actions_mark(run_id), action_mark(action.id)), durable=True)
    begun: Action | Refusal | None = yield Transact(scope, change)
    if isinstance(begun, Refusal):
        raise (yield from refused(context, begun, of=(HoldKind.TOOL, action.name)))
    return begun


def _ending(view: LedgerView, action: Action) -> Refusal | None:
    if not is_ending(view, run_of(action.session), action.session):
        return None
    return Refusal("session_closed", "the session is ending, and what it has done is being undone", error=SessionClosed)


def finish(action: Action, result: Any) -> Flow[tuple[Action, bool]]:
    """Write that an action is done, with its *result* as JSON holds it. Returns it, and whether it comes too late.

    It does if its session has ended meanwhile, or is ending abnormally: what it has done has to be undone then.
    """
    run_id = run_of(action.session)

    def change(view: LedgerView) -> tuple[Action, bool]:
        before = known_action(view, action.id)
        over = view.node(run_id).state is NodeState.CLOSED or is_ending(view, run_id, action.session)
        if before.state is not ActionState.BEGUN:
            return replace(before, result=result, returned=True), True
        done = move_action(view, action.id, ActionState.DONE, result=result)
        return done, over or before.undoing

    scope = Scope(nodes=(action.session,), marks=(actions_mark(run_id), action_mark(action.id)), durable=True)
    answer: tuple[Action, bool] = yield Transact(scope, change)
    return answer


def commit_done(context: Context, actions: Sequence[Action]) -> Flow[None]:
    """Make those of the actions final that are done. Raises the refusal if something around the session is tripped."""
    for start in range(0, len(actions), _AT_ONCE):
        ids = [action.id for action in actions[start : start + _AT_ONCE]]
        sessions = {action.session for action in actions[start : start + _AT_ONCE]}
        scope = Scope(nodes=(context.node_id, *sessions), marks=tuple(map(action_mark, ids)), durable=True)
        refusal: Refusal | None = yield Transact(scope, partial(_commit, context=context, action_ids=ids))
        if refusal is not None:
            raise (yield from refused(context, refusal))


def _commit(view: LedgerView, context: Context, action_ids: Sequence[str]) -> Refusal | None:
    tripped = any(node.state is NodeState.TRIPPED for node in view.path(context.node_id))
    if view.killed_by or tripped:
        return check_standing(view, context)
    commit_actions(view, action_ids)
    return None

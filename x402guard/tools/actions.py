"""The conversations around an action that can be undone: it is written before it begins, and its end after it."""

from __future__ import annotations

from typing import Any

from x402guard.flow.admission import check_standing
from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, Transact
from x402guard.flow.refusals import refused
from x402guard.frozen import replace
from x402guard.ledger.actions import Action, ActionState, action_mark, actions_mark, begin_action, move_action
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.model import HoldKind
from x402guard.ledger.view import LedgerView, Scope
from x402guard.policy.steps import run_of


def begin(context: Context, action: Action, delay_ms: int = 0) -> Flow[Action]:
    """Write an action that begins now, or is staged for *delay_ms* milliseconds from now, and return it.

    Raises the refusal of a tripped or closed session: nothing has begun then.
    """
    run_id = run_of(action.session)

    def change(view: LedgerView) -> Action | Refusal:
        state = ActionState.STAGED if delay_ms else ActionState.BEGUN
        wanted = replace(action, state=state, due_ms=view.now_ms + delay_ms if delay_ms else 0)
        return check_standing(view, context) or begin_action(view, run_id, wanted)

    scope = Scope(nodes=(context.node_id,), marks=(actions_mark(run_id), action_mark(action.id)), durable=True)
    begun: Action | Refusal = yield Transact(scope, change)
    if isinstance(begun, Refusal):
        raise (yield from refused(context, begun, of=(HoldKind.TOOL, action.name)))
    return begun


def begin_staged(context: Context, action: Action) -> Flow[Action]:
    """Write that a staged action begins now. Where its session is stopped, it is undone, and never begins.

    Raises the refusal of a tripped or closed session.
    """

    def change(view: LedgerView) -> Action | Refusal:
        refusal = check_standing(view, context)
        move_action(view, action.id, ActionState.BEGUN if refusal is None else ActionState.UNDONE)
        return refusal or replace(action, state=ActionState.BEGUN)

    scope = Scope(nodes=(context.node_id,), marks=(action_mark(action.id),), durable=True)
    begun: Action | Refusal = yield Transact(scope, change)
    if isinstance(begun, Refusal):
        raise (yield from refused(context, begun, of=(HoldKind.TOOL, action.name)))
    return begun


def finish(action: Action, result: Any) -> Flow[Action]:
    """Write that an action is done, with its *result* as JSON holds it."""
    scope = Scope(nodes=(action.session,), marks=(action_mark(action.id),), durable=True)
    done: Action = yield Transact(scope, lambda view: move_action(view, action.id, ActionState.DONE, result=result))
    return done

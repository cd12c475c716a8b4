"""Defines the states of an action that can be undone, and every transition between them.

Each action of a run has a mark with what its undo has to know, and an entry in the journal for each transition. A
transition that is not in ``ACTIONS`` cannot happen; the same one again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct, convert, to_builtins

from x402guard.errors import IllegalTransition
from x402guard.frozen import replace
from x402guard.ledger.view import LedgerView, MarkKey


class ActionState(StrEnum):
    """What has become of an action."""

    STAGED = "staged"
    BEGUN = "begun"
    DONE = "done"
    COMMITTED = "committed"
    UNDONE = "undone"
    FAILED = "failed"


OPEN_STATES: Final = frozenset({ActionState.STAGED, ActionState.BEGUN, ActionState.DONE, ActionState.FAILED})
"""The states of an action that is neither final nor undone."""

_S = ActionState

ACTIONS: Final[Mapping[ActionState, frozenset[ActionState]]] = MappingProxyType(
    {
        _S.STAGED: frozenset({_S.BEGUN, _S.UNDONE}),
        _S.BEGUN: frozenset({_S.DONE, _S.UNDONE, _S.FAILED}),
        _S.DONE: frozenset({_S.COMMITTED, _S.UNDONE, _S.FAILED}),
        _S.FAILED: frozenset({_S.UNDONE, _S.FAILED}),
        _S.COMMITTED: frozenset(),
        _S.UNDONE: frozenset(),
    }
)
"""State → the states that may follow it."""


class Action(Struct, frozen=True):
    """An action that can be undone. Its undo gets it.

    Attributes:
        id: ``RUN/…``, unique in the ledger.
        number: its place among the actions of its run, from 1 on.
        session: the id of the session that began it.
        name: the function's name.
        undo: the function that undoes it, as ``module:function``.
        arguments: by their names, as JSON holds them.
        result: what the function has returned, as JSON holds it.
        returned: True if the function has returned; otherwise it may have done all, a part or nothing.
        state: what has become of it.
        at_ms: when it came into this state, in unix milliseconds.
        due_ms: when a staged action runs, in unix milliseconds; else 0.
        error: the class of the error that its undo raised, or "".
    """

    id: str
    session: str
    name: str
    undo: str
    arguments: Mapping[str, Any]
    number: int = 0
    result: Any = None
    returned: bool = False
    state: ActionState = ActionState.BEGUN
    at_ms: int = 0
    due_ms: int = 0
    error: str = ""


def actions_mark(run_id: str) -> MarkKey:
    """Return the key of the mark with the number of a run's last action."""
    return "actions", run_id


def action_mark(action_id: str) -> MarkKey:
    """Return the key of the mark that keeps one action."""
    return "action", action_id


def read_action(row: Mapping[str, Any]) -> Action:
    """Return the action in a mark. Raises ``msgspec.ValidationError`` if it is none."""
    return convert(row, Action)


def begin_action(view: LedgerView, run_id: str, action: Action) -> Action:
    """Write a new action, begun or staged, with the next number of its run, and return it.

    It restrains: what is done without it in the ledger cannot be undone.
    """
    row = view.mark(actions_mark(run_id))
    number = 1 + (0 if row is None else int(row["last"]))
    view.put_mark(actions_mark(run_id), {"last": number})
    return _write(view, replace(action, number=number))


def move_action(view: LedgerView, action_id: str, to: ActionState, *, result: Any = None, error: str = "") -> Action:
    """Bring an action into another state, and return it; one that is in that state already is unchanged.

    *result* is what the function has returned, for ``done``; *error* the class of the error that its undo raised, for
    ``failed``. Raises ``IllegalTransition`` if the action is not in view or ``ACTIONS`` forbids it.
    """
    row = view.mark(action_mark(action_id))
    if row is None:
        raise IllegalTransition(f"action {action_id} is not in the scope of this change")
    action = read_action(row)
    if action.state is to and to is not ActionState.FAILED:
        return action
    if to not in ACTIONS[action.state]:
        raise IllegalTransition(f"action {action_id} is {action.state}, so it cannot become {to}")
    returned = action.returned or to is ActionState.DONE
    kept = result if to is ActionState.DONE else action.result
    return _write(view, replace(action, state=to, result=kept, returned=returned, error=error))


def _write(view: LedgerView, action: Action) -> Action:
    view.restrains = True
    action = replace(action, at_ms=view.now_ms)
    view.put_mark(action_mark(action.id), to_builtins(action))
    facts = {"name": EVENTS[action.state], "action": action.id, "function": action.name}
    view.record(action.session, "event", facts={**facts, "error": action.error} if action.error else facts)
    if action.state is ActionState.FAILED:
        message = f"{action.name} ({action.id}) could not be undone: {action.error}; undo it by hand, or see {_SEE}"
        told = {"action": action.id, "function": action.name, "error": action.error}
        view.tell("undo_failed", "critical", message, session=action.session, facts=told)
    return action


_SEE: Final = "x402guard journal"

EVENTS: Final[Mapping[ActionState, str]] = MappingProxyType(
    {
        _S.STAGED: "action_staged",
        _S.BEGUN: "action_begun",
        _S.DONE: "action_done",
        _S.COMMITTED: "action_committed",
        _S.UNDONE: "action_undone",
        _S.FAILED: "undo_failed",
    }
)
"""State → the name of the journal's event."""


def below(actions: Iterable[Action], session_id: str) -> list[Action]:
    """Return the actions of a session and the sessions below it, in the order in which they began."""
    inside = [each for each in actions if each.session == session_id or each.session.startswith(f"{session_id}/")]
    return sorted(inside, key=lambda each: each.number)

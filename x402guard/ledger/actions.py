"""Defines the states of an action that can be undone, and every transition between them.

Each action of a run has a mark with what its undo has to know, and an entry in the journal for each transition. A
transition that is not in ``ACTIONS`` cannot happen; the same one again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct, ValidationError, to_builtins

from x402guard.errors import IllegalTransition
from x402guard.frozen import read_struct, readable, replace
from x402guard.kernel.change_set import MarkKey
from x402guard.ledger.sessions import Closing, Ending, close_node, ending_of
from x402guard.ledger.view import LedgerView


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
        _S.UNDONE: frozenset({_S.FAILED}),
    }
)
"""State → the states that may follow it. One that took effect after it was undone, and is not undone again, has failed."""


@readable
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
        undoing: True from when its undo is called until that has ended.
        error: why its undo failed, such as the class of the error that it raised; or "".
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
    undoing: bool = False
    error: str = ""


def actions_mark(run_id: str) -> MarkKey:
    """Return the key of the mark with the number of a run's last action."""
    return "actions", run_id


def action_mark(action_id: str) -> MarkKey:
    """Return the key of the mark that keeps one action."""
    return "action", action_id


def read_action(action_id: str, row: Mapping[str, Any]) -> Action:
    """Return the action in a mark. One whose row cannot be read is shown as failed, because nothing can undo it."""
    try:
        return read_struct(row, Action)
    except ValidationError:
        state = ActionState.FAILED
        return Action(action_id, action_id.partition("/")[0], "?", "", {}, state=state, error="its row cannot be read")


def begin_action(view: LedgerView, run_id: str, action: Action) -> Action:
    """Write a new action, begun or staged, with the next number of its run, and return it.

    It restrains: what is done without it in the ledger cannot be undone.
    """
    row = _run_row(view, run_id)
    number = int(row["last"]) + 1
    view.put_mark(actions_mark(run_id), {**row, "last": number})
    return _write(view, replace(action, number=number))


def known_action(view: LedgerView, action_id: str) -> Action:
    """Return an action in view. Raises ``IllegalTransition`` for one outside the scope."""
    row = view.mark(action_mark(action_id))
    if row is None:
        raise IllegalTransition(f"action {action_id} is not in the scope of this change")
    return read_struct(row, Action)


def move_action(view: LedgerView, action_id: str, to: ActionState, *, result: Any = None, error: str = "") -> Action:
    """Bring an action into another state, and return it; one that is in that state already is unchanged.

    *result* is what the function has returned, for ``done``; *error* why its undo failed, for ``failed``. Raises
    ``IllegalTransition`` if the action is not in view or ``ACTIONS`` forbids it.
    """
    action = known_action(view, action_id)
    if action.state is to and to is not ActionState.FAILED:
        return action
    if to not in ACTIONS[action.state]:
        raise IllegalTransition(f"action {action_id} is {action.state}, so it cannot become {to}")
    returned = action.returned or to is ActionState.DONE
    kept = result if to is ActionState.DONE else action.result
    undoing = action.undoing and to is ActionState.DONE
    return _write(view, replace(action, state=to, result=kept, returned=returned, undoing=undoing, error=error))


def claim_undo(view: LedgerView, action_id: str) -> Action | None:
    """Note that an action is about to be undone, so that nothing commits it; None if it is final or undone.

    A staged one is undone by that: it never begins.
    """
    action = known_action(view, action_id)
    if action.state not in OPEN_STATES:
        return None
    if action.state is ActionState.STAGED:
        return move_action(view, action_id, ActionState.UNDONE)
    claimed = replace(action, undoing=True)
    view.put_mark(action_mark(action_id), to_builtins(claimed))
    return claimed


def commit_actions(view: LedgerView, action_ids: Iterable[str]) -> None:
    """Make those of the actions final that are done, and that nothing is undoing."""
    for action_id in action_ids:
        action = known_action(view, action_id)
        if action.state is ActionState.DONE and not action.undoing:
            move_action(view, action_id, ActionState.COMMITTED)


def _run_row(view: LedgerView, run_id: str) -> Mapping[str, Any]:
    return view.mark(actions_mark(run_id)) or {"last": 0, "ending": {}, "failed": []}


def begin_end(view: LedgerView, run_id: str, node_id: str, closing: Closing) -> Ending | None:
    """End one opening of a session of a run, and return how it ends, if its actions have to be committed or undone first.

    Then ``end`` ends it. From an abnormal end on, nothing begins in it. An opening that fails while others are open makes
    the end abnormal.
    """
    row = view.mark(actions_mark(run_id))
    if row is None:
        close_node(view, node_id, closing)
        return None
    failed = closing.failed or node_id in row["failed"]
    ending = ending_of(view, node_id, replace(closing, failed=failed))
    if ending is None and failed and node_id not in row["failed"]:
        view.put_mark(actions_mark(run_id), {**row, "failed": [*row["failed"], node_id]})
    if ending == "abnormal":
        note_abnormal(view, run_id, node_id, closing)
    if ending is None or (ending == "normal" and node_id != run_id):
        close_node(view, node_id, closing)
        return None
    return ending


def note_abnormal(view: LedgerView, run_id: str, node_id: str, closing: Closing) -> None:
    """Note that an opening ends its session abnormally: nothing begins in it from now on."""
    row = _run_row(view, run_id)
    view.put_mark(actions_mark(run_id), {**row, "ending": {**row["ending"], node_id: closing.opener}})


def end(view: LedgerView, run_id: str, node_id: str, closing: Closing) -> None:
    """End an opening of a session whose actions are committed or undone."""
    row = _run_row(view, run_id)
    ending = {key: opener for key, opener in row["ending"].items() if key != node_id}
    failed = [key for key in row["failed"] if key != node_id]
    view.put_mark(actions_mark(run_id), {**row, "ending": ending, "failed": failed})
    close_node(view, node_id, closing)


def is_ending(view: LedgerView, run_id: str, session_id: str) -> bool:
    """True if a session of a run, or one around it, ends abnormally, and its actions are being undone."""
    ending = _run_row(view, run_id)["ending"]
    around = {node.id: node for node in view.path(session_id)}
    return any(key in around and opener in around[key].openers for key, opener in ending.items())


def _write(view: LedgerView, action: Action) -> Action:
    action = replace(action, at_ms=view.now_ms)
    view.put_mark(action_mark(action.id), to_builtins(action))
    facts = {"name": EVENTS[action.state], "action": action.id, "function": action.name}
    view.record(action.session, "event", facts={**facts, "error": action.error} if action.error else facts)
    if action.state is ActionState.FAILED:
        message = f"{action.name} ({action.id}) could not be undone: {action.error}; see x402guard journal show {action.session}"
        told = {"action": action.id, "function": action.name, "error": action.error}
        view.tell("undo_failed", "critical", message, session=action.session, facts=told)
    return action


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

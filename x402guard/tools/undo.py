"""Undoes and commits the actions of a session, and runs staged ones at their time."""

from __future__ import annotations

import heapq
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final

import anyio
from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.flow.context import Context
from x402guard.flow.drivers import run
from x402guard.flow.shell import LOG, Shell
from x402guard.flow.threads import context_of_a_thread
from x402guard.ledger.actions import (
    OPEN_STATES,
    Action,
    ActionState,
    action_mark,
    below,
    claim_undo,
    known_action,
    move_action,
    read_action,
)
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import Change, Scope
from x402guard.policy.steps import run_of
from x402guard.tools.actions import commit_done

Undo = Callable[[Action], object]

Books = Callable[[Scope, Change[Any]], Any]
"""Runs one change of the ledger, and sends its notices."""

UNDOING: Final[ContextVar[bool]] = ContextVar("x402guard_undoing", default=False)
"""True while an undo runs: what it does is not an action of its own."""


_REGISTERED: Final[set[str]] = set()
"""The undo functions that ``reversible`` has named in this process, as ``module:function``. No other is called."""

_BEGUN_HERE: Final[dict[str, tuple[int, str, Mapping[str, Any], Any]]] = {}
"""The actions that are not final and that this process has begun, as it has written them: by the process's number (a fork has
none), with their undo, arguments and result. A row that says otherwise was changed by somebody else."""


def register_undo(target: str) -> None:
    """Let *target*, ``module:function``, be called as an undo in this process."""
    _REGISTERED.add(target)


def note_begun(action: Action, result: Any = None) -> None:
    """Note that this process begins an action, or has its *result*: at the end of its session it undoes no other."""
    _BEGUN_HERE[action.id] = (os.getpid(), action.undo, action.arguments, result)


def is_begun_here(action: Action) -> bool:
    """True for an action that this process has begun."""
    found = _BEGUN_HERE.get(action.id)
    return found is not None and found[0] == os.getpid()


def _is_another(action: Action) -> bool:
    """True for the row of an action of this process that says what it has not written."""
    if not is_begun_here(action):
        return False
    _, named, arguments, result = _BEGUN_HERE[action.id]
    return (named, arguments) != (action.undo, action.arguments) or (action.returned and result != action.result)


def unregistered(actions: Iterable[Action]) -> list[str]:
    """Return the undo functions of actions that no ``reversible`` has named in this process. A ledger's row names none."""
    return sorted({each.undo for each in actions if each.state is not ActionState.STAGED} - _REGISTERED)


def find_undo(target: str) -> Undo:
    """Return the function that *target*, ``module:function``, names.

    Raises ``ConfigError`` if no ``reversible`` of this process has named it, or it cannot be imported.
    """
    if target not in _REGISTERED:
        raise ConfigError(f"undo: no function of this process is decorated with reversible(undo={target!r})")
    module, _, path = target.partition(":")
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything while it is imported
        raise ConfigError(
            f"undo: {target!r} cannot be imported ({type(error).__name__}: {str(error)[:200]}); write 'module:function' of "
            "a function that a new process can import"
        ) from None
    if not callable(found):
        raise ConfigError(f"undo: {target!r} is a {type(found).__name__}, not a function")
    undo: Undo = found
    return undo


def actions_of(store: LedgerStore, session_id: str) -> list[Action]:
    """Return the actions of a session and below, in the order in which they began."""
    rows = store.marks("action", f"{run_of(session_id)}/")
    return below((read_action(key, row) for key, row in rows.items()), session_id)


def undo(books: Books, action: Action) -> Action:
    """Undo one action, and return it as it is then: undone, failed, or final. Cancels a staged one; a final one stays.

    *action* may be out of date: what the ledger says counts. An action that came too late, and is undone there already,
    is undone once more.
    """
    if not action.undo:
        return action  # its row cannot be read
    STAGED.cancel(action.id)
    scope = Scope(nodes=(action.session,), marks=(action_mark(action.id),), durable=True)
    late = action.state in (ActionState.UNDONE, ActionState.FAILED)
    claimed: Action | None = books(scope, lambda view: claim_undo(view, action.id))
    if claimed is None and not late:
        found: Action = books(scope, lambda view: known_action(view, action.id))
        return found  # another process has made it final, or has undone it
    if claimed is not None and claimed.state is ActionState.UNDONE:
        return claimed  # it was staged
    error = _try(claimed or action)
    to = ActionState.FAILED if error else ActionState.UNDONE
    if claimed is None and not error:
        return action
    moved: Action = books(scope, lambda view: move_action(view, action.id, to, error=error))
    _BEGUN_HERE.pop(action.id, None)
    return moved


def roll_back(store: LedgerStore, books: Books, session_id: str, *, of_others: bool = False) -> list[Action]:
    """Undo what a session and those below it have not committed, the last action first. Returns the actions as they are then.

    Those that this process has begun, and those *of others* if its owner says so. An undo that fails is recorded, and the
    others follow. Raises ``LedgerUnavailable``.
    """
    undone: dict[str, Action] = {}
    while True:
        # Again, because one may have begun while the others were undone.
        left = [each for each in actions_of(store, session_id) if each.state in OPEN_STATES and each.id not in undone]
        left = [each for each in left if of_others or is_begun_here(each)]
        if not left:
            return list(undone.values())
        for action in reversed(left):
            undone[action.id] = undo(books, action)


def commit(shell: Shell, context: Context, session_id: str) -> None:
    """Run what a session and those below it have staged, and make what they have done final.

    All of it runs, also if one raises; then the first error is raised. Raises the refusal of a session that is tripped,
    or below something that is, and ``ConfigError`` inside an undo.
    """
    if UNDOING.get():
        raise ConfigError("undo: an undo commits nothing; leave session.commit() out of it")
    errors: list[BaseException] = []
    for action in actions_of(shell.store, session_id):
        if action.state in (ActionState.STAGED, ActionState.BEGUN):  # one that the timer has begun is waited for
            errors += STAGED.run_now(action.id)
    left = actions_of(shell.store, session_id)
    run(commit_done(context, [each for each in left if each.state is ActionState.DONE]), shell)
    for action in left:
        if action.state not in (ActionState.STAGED, ActionState.BEGUN) and not action.undoing:
            _BEGUN_HERE.pop(action.id, None)
        if action.state in (ActionState.STAGED, ActionState.BEGUN):
            LOG.warning("%s (%s) is %s, so it is not committed", action.name, action.id, action.state)
        elif action.state is ActionState.DONE and action.undoing:
            LOG.warning(
                "%s (%s) is being undone, or was when its process ended, so it is not committed; undo it with: "
                "x402guard journal rollback %s", action.name, action.id, run_of(session_id),
            )  # fmt: skip
    if errors:
        raise errors[0]


def _try(action: Action) -> str:
    """Call the undo of an action, and return why it failed, without its words, or ""."""
    if _is_another(action):
        return "its row is not what this process has written"
    try:
        function = find_undo(action.undo)
    except ConfigError:
        return f"{action.undo} is registered by no function here, or cannot be imported"
    try:
        _call(function, action)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - it is the owner's function; the others are undone all the same
        return type(error).__name__
    return ""


def _call(function: Undo, action: Action) -> None:
    before = UNDOING.set(True)
    try:
        if inspect.iscoroutinefunction(function):
            in_own_loop(lambda: function(action))
            return
        left = function(action)
    finally:
        UNDOING.reset(before)
    if inspect.isawaitable(left):
        getattr(left, "close", lambda: None)()
        raise ConfigError(f"undo: {action.undo!r} returned an awaitable; declare it with async def")


def in_own_loop(call: Callable[[], Any]) -> Any:
    """Return the result of an awaitable, awaited in an event loop of its own, in a thread of its own."""
    from concurrent.futures import ThreadPoolExecutor

    async def main() -> Any:
        return await call()

    context = context_of_a_thread()
    with ThreadPoolExecutor(1, "x402guard-own-loop") as pool:
        return pool.submit(lambda: context.run(anyio.run, main)).result()


class _Entry(Struct, eq=False):
    """A staged action of this process: what runs it, and how that went."""

    call: Callable[[], object]
    done: threading.Event
    thread: int | None = None
    error: BaseException | None = None


class _Staged:
    """The staged actions of this process, and the thread that begins each at its time."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._due: list[tuple[float, str]] = []
        self._thread: threading.Thread | None = None

    def add(self, action_id: str, delay_s: float, call: Callable[[], object]) -> None:
        """Run an action in *delay_s* seconds, unless it is run or cancelled before."""
        with self._wake:
            self._entries[action_id] = _Entry(call, threading.Event())
            heapq.heappush(self._due, (time.monotonic() + delay_s, action_id))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._wait, name="x402guard-staged", daemon=True)
                self._thread.start()
            self._wake.notify()

    def cancel(self, action_id: str) -> None:
        """Forget an action that has not begun to run."""
        with self._wake:
            entry = self._entries.get(action_id)
            if entry is not None and entry.thread is None:
                del self._entries[action_id]

    def run_now(self, action_id: str) -> list[BaseException]:
        """Run an action before its time, or wait for one under way. Returns what it raised, if anything."""
        with self._wake:
            entry = self._entries.get(action_id)
            if entry is None or entry.thread == threading.get_ident():
                return []
            first = entry.thread is None
            entry.thread = threading.get_ident() if first else entry.thread
        if first:
            self._perform(action_id, entry)
        entry.done.wait()
        return [] if entry.error is None else [entry.error]

    def _perform(self, action_id: str, entry: _Entry) -> None:
        entry.thread = threading.get_ident()
        try:
            entry.call()
        except BaseException as error:  # noqa: BLE001 - who waits for it raises it; the timer logs it
            entry.error = error
        finally:
            with self._wake:
                self._entries.pop(action_id, None)
                self._wake.notify()
            entry.done.set()

    def _due_now(self, action_id: str) -> None:
        for error in self.run_now(action_id):
            LOG.warning("the staged action %s was not done: %s", action_id, type(error).__name__)

    def _wait(self) -> None:
        while True:
            with self._wake:
                while not self._due or self._due[0][0] > time.monotonic():
                    if not self._entries:
                        self._due.clear()
                        self._thread = None
                        return
                    self._wake.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, action_id = heapq.heappop(self._due)
                waits = action_id in self._entries
            if waits:  # a thread of its own, so that a slow one keeps no other from its time
                threading.Thread(target=self._due_now, args=(action_id,), name="x402guard-staged", daemon=True).start()


STAGED: Final = _Staged()

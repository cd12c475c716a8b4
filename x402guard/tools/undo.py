"""Undoes and commits the actions of a session, and runs staged ones at their time."""

from __future__ import annotations

import heapq
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from importlib import import_module
from typing import Any, Final

import anyio

from x402guard.errors import ConfigError, X402GuardError
from x402guard.flow.shell import LOG
from x402guard.ledger.actions import OPEN_STATES, Action, ActionState, action_mark, below, move_action, read_action
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import Change, Scope
from x402guard.policy.steps import run_of

Undo = Callable[[Action], object]

Books = Callable[[Scope, Change[Action]], Action]
"""Runs one change of the ledger, and sends its notices."""


def find_undo(target: str) -> Undo:
    """Return the function that *target*, ``module:function``, names. Raises ``ConfigError`` if it cannot be imported."""
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
    return below(map(read_action, rows.values()), session_id)


def undo(books: Books, action: Action) -> Action:
    """Undo one action, and return it as it is then: undone, or failed with the error's class. Cancels a staged one."""
    STAGED.cancel(action.id)
    if action.state is ActionState.STAGED:
        return _moved(books, action, ActionState.UNDONE)
    try:
        _call(find_undo(action.undo), action)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the owner's function; the others are undone all the same
        LOG.exception("%s (%s) could not be undone", action.name, action.id)
        why = str(error) if isinstance(error, ConfigError) else type(error).__name__
        return _moved(books, action, ActionState.FAILED, error=why)
    return _moved(books, action, ActionState.UNDONE)


def roll_back(store: LedgerStore, books: Books, session_id: str) -> list[Action]:
    """Undo what a session and those below it have not committed, the last action first. Returns the actions as they are then.

    An undo that fails is recorded, and the others follow. Raises ``LedgerUnavailable``.
    """
    undone = []
    for listed in reversed(actions_of(store, session_id)):
        # It is read again: the undo of a later one may have taken long.
        action = read_action(store.marks("action", listed.id)[listed.id])
        if action.state in OPEN_STATES:
            undone.append(undo(books, action))
    return undone


def commit(store: LedgerStore, books: Books, session_id: str) -> None:
    """Make what a session and those below it have done final, and run what is staged. Raises what a staged action raises."""
    for action in actions_of(store, session_id):
        if action.state is ActionState.STAGED and not STAGED.run_now(action.id):
            LOG.warning("%s (%s) was staged by another process and stays staged", action.name, action.id)
    for action in actions_of(store, session_id):
        if action.state is ActionState.DONE:
            _moved(books, action, ActionState.COMMITTED)
        elif action.state is ActionState.BEGUN:
            LOG.warning("%s (%s) has begun and not ended, so it is not committed", action.name, action.id)


def _moved(books: Books, action: Action, to: ActionState, *, error: str = "") -> Action:
    scope = Scope(nodes=(action.session,), marks=(action_mark(action.id),), durable=True)
    return books(scope, lambda view: move_action(view, action.id, to, error=error))


def _call(function: Undo, action: Action) -> None:
    """Call an undo; one that is async runs in an event loop of its own, in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        with ThreadPoolExecutor(1, "x402guard-undo") as pool:
            context = copy_context()
            pool.submit(lambda: context.run(anyio.run, function, action)).result()
        return
    left = function(action)
    if inspect.isawaitable(left):
        getattr(left, "close", lambda: None)()
        raise ConfigError(f"undo: {action.undo!r} returned an awaitable; declare it with async def")


class _Staged:
    """The staged actions of this process, and the thread that runs each at its time."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._runs: dict[str, Callable[[], object]] = {}
        self._due: list[tuple[float, str]] = []
        self._thread: threading.Thread | None = None

    def add(self, action_id: str, delay_s: float, run: Callable[[], object]) -> None:
        """Run an action in *delay_s* seconds, unless it is run or cancelled before."""
        with self._wake:
            self._runs[action_id] = run
            heapq.heappush(self._due, (time.monotonic() + delay_s, action_id))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._wait, name="x402guard-staged", daemon=True)
                self._thread.start()
            self._wake.notify()

    def cancel(self, action_id: str) -> None:
        """Do not run an action."""
        self._take(action_id)

    def run_now(self, action_id: str) -> bool:
        """Run an action before its time. False if it is not staged in this process. Raises what it raises."""
        run = self._take(action_id)
        if run is not None:
            run()
        return run is not None

    def _take(self, action_id: str) -> Callable[[], object] | None:
        with self._wake:
            return self._runs.pop(action_id, None)

    def _wait(self) -> None:
        while True:
            with self._wake:
                while not self._due or self._due[0][0] > time.monotonic():
                    if not self._runs:
                        self._due.clear()
                        self._thread = None
                        return
                    self._wake.wait(self._due[0][0] - time.monotonic())
                _, action_id = heapq.heappop(self._due)
            try:
                self.run_now(action_id)
            except X402GuardError as error:
                LOG.warning("the staged action %s was not done: %s", action_id, error)
            except Exception:  # noqa: BLE001 - it is the owner's function; the thread goes on with the next
                LOG.exception("the staged action %s raised", action_id)


STAGED: Final = _Staged()

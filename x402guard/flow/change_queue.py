"""Gives a ledger the changes that event loops await: one thread writes all that wait, and wakes each loop once for them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar, cast

from x402guard.flow.detached import Wakeable, wake_all
from x402guard.flow.threads import awaited
from x402guard.ledger.store import LedgerStore, Outcome, SharesCommits
from x402guard.ledger.view import Change, Scope

R = TypeVar("R")

MOST_AT_ONCE: Final = 64
"""The most changes that are begun at once. The others can still be dropped."""


class Asked(NamedTuple):
    """A change that waits. *work* has its outcome once *done* is set; ``work.cancel()`` drops it until it is begun."""

    scope: Scope
    change: Change[Any]
    work: Future[Any]
    done: Wakeable


class ChangeQueue:
    """The changes of one ledger that wait for its thread, oldest first."""

    def __init__(self) -> None:
        self._asked: deque[Asked] = deque()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="x402guard-ledger")
        self._is_called = False

    def put(self, store: LedgerStore, asked: Asked) -> None:
        """Let a change wait for the thread. Where no thread can be started, it is written here, before this returns."""
        self._asked.append(asked)
        if self._is_called:
            return  # the thread takes what waits after it has said otherwise
        self._is_called = True
        try:
            self._threads.submit(self._write, store)
        except (RuntimeError, ImportError):  # the interpreter is ending, or the process has too many threads
            self._write(store)

    def _write(self, store: LedgerStore) -> None:
        self._is_called = False
        while some := self._begun():
            try:
                outcomes = transact_all(store, [(each.scope, each.change) for each in some])
                for each, (result, error) in zip(some, outcomes, strict=True):
                    if error is None:
                        each.work.set_result(result)
                    else:
                        each.work.set_exception(error)
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                for each in some:
                    if not each.work.done():
                        each.work.set_exception(error)
            wake_all([each.done for each in some])

    def _begun(self) -> list[Asked]:
        """Take those that wait, at most ``MOST_AT_ONCE``, but for the ones that were dropped."""
        found: list[Asked] = []
        while self._asked and len(found) < MOST_AT_ONCE:
            try:
                asked = self._asked.popleft()
            except IndexError:
                break  # a thread that could start no other one has taken it
            if asked.work.set_running_or_notify_cancel():
                found.append(asked)
        return found


async def change_in_queue(
    store: LedgerStore, scope: Scope, change: Change[R], late: Callable[[R], object], *, may_drop: bool
) -> R:
    """Return what a change returns that the ledger's thread runs to its end. See ``threads.finish_change``."""
    work: Future[R] = Future()
    done = Wakeable()
    _queue(os.getpid(), id(store)).put(store, Asked(scope, change, work, done))
    return await awaited(work, done, late, may_drop=may_drop)


def transact_all(store: LedgerStore, changes: Sequence[tuple[Scope, Change[Any]]]) -> Sequence[Outcome]:
    """Run changes of several callers: in one transaction where the store can share one, or else one after the other."""
    # Asked of the class: a store that stands around another one, and hands on what it does not know, shares no commits.
    if issubclass(type(store), SharesCommits):
        return cast("SharesCommits", store).transact_all(changes)
    return [_outcome(store, scope, change) for scope, change in changes]


def _outcome(store: LedgerStore, scope: Scope, change: Change[Any]) -> Outcome:
    try:
        return store.transact(scope, change), None
    except Exception as error:  # noqa: BLE001 - raised where it is awaited
        return None, error


@lru_cache(maxsize=64)
def _queue(_pid: int, _store: int) -> ChangeQueue:
    # One thread for each ledger, so that none waits for another; and for each process: a fork has none of its parent's.
    return ChangeQueue()

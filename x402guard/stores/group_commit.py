"""Lets changes that wait share one transaction: the thread that has the turn runs those of the others as well.

A commit costs the same for one change as for sixty. Each change keeps its own outcome: one that fails fails alone, and a
commit that fails fails every change in it.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextvars import copy_context
from typing import Any, Final, Generic, TypeVar, cast

from x402guard.ledger.view import Change, LedgerView, Scope

R = TypeVar("R")

MOST_TOGETHER: Final = 64
"""The most changes that share a transaction, so that other processes get their turn."""

_LOOK_S: Final = 0.05


class Request(Generic[R]):
    """A change that waits for its transaction, and its outcome.

    Attributes:
        scope: the rows that the change may read.
        thread: the thread that waits for it.
        leader: the thread that runs it now; None while it waits.
        ran: True once its transaction was committed, so that it never runs again.
        over: True once the outcome is known.
    """

    def __init__(self, scope: Scope, change: Change[R]) -> None:
        self.scope, self._change = scope, change
        self.thread, self._context = threading.get_ident(), copy_context()
        self.leader: int | None = None
        self.ran = self.over = False
        self._result: R | None = None
        self._error: Exception | None = None

    def run(self, view: LedgerView) -> None:
        """Run the change on *view*, in the context of the thread that waits for it. Raises what it raises."""
        self._error = None
        if threading.get_ident() == self.thread:
            self._result = self._change(view)
        else:
            self._result = self._context.run(self._change, view)

    @property
    def failed(self) -> bool:
        """True if the change itself has failed, so that nothing of it is written."""
        return self._error is not None

    def fail(self, error: Exception) -> None:
        """Note why nothing of the change is written."""
        self._error = error

    def outcome(self) -> R:
        """Return the result of the change, or raise its error."""
        if self._error is not None:
            raise self._error
        return cast("R", self._result)


class Requests:
    """The changes that wait for a transaction, oldest first. Every step is one operation on a deque."""

    def __init__(self) -> None:
        self._waiting: deque[Request[Any]] = deque()

    def add(self, request: Request[Any]) -> None:
        """Let a change wait."""
        self._waiting.append(request)

    def together(self, mine: Request[Any]) -> list[Request[Any]]:
        """Return *mine* and the changes that may share its transaction; they wait no longer."""
        me = threading.get_ident()
        batch = [mine]
        mine.leader = me
        self._remove(mine)
        try:
            for other in tuple(self._waiting)[: MOST_TOGETHER - 1]:
                batch.append(other)
                other.leader = me
                if not self._remove(other):
                    batch.pop()  # its thread has taken it back
        except BaseException:
            self.again(batch[1:])
            raise
        return batch

    def again(self, batch: Iterable[Request[Any]]) -> None:
        """Let the changes wait again that were not run to their end: Ctrl-C came to the thread that ran them."""
        for each in reversed([each for each in batch if not each.over and not each.ran]):
            if each not in self._waiting:
                self._waiting.appendleft(each)
            each.leader = None

    def withdraw(self, request: Request[Any], most_s: float) -> None:
        """Take back a change whose thread is interrupted or has waited too long.

        If another thread is running it, its end is waited for, at most *most_s* seconds, because the flow goes on from
        what is in the ledger then. A further Ctrl-C does not shorten that; the first one is raised after it.
        """
        until_s = time.monotonic() + most_s
        while not self._remove(request) and request.leader not in (None, threading.get_ident()):
            if request.over or time.monotonic() > until_s:
                return
            try:
                time.sleep(_LOOK_S)
            except KeyboardInterrupt:
                continue

    def _remove(self, request: Request[Any]) -> bool:
        try:
            self._waiting.remove(request)
        except ValueError:
            return False
        return True


def failed_together(batch: Iterable[Request[Any]], error: Exception) -> None:
    """Note that the transaction of *batch* has failed. Each thread raises an error of its own."""
    for each in batch:
        each.fail(copy.copy(error))
        each.over = True

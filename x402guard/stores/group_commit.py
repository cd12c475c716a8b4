"""Lets changes that wait share one transaction: the thread that has the turn runs those of the others as well.

A commit costs the same for one change as for sixty. Each change keeps its own outcome: one that fails fails alone, and a
commit that fails fails every change in it.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from typing_extensions import override

from x402guard.errors import LedgerUnavailable
from x402guard.kernel.ledger import Rows, Work
from x402guard.ledger.store import Outcome
from x402guard.ledger.view import Change, Scope
from x402guard.stores.transacts import Proposal, Transacts

R = TypeVar("R")

MOST_TOGETHER: Final = 64
"""The most changes that share a transaction, so that other processes get their turn."""

WRITING: Final = "cannot write the ledger"
"""How the text of an error begins that ends a change."""

_LOOK_S: Final = 0.05


class Line:
    """A queue of threads. The first one has the turn; a thread is in it at most once.

    It needs no lock: every step is one operation on a deque. Ctrl-C may come between any two steps, and ``leave`` then
    repairs the queue: a thread that was not woken polls again 0.05 s later.
    """

    def __init__(self) -> None:
        self._line: deque[int] = deque()
        self._wake: dict[int, SimpleQueue[None]] = {}

    def join(self, timeout_s: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn, at most *timeout_s* seconds. Returns True once this thread has it, or needs it no longer.

        *over* says that another thread has done its work; it has then left the queue. Raises ``RuntimeError`` if this
        thread is already in the queue.
        """
        me = threading.get_ident()
        if me in self._line:
            raise RuntimeError("this thread is already in the queue")
        give_up = time.monotonic() + timeout_s
        wake = self._wake[me] = SimpleQueue()
        self._line.append(me)
        while self._line[0] != me:
            if over():
                self.leave()
                return True
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return False
            with suppress(Empty):
                wake.get(timeout=min(_LOOK_S, left_s))
        if over():
            self.leave()
        return True

    def wake(self, thread: int) -> None:
        """Let a waiting thread look whether its work is over."""
        wake = self._wake.get(thread)
        if wake is not None and wake.empty():
            wake.put(None)

    def check_without_me(self) -> None:
        """Raise ``LedgerUnavailable`` if this thread is in the queue: a signal handler has interrupted it."""
        if threading.get_ident() in self._line:
            raise LedgerUnavailable("this thread is already writing the ledger; its signal handler cannot write too")

    @property
    def is_mine(self) -> bool:
        """True while this thread has the turn."""
        try:
            return self._line[0] == threading.get_ident()
        except IndexError:
            return False  # empty; whether it is cannot be asked first, because the last thread may leave meanwhile

    def leave(self) -> None:
        """Give the turn to the next thread, or leave the queue. Idempotent."""
        me = threading.get_ident()
        if me not in self._line:
            return
        self._line.remove(me)
        self._wake.pop(me, None)
        try:
            first = self._line[0]
        except IndexError:
            return  # no thread waits
        self.wake(first)


class Request:
    """A change that waits for its transaction, and its outcome.

    Attributes:
        scope: the rows that the change may read.
        thread: the thread that waits for it.
        leader: the thread that runs it now; None while it waits.
        ran: True once its transaction was committed, so that it never runs again.
        over: True once the outcome is known.
        error: why nothing of it is written, or None.
    """

    def __init__(self, scope: Scope, work: Work) -> None:
        self.scope, self._work = scope, work
        self.thread, self._context = threading.get_ident(), copy_context()
        self.leader: int | None = None
        self.ran = self.over = False
        self.error: Exception | None = None

    def run(self, rows: Rows) -> None:
        """Run the change on *rows*, in the context of the thread that waits for it. Raises what it raises."""
        self.error = None
        if threading.get_ident() == self.thread:
            self._work(rows)
        else:
            self._context.run(self._work, rows)

    @property
    def failed(self) -> bool:
        """True if the change itself has failed, so that nothing of it is written."""
        return self.error is not None

    def fail(self, error: Exception) -> None:
        """Note why nothing of the change is written."""
        self.error = error

    def raise_error(self) -> None:
        """Raise why nothing of the change is written, if that is so."""
        if self.error is not None:
            raise self.error


class Requests:
    """The changes that wait for a transaction, oldest first. Every step is one operation on a deque."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Let a change wait."""
        self._waiting.append(request)

    def together(self, mine: Request) -> list[Request]:
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

    def again(self, batch: Iterable[Request]) -> None:
        """Let the changes wait again that were not run to their end: Ctrl-C came to the thread that ran them."""
        for each in reversed([each for each in batch if not each.over and not each.ran]):
            if each not in self._waiting:
                self._waiting.appendleft(each)
            each.leader = None

    def withdraw(self, request: Request, most_s: float) -> None:
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

    def _remove(self, request: Request) -> bool:
        try:
            self._waiting.remove(request)
        except ValueError:
            return False
        return True


def failed_together(batch: Iterable[Request], error: Exception) -> None:
    """Note that the transaction of *batch* has failed. Each thread raises an error of its own."""
    for each in batch:
        each.fail(copy.copy(error))
        each.over = True


class GroupCommit(Transacts):
    """A store whose threads take turns to write, first come first served; the one that has the turn runs all that wait.

    A store says with ``_commit`` how one transaction is made, and with ``_take_turn`` how processes take turns.
    """

    _busy_s = 30.0  # the maximum time that a thread or a process waits for its turn
    _disk_errors: type[Exception]

    def __init__(self) -> None:
        self._line = Line()
        self._requests = Requests()
        self._openings = {}
        self._closed = False
        self._pid = os.getpid()

    @abstractmethod
    def _commit(self, batch: list[Request]) -> None:
        """Run and commit the changes of *batch*, and note for each that it is over."""

    @abstractmethod
    def _trouble(self, what: str) -> AbstractContextManager[None]:
        """Raise ``LedgerUnavailable`` for what the block raises if the ledger cannot be read or written."""

    @abstractmethod
    def _told(self, error: Exception) -> Exception:
        """Return what the thread is told whose change has raised *error*: a row that cannot be read is no ledger."""

    def _check_place(self) -> None:
        """Raise ``LedgerUnavailable`` if the ledger is no longer where it was opened."""

    def _take_turn(self, timeout_s: float) -> bool:
        """Wait until this process may write. Returns False after *timeout_s* seconds."""
        del timeout_s
        return True

    def _give_turn(self) -> None:
        """Let another process write. Idempotent."""

    def _check_usable(self) -> None:
        # The process is checked first: after a fork a thread that does not exist here may hold the lock.
        if self._pid != os.getpid():
            raise LedgerUnavailable("this ledger was opened before a fork; open a separate Guard in each process")
        if self._closed:
            raise LedgerUnavailable(
                "this ledger has been closed, with its guard: the block of `with Guard(…)` is over, or close() was called",
                advice="Nothing was paid. Use sessions and clients inside the block, or open a new Guard.",
            )

    @override
    def _in_transaction(self, scope: Scope, work: Work) -> None:
        self._check_ready()
        mine = Request(scope, work)
        try:
            self._requests.add(mine)
            self._in_turn(lambda: self._run_with_others(mine), lambda: mine.over)
        except LedgerUnavailable:
            self._requests.withdraw(mine, self._busy_s)
            if not mine.over:
                raise
        except BaseException:
            self._requests.withdraw(mine, self._busy_s)
            raise
        mine.raise_error()

    def transact_all(self, changes: Sequence[tuple[Scope, Change[Any]]]) -> Sequence[Outcome]:
        """See ``SharesCommits.transact_all``."""
        unwritten = [self._unwritten(scope) if self._openings else () for scope, _ in changes]
        if any(unwritten):
            both = zip(unwritten, changes, strict=True)
            changes = [self._with_openings(ids, *each) if ids else each for ids, each in both]
        proposals = [Proposal(scope, change) for scope, change in changes]
        works = [self._work(scope, each) for (scope, _), each in zip(changes, proposals, strict=True)]
        requests = [Request(scope, work) for (scope, _), work in zip(changes, works, strict=True)]
        try:
            self._check_ready()
            for each in requests:
                self._requests.add(each)
            for each in requests:
                if not each.over:
                    self._in_turn(partial(self._run_with_others, each), partial(getattr, each, "over"))
        except BaseException as error:
            for each in requests:
                self._requests.withdraw(each, self._busy_s)
            if not isinstance(error, Exception):
                raise
            # Also those that ran: a commit into a file that others do not see is none.
            failed_together([each for each in requests if not each.over], error)
        for request, work, ids in zip(requests, works, unwritten, strict=True):
            if not request.failed:
                self.released.ended(work.ended)
                for node_id in ids:
                    self._openings.pop(node_id, None)
        return [(each.outcome(), request.error) for each, request in zip(proposals, requests, strict=True)]

    def _check_ready(self) -> None:
        self._check_usable()
        self._line.check_without_me()

    def _in_turn(self, work: Callable[[], R], over: Callable[[], bool] = lambda: False) -> R | None:
        """Run *work* when this thread has the turn to write: first among the threads, then among the processes.

        Returns None if it is *over* before, because another thread has done it.
        """
        try:
            try:
                return self._worked(work, over)
            finally:
                self._end_turn()
        finally:
            # Ctrl-C may have interrupted that, and all others would wait forever. Ending the turn is idempotent.
            try:
                self._end_turn()
            finally:
                self._line.leave()

    def _worked(self, work: Callable[[], R], over: Callable[[], bool]) -> R | None:
        if not self._line.join(self._busy_s, over):
            raise LedgerUnavailable(f"another thread has been writing the ledger for {self._busy_s:.0f} s")
        if over():
            return None
        self._check_usable()
        with self._trouble(WRITING):
            if not self._take_turn(self._busy_s):
                raise LedgerUnavailable(f"another process has been writing the ledger for {self._busy_s:.0f} s")
            self._check_place()
            return work()

    def _end_turn(self) -> None:
        """Give the turn back if this thread has it. Not by a flag: Ctrl-C may come before the flag is set."""
        if self._line.is_mine:
            self._give_turn()
        self._line.leave()

    def _run_with_others(self, mine: Request) -> None:
        """Run *mine* and the changes that wait with it in one transaction. Raises if *mine* was not committed."""
        batch = self._requests.together(mine)
        try:
            with self._trouble(WRITING):
                self._commit(batch)
        except LedgerUnavailable as error:
            failed_together(batch[1:], error)
            raise
        except Exception as error:
            if not mine.ran:
                failed_together(batch[1:], error)
            raise
        finally:
            for other in batch[1:]:
                other.over = other.over or other.ran
            self._requests.again(batch[1:])  # after Ctrl-C in this thread, another one runs them
            for other in batch[1:]:
                self._line.wake(other.thread)

    def _commit_apart(self, batch: list[Request]) -> None:
        for each in [each for each in batch if not each.ran and not each.over]:
            try:
                with self._trouble(WRITING):
                    self._commit([each])
            except Exception as error:  # noqa: BLE001 - the thread that waits for the change raises it
                each.fail(error)
            each.over = True

    def _run_one(self, rows: Rows, request: Request) -> None:
        """Run one change. If it fails, nothing of it is written, and the others go on."""
        try:
            request.run(rows)
        except self._disk_errors:
            raise  # the disk, not the change
        except Exception as error:  # noqa: BLE001 - the thread that waits for the change raises it
            request.fail(self._told(error))

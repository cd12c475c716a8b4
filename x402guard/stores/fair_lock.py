"""Shares the turn to write among threads, in the order in which they came, so that no thread starves."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from x402guard.errors import LedgerUnavailable

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

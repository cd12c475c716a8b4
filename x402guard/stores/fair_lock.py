"""A lock whose waiters get it in the order in which they came: no thread starves behind quicker ones."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from x402guard.errors import LedgerUnavailable

_LOOK_S: Final = 0.05


class Line:
    """Threads in a line; the first of it has the turn. A thread stands in it once.

    It takes no lock of its own to do so: every step is one operation on a deque. Ctrl-C may come between any two of them, and
    ``leave`` then puts right what it finds: a thread that was not woken looks for itself a moment later.
    """

    def __init__(self) -> None:
        self._line: deque[int] = deque()
        self._wake: dict[int, threading.Event] = {}

    def join(self, timeout_s: float) -> bool:
        """Wait for the turn, at most so many seconds; True once this thread has it. Raises ``RuntimeError`` for one that is in line."""
        me = threading.get_ident()
        if me in self._line:
            raise RuntimeError("this thread stands in line already")
        give_up = time.monotonic() + timeout_s
        wake = self._wake[me] = threading.Event()
        self._line.append(me)
        while self._line[0] != me:
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return False
            wake.wait(min(_LOOK_S, left_s))
            wake.clear()
        return True

    def check_without_me(self) -> None:
        """Raise ``LedgerUnavailable`` where this thread stands in the line, be it first or not: a signal came in between."""
        if threading.get_ident() in self._line:
            raise LedgerUnavailable("this thread is writing the ledger already; a signal handler can't")

    @property
    def is_mine(self) -> bool:
        """True while this thread has the turn."""
        return bool(self._line) and self._line[0] == threading.get_ident()

    def leave(self) -> None:
        """Give the turn to the next, or step out of the line. Leaving a line that one does not stand in is fine."""
        me = threading.get_ident()
        try:
            self._line.remove(me)
        except ValueError:
            return
        self._wake.pop(me, None)
        try:
            self._wake[self._line[0]].set()
        except (IndexError, KeyError):
            return  # nobody waits, or the next is just stepping out

"""Bulkheads: slots limit the concurrent calls to a host or tool in this process; others wait in order of arrival."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary

from x402guard.flow.detached import TooLate, Wakeable, within
from x402guard.flow.surroundings import here

_LOOK_S: Final = 1.0  # seconds between two searches of a waiting call for slots of forgotten calls


class TakenSlot:
    """See ``ports.Slot``."""

    def __init__(self, slots: Slots, where: str) -> None:
        self._slots, self._where = slots, where
        self._lock = threading.Lock()
        self._left = False  # the last: Ctrl-C may end this method before

    def leave(self) -> None:
        """Release it to the call that has waited longest. May be called twice, or left to the garbage collector."""
        with self._lock:
            if self._left:
                return
            self._left = True
        self._slots.give_back(self._where)

    def follow(self, is_lost: Callable[[], bool], most_s: float) -> None:
        """See ``ports.Slot``. The last call counts."""
        until_s = time.monotonic() + most_s
        self._slots.follow(self, lambda: is_lost() or time.monotonic() >= until_s)

    def __del__(self) -> None:
        if not getattr(self, "_left", True):
            self._left = True
            self._slots.drop(self._where)


class _Waiting:
    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.granted = False


class Slots:
    """All slots and their queues. Threads and tasks of any event loop wait in one queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped: deque[str] = deque()
        self._taken: dict[str, int] = {}
        self._lines: dict[str, deque[_Waiting]] = {}
        self._followed: WeakKeyDictionary[TakenSlot, Callable[[], bool]] = WeakKeyDictionary()

    def drop(self, where: str) -> None:
        """Note the slot of a forgotten call. The garbage collector may call this at any moment, so it takes no lock."""
        self._dropped.append(where)

    def follow(self, slot: TakenSlot, is_lost: Callable[[], bool]) -> None:
        """Give a slot back to a call that waits once *is_lost* says so."""
        with self._lock:
            self._followed[slot] = is_lost

    def _look(self) -> None:
        """Give back the slots that were lost: the call that has one does not end, or its task is the one that waits."""
        with self._lock:
            known = list(self._followed.items())
        for slot, is_lost in known:
            if is_lost():
                slot.leave()
        self._collect()

    def _collect(self) -> None:
        """Give back the slots that were dropped."""
        with suppress(IndexError):
            while True:
                self.give_back(self._dropped.popleft())

    def _try(self, where: str, most: int, wake: Callable[[], None]) -> _Waiting:
        self._collect()
        with self._lock:
            waiting = _Waiting(wake)
            taken = self._taken.get(where, 0)
            if taken < most:
                self._taken[where] = taken + 1
                waiting.granted = True
            else:
                self._lines.setdefault(where, deque()).append(waiting)
            return waiting

    def give_back(self, where: str) -> None:
        """Hand a slot to the next in the queue, or free it."""
        with self._lock:
            line = self._lines.get(where)
            if line:
                waiting = line.popleft()
                waiting.granted = True
                if not line:
                    del self._lines[where]
                waiting.wake()
                return
            left = self._taken[where] - 1
            if left:
                self._taken[where] = left
            else:
                del self._taken[where]

    def _end(self, where: str, waiting: _Waiting, *, keep: bool) -> TakenSlot | None:
        """Return the slot if it was granted, else leave the queue. A slot that is not kept goes to the next."""
        with self._lock:
            if not waiting.granted:
                self._lines[where].remove(waiting)
                if not self._lines[where]:
                    del self._lines[where]
                return None
        slot = TakenSlot(self, where)
        if not keep:
            slot.leave()
        return slot

    def enter(self, where: str, most: int, wait_s: float) -> TakenSlot | None:
        """Return one of *most* slots, or None if none is free within *wait_s* seconds."""
        event = threading.Event()
        waiting = self._try(where, most, event.set)
        keep = False
        try:
            for left_s in self._looks(waiting, wait_s):
                event.wait(left_s)
            keep = True
        finally:
            slot = self._end(where, waiting, keep=keep)
        return slot

    async def enter_async(self, where: str, most: int, wait_s: float) -> TakenSlot | None:
        """Do the same, awaited."""
        event = Wakeable()
        waiting = self._try(where, most, event.set)
        keep = False
        try:
            for left_s in self._looks(waiting, wait_s):
                with suppress(TooLate):
                    await within(left_s, event.wait)
            keep = True
        finally:
            slot = self._end(where, waiting, keep=keep)
        return slot

    def _looks(self, waiting: _Waiting, wait_s: float) -> Iterator[float]:
        """Look for slots that were lost, and yield how many seconds to wait for another one, until one is granted or it is late.

        What holds a slot may be an error that is kept in its own frame. To search for those takes long in a large program.
        """
        until_s, is_first = time.monotonic() + wait_s, True
        while not waiting.granted:
            if not is_first:
                here().collect_dropped()
            self._look()
            left_s = until_s - time.monotonic()
            if not waiting.granted and left_s <= 0 and is_first:  # a call that may not wait looks once as well
                here().collect_dropped()
                self._look()
            if waiting.granted or left_s <= 0:
                return
            yield min(_LOOK_S, left_s)
            is_first = False

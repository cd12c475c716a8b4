"""Bulkheads: slots limit the concurrent calls to a host or tool in this process; others wait in order of arrival."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Final, ParamSpec, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from x402guard.flow.detached import TooLate, Wakeable, within
from x402guard.flow.ports import Slot
from x402guard.flow.surroundings import here

P = ParamSpec("P")
R = TypeVar("R")

_LOOK_S: Final = 1.0  # seconds between two searches of a waiting call for slots of forgotten calls


class TakenSlot:
    """See ``ports.Slot``.

    Attributes:
        where: the place.
        inside: of a slot above the number: those of the calls around its call.
        waits: how many calls inside its call wait for a slot, or have one above the number: it does nothing itself.
        waits_for: the places where they wait.
        waited_s: how long its call waited for it.
    """

    def __init__(self, slots: Slots, where: str, inside: Iterable[TakenSlot] = ()) -> None:
        self._slots, self.where = slots, where
        self.inside = inside
        self.waits = 0
        self.waits_for: list[str] = []
        self.waited_s = 0.0
        self._lock = threading.Lock()
        self._left = False  # the last: Ctrl-C may end this method before

    def leave(self) -> None:
        """Release it to the call that has waited longest. May be called twice, or left to the garbage collector."""
        with self._lock:
            if self._left:
                return
            self._left = True
        self._slots.leave(self)

    def follow(self, is_lost: Callable[[], bool], most_s: float) -> None:
        """See ``ports.Slot``. The last call counts."""
        until_s = time.monotonic() + most_s
        self._slots.follow(self, lambda: is_lost() or time.monotonic() >= until_s)

    @property
    def left(self) -> bool:
        """Whether it was released."""
        return self._left

    def __del__(self) -> None:
        if not getattr(self, "_left", True):
            self._left = True
            self._slots.drop(self.where, self.inside, None)


_AROUND: Final[ContextVar[tuple[ReferenceType[TakenSlot], ...]]] = ContextVar("x402guard_slots_around", default=())
"""The slots of the calls inside which this code runs."""


def _around() -> list[TakenSlot]:
    slots = (slot for each in _AROUND.get() if (slot := each()) is not None and not slot.left)
    return list(dict.fromkeys(slots))


def stay_around(slot: Slot | None) -> None:
    """Let what this task or thread calls from now on count as inside the call that has *slot*, until that call ends."""
    if isinstance(slot, TakenSlot):
        _AROUND.set(tuple(ref(each) for each in (*_around(), slot)))


@contextmanager
def around(slot: Slot | None) -> Iterator[None]:
    """Let the calls of this block count as inside the call that has *slot*."""
    before = _AROUND.get()
    stay_around(slot)
    try:
        yield
    finally:
        _AROUND.set(before)  # not reset(token): a coroutine may be closed in another context


def carry_around(function: Callable[P, R]) -> Callable[P, R]:
    """Return *function* so that its calls, in any thread, count as inside the calls around this one."""
    outer = _AROUND.get()

    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _AROUND.get()
        _AROUND.set(tuple(dict.fromkeys((*before, *outer))))
        try:
            return function(*args, **kwargs)
        finally:
            _AROUND.set(before)

    return carried


class _Waiting:
    def __init__(self, wake: Callable[[], None], most: int) -> None:
        self.wake, self.most = wake, most
        self.granted = self.is_extra = False
        self.since_s = time.monotonic()
        self.inside: WeakSet[TakenSlot] | tuple[()] = ()


class Slots:
    """All slots and their queues. Threads and tasks of any event loop wait in one queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: deque[tuple[str, Iterable[TakenSlot], TakenSlot | None]] = deque()
        self._taken: dict[str, int] = {}
        self._extra: dict[str, int] = {}  # of these, above the number that is allowed
        self._holders: dict[str, WeakSet[TakenSlot]] = {}
        self._lines: dict[str, deque[_Waiting]] = {}
        self._most: dict[str, int] = {}  # of the places where calls wait: how many slots there are
        self._followed: WeakKeyDictionary[TakenSlot, Callable[[], bool]] = WeakKeyDictionary()

    def drop(self, where: str, inside: Iterable[TakenSlot], slot: TakenSlot | None) -> None:
        """Note a slot that was left; of a forgotten call without the slot itself. It takes no lock."""
        self._left.append((where, inside, slot))

    def leave(self, slot: TakenSlot) -> None:
        """Release a slot. The garbage collector may call this at any moment, also of a thread that has the lock."""
        self.drop(slot.where, slot.inside, slot)
        self._collect()

    def follow(self, slot: TakenSlot, is_lost: Callable[[], bool]) -> None:
        """Give a slot back to a call that waits once *is_lost* says so."""
        with self._lock:
            self._followed[slot] = is_lost
        self._collect()

    def _look(self) -> None:
        """Give back the slots that were lost: the call that has one does not end, or its task is the one that waits."""
        with self._lock:
            known = list(self._followed.items()) if len(self._followed) else []
        for slot, is_lost in known:
            if is_lost():
                slot.leave()
        self._collect()

    def _collect(self) -> None:
        """Give back the slots that were left, unless a call has the lock, maybe this thread: it looks when it has ended.

        After Ctrl-C it may not, and the next call looks, or the one that waits.
        """
        while self._left and not self._lock.locked():
            with self._lock, suppress(IndexError):
                while True:
                    self._give_back(*self._left.popleft())

    def _try(self, where: str, most: int, wake: Callable[[], None]) -> _Waiting:
        self._collect()
        waiting = _Waiting(wake, most)
        with self._lock:
            taken = self._taken.get(where, 0)
            if taken < most:
                self._taken[where] = taken + 1
                waiting.granted = True
            else:
                self._lines.setdefault(where, deque()).append(waiting)
                self._most[where] = max(most, self._most.get(where, 0))
                inside = WeakSet[TakenSlot]()
                waiting.inside = inside
                for slot in _around():
                    inside.add(slot)
                    slot.waits += 1
                    slot.waits_for.append(where)
                if inside:
                    self._pass_insiders()
        self._collect()
        return waiting

    def _give_back(self, where: str, inside: Iterable[TakenSlot], left: TakenSlot | None) -> None:
        """Hand a slot to the next in the queue, or free it."""
        if left is not None:
            self._holders[where].discard(left)
            left.inside = ()
        for slot in inside:
            slot.waits -= 1
        extra = self._extra.pop(where, 0)
        if extra > 1:
            self._extra[where] = extra - 1
        if not extra and where in self._lines:
            self._grant(where, self._lines[where][0])
            return
        others = self._taken[where] - 1
        if others:
            self._taken[where] = others
        else:
            del self._taken[where]
            self._holders.pop(where, None)
        if extra:
            self._pass_insiders()

    def _grant(self, where: str, waiting: _Waiting, *, extra: bool = False) -> None:
        waiting.granted, waiting.is_extra = True, extra
        self._take_out(where, waiting)
        waiting.wake()

    def _take_out(self, where: str, waiting: _Waiting) -> None:
        for slot in waiting.inside:
            slot.waits_for.remove(where)
            slot.waits -= not waiting.is_extra
        self._lines[where].remove(waiting)
        if not self._lines[where]:
            del self._lines[where], self._most[where]

    def _pass_insiders(self) -> None:
        """Grant slots above the number to calls inside calls that hold one and only wait: else none of these could end.

        Of the holders of a place, no more than its number do anything but wait for calls inside them; more, once one of
        them has given up waiting, or waits no more at another place.
        """
        for where in list(self._lines):
            busy = self._taken.get(where, 0) - sum(bool(slot.waits) for slot in self._holders.get(where, ()))
            line = list(self._lines[where]) if busy < self._most[where] else []
            waiting_holders = self._waiting_holders(where) if line else set()
            for waiting in line:
                if busy < waiting.most and any(slot in waiting_holders for slot in waiting.inside):
                    self._grant(where, waiting, extra=True)
                    self._taken[where] += 1
                    self._extra[where] = self._extra.get(where, 0) + 1
                    busy += 1

    def _waiting_holders(self, where: str) -> set[TakenSlot]:
        """Return the holders of a place that wait, those that wait at the places that these wait for, and so on."""
        places, found = [where], set[TakenSlot]()
        for place in places:
            held = [slot for slot in self._holders.get(place, ()) if slot.waits]
            found.update(held)
            places.extend(
                each for each in dict.fromkeys(chain(*(slot.waits_for for slot in held))) if each not in places
            )
        return found

    def _end(self, where: str, waiting: _Waiting, *, keep: bool) -> TakenSlot | None:
        """Return the slot if it was granted, else leave the queue. A slot that is not kept goes to the next."""
        slot = None
        with self._lock:
            if waiting.granted:
                slot = TakenSlot(self, where, list(waiting.inside) if waiting.is_extra else ())
                slot.waited_s = time.monotonic() - waiting.since_s
                if where not in self._holders:
                    self._holders[where] = WeakSet()
                self._holders[where].add(slot)
            else:
                self._take_out(where, waiting)
        self._collect()
        if slot is not None and not keep:
            slot.leave()
        return slot

    def enter(self, where: str, most: int, wait_s: float, late: Callable[[], None] | None = None) -> TakenSlot | None:
        """Return one of *most* slots, or None if none is free within *wait_s* seconds. Calls *late* after a second of them."""
        # No Event: it has a lock, and a finalizer may wake this thread while the thread has that.
        woken: SimpleQueue[None] = SimpleQueue()
        waiting = self._try(where, most, lambda: woken.put(None))
        keep = False
        try:
            for left_s in self._looks(waiting, wait_s, late):
                with suppress(Empty):
                    woken.get(timeout=left_s)
            keep = True
        finally:
            slot = self._end(where, waiting, keep=keep)
        return slot

    async def enter_async(
        self, where: str, most: int, wait_s: float, late: Callable[[], None] | None = None
    ) -> TakenSlot | None:
        """Do the same, awaited."""
        event = Wakeable()
        waiting = self._try(where, most, event.set)
        keep = False
        try:
            for left_s in self._looks(waiting, wait_s, late):
                with suppress(TooLate):
                    await within(left_s, event.wait)
            keep = True
        finally:
            slot = self._end(where, waiting, keep=keep)
        return slot

    def _looks(self, waiting: _Waiting, wait_s: float, late: Callable[[], None] | None) -> Iterator[float]:
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
            if is_first and late is not None and not waiting.granted and wait_s > _LOOK_S:
                late()
            is_first = False

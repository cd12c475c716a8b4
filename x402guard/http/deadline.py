"""Answers that have so many seconds: a body is cut when its time is over, however little a server sends however often."""

from __future__ import annotations

import heapq
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType, ref

from x402guard.errors import CallTimeout, LedgerUnavailable
from x402guard.flow.detached import TooLate, within
from x402guard.flow.ports import Slot

if TYPE_CHECKING:
    import httpx

_LOOK_AGAIN_S: Final = 0.5


class Watch:
    """How long one call may go on, and the slot that it takes. It is over once: ended, cut or left, and its slot with it.

    What its caller takes to read a piece is not the server's time. Threads may use it at once.

    Args:
        call_s: seconds from now to the end of the answer; None for any time.
        chunk_s: seconds from asking for a piece of the answer to its coming.
    """

    def __init__(self, call_s: int | None, chunk_s: int | None) -> None:
        self._call_s, self._chunk_s = call_s, chunk_s
        self._ends_s = None if call_s is None else time.monotonic() + call_s
        self._last_s: float | None = None
        self._handed_s: float | None = None
        self._slot: Slot | None = None
        self._lock = threading.Lock()
        self.over = False
        self.cut = False

    def take(self, slot: Slot | None) -> None:
        """Take a slot, from now on until it is over."""
        self._slot = slot

    def wanted(self) -> None:
        """The caller begins to read."""
        self._last_s = time.monotonic()

    def hand_over(self) -> None:
        """A piece is given to the caller: time stands still."""
        self._handed_s = time.monotonic()

    def take_back(self) -> None:
        """The caller wants the next piece."""
        now_s = time.monotonic()
        if self._ends_s is not None and self._handed_s is not None:
            self._ends_s += now_s - self._handed_s
        self._last_s, self._handed_s = now_s, None

    def lift(self) -> None:
        """It may take any time from now on."""
        self._ends_s = self._chunk_s = None

    @property
    def until_s(self) -> float | None:
        """When it has to be cut, on the monotonic clock; None for never, or as long as its caller reads."""
        if self._handed_s is not None:
            return None
        chunk_ends_s = None if self._chunk_s is None or self._last_s is None else self._last_s + self._chunk_s
        return min((at for at in (self._ends_s, chunk_ends_s) if at is not None), default=None)

    @property
    def left_s(self) -> float | None:
        """Seconds until it has to be cut, 0 where that is past; None for any time."""
        until_s = self.until_s
        return None if until_s is None else max(0.0, until_s - time.monotonic())

    def look_s(self) -> float | None:
        """When to look at it next, on the monotonic clock: time may stand still, or not have begun; None for never."""
        until_s = self.until_s
        still = self._handed_s is not None or (self._chunk_s is not None and self._last_s is None)
        if not still:
            return until_s
        again_s = time.monotonic() + _LOOK_AGAIN_S
        return again_s if until_s is None else min(until_s, again_s)

    def end(self) -> None:
        """It has ended, or nobody reads on."""
        with self._lock:
            self.over = True
        self.leave()

    def leave(self) -> None:
        """Leave its slot, though it goes on."""
        if self._slot is not None:
            self._slot.leave()

    def cut_off(self, cut: Callable[[], None]) -> None:
        """Its time is over: *cut* what is read, unless it has ended just now, and let somebody else have its slot."""
        with self._lock:
            if self.over:
                return
            self.cut = True
            cut()
        self.leave()

    def timeout(self) -> CallTimeout:
        """Return the error of a call whose time is over."""
        whole_s = self._ends_s is not None and time.monotonic() >= self._ends_s
        if self._chunk_s is not None and self._last_s is not None and not whole_s:
            return CallTimeout(f"no piece of the answer came within {self._chunk_s} s")
        return CallTimeout(f"the call was not over within {self._call_s} s")


class _Cutter:
    """One thread that looks after all bodies: whatever is past its time is cut, and leaves its slot, read or not."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # A body that was forgotten is not kept: its slot goes back with it.
        self._due: list[tuple[float, int, ReferenceType[Watch], Callable[[], None]]] = []
        self._number = itertools.count()
        self._pid = 0

    def look_after(self, watch: Watch, cut: Callable[[], None]) -> None:
        """Call *cut* when *watch* is past its time and not over."""
        look_s = watch.look_s()
        if look_s is None:
            return
        with self._condition:
            if self._pid != os.getpid():  # threads do not survive a fork
                self._pid, self._due = os.getpid(), []
                threading.Thread(target=self._run, name="x402guard-cutter", daemon=True).start()
            heapq.heappush(self._due, (look_s, next(self._number), ref(watch), cut))
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._due or self._due[0][0] > time.monotonic():
                    wait_s = None if not self._due else self._due[0][0] - time.monotonic()
                    self._condition.wait(wait_s)
                _, number, known, cut = heapq.heappop(self._due)
                watch = known()
                if watch is None or watch.over:
                    continue
                until_s, look_s = watch.until_s, watch.look_s()
                if until_s is None or until_s > time.monotonic():  # pieces have come meanwhile, or its caller reads one
                    if look_s is not None:
                        heapq.heappush(self._due, (look_s, number, known, cut))
                    watch = None  # not kept while we wait
                    continue
            watch.cut_off(cut)


_CUTTER: Final = _Cutter()


def _socket_of(extensions: Any) -> socket.socket | None:
    """Return the socket that an answer is read from; None where there is none, or where other answers are read from it too."""
    stream = extensions.get("network_stream")
    if stream is None or extensions.get("http_version") not in (b"HTTP/1.1", b"HTTP/1.0"):
        return None
    found = stream.get_extra_info("socket")
    return found if isinstance(found, socket.socket) else None


def _shut(connection: socket.socket | None) -> None:
    if connection is not None:
        with suppress(OSError):  # it was closed meanwhile
            connection.shutdown(socket.SHUT_RDWR)


class Watched:
    """A response stream with so many seconds. *late* is called when they are over, before that is raised."""

    def __init__(self, response: httpx.Response, watch: Watch) -> None:
        self._stream: Any = response.stream
        self._watch = watch
        self.late: Callable[[], None] | None = None
        self.hold_id: str | None = None
        connection = _socket_of(response.extensions)
        _CUTTER.look_after(watch, lambda: _shut(connection))

    def __iter__(self) -> Iterator[bytes]:
        watch = self._watch
        watch.wanted()
        try:
            for chunk in self._stream:
                if watch.cut or watch.left_s == 0.0:
                    raise self._timed_out()  # noqa: TRY301 - it is raised as it is
                watch.hand_over()
                yield chunk
                watch.take_back()
            if watch.cut:
                raise self._timed_out()  # noqa: TRY301 - a body without a length ends where its socket is shut
        except CallTimeout:
            raise
        except Exception as error:
            if watch.cut:
                raise self._timed_out() from error
            self._say_late()  # it broke off
            raise
        finally:
            watch.end()

    def end(self) -> None:
        """Nobody waits for the rest."""
        self._watch.end()

    def _timed_out(self) -> CallTimeout:
        error = self._watch.timeout()
        error.hold_id = self.hold_id
        self._say_late()
        return error

    def _say_late(self) -> None:
        """Books that cannot be written take nothing from what the caller has to hear."""
        if self.late is not None:
            with suppress(LedgerUnavailable):
                self.late()

    def close(self) -> None:
        """Leave the slot, and close the stream underneath."""
        self._watch.end()
        self._stream.close()


class AsyncWatched:
    """The same as ``Watched``, for an asynchronous stream; *late* is awaited."""

    def __init__(self, response: httpx.Response, watch: Watch) -> None:
        self._stream: Any = response.stream
        self._watch = watch
        _CUTTER.look_after(watch, lambda: None)  # a task cuts itself; a body that nobody reads leaves its place
        self.late: Callable[[], Any] | None = None
        self.hold_id: str | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        watch, source = self._watch, aiter(self._stream)
        watch.wanted()
        try:
            while True:
                try:
                    chunk = await within(watch.left_s, source.__anext__)
                except StopAsyncIteration:
                    break
                except TooLate:
                    raise await self._timed_out() from None
                except Exception:
                    await self._say_late()
                    raise
                if watch.cut or watch.left_s == 0.0:
                    raise await self._timed_out()
                watch.hand_over()
                yield chunk
                watch.take_back()
        finally:
            watch.end()

    def end(self) -> None:
        """Nobody waits for the rest."""
        self._watch.end()

    async def _timed_out(self) -> CallTimeout:
        error = self._watch.timeout()
        error.hold_id = self.hold_id
        await self._say_late()
        return error

    async def _say_late(self) -> None:
        if self.late is not None:
            with suppress(LedgerUnavailable):
                await self.late()

    async def aclose(self) -> None:
        """Leave the slot, and close the stream underneath."""
        self._watch.end()
        await self._stream.aclose()

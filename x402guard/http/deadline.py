"""Deadlines for answers: a body is cut off at its deadline, even if the server keeps sending small pieces."""

from __future__ import annotations

import heapq
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType, ref

import anyio

from x402guard.errors import CallTimeout
from x402guard.flow.bulkheads import stay_around
from x402guard.flow.detached import Aside, TooLate, within
from x402guard.flow.ports import Slot
from x402guard.flow.receipt import Receipt, timed_out
from x402guard.http.frames import Deflated, Frames
from x402guard.x402.delivery import AnswerEnd

if TYPE_CHECKING:
    import httpx

_LOOK_AGAIN_S: Final = 0.5
_LONGEST_WAIT_S: Final = 3_600.0  # of one wait: a condition raises for a time that the system cannot count


class Watch:
    """The deadline of one call and its slot. It ends exactly once: finished, cut off or abandoned.

    The time in which the caller processes a piece does not count. Thread-safe.

    Args:
        call_s: seconds from now to the end of the answer; None for no limit.
        chunk_s: seconds from the request for a piece of the answer to its arrival; None for no limit.
        limited_by: what sets *call_s*.
        head: seconds from now to the head of the answer, and what sets that; None for no limit of its own.
    """

    def __init__(
        self,
        call_s: float | None,
        chunk_s: int | None,
        limited_by: str = "",
        head: tuple[float, str] | None = None,
    ) -> None:
        now_s = time.monotonic()
        self._call_s, self._chunk_s, self._limited_by, self._head = call_s, chunk_s, limited_by, head
        self._ends_s = None if call_s is None else now_s + call_s
        self._head_ends_s = None if head is None else now_s + head[0]
        self._last_s: float | None = None
        self._handed_s: float | None = None
        self._slot: Slot | None = None
        self._lock = threading.Lock()
        self.over = False
        self.is_past = False

    def take(self, slot: Slot | None) -> None:
        """Keep a slot until the call is over."""
        self._slot = slot

    def head_came(self) -> None:
        """Note that the answer has begun: from here on the limit of its end counts."""
        self._head_ends_s = None

    def wanted(self) -> None:
        """Note that the caller begins to read: piece by piece, maybe with calls between."""
        self._last_s = time.monotonic()
        stay_around(self._slot)

    def hand_over(self) -> bool:
        """Note that the caller gets a piece: the clock is paused. Returns False if it came too late."""
        until_s, now_s = self.until_s, time.monotonic()
        self._handed_s = now_s
        return not self.is_past and (until_s is None or now_s < until_s)

    def take_back(self) -> None:
        """Note that the caller wants the next piece: the clock runs again."""
        now_s = time.monotonic()
        if self._ends_s is not None and self._handed_s is not None:
            self._ends_s += now_s - self._handed_s
        self._last_s, self._handed_s = now_s, None

    def lift(self) -> None:
        """Remove the deadline."""
        self._ends_s = self._chunk_s = self._head_ends_s = None

    @property
    def until_s(self) -> float | None:
        """The deadline on the monotonic clock; None for no deadline, or while the clock is paused."""
        if self._handed_s is not None:
            return None
        chunk_ends_s = None if self._chunk_s is None or self._last_s is None else self._last_s + self._chunk_s
        until_s = self._ends_s
        for ends_s in (self._head_ends_s, chunk_ends_s):
            if ends_s is not None and (until_s is None or ends_s < until_s):
                until_s = ends_s
        return until_s

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, 0 if it is past; None for no deadline."""
        until_s = self.until_s
        return None if until_s is None else max(0.0, until_s - time.monotonic())

    def look_s(self) -> float | None:
        """The time of the next check, on the monotonic clock, also while paused or before the start; None for never."""
        until_s = self.until_s
        still = self._handed_s is not None or (self._chunk_s is not None and self._last_s is None)
        if not still:
            return until_s
        again_s = time.monotonic() + _LOOK_AGAIN_S
        return again_s if until_s is None else min(until_s, again_s)

    def end(self) -> None:
        """End the call, because it is finished or abandoned."""
        with self._lock:
            self.over = True
        self.leave()

    def leave(self) -> None:
        """Release the slot; the call itself continues."""
        if self._slot is not None:
            self._slot.leave()

    def end_late(self, cut: Callable[[], None]) -> None:
        """Call *cut* after the deadline, unless the call has just ended, and release the slot."""
        with self._lock:
            if self.over:
                return
            self.is_past = True
            cut()
        self.leave()

    def timeout(self) -> CallTimeout:
        """Return the error of a call past its deadline."""
        whole_s = self._ends_s is not None and time.monotonic() >= self._ends_s
        if self._head is not None and self._head_ends_s is not None and not whole_s:
            return CallTimeout(f"the answer did not begin within {self._head[0]:g} s ({self._head[1]})")
        if self._chunk_s is not None and self._last_s is not None and not whole_s:
            return CallTimeout(f"no piece of the answer arrived within {self._chunk_s} s (policy.timeouts.chunk_s)")
        by = f" ({self._limited_by})" if self._limited_by else ""
        return CallTimeout(f"the answer did not end within {self._call_s:g} s{by}")


class _Cutter:
    """One thread for all bodies: cuts off each body past its deadline and releases its slot, read or not."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # Weak references, so that an abandoned body is collected and its slot released.
        self._due: list[tuple[float, int, ReferenceType[Watch], Callable[[], None]]] = []
        self._number = itertools.count()
        self._pid = 0

    def look_after(self, watch: Watch, cut: Callable[[], None]) -> None:
        """Call *cut* when *watch* is past its deadline and not over."""
        look_s = watch.look_s()
        if look_s is None:
            return
        with self._condition:
            if self._pid != os.getpid():  # threads do not survive a fork
                self._pid, self._due = os.getpid(), []
                threading.Thread(target=self._run, name="x402guard-cutter", daemon=True).start()
            mine = (look_s, next(self._number), ref(watch), cut)
            heapq.heappush(self._due, mine)
            if self._due[0] is mine:  # else it looks before that anyhow, and would take the interpreter for nothing
                self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._due or self._due[0][0] > time.monotonic():
                    wait_s = None if not self._due else self._due[0][0] - time.monotonic()
                    self._condition.wait(None if wait_s is None else min(wait_s, _LONGEST_WAIT_S))
                _, number, known, cut = heapq.heappop(self._due)
                watch = known()
                if watch is None or watch.over:
                    continue
                until_s, look_s = watch.until_s, watch.look_s()
                if until_s is None or until_s > time.monotonic():  # a piece arrived, or the caller processes one
                    if look_s is not None:
                        heapq.heappush(self._due, (look_s, number, known, cut))
                    watch = None  # keep no reference while waiting
                    continue
            watch.end_late(cut)


_CUTTER: Final = _Cutter()


def _socket_of(extensions: Any) -> socket.socket | None:
    """Return the socket of an answer; None if it has none."""
    stream = extensions.get("network_stream")
    found = None if stream is None else stream.get_extra_info("socket")
    return found if isinstance(found, socket.socket) else None


def _shut(connection: socket.socket | None) -> None:
    if connection is not None:
        with suppress(OSError):  # closed already
            connection.shutdown(socket.SHUT_RDWR)


def _note_lost(watched: Watched | AsyncWatched, error: BaseException | None) -> None:
    """Note that an answer is lost whose whole end is written, if *error* comes from outside: Ctrl-C, a cancelled task."""
    is_signal = error is not None and not isinstance(error, (Exception, GeneratorExit))
    if watched.ended is None and watched.lose is not None and is_signal and error is not watched.around:
        watched.lose()


def _error() -> BaseException | None:
    """Return the error that is being handled here, or None.

    While one propagates, the HTTP library closes the answer and the caller gets the error instead: an answer that
    cannot be decoded, or an error of the caller's own code in the middle of a body. A generator around the answer that is
    dropped says by GeneratorExit that its caller reads no further, be it by choice or by an error, which cannot be seen.
    """
    return sys.exc_info()[1]


class Watched:
    """A response stream with a deadline.

    *ended* is called once: ``whole`` at the end of the body or if the caller closes it early, ``late`` before the error
    of a timeout or broken stream is raised, ``cut`` after any other error, such as Ctrl-C.

    Attributes:
        lose: called if a signal comes after the whole body was read, and before the HTTP library has handed it over.
        frames: if given, follows the raw body, and raises at its end if the body ends inside its compressed frame: the
            HTTP library would find that out only when nothing more can be noted.
    """

    def __init__(self, response: httpx.Response, watch: Watch) -> None:
        self._stream: Any = response.stream
        self._watch = watch
        self.ended: Callable[[AnswerEnd], None] | None = None
        self.lose: Callable[[], None] | None = None
        self.frames: Frames | Deflated | None = None
        self.paid: Receipt | None = None
        self._is_caller_cut_off, self.around = False, _error()
        version, connection = response.extensions.get("http_version"), _socket_of(response.extensions)
        self._shared = connection if version == b"HTTP/2" else None
        upgraded = response.status_code == 101
        own = connection if version in (b"HTTP/1.1", b"HTTP/1.0") and not upgraded else None
        _CUTTER.look_after(watch, lambda: _shut(own))

    def __iter__(self) -> Iterator[bytes]:
        watch = self._watch
        watch.wanted()
        try:
            try:
                for chunk in self._pieces():
                    if not watch.hand_over():
                        raise self._timed_out()  # noqa: TRY301 - passed on unchanged
                    if self.frames is not None:
                        self.frames.follow(chunk)
                    yield chunk
                    watch.take_back()
                if watch.is_past:
                    raise self._timed_out()  # noqa: TRY301 - a body without a length ends when its socket is shut down
                if self.frames is not None:
                    self.frames.end()
                self._end("whole")
            except (CallTimeout, GeneratorExit):
                raise
            except Exception as error:
                if watch.is_past:
                    raise self._timed_out() from error
                self._end("late")
                raise
            except BaseException:
                self._is_caller_cut_off = True
                raise
            finally:
                watch.end()
        except BaseException as error:
            _note_lost(self, error)
            raise

    def _pieces(self) -> Iterator[bytes]:
        """Yield the pieces of the body. Over HTTP/2 each is read aside: the thread that reads may get frames of others alone.

        Past the deadline the connection is shut for all of its answers: they wait for that thread.
        """
        source = iter(self._stream)
        while self._shared is not None and (left_s := self._watch.left_s) is not None:
            try:
                chunk = Aside(partial(next, source, None)).within(left_s)
            except TooLate:
                _shut(self._shared)
                raise self._timed_out() from None
            if chunk is None:
                return
            yield chunk
        yield from source

    def end(self) -> None:
        """End the watch, because the rest is not needed."""
        self._watch.end()

    def _timed_out(self) -> CallTimeout:
        error = timed_out(self._watch.timeout(), self.paid)
        self._end("late")
        return error

    def _end(self, end: AnswerEnd) -> None:
        ended = self.ended
        if ended is not None:
            try:
                ended(end)
            except BaseException:
                self._is_caller_cut_off = True  # the caller gets this error, so its answer is lost; closing writes that
                raise
            self.ended = None

    def close(self) -> None:
        """Release the slot, and close the inner stream."""
        _note_lost(self, _error())
        try:
            self._watch.end()
            try:
                self._end("cut" if self._is_caller_cut_off or _error() not in (None, self.around) else "whole")
            finally:
                self._stream.close()
        except BaseException as error:
            _note_lost(self, error)
            raise


class AsyncWatched:
    """``Watched`` for an asynchronous stream; *ended* is awaited."""

    def __init__(self, response: httpx.Response, watch: Watch) -> None:
        self._stream: Any = response.stream
        self._watch = watch
        _CUTTER.look_after(watch, lambda: None)  # the reading task times out itself; an unread body releases its slot
        self.ended: Callable[[AnswerEnd], Awaitable[None]] | None = None
        self.lose: Callable[[], None] | None = None
        self.frames: Frames | Deflated | None = None
        self.paid: Receipt | None = None
        self._is_caller_cut_off, self.around = False, _error()

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
                    await self._end("late")
                    raise
                except BaseException:
                    self._is_caller_cut_off = True
                    raise
                if not watch.hand_over():
                    raise await self._timed_out()  # noqa: TRY301 - passed on unchanged
                await self._follow(chunk)
                yield chunk
                watch.take_back()
            await self._follow(None)
            await self._end("whole")
        except BaseException as error:
            _note_lost(self, error)
            raise
        finally:
            watch.end()

    async def _follow(self, chunk: bytes | None) -> None:
        if self.frames is None:
            return
        try:
            if chunk is None:
                self.frames.end()
            else:
                self.frames.follow(chunk)
        except Exception:
            await self._end("late")
            raise

    def end(self) -> None:
        """End the watch, because the rest is not needed."""
        self._watch.end()

    async def _timed_out(self) -> CallTimeout:
        error = timed_out(self._watch.timeout(), self.paid)
        await self._end("late")
        return error

    async def _end(self, end: AnswerEnd) -> None:
        ended = self.ended
        if ended is not None:
            try:
                with anyio.CancelScope(shield=True):
                    await ended(end)
            except BaseException:
                self._is_caller_cut_off = True  # a task of asyncio can be cancelled in spite of the shield
                raise
            self.ended = None

    async def aclose(self) -> None:
        """Release the slot, and close the inner stream."""
        _note_lost(self, _error())
        try:
            self._watch.end()
            try:
                await self._end("cut" if self._is_caller_cut_off or _error() not in (None, self.around) else "whole")
            finally:
                await self._stream.aclose()
        except BaseException as error:
            _note_lost(self, error)
            raise

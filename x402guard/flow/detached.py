"""Runs calls that may never return in threads of their own. A call that takes too long is abandoned."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar, cast

import anyio

from x402guard.errors import ConfigError

R = TypeVar("R")


def refuse_late_patch() -> None:
    """Raise ``ConfigError`` if gevent or eventlet has patched queues after this module was imported.

    Its threads would be greenlets then, which a queue from before blocks for ever.
    """
    if queue.SimpleQueue is not SimpleQueue:
        raise ConfigError(
            "monkey.patch_all(): gevent or eventlet has patched this process after x402guard was imported; patch it first, "
            "before any other import"
        )


def on_trio() -> bool:
    """Return whether this is a task of trio."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


def in_event_loop() -> bool:
    """Return whether an event loop runs in this thread: a blocking pause would hold up all of its tasks."""
    running = of_asyncio("get_running_loop")
    if running is None:
        return on_trio()
    try:
        running()
    except RuntimeError:
        return on_trio()
    return True


def of_asyncio(name: str) -> Callable[[], Any] | None:
    """Return a function of asyncio; None if no loop of it can run in this thread, because it is not loaded, or not yet."""
    found: Callable[[], Any] | None = getattr(sys.modules.get("asyncio"), name, None)
    return found


class TooLate(Exception):  # noqa: N818 - a signal, never seen by a user
    """A call did not return in time. Not a ``TimeoutError``, because the call may raise one itself."""


class Wakeable:
    """An event of the running event loop (asyncio or trio) that any thread may set."""

    def __init__(self) -> None:
        self._soon: Callable[..., object]
        self._gone: type[Exception]
        if on_trio():
            import trio  # it runs us, so it is there

            self._event: Any = trio.Event()
            self._soon, self._gone = trio.lowlevel.current_trio_token().run_sync_soon, trio.RunFinishedError
        else:
            import asyncio  # its loop runs us

            self._event = asyncio.Event()
            self._soon, self._gone = asyncio.get_running_loop().call_soon_threadsafe, RuntimeError

    def set(self) -> None:
        """Wake the waiting task, if the loop is still open."""
        wake_all((self,))

    async def wait(self) -> None:
        """Wait until it is set."""
        await self._event.wait()


def wake_all(waiting: Iterable[Wakeable]) -> None:
    """Set events, those of one event loop by one call: each call wakes its loop."""
    loops: dict[Callable[..., object], list[Wakeable]] = {}
    for each in waiting:
        loops.setdefault(each._soon, []).append(each)  # noqa: SLF001 - of this module
    for soon, of_loop in loops.items():
        with suppress(of_loop[0]._gone):  # noqa: SLF001 - of this module
            soon(_set_all, of_loop)


def _set_all(waiting: Iterable[Wakeable]) -> None:
    for each in waiting:
        each._event.set()  # noqa: SLF001 - of this module


async def within(seconds: float | None, call: Callable[[], Awaitable[R]]) -> R:
    """Return what is awaited. After that many seconds cancel it and raise ``TooLate``."""
    if seconds is None:
        return await call()
    scope = anyio.move_on_after(seconds)
    scope.__enter__()
    try:
        result = await call()
    except GeneratorExit:
        raise  # the coroutine is closed, perhaps with its loop: nothing is left to cancel
    except BaseException as error:
        if scope.__exit__(type(error), error, error.__traceback__):
            raise TooLate from None
        raise
    scope.__exit__(None, None, None)
    return result


class _Workers:
    """Daemon threads for calls that may never return. One whose call has ended takes the next one."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[_Job]] = deque()
        self._pid = 0

    def start(self, job: _Job) -> None:
        """Run *job* in a thread: in the one that became idle last, or in a new one."""
        refuse_late_patch()
        if self._pid != os.getpid():  # threads do not survive a fork
            self._idle, self._pid = deque(), os.getpid()
        try:
            self._idle.pop().put(job)
        except IndexError:
            jobs: SimpleQueue[_Job] = SimpleQueue()
            jobs.put(job)  # before its thread begins: where gevent has patched threads, that runs at once
            threading.Thread(target=self._work, args=(jobs,), name="x402guard-aside", daemon=True).start()

    def _work(self, jobs: SimpleQueue[_Job]) -> None:
        idle = self._idle
        while True:
            try:
                job = jobs.get(timeout=_IDLE_S)
            except Empty:
                try:
                    idle.remove(jobs)
                except ValueError:
                    continue  # taken a moment ago: a job is on its way
                return
            job(lambda: idle.append(jobs))
            del job  # keep nothing of a call while waiting


_Job = Callable[[Callable[[], None]], None]
"""A job calls its argument when its thread may be given another one."""

_IDLE_S: Final = 10
_WORKERS: Final = _Workers()


class Aside(Generic[R]):
    """One call in a daemon thread, with the caller's context variables. The caller waits for it or abandons it.

    *late* is called when an abandoned call has ended: with its result, or None if it failed.
    """

    def __init__(self, call: Callable[[], R], late: Callable[[R | None], None] | None = None) -> None:
        self._call, self._late = call, late
        self._context = copy_context()
        self._lock = threading.Lock()
        self._done: SimpleQueue[None] = SimpleQueue()  # Ctrl-C may leave the lock of an Event behind
        self._wake: Callable[[], None] = partial(self._done.put, None)
        self._left = self._over = False
        self._result: R | None = None
        self._error: BaseException | None = None

    def _run(self, idle: Callable[[], None]) -> None:
        result: R | None = None
        error: BaseException | None = None
        try:
            result = self._context.run(self._call)
        except BaseException as raised:  # noqa: BLE001 - raised again in the waiting caller
            error = raised
        with self._lock:
            self._result, self._error, self._over = result, error, True
            left = self._left
        if left and self._late is not None:
            self._late(result)
        idle()
        self._wake()

    @property
    def was_left(self) -> bool:
        """True once the call is abandoned."""
        return self._left

    def _start(self) -> None:
        _WORKERS.start(self._run)

    def _leave(self) -> None:
        """Abandon the call; a result that has come already goes to *late*."""
        with self._lock:
            self._left, over = True, self._over
        if over and self._late is not None:
            self._late(self._result)

    def _ended(self) -> R:
        if self._error is not None:
            raise self._error
        return cast("R", self._result)

    def within(self, seconds: float | None) -> R:
        """Return its result or raise its error. Raises ``TooLate`` if neither comes in time."""
        self._start()
        try:
            self._done.get(timeout=None if seconds is None else max(0.0, seconds))
        except BaseException as error:  # Ctrl-C too
            self._leave()
            if isinstance(error, Empty):
                raise TooLate from None
            raise
        return self._ended()

    async def awaited_within(self, seconds: float | None) -> R:
        """Do the same, awaited. A cancelled task abandons the call."""
        event = Wakeable()
        self._wake = event.set
        self._start()
        try:
            await within(seconds, event.wait)
        except BaseException:
            self._leave()
            raise
        return self._ended()

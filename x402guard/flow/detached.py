"""Calls that may never come back, run in threads of their own that are left behind: nobody waits longer than was said."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar, cast

import anyio

R = TypeVar("R")


def on_trio() -> bool:
    """True inside a task of trio's."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


class TooLate(Exception):  # noqa: N818 - a signal, never seen by a user
    """A call did not come back in time. No ``TimeoutError``: the call may raise one of its own."""


def _discard(_handle: object) -> None:
    """Nobody needs it."""


class Wakeable:
    """An event of the running event loop, asyncio's or trio's, that any thread may set."""

    def __init__(self) -> None:
        self._set: Callable[[], None]
        if on_trio():
            import trio  # it runs us, so it is there

            event, token = trio.Event(), trio.lowlevel.current_trio_token()
            self._wait: Callable[[], Any] = event.wait
            self._set = lambda: token.run_sync_soon(event.set)
            self._gone: type[Exception] = trio.RunFinishedError
        else:
            done, loop = asyncio.Event(), asyncio.get_running_loop()
            self._wait = done.wait
            self._set = lambda: _discard(loop.call_soon_threadsafe(done.set))
            self._gone = RuntimeError

    def set(self) -> None:
        """Wake whoever waits; nobody does where the loop has been closed."""
        with suppress(self._gone):
            self._set()

    async def wait(self) -> None:
        """Wait until it is set."""
        await self._wait()


async def within(seconds: float | None, call: Callable[[], Awaitable[R]]) -> R:
    """Return what is awaited, or raise ``TooLate`` where it does not come in so many seconds; it is cancelled then."""
    if seconds is None:
        return await call()
    scope = anyio.move_on_after(seconds)
    scope.__enter__()
    try:
        result = await call()
    except GeneratorExit:
        raise  # thrown away, perhaps with its loop: there is nothing left to be cancelled, and nobody to be told
    except BaseException as error:
        if scope.__exit__(type(error), error, error.__traceback__):
            raise TooLate from None
        raise
    scope.__exit__(None, None, None)
    return result


class Aside(Generic[R]):
    """One call in a daemon thread of its own, with the caller's context variables. It is waited for, and may be left behind.

    *late* is called once it has come to its end, where it was left behind: with its result, or None where it failed.
    """

    def __init__(self, call: Callable[[], R], late: Callable[[R | None], None] | None = None) -> None:
        self._call, self._late = call, late
        self._context = copy_context()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._wake: Callable[[], None] = self._done.set
        self._left = self._over = False
        self._result: R | None = None
        self._error: BaseException | None = None

    def _run(self) -> None:
        result: R | None = None
        error: BaseException | None = None
        try:
            result = self._context.run(self._call)
        except BaseException as raised:  # noqa: BLE001 - it is raised where it is waited for
            error = raised
        with self._lock:
            self._result, self._error, self._over = result, error, True
            left = self._left
            self._wake()
        if left and self._late is not None:
            self._late(result)

    @property
    def was_left(self) -> bool:
        """True once nobody waits for it any more."""
        return self._left

    def _start(self) -> None:
        threading.Thread(target=self._run, name="x402guard-aside", daemon=True).start()

    def _leave(self) -> None:
        """Nobody waits any more; what came meanwhile is put away."""
        with self._lock:
            self._left, over = True, self._over
        if over and self._late is not None:
            self._late(self._result)

    def _ended(self) -> R:
        if self._error is not None:
            raise self._error
        return cast("R", self._result)

    def within(self, seconds: float | None) -> R:
        """Return its result, or raise its error; ``TooLate`` where neither came in time."""
        self._start()
        try:
            came = self._done.wait(seconds)
        except BaseException:  # Ctrl-C
            self._leave()
            raise
        if not came:
            self._leave()
            raise TooLate
        return self._ended()

    async def awaited_within(self, seconds: float | None) -> R:
        """The same, awaited; a cancelled task leaves the call behind."""
        event = Wakeable()
        self._wake = event.set
        self._start()
        try:
            await within(seconds, event.wait)
        except BaseException:
            self._leave()
            raise
        return self._ended()

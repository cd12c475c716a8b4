"""Runs what blocks for an event loop: in threads of our own, which a task that is cancelled waits for, or abandons."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from contextvars import Context, copy_context
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import anyio.to_thread
from anyio._core._eventloop import claim_worker_thread, get_async_backend, threadlocals

from x402guard.flow.detached import Aside, Wakeable, on_trio
from x402guard.flow.shell import Shell

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

R = TypeVar("R")

_LEDGER_THREADS: Final = 16
_CLOSING_THREADS: Final = 40


async def run_in_daemon_thread(call: Callable[[], R], limiter: anyio.CapacityLimiter | None = None) -> R:
    """Run a blocking call in a daemon thread, of which *limiter* allows so many at once. A cancelled task abandons it.

    Not in one of anyio's for asyncio: those end with the root task of their loop, and a loop that Ctrl-C has left never
    ends it. It is marked as one of them, so that a signer may go back to the loop by ``anyio.from_thread``.
    """
    async with nullcontext() if limiter is None else limiter:
        if on_trio():  # its threads are daemons; a limiter of its own would count an abandoned call
            return await anyio.to_thread.run_sync(call, limiter=anyio.CapacityLimiter(1), abandon_on_cancel=True)
        backend = get_async_backend()
        token = backend.current_token()

        def work() -> R:
            with claim_worker_thread(backend, token):
                threadlocals.current_cancel_scope = scope  # as in anyio's own threads
                try:
                    return call()
                finally:
                    del threadlocals.current_cancel_scope

        with anyio.CancelScope() as scope:
            result = await Aside(partial(context_of_a_thread().run, work)).awaited_within(None)
        return result  # noqa: RET504 - a scope may end its block early, for mypy


async def finish_change(
    call: Callable[[], R], shell: Shell, late: Callable[[R], object], *, may_drop: bool = True
) -> R:
    """Run a transaction to its end even if the task is cancelled, and let the cancellation continue after it.

    *late* is then called with the result, if there is one. One that has not begun is dropped, if it may be. asyncio's
    own ``task.cancel()`` (``wait_for``, ``timeout``, ``TaskGroup``, the end of the loop) breaks anyio's shield, and a
    transaction still running in the background could be followed by one that comes too early. The event loop waits.
    Several threads of its own give each ledger its changes, because those that wait share a commit; forty would
    compete with the loop for the interpreter.
    """
    work = _begun(partial(_ledger_threads, os.getpid(), id(shell.store)), call)
    return await _woken(work, late, may_drop=may_drop)


async def finish_closing(call: Callable[[], R], *, of_a_guard: bool = False) -> R:
    """Run what ends a session, or is *of a guard*, to its end even if the task is cancelled, and then let that continue.

    It may take as long as functions of the owner, so it has threads of its own.
    """
    work = _begun(partial(_closing_threads, os.getpid(), of_a_guard), partial(context_of_a_thread().run, call))
    return await _woken(work, lambda _: None, may_drop=False)


def _begun(pool: Callable[[], ThreadPoolExecutor], call: Callable[[], R]) -> Future[R]:
    """Return the future of a call that is made once: in a thread of the pool, or here if it can start none.

    The interpreter may be ending, or the process have too many threads. The call may be in the pool's queue all the same.
    """
    from concurrent.futures import Future

    work: Future[R] = Future()
    turn = threading.Lock()

    def once() -> None:
        if not turn.acquire(blocking=False) or not work.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            work.set_exception(error)
        else:
            work.set_result(result)

    try:
        pool().submit(once)
    except (RuntimeError, ImportError):
        once()
    return work


async def _woken(work: Future[R], late: Callable[[R], object], *, may_drop: bool = True) -> R:
    if work.done():
        return work.result()
    done = Wakeable()
    work.add_done_callback(lambda _: done.set())
    return await awaited(work, done, late, may_drop=may_drop)


async def awaited(work: Future[R], done: Wakeable, late: Callable[[R], object], *, may_drop: bool) -> R:
    """Return the result of *work*, which sets *done* at its end. Of a cancelled task, it is dropped or goes to *late*."""
    import asyncio  # not for programs without an event loop

    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            with anyio.CancelScope(shield=True):
                await done.wait()
        except asyncio.CancelledError as error:
            if may_drop and work.cancel():
                raise  # the transaction has not begun
            cancelled = error
    if cancelled is not None:
        if work.exception() is None:
            late(work.result())
        raise cancelled  # the flow gets the cancellation, and reads the ledger
    return work.result()


def context_of_a_thread() -> Context:
    """Return a copy of this context for a plain thread, where no event loop runs, whatever runs here."""
    context = copy_context()
    with suppress(ImportError):
        from sniffio import current_async_library_cvar

        context.run(current_async_library_cvar.set, None)
    return context


@lru_cache(maxsize=2)
def _closing_threads(_pid: int, _of_guards: bool) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    # Guards have their own: sessions that end slowly may take all forty.
    return ThreadPoolExecutor(_CLOSING_THREADS, thread_name_prefix="x402guard-closing")


@lru_cache(maxsize=64)
def _ledger_threads(_pid: int, _store: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    # One pool per ledger, so that none waits for another; and per process: a fork has none of its parent's threads.
    return ThreadPoolExecutor(_LEDGER_THREADS, thread_name_prefix="x402guard-ledger")

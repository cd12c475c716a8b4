"""Threads of our own on asyncio are marked as anyio's by private names of it: they are there, and do what is needed."""

import inspect
import threading

import anyio
import anyio.from_thread
import pytest
from anyio._core import _eventloop

from x402guard.flow.threads import run_in_daemon_thread

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def test_anyio_has_the_names_that_mark_a_thread():
    assert list(inspect.signature(_eventloop.claim_worker_thread).parameters) == ["backend_class", "token"]
    assert isinstance(_eventloop.threadlocals, threading.local)

    async def main():
        assert callable(_eventloop.get_async_backend().current_token)

    anyio.run(main)


@BACKENDS
def test_a_call_in_a_daemon_thread_may_go_back_to_the_loop(backend):
    async def main():
        here = threading.get_ident()

        async def awaited():
            await anyio.sleep(0)
            return threading.get_ident()

        def call():
            anyio.from_thread.check_cancelled()
            assert threading.current_thread().daemon
            assert threading.get_ident() != here
            return anyio.from_thread.run(awaited), anyio.from_thread.run_sync(threading.get_ident)

        assert await run_in_daemon_thread(call) == (here, here)

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_call_that_was_abandoned_can_see_that_it_was_cancelled(backend):
    began, left, seen, over = (threading.Event() for _ in range(4))

    def call():
        began.set()
        left.wait(20)
        try:
            anyio.from_thread.check_cancelled()
        except BaseException:
            seen.set()
        finally:
            over.set()

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_in_daemon_thread, call)
            while not began.is_set():
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        left.set()
        while not over.is_set():
            await anyio.sleep(0.01)

    anyio.run(main, backend=backend)
    assert seen.is_set()

"""Calls that may never return run in threads of their own, and a thread whose call has ended takes the next one."""

import queue
import sys
import threading
import time
import types
from contextvars import ContextVar

import anyio
import pytest

from x402guard import ConfigError, Guard
from x402guard.flow import detached
from x402guard.flow.detached import Aside, TooLate, in_event_loop
from x402guard.flow.surroundings import current_task

WHERE = ContextVar("where", default="nowhere")


def ident():
    return threading.get_ident()


def test_a_thread_whose_call_has_ended_takes_the_next_one():
    used = {Aside(ident).within(5) for _ in range(200)}
    assert threading.get_ident() not in used
    assert len(used) <= 3  # one that is not idle yet when the next call comes leaves it to another


def test_a_call_that_does_not_return_keeps_its_thread_from_all_others():
    hangs, ended = threading.Event(), []
    with pytest.raises(TooLate):
        Aside(lambda: (ended.append(ident()), hangs.wait(20)), lambda _: None).within(0.05)
    assert ended[0] not in {Aside(ident).within(5) for _ in range(20)}
    hangs.set()


def test_the_late_result_is_handed_over_once_and_before_the_thread_takes_another_call():
    gone, late = threading.Event(), []
    aside = Aside(lambda: gone.wait(20) and "late", lambda result: (time.sleep(0.05), late.append((result, ident()))))
    with pytest.raises(TooLate):
        aside.within(0.02)
    gone.set()
    while not late:
        assert Aside(ident).within(5) is not None
    (found,) = late
    assert found[0] == "late"


def test_each_call_has_its_callers_context_and_leaves_none_behind():
    def here(name):
        before = WHERE.get()
        WHERE.set(name)
        return before

    WHERE.set("outside")
    assert [Aside(lambda name=name: here(name)).within(5) for name in "abc"] == ["outside"] * 3
    assert WHERE.get() == "outside"


def test_an_error_is_raised_in_the_caller_and_the_thread_lives():
    for _ in range(5):
        with pytest.raises(KeyError, match="gone"):
            Aside(lambda: {}["gone"]).within(5)
    assert Aside(lambda: 7).within(5) == 7


def test_many_at_once_each_get_their_own_result():
    found = []

    def call(n):
        found.append(Aside(lambda: (time.sleep(0.001), n)[1]).within(5) == n)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 64


def test_the_awaited_form_uses_the_same_threads():
    async def main():
        return {await Aside(ident).awaited_within(5) for _ in range(50)}

    assert len(anyio.run(main)) <= 3


@pytest.mark.parametrize("module", [None, types.ModuleType("asyncio")], ids=["not loaded", "being loaded"])
def test_a_thread_without_asyncio_has_no_loop(monkeypatch, module):
    """Another thread may be in the middle of importing it."""
    monkeypatch.setitem(sys.modules, "asyncio", module)
    assert not in_event_loop()
    assert current_task() is threading.current_thread()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_task_has_a_loop(backend):
    async def main():
        return in_event_loop(), current_task()

    is_in, task = anyio.run(main, backend=backend)
    assert is_in
    assert not isinstance(task, threading.Thread)


def test_a_process_that_gevent_patches_late_is_refused_and_does_not_freeze(monkeypatch):
    """A queue from before the patch would block all greenlets, and the first payment with them."""
    monkeypatch.setattr(queue, "SimpleQueue", queue.Queue)
    for call in (lambda: Guard(ledger="memory://"), lambda: Aside(ident).within(5)):
        with pytest.raises(ConfigError, match="patch it first, before any other import"):
            call()


def test_a_thread_finds_its_job_when_it_begins(monkeypatch):
    """Where gevent has patched threads, one begins before ``start`` returns."""
    begun = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: begun.append(thread._args[0].qsize()))
    workers = detached._Workers()
    workers.start(lambda idle: None)
    assert begun == [1]

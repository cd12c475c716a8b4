"""What has ended stays ended for all that have inherited it, whatever ids their tasks and threads have."""

import asyncio
import contextvars
import gc
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest

from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, ConfigError, SessionClosed, current_session
from x402guard.policy import Policy

QUIET = Policy(loop=None, breaker=None)


def pay(outcomes):
    try:
        current_session().charge("paid", "$0.10")
        outcomes["paid"] += 1
    except SessionClosed:
        outcomes["closed"] += 1


@pytest.fixture
def session():
    with make_guard(policy=QUIET) as guard, guard.session("s", budget="$50.00") as session:
        yield session


@pytest.mark.parametrize("kind", ["scope", "child", "other"])
def test_what_outlives_a_limit_inside_a_run_gets_neither_the_runs_budget_nor_its_rights(kind):
    """A thread and a task that have inherited a narrow child do more after its end than it was allowed."""
    with make_guard(policy=QUIET) as guard, guard.session("s", budget="$50.00") as session:
        inside = {
            "scope": lambda: session.scope("$0.05"),
            "child": lambda: session.child("reader", budget="$0.05", tools=["search"]),
            "other": lambda: guard.session("other", budget="$0.05"),
        }[kind]()
        outcomes = Counter()

        async def late():
            await asyncio.sleep(0.01)
            pay(outcomes)

        async def main():
            with inside:
                inherited = contextvars.copy_context()
                task = asyncio.create_task(late())
                await asyncio.sleep(0)
            await task
            thread = threading.Thread(target=inherited.run, args=(pay, outcomes))
            thread.start()
            thread.join()
            pay(outcomes)  # the task of the block goes on in the run

        asyncio.run(main())
        assert outcomes == {"closed": 2, "paid": 1}
        assert session.spent == Decimal("0.10")


def test_a_worker_that_was_begun_in_one_jobs_block_does_the_next_job(session):
    """Each job has a child of its own, which it is given by name: none of them narrows another."""
    outcomes = Counter()

    async def main():
        jobs = asyncio.Queue()

        async def works():
            while (job := await jobs.get()) is not None:
                job.charge("paid", "$0.10")
                outcomes[job.name] += 1

        with session.child("first", budget="$1.00") as first:
            worker = asyncio.create_task(works())
            jobs.put_nowait(first)
            await asyncio.sleep(0)
        with session.child("second", budget="$1.00") as second:
            jobs.put_nowait(second)
            jobs.put_nowait(None)
            await worker

    asyncio.run(main())
    assert outcomes == {"first": 1, "second": 1}


def test_what_outlives_a_child_of_a_run_without_a_block_is_closed_out_too():
    with make_guard(policy=QUIET) as guard:
        run, outcomes = guard.session("s", budget="$5.00"), Counter()
        with run.child("reader", budget="$0.05"):
            inherited = contextvars.copy_context()
        thread = threading.Thread(target=inherited.run, args=(pay, outcomes))
        thread.start()
        thread.join()
        assert outcomes == {"closed": 1}


def test_tasks_that_begin_after_the_task_of_the_scope_is_gone_are_not_taken_for_it(session):
    outcomes, kept = Counter(), []

    async def background():
        await asyncio.sleep(0.01)
        for _ in range(200):
            await asyncio.create_task(charges())

    async def charges():
        pay(outcomes)

    async def handler():
        with session.scope("$0.05"):
            kept.append(asyncio.create_task(background()))

    async def main():
        await asyncio.create_task(handler())
        gc.collect()
        await kept[0]

    asyncio.run(main())
    assert outcomes == {"closed": 200}


def test_threads_that_begin_after_the_thread_of_the_scope_has_ended_are_not_taken_for_it(session):
    outcomes, inherited = Counter(), []

    def handler():
        with session.scope("$0.05"):
            inherited.append(contextvars.copy_context())

    for target in (handler, *[lambda: inherited[0].copy().run(pay, outcomes)] * 20):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(target,))
        thread.start()
        thread.join()
    assert outcomes == {"closed": 20}


def test_another_session_is_not_paid_from_through_an_ended_child_of_the_one_in_context():
    """It would pass from inside the block of a run whose block refuses it."""
    with make_guard(policy=QUIET) as guard:
        other = guard.session("other", budget="$5.00")
        with guard.session("s", budget="$5.00") as run:
            with run.child("c", budget="$0.50"):
                inherited = contextvars.copy_context()
            with pytest.raises(ConfigError, match="belongs to"):
                inherited.run(other.charge, "serp", "$0.10")
        inherited.run(other.charge, "serp", "$0.10")  # that run is over: this is the job after it
        assert other.spent == Decimal("0.10")


def in_another_thread(call, *args):
    """Call it there; return its result or its error."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(call, *args)
        return future.exception() or future.result()


@pytest.mark.parametrize("way", ["thread", "task", "generator"])
def test_what_is_bound_to_the_run_after_its_child_has_ended_is_inside_the_run(session, way):
    outcomes = Counter()
    bound = []
    if way == "generator":

        async def reads():
            async with session.child("reader", budget="$0.05"):
                yield 1

        async def main():
            async for _ in reads():
                task = asyncio.create_task(asyncio.sleep(0.01, result=None))
                bound.append(contextvars.copy_context())
            await task

        asyncio.run(main())
        inherited = bound.pop()
    else:
        with session.child("reader", budget="$0.05"):
            inherited = contextvars.copy_context()
    in_another_thread(inherited.run, pay, outcomes)
    assert outcomes == {"closed": 1}

    def go_on():
        function = session.bind(pay)
        if way == "thread":
            thread = threading.Thread(target=function, args=(outcomes,))
            thread.start()
            thread.join()
        else:
            function(outcomes)

    in_another_thread(inherited.run, go_on)
    assert outcomes == {"closed": 1, "paid": 1}
    told = in_another_thread(inherited.run, session.charge, "serp", "$0.01")
    assert isinstance(told, SessionClosed)
    assert "session.bind" in told.advice


def test_what_is_bound_to_the_run_inside_an_open_child_stays_in_that_child(session):
    """Its own grandchild has ended, and the child around it has not."""
    with session.child("child", budget="$0.05") as child:
        with child.child("grandchild", budget="$0.01"):
            inherited = contextvars.copy_context()
        told = in_another_thread(inherited.run, lambda: session.bind(session.charge)("serp", "$1.00"))
        assert isinstance(told, BudgetExhausted)
        in_another_thread(inherited.run, lambda: session.bind(session.charge)("serp", "$0.02"))
        assert child.spent == Decimal("0.02")

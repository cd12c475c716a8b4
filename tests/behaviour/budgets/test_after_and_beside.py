"""A report is readable after the end; scopes go where context goes, say where it does not, and leak out of nothing."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal

import anyio
import pytest

from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, LedgerUnavailable


def test_a_report_is_readable_after_its_guard_is_closed(ledger_url):
    with make_guard(ledger_url) as guard:
        session = guard.session("s", budget="$1", id="run")
        session.charge("serp", "$0.10")
    assert session.report().to_dict()["spent"] == "0.10"
    assert (session.spent, session.remaining) == (Decimal("0.10"), Decimal("0.90"))
    with pytest.raises(LedgerUnavailable, match="closed"):
        session.charge("serp", "$0.10")
    if ledger_url.startswith("sqlite"):
        with make_guard(ledger_url) as other:
            other.session("s", id="run").charge("serp", "$0.20")
        assert session.report().to_dict()["spent"] == "0.30", "as the ledger has it now"
        os.unlink(ledger_url.removeprefix("sqlite:///"))
        with pytest.raises(LedgerUnavailable):
            session.report()


@pytest.fixture
def session():
    with make_guard() as guard:
        yield guard.session("s", budget="$5")


def is_narrowed(session):
    try:
        session.charge("serp", "$0.10")
    except BudgetExhausted:
        return True
    return False


def test_a_scope_goes_with_tasks_and_to_thread_and_with_bind_into_pools(session):
    async def main():
        loop, found = asyncio.get_running_loop(), {}
        with session.scope("$0.05"):
            found["to_thread"] = await asyncio.to_thread(is_narrowed, session)
            found["task"] = await asyncio.create_task(asyncio.to_thread(is_narrowed, session))
            found["run_in_executor, bound"] = await loop.run_in_executor(None, session.bind(is_narrowed), session)
            with ThreadPoolExecutor(1) as pool:
                found["pool, bound"] = pool.submit(session.bind(is_narrowed), session).result()
        assert not is_narrowed(session)
        return found

    assert set(anyio.run(main).items()) == {
        ("to_thread", True), ("task", True), ("run_in_executor, bound", True), ("pool, bound", True)}  # fmt: skip


def test_where_a_scope_does_not_go_the_log_says_so_once(session, caplog):
    with session.scope("$0.05"), ThreadPoolExecutor(1) as pool:
        assert [pool.submit(is_narrowed, session).result() for _ in range(3)] == [False] * 3
    said = [record for record in caplog.records if "not narrowed" in record.getMessage()]
    assert len(said) == 1
    assert "session.bind" in said[0].getMessage()


def test_a_bound_function_runs_in_its_session_outside_of_any_scope(session):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(session.bind(is_narrowed), session).result() is False


def test_a_scope_leaks_out_of_no_generator_that_is_left_early(session):
    def numbers():
        with session.scope("$0.05"):
            yield is_narrowed(session)
            yield None

    for narrowed in numbers():
        assert narrowed
        break
    assert not is_narrowed(session)

    @contextmanager
    def own():
        with session.scope("$0.05"):
            yield

    with own():
        assert is_narrowed(session), "a context manager of one's own keeps its scope"
    assert not is_narrowed(session)


def test_a_scope_leaks_out_of_no_async_generator_that_is_left_early(session):
    async def numbers():
        with session.scope("$0.05"):
            yield is_narrowed(session)
            yield None

    async def main():
        async for narrowed in numbers():
            assert narrowed
            break
        await asyncio.sleep(0.05)  # its end runs in a task of its own
        assert not is_narrowed(session)
        async with anyio.create_task_group() as tasks:

            async def inside():
                assert not is_narrowed(session)

            tasks.start_soon(inside)

    anyio.run(main)


def test_a_task_that_outlives_its_scope_does_not_spend_without_it(session):
    async def main():
        go = asyncio.Event()

        async def late():
            await go.wait()
            session.charge("serp", "$0.10")

        with session.scope("$0.05"):
            task = asyncio.create_task(late())
            await asyncio.sleep(0)
        go.set()
        with pytest.raises(Exception, match="has ended"):
            await task

    anyio.run(main)

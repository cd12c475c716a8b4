"""Blocks of sessions and scopes, nested and left in any order, in tasks that share them."""

import anyio
import pytest

from tests.support.merchant import (
    URL,
    Shop,
    client,
    make_guard,
)
from x402guard import BudgetExhausted


def test_a_session_that_two_tasks_enter_leaves_each_its_own_context():

    from x402guard.guard.session import current_session

    async def main():
        with make_guard() as guard:
            one, two = guard.session("one", budget="$1"), guard.session("two", budget="$1")
            both_in, first_out = anyio.Event(), anyio.Event()

            async def first():
                async with one:
                    await both_in.wait()
                assert current_session() is None
                first_out.set()

            async def second():
                async with two:
                    async with one:
                        both_in.set()
                        await first_out.wait()
                        assert current_session() is one
                    assert current_session() is two

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first)
                tasks.start_soon(second)

    anyio.run(main)


def test_refusals_in_nested_budgets_are_counted_once():
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        child = session.child("c", budget="$0.005")
        for number in range(3):
            with pytest.raises(Exception, match="budget"):
                client(child, Shop()).get(f"{URL}/{number}")
        [row] = session.report().to_dict()["refusals"]
        assert row["count"] == 3


def test_a_scope_goes_on_narrowing_when_a_block_around_it_is_left_first():
    with make_guard() as guard:
        session = guard.session("s", budget="$1")

        def generator():
            with session.scope("$0.50"):
                yield

        with session:
            running = generator()
            next(running)
            with session.scope("$0.005"):
                running.close()
                with pytest.raises(BudgetExhausted):
                    client(session, Shop()).get(URL)
            client(session, Shop()).get(URL)


def test_a_session_that_was_left_in_another_context_is_over_here_too():
    import contextvars

    with make_guard() as guard:
        one, two = guard.session("one", budget="$1"), guard.session("two", budget="$1")
        one.__enter__()
        contextvars.copy_context().run(one.__exit__, None, None, None)
        assert client(two, Shop()).get(URL).status_code == 200

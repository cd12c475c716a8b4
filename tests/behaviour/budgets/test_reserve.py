"""A part of a budget is kept for the end: for the last LLM calls, once."""

import asyncio
import contextvars
import threading
from decimal import Decimal

import httpx
import pytest

from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import URL, Shop, accept, async_client, client, make_guard, required
from x402guard import BudgetExhausted, ConfigError


def thinks(session, most=8_000):
    """One call of gpt-4o at eight cents at most."""
    http = client(session, lambda _: httpx.Response(200, json=completion()))
    return http.post(CHAT, json=ask(max_completion_tokens=most, user=str(most)))


@pytest.mark.parametrize("reserve", ["10%", "$0.10", "0.1", Decimal("0.10"), " 10 %"])
def test_payments_stop_at_ninety_cents_and_one_last_llm_call_passes(ledger_url, reserve):
    shop = Shop(required(accept(100_000)))
    with make_guard(ledger_url) as guard, guard.session("run", budget="$1.00", reserve=reserve) as session:
        http = client(session, shop)
        for number in range(9):
            http.get(f"{URL}/{number}")
        assert (session.remaining, session.would_exceed("$0.01"), len(shop.payments)) == (0, True, 9)
        for refused in (lambda: http.get(f"{URL}/9"), lambda: session.charge("serp", "$0.01"), lambda: thinks(session)):
            with pytest.raises(BudgetExhausted, match=r"in reserve"):
                refused()
        with session.finalizing():
            for refused in (lambda: http.get(f"{URL}/9"), lambda: session.charge("serp", "$0.01")):
                with pytest.raises(BudgetExhausted):
                    refused()
            with pytest.raises(BudgetExhausted):
                session.hold("serp", up_to="$0.01").__enter__()
            with pytest.raises(BudgetExhausted):
                thinks(session, 10_001)  # more than the reserve, too
            assert thinks(session).status_code == 200
        with pytest.raises(BudgetExhausted):
            thinks(session, 7_999)
        assert len(shop.payments) == 9


def test_it_is_usable_once_in_a_sessions_life(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard, guard.session("run", budget="$1.00", reserve="10%", id="run") as session:
        with session.finalizing():
            pass
        with pytest.raises(ConfigError, match="begin once"), session.finalizing():
            pass
    with make_guard(url) as guard, guard.session("run", budget="$1.00", reserve="10%", id="run") as session:
        with pytest.raises(ConfigError, match="begin once"), session.finalizing():
            pass
        with pytest.raises(ConfigError, match=r"reserve: .*never lowered"):
            guard.session("run", id="run", reserve="$0.05")
        assert guard.session("run", id="run", reserve="$0.20").remaining == Decimal("0.80")


def test_two_threads_that_begin_at_once_begin_once(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("run", budget="$1.00", reserve="10%") as session:
        gate, begun = threading.Barrier(8), []

        def begin():
            gate.wait(30)
            try:
                with session.finalizing():
                    begun.append(1)
            except ConfigError:
                begun.append(0)

        threads = [threading.Thread(target=begin) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert (sum(begun), len(begun)) == (1, 8)


def test_tasks_begin_it_and_other_tasks_do_not_have_it(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("run", budget="$1.00", reserve="10%") as session:
        session.charge("serp", "$0.90")

        async def post(most):
            async with async_client(session, answers) as http:
                return await http.post(CHAT, json=ask(max_completion_tokens=most))

        async def answers(_request):
            return httpx.Response(200, json=completion())

        async def last(begun, done):
            async with session.finalizing():
                begun.set()
                await done.wait()
                return (await post(8_000)).status_code

        async def main():
            begun, done = asyncio.Event(), asyncio.Event()
            task = asyncio.create_task(last(begun, done))
            await asyncio.wait_for(begun.wait(), 30)
            with pytest.raises(BudgetExhausted):
                await post(7_000)
            done.set()
            assert await asyncio.wait_for(task, 30) == 200

        asyncio.run(main())


def test_what_was_begun_inside_has_the_reserve_no_longer_when_the_block_is_left(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("run", budget="$1.00", reserve="10%") as session:
        session.charge("serp", "$0.90")
        with session.finalizing():
            inside = contextvars.copy_context()
        with pytest.raises(BudgetExhausted):
            inside.run(thinks, session)


def test_a_child_of_the_session_may_use_it_and_another_session_may_not(ledger_url):
    with make_guard(ledger_url) as guard:
        other = guard.session("other", budget="$0.10", reserve="50%")
        with (
            guard.session("run", budget="$1.00", reserve="10%") as session,
            session.child("k", budget="$1.00") as child,
        ):
            child.charge("serp", "$0.90")
            assert child.remaining == 0
            with session.finalizing():
                assert thinks(child).status_code == 200
                assert other.remaining == Decimal("0.05")
            with pytest.raises(ConfigError, match=r'reserve: session .k. has no reserve; open it with reserve="10%"'):
                child.finalizing().__enter__()
        with other, pytest.raises(BudgetExhausted):
            thinks(other)


def test_a_reserve_is_no_way_past_the_budget_above(ledger_url):
    with make_guard(ledger_url) as guard:
        customer = guard.budget("c", "$0.92", per="day")
        with customer.session("run", budget="$1.00", reserve="10%") as session:
            session.charge("serp", "$0.90")
            with session.finalizing(), pytest.raises(BudgetExhausted, match="budget 'c' has"):
                thinks(session)

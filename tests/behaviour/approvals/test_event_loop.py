"""Asking in an event loop: other tasks go on, a cancelled one holds nothing and leaves its place, many ask at once."""

import threading

import anyio
import pytest

from tests.support.llm_provider import CHAT, Provider, ask, metered
from tests.support.merchant import URL, Shop, async_client, make_guard
from x402guard import Approvals, AsyncGuardedTransport, Bulkhead, PaymentRefused, Policy, Rule

every_loop = pytest.mark.parametrize("backend", ["asyncio", "trio"])
RULE = Rule(name="ask", action="ask", match="*ask*")


def asks(**more):
    return Policy(rules=[RULE], breaker=None, loop=None, **more)


async def pays(session, shop, url=f"{URL}/ask"):
    async with async_client(session, shop) as http:
        return await http.get(url)


async def holds(session, _shop):
    async with session.hold("ask", up_to="$0.01") as job:
        job.capture("$0.01")


async def decorated(session, _shop):
    @session.tool(cost="$0.01", mode="raw", render=lambda result, _mode: result)
    async def ask_around():
        return "found"

    return await ask_around()


every_step = pytest.mark.parametrize("step", [pays, holds, decorated])


class Person:
    """Thinks until a test says what to answer; remembers what it was asked."""

    def __init__(self):
        self.asked, self.thinking, self.decided, self.answer = [], threading.Event(), threading.Event(), True

    def __call__(self, request):
        self.asked.append(request)
        self.thinking.set()
        return self.decided.wait(30) and self.answer

    async def is_asked(self):
        assert await anyio.to_thread.run_sync(self.thinking.wait, 20)


@every_loop
@every_step
@pytest.mark.parametrize("answer", [True, False])
def test_other_tasks_go_on_while_a_person_thinks(ledger_url, backend, step, answer):
    person, shop = Person(), Shop()
    person.answer = answer
    ends = []

    async def asking(session):
        try:
            await step(session, shop)
            ends.append(True)
        except PaymentRefused as error:
            ends.append(error.rule)

    async def go():
        async with (
            make_guard(ledger_url, policy=asks(), approver=person) as guard,
            guard.session("s", budget="$1") as session,
        ):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(asking, session)
                await person.is_asked()
                assert (await pays(session, Shop(), f"{URL}/other")).status_code == 200
                assert session.held == 0
                person.decided.set()
            assert ends == [True if answer else "approval"]
            assert len(person.asked) == 1

    anyio.run(go, backend=backend)


@every_loop
@every_step
def test_a_task_that_is_cancelled_while_it_waits_holds_nothing_and_leaves_its_place(ledger_url, backend, step):
    person, shop = Person(), Shop()

    async def go():
        policy = asks(bulkhead=Bulkhead(per_host=1, per_tool=1, per_llm_host=1))
        async with make_guard(ledger_url, policy=policy, approver=person) as guard:
            async with guard.session("s", budget="$1", tokens=5_000) as session:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(step, session, shop)
                    await person.is_asked()
                    tasks.cancel_scope.cancel()
                assert (session.held, session.spent, shop.payments) == (0, 0, [])
                person.decided.set()  # too late: nobody waits any more
                with anyio.fail_after(20):
                    await step(session, shop)
                assert len(person.asked) == 2, "the yes to a call that is gone is none to the next"
                assert session.held == 0

    anyio.run(go, backend=backend)


@every_loop
def test_a_wait_that_asyncio_or_trio_cut_short_is_a_cancellation_and_no_yes(backend):
    person = Person()

    async def go():
        async with make_guard(policy=asks(), approver=person) as guard, guard.session("s", budget="$1") as session:
            with anyio.move_on_after(0.2) as scope:
                await holds(session, None)
            assert scope.cancelled_caught
            person.decided.set()
            assert (session.spent, session.held) == (0, 0)

    anyio.run(go, backend=backend)


@every_loop
def test_an_llm_call_is_asked_about_too(backend):
    person = Person()
    person.decided.set()

    async def go(session):
        import httpx

        provider = Provider(session)

        async def answer(request):
            reply = provider(request)
            return httpx.Response(reply.status, content=b"".join(reply.pieces), headers=reply.headers)

        async with httpx.AsyncClient(transport=AsyncGuardedTransport(session, httpx.MockTransport(answer))) as http:
            await http.post(CHAT, json=ask())
        assert len(provider.requests) == 1

    policy = Policy(rules=[Rule(name="ask", action="ask", kinds=["llm"])], breaker=None)
    with metered(guard={"policy": policy, "approver": person}) as session:
        anyio.run(go, session, backend=backend)
    assert [asked.kind for asked in person.asked] == ["llm"]


@every_loop
def test_many_ask_at_once_and_each_gets_its_own_answer(backend):
    async def go():
        odd = lambda request: request.arguments["n"] % 2 == 1
        done = []
        async with make_guard(policy=asks(), approver=odd) as guard, guard.session("s", budget="$1") as session:

            async def one(number):
                try:
                    async with session.hold("ask", up_to="$0.01", arguments={"n": number}) as job:
                        job.capture("$0.01")
                    done.append(number)
                except PaymentRefused:
                    pass

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(one, number)
        assert sorted(done) == list(range(1, 20, 2))

    anyio.run(go, backend=backend)


@every_loop
def test_a_question_about_one_call_does_not_keep_others_from_that_host(backend):
    """A person may think for five minutes; the places at a host are for calls that are under way."""
    person = Person()

    async def go():
        policy = asks(bulkhead=Bulkhead(per_host=1, per_llm_host=1))
        async with make_guard(policy=policy, approver=person) as guard, guard.session("s", budget="$1") as session:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pays, session, Shop())
                await person.is_asked()
                with anyio.move_on_after(2) as scope:
                    await pays(session, Shop(), f"{URL}/other")
                person.decided.set()
            assert not scope.cancelled_caught

    anyio.run(go, backend=backend)


@every_loop
def test_silence_is_a_no_in_an_event_loop_too(backend):
    person = Person()

    async def go():
        policy = asks(approvals=Approvals(timeout_s=1))
        async with make_guard(policy=policy, approver=person) as guard, guard.session("s", budget="$1") as session:
            with anyio.fail_after(5), pytest.raises(PaymentRefused, match="in time"):
                await holds(session, None)
            person.decided.set()
            assert (session.spent, session.held) == (0, 0)

    anyio.run(go, backend=backend)

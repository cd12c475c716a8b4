"""Payments by hand whose job in a pool ends before they are sent: the thread that asks next does another job."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from tests.support.merchant import URL, make_guard, receipt, recover_payment, required
from x402guard import AlreadyPaid, Bulkhead, ConfigError, Policy
from x402guard.adapters import direct
from x402guard.flow import surroundings

OPEN = Policy(breaker=None, loop=None)


async def in_the_loops_pool(job):
    return await asyncio.to_thread(job)


async def in_a_bare_pool(job):
    return await asyncio.get_running_loop().run_in_executor(None, job)


POOLS = [in_the_loops_pool, in_a_bare_pool]


@pytest.mark.parametrize("pool", POOLS)
def test_two_buyers_whose_jobs_run_in_one_thread_buy_once_each(pool):
    """The first request is under way while the thread that has read its payment asks for the other buyer."""

    async def main(session):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

        def prepare():
            payment = session.pay(required())
            return payment, recover_payment(payment.header[1])[1]

        async def buys(number):
            payment, nonce = await pool(prepare)
            await asyncio.sleep(0.2)
            done = await payment.asettled(receipt(transaction=f"0x{number:064x}"))
            return done.state, done.delivery, nonce

        first = asyncio.create_task(buys(1))
        await asyncio.sleep(0.05)
        return await asyncio.gather(first, buys(2))

    with make_guard(policy=OPEN) as guard, guard.session("s", budget="$1.00") as session:
        one, other = asyncio.run(main(session))
        assert one[:2] == other[:2] == ("captured", "done")
        assert one[2] != other[2]


@pytest.mark.parametrize("pool", POOLS)
def test_a_slot_of_what_is_under_way_does_not_go_to_the_next_job_of_its_thread(pool):
    policy = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=1))
    counts = {"now": 0, "most": 0}

    async def main(session):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

        async def buys(number):
            def prepare():
                payment = session.pay(required(url=f"{URL}/{number}"))
                assert payment.header
                return payment

            payment = await pool(prepare)
            counts["now"] += 1
            counts["most"] = max(counts["most"], counts["now"])
            await asyncio.sleep(0.1)
            counts["now"] -= 1
            await payment.asettled(receipt(transaction=f"0x{number:064x}"))

        await asyncio.gather(*(buys(number) for number in range(1, 4)))

    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        asyncio.run(main(session))
    assert counts["most"] == 1


def test_a_job_of_a_pool_that_has_lost_its_payment_asks_again_for_the_same_one(monkeypatch):
    monkeypatch.setattr(direct, "_UNREAD_S", 0.2)

    def buys(session):
        lost = session.pay(required())
        nonce = recover_payment(lost.header[1])[1]
        again = session.pay(required())
        assert recover_payment(again.header[1])[1] == nonce
        return again.settled(receipt()).hold_id

    with make_guard(policy=OPEN) as guard, guard.session("s", budget="$1.00") as session, ThreadPoolExecutor(1) as pool:
        hold_id = pool.submit(buys, session).result(timeout=20)
        assert guard.shell.store.hold(hold_id).delivery == "done"


@pytest.mark.parametrize("how", ["a context for each call", "bare jobs"])
def test_a_thread_whose_framework_gives_each_call_a_context_asks_again_too(monkeypatch, how):
    """The error of the first call is kept, and so its payment: a retry waits for that, and not for its whole flight."""
    monkeypatch.setattr(direct, "_UNREAD_S", 0.1)
    monkeypatch.setattr(surroundings, "_NEXT_JOB_S", 0.5)
    kept = []

    def call(function, *args):
        return copy_context().run(function, *args) if how == "a context for each call" else function(*args)

    def loses(session):
        kept.append(session.pay(required()))
        return recover_payment(kept[0].header[1])[1]

    def asks_again(session):
        payment = session.pay(required())
        nonce = recover_payment(payment.header[1])[1]
        return session.shell.store.hold(payment.settled(receipt()).hold_id).delivery, nonce

    with make_guard(policy=OPEN) as guard, guard.session("s", budget="$1.00") as session, ThreadPoolExecutor(1) as pool:
        nonce = pool.submit(call, loses, session).result(timeout=20)
        assert pool.submit(call, asks_again, session).result(timeout=5) == ("done", nonce)


@pytest.mark.parametrize("how", ["a context for each call", "bare jobs"])
def test_slots_of_lost_payments_go_to_the_calls_after_them_in_any_context(monkeypatch, how):
    monkeypatch.setattr(direct, "_UNREAD_S", 0.1)
    monkeypatch.setattr(surroundings, "_NEXT_JOB_S", 0.5)
    kept = []

    def loses(session, number):
        kept.append(session.pay(required(url=f"{URL}/{number}")))
        assert kept[-1].header

    policy = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=2))
    with (
        make_guard(policy=policy) as guard,
        guard.session("s", budget="$1.00") as session,
        ThreadPoolExecutor(1) as pool,
    ):
        for number in range(5):
            job = (copy_context().run, loses) if how == "a context for each call" else (loses,)
            pool.submit(*job, session, number).result(timeout=10)
    assert len({payment.hold_id for payment in kept}) == 5


def test_who_asks_for_one_purchase_gives_up_no_other():
    """A task has read the payment for A, sends it in a task of its own, and asks for B, which another task is buying."""
    a, b = required(url=f"{URL}/a"), required(url=f"{URL}/b")

    async def main(session):
        other = await session.apay(b)
        assert other.header

        async def sends(payment):
            await asyncio.sleep(0.4)
            return await payment.asettled(receipt(transaction=f"0x{1:064x}"))

        async def reads_a_and_asks_for_b():
            payment = await session.apay(a, purchase="order a")
            assert payment.header
            sent = asyncio.create_task(sends(payment))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(other.asettled(receipt(transaction=f"0x{2:064x}")))
            await session.apay(b)
            await waiting
            return await sent

        async def retries_a():
            await asyncio.sleep(0.1)
            with pytest.raises(AlreadyPaid):
                await session.apay(a, purchase="order a")

        done, _ = await asyncio.gather(reads_a_and_asks_for_b(), retries_a())
        assert (done.state, done.delivery) == ("captured", "done")

    with make_guard(policy=OPEN) as guard, guard.session("s", budget="$1.00") as session:
        asyncio.run(main(session))


def test_a_payment_that_another_call_has_taken_over_is_not_read(monkeypatch):
    monkeypatch.setattr(direct, "_UNREAD_S", 0.1)

    async def main(session):
        late = await asyncio.create_task(session.apay(required()))
        await asyncio.sleep(0.15)
        taken = await asyncio.create_task(session.apay(required()))
        assert taken.hold_id == late.hold_id
        for read in (lambda: late.header, lambda: late.payload):
            with pytest.raises(ConfigError, match="another call has asked for it since"):
                read()
        assert taken.header
        await taken.asettled(receipt())
        assert session.shell.store.hold(late.hold_id).delivery == "done"

    with make_guard(policy=OPEN) as guard, guard.session("s", budget="$1.00") as session:
        asyncio.run(main(session))

"""Payments by hand whose answer is lost while something still refers to them: they keep no caller and no place waiting."""

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from tests.behaviour.adapters.test_direct import CENT, MODES, end, pay
from tests.support.merchant import URL, make_guard, receipt, required
from x402guard import Bulkhead, CircuitOpen, Policy, PolicyDenied


@MODES
def test_who_asks_again_in_the_same_task_does_not_wait_for_itself(mode):
    """As in ``for attempt in range(3)``: the name of the payment that was lost is still bound."""
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        began = time.monotonic()
        first = pay(mode, session, required())
        assert first.header[0] == "PAYMENT-SIGNATURE"
        again = pay(mode, session, required())
        assert (again.hold_id, session.held) == (first.hold_id, CENT)
        assert end(mode, again, "settled", receipt()).hold_id == first.hold_id
        assert (session.spent, session.held) == (CENT, 0)
        other = pay(mode, session, required())
        assert other.hold_id != first.hold_id
        assert time.monotonic() - began < 10


def test_who_asks_beside_a_task_that_has_ended_does_not_wait_for_it():
    """What it was to end is kept in an error, as by ``gather(…, return_exceptions=True)``."""

    async def both(session):
        async def loses():
            kept.append(await session.apay(required()))
            assert kept[0].payload["x402Version"] == 2

        await asyncio.gather(loses())
        with anyio.fail_after(10):
            return await session.apay(required())

    kept = []
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        again = asyncio.run(both(session))
        assert again.hold_id == kept[0].hold_id


async def in_a_thread(session):
    return await asyncio.to_thread(session.pay, required())


async def in_a_task_of_its_own(session):
    return await asyncio.create_task(session.apay(required()))


@pytest.mark.parametrize("signed", [in_a_thread, in_a_task_of_its_own])
@pytest.mark.parametrize("is_read", [True, False])
def test_a_payment_that_is_signed_elsewhere_and_on_its_way_is_waited_for(signed, is_read):
    """The task or thread that has signed ends, or does other work, while the payment is being sent."""

    async def two_buyers(session):
        first = await signed(session)
        if is_read:
            assert first.header[1]
        other = asyncio.create_task(signed(session))
        done, _ = await asyncio.wait([other], timeout=0.5)
        assert not done
        await first.asettled(receipt())
        with anyio.fail_after(10):
            second = await other
        assert second.hold_id != first.hold_id
        await second.asettled(receipt())

    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        asyncio.run(two_buyers(session))
        assert (session.spent, session.held) == (2 * CENT, 0)


def test_payments_that_are_dropped_leave_nothing_in_memory():
    with make_guard(policy=Policy(loop=None, breaker=None)) as guard, guard.session("s", budget="$1.00") as session:
        for number in range(20):
            assert session.pay(required(url=f"{URL}/{number}")).header
        gc.collect()
        assert (session.context.between_hops, session.context.in_flight) == ({}, {})


@MODES
def test_what_is_lost_in_an_error_that_keeps_itself_keeps_no_place(mode):
    """The garbage collector may not come for long in a process that waits."""

    def loses(number):
        payment = session.pay(required(url=f"{URL}/{number}"))
        try:
            raise ConnectionError("no answer")
        except ConnectionError as error:
            kept = error
            payment.kept = kept

    policy = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=2, per_tool=2))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        gc.disable()
        try:
            for number in range(2):
                loses(number)
            began = time.monotonic()
            pay(mode, session, required(url=f"{URL}/after"))
            assert time.monotonic() - began < 20
        finally:
            gc.enable()


PLACES = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=2, per_tool=2))


@MODES
def test_a_payment_that_was_not_read_takes_no_place_from_who_waits(mode):
    with make_guard(policy=PLACES) as guard, guard.session("s", budget="$1.00") as session:
        began = time.monotonic()
        kept = [pay(mode, session, required(url=f"{URL}/{number}")) for number in range(4)]
        assert len({payment.hold_id for payment in kept}) == 4
        assert time.monotonic() - began < 10


@MODES
def test_who_asks_again_without_having_read_does_not_wait_for_itself_for_long(mode):
    """As after an error between the signature and the request; the name is still bound."""
    if mode == "async":
        return asyncio.run(asks_twice())
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        began = time.monotonic()
        first = session.pay(required())
        assert session.pay(required()).hold_id == first.hold_id
        assert time.monotonic() - began < 15


async def asks_twice():
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, anyio.fail_after(15):
        first = await session.apay(required())
        assert (await session.apay(required())).hold_id == first.hold_id


def test_payments_that_are_signed_in_threads_and_read_by_tasks_keep_their_places():
    """Between the two no task has read them, and those who wait do not take their places."""
    under_way, most = [0], [0]

    async def buys(session, number):
        payment = await asyncio.to_thread(session.pay, required(url=f"{URL}/{number}"))
        assert payment.header
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        await asyncio.sleep(0.02)
        under_way[0] -= 1
        await payment.asettled(receipt(transaction=f"0x{number:064x}"))

    async def all_of_them(session):
        await asyncio.gather(*(buys(session, number) for number in range(1, 13)))

    with make_guard(policy=PLACES) as guard, guard.session("s", budget="$1.00") as session:
        asyncio.run(all_of_them(session))
    assert most == [2]


def test_what_tasks_have_lost_that_ended_takes_no_place_from_who_waits():
    async def lose_and_go_on(session):
        async def loses(number):
            payment = await session.apay(required(url=f"{URL}/{number}"))
            raise ConnectionError(payment.header)

        kept = await asyncio.gather(*map(loses, range(2)), return_exceptions=True)
        with anyio.fail_after(5):
            return kept, await session.apay(required(url=f"{URL}/after"))

    with make_guard(policy=PLACES) as guard, guard.session("s", budget="$1.00") as session:
        kept, payment = asyncio.run(lose_and_go_on(session))
        assert [type(error) for error in kept] == [ConnectionError] * 2
        assert payment.hold_id


@MODES
def test_who_asks_again_takes_the_place_of_what_it_has_lost(mode):
    policy = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=1, per_tool=1))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        began = time.monotonic()
        first = pay(mode, session, required())
        assert first.header
        assert pay(mode, session, required()).hold_id == first.hold_id
        assert time.monotonic() - began < 5


def test_a_place_is_kept_no_longer_than_an_answer_is_waited_for():
    """The thread that has read the payment goes on, and never says what became of it."""
    policy = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=1, per_tool=1))
    with (
        ThreadPoolExecutor(1) as pool,
        make_guard(policy=policy, flight_s=1) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        kept = pool.submit(session.pay, required(url=f"{URL}/kept")).result()
        assert pool.submit(getattr, kept, "header").result()
        began = time.monotonic()
        assert session.pay(required(url=f"{URL}/other")).hold_id != kept.hold_id
        assert 0.5 < time.monotonic() - began < 10


@pytest.mark.parametrize(("place", "error"), [("1", PolicyDenied), ("2", CircuitOpen)])
def test_a_blocking_call_in_an_event_loop_does_not_wait_for_the_loops_own_tasks(place, error):
    """While it blocks the thread, they cannot end: the loop would stand still for minutes."""
    policy = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=1, per_tool=1))

    async def both(session):
        is_sent = asyncio.Event()

        async def buys():
            payment = session.pay(required(url=f"{URL}/1"))
            assert payment.header
            is_sent.set()
            await asyncio.sleep(0.1)
            return payment.settled(receipt())

        first = asyncio.create_task(buys())
        await is_sent.wait()
        began = time.monotonic()
        with pytest.raises(error, match="in_flight" if error is PolicyDenied else "no slot was free in time"):
            session.pay(required(url=f"{URL}/{place}"))
        assert time.monotonic() - began < 1
        return await first

    if error is PolicyDenied:
        policy = Policy(breaker=None, loop=None)
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        assert asyncio.run(both(session)).hold_id
        assert (session.spent, session.held) == (CENT, 0)


def test_a_payment_that_a_callback_has_read_is_not_lost_for_all_tasks_of_its_loop():
    """A callback of a loop has no task of its own; its thread is that of every task."""

    async def both(session):
        first, read = await session.apay(required()), asyncio.Event()

        def reads():
            assert first.header
            read.set()

        asyncio.get_running_loop().call_soon(reads)
        await read.wait()
        other = asyncio.create_task(session.apay(required()))
        done, _ = await asyncio.wait([other], timeout=0.5)
        assert not done
        await first.asettled(receipt())
        assert (await other).hold_id != first.hold_id

    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        asyncio.run(both(session))


@pytest.mark.parametrize("in_a_loop", [True, False])
def test_a_call_that_may_not_wait_looks_for_lost_places_once(in_a_loop):
    """Answers that were lost in errors which keep themselves are found by the garbage collector alone."""

    def loses(number):
        payment = session.pay(required(url=f"{URL}/{number}"))
        kept = ConnectionError("no answer")
        kept.payment, payment.kept = payment, kept
        assert payment.header

    async def buys():
        return session.pay(required(url=f"{URL}/after"))

    with make_guard(policy=PLACES) as guard, guard.session("s", budget="$1.00") as session:
        gc.disable()
        try:
            with ThreadPoolExecutor(1) as pool:  # another thread reads them: none is lost by its task
                for number in range(2):
                    pool.submit(loses, number).result()
                assert asyncio.run(buys()) if in_a_loop else session.pay(required(url=f"{URL}/after"))
        finally:
            gc.enable()

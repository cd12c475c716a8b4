"""Payments by hand whose answer is lost while something still refers to them: they keep no caller and no place waiting."""

import asyncio
import gc
import time

import anyio
import pytest

from tests.behaviour.adapters.test_direct import CENT, MODES, end, pay
from tests.support.merchant import URL, make_guard, receipt, required
from x402guard import Bulkhead, Policy


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

"""Payments by hand whose answer is lost while something still refers to them: they keep no caller and no place waiting."""

import asyncio
import gc
import time

import anyio

from tests.behaviour.adapters.test_direct import CENT, MODES, end, pay
from tests.support.merchant import URL, make_guard, receipt, required
from x402guard import Bulkhead, Policy


@MODES
def test_who_asks_again_in_the_same_task_does_not_wait_for_itself(mode):
    """As in ``for attempt in range(3)``: the name of the payment that was lost is still bound."""
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        began = time.monotonic()
        first = pay(mode, session, required())
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

        await asyncio.gather(loses())
        with anyio.fail_after(10):
            return await session.apay(required())

    kept = []
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        again = asyncio.run(both(session))
        assert again.hold_id == kept[0].hold_id


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

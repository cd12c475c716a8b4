"""Cancelled at every await there is, the books are still true: nothing out means nothing held, anything out is counted."""

import asyncio
import threading
from decimal import Decimal

import anyio
import anyio.from_thread
import anyio.lowlevel
import httpx
import pytest

from tests.support.cancellation import cancelled_after
from tests.support.faults import Faulty, Tripwire
from tests.support.merchant import (
    URL,
    Shop,
    async_client,
    b64,
    client,
    make_guard,
    receipt,
)
from x402guard.stores import open_store

STEPS = 40


class Slow(Shop):
    """The shop, with awaits before and after it looks at a request."""

    async def answer(self, request):
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        response = self(request)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        return response


def one_request(session, shop):
    async def request():
        async with async_client(session, shop) as http:
            await http.get(URL)

    return request


def check_books(guard, session, shop, finished, where):
    """True books: everything at the shop is counted, and what never left is not held without a doubt."""
    counted = session.spent + session.held
    assert counted * 1_000_000 >= shop.signed, f"{where}: the wire has more than the books"
    if not shop.payments:
        live = guard.shell.store.outstanding()
        assert all(hold.doubt is not None for hold in live), f"{where}: a hold leaks"
    if finished:
        assert session.held == 0
    return finished, bool(shop.payments), counted > 0


NOTHING, IN_DOUBT, DONE = (False, False, False), (False, True, True), (True, True, True)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancellation_at_every_await_leaves_true_books(backend):
    outcomes = set()
    for steps in range(STEPS):
        shop = Slow()
        with make_guard() as guard:
            session = guard.session("s", budget="$1.00")
            finished = anyio.run(cancelled_after, steps, one_request(session, shop), backend=backend)
            outcomes.add(check_books(guard, session, shop, finished, f"after {steps} steps"))
    assert {NOTHING, IN_DOUBT, DONE} <= outcomes  # all three kinds of end were really met


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_cancellation_around_every_transaction_leaves_true_books(backend, n, after, tmp_path):
    shop = Slow()
    store = Tripwire(open_store(f"sqlite:///{tmp_path / 'ledger.db'}"), n, after=after)

    async def main():
        store.token = anyio.lowlevel.current_token()
        with anyio.CancelScope() as store.scope:
            async with async_client(session, shop) as http:
                await http.get(URL)
                await anyio.lowlevel.checkpoint()
                return n > 2
        return False

    with make_guard(store) as guard:
        session = guard.session("s", budget="$1.00")
        finished = anyio.run(main, backend=backend)
        store.scope = None
        outcome = check_books(guard, session, shop, finished, f"transaction {n}")
        # 1 is the authorization: cancelled there, nothing is signed. 2 is the capture: the payment is made and booked.
        assert outcome[1:] == ((False, False) if n == 1 else (True, True))
    store.close()


def test_a_cancelled_payment_is_presented_again_not_signed_again(tmp_path):
    shop = Slow()
    shop.paid = None

    async def main():
        with make_guard() as guard, guard.session("s", budget="$1.00") as session:
            with anyio.CancelScope() as scope:
                shop.paid = lambda request, shop: scope.cancel() or httpx.Response(200)
                async with async_client(session, shop) as http:
                    await http.get(URL)
            assert scope.cancelled_caught
            assert len(shop.nonces) == 1
            [hold] = guard.shell.store.outstanding()
            assert hold.doubt == "cancelled while the payment was in flight"
            shop.paid = None
            async with async_client(session, shop) as http:
                response = await http.get(URL)
            assert response.extensions["x402guard"].represented
            assert len(shop.nonces) == 1

    anyio.run(main)


def test_ctrl_c_while_the_payment_is_out_notes_the_doubt_and_goes_on():
    from tests.support.merchant import client

    def interrupt(request, shop):
        raise KeyboardInterrupt

    shop = Shop(paid=interrupt)
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(KeyboardInterrupt):
            client(session, shop).get(URL)
        [hold] = guard.shell.store.outstanding()
        assert hold.doubt == "cancelled while the payment was in flight"


CENT = Decimal("0.01")


def test_native_cancellation_waits_for_the_ledger_and_leaves_nothing_behind(tmp_path):
    """`asyncio.wait_for` cancels by task.cancel(), which no shield of anyio's keeps out."""
    shop = Shop()
    inside, go_on, committed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Faulty):
        inline = False

        def transact(self, scope, change):
            if scope.purchase is None:
                return super().transact(scope, change)
            inside.set()
            assert go_on.wait(10)
            result = super().transact(scope, change)
            committed.set()
            return result

    store = Slow(open_store(f"sqlite:///{tmp_path / 'l.db'}"))

    async def main():
        async with async_client(session, shop) as http:
            task = asyncio.ensure_future(http.get(URL))
            await asyncio.to_thread(inside.wait, 10)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()  # and again, while it waits
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        asyncio.run(main())
        assert committed.wait(10)
        assert (session.held, session.spent, shop.payments) == (0, 0, [])
    store.close()


def test_native_cancellation_after_the_payment_is_a_doubt(tmp_path):
    shop = Shop()

    async def main():
        async with async_client(session, shop) as http:
            task = asyncio.current_task()
            answer = httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())})
            shop.paid = lambda request, shop: (task.cancel(), answer)[1]
            await http.get(URL)

    with make_guard(f"sqlite:///{tmp_path / 'l.db'}") as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
        assert session.spent + session.held == CENT
        shop.paid = None
        live = guard.shell.store.outstanding()
        assert all(hold.doubt for hold in live)
        if live:
            assert client(session, shop).get(URL).extensions["x402guard"].represented
            assert len(shop.nonces) == 1

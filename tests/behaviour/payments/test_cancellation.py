"""Cancelled at every await there is, the books are still true: nothing out means nothing held, anything out is counted."""

import anyio
import anyio.from_thread
import anyio.lowlevel
import httpx
import pytest

from tests.support.merchant import URL, Shop, async_client, make_guard
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


async def cancelled_after(steps, session, shop):
    """Run one paid request and cancel it after so many turns of the event loop. True where it had finished before."""
    finished = False

    async def request(scope):
        nonlocal finished
        with scope:
            async with async_client(session, shop) as http:
                await http.get(URL)
                finished = True

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request, scope)
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        scope.cancel()
    return finished


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
            finished = anyio.run(cancelled_after, steps, session, shop, backend=backend)
            outcomes.add(check_books(guard, session, shop, finished, f"after {steps} steps"))
    assert {NOTHING, IN_DOUBT, DONE} <= outcomes  # all three kinds of end were really met


class Tripwire:
    """A store that cancels a scope from its worker thread, before or after its n-th transaction is committed."""

    inline = False

    def __init__(self, store, n, *, after):
        self._store, self._n, self._after = store, n, after
        self.scope = self.token = None

    def __getattr__(self, name):
        return getattr(self._store, name)

    def transact(self, scope, change):
        if self.scope is None:
            return self._store.transact(scope, change)
        self._n -= 1
        if self._n == 0 and not self._after:
            anyio.from_thread.run_sync(self.scope.cancel, token=self.token)
        result = self._store.transact(scope, change)
        if self._n == 0 and self._after:
            anyio.from_thread.run_sync(self.scope.cancel, token=self.token)
        return result


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
            assert hold.doubt == "cancelled while the payment was out"
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
        assert hold.doubt == "cancelled while the payment was out"

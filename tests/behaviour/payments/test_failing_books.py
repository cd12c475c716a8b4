"""Books that fail before a payment sign nothing; books that fail after it take no answer away."""

import asyncio
from decimal import Decimal

import httpx
import pytest

from tests.support.faults import Faulty
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, receipt
from x402guard import (
    LedgerUnavailable,
)
from x402guard.stores import open_store

CENT = Decimal("0.01")


@pytest.mark.parametrize("committed", [False, True], ids=["not written", "answer lost"])
@pytest.mark.parametrize("status", [200, 500])
def test_books_that_fail_after_the_payment_do_not_take_the_answer_away(status, committed):
    store = Faulty(open_store("memory://"))
    headers = {"PAYMENT-RESPONSE": b64(receipt())} if status == 200 else {}
    shop = Shop(paid=lambda request, shop: httpx.Response(status, headers=headers, content=b"bought"))
    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        store.fail(2, LedgerUnavailable("disk full"), committed=committed)
        response = client(session, shop).get(URL)
        assert (response.status_code, response.content) == (status, b"bought")
        assert response.extensions["x402guard"].in_doubt
        assert session.spent + session.held == CENT


@pytest.mark.parametrize("committed", [False, True], ids=["not written", "answer lost"])
def test_books_that_fail_before_the_signature_leave_nothing_held(committed):
    store, shop = Faulty(open_store("memory://")), Shop()
    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        store.fail(1, LedgerUnavailable("disk full"), committed=committed)
        with pytest.raises(LedgerUnavailable) as caught:
            client(session, shop).get(URL)
        assert caught.value.money_may_have_moved is False
        assert (session.held, shop.payments) == (0, [])


def test_a_ledger_error_reaches_the_caller_and_nobody_else(tmp_path):
    store = Faulty(open_store(f"sqlite:///{tmp_path / 'l.db'}"))
    store.inline = False
    noise = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
        async with async_client(session, Shop()) as http:
            store.fail(1, LedgerUnavailable("disk full"))
            with pytest.raises(LedgerUnavailable):
                await http.get(URL)

    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        asyncio.run(main())
        import gc

        gc.collect()
        assert noise == []
    store.close()

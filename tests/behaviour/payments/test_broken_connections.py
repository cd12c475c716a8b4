"""Connections that break around a payment: it is uncertain, never signed twice, and no other refusal is hidden by it."""

from decimal import Decimal

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.faults import Breaking
from tests.support.merchant import URL, Shop, b64, client, make_guard, required, upto
from x402guard import (
    PaidNotDelivered,
    PolicyDenied,
    SettlementUncertain,
)
from x402guard.ledger.findings import Used

CENT = Decimal("0.01")


def test_a_connection_that_breaks_when_it_is_closed_is_no_reason_to_sign_twice():
    answers = iter([Breaking(), httpx.ByteStream(b"")])

    def terms(request):
        return httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(required())}, stream=next(answers))

    shop = Shop(terms)
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(SettlementUncertain) as caught:
            client(session, shop).get(URL)
        response = client(session, shop).get(URL)
        assert response.extensions["x402guard"].hold_id == caught.value.hold_id
        assert len(shop.nonces) == 1


@pytest.mark.parametrize("error", [RuntimeError("a transport's own"), httpx.ReadTimeout("slow"), OSError("reset")])
def test_whatever_a_transport_raises_the_payment_is_uncertain(error):
    shop = Shop(paid=error)
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(SettlementUncertain) as caught:
            client(session, shop).get(URL)
        assert caught.value.__cause__ is error
        assert session.held == CENT


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        yield session


def test_a_refusal_is_not_masked_by_a_connection_that_breaks(session):
    def terms(request):
        return httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(required(upto(2_000_000)))}, stream=Breaking())

    with pytest.raises(PolicyDenied, match="per_payment_cap"):
        client(session, Shop(terms)).get(URL)


def test_paid_not_delivered_is_not_masked_by_a_connection_that_breaks():
    shop = Shop(paid=httpx.ReadError("gone"))
    with make_guard(chains=MockChain(Used(final=True))) as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(SettlementUncertain):
            client(session, shop).get(URL)
        shop.paid = lambda request, shop: httpx.Response(402, stream=Breaking())
        with pytest.raises(PaidNotDelivered):
            client(session, shop).get(URL)
        assert session.spent == CENT

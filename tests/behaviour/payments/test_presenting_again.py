"""A payment that is out is presented again: never twice signed, and never voided by another request."""

from decimal import Decimal

import httpx
import pytest

from tests.support.faults import Faulty
from tests.support.ledger import Clock
from tests.support.merchant import (
    URL,
    Shop,
    b64,
    believed,
    client,
    make_guard,
    offer_response,
    receipt,
    required,
    upto,
)
from tests.support.refusals import Chunks
from tests.support.signers import Stalling
from x402guard import (
    Breaker,
    CircuitOpen,
    LedgerUnavailable,
    PaidNotDelivered,
    Policy,
    SettlementUncertain,
    SignerError,
)
from x402guard.stores import open_store

CENT = Decimal("0.01")


def test_a_request_that_stalled_does_not_void_what_another_has_presented_meanwhile():
    clock, shop = Clock(), Shop(paid=lambda request, shop: httpx.Response(500))

    def meanwhile():
        clock.tick(31)
        assert client(session, shop).get(URL).extensions["x402guard"].represented

    with make_guard(open_store("memory://", clock_ms=clock), signer=Stalling(meanwhile), flight_s=30) as guard:
        session = guard.session("s", budget="$0.01")
        with pytest.raises(SettlementUncertain, match="may be in use") as caught:
            client(session, shop).get(URL)
        assert isinstance(caught.value.__cause__, SignerError)
        assert (session.held, shop.signed) == (CENT, 10_000)


def test_a_connection_that_fails_late_does_not_void_what_another_has_presented_meanwhile():
    clock, shop = Clock(), Shop(paid=lambda request, shop: httpx.Response(500))

    class Late(httpx.HTTPTransport):
        """A stock transport as far as the guard can see; its first paid connection takes longer than a flight."""

        def handle_request(self, request):
            if "payment-signature" in request.headers and not shop.payments:
                clock.tick(31)
                client(session, shop).get(URL)
                raise httpx.ConnectTimeout("too slow")
            return shop(request)

    with make_guard(open_store("memory://", clock_ms=clock), flight_s=30) as guard:
        session = guard.session("s", budget="$0.01")
        with believed(session, Late()) as http, pytest.raises(SettlementUncertain):
            http.get(URL)
        assert (session.held, shop.signed) == (CENT, 10_000)


def test_a_presentation_that_is_lost_again_presents_the_same_cheque_again():
    store = Faulty(open_store("memory://"))
    shop = Shop(paid=httpx.ReadError("gone"))
    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(SettlementUncertain):
            client(session, shop).get(URL)
        store.fail(1, LedgerUnavailable("answer lost"), committed=True)
        with pytest.raises(LedgerUnavailable):
            client(session, shop).get(URL)
        shop.paid = None
        assert client(session, shop).get(URL).extensions["x402guard"].represented
        assert len(shop.nonces) == 1
        assert session.held == 0


def test_a_payment_in_doubt_that_finds_no_connection_again_is_no_failure_of_its_payees():
    shop = Shop(paid=httpx.ReadError("gone"))
    with make_guard(policy=Policy(breaker=Breaker())) as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(SettlementUncertain):
            client(session, shop).get(URL)
        shop.paid = httpx.ConnectError("no route")
        with believed(session, httpx.MockTransport(shop)) as http:
            for _ in range(3):
                with pytest.raises(SettlementUncertain):
                    http.get(URL)
        shop.paid = None
        assert client(session, shop).get(URL).extensions["x402guard"].represented
        assert len(shop.nonces) == 1


def test_a_payment_in_doubt_is_presented_by_its_own_session_alone():
    shop = Shop(paid=httpx.ReadError("gone"))
    with make_guard() as guard:
        one, other = guard.session("one", budget="$1"), guard.session("other", budget="$1")
        for session in (one, other):
            with pytest.raises(SettlementUncertain):
                client(session, shop).get(URL)
        assert len(shop.nonces) == 2
        assert (one.held, other.held) == (CENT, CENT)


def test_an_upto_that_was_answered_is_bought_again_and_not_presented_again():
    clock = Clock()
    paid = {"PAYMENT-RESPONSE": b64(receipt(amount="1"))}
    shop = Shop(required(upto(maxTimeoutSeconds=300)), paid=lambda request, shop: httpx.Response(200, headers=paid))
    with make_guard(open_store("memory://", clock_ms=clock)) as guard:
        session = guard.session("s", budget="$1")
        client(session, shop).get(URL)
        clock.tick(45)
        assert not client(session, shop).get(URL).extensions["x402guard"].represented
        assert len(shop.nonces) == 2


@pytest.mark.parametrize("hours", [1, 23, 25, 100])
def test_an_answer_that_is_lost_while_the_machine_sleeps_is_remembered_from_then_on(ledger_url, hours):
    clock, shop = Clock(), Shop()
    store = open_store(ledger_url, clock_ms=clock)

    def sleeps(_request, _shop):
        clock.tick(hours * 3600)
        raise httpx.ReadError("reset")

    shop.paid = sleeps
    with make_guard(store, max_clock_jump_s=10**6) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(SettlementUncertain):
            client(session, shop).get(URL)
        shop.paid = None
        clock.tick(3600)
        with pytest.raises(SettlementUncertain):
            client(session, shop).get(URL)
        assert (len(shop.nonces), session.spent + session.held) == (1, CENT)
        clock.tick(24 * 3600)
        assert client(session, shop).get(URL).status_code == 200, "a day later it is forgotten"
        assert len(shop.nonces) == 2
    store.close()


@pytest.mark.parametrize("status", [402, 500])
def test_a_seller_that_refuses_a_used_payment_has_not_failed(ledger_url, status):
    """It has delivered, and the answer was lost here: its other pages are bought. One that breaks down has failed."""
    seen = set()

    def once(request, shop):
        nonce = shop.payments[-1][0]
        if nonce in seen:
            return offer_response(required(url=str(request.url))) if status == 402 else httpx.Response(status)
        seen.add(nonce)
        if request.url.path == "/other":
            return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, text="the goods")
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, stream=Chunks(b"a", error=cut))

    def cut():
        raise KeyboardInterrupt

    shop, policy = Shop(paid=once), Policy(breaker=Breaker(failures=3))
    with make_guard(ledger_url, policy=policy) as guard, guard.session("s", budget="$1") as session:
        with client(session, shop) as http:
            with pytest.raises(KeyboardInterrupt):
                http.get("https://courts.example/page")
            for _ in range(3):
                with pytest.raises(PaidNotDelivered):
                    http.get("https://courts.example/page")
            if status == 402:
                assert http.get("https://courts.example/other").text == "the goods"
            else:
                with pytest.raises(CircuitOpen):
                    http.get("https://courts.example/other")
    assert len(shop.nonces) == (2 if status == 402 else 1)

"""One call of the caller's over several requests: redirects, credentials asked for, answers that get lost on the way."""

from decimal import Decimal

import httpx
import pytest

from tests.support.merchant import (
    URL,
    Shop,
    b64,
    client,
    make_guard,
    receipt,
    required,
)
from x402guard import (
    PolicyDenied,
    ProtocolError,
    SettlementUncertain,
)

CENT = Decimal("0.01")
PAID = {"PAYMENT-RESPONSE": b64(receipt())}


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        yield session


def test_credentials_asked_for_behind_a_payment_do_not_buy_it_twice(session):
    """The client's own answer to a 401 takes the payment along."""
    challenge = 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'

    def paid(request, shop):
        known = "authorization" in request.headers
        return httpx.Response(200 if known else 401, headers={**PAID, "www-authenticate": challenge})

    shop = Shop(paid=paid)
    assert client(session, shop).get(URL, auth=httpx.DigestAuth("me", "secret")).status_code == 200
    assert (len(shop.nonces), len(shop.payments)) == (1, 2)
    assert session.spent == CENT


def hop(after, place=""):
    """Pays on /opinion, is redirected to /after (at another *place*), and meets *after* there."""

    def terms(request):
        if request.url.path != "/after":
            return required()
        if isinstance(after, Exception):
            raise after
        return after

    return Shop(terms, paid=lambda request, shop: httpx.Response(302, headers={**PAID, "location": f"{place}/after"}))


def test_a_lost_answer_behind_a_paid_hop_is_no_plain_network_error(session):
    with pytest.raises(SettlementUncertain, match="later hop") as caught:
        client(session, hop(httpx.ReadTimeout("slow")), follow_redirects=True).get(URL)
    assert (caught.value.retry, caught.value.money_may_have_moved) == ("no", True)
    assert caught.value.hold_id == session.report().to_dict()["events"][0]["hold_id"]
    assert caught.value.deadline > 0


def test_a_malformed_offer_behind_a_paid_hop_says_that_money_moved(session):
    bad = httpx.Response(402, headers={"PAYMENT-REQUIRED": "!"})
    with pytest.raises(ProtocolError) as caught:
        client(session, hop(bad, "https://other.example"), follow_redirects=True).get(URL)
    assert caught.value.money_may_have_moved
    assert "was paid" in caught.value.advice


def test_a_refusal_on_a_later_hop_says_that_money_may_have_moved():
    def terms(request):
        return required(url=str(request.url))

    def paid(request, shop):
        headers = {"PAYMENT-RESPONSE": b64(receipt()), "location": "https://other.example/second"}
        return httpx.Response(302, headers=headers)

    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(PolicyDenied, match="one_payment_per_request") as caught:
            client(session, Shop(terms, paid=paid), follow_redirects=True).get(URL)
        assert caught.value.money_may_have_moved is True
        assert "was paid" in caught.value.advice


def test_the_last_answer_carries_the_receipt_of_an_earlier_hop():
    def terms(request):
        return httpx.Response(200) if request.url.path == "/second" else required()

    def paid(request, shop):
        return httpx.Response(303, headers={"PAYMENT-RESPONSE": b64(receipt()), "location": "/second"})

    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        response = client(session, Shop(terms, paid=paid), follow_redirects=True).get(URL)
        assert response.url.path == "/second"
        assert response.extensions["x402guard"].amount == CENT

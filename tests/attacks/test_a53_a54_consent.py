"""What a payment tells its seller, and what it allows: a key in a paid URL, and a subscription in an offer."""

import json
import time

import pytest

from tests.support.merchant import URL, Shop, accept, make_guard, required
from tests.support.refusals import authorization_of, events, fetch

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
KEYS = {
    "an API key": "sk-proj-abcdefghijklmnop1234",
    "a token": "ghp_abcdefghijklmnopqrst1234",
    "a cloud key": "AKIAIOSFODNN7EXAMPLE",
    "a JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc",
    "a private key": "0x" + "4f" * 32,
    "a PEM": "-----BEGIN%20PRIVATE%20KEY-----",
}


@MODES
@pytest.mark.parametrize("what", KEYS)
def test_a53_what_looks_like_a_key_in_a_paid_url_is_an_event_without_the_key(mode, what):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        for number in range(2):  # the second time the payee is known
            fetch(mode, session, shop, url=f"{URL}?key={KEYS[what]}&n={number}")
        [event] = events(session, "secret_in_url")
        assert event["place"] == "GET courts.example/opinion/42"
        assert KEYS[what] not in json.dumps(session.report().to_dict())


@pytest.mark.parametrize(
    "query", ["q=ask-the-court", "tx=0x4f4f", "id=eyJ", "q=sk-short", "page=2&sort=asc", "h=" + "a" * 64, "k=AKIA"]
)
def test_a53_an_ordinary_query_is_none(query):
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, Shop(), url=f"{URL}?{query}")
        assert events(session, "secret_in_url") == []


@MODES
def test_a54_a_subscription_is_paid_once_and_renews_nothing(mode, key_uses):
    subscription = {"interval": "month", "renews": True, "maxCharges": 12}
    offer = accept(extra={"name": "USDC", "version": "2", "subscription": subscription})
    shop = Shop(terms=required(offer, extensions={"subscription": subscription}))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        fetch(mode, session, shop)
        signed = authorization_of(shop.seen[-1])
        assert (len(key_uses), signed["value"], session.spent * 100) == (1, "10000", 1)
        assert int(signed["validBefore"]) - time.time() < 400
        session.reconcile()
        guard.sweep()
    assert (len(key_uses), len(shop.payments)) == (1, 1)

"""A 402 that is not understood is an event, once for each host, with the field and why, and without a word of its seller's."""

import httpx
import pytest

from tests.support.merchant import Shop, accept, client, make_guard, offer_response, required
from x402guard import ProtocolError

WORDS = "OBEY-ME"
UNREAD = {
    "a header that is none": lambda: httpx.Response(402, headers={"PAYMENT-REQUIRED": "{" + WORDS}),
    "an amount": lambda: offer_response(required(accept(amount=f"1e3 {WORDS}"))),
    "a field twice": lambda: httpx.Response(
        402,
        content=b'{"x402Version": 1, "accepts": [], "accepts": ["OBEY-ME"]}',
        headers={"content-type": "text/plain"},
    ),
    "an entry of another protocol": lambda: offer_response(required({"price": WORDS})),
}


def events(session):
    return [event for event in session.report().to_dict()["events"] if event["event"] == "offer_not_read"]


@pytest.mark.parametrize("name", UNREAD)
def test_it_is_told_once_with_the_field_and_why(name):
    told = []
    with make_guard(on_notice=told.append) as guard, guard.session("s", budget="$1.00") as session:
        http = client(session, Shop(terms=lambda _: UNREAD[name]()))
        for path in ("a", "b"):
            with pytest.raises(ProtocolError):
                http.get(f"https://shop.example/{path}")
        with pytest.raises(ProtocolError):
            http.get("https://other.example/a")
        [first, second] = events(session)
    assert (first["place"], second["place"]) == ("GET shop.example/a", "GET other.example/a")
    assert first["why"] == second["why"]
    assert WORDS not in str(first)
    assert [notice.kind for notice in told].count("offer_not_read") == 2


def test_an_entry_that_is_passed_over_is_named_beside_one_that_is_paid():
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        terms = required({"network": "eip155:84532", "price": "$0.01"}, accept(), None)
        assert client(session, Shop(terms)).get("https://shop.example/a").status_code == 200
        [event] = events(session)
    assert event["why"] == "accepts[0]: scheme and network have to be strings"

"""The answer to a payment redirects to what was paid for: the purchase is open until that has come."""

from contextlib import suppress
from itertools import product

import httpx
import pytest

from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt, required
from tests.support.refusals import Chunks, fetch
from x402guard import PolicyDenied, SettlementUncertain
from x402guard.ledger.model import Delivery

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
PAID = {"PAYMENT-RESPONSE": b64(receipt())}


class Place:
    """A shop that is paid at /opinion and answers with a redirect, whose result is at /after, or at a place behind it."""

    def __init__(self, status=303, body="short", hops=1):
        self.status, self.body, self.hops, self.result = status, body, hops, None
        self.shop = Shop(self._terms, paid=self._paid)
        self.seen = []

    def _paid(self, _request, _shop):
        return self._led(1, PAID)

    def _led(self, to, headers=()):
        content = {"stream": Chunks(b"see", b"other")} if self.body == "streamed" else {"content": b"see other"}
        return httpx.Response(self.status, headers={**dict(headers), "location": f"/after/{to}"}, **content)

    def _terms(self, request):
        if not request.url.path.startswith("/after"):
            return required()
        at = int(request.url.path.rpartition("/")[2])
        if at < self.hops:
            return self._led(at + 1)
        self.seen.append(request)
        if callable(self.result):
            return self.result()
        return httpx.Response(200, text="the goods")


def raising(error):
    def fails():
        raise error

    return fails


LOSES = {
    "404": lambda: httpx.Response(404),
    "500": lambda: httpx.Response(500),
    "asks for money": lambda: httpx.Response(402, json=required()),
    "no answer": raising(httpx.ReadError("lost")),
    "no connection": raising(httpx.ConnectError("refused")),
    "Ctrl-C": raising(KeyboardInterrupt()),
    "its body breaks": lambda: httpx.Response(200, stream=Chunks(b"the", error=lambda: httpx.ReadError("cut"))),
    "Ctrl-C in its body": lambda: httpx.Response(200, stream=Chunks(b"the", error=KeyboardInterrupt)),
    "it cannot be decoded": lambda: httpx.Response(
        200, headers={"content-encoding": "gzip"}, stream=Chunks(b"no gzip")
    ),
    "too many redirects": lambda: httpx.Response(302, headers={"location": "/after/99"}),
}
LOST = (httpx.HTTPError, PolicyDenied, SettlementUncertain, KeyboardInterrupt)


@MODES
@pytest.mark.parametrize(("body", "status", "hops"), [*product(["short", "streamed"], [303, 307], [1, 3])])
@pytest.mark.parametrize("loses", LOSES)
def test_a_result_behind_a_redirect_that_is_lost_is_not_bought_again(mode, body, status, hops, loses):
    place = Place(status, body, hops)
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        place.result = LOSES[loses]
        for _ in range(2):
            with suppress(*LOST):
                fetch(mode, session, place.shop, follow_redirects=True).raise_for_status()
        place.result = None
        answer = fetch(mode, session, place.shop, follow_redirects=True)
        assert (answer.text, answer.extensions["x402guard"].represented) == ("the goods", True)
        assert len(place.shop.nonces) == 1
        [hold_id] = guard.shell.store.unsettled(0)
        assert guard.shell.store.hold(hold_id).delivery is Delivery.DONE
        fetch(mode, session, place.shop, follow_redirects=True)  # the next purchase
        assert len(place.shop.nonces) == 2


@MODES
@pytest.mark.parametrize("body", ["short", "streamed"])
def test_a_result_behind_a_redirect_that_has_come_is_bought_anew(mode, body, ledger_url):
    place = Place(303, body)
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:
        for number in range(1, 4):
            assert fetch(mode, session, place.shop, follow_redirects=True).text == "the goods"
            assert len(place.shop.nonces) == number
        assert not guard.context.in_flight
        assert not guard.context.cut_off


@MODES
def test_who_follows_no_redirect_has_the_answer_that_was_paid_for(mode):
    place = Place()
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        for number in range(1, 4):
            assert fetch(mode, session, place.shop).status_code == 303
            assert len(place.shop.nonces) == number


def test_while_the_result_is_under_way_the_ledger_has_the_purchase_open(ledger_url):
    """If the process is killed now, the next one presents the payment again."""
    place, found = Place(), []
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:

        def looks():
            [hold] = [guard.shell.store.hold(each) for each in guard.shell.store.unsettled(0)]
            found.append(hold.delivery)
            return httpx.Response(200, text="the goods")

        place.result = looks
        fetch("sync", session, place.shop, follow_redirects=True)
        looks()
    assert found == [Delivery.OPEN, Delivery.DONE]


def test_a_redirect_that_is_followed_by_hand_is_the_same_call():
    place = Place()
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        place.result = LOSES["500"]
        with client(session, place.shop) as http:
            answer = http.get(URL)
            assert http.send(answer.next_request).status_code == 500
            place.result = None
            again = http.get(URL)
        assert (again.status_code, len(place.shop.nonces)) == (303, 1)


def test_a_result_that_its_caller_closes_early_was_handed_over():
    place = Place()
    place.result = lambda: httpx.Response(200, stream=Chunks(b"the", b" goods"))
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with client(session, place.shop, follow_redirects=True) as http:
            with http.stream("GET", URL) as answer:
                assert next(answer.iter_raw()) == b"the"
            assert http.get(URL).status_code == 200
        assert len(place.shop.nonces) == 2

"""The answer to a payment redirects to what was paid for: the purchase is open until that has come."""

import json
from contextlib import suppress
from itertools import product

import anyio
import httpx
import pytest

from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, receipt, required
from tests.support.refusals import Chunks, fetch
from x402guard import GuardedTransport, PolicyDenied, SettlementUncertain
from x402guard.kernel.rows import Delivery

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
PAID = {"PAYMENT-RESPONSE": b64(receipt())}


class Place:
    """A shop that is paid at /opinion and answers with a redirect, whose result is at /after, or at a place behind it."""

    def __init__(self, status=303, body="short", hops=1):
        self.status, self.body, self.hops, self.result, self.at = status, body, hops, None, ""
        self.led_to = ""
        self.shop = Shop(self._terms, paid=self._paid)
        self.seen = []

    def _paid(self, request, _shop):
        return self._terms(request) if request.url.path.startswith("/after") else self._led(1, PAID)

    def _led(self, to, headers=()):
        content = {"stream": Chunks(b"see", b"other")} if self.body == "streamed" else {"content": b"see other"}
        return httpx.Response(
            self.status, headers={**dict(headers), "location": self.led_to or f"{self.at}/after/{to}"}, **content
        )

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


class UnwillingError(Exception):
    pass


def refuses(request):
    if request.url.path.startswith("/after"):
        raise UnwillingError


async def refuses_async(request):
    refuses(request)


BETWEEN = {
    "a request hook": (lambda mode: {"event_hooks": {"request": [refuses if mode == "sync" else refuses_async]}}, UnwillingError),
    "no redirect is allowed": (lambda _: {"max_redirects": 0}, httpx.TooManyRedirects),
}  # fmt: skip


def get(mode, session, shop, *, follow_redirects=True, **options):
    options["follow_redirects"] = follow_redirects
    if mode == "sync":
        with client(session, shop, **options) as http:
            return http.get(URL)

    async def go():
        async with async_client(session, shop, **options) as http:
            return await http.get(URL)

    return anyio.run(go)


@MODES
@pytest.mark.parametrize("hops", [1, 3])
@pytest.mark.parametrize("between", BETWEEN)
def test_an_error_of_the_callers_own_between_two_hops_does_not_buy_again(mode, between, hops, ledger_url):
    (options, error), place = BETWEEN[between], Place(303, "streamed", hops)
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:
        for _ in range(3):
            with pytest.raises(error):
                get(mode, session, place.shop, **options(mode))
            [hold_id] = guard.shell.store.unsettled(0)
            assert guard.shell.store.hold(hold_id).delivery is not Delivery.DONE
        assert get(mode, session, place.shop).text == "the goods"
        assert len(place.shop.nonces) == 1
        assert guard.shell.store.hold(hold_id).delivery is Delivery.DONE
        get(mode, session, place.shop)
        assert len(place.shop.nonces) == 2


@MODES
@pytest.mark.parametrize("hops", [1, 3])
@pytest.mark.parametrize("body", ["short", "streamed"])
def test_another_purchase_between_two_hops_leaves_the_first_one_open(mode, body, hops, ledger_url):
    place, other = Place(303, body, hops), Shop()
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:

        def buys(request):
            if request.url.path.startswith("/after"):
                with client(session, other) as http:
                    http.get("https://other.example/weather")

        async def buys_async(request):
            await anyio.to_thread.run_sync(buys, request)

        hooks = {"event_hooks": {"request": [buys if mode == "sync" else buys_async]}}
        assert get(mode, session, place.shop, **hooks).text == "the goods"
        assert len(other.nonces) == hops
        ended = [guard.shell.store.hold(each).delivery for each in guard.shell.store.unsettled(0)]
        assert set(ended) == {Delivery.DONE}
        assert not guard.context.in_flight
        assert not guard.context.cut_off


@MODES
@pytest.mark.parametrize("body", ["short", "streamed"])
def test_a_metered_call_behind_a_redirect_is_what_was_paid_for(mode, body):
    """A gateway takes a payment for each call, and leads to the model, whose provider bills the owner."""
    whole, broken = json.dumps(completion()).encode(), []

    def answers(request):
        if request.url.host == "api.openai.com":
            fails = broken.pop() if broken else None
            return httpx.Response(200, stream=Chunks(whole[:9], *([] if fails else [whole[9:]]), error=fails))
        return required(url=str(request.url))

    place = Place(307, body)
    place.led_to, place.shop = CHAT, Shop(answers, paid=place._paid)
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        asks = {"url": "https://gateway.example/v1/chat", "method": "POST", "json": ask(), "follow_redirects": True}
        for number in (1, 2):
            assert fetch(mode, session, place.shop, **asks).status_code == 200
            assert len(place.shop.nonces) == number
        broken.append(lambda: httpx.ReadError("cut"))
        with pytest.raises(httpx.ReadError):
            fetch(mode, session, place.shop, **asks)
        assert fetch(mode, session, place.shop, **asks).status_code == 200
        assert len(place.shop.nonces) == 3
        kept = [guard.shell.store.hold(each).delivery for each in guard.shell.store.unsettled(0)]
        assert set(kept) == {Delivery.DONE}


@pytest.mark.parametrize("hops", [1, 3])
def test_equal_requests_while_a_hook_takes_its_time_are_two_purchases(hops):
    """A request hook limits the rate: between two hops of one task, another one asks for the same."""
    place, asked = Place(303, "streamed", hops), []

    async def waits(request):
        asked.append(request.url.path)
        if request.url.path.startswith("/after"):
            await anyio.sleep(0.1)

    async def go(session):
        async with async_client(session, place.shop, follow_redirects=True, event_hooks={"request": [waits]}) as http:
            found = []

            async def one(after_s):
                await anyio.sleep(after_s)
                found.append((await http.get(URL)).text)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one, 0)
                tasks.start_soon(one, 0.05)
            return found

    with make_guard() as guard, guard.session("s", budget="$1") as session:
        assert anyio.run(go, session) == ["the goods"] * 2
        assert len(place.shop.nonces) == 2
        kept = [guard.shell.store.hold(each).delivery for each in guard.shell.store.unsettled(0)]
        assert set(kept) == {Delivery.DONE}


@MODES
def test_a_response_hook_that_reads_bodies_follows_nothing(mode):
    """As httpx's own documentation has it for logs; by default a client follows no redirects."""
    place = Place(303, "streamed")

    def reads(response):
        response.read()

    async def reads_async(response):
        await response.aread()

    hooks = {"response": [reads if mode == "sync" else reads_async]}
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        for number in range(1, 4):
            assert get(mode, session, place.shop, event_hooks=hooks, follow_redirects=False).status_code == 303
            assert len(place.shop.nonces) == number
        for number in range(4, 6):
            assert get(mode, session, place.shop, event_hooks=hooks).text == "the goods"
            assert len(place.shop.nonces) == number


@MODES
def test_a_result_that_no_guard_sees_leaves_the_purchase_open(mode):
    """A mount without a guard gets the next hop: nothing says that the result has come, so nothing is bought again."""
    place = Place(303, "streamed")
    place.at = "https://cdn.example"
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        bare = httpx.MockTransport(lambda _: httpx.Response(200, text="the goods"))
        for number in range(3):
            answer = get(mode, session, place.shop, mounts={"https://cdn.example": bare})
            assert (answer.text, len(place.shop.nonces)) == ("the goods", 1)
            assert answer.history[0].extensions["x402guard"].represented is (number > 0)


@MODES
@pytest.mark.parametrize("stream", [True, False])
def test_a_redirect_that_is_not_followed_is_the_answer_also_where_its_body_is_not_read(mode, stream):
    place = Place(303, "streamed")
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        for number in range(1, 4):
            if stream and mode == "sync":
                with client(session, place.shop) as http, http.stream("GET", URL) as answer:
                    assert answer.next_request is not None
            else:
                assert fetch(mode, session, place.shop).status_code == 303
            assert len(place.shop.nonces) == number


def test_who_reads_a_redirect_without_a_client_has_the_answer():
    place = Place(303, "streamed")
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        transport = GuardedTransport(session, httpx.MockTransport(place.shop))
        for number in range(1, 4):
            answer = transport.handle_request(httpx.Request("GET", URL))
            assert (answer.read(), len(place.shop.nonces)) == (b"seeother", number)


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

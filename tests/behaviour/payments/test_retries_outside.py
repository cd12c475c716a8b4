"""Retries outside the guard: a transport that sends the same request object again, and a queue that cuts jobs short."""

from contextlib import suppress

import anyio
import httpx
import pytest

from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt, required
from tests.support.refusals import Chunks
from x402guard import AsyncGuardedTransport, GuardedTransport
from x402guard.kernel.rows import Delivery

PAID = {"PAYMENT-RESPONSE": b64(receipt())}


class Retries(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Sends a request again, as retry libraries do, until its status is no 503."""

    def __init__(self, inner, times=5):
        self.inner, self.times = inner, times

    def handle_request(self, request):
        for _ in range(self.times):
            answer = self.inner.handle_request(request)
            if answer.status_code != 503:
                break
            answer.close()
        return answer

    async def handle_async_request(self, request):
        for _ in range(self.times):
            answer = await self.inner.handle_async_request(request)
            if answer.status_code != 503:
                break
            await answer.aclose()
        return answer


def get(mode, session, shop, url=URL, *, retries=Retries, **more):
    """Send one request of a client that retries and follows redirects."""
    if mode == "sync":
        outer = retries(GuardedTransport(session, httpx.MockTransport(shop)))
        with httpx.Client(transport=outer, follow_redirects=True) as http:
            return http.get(url, **more)

    async def go():
        inner = AsyncGuardedTransport(session, httpx.MockTransport(shop.answer))
        async with httpx.AsyncClient(transport=retries(inner), follow_redirects=True) as http:
            return await http.get(url, **more)

    return anyio.run(go)


@pytest.fixture(params=["sync", "async"])
def mode(request):
    return request.param


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        yield session


def led(to, *, status=303, headers=()):
    return httpx.Response(status, headers={**dict(headers), "location": to}, stream=httpx.ByteStream(b"see other"))


def test_pay_again_is_one_more_payment_and_not_one_for_each_retry(mode, session):
    shop = Shop(paid=lambda *_: httpx.Response(503))
    assert get(mode, session, shop, extensions={"pay_again": True}).status_code == 503
    assert (len(shop.nonces), len(shop.payments)) == (1, 5)
    assert get(mode, session, shop, extensions={"pay_again": True}).status_code == 503
    assert len(shop.nonces) == 2


def test_pay_again_has_had_its_effect_also_after_a_try_that_was_not_paid(mode, session):
    """An overloaded seller: it answers 503 before it has looked at the payment, or asked for one."""
    asked = []

    def terms(request):
        asked.append(request)
        return httpx.Response(503) if len(asked) == 2 else required()

    shop = Shop(terms, paid=lambda *_: httpx.Response(503))
    get(mode, session, shop, extensions={"pay_again": True})
    assert len(shop.nonces) == 1


def test_a_hop_whose_body_broke_and_that_is_sent_again_brings_what_was_paid_for(mode, session):
    class ReadsBodies(Retries):
        def handle_request(self, request):
            for _ in range(self.times):
                answer = self.inner.handle_request(request)
                with suppress(httpx.ReadError):
                    answer.read()
                    break
            return answer

        async def handle_async_request(self, request):
            for _ in range(self.times):
                answer = await self.inner.handle_async_request(request)
                with suppress(httpx.ReadError):
                    await answer.aread()
                    break
            return answer

    breaks = []

    def terms(request):
        if request.url.path != "/after":
            return required()
        breaks.append(request)
        error = (lambda: httpx.ReadError("cut")) if len(breaks) % 2 else None
        return httpx.Response(200, stream=Chunks(b"the goods", error=error))

    shop, store = Shop(terms, paid=lambda *_: led("/after", headers=PAID)), session.shell.store
    for number in range(1, 4):
        assert get(mode, session, shop, retries=ReadsBodies).text == "the goods"
        assert len(shop.nonces) == number
    assert {store.hold(each).delivery for each in store.unsettled(0)} == {Delivery.DONE}


def test_a_hop_that_is_sent_again_on_purpose_is_a_request_as_any_other(session):
    """A caller keeps the request of the last hop, and by and by the page behind it costs money."""
    free = [True]

    def terms(request):
        return httpx.Response(200, text="the page") if free and request.url.path == "/after" else required()

    shop = Shop(terms, paid=lambda request, _: led("/after", headers=PAID) if request.url.path != "/after" else None)
    shop.paid = lambda request, _: (
        led("/after", headers=PAID) if request.url.path != "/after" else httpx.Response(200, headers=PAID)
    )
    with client(session, shop) as http:
        last = http.get(URL).next_request
        assert http.send(last).text == "the page"
        free.clear()
        assert http.send(last).status_code == 200
    assert len(shop.nonces) == 2


def test_a_hop_behind_a_payment_that_is_sent_again_pays_no_second_time(mode, session):
    """The hop fails once, and asks for a payment then: one request signs at most once, and that one goes along."""
    answers = [httpx.Response(503)]

    def terms(request):
        return answers.pop() if request.url.path == "/after" and answers else required()

    def paid(request, _shop):
        return httpx.Response(200, headers=PAID) if request.url.path == "/after" else led("/after", headers=PAID)

    shop = Shop(terms, paid=paid)
    assert get(mode, session, shop).status_code == 200
    assert (len(shop.nonces), len(shop.payments)) == (1, 2)


def test_a_hop_behind_a_payment_that_fails_once_brings_what_was_paid_for(mode, session):
    fails = []

    def terms(request):
        if request.url.path != "/after":
            return required()
        fails.append(request)
        return httpx.Response(503) if len(fails) % 2 else httpx.Response(200, text="the goods")

    shop, store = Shop(terms, paid=lambda *_: led("/after", headers=PAID)), session.shell.store
    for number in range(1, 4):
        assert get(mode, session, shop).text == "the goods"
        assert len(shop.nonces) == number
    assert {store.hold(each).delivery for each in store.unsettled(0)} == {Delivery.DONE}


def test_a_payment_at_a_later_hop_is_presented_again_by_a_retry(mode, session):
    fails = [503, 503]
    shop = Shop(
        lambda request: led("/paid") if request.url.path != "/paid" else required(url=str(request.url)),
        paid=lambda *_: httpx.Response(fails.pop()) if fails else httpx.Response(200, headers=PAID),
    )
    assert get(mode, session, shop).status_code == 200
    assert (len(shop.nonces), len(shop.payments)) == (1, 3)


class SoftTimeLimit(Exception):  # noqa: N818 - as Celery names it
    """Raised by a signal handler, wherever the code is just then: most often in a commit."""


@pytest.mark.parametrize("purchase", [None, "order 7"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_job_that_is_cut_in_the_commit_of_its_hold_holds_nothing(ledger_url, where, purchase, monkeypatch):
    shop, extensions = Shop(), {} if purchase is None else {"purchase": purchase}
    with make_guard(ledger_url) as guard, guard.session("s", budget="$0.05") as session:
        store = guard.shell.store
        commits, cuts = store.transact, []

        def cut_short(scope, change):
            if scope.purchase is None or len(cuts) >= 8:
                return commits(scope, change)
            cuts.append(scope)
            if where == "after":
                commits(scope, change)
            raise SoftTimeLimit

        monkeypatch.setattr(store, "transact", cut_short)
        for _ in range(8):
            with pytest.raises(SoftTimeLimit), client(session, shop) as http:
                http.get(URL, extensions=extensions)
        assert (session.held, len(shop.nonces)) == (0, 0)
        assert not guard.context.in_flight
        with suppress(SoftTimeLimit), client(session, shop) as http:
            assert http.get(URL, extensions=extensions).status_code == 200
        assert len(shop.nonces) == 1

"""One signature for one purchase, over the hops of a redirect, the polls of a job, lost answers and what the next 402 says."""

import itertools
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import pytest

from tests.support.merchant import URL, Shop, accept, b64, client, make_guard, offer_response, receipt, required, upto
from tests.support.refusals import fetch
from x402guard import (
    AlreadyPaid,
    GuardedTransport,
    Owner,
    PaymentRefused,
    PolicyDenied,
    SettlementUncertain,
    X402GuardError,
)
from x402guard.kernel.rows import Delivery
from x402guard.ledger.purchases import take_over
from x402guard.ledger.view import Scope

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
ORIGIN = "https://courts.example"
PAID = {"PAYMENT-RESPONSE": b64(receipt())}
LOST = (X402GuardError, httpx.HTTPError)


@dataclass
class Moved:
    """A seller whose route has moved: the paid request is led to a place that asks for the payment as well."""

    status: int = 307
    to: str = "/moved"
    with_receipt: bool = False
    terms: object = field(default_factory=required)
    shop: Shop = None

    def __post_init__(self):
        self.shop = Shop(self.terms, paid=self.paid)

    def paid(self, request, _shop):
        if request.url.path == "/moved":
            return httpx.Response(200, headers=PAID, text="the goods")
        return httpx.Response(self.status, headers={"location": self.to, **(PAID if self.with_receipt else {})})


def bought(session, guard):
    """The nonces of what is held, and how each purchase stands."""
    store = guard.shell.store
    return [(hold.id, hold.delivery) for hold in (store.hold(each) for each in store.unsettled(0))]


@MODES
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("to", ["/moved", f"{ORIGIN}/moved", f"{ORIGIN}:443/moved?x=1"])
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("with_receipt", [False, True])
def test_a_redirect_within_the_origin_carries_the_payment_along(mode, status, to, method, with_receipt):
    place = Moved(status, to, with_receipt)
    options = {"method": method, "follow_redirects": True, **({"json": {"q": 1}} if method == "POST" else {})}
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        for number in (1, 2):
            answer = fetch(mode, session, place.shop, url=URL, **options)
            assert (answer.status_code, answer.text) == (200, "the goods")
            assert len(place.shop.nonces) == number
        assert [state for _, state in bought(session, guard)] == [Delivery.DONE] * 2
        assert str(session.held + session.spent) == "0.02"
        assert not guard.context.in_flight
        assert not guard.context.between_hops


@pytest.mark.parametrize("to", ["https://other.example/moved", "http://courts.example/moved", f"{ORIGIN}:8443/moved"])
def test_a_redirect_to_another_origin_carries_nothing(to):
    place = Moved(to=to)
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PaymentRefused):
            fetch("sync", session, place.shop, follow_redirects=True)
        assert len(place.shop.payments) == 1  # at the first place alone
        assert not [r for r in place.shop.seen if str(r.url) == to and "payment-signature" in r.headers]


def test_a_payment_that_is_nearly_over_goes_along_no_more(ledger_url):
    place = Moved(terms=required(accept(maxTimeoutSeconds=10)))
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PolicyDenied, match="one_payment_per_request"):
            fetch("sync", session, place.shop, follow_redirects=True)
        assert len(place.shop.nonces) == 1


def test_a_tripped_session_presents_nothing_at_the_next_hop():
    place = Moved()

    def trips(request):
        if request.url.path == "/moved":
            session.trip("enough")

    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with (
            pytest.raises(PaymentRefused),
            client(session, place.shop, follow_redirects=True, event_hooks={"request": [trips]}) as http,
        ):
            http.get(URL)
        assert len(place.shop.payments) == 1


class Again(httpx.BaseTransport):
    """A transport outside the guard that sends a request once more after a 500."""

    def __init__(self, inner):
        self.inner = inner

    def handle_request(self, request):
        answer = self.inner.handle_request(request)
        if answer.status_code != 500:
            return answer
        answer.close()
        return self.inner.handle_request(request)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_hop_that_a_transport_sends_again_has_the_same_payment(fails):
    place, left = Moved(), [fails]
    whole = place.shop.paid

    def paid(request, shop):
        if request.url.path == "/moved" and left[0]:
            left[0] -= 1
            return httpx.Response(500)
        return whole(request, shop)

    place.shop.paid = paid
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        outside = Again(GuardedTransport(session, httpx.MockTransport(place.shop)))
        with httpx.Client(transport=outside, follow_redirects=True) as http:
            assert http.get(URL).status_code == (200 if fails == 1 else 500)
        assert len(place.shop.nonces) == 1


def test_a_payment_that_another_process_has_by_now_goes_along_no_more():
    place = Moved()

    def between(request):
        if request.url.path == "/moved":
            store = guard.shell.store
            [held] = [store.hold(each) for each in store.unsettled(0)]
            scope = Scope(nodes=(held.node_id,), holds=(held.id,), durable=True)
            store.transact(scope, lambda view: take_over(view, view.hold(held.id), instance="another"))

    hooks = {"request": [between]}
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with (
            pytest.raises(PolicyDenied, match="one_payment_per_request"),
            client(session, place.shop, follow_redirects=True, event_hooks=hooks) as http,
        ):
            http.get(URL)
        assert len(place.shop.payments) == 1


def test_a_payment_whose_purchase_its_owner_has_forgiven_goes_along_no_more(tmp_path):
    place, url = Moved(), f"sqlite:///{tmp_path / 'books.db'}"
    whole = place.shop.paid
    place.shop.paid = lambda r, shop: httpx.Response(500) if r.url.path == "/moved" else whole(r, shop)

    class Forgiven(Again):
        def handle_request(self, request):
            if request.url.path == "/moved" and len(place.shop.payments) == 1:
                [(held, _)] = bought(session, guard)
                self.inner.handle_request(request).close()  # the payment has gone along, and has brought an error
                with Owner(url) as owner:
                    assert owner.forgive(held).delivery is Delivery.FORGIVEN
            return super().handle_request(request)

    with make_guard(url) as guard, guard.session("s", budget="$1") as session:
        outside = Forgiven(GuardedTransport(session, httpx.MockTransport(place.shop)))
        with (
            httpx.Client(transport=outside, follow_redirects=True) as http,
            pytest.raises(PolicyDenied, match="one_payment_per_request"),
        ):
            http.get(URL)
        assert len(place.shop.payments) == 2


def test_a_loss_that_is_not_written_yet_is_written_before_terms_are_judged():
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        fetch("sync", session, shop)
        [held] = guard.shell.store.unsettled(0)
        guard.context.cut_off.add((held, 0))
        shop.terms = NEXT["an empty page"]
        answer = fetch("sync", session, shop)
        assert not guard.context.cut_off
        assert (answer.status_code, len(shop.nonces)) == (200, 1)


def test_two_places_that_lead_to_each_other_end_with_the_clients_own_limit():
    turns = itertools.count()
    shop = Shop(paid=lambda *_: httpx.Response(307, headers={"location": f"/round/{next(turns)}"}))
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(httpx.TooManyRedirects):
            fetch("sync", session, shop, follow_redirects=True)
        assert len(shop.nonces) == 1


class Job:
    """A seller whose paid request begins a job, and whose place to ask takes the same payment until it is done."""

    def __init__(self, polls=3, *, pending=402, waits_with=202, ties=False):
        self.left, self.pending, self.waits_with, self.ties = polls, pending, waits_with, ties
        self.shop = Shop(lambda r: required(url=str(r.url)), paid=self._paid)
        self.begun, self.settled = [], set()

    def _paid(self, request, shop):
        nonce = shop.payments[-1][0]
        if request.url.path == "/render":
            self.begun.append(nonce)
            return httpx.Response(self.waits_with, json={"poll_url": "/job/7"})
        if self.ties and nonce not in self.begun:
            return httpx.Response(403)
        self.left -= 1
        if self.left > 0:
            again = offer_response(required(url=str(request.url)))
            return again if self.pending == 402 else httpx.Response(self.pending, json={"status": "pending"})
        self.settled.add(nonce)
        return httpx.Response(200, headers=PAID, json={"status": "done"})


def polled(session, job, extensions, *, most=8):
    """What the polls bring, until the job is done."""
    found = []
    with client(session, job.shop) as http:
        begun = http.post(f"{ORIGIN}/render", json={"film": 1}, extensions={"purchase": "film 1"})
        assert begun.status_code == job.waits_with
        for _ in range(most):
            answer = http.get(f"{ORIGIN}/job/7", extensions=extensions)
            found.append(answer.status_code)
            if answer.status_code == 200 and answer.json()["status"] == "done":
                break
    return found


@pytest.mark.parametrize("ties", [False, True])
def test_a_job_whose_polls_have_its_name_is_one_signature_and_delivered(ties, ledger_url):
    job = Job(ties=ties)
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:
        assert polled(session, job, {"purchase": "film 1"}) == [402, 402, 200]
        assert len(job.shop.nonces) == 1
        assert [state for _, state in bought(session, guard)] == [Delivery.DONE]
        with pytest.raises(AlreadyPaid):
            client(session, job.shop).get(f"{ORIGIN}/job/7", extensions={"purchase": "film 1"})
        assert session.report().to_dict()["payments"]["calls"] == 1


@pytest.mark.parametrize("pending", [402, 202, 200])
@pytest.mark.parametrize("waits_with", [202, 200])
def test_session_poll_shows_the_payment_on_each_poll(pending, waits_with):
    job = Job(4, pending=pending, waits_with=waits_with)
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        assert polled(session, job, session.poll("film 1")) == [pending] * 3 + [200]
        assert len(job.shop.nonces) == 1
        assert client(session, job.shop).get(f"{ORIGIN}/job/7", extensions=session.poll("film 1")).status_code == 200
        assert len(job.shop.nonces) == 1


def test_a_poll_signs_nothing():
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PolicyDenied, match=r"nothing_to_poll.*a poll pays nothing"):
            client(session, shop).get(URL, extensions=session.poll("film 1"))
        fetch("sync", session, shop, url="https://other.example/x", extensions={"purchase": "film 1"})
        with pytest.raises(PolicyDenied, match="nothing_to_poll"):  # a name is valid for one origin
            client(session, shop).get(URL, extensions=session.poll("film 1"))
        assert len(shop.payments) == 1


def test_many_polls_are_no_loop_and_no_failure_of_the_seller():
    job = Job(40)
    with make_guard(policy=None) as guard, guard.session("s", budget="$1") as session:
        assert polled(session, job, session.poll("film 1"), most=60)[-1] == 200
        assert len(job.shop.nonces) == 1
        assert session.report().to_dict()["state"] == "open"


def test_a_job_that_has_only_begun_is_not_delivered():
    job = Job()
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        for _ in range(3):
            assert fetch("sync", session, job.shop, url=f"{ORIGIN}/render", method="POST").status_code == 202
        assert len(job.shop.nonces) == 1
        job.waits_with = 200
        fetch("sync", session, job.shop, url=f"{ORIGIN}/render", method="POST")
        assert len(job.shop.nonces) == 1
        fetch("sync", session, job.shop, url=f"{ORIGIN}/render", method="POST")
        assert len(job.shop.nonces) == 2


def test_a_202_with_a_receipt_is_delivered():
    shop = Shop(paid=lambda *_: httpx.Response(202, headers=PAID))
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        for number in (1, 2):
            assert fetch("sync", session, shop).status_code == 202
            assert len(shop.nonces) == number


NEXT = {
    "the same": required(),
    "another price": required(accept(10_037)),
    "a lower price": required(accept(9_000)),
    "another payee": required(accept(payTo="0x857b06519E91e3A54538791bDbb0E22373e36b66")),
    "another offer": required(upto()),
    "nothing for sale": required(accept(network="eip155:1")),
    "terms of another protocol": {"x402Version": 2, "accepts": [], "extensions": {}},
    "what cannot be read": httpx.Response(402, headers={"PAYMENT-REQUIRED": "%%%"}),
    "an empty page": httpx.Response(402, text="<html>Payment required</html>"),
}
LOSSES = {
    "no answer": httpx.ReadError("lost"),
    "500": lambda *_: httpx.Response(500),
    "202": lambda *_: httpx.Response(202),
}


@MODES
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("after", NEXT)
@pytest.mark.parametrize("redirect", [0, 303, 307])
@pytest.mark.parametrize("poll", ["", "named", "poll"])
def test_one_signature_whatever_is_lost_and_whatever_comes_next(mode, loss, after, redirect, poll):
    """Loss × next 402 × redirect × poll: one nonce, and at the end its goods."""
    moved = Moved(redirect or 307)
    shop = moved.shop if redirect else Shop()
    whole, terms = shop.paid, iter([required()] * (2 if redirect else 1))
    shop.terms = lambda _r: next(terms, NEXT[after])
    fails = LOSSES[loss]

    def loses(request, of):
        if redirect and request.url.path != "/moved":
            return whole(request, of)
        shop.paid = whole  # from now on it delivers
        if isinstance(fails, Exception):
            raise fails
        return fails()

    shop.paid = loses
    more = {"extensions": {"purchase": "film 1"}} if poll else {}
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        options = {"follow_redirects": True, **more}
        with suppress(*LOST):
            fetch(mode, session, shop, **options)
        assert len(shop.nonces) == 1
        if poll == "poll":
            options["extensions"] = session.poll("film 1")
        answer = fetch(mode, session, shop, **options)
        assert answer.status_code == 200, answer
        assert len(shop.nonces) == 1
        assert [state for _, state in bought(session, guard)] == [Delivery.DONE]
        assert str(session.held + session.spent) == "0.01"


def test_where_nothing_is_out_a_402_that_cannot_be_read_is_handed_over_as_before():
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        assert fetch("sync", session, Shop(NEXT["an empty page"])).status_code == 402
        with pytest.raises(X402GuardError, match="PAYMENT-REQUIRED"):
            fetch("sync", session, Shop(NEXT["what cannot be read"]))


def test_after_the_deadline_what_cannot_be_read_signs_nothing_new():
    shop = Shop(required(accept(maxTimeoutSeconds=10)), paid=httpx.ReadError("lost"))
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(SettlementUncertain):
            fetch("sync", session, shop)
        shop.terms = NEXT["what cannot be read"]
        with pytest.raises(SettlementUncertain, match="in doubt"):
            fetch("sync", session, shop)
        assert len(shop.nonces) == 1


@pytest.mark.parametrize("pending", [402, 500, 202])
def test_a_job_that_begins_with_a_receipt_is_polled_to_its_end(pending):
    """What was taken and is not ready yet is no payment without a delivery: the caller asks on."""
    left = [4]

    def paid(request, _shop):
        if request.url.path == "/render":
            return httpx.Response(202, headers=PAID, json={"poll_url": "/job/7"})
        left[0] -= 1
        ready = httpx.Response(200, headers=PAID, text="the goods")
        waits = offer_response(required(url=str(request.url))) if pending == 402 else httpx.Response(pending)
        return waits if left[0] else ready

    shop = Shop(lambda r: required(url=str(r.url)), paid=paid)
    with make_guard() as guard, guard.session("s", budget="$1") as session, client(session, shop) as http:
        assert http.post(f"{ORIGIN}/render", extensions={"purchase": "film 1"}).status_code == 202
        found = [http.get(f"{ORIGIN}/job/7", extensions=session.poll("film 1")).status_code for _ in range(4)]
        assert found == [pending] * 3 + [200]
        assert len(shop.nonces) == 1
        assert str(session.spent + session.held) == "0.01"


@pytest.mark.parametrize("taken", [True, False])
def test_a_poll_after_the_payment_is_over_pays_nothing_and_advises_no_second_payment(taken):
    waits = httpx.Response(202, headers=PAID if taken else {})
    shop = Shop(required(accept(maxTimeoutSeconds=10)), paid=lambda *_: waits)
    with make_guard() as guard, guard.session("s", budget="$1") as session, client(session, shop) as http:
        http.post(f"{ORIGIN}/render", extensions={"purchase": "film 1"})
        with pytest.raises(PolicyDenied, match="nothing_to_poll") as caught:
            http.get(f"{ORIGIN}/job/7", extensions=session.poll("film 1"))
        assert "pay_again" not in f"{caught.value} {caught.value.advice}"
        assert len(shop.nonces) == 1

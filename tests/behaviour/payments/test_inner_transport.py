"""Forks, later hops, nested counters, one wallet, bodies sent twice: what a user would be surprised by."""

import os
import time
from contextlib import contextmanager
from decimal import Decimal

import httpx
import pytest

from tests.support.merchant import (
    URL,
    Shop,
    accept,
    b64,
    client,
    make_guard,
    receipt,
    required,
    upto,
)
from x402guard import (
    ConfigError,
    GuardedTransport,
    LedgerUnavailable,
    LocalSigner,
    PolicyDenied,
)
from x402guard.stores import open_store

CENT = Decimal("0.01")


@contextmanager
def writing(store):
    if hasattr(store, "_line"):
        assert store._line.join(5)
        yield
        store._line.leave()
    else:
        with store._lock:
            yield


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_forked_child_has_no_budget_of_its_own(kind, tmp_path):
    url = "memory://" if kind == "memory" else f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard:
        session = guard.session("s", budget="$1")
        with writing(guard.shell.store):  # another thread writes while we fork
            child = os.fork()
            if child == 0:
                try:
                    session.report()
                except LedgerUnavailable:
                    os._exit(7)
                os._exit(1)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 7


def test_a_refusal_on_a_later_hop_says_that_money_may_have_moved():
    def terms(request):
        return required(url=str(request.url))

    def paid(request, shop):
        headers = {"PAYMENT-RESPONSE": b64(receipt()), "location": "/second"}
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


def test_refusals_in_nested_budgets_are_counted_once():
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        child = session.child("c", budget="$0.005")
        for number in range(3):
            with pytest.raises(Exception, match="budget"):
                client(child, Shop()).get(f"{URL}/{number}")
        [row] = session.report().to_dict()["refusals"]
        assert row["count"] == 3


def test_one_ledger_is_of_one_wallet():
    store = open_store("memory://")
    make_guard(store)
    with pytest.raises(ConfigError, match="is of the wallet"):
        make_guard(store, signer=LocalSigner.from_key("0x" + "22" * 32))
    make_guard(store, signer=None)


def test_an_inner_transport_is_entered_and_left():
    seen = []

    class Inner(httpx.MockTransport):
        def __enter__(self):
            seen.append("entered")
            return self

        def __exit__(self, *args):
            seen.append("left")

    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        with httpx.Client(transport=GuardedTransport(session, Inner(Shop()))):
            pass
    assert seen == ["entered", "left"]


def test_a_large_multipart_body_is_sent_whole_again_after_a_redirect():
    sizes = []

    def answer(request):
        sizes.append(len(request.read()))
        return (
            httpx.Response(307, headers={"location": "/there"}) if request.url.path == "/here" else httpx.Response(200)
        )

    with make_guard(max_body_bytes=1000) as guard:
        session = guard.session("s", budget="$1")
        http = client(session, answer, follow_redirects=True)
        assert http.post("https://a.example/here", files={"f": b"x" * 200_000}).status_code == 200
    assert sizes[0] == sizes[1] > 200_000


def test_the_best_offer_that_the_ledgers_memory_allows_is_taken():
    shop = Shop()
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        for digit in "123":
            shop.terms = required(upto(10_000, "0x" + digit * 40))
            client(session, shop).get(f"{URL}/{digit}")
        shop.terms = required(upto(10_000, "0x" + "4" * 40), accept(20_000))
        client(session, shop).get(f"{URL}/4")
        assert shop.payments[-1][1] == 20_000

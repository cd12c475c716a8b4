"""A purchase with a name, by extension or ``Idempotency-Key``: one name, one payment."""

import threading
import time
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, receipt
from tests.support.refusals import events, fetch
from x402guard import AlreadyPaid, PolicyDenied, SettlementUncertain
from x402guard.flow.surroundings import here
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.x402.settlement import uncertain_of

CENT = Decimal("0.01")
MODES = pytest.mark.parametrize("mode", ["sync", "async"])
WAYS = pytest.mark.parametrize(
    "named",
    [{"extensions": {"purchase": "report 7"}}, {"headers": {"Idempotency-Key": "report 7"}}],
    ids=["name", "key"],
)


@WAYS
@MODES
def test_a_name_that_was_paid_and_handed_over_is_refused_with_its_receipt(mode, named, ledger_url):
    shop = Shop()
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:
        first = fetch(mode, session, shop, **named).extensions["x402guard"]
        for url in (URL, f"{URL}/revised"):  # of one origin the name is the purchase, whatever the URL
            with pytest.raises(AlreadyPaid, match="of this name") as caught:
                fetch(mode, session, shop, url=url, **named)
            error = caught.value
            assert (error.receipt.hold_id, error.receipt.amount) == (first.hold_id, CENT)
            assert (error.rule, error.retry, error.money_may_have_moved) == ("already_paid", "no", False)
        assert (len(shop.payments), session.spent) == (1, CENT)
        assert fetch(mode, session, shop, extensions={"purchase": "report 8"}).status_code == 200
        assert fetch(mode, session, shop).status_code == 200  # without a name
        assert fetch(mode, session, shop, url="https://other.example/a", **named).status_code == 200
        again = {"extensions": {"pay_again": True, **named.get("extensions", {})}, "headers": named.get("headers")}
        assert fetch(mode, session, shop, **again).status_code == 200
        assert session.spent == 5 * CENT
    with make_guard("memory://") as guard, guard.session("another", budget="$1.00") as session:
        assert fetch(mode, session, shop, **named).status_code == 200


@MODES
@pytest.mark.parametrize("key", ["", "  "])
def test_a_blank_key_names_nothing(mode, key):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        for url in (URL, f"{URL}/another"):
            assert fetch(mode, session, shop, url=url, headers={"Idempotency-Key": key}).status_code == 200
    assert len(shop.nonces) == 2


@WAYS
def test_a_name_is_forgotten_after_its_time(named):
    clock, shop = Clock(), Shop()
    store = open_store("memory://", clock_ms=clock)
    with make_guard(store, purchase_memory_s=60) as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop, **named)
        clock.tick(60)
        with pytest.raises(AlreadyPaid):
            fetch("sync", session, shop, **named)
        clock.tick(1)
        assert fetch("sync", session, shop, **named).status_code == 200
        assert session.spent == 2 * CENT


@WAYS
def test_threads_that_ask_for_one_name_at_once_pay_once(named, ledger_url):
    shop, first, go = Shop(), threading.Event(), threading.Event()

    def slow(request, _shop):
        first.set()
        go.wait(10)
        del _shop.paid
        _shop.payments.pop()
        return _shop(request)

    shop.paid = slow
    outcomes = []
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:

        def ask():
            try:
                with client(session, shop) as http:
                    outcomes.append(http.get(URL, **named).status_code)
            except AlreadyPaid as error:
                outcomes.append(type(error))

        threads = [threading.Thread(target=session.bind(ask)) for _ in range(4)]
        threads[0].start()
        assert first.wait(10)
        for thread in threads[1:]:
            thread.start()
        go.set()
        for thread in threads:
            thread.join(30)
        assert sorted(outcomes, key=str) == [200, AlreadyPaid, AlreadyPaid, AlreadyPaid]
        assert (len(shop.nonces), session.spent) == (1, CENT)
        assert len(events(session, "authorize")) == 1


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_tasks_that_ask_for_one_name_at_once_pay_once_and_the_next_takes_over_a_lost_answer(backend, ledger_url):
    shop, outcomes = Shop(), []

    async def answer(request):
        if "payment-signature" in request.headers and not shop.payments:
            shop(request)
            await anyio.sleep(0.1)
            raise httpx.ReadError("the first answer is lost")
        return shop(request)

    async def main():
        async def ask():
            async with async_client(session, answer) as http:
                try:
                    got = await http.get(URL, extensions={"purchase": "report 7"})
                    outcomes.append("presented again" if got.extensions["x402guard"].represented else "bought")
                except (AlreadyPaid, SettlementUncertain) as error:
                    outcomes.append(type(error).__name__)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)

    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:
        anyio.run(main, backend=backend)
        assert sorted(outcomes) == ["AlreadyPaid", "SettlementUncertain", "presented again"]
        assert (len(shop.nonces), session.spent, session.held) == (1, CENT, 0)


def test_a_call_that_fails_late_does_not_end_the_call_that_took_its_payment_over(ledger_url, monkeypatch):
    """The doubt is in the ledger before its own call ends, so another call may present the payment in between."""
    shop, doubted, second, go, outcomes = Shop(), threading.Event(), threading.Event(), threading.Event(), []

    def lost_then_slow(request, _shop):
        if len(_shop.payments) == 1:
            raise httpx.ReadError("the first answer is lost")
        second.set()
        go.wait(10)
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, text="the goods")

    def slow_to_end(*args, **kwargs):
        error = uncertain_of(*args, **kwargs)
        doubted.set()
        second.wait(10)
        return error

    shop.paid = lost_then_slow
    monkeypatch.setattr("x402guard.x402.flow.uncertain_of", slow_to_end)
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:

        def ask():
            try:
                outcomes.append(fetch("sync", session, shop, extensions={"purchase": "report 7"}).text)
            except (AlreadyPaid, PolicyDenied, SettlementUncertain) as error:
                outcomes.append(type(error).__name__)

        threads = [threading.Thread(target=session.bind(ask)) for _ in range(3)]
        threads[0].start()
        assert doubted.wait(10)
        threads[1].start()
        threads[0].join(10)
        threads[2].start()
        threads[2].join(0.3)
        go.set()
        for thread in threads[1:]:
            thread.join(10)
        assert outcomes == ["SettlementUncertain", "the goods", "AlreadyPaid"]
        assert (len(shop.payments), len(shop.nonces)) == (2, 1)


@MODES
def test_a_wait_for_another_call_of_the_name_ends_with_a_refusal(mode):
    clock, shop = Clock(), Shop()
    store = open_store("memory://", clock_ms=clock)
    with make_guard(store, flight_s=1) as guard, guard.session("s", budget="$1.00") as session:
        asked = []

        def meanwhile(_request, _shop):
            with pytest.raises(PolicyDenied) as caught:  # the ledger's clock stands still, so it stays in flight
                fetch("sync", session, Shop(), extensions={"purchase": "report 7"})
            asked.append((caught.value.rule, caught.value.retry_after, caught.value.money_may_have_moved))
            _shop.paid = None
            return httpx.Response(200)

        shop.paid = meanwhile
        if mode == "sync":
            assert fetch(mode, session, shop, extensions={"purchase": "report 7"}).status_code == 200
        else:
            from functools import partial

            work = partial(fetch, "async", session, shop, extensions={"purchase": "report 7"})
            assert work().status_code == 200
        assert asked == [("in_flight", 1, True)]


def test_a_name_that_was_paid_again_is_not_presented_a_third_time(ledger_url):
    shop, named = Shop(paid=httpx.ReadError("lost")), {"purchase": "report 7"}
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(SettlementUncertain):
            fetch("sync", session, shop, extensions=named)
        shop.paid = None
        assert fetch("sync", session, shop, extensions={**named, "pay_again": True}).status_code == 200
        with pytest.raises(AlreadyPaid):
            fetch("sync", session, shop, extensions=named)
        assert len(shop.payments) == 2


def test_a_forgiven_name_is_bought_again(ledger_url):
    from x402guard.ledger.purchases import forgive

    shop = Shop(paid=httpx.ReadError("lost"))
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(SettlementUncertain):
            fetch("sync", session, shop, extensions={"purchase": "report 7"})
        [hold] = guard.shell.store.outstanding()
        guard.shell.store.transact(Scope(holds=(hold.id,), durable=True), lambda view: forgive(view, hold.id, "me"))
        shop.paid = None
        assert not fetch("sync", session, shop, extensions={"purchase": "report 7"}).extensions["x402guard"].represented
        assert len(shop.nonces) == 2


@WAYS
def test_a_call_of_another_container_is_refused_at_once_with_the_time_to_wait(named, tmp_path, monkeypatch):
    """The first container may have been killed: nothing here can tell, so nobody waits for it in silence."""
    url, out, goes_on = f"sqlite:///{tmp_path / 'spend.db'}", threading.Event(), threading.Event()

    def slow(_request, _shop):
        out.set()
        goes_on.wait(30)
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())})

    shop = Shop(paid=slow)
    with make_guard(url) as first, first.session("s", budget="$1.00", id="run") as session:
        buying = threading.Thread(target=session.bind(lambda: fetch("sync", session, shop, **named)))
        buying.start()
        assert out.wait(30)
        monkeypatch.setattr(type(here()), "machine", lambda _self: "another/container")
        with make_guard(url) as second, second.session("s", id="run") as other:
            began = time.monotonic()
            with pytest.raises(PolicyDenied, match="in_flight") as caught:
                fetch("sync", other, shop, **named)
            assert time.monotonic() - began < 5
            assert 200 < caught.value.retry_after <= 270
            assert (caught.value.retry, caught.value.money_may_have_moved) == ("later", True)
        goes_on.set()
        buying.join()
    assert len(shop.nonces) == 1

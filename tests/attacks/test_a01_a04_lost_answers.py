"""Rows 1 to 4: what a server says after it was paid frees nothing, and nothing is paid twice for it."""

from decimal import Decimal

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock
from tests.support.merchant import (
    NETWORK,
    OTHER_PAYEE,
    URL,
    Shop,
    accept,
    b64,
    make_guard,
    offer_response,
    receipt,
    required,
    upto,
)
from tests.support.refusals import fetch
from x402guard import BudgetExhausted, SettlementUncertain
from x402guard.ledger.findings import Settled, Unused
from x402guard.stores import MemoryStore

CENT = Decimal("0.01")
HASH = "0x" + "cd" * 32


def test_a01_lost_answer_is_never_paid_twice(mode, guard):
    shop = Shop(paid=httpx.ReadError("the socket was dropped after settling"))
    with guard.session("s", budget="$1.00") as session:
        for _ in range(4):
            with pytest.raises(SettlementUncertain) as caught:
                fetch(mode, session, shop)
            assert caught.value.money_may_have_moved
            assert (session.held, session.spent) == (CENT, 0)
        assert len(shop.payments) == 4
        shop.paid = None
        response = fetch(mode, session, shop)
        assert response.extensions["x402guard"].represented
        assert (session.held, session.spent) == (0, CENT)
    assert len(shop.nonces) == 1


def test_a01_lost_answer_with_the_same_name_of_the_purchase_presents_the_same_cheque(mode, guard):
    shop = Shop(paid=httpx.ReadTimeout("no answer"))
    with guard.session("s", budget="$1.00") as session:
        for attempt in range(3):
            with pytest.raises(SettlementUncertain):
                fetch(mode, session, shop, method="POST", content=f"try {attempt}", headers={"Idempotency-Key": "k"})
    assert len(shop.payments) == 3
    assert len(shop.nonces) == 1


@pytest.mark.parametrize(
    "fresh", [accept(20_000), accept(payTo=OTHER_PAYEE), upto(10_000)], ids=["price", "payee", "scheme"]
)
def test_a01_a_cheque_in_doubt_is_presented_again_whatever_the_offer_says_by_now(mode, guard, fresh):
    shop = Shop(paid=httpx.ReadError("lost"))
    with guard.session("s", budget="$1.00") as session:
        with pytest.raises(SettlementUncertain):
            fetch(mode, session, shop)
        shop.terms = required(fresh)
        for _ in range(3):
            with pytest.raises(SettlementUncertain) as caught:
                fetch(mode, session, shop)
            assert "presents the same payment again" in caught.value.advice
        assert session.held == CENT
    assert (len(shop.payments), len(shop.nonces)) == (4, 1)
    assert len(set(shop.payments)) == 1


def test_a02_rechallenge_after_paying_signs_once(mode, guard):
    prices = iter(range(10_000, 90_000, 5_000))
    shop = Shop(
        terms=lambda _: required(accept(next(prices))),
        paid=lambda _, shop: offer_response(required(accept(next(prices)))),
    )
    with guard.session("s", budget="$1.00") as session:
        response = fetch(mode, session, shop)
        assert response.status_code == 402
        assert response.extensions["x402guard"].in_doubt
        for _ in range(3):
            assert fetch(mode, session, shop).extensions["x402guard"].in_doubt
        assert (session.held, session.spent) == (CENT, 0)
    assert shop.payments == [(shop.payments[0][0], 10_000, shop.payments[0][2])] * 4


def test_a02_the_same_quote_again_and_again_is_one_nonce(mode, guard):
    shop = Shop(paid=lambda *_: offer_response(required()))
    with guard.session("s", budget="$1.00") as session:
        for _ in range(5):
            assert fetch(mode, session, shop).status_code == 402
        assert (session.held, session.spent) == (CENT, 0)
    assert (len(shop.payments), len(shop.nonces)) == (5, 1)


def _with(name, value, also=()):
    return lambda status: httpx.Response(status, headers=[(name, value), *also])


GOOD, BAD = b64(receipt()), b64(receipt(success=False, transaction="", errorReason="unexpected_settle_error"))
RECEIPTS = {
    "success": (_with("PAYMENT-RESPONSE", GOOD), "captured"),
    "success by the v1 name": (_with("X-PAYMENT-RESPONSE", GOOD), "captured"),
    "success in both headers": (_with("PAYMENT-RESPONSE", GOOD, also=[("X-PAYMENT-RESPONSE", GOOD)]), "captured"),
    "none": (lambda status: httpx.Response(status), "held"),
    "failure, no hash": (_with("PAYMENT-RESPONSE", BAD), "held"),
    "failure, a hash": (
        _with("PAYMENT-RESPONSE", b64(receipt(success=False, errorReason="settlement_pending"))),
        "held",
    ),
    "another network": (_with("PAYMENT-RESPONSE", b64(receipt(network="eip155:8453"))), "held"),
    "no network at all": (_with("PAYMENT-RESPONSE", b64(receipt(network="solana"))), "held"),
    "another payer": (_with("PAYMENT-RESPONSE", b64({**receipt(), "payer": OTHER_PAYEE})), "held"),
    "success as text": (_with("PAYMENT-RESPONSE", b64({**receipt(), "success": "true"})), "held"),
    "success as one": (_with("PAYMENT-RESPONSE", b64({**receipt(), "success": 1})), "held"),
    "not base64": (_with("PAYMENT-RESPONSE", "{}"), "held"),
    "twice": (_with("PAYMENT-RESPONSE", GOOD, also=[("PAYMENT-RESPONSE", BAD)]), "held"),
    "two that differ": (_with("PAYMENT-RESPONSE", GOOD, also=[("X-PAYMENT-RESPONSE", BAD)]), "held"),
    "a bomb": (_with("PAYMENT-RESPONSE", "A" * 200_000), "held"),
    "a list": (_with("PAYMENT-RESPONSE", b64([receipt()])), "held"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("status", [200, 201, 204, 302, 400, 402, 404, 409, 429, 500, 502, 503])
@pytest.mark.parametrize("name", RECEIPTS)
def test_a03_status_and_receipt_decide_the_state_and_free_nothing(guard, status, name):
    answer, state = RECEIPTS[name]
    shop = Shop(paid=lambda *_: answer(status))
    with guard.session("s", budget="$1.00") as session:
        response = fetch("sync", session, shop)
        assert response.status_code == status
        assert response.extensions["x402guard"].state == state
        assert response.extensions["x402guard"].in_doubt is (state == "held")
        assert response.extensions["x402guard"].evidence == ("claimed" if state == "captured" else None)
        assert (session.held, session.spent) == ((CENT, 0) if state == "held" else (0, CENT))
    assert len(shop.payments) == 1


@pytest.mark.parametrize("name", ["success", "none", "failure, no hash", "twice"])
def test_a03_the_async_transport_believes_no_more(guard, name):
    answer, state = RECEIPTS[name]
    shop = Shop(paid=lambda *_: answer(500))
    with guard.session("s", budget="$1.00") as session:
        assert fetch("async", session, shop).extensions["x402guard"].state == state
        assert session.held + session.spent == CENT


@pytest.mark.parametrize("claimed", ["0", "1", "50000", "50001", None])
def test_a03_an_upto_receipt_is_a_claim_and_the_ceiling_stays_held(mode, guard, claimed):
    more = {} if claimed is None else {"amount": claimed}
    answer = httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(**more))})
    shop = Shop(terms=required(upto(50_000)), paid=lambda *_: answer)
    with guard.session("s", budget="$1.00") as session:
        fetch(mode, session, shop)
        assert (session.held, session.spent) == (Decimal("0.05"), 0)


def test_a04_withheld_authorization_counts_until_it_is_settled_late():
    clock, chain = Clock(), MockChain()
    shop = Shop(paid=lambda *_: httpx.Response(500))
    with make_guard(MemoryStore(clock_ms=clock), chains=chain, budget="$0.015") as guard:
        with guard.session("s", budget="$0.015") as session:
            assert fetch("sync", session, shop).status_code == 500
            [hold] = guard.shell.store.outstanding()
            for _ in range(3):
                with pytest.raises(BudgetExhausted):
                    fetch("sync", session, shop, url=f"{URL}/other")
                clock.tick(5)
            clock.tick(15)
            chain.finding = Settled(10_000, HASH, 0, final=True)
            guard.sweep()
            assert (session.held, session.spent) == (0, CENT)
            with pytest.raises(BudgetExhausted) as caught:
                fetch("sync", session, shop, url=f"{URL}/other")
            assert (caught.value.requested, caught.value.available) == (CENT, CENT / 2)
            [captured] = [e for e in session.report().to_dict()["events"] if e["event"] == "capture"]
            assert (captured["hold_id"], captured["evidence"], captured["at"]) == (
                hold.id,
                "chain",
                clock.now_ms / 1000,
            )
    assert len(shop.payments) == 1


def test_a04_withheld_authorization_is_freed_only_past_its_deadline_at_a_final_block():
    clock = Clock()
    chain = MockChain(finding=lambda _: Unused(clock.now_ms // 1000))
    shop = Shop(paid=lambda *_: httpx.Response(500))
    with make_guard(MemoryStore(clock_ms=clock), chains=chain) as guard:
        with guard.session("s", budget="$0.01") as session:
            fetch("sync", session, shop)
            for _ in range(5):  # 55 s of 60
                clock.tick(11)
                guard.sweep()
                assert (session.held, session.spent) == (CENT, 0)
            clock.tick(11)
            guard.sweep()
            assert (session.held, session.spent) == (0, 0)


def test_a04_without_a_chain_a_500_is_counted_in_full_for_good():
    clock = Clock()
    shop = Shop(paid=lambda *_: httpx.Response(500))
    with make_guard(MemoryStore(clock_ms=clock)) as guard, guard.session("s", budget="$0.01") as session:
        fetch("sync", session, shop)
        assert session.held == CENT
        clock.tick(86_400)
        with pytest.raises(BudgetExhausted):
            fetch("sync", session, shop, url=f"{URL}/other")
        assert (session.held, session.spent) == (0, CENT)
        assert session.report().to_dict()["evidence"]["assumed"] == "0.01"
        assert guard.shell.chain is None
    assert shop.payments[0][1] == 10_000
    assert NETWORK in guard.policy.networks

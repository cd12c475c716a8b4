"""What a seller says of a settlement, and what the chain says later: a claim is counted until it is proven or cannot be."""

import threading
from decimal import Decimal

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt, required, upto
from x402guard.ledger.findings import Settled, Unused, Used
from x402guard.stores import open_store

CENT = Decimal("0.01")


def test_a_claim_that_comes_late_still_brings_the_ceiling_down():
    clock = Clock()
    chain = MockChain(lambda hold: Settled(12_345, "0x" + "ab" * 32, 0, final=True) if hold.claim else Used(final=True))
    shop = Shop(required(upto()))

    def paid(request, shop):
        clock.tick(31)
        guard.sweep()
        assert session.spent == Decimal("0.05")  # used, and nobody had said by what
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="12345"))})

    shop.paid = paid
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain, flight_s=30) as guard:
        session = guard.session("s", budget="$1")
        client(session, shop).get(URL)
        assert session.spent == Decimal("0.012345")


def test_a_claim_that_the_chain_never_settled_is_taken_back_when_it_no_longer_can():
    clock = Clock()
    chain = MockChain(lambda hold: Unused(clock() // 1000))
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session = guard.session("s", budget="$1")
        paid = client(session, Shop()).get(URL).extensions["x402guard"]
        assert (session.spent, paid.evidence) == (CENT, "claimed")
        clock.tick(61)
        from x402guard.flow.drivers import run
        from x402guard.x402.settlement import ask_chain

        hold = run(ask_chain(guard.context, guard.shell.store.hold(paid.hold_id)), guard.shell)
        assert (hold.captured, str(hold.evidence), session.spent) == (0, "chain", 0)
        events = [event["event"] for event in session.report().to_dict()["events"]]
        assert "claim_contradicted" in events


def test_a_block_that_can_be_undone_frees_nothing():
    clock = Clock()
    chain = MockChain(Settled(1, "0x" + "ab" * 32, 0, final=False))
    shop = Shop(
        required(upto()),
        paid=lambda request, shop: httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="1"))}),
    )
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session = guard.session("s", budget="$0.05")
        client(session, shop).get(URL)
        guard.sweep()
        assert (session.held, session.spent) == (Decimal("0.05"), 0)
        chain.finding = Settled(50_000, "0x" + "cd" * 32, 0, final=True)  # the reorg took it all
        clock.tick(3)
        guard.sweep()
        assert (session.held, session.spent) == (0, Decimal("0.05"))


def test_what_is_captured_on_a_word_is_asked_about_until_it_is_proven():
    clock = Clock()
    chain = MockChain(Used(final=False))
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session = guard.session("s", budget="$1")
        hold_id = client(session, Shop()).get(URL).extensions["x402guard"].hold_id
        guard.sweep()
        assert str(guard.shell.store.hold(hold_id).evidence) == "chain_head"
        chain.finding = Used(final=True)
        for _ in range(3):
            clock.tick(3)
            guard.sweep()
        assert str(guard.shell.store.hold(hold_id).evidence) == "chain"
        assert chain.reads == 2  # and then no more


@pytest.mark.parametrize("status", [402, 500, 200])
def test_a_failure_that_names_a_transaction_is_settled_by_that_transaction(status):
    seen = []

    def finding(hold):
        seen.append(hold.claim.transaction)
        return Settled(12_345, hold.claim.transaction, 0, final=True)

    pending = b64(receipt(success=False, errorReason="settlement_pending"))
    shop = Shop(
        required(upto()),
        paid=lambda request, shop: httpx.Response(status, headers={"PAYMENT-RESPONSE": pending}),
    )
    with make_guard(chains=MockChain(finding)) as guard:
        session = guard.session("s", budget="$1")
        paid = client(session, shop).get(URL).extensions["x402guard"]
        assert (paid.state, paid.in_doubt) == ("held", True)
        guard.sweep()
        assert (session.spent, session.held) == (Decimal("0.012345"), 0)
        assert seen == ["0x" + "ab" * 32]


def test_what_a_402_says_of_a_payment_stands_in_the_journal_alone():
    """A failed verification has a new offer and no receipt: the reason is in its error (HTTP transport v2)."""
    says = "invalid_exact_evm_insufficient_balance"
    refusing = {"PAYMENT-REQUIRED": b64(required(error=says))}
    shop = Shop(paid=lambda request, shop: httpx.Response(402, headers=refusing))
    with make_guard() as guard, guard.session("s", budget="$1", id="s") as session:
        paid = client(session, shop).get(URL).extensions["x402guard"]
        assert (paid.state, paid.in_doubt, len(shop.payments)) == ("held", True, 1)
        [note] = [entry for entry in guard.shell.store.entries("s") if entry.event == "note"]
        assert says in note.facts()["words"]
        assert says not in str(paid)


def test_an_amount_of_a_receipt_may_be_a_number():
    shop = Shop(
        required(upto()), paid=lambda request, shop: httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(number)})
    )
    number = receipt(amount=2_000)
    with make_guard(unsafe_trust_receipts=True) as guard, guard.session("s", budget="$1") as session:
        assert client(session, shop).get(URL).status_code == 200
        assert (session.spent, session.held) == (Decimal("0.002"), 0)


@pytest.mark.parametrize(("status", "success"), [(200, True), (402, False)], ids=["claimed", "named by a failure"])
def test_a_payment_whose_transaction_is_named_is_asked_about_in_the_background(monkeypatch, status, success):
    monkeypatch.setattr("x402guard.chain.rechecker.FIRST_PAUSE_S", 0.01)
    asked = threading.Event()

    def finding(hold):
        asked.set()
        return Settled(10_000, hold.claim.transaction, 0, final=True)

    named = {"PAYMENT-RESPONSE": b64(receipt(success=success))}
    shop = Shop(paid=lambda request, shop: httpx.Response(status, headers=named))
    with make_guard(chains=MockChain(finding), background_checks=True) as guard:
        client(guard.session("s", budget="$1"), shop).get(URL)
        assert asked.wait(10)


def test_a_failure_that_names_a_transaction_stays_a_doubt_until_the_chain_has_it():
    from x402guard.ledger.findings import Unreadable

    pending = b64(receipt(success=False, errorReason="settlement_pending"))
    shop = Shop(paid=lambda request, shop: httpx.Response(402, headers={"PAYMENT-RESPONSE": pending}))
    with make_guard(chains=MockChain(Unreadable("not to be seen yet"))) as guard:
        session = guard.session("s", budget="$1")
        paid = client(session, shop).get(URL).extensions["x402guard"]
        guard.sweep()
        assert (paid.state, paid.in_doubt, session.held) == ("held", True, CENT)
        assert client(session, shop).get(URL).extensions["x402guard"].represented
        assert len(shop.nonces) == 1


def test_an_answer_ends_the_doubt_also_where_it_names_what_the_failure_named():
    pending = b64(receipt(success=False, errorReason="settlement_pending"))
    shop = Shop(required(upto()), paid=lambda request, shop: httpx.Response(402, headers={"PAYMENT-RESPONSE": pending}))
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        assert client(session, shop).get(URL).extensions["x402guard"].in_doubt
        shop.paid = lambda request, shop: httpx.Response(
            200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="50000"))}
        )
        answered = client(session, shop).get(URL).extensions["x402guard"]
        assert (answered.represented, answered.in_doubt) == (True, False)

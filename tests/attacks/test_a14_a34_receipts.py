"""Rows 14 and 34: one transaction proves one hold, once; what comes late or twice changes nothing twice."""

from decimal import Decimal

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, accept, b64, make_guard, receipt, required, upto
from tests.support.refusals import events, fetch
from x402guard.ledger.findings import Settled, Used
from x402guard.stores import MemoryStore

TX = "0x" + "ee" * 32


def _settled(log, amount=10_000):
    return Settled(amount, TX, log, final=True)


@pytest.fixture
def chain():
    return MockChain()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watched(chain, clock):
    with make_guard(MemoryStore(clock_ms=clock), chains=chain) as made:
        yield made


def test_a14_one_payment_proves_one_hold_and_the_second_is_flagged(mode, watched, chain):
    chain.finding = _settled(log=7)
    answer = httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(transaction=TX))})
    shop = Shop(paid=lambda *_: answer)
    with watched.session("s", budget="$1.00") as session:
        first = fetch(mode, session, shop, url=f"{URL}/1").extensions["x402guard"]
        second = fetch(mode, session, shop, url=f"{URL}/2").extensions["x402guard"]
        watched.sweep()
        evidence = [str(watched.shell.store.hold(paid.hold_id).evidence) for paid in (first, second)]
        assert evidence == ["chain", "claimed"]
        assert session.spent == Decimal("0.02")
        [flag] = events(session, "receipt_reused")
    assert (flag["hold_id"], flag["proves"], flag["transaction"]) == (second.hold_id, first.hold_id, TX)


def test_a14_a_hash_in_other_letters_is_the_same_transaction(mode, watched, chain):
    spelled = iter([TX, TX.upper().replace("0X", "0x")])
    chain.finding = lambda _: Settled(10_000, next(spelled), 7, final=True)
    with watched.session("s", budget="$1.00") as session:
        for number in range(2):
            fetch(mode, session, Shop(), url=f"{URL}/{number}")
        watched.sweep()
        assert len(events(session, "receipt_reused")) == 1


def test_a14_a_small_settlement_frees_one_upto_and_not_two(watched, chain):
    """A seller with two cheques shows the small one's transaction for both."""
    chain.finding = _settled(log=3, amount=1_000)
    shop = Shop(terms=required(upto(50_000)))
    with watched.session("s", budget="$1.00") as session:
        for number in range(2):
            fetch("sync", session, shop, url=f"{URL}/{number}")
        watched.sweep()
        assert session.spent == Decimal("0.001")
        assert session.held == Decimal("0.05")


def test_a34_a_transaction_shared_by_four_requests_proves_each_by_its_own_log(watched, chain):
    logs = iter(range(4))
    chain.finding = lambda _: _settled(next(logs))
    with watched.session("s", budget="$1.00") as session:
        for number in range(4):
            fetch("sync", session, Shop(), url=f"{URL}/{number}")
        watched.sweep()
        report = session.report().to_dict()
    assert (report["spent"], report["evidence"]["chain"]) == ("0.04", "0.04")
    assert not [e for e in report["events"] if e["event"] == "receipt_reused"]


def test_a34_late_duplicates_change_nothing(watched, chain, clock):
    shop = Shop(paid=lambda *_: httpx.Response(500))
    with watched.session("s", budget="$1.00") as session:
        for number in range(4):
            fetch("sync", session, shop, url=f"{URL}/{number}")
        logs = {hold.id: number for number, hold in enumerate(watched.shell.store.outstanding())}
        chain.finding = lambda hold: _settled(logs[hold.id])
        for _ in range(3):
            clock.tick(10)
            watched.sweep()
        assert (session.held, session.spent) == (0, Decimal("0.04"))
        assert len(events(session, "capture")) == 4
        assert events(session, "correct") == []


def test_a34_a_refund_is_no_budget(watched, chain):
    """The chain has seen the nonces used; money that comes back later is another transfer and frees nothing."""
    chain.finding = Used(final=True)
    shop = Shop(terms=required(accept(250_000)))
    with watched.session("s", budget="$1.00") as session:
        for number in range(4):
            fetch("sync", session, shop, url=f"{URL}/{number}")
        chain.finding = None
        watched.sweep()
        assert (session.spent, session.remaining) == (1, 0)

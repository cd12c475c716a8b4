"""Accidents that no attacker has to bring about: blocks, clocks, signers, books and threads as they are."""

import threading
from decimal import Decimal

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.faults import Faulty
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, accept, b64, client, make_guard, permit2, receipt, required, upto
from tests.support.refusals import events, fetch
from tests.support.signers import SpySigner
from x402guard import (
    BudgetExhausted,
    ConfigError,
    GuardedTransport,
    LedgerUnavailable,
    PolicyDenied,
    SettlementUncertain,
)
from x402guard.ledger.findings import Settled, Unused
from x402guard.stores import MemoryStore, open_store

CENT = Decimal("0.01")
CEILING = Decimal("0.05")
TX, OTHER_TX = "0x" + "ee" * 32, "0x" + "dd" * 32
DAY_MS = 86_400_000


def small_receipts(*_):
    return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(transaction=TX, amount="1000"))})


def at_once():
    return httpx.Response(500)


def test_accident_two_cheques_and_the_small_ones_transaction_for_both():
    clock, chain = Clock(), MockChain()
    shop = Shop(terms=lambda r: required(upto(5_000 if "small" in r.url.path else 50_000)), paid=small_receipts)
    with make_guard(MemoryStore(clock_ms=clock), chains=chain) as guard, guard.session("s", budget="$1.00") as session:
        chain.finding = Settled(1_000, TX, 4, final=True)
        for name in ("small", "dear"):
            fetch("sync", session, shop, url=f"{URL}/{name}")
        guard.sweep()
        assert (session.spent, session.held) == (Decimal("0.001"), CEILING)
        [flag] = events(session, "receipt_reused")
        assert flag["transaction"] == TX


def test_accident_reorg_undoes_a_settlement_and_the_remainder_was_never_free():
    clock = Clock()
    chain = MockChain(finding=Settled(1_000, TX, 0, final=False))
    shop = Shop(terms=required(upto(50_000)), paid=small_receipts)
    with make_guard(MemoryStore(clock_ms=clock), chains=chain) as guard, guard.session("s", budget="$0.05") as session:
        fetch("sync", session, shop)
        for finding in (Settled(1_000, TX, 0, final=False), Unused(clock.now_ms // 1000)):
            clock.tick(10)
            chain.finding = finding
            guard.sweep()
            assert session.held + session.spent == CEILING
        chain.finding = Settled(50_000, OTHER_TX, 0, final=True)
        clock.tick(10)
        guard.sweep()
        assert (session.held, session.spent) == (0, CEILING)


@pytest.mark.parametrize(("make", "dead_after"), [(accept, 0), (permit2, 1), (upto, 1)], ids=lambda v: str(v)[:12])
def test_accident_last_second_is_the_contracts_own(make, dead_after):
    """EIP-3009 takes a payment while t < validBefore, Permit2 while t <= deadline; the hold lives as long."""
    clock, chain = Clock(), MockChain()
    shop = Shop(terms=required(make(10_000)), paid=lambda *_: at_once())
    with make_guard(MemoryStore(clock_ms=clock), chains=chain) as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop)
        [hold] = guard.shell.store.outstanding()
        until = hold.payment().valid_until
        clock.tick(3_600)
        for block_time, held in ((until + dead_after - 1, CENT), (until + dead_after, 0)):
            chain.finding = Unused(block_time)
            clock.tick(10)
            guard.sweep()
            assert session.held == held
        assert session.spent == 0


def test_accident_signer_that_times_out_may_have_signed(mode):
    def late(_signature):
        raise TimeoutError("no answer within 5 s")

    spy, shop = SpySigner(after=late), Shop()
    with make_guard(signer=spy) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(SettlementUncertain) as caught:
            fetch(mode, session, shop)
        assert caught.value.money_may_have_moved
        assert (session.held, session.spent) == (CENT, 0)
        spy.after = None
        assert fetch(mode, session, shop).status_code == 200
    assert len({hold.id for hold in spy.signed}) == 1
    assert len(shop.nonces) == 1


@pytest.mark.parametrize("committed", [False, True], ids=["not written", "answer lost"])
def test_accident_lost_commit_signs_nothing_that_the_books_may_not_know(committed):
    store, spy, shop = Faulty(open_store("memory://")), SpySigner(), Shop()
    with make_guard(store, signer=spy) as guard, guard.session("s", budget="$1.00") as session:
        store.fail(1, LedgerUnavailable("the answer to COMMIT is lost"), committed=committed)
        with pytest.raises(LedgerUnavailable):
            fetch("sync", session, shop)
        assert (spy.signed, shop.payments) == ([], [])
        assert fetch("sync", session, shop).status_code == 200
        assert session.spent == CENT
    assert len(shop.nonces) == 1


def test_accident_midnight_passes_between_a_hold_and_its_end():
    clock = Clock(now_ms=20_000 * DAY_MS - 60_000)

    def settled(*_):
        clock.tick(120)
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())})

    shop = Shop(terms=required(accept(60_000)), paid=settled)
    with make_guard(MemoryStore(clock_ms=clock)) as guard:
        customer = guard.budget("customer-7", "$0.10", per="day")
        with customer.session("s", budget="$1.00") as session:
            session.charge("serp", "$0.04")
            fetch("sync", session, shop)
            with pytest.raises(BudgetExhausted):
                session.charge("serp", "$0.05")
            session.charge("serp", "$0.04")
            assert customer.spent + customer.held == Decimal("0.10")


def test_accident_clock_that_jumps_lets_nothing_expire_and_nothing_begin():
    clock, steady = Clock(), Clock()
    store = MemoryStore(clock_ms=clock, steady_ms=steady)
    with make_guard(store, chains=MockChain()) as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, Shop(paid=lambda *_: at_once()))
        clock.tick(86_400)
        with pytest.raises(PolicyDenied, match="clock"):
            fetch("sync", session, Shop(), url=f"{URL}/2")
        guard.sweep()
        clock.tick(-86_400)
        assert (session.held, session.spent) == (CENT, 0)
        fetch("sync", session, Shop(), url=f"{URL}/2")
        assert session.spent == CENT


def test_accident_threads_do_not_inherit_the_session_and_are_told_so():
    """A plain thread pays from no session by mistake; one that was bound pays from its own."""
    came = []

    def buy():
        try:
            came.append(http.get(URL).status_code)
        except ConfigError as error:
            came.append(str(error))

    shop = Shop()
    with make_guard() as guard, httpx.Client(transport=GuardedTransport(guard, httpx.MockTransport(shop))) as http:
        with guard.session("s", budget="$1.00") as session:
            for target in (buy, session.bind(buy)):
                thread = threading.Thread(target=target)
                thread.start()
                thread.join(30)
            assert session.spent == CENT
    assert len(came) == 2
    assert "session.bind" in came[0]
    assert came[1] == 200
    assert len(shop.payments) == 1


def test_accident_generator_that_yields_while_it_is_closed_costs_its_hold_and_no_more():
    """A tool that is a generator, left in the middle, which does not end when it is told to."""

    def stubborn(session):
        with session.hold("crawl", up_to="$0.02") as hold:
            while True:
                try:
                    yield hold
                except GeneratorExit:
                    yield hold

    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        pages = stubborn(session)
        next(pages)
        assert session.held == 2 * CENT
        with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
            pages.close()
        assert session.held + session.spent == 2 * CENT
        client(session, Shop()).get(URL)
        assert session.held + session.spent == 3 * CENT

"""Row 18: the seller of an ``upto`` says it took a cent, or nothing, and takes the ceiling."""

from decimal import Decimal

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock
from tests.support.merchant import FACILITATOR, PAYEE, URL, Shop, b64, make_guard, receipt, required, upto
from tests.support.refusals import events, fetch
from x402guard import BudgetExhausted
from x402guard.ledger.findings import Settled, Unused, Used
from x402guard.stores import MemoryStore

CEILING = Decimal("0.05")
TX = "0x" + "ee" * 32
CLAIMS = {"one per cent": "500", "nothing": "0", "no amount": None}
IN_FULL = {"its transaction": Settled(50_000, TX, 0, final=True), "its nonce alone": Used(final=True)}


def claiming(amount, transaction=TX):
    more = {} if amount is None else {"amount": amount}
    answer = httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(transaction=transaction, **more))})
    return Shop(terms=required(upto(50_000)), paid=lambda *_: answer)


@pytest.mark.parametrize("claimed", CLAIMS)
@pytest.mark.parametrize("shown", IN_FULL)
def test_a18_under_report_ends_at_what_the_chain_took(mode, claimed, shown):
    """The chain shows nothing at first, and then that the whole ceiling was taken."""
    clock = Clock()
    chain = MockChain(finding=lambda _: Unused(clock.now_ms // 1000))
    with make_guard(MemoryStore(clock_ms=clock), chains=chain) as guard, guard.session("s", budget="$0.10") as session:
        fetch(mode, session, claiming(CLAIMS[claimed]))
        assert (session.held, session.spent) == (CEILING, 0)
        clock.tick(30)
        chain.finding = IN_FULL[shown]
        guard.sweep()
        assert (session.held, session.spent) == (0, CEILING)
        assert session.report().to_dict()["evidence"]["chain"] == "0.05"


def test_a18_under_report_is_a_discrepancy_that_names_payee_and_facilitator():
    clock = Clock()
    chain = MockChain(finding=lambda _: Unused(clock.now_ms // 1000))
    with make_guard(MemoryStore(clock_ms=clock), chains=chain) as guard, guard.session("s", budget="$0.10") as session:
        fetch("sync", session, claiming("500"))
        chain.finding = IN_FULL["its transaction"]
        clock.tick(30)
        guard.sweep()
        [found] = events(session, "claim_contradicted")
    assert (found["payee"], found["facilitator"]) == (PAYEE, FACILITATOR)
    assert (Decimal(str(found["claimed"])), Decimal(str(found["chain"]))) == (Decimal("0.0005"), CEILING)


def test_a18_under_report_is_corrected_where_receipts_are_trusted_too():
    clock, chain = Clock(), MockChain()
    store = MemoryStore(clock_ms=clock)
    with make_guard(store, chains=chain, unsafe_trust_receipts=True) as guard:
        with guard.session("s", budget="$0.10") as session:
            fetch("sync", session, claiming("500"))
            chain.finding = IN_FULL["its transaction"]
            clock.tick(30)
            guard.sweep()
            assert (session.held, session.spent) == (0, CEILING)


def test_a18_under_reports_never_add_up_to_more_than_the_budget(mode, guard):
    """Without a chain the ceilings stay held, however little each receipt says."""
    shop = claiming("1")
    with guard.session("s", budget="$0.12") as session:
        for number in range(2):
            fetch(mode, session, shop, url=f"{URL}/{number}")
        with pytest.raises(BudgetExhausted):
            fetch(mode, session, shop, url=f"{URL}/3")
    assert shop.signed == 100_000


def test_a18_no_transaction_needed_frees_nothing_before_the_chain_can_take_it_no_more():
    clock = Clock()
    chain = MockChain(finding=lambda _: Unused(clock.now_ms // 1000))
    with make_guard(MemoryStore(clock_ms=clock), chains=chain) as guard, guard.session("s", budget="$0.10") as session:
        fetch("sync", session, claiming("0", transaction=""))
        for _ in range(5):
            clock.tick(11)
            guard.sweep()
            assert session.held + session.spent == CEILING
        clock.tick(11)
        guard.sweep()
        assert (session.held, session.spent) == (0, 0)

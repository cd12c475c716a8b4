"""What one look at the chain makes of many payments, and of what left the wallet, whatever the chain answers and whoever looks too."""

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from threading import Barrier

import pytest

from tests.support.ledger import Clock, weigh_proven
from tests.support.merchant import (
    FACILITATOR,
    NETWORK,
    PAYEE,
    URL,
    Shop,
    b64,
    client,
    make_guard,
    receipt,
    required,
    upto,
)
from tests.support.wallets import OTHER_TX, THIEF, TX, Wallet, leaves
from x402guard import Asset, IllegalTransition
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Settled, Unreadable, Unused
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.x402 import settlement

CENT = Decimal("0.01")
OTHER_TOKEN = "0x" + "77" * 20

pytestmark = pytest.mark.usefixtures("inline_notices")


def claimed(amount=12_345, transaction=TX):
    return {"PAYMENT-RESPONSE": b64(receipt(amount=str(amount), transaction=transaction))}


def answering(**headers):
    import httpx

    return lambda request, shop: httpx.Response(200, headers=headers)


def paid(guard, chain):
    """Two upto payments that a seller claims, the older one with a transaction that no chain ever shows."""
    session = guard.session("s", budget="$0.10")
    first = client(session, Shop(required(upto()), paid=answering(**claimed(transaction=TX)))).get(URL)
    second = client(session, Shop(required(upto()), paid=answering(**claimed(transaction=OTHER_TX)))).get(URL + "1")
    unseen = first.extensions["x402guard"].hold_id

    def finding(hold):
        if hold.id == unseen:
            return Unreadable("that transaction is not to be seen yet", alone=True)
        return Settled(12_345, OTHER_TX, 0, final=True)

    chain.finding = finding
    return session, unseen, second.extensions["x402guard"].hold_id


@pytest.mark.parametrize("look", ["reconcile", "sweep", "session"])
def test_a_seller_that_names_a_transaction_nobody_sees_holds_up_no_other_payment(look):
    clock, chain = Clock(), Wallet()
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session, unseen, seen = paid(guard, chain)
        {"reconcile": guard.reconcile, "sweep": guard.sweep, "session": session.reconcile}[look]()
        assert chain.asked == [unseen, seen]
        assert (session.spent, session.held) == (Decimal("0.012345"), Decimal("0.05"))


@pytest.mark.parametrize("look", ["reconcile", "sweep", "session"])
def test_a_payment_that_cannot_be_written_holds_up_no_other_payment(look, monkeypatch, caplog):
    clock, chain = Clock(), Wallet()
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session, first, second = paid(guard, chain)
        chain.finding = Settled(12_345, OTHER_TX, 0, final=True)

        def weighs(view, hold_id, finding, **more):
            if hold_id == first:
                raise IllegalTransition("no row says how")
            return weigh_proven(view, hold_id, finding, **more)

        monkeypatch.setattr(settlement, "weigh", weighs)
        found = {"reconcile": guard.reconcile, "sweep": guard.sweep, "session": session.reconcile}[look]()
        assert look == "sweep" or found.still_open == 1
        assert (guard.shell.store.hold(first).state, guard.shell.store.hold(second).state) == ("held", "captured")
    assert "no row says how" in caplog.text


@pytest.mark.parametrize("look", ["reconcile", "sweep"])
def test_a_network_out_of_reach_is_asked_once_a_look(look):
    chain = Wallet(finding=Unreadable("down"))
    with make_guard(chains=chain) as guard:
        session, _, _ = paid(guard, chain)
        chain.finding = Unreadable("down")
        found = {"reconcile": guard.reconcile, "sweep": guard.sweep}[look]()
        assert len(chain.asked) == 1
        assert session.held == Decimal("0.10")
        assert look == "sweep" or (found.unreadable, found.still_open) == ({NETWORK: "down"}, 2)


def test_a_refusal_frees_what_it_can_behind_a_transaction_that_nobody_sees():
    chain = Wallet()
    with make_guard(chains=chain) as guard:
        session, _, _ = paid(guard, chain)
        shop = Shop()
        assert client(session, shop).get(URL + "2").status_code == 200
        assert len(shop.payments) == 1


def signed(guard):
    session = guard.session("s", budget="$1.00")
    return session, client(session, Shop()).get(URL).extensions["x402guard"].hold_id


def alarms(guard):
    return [
        entry for entry in guard.shell.store.entries("wallet") if entry.facts().get("name") == "unexplained_transfer"
    ]


def test_a_transfer_past_the_guard_is_told_once_and_stays_an_alarm():
    told, chain = [], Wallet()
    with make_guard(chains=chain, on_notice=told.append) as guard:
        signed(guard)
        assert guard.reconcile().unexplained == []
        chain.outgoing.append(leaves(7_000_000))
        found = guard.reconcile()
        assert [(row["payee"], row["transaction"]) for row in found.unexplained] == [(THIEF, TX)]
        assert (found.unexplained_total, found.is_alarming) == (7 * 10**9, True)
        again = guard.reconcile()
        assert (again.unexplained, again.is_alarming) == (found.unexplained, True), "until its owner acknowledges it"
        chain.outgoing.append(leaves(1, OTHER_TX))
        assert [row["transaction"] for row in guard.reconcile().unexplained] == [TX, OTHER_TX]
        assert [n.facts["total"] for n in told if n.kind == "unexplained_transfer"] == ["7.00", "0.000001"]
        assert len(alarms(guard)) == 2


@pytest.mark.parametrize("also", [0, 1])
def test_two_that_look_at_once_alarm_once(also):
    """The second has seen one more block than the first when both come to write."""
    together, told = Barrier(2), []
    chain = Wallet(outgoing=[leaves(7)])

    def both(reader):
        number = together.wait(10)
        if also and number == 0:
            reader.meanwhile = None
            reader.outgoing.append(leaves(8, OTHER_TX))

    with make_guard(chains=chain, on_notice=told.append) as guard:
        signed(guard)
        chain.meanwhile = both
        with ThreadPoolExecutor(2) as pool:
            for look in [pool.submit(guard.reconcile) for _ in range(2)]:
                look.result(20)
        chain.meanwhile = None
        rows = [row["transaction"] for row in guard.reconcile().unexplained]
        assert sorted(rows) == sorted([TX, OTHER_TX][: 1 + also])
        assert len(alarms(guard)) == 1 + also


def test_a_slower_look_that_saw_more_repeats_nothing_and_loses_nothing():
    chain = Wallet(outgoing=[leaves(7)])
    with make_guard(chains=chain) as guard:
        signed(guard)
        first = []

        def meanwhile(reader):
            reader.meanwhile = None
            seen, reader.outgoing = reader.outgoing, reader.outgoing[:1]
            first.append(guard.reconcile())
            reader.outgoing = seen

        chain.outgoing.append(leaves(8, OTHER_TX))
        chain.meanwhile = meanwhile
        guard.reconcile()
        rows = [row["transaction"] for row in guard.reconcile().unexplained]
        assert (sorted(rows), len(alarms(guard))) == ([TX, OTHER_TX], 2)


def test_a_look_that_a_dead_rpc_interrupts_forgets_nothing():
    chain = Wallet(outgoing=[leaves(7), leaves(8, OTHER_TX)])
    chain.nonces[OTHER_TX] = Unreadable("it died")
    with make_guard(chains=chain) as guard:
        signed(guard)
        found = guard.reconcile()
        assert (found.unexplained, found.unreadable) == ([], {NETWORK: "nothing is known"})
        assert alarms(guard) == []
        chain.nonces.clear()
        found = guard.reconcile()
        assert [row["transaction"] for row in found.unexplained] == [TX, OTHER_TX]
        assert chain.looks[-1][1] is None, "it begins where the broken look began"


def test_what_is_too_much_for_one_look_goes_on_in_the_next():
    chain = Wallet(outgoing=[leaves(n, f"0x{n:064x}") for n in range(1, 8)], at_most=3)
    with make_guard(chains=chain) as guard:
        signed(guard)
        for complete, count in ((False, 3), (False, 6), (True, 7)):
            found = guard.reconcile()
            assert (found.complete, len(found.unexplained)) == (complete, count)
        assert sorted(row["amount"] for row in found.unexplained) == [n * 1000 for n in range(1, 8)]


def test_each_token_of_a_wallet_is_compared_by_itself():
    other = Asset(NETWORK, OTHER_TOKEN, "EURT", 2, "Euro Thing", "1", usd="1.10")
    chain = Wallet(outgoing=[leaves(7), leaves(300, OTHER_TX, token=other.contract)])
    with make_guard(chains=chain, assets=[other]) as guard:
        signed(guard)
        found = guard.reconcile()
        rows = {row["symbol"]: (row["transaction"], row["amount"]) for row in found.unexplained}
        assert rows == {"USDC": (TX, 7_000), "EURT": (OTHER_TX, 3_300_000_000)}
        assert len(guard.reconcile().unexplained) == 2


def test_a_payment_that_had_ended_is_proven_by_the_comparison_alone():
    chain = Wallet()
    with make_guard(chains=chain) as guard:
        session = guard.session("s", budget="$1.00")
        hold_id = client(session, Shop(required(upto()))).get(URL).extensions["x402guard"].hold_id
        hold = guard.shell.store.hold(hold_id)
        past = Unused(hold.deadline_unix + 1)  # by a block that is undone later, however deep
        scope = Scope(holds=(hold_id,), marks=weigh_marks(hold, past))
        ended = guard.shell.store.transact(scope, lambda view: weigh_proven(view, hold_id, past))
        assert ended.state == "expired"
        chain.outgoing.append(leaves(12_345, payee=PAYEE))
        chain.nonces[TX] = int(hold_id, 16)
        chain.finding = lambda hold: Settled(12_345, hold.claim.transaction, 0, final=True)
        found = guard.reconcile()
        assert (found.unexplained, session.spent) == ([], Decimal("0.012345"))


def test_a_nonce_of_ours_that_moved_another_amount_is_a_stranger():
    """The Transfer stands beside a settlement in its transaction: what proves the payment is another log."""
    chain = Wallet()
    with make_guard(chains=chain) as guard:
        session, hold_id = signed(guard)
        chain.outgoing.append(leaves(999))
        chain.nonces[TX] = int(hold_id, 16)
        chain.finding = Settled(10_000, TX, 5, final=True)
        assert [row["amount"] for row in guard.reconcile().unexplained] == [999_000]
        assert session.spent == CENT


def test_nothing_is_compared_in_books_that_have_had_no_key():
    chain = Wallet(outgoing=[leaves(7)])
    with make_guard(chains=chain, signer=None) as guard:
        assert guard.reconcile().unexplained == []
        assert chain.looks == []


def test_the_facilitator_that_an_upto_names_is_in_what_is_told():
    told, chain = [], Wallet(finding=Settled(40_000, TX, 0, final=True))
    with make_guard(chains=chain, on_notice=told.append) as guard:
        session = guard.session("s", budget="$1.00")
        client(session, Shop(required(upto()), paid=answering(**claimed()))).get(URL)
        guard.reconcile()
        facts = next(notice.facts for notice in told if notice.kind == "claim_contradicted")
        assert (facts["payee"], facts["facilitator"], facts["chain"]) == (PAYEE, FACILITATOR, "0.04")

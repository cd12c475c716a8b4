"""Holds that a ledger's server has lost are entered again, each once, and count as they did."""

import pytest

from tests.support.ledger import Books, a_hold, usd
from x402guard.frozen import replace
from x402guard.kernel.proofs import PayAgain
from x402guard.kernel.rows import WALLET, Delivery, Evidence, HoldKind, HoldState, Nanos, NodeState
from x402guard.ledger.events import Capture, Expire
from x402guard.ledger.lost import Written, count_again, trip_rolled_back
from x402guard.ledger.purchases import close_purchase


def lost(hold_id, amount="$0.10", **changes):
    hold = a_hold(hold_id, amount, changes.pop("node", "s"), kind=changes.pop("kind", HoldKind.TOOL))
    path = (hold.node_id, *changes.pop("above", (WALLET,)))
    return Written(replace(hold, **changes), {"kind": str(hold.kind), "amount": hold.amount}, path)


def enter(books, *written):
    nodes = {WALLET, *(node_id for each in written for node_id in each.path)}
    holds = [each.hold.id for each in written]
    return books.change(lambda view: count_again(view, written), nodes=nodes, holds=holds, lost=holds)


def test_each_counts_as_it_did_and_once():
    books = Books(wallet="$5.00")
    books.hold("known", "$0.10", kind=HoldKind.TOOL)
    written = (
        lost("known"),
        lost("captured", state=HoldState.CAPTURED, captured=usd("$0.07"), evidence=Evidence.ASSUMED, closed_ms=1),
        lost("held"),
        lost("voided", state=HoldState.VOIDED),
        lost("expired", state=HoldState.EXPIRED),
        lost("elsewhere", node="gone"),
        lost("paid", kind=HoldKind.PAYMENT, state=HoldState.CAPTURED, captured=usd("$0.10"), evidence=Evidence.CLAIMED),
    )
    assert enter(books, *written) == 4
    assert books.balances("s")[:2] == (usd("$0.07"), usd("$0.30"))
    assert books.balances(WALLET)[:2] == (0, usd("$0.10"))
    paid = books.stored("paid")
    assert (paid.state, paid.captured, paid.delivery) == (HoldState.HELD, 0, Delivery.LOST)
    assert paid.doubt == "the ledger's server has lost it"
    before = books.balances("s"), books.balances(WALLET)
    assert enter(books, *written) == 0
    assert (books.balances("s"), books.balances(WALLET)) == before


def test_past_a_limit_it_is_entered_and_trips():
    books = Books(wallet="$5.00", session="$0.15")
    books.hold("known", "$0.10", kind=HoldKind.TOOL)
    assert enter(books, lost("more")) == 1
    assert books.balances("s")[:2] == (0, usd("$0.20"))
    assert (books.node("s").state, books.node("s").terminated_by) == (NodeState.TRIPPED, "overshoot")


@pytest.mark.parametrize("event", [Expire(1_900_000_000), Capture(Nanos(100_000_000), Evidence.CHAIN)])
def test_the_chain_ends_a_payment_that_was_entered_again(event):
    books = Books(wallet="$5.00")
    enter(books, lost("paid", kind=HoldKind.PAYMENT, chain_evidence=True))
    assert books.step("paid", event).state in (HoldState.EXPIRED, HoldState.CAPTURED)


CORRECTED = {
    "a bill above what is held": (None, "$0.50", "$0.50"),
    "a bill below what is held": (None, "$0.05", "$0.10"),
    "a correction upwards": ("$0.10", "$0.30", "$0.30"),
    "a correction downwards": ("$0.10", "$0.05", "$0.10"),
}


@pytest.mark.parametrize("corrected", CORRECTED)
def test_what_was_lost_of_a_hold_that_is_there_counts_again_if_it_is_more(corrected):
    here, written, counted = CORRECTED[corrected]
    books = Books(wallet="$5.00", session="$0.40")
    books.hold("known", "$0.10", kind=HoldKind.LLM)
    if here is not None:
        books.step("known", Capture(usd(here), Evidence.ASSUMED))
    known = lost(
        "known", kind=HoldKind.LLM, state=HoldState.CAPTURED, captured=usd(written), evidence=Evidence.PROVIDER_USAGE
    )
    enter(books, known)
    enter(books, known)
    assert sum(books.balances("s")[:2]) == usd(counted)
    assert (books.node("s").state is NodeState.TRIPPED) is (usd(counted) > usd("$0.40"))


@pytest.mark.parametrize("here", [Delivery.OPEN, Delivery.LOST, Delivery.DONE, Delivery.FORGIVEN])
@pytest.mark.parametrize("written", [Delivery.OPEN, Delivery.LOST, Delivery.DONE, Delivery.FORGIVEN])
@pytest.mark.parametrize("presented", [0, 1])
def test_a_purchase_that_was_not_handed_over_in_the_end_is_open_again(here, written, presented):
    books = Books(wallet="$5.00")
    hold = books.hold("paid", "$0.10")
    if here is Delivery.FORGIVEN:
        books.change(lambda view: close_purchase(view, "paid", PayAgain()), holds=("paid",))
    else:
        books.change(lambda view: view.put_hold(replace(view.known_hold("paid"), delivery=here)), holds=("paid",))
    enter(books, Written(replace(hold, delivery=written, presented=presented), {}, ("s", WALLET)))
    opened = here is Delivery.DONE and written in (Delivery.OPEN, Delivery.LOST) and presented == 0
    assert books.stored("paid").delivery is (written if opened else here)


def test_below_a_budget_that_is_lost_it_counts_in_the_next_one_above():
    books = Books(wallet="$5.00")
    assert enter(books, lost("far", node="gone", above=("gone too", "s", WALLET))) == 1
    assert (books.balances("s")[1], books.balances(WALLET)[1]) == (usd("$0.10"), 0)


def test_the_wallet_is_tripped_once():
    books = Books(wallet="$5.00")
    for _ in range(2):
        books.change(lambda view: trip_rolled_back(view, "lost"), nodes=(WALLET,))
    assert (books.node(WALLET).state, books.node(WALLET).terminated_by) == (NodeState.TRIPPED, "rolled_back")
    assert [entry.event for entry in books.store.tail(WALLET, 0)].count("trip") == 1

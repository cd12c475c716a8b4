"""Holds that a ledger's server has lost are entered again, each once, and count as they did."""

import pytest

from tests.support.ledger import Books, a_hold, usd
from x402guard.frozen import replace
from x402guard.ledger.model import WALLET, Delivery, Evidence, HoldKind, HoldState, NodeState
from x402guard.ledger.owner import Written, count_again
from x402guard.ledger.transitions import Capture, Expire
from x402guard.money import Nanos


def lost(hold_id, amount="$0.10", **changes):
    hold = a_hold(hold_id, amount, changes.pop("node", "s"), kind=changes.pop("kind", HoldKind.TOOL))
    return Written(replace(hold, **changes), {"kind": str(hold.kind), "amount": hold.amount})


def enter(books, *written):
    nodes = {WALLET, *(each.hold.node_id for each in written)}
    holds = [each.hold.id for each in written]
    return books.change(lambda view: count_again(view, written, "lost"), nodes=nodes, holds=holds)


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
    paid = books.store.hold("paid")
    assert (paid.state, paid.captured, paid.delivery) == (HoldState.HELD, 0, Delivery.LOST)
    assert paid.doubt == "the ledger's server has lost it"
    assert (books.node(WALLET).state, books.node(WALLET).terminated_by) == (NodeState.TRIPPED, "rolled_back")
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

"""One Transfer proves one payment: what a payment holds on to when its proof comes late, moves, or is undone."""

import pytest

from tests.support.ledger import START_MS, Books, an_id, an_intent, usd, weigh_proven
from x402guard.kernel.rows import Claim, Evidence
from x402guard.ledger.evidence import claim_settlement, fitting_payments, receipt_mark, unshown_payee, weigh_marks
from x402guard.ledger.findings import Cancelled, Settled, Unused, Used
from x402guard.ledger.upto_sellers import ceiling_mark

NOW = START_MS // 1000
ALL = 100_000
ONE, TWO = "0x" + "11" * 32, "0x" + "22" * 32


@pytest.fixture
def books():
    """Two payments of $0.10 to one payee that are out."""
    books = Books(session="$0.50")
    for hold_id in ("h1", "h2"):
        books.hold(hold_id, "$0.10", chain_evidence=True, intent=an_intent(int(hold_id[1:]), ALL))
    return books


def show(books, hold_id, finding):
    marks = weigh_marks(books.stored(hold_id), finding)
    return books.change(lambda view: weigh_proven(view, hold_id, finding), nodes=("s",), holds=(hold_id,), marks=marks)


def waiting(books):
    """Return the payments that may explain a Transfer of $0.10 without a nonce."""
    intent = books.stored("h1").payment()
    return [
        each
        for _, each in fitting_payments(
            books.store.marks("unshown", unshown_payee(intent.network, intent.token, intent.payee)), ALL
        )
    ]


def settled(log, transaction=ONE, *, final=True):
    return Settled(ALL, transaction, log, final)


@pytest.mark.parametrize(
    "then",
    [settled(3), Cancelled(ONE, final=True), Unused(NOW + 61)],
    ids=lambda each: type(each).__name__,
)
def test_a_payment_that_is_decided_after_all_explains_no_strangers_transfer(books, then):
    """Its logs were late by one check. A Transfer of its amount to its payee is then no other payment's."""
    show(books, "h1", Used(final=True))
    assert waiting(books) == [an_id("h1")]
    books.clock.tick(62)
    show(books, "h1", then)
    assert waiting(books) == []


def test_a_block_that_may_be_undone_proves_nothing_of_a_payment_that_a_final_one_has_shown(books):
    show(books, "h1", Used(final=True))
    assert show(books, "h1", settled(3, final=False)).proof is None
    assert waiting(books) == [an_id("h1")]
    assert show(books, "h2", settled(3)).proof.endswith("/3")


@pytest.mark.parametrize("undone", [False, True], ids=["seen twice", "seen undone between"])
def test_a_batch_that_is_mined_again_at_other_places_proves_each_of_its_payments(books, undone):
    for hold_id, log in (("h1", 3), ("h2", 5)):
        assert show(books, hold_id, settled(log, final=False)).evidence is Evidence.CHAIN_HEAD
    books.clock.tick(40)
    if undone:
        for hold_id in ("h1", "h2"):
            assert show(books, hold_id, Unused(NOW + 40)).state == "held"
    for hold_id, log in (("h1", 1), ("h2", 3)):
        after = show(books, hold_id, settled(log))
        assert (after.evidence, after.proof.rpartition("/")[2]) == (Evidence.CHAIN, str(log))
    assert show(books, "h1", settled(3)).proof.endswith("/1"), "and no Transfer proves two"


@pytest.mark.parametrize(("transaction", "counts"), [(ONE, "$0"), (TWO, "$0.10")], ids=["the same", "another"])
def test_a_node_behind_the_one_that_showed_a_cancellation_final_reopens_nothing(books, transaction, counts):
    claim = Claim(usd("$0.10"), TWO)
    marks = (
        receipt_mark(books.stored("h1").payment().network, TWO),
        ceiling_mark(books.stored("h1").payment().payee),
    )
    books.change(
        lambda view: claim_settlement(view, "h1", claim, believe=True), nodes=("s",), holds=("h1",), marks=marks
    )
    assert show(books, "h1", Cancelled(ONE, final=True)).captured == 0
    books.clock.tick(2)
    after = show(books, "h1", Cancelled(transaction, final=False))
    assert (after.amount if after.state == "held" else after.captured) == usd(counts)

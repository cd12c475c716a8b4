"""What a reading by fresh eyes has found where several look at once, or are broken off."""

import threading

from tests.support.ledger import START_MS, Books, a_hold, an_intent
from x402guard import LedgerUnavailable
from x402guard.guard.rechecker import Rechecker
from x402guard.ledger.evidence import Settled, Unused, weigh
from x402guard.ledger.model import Evidence, HoldState
from x402guard.x402.settlement import Swept

NOW = START_MS // 1000
TX = "0x" + "ab" * 32


def looked(books, finding):
    marks = () if not isinstance(finding, Settled) else (("proof", f"eip155:84532/{TX}/3"),)
    scope = {"holds": ("h1",), "marks": (*marks, ("upto", an_intent().payee))}
    return books.change(lambda view: weigh(view, "h1", finding), **scope)


def an_upto(books):
    hold = a_hold("h1", "$0.10", chain_evidence=True, now_ms=books.clock.now_ms)
    intent = an_intent(1, 100_000, hold.deadline_unix, scheme="upto", method="permit2")
    books.hold("h1", "$0.10", intent=intent, chain_evidence=True)


def test_an_answer_from_before_the_proof_undoes_nothing():
    """One asks, is slow to write it down, and another has found the proof meanwhile."""
    books = Books()
    an_upto(books)
    slow = Unused(NOW)
    books.clock.tick(5)
    assert looked(books, Settled(12_345, TX, 3, final=True)).state is HoldState.CAPTURED
    after = looked(books, slow)
    assert (after.state, after.evidence, books.node().held) == (HoldState.CAPTURED, Evidence.CHAIN, 0)
    books.close()


def test_a_later_block_that_shows_it_unused_counts_it_in_full_again():
    books = Books()
    an_upto(books)
    looked(books, Settled(12_345, TX, 3, final=True))
    books.clock.tick(45)
    after = looked(books, Unused(NOW + 31))
    assert (after.state, books.node().held) == (HoldState.HELD, after.amount)
    books.close()


def test_a_node_that_is_behind_is_not_taken_for_the_last_to_have_seen_it():
    """Else a block that is undone would be believed only once two looks in a row are further apart than blocks are final."""
    books = Books()
    an_upto(books)
    looked(books, Settled(12_345, TX, 3, final=True))
    for seconds in range(3, 45, 3):
        books.clock.tick(3)
        assert looked(books, Unused(NOW + seconds - 12)).state is HoldState.CAPTURED
    books.clock.tick(3)
    assert looked(books, Unused(NOW + 33)).state is HoldState.HELD
    books.close()


def test_a_look_that_the_books_were_too_busy_for_is_not_the_last():
    """Another process writes for thirty seconds once; the claims are open all the same."""
    looks, again = [], threading.Event()

    def look():
        looks.append(1)
        if len(looks) == 1:
            raise LedgerUnavailable("another process has been writing the ledger for 30 s")
        again.set()
        return Swept(0, more=False)

    rechecker = Rechecker(look)
    rechecker.nudge()
    try:
        assert again.wait(5), "the thread has ended, and claims are open"
    finally:
        rechecker.close()

"""What a block that is undone does to a payment that it had proven: it counts in full until the chain has said it anew."""

import pytest

from tests.support.ledger import START_MS, Books, a_hold, an_intent, usd
from x402guard.ledger.evidence import Cancelled, Settled, Unused, Used, proof_mark, reuse_mark, weigh
from x402guard.ledger.model import Claim, Evidence, HoldState
from x402guard.ledger.transitions import Note
from x402guard.ledger.upto_sellers import ceiling_mark

NOW = START_MS // 1000
ONE, TWO = "0x" + "11" * 32, "0x" + "22" * 32
LATER = Unused(NOW + 40)
LITTLE, MORE, ALL = 12_000, 40_000, 100_000


def settled(amount, transaction=ONE, log=0, *, final=True):
    return Settled(amount, transaction, log, final)


@pytest.fixture
def books():
    """A session of $0.50 with one payment of $0.10 that is out until START + 60 s."""
    books = Books(session="$0.50")
    books.hold("h1", "$0.10", chain_evidence=True)
    return books


def show(books, finding):
    """Weigh a finding; return (state, what counts in nano-dollars, evidence)."""
    hold = books.store.hold("h1")
    marks = [ceiling_mark(hold.payment().payee), reuse_mark("h1")]
    if isinstance(finding, Settled):
        marks.append(proof_mark(hold.payment().network, finding))
    after = books.change(lambda view: weigh(view, "h1", finding), nodes=("s",), holds=("h1",), marks=tuple(marks))
    counts = after.amount if after.state == "held" else after.captured
    node = books.node("s")
    others = sum(hold.amount for hold in books.store.outstanding() if hold.id != "h1")
    assert node.captured + node.held - others == counts == node.granted_in - others
    return str(after.state), counts, None if after.evidence is None else str(after.evidence)


CENTS = {LITTLE: usd("$0.012"), MORE: usd("$0.04"), ALL: usd("$0.10")}
STORIES = {  # what the chain shows, one after the other, and what the books say at the end
    "freed, undone": ([settled(LITTLE), LATER], ("held", ALL, None)),
    "freed, undone, settled anew for more": (
        [settled(LITTLE), LATER, settled(MORE, TWO)],
        ("captured", MORE, "chain"),
    ),
    "freed, undone, and never again": ([settled(LITTLE), LATER, Unused(NOW + 61)], ("expired", 0, None)),
    "freed, in another block that is not final": (
        [settled(LITTLE), settled(MORE, TWO, final=False)],
        ("held", ALL, None),
    ),
    "freed, in another final block": ([settled(LITTLE), settled(MORE, TWO)], ("captured", MORE, "chain")),
    "freed, in another final block for less": ([settled(MORE), settled(LITTLE, TWO)], ("captured", LITTLE, "chain")),
    "freed, seen again": ([settled(LITTLE), settled(LITTLE)], ("captured", LITTLE, "chain")),
    "freed, then the node forgot": ([settled(LITTLE), Used(final=True)], ("captured", LITTLE, "chain")),
    "freed, then a node that is behind": (
        [settled(LITTLE), settled(LITTLE, final=False)],
        ("captured", LITTLE, "chain"),
    ),
    "freed, then a node that stands at an earlier block": (
        [settled(LITTLE), Unused(NOW + 20)],
        ("captured", LITTLE, "chain"),
    ),
    "in full, not final, undone": ([settled(ALL, final=False), LATER], ("held", ALL, None)),
    "in full, not final, undone and dead": ([settled(ALL, final=False), Unused(NOW + 61)], ("captured", 0, "chain")),
    "in full, not final, then final": ([settled(ALL, final=False), settled(ALL)], ("captured", ALL, "chain")),
    "little, not final": ([settled(LITTLE, final=False)], ("held", ALL, None)),
    "by nobody knows what, undone": ([Used(final=False), LATER], ("held", ALL, None)),
    "by nobody knows what, then shown": ([Used(final=True), settled(LITTLE)], ("captured", LITTLE, "chain")),
    "cancelled, not final": ([Cancelled(ONE, final=False)], ("held", ALL, None)),
    "cancelled": ([Cancelled(ONE, final=True)], ("voided", 0, None)),
    "taken, and cancelled too late": ([settled(ALL), Cancelled(TWO, final=True)], ("captured", ALL, "chain")),
    "expired, and taken after all": ([Unused(NOW + 60), settled(ALL)], ("captured", ALL, "chain")),
    "a block from the far future": ([Unused(NOW + 500 * 86_400)], ("held", ALL, None)),
}


@pytest.mark.parametrize("story", STORIES)
def test_what_the_chain_shows_and_takes_back(books, story):
    findings, (state, atomic, evidence) = STORIES[story]
    shown = [show(books, finding) for finding in findings]
    assert shown[-1] == (state, CENTS.get(atomic, 0), evidence)


def test_what_comes_back_past_the_limit_counts_and_trips(books):
    show(books, settled(LITTLE))
    books.hold("h2", "$0.48")
    assert books.node("s").state == "open"
    assert show(books, LATER) == ("held", usd("$0.10"), None)
    assert books.node("s").state == "tripped"


def test_a_claim_is_told_once_to_contradict_the_chain(books):
    books.step("h1", Note(claim=Claim(usd("$0.012"), ONE)))
    show(books, settled(MORE))
    show(books, settled(MORE))
    told = [entry for entry in books.store.entries("s") if "claim_contradicted" in entry.data]
    assert len(told) == 1


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

"""The ledger's table, row by row, with the balances looked at in between."""

import itertools

import pytest

from tests.support.ledger import START_MS, Books, a_transfer, an_id, usd
from x402guard.errors import IllegalTransition
from x402guard.kernel.rows import Claim, Evidence, HoldKind, HoldState, NodeState
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.events import TABLE, Capture, Correct, Expire, Lapse, Note, Void

DIME, CENT = usd("$0.10"), usd("$0.01")
PAST = START_MS // 1000 + 61

EVENTS = [
    Note(doubt="no answer"),
    Capture(CENT, Evidence.CHAIN, a_transfer()),
    Void("never left"),
    Expire(PAST),
    Lapse(),
    Correct(CENT, Evidence.CHAIN, a_transfer()),
]


@pytest.fixture
def books():
    return Books(wallet="$5.00")


def reach(books, state, *, chain=True):
    """Bring hold h1 of $0.10, which may be taken for less, into a state."""
    books.hold("h1", "$0.10", scheme="upto", chain_evidence=chain)
    if state is HoldState.CAPTURED:
        books.step("h1", Capture(DIME, Evidence.CLAIMED))
    elif state is HoldState.VOIDED:
        books.step("h1", Void("not signed"))
    elif state is HoldState.EXPIRED:
        books.step("h1", Expire(PAST))


@pytest.mark.parametrize(
    ("state", "event"),
    list(itertools.product(HoldState, EVENTS)),
    ids=lambda v: v.name if isinstance(v, HoldState) else type(v).__name__,
)
def test_what_is_not_in_the_table_cannot_happen(books, state, event):
    chain = state is HoldState.EXPIRED or not isinstance(event, Lapse)
    reach(books, state, chain=chain)
    books.clock.tick(61)
    before, row = books.balances(), books.stored("h1")
    if (state, type(event)) in TABLE:
        after = books.step("h1", event)
        assert after.state is TABLE[state, type(event)]
        return
    with pytest.raises(IllegalTransition):
        books.step("h1", _other(event))
    assert books.balances() == before
    assert books.stored("h1") == row


def _other(event):
    """The same kind of event with other contents, so that it is no repetition."""
    match event:
        case Void():
            return Void("another reason")
        case Expire():
            return Expire(PAST + 1)
        case Capture():
            return Capture(CENT, Evidence.ASSUMED)
        case _:
            return event


def test_authorize_holds_and_counts_on_every_level(books):
    hold = books.hold("h1", "$0.10")
    assert hold.state is HoldState.HELD
    assert books.balances("s") == (0, DIME, DIME, 0)
    assert books.balances("wallet") == (0, 0, 0, DIME)


def test_note_frees_nothing(books):
    books.hold("h1", "$0.10")
    books.step("h1", Note(doubt="no answer"))
    books.step("h1", Note(claim=Claim(CENT, "0xabc")))
    assert books.balances("s") == (0, DIME, DIME, 0)
    row = books.stored("h1")
    assert (row.doubt, row.claim) == (
        None,
        Claim(CENT, "0xabc"),
    )  # somebody answered, so nobody doubts silence any more


def test_a_smaller_capture_gives_the_rest_straight_back(books):
    books.hold("h1", "$0.10", scheme="upto")
    books.step("h1", Capture(CENT, Evidence.CHAIN, a_transfer()))
    assert books.balances("s") == (CENT, 0, CENT, 0)
    assert books.balances("wallet") == (0, 0, 0, CENT)


@pytest.mark.parametrize("event", [Capture(CENT, Evidence.CLAIMED), Capture(CENT, Evidence.CHAIN, a_transfer())])
def test_an_exact_payment_is_captured_for_no_less_whoever_says_so(books, event):
    books.open_kernel(unsafe_trust_receipts=True)
    books.hold("h1", "$0.10")
    books.step("h1", Note(claim=Claim(CENT, "")))
    with pytest.raises(
        IllegalTransition, match="an exact payment of 100000000 would be captured at 10000000"
    ) as caught:
        books.step("h1", event)
    assert (caught.value.rule, caught.value.row) == ("giving back", f"hold {an_id('h1')}")
    assert books.balances() == (0, DIME, DIME, 0)


@pytest.mark.parametrize(
    ("event", "trusting", "claims"),
    [
        (Capture(CENT, Evidence.CLAIMED), False, True),
        (Capture(CENT, Evidence.CLAIMED), True, False),
        (Capture(CENT, Evidence.CHAIN), True, True),
    ],
    ids=["claims are not trusted", "nothing was claimed", "no Transfer is named"],
)
def test_an_upto_is_captured_for_less_by_a_proof_or_a_claim_that_the_owner_trusts(books, event, trusting, claims):
    books.open_kernel(unsafe_trust_receipts=trusting)
    books.hold("h1", "$0.10", scheme="upto")
    if claims:
        books.step("h1", Note(claim=Claim(CENT, "")))
    with pytest.raises(IllegalTransition, match="90000000 would come back by no proof"):
        books.step("h1", event)
    assert books.balances() == (0, DIME, DIME, 0)


@pytest.mark.parametrize("event", [Void("not signed"), Expire(PAST)])
def test_void_and_expire_give_everything_back(books, event):
    books.hold("h1", "$0.10", chain_evidence=True)
    books.step("h1", event)
    assert books.balances("s") == books.balances("wallet") == (0, 0, 0, 0)


def test_a_payment_never_captures_more_than_was_signed(books):
    books.hold("h1", "$0.10")
    with pytest.raises(IllegalTransition, match="more than the"):
        books.step("h1", Capture(DIME + 1, Evidence.CHAIN))
    assert books.balances() == (0, DIME, DIME, 0)


def test_an_llm_call_captures_what_is_owed_and_trips_what_it_exceeds(books):
    books.hold("h1", "$0.90", kind=HoldKind.LLM)
    books.step("h1", Capture(usd("$1.20"), Evidence.PROVIDER_USAGE))
    assert books.balances("s") == (usd("$1.20"), 0, usd("$1.20"), 0)
    assert books.node("s").state is NodeState.TRIPPED
    assert books.node("s").terminated_by == "overshoot"
    assert books.node("wallet").state is NodeState.OPEN


def test_expire_needs_a_block_past_the_deadline(books):
    books.hold("h1", "$0.10", chain_evidence=True)
    with pytest.raises(IllegalTransition, match="could still take it"):
        books.step("h1", Expire(START_MS // 1000 + 59))
    books.step("h1", Expire(START_MS // 1000 + 60))  # EIP-3009 is good while t < validBefore
    assert books.balances() == (0, 0, 0, 0)


def test_permit2_is_good_for_one_second_longer(books):
    from tests.support.ledger import an_intent

    intent = an_intent(7, method="permit2")
    books.hold("h1", "$0.10", chain_evidence=True, intent=intent)
    with pytest.raises(IllegalTransition, match="could still take it"):
        books.step("h1", Expire(START_MS // 1000 + 60))
    books.step("h1", Expire(START_MS // 1000 + 61))


def test_a_payment_that_no_chain_can_tell_about_lapses_to_the_maximum(books):
    books.hold("h1", "$0.10")
    with pytest.raises(IllegalTransition, match="not passed"):
        books.step("h1", Lapse())
    books.clock.tick(61)
    after = books.step("h1", Lapse())
    assert (after.captured, after.evidence) == (DIME, Evidence.ASSUMED)
    assert books.balances() == (DIME, 0, DIME, 0)


def test_a_payment_on_a_chain_never_lapses(books):
    books.hold("h1", "$0.10", chain_evidence=True)
    books.clock.tick(3600)
    with pytest.raises(IllegalTransition, match="the chain can prove"):
        books.step("h1", Lapse())


@pytest.mark.parametrize(
    ("stands", "amount", "evidence", "allowed"),
    [
        (Evidence.CLAIMED, DIME, Evidence.CHAIN, True),
        (Evidence.CLAIMED, CENT, Evidence.CHAIN, True),
        (Evidence.CLAIMED, CENT, Evidence.CHAIN_HEAD, False),
        (Evidence.CLAIMED, DIME, Evidence.CHAIN_HEAD, True),
        (Evidence.ASSUMED, DIME, Evidence.CLAIMED, True),
        (Evidence.ASSUMED, CENT, Evidence.CLAIMED, False),
        (Evidence.CHAIN, CENT, Evidence.CLAIMED, False),
        (Evidence.CHAIN, CENT, Evidence.CHAIN_HEAD, False),
        (Evidence.CHAIN_HEAD, CENT, Evidence.CHAIN_HEAD, True),
        (Evidence.CHAIN_HEAD, CENT, Evidence.CHAIN, True),
        (Evidence.CLAIMED, CENT, Evidence.CLAIMED, False),
    ],
)
def test_only_better_evidence_corrects_and_only_a_final_chain_corrects_downwards(
    books, stands, amount, evidence, allowed
):
    books.open_kernel(most_exposed=DIME)
    books.hold("h1", "$0.10", scheme="upto")
    books.step("h1", Capture(DIME, stands))
    proof = a_transfer() if evidence in (Evidence.CHAIN, Evidence.CHAIN_HEAD) else None
    if allowed:
        assert books.step("h1", Correct(amount, evidence, proof)).captured == amount
        assert books.balances() == (amount, 0, amount, 0)
    else:
        with pytest.raises(IllegalTransition):
            books.step("h1", Correct(amount, evidence, proof))
        assert books.balances() == (DIME, 0, DIME, 0)


@pytest.mark.parametrize("end", [Void("never left"), Expire(PAST)])
def test_what_happened_happened_even_past_the_limit(end):
    books = Books(wallet="$0.10", session="$0.10")
    books.hold("h1", "$0.10", chain_evidence=True)
    books.step("h1", end)
    books.hold("h2", "$0.10", chain_evidence=True)
    books.step("h2", Capture(DIME, Evidence.CHAIN))
    books.step("h1", Correct(DIME, Evidence.CHAIN))
    assert books.balances("s") == (2 * DIME, 0, 2 * DIME, 0)
    assert books.node("s").state is books.node("wallet").state is NodeState.TRIPPED
    refusal = books.hold("h3", "$0.01")
    assert isinstance(refusal, Refusal)
    assert refusal.rule == "session_tripped"


@pytest.mark.parametrize("event", [Capture(CENT, Evidence.CHAIN, a_transfer()), Void("not signed"), Expire(PAST)])
def test_the_same_event_again_changes_nothing(books, event):
    books.hold("h1", "$0.10", scheme="upto", chain_evidence=True)
    once = books.step("h1", event)
    entries = len(books.store.entries("wallet"))
    assert books.step("h1", event) == once
    assert len(books.store.entries("wallet")) == entries


def test_the_same_authorize_again_is_the_same_hold(books):
    first = books.hold("h1", "$0.10")
    assert books.hold("h1", "$0.10") == first
    assert books.balances() == (0, DIME, DIME, 0)
    with pytest.raises(IllegalTransition, match="other contents"):
        books.hold("h1", "$0.20")
    assert books.balances() == (0, DIME, DIME, 0)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            Capture(CENT, Evidence.CLAIMED, usage={"b": 1, "a": 2}),
            '{"amount": 10000000, "event": "capture", "evidence": "claimed", "note": null, "proof": null, "usage": {"a": 2, "b": 1}}',
        ),
        (Void("not signed: \ud800 é"), r'{"event": "void", "reason": "not signed: \ud800 \u00e9"}'),
        (Lapse(), '{"event": "lapse"}'),
    ],
)
def test_the_event_that_ended_a_hold_is_written_as_each_version_has_written_it(books, event, text):
    """The same event again is known by this text, in a ledger of any version."""
    books.open_kernel(unsafe_trust_receipts=True)
    books.hold("h1", "$0.10", scheme="upto")
    books.step("h1", Note(claim=Claim(CENT, "")))
    books.clock.tick(61)
    after = books.step("h1", event)
    assert after.ended_by == text
    assert books.step("h1", event) == after


def test_a_claim_beside_words_that_no_file_can_store_is_written(books):
    books.hold("h1", "$0.10")
    books.step("h1", Note(doubt="no answer", claim=Claim(CENT, "0xabc"), words="a \ud800 b"))
    [entry] = [each for each in books.store.entries("s") if each.event == "note"]
    assert entry.facts() == {
        "claim": {"amount": CENT, "transaction": "0xabc"}, "doubt": "no answer", "words": "a ? b"
    }  # fmt: skip

"""What a block that is undone does to a payment that it had proven: it counts in full until the chain has said it anew."""

import pytest

from tests.support.ledger import START_MS, Books, an_id, an_intent, usd, weigh_proven
from x402guard.frozen import replace
from x402guard.kernel.rows import WALLET, Claim, Evidence, HoldState, NodeKind, NodeState
from x402guard.ledger.events import Note
from x402guard.ledger.evidence import EXPOSED, explain, fitting_payments, weigh_marks
from x402guard.ledger.findings import Cancelled, Settled, Unused, Used
from x402guard.ledger.sessions import NodeRequest, check_window, open_node

NOW = START_MS // 1000
ONE, TWO, THREE = "0x" + "11" * 32, "0x" + "22" * 32, "0x" + "33" * 32
LATER = Unused(NOW + 40)
LITTLE, MORE, ALL = 12_000, 40_000, 100_000


def settled(amount, transaction=ONE, log=0, *, final=True):
    return Settled(amount, transaction, log, final)


def out(scheme):
    """A session of $0.50 with one payment of $0.10 that is out until START + 60 s."""
    books = Books(session="$0.50")
    books.hold("h1", "$0.10", scheme=scheme, chain_evidence=True)
    return books


@pytest.fixture
def books():
    """Books whose payment may be taken for less."""
    return out("upto")


def show(books, finding, most=0):
    """Weigh a finding; return (state, what counts in nano-dollars, evidence)."""
    hold = books.stored("h1")
    marks = weigh_marks(hold, finding)
    after = books.change(
        lambda view: weigh_proven(view, "h1", finding, most_exposed=most), nodes=("s",), holds=("h1",), marks=marks
    )
    counts = after.amount if after.state == "held" else after.captured
    node = books.node("s")
    others = sum(hold.amount for hold in books.store.outstanding() if hold.id != an_id("h1"))
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
    "cancelled": ([Cancelled(ONE, final=True)], ("voided", 0, "chain")),
    "cancelled, undone": ([Cancelled(ONE, final=True), LATER], ("held", ALL, None)),
    "cancelled, and taken by another final block": (
        [Cancelled(ONE, final=True), settled(LITTLE, TWO)],
        ("captured", LITTLE, "chain"),
    ),
    "cancelled, and taken by a block that is not final": (
        [Cancelled(ONE, final=True), settled(LITTLE, TWO, final=False)],
        ("captured", ALL, "chain_head"),
    ),
    "taken, and cancelled too late": ([settled(ALL), Cancelled(TWO, final=True)], ("captured", ALL, "chain")),
    "expired, and taken after all": ([Unused(NOW + 60), settled(ALL)], ("captured", ALL, "chain")),
    "a block from the far future": ([Unused(NOW + 500 * 86_400)], ("held", ALL, None)),
}


def takes_less(findings):
    return any(isinstance(each, Settled) and each.amount_atomic < ALL for each in findings)


@pytest.mark.parametrize("story", STORIES)
def test_what_the_chain_shows_and_takes_back(story):
    findings, (state, atomic, evidence) = STORIES[story]
    books = out("upto" if takes_less(findings) else "exact")
    shown = [show(books, finding) for finding in findings]
    assert shown[-1] == (state, CENTS.get(atomic, 0), evidence)


def test_what_comes_back_past_the_limit_counts_and_trips(books):
    show(books, settled(LITTLE))
    books.hold("h2", "$0.48")
    assert books.node("s").state == "open"
    assert show(books, LATER) == ("held", usd("$0.10"), None)
    assert books.node("s").state == "tripped"


ELSEWHERE = {
    "another block takes all of it": settled(ALL, TWO, final=False),
    "another block takes more of it": settled(MORE, TWO, final=False),
    "another block takes an unknown part": Used(final=False),
    "another block cancels it": Cancelled(TWO, final=False),
}


@pytest.mark.parametrize(
    "after", [LATER, settled(ALL, TWO), settled(LITTLE, TWO, final=False)], ids=["unused", "final", "head"]
)
def test_a_cancellation_that_is_undone_counts_in_full_and_trips_the_budget_that_it_passes(books, after):
    show(books, Cancelled(ONE, final=True))
    books.hold("h2", "$0.48")
    assert show(books, after)[1] == usd("$0.10")
    assert books.node("s").state == "tripped"


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_what_another_block_does_counts_in_full_and_trips_the_budget_that_it_passes(books, elsewhere):
    """A final block had taken little and is undone, the room was used again, and the other block can be undone too."""
    show(books, settled(LITTLE))
    books.hold("h2", "$0.48")
    assert show(books, ELSEWHERE[elsewhere])[1] == usd("$0.10")
    assert books.node("s").state == "tripped"


def test_a_claim_is_told_once_to_contradict_the_chain(books):
    books.step("h1", Note(claim=Claim(usd("$0.012"), ONE)))
    show(books, settled(MORE))
    show(books, settled(MORE))
    told = [entry for entry in books.store.entries("s") if "claim_contradicted" in entry.data]
    assert len(told) == 1


TX = "0x" + "ab" * 32


def looked(books, finding):
    marks = weigh_marks(books.stored("h1"), finding)
    return books.change(lambda view: weigh_proven(view, "h1", finding), holds=("h1",), marks=marks)


def an_upto(books):
    books.hold("h1", "$0.10", scheme="upto", chain_evidence=True)


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
        after = looked(books, Unused(NOW + seconds - 12))
        # It was asked now, or sixteen of its kind would keep a check from all others.
        assert (after.state, after.checked_ms) == (HoldState.CAPTURED, books.clock.now_ms)
    books.clock.tick(3)
    assert looked(books, Unused(NOW + 33)).state is HoldState.HELD
    books.close()


DAY_S = 86_400


def two_days(first, second, shows=None, scheme="exact"):
    """A team's daily dollar: one payment at the end of a day, shown by a block (not final by default); another one the next day."""
    books = Books(session=None)
    books.open_kernel(most_exposed=usd("$5"))
    window = check_window("day", "UTC")
    request = NodeRequest("team", WALLET, NodeKind.BUDGET, "team", usd("$1.00"), "", window=window)
    books.change(lambda view: open_node(view, request), nodes=("team", WALLET))
    books.open("s", "$5.00", parent="team")
    midnight = (books.clock.now_ms // 1000 // DAY_S + 1) * DAY_S
    books.clock.tick(midnight - books.clock.now_ms / 1000 - 13)
    atomic = usd(first) // 1000
    books.hold("h1", first, scheme="upto" if shows else scheme, chain_evidence=True, deadline_s=300)
    shown(books, shows or settled(atomic, final=False), most=usd("$5") if shows else 0)
    books.clock.tick(20)
    books.hold("h2", second, chain_evidence=True, deadline_s=300)
    assert (books.node("team").spent, books.node("team").live) == (0, usd(second))
    return books, atomic


def shown(books, finding, most=0):
    marks = weigh_marks(books.stored("h1"), finding)
    return books.change(lambda view: weigh_proven(view, "h1", finding, most_exposed=most), holds=("h1",), marks=marks)


def test_a_block_of_yesterday_that_is_undone_counts_today_and_trips_a_budget_that_it_passes():
    books, _ = two_days("$0.60", "$0.70")
    books.clock.tick(40)
    assert shown(books, Unused(books.clock.now_ms // 1000 + 31)).state is HoldState.HELD
    team = books.node("team")
    assert (team.counted, team.state) == (usd("$1.30"), NodeState.TRIPPED)


def test_a_transaction_of_yesterday_that_moved_within_its_block_stays_in_yesterday():
    books, atomic = two_days("$0.60", "$0.70")
    books.clock.tick(40)
    after = shown(books, settled(atomic, log=3, final=False))
    team = books.node("team")
    assert (after.state, team.counted, team.state) == (HoldState.CAPTURED, usd("$0.70"), NodeState.OPEN)
    shown(books, settled(atomic, log=3))
    assert books.node("team").counted == usd("$0.70")


def test_one_taken_for_less_in_another_block_of_today_counts_in_full_until_that_block_is_final():
    books, atomic = two_days("$0.20", "$0.70", scheme="upto")
    books.clock.tick(40)
    assert shown(books, settled(atomic // 2, TWO, final=False)).state is HoldState.HELD
    assert books.node("team").counted == usd("$0.90")


@pytest.mark.parametrize(
    "today",
    [
        [settled(600_000, TWO, final=False)],
        [settled(600_000, TWO)],
        [Used(final=False)],
        [Used(final=False), settled(600_000, TWO)],
        [settled(300_000, TWO, final=False), settled(300_000, TWO)],
        [Cancelled(TWO, final=False), Used(final=True)],
        [settled(10_000, TWO, final=False), settled(600_000, THREE)],
        [settled(10_000, TWO, final=False), settled(600_000, THREE, final=False), settled(600_000, THREE)],
        [settled(10_000, TWO, final=False), Used(final=True)],
        [settled(10_000, TWO, final=False), Used(final=False), Used(final=True)],
    ],
    ids=[
        "head",
        "final",
        "used",
        "used, then final",
        "less",
        "cancelled, then used",
        "the same, then final",
        "the same, then head",
        "the same, then used",
        "the same, then used at the head",
    ],
)
@pytest.mark.parametrize("was_final", [True, False])
def test_one_of_yesterday_that_is_taken_for_more_in_a_block_of_today_counts_today(was_final, today):
    """Its room was used again yesterday, so what it takes now has room only in the window of today."""
    books, _ = two_days("$0.60", "$0.30", shows=settled(10_000, final=was_final))
    books.clock.tick(40)
    for finding in today:
        shown(books, finding)
    held, team = books.stored("h1"), books.node("team")
    assert held.state is HoldState.CAPTURED
    more = held.captured - usd("$0.01") * (today == [settled(600_000, TWO)])  # corrected, not opened anew
    assert team.counted == usd("$0.30") + more


@pytest.mark.parametrize(
    ("amount", "fits"),
    [
        (60_000, ["small", "exact", "large"]),
        (50_000, ["small", "large"]),
        (70_000, ["exact", "large"]),
        (99_000, ["large"]),
        (100_001, []),
    ],
)
def test_a_transfer_without_a_nonce_is_explained_by_the_smallest_payment_that_fits(amount, fits):
    unshown = {"payee/la": {"holds": {"large": "100000"}}, "payee/ex": {"holds": {"exact": "=70000", "small": "60000"}}}
    fits = [each for each in fits if each != "exact" or amount == 70_000]
    found = fitting_payments(unshown, amount)
    assert [hold_id for _, hold_id in found] == fits
    assert all(hold_id in unshown[key]["holds"] for (_, key), hold_id in found)


def test_an_exact_payment_explains_its_amount_before_an_upto_of_that_ceiling():
    unshown = {"payee": {"holds": {"upto": "70000", "exact": "=70000"}}}
    assert fitting_payments(unshown, 70_000) == [(("unshown", "payee"), "exact"), (("unshown", "payee"), "upto")]


def test_a_transfer_that_another_reconciliation_has_explained_is_explained():
    books, key, proof = Books(), ("unshown", "somewhere"), ("proof", "p")
    books.change(lambda view: view.put_mark(proof, {"hold": "h1"}), marks=(proof,))
    assert books.change(lambda view: explain(view, key, proof, "h2"), marks=(key, proof))


def test_a_payment_that_another_reconciliation_has_used_explains_no_second_transfer():
    books, key = Books(), ("unshown", "somewhere")
    books.change(lambda view: view.put_mark(key, {"holds": {"h1": "5", "h2": "5"}}), marks=(key,))
    for proof, explained in ((("proof", "first"), True), (("proof", "second"), False)):
        assert books.change(lambda view, p=proof: explain(view, key, p, "h1"), marks=(key, proof)) == explained
    assert books.store.marks(*key)["somewhere"] == {"holds": {"h2": "5"}}


def test_a_payment_explains_one_transfer_however_often_the_chain_is_asked():
    books = Books()
    books.hold("h1", "$0.10", chain_evidence=True)
    shown(books, Used(final=True))
    payment = books.stored("h1").payment()
    for proof, explained in ((("proof", "first"), 1), (("proof", "second"), 0)):
        found = fitting_payments(books.store.marks("unshown", ""), payment.amount_atomic)
        assert len(found) == explained
        for key, hold_id in found:
            assert books.change(lambda view, k=key, h=hold_id, p=proof: explain(view, k, p, h), marks=(key, proof))
        books.clock.tick(60)
        shown(books, Used(final=True))


@pytest.mark.parametrize("where", ["memory://", "sqlite"])
def test_a_used_nonce_without_a_transaction_is_looked_up_for_another_day(where, tmp_path):
    books = Books(where if where == "memory://" else f"sqlite:///{tmp_path / 'l.db'}")
    an_upto(books)
    shown(books, Used(final=True))
    deadline = books.stored("h1").deadline_unix
    for later_s, asked in ((1, True), (DAY_S, True), (DAY_S + 1, False)):
        assert (books.store.unsettled(deadline + later_s) == [an_id("h1")]) == asked
    assert shown(books, settled(LITTLE)).captured == usd("$0.012")
    assert books.store.unsettled(deadline + 1) == []


HEAD = {"final": False}


def exposed(books):
    return books.store.marks(*EXPOSED).get(EXPOSED[1], {"nanos": 0})["nanos"]


def test_a_remainder_is_used_before_its_block_is_final_only_within_the_owners_exposure(books):
    least = ALL - LITTLE
    remainder = usd("$0.10") - CENTS[LITTLE]
    books.open_kernel(most_exposed=remainder)
    assert show(books, settled(LITTLE, **HEAD), most=remainder - 1) == ("held", usd("$0.10"), None)
    assert (exposed(books), least) == (0, 88_000)
    assert show(books, settled(LITTLE, **HEAD), most=remainder) == ("captured", CENTS[LITTLE], "chain_head")
    assert exposed(books) == remainder
    assert show(books, settled(LITTLE)) == ("captured", CENTS[LITTLE], "chain")
    assert exposed(books) == 0


@pytest.mark.parametrize(
    "after", [LATER, settled(MORE, TWO, **HEAD), Used(final=False)], ids=["undone", "anew", "used"]
)
def test_a_block_that_is_undone_makes_the_remainder_count_again(books, after):
    remainder = usd("$0.10") - CENTS[LITTLE]
    books.open_kernel(most_exposed=remainder)
    show(books, settled(LITTLE, **HEAD), most=remainder)
    books.clock.tick(40)
    assert show(books, after)[1] == usd("$0.10")
    assert exposed(books) == 0


def test_the_exposure_is_one_sum_for_all_payments(books):
    books.hold("h2", "$0.10", scheme="upto", chain_evidence=True)
    remainder = usd("$0.10") - CENTS[LITTLE]
    books.open_kernel(most_exposed=remainder * 2)
    show(books, settled(LITTLE, **HEAD), most=remainder * 3 // 2)
    second = books.stored("h2")
    finding = settled(LITTLE, TWO, 1, final=False)

    def weighs(most):
        marks = weigh_marks(second, finding)
        return books.change(
            lambda view: weigh_proven(view, "h2", finding, most_exposed=most), nodes=("s",), holds=("h2",), marks=marks
        )

    assert weighs(remainder * 3 // 2).state == "held"
    assert weighs(remainder * 2).state == "captured"
    assert exposed(books) == remainder * 2


BASE_USDC = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"


@pytest.mark.parametrize(("ahead_s", "frees"), [(0, True), (59, True), (61, False), (801, False)])
@pytest.mark.parametrize("state", ["held", "captured"])
def test_a_block_from_the_future_frees_no_payment_that_is_still_good(state, ahead_s, frees):
    """By the ledger's own clock: one endpoint that lies about the time would else let another payment be signed."""
    books = Books(session="$0.50")
    intent = replace(an_intent(), network="eip155:8453", chain_id=8453, token=BASE_USDC)
    books.hold("h1", "$0.10", intent=intent, chain_evidence=True, deadline_s=ahead_s)
    if state == "captured":
        show(books, settled(ALL, final=False))
    _, counts, _ = show(books, Unused(NOW + ahead_s))
    assert (counts == 0) is frees

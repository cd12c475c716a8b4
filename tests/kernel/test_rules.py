"""What each clause of the rules lifecycle, worth and once says, on rows by hand: one row of a table for each."""

import pytest
from msgspec.structs import replace

from tests.kernel.rows import LLM, NEW, NOW_S, ONE, TEN, TOKEN, TOOL, UPTO, Rows, captured, ended, node, says
from tests.support.ledger import START_MS, a_hold
from x402guard.errors import IllegalTransition
from x402guard.kernel.change_set import Step, Token
from x402guard.kernel.commit import check_worth
from x402guard.kernel.proofs import Billed, ByOwner, Lost, PayAgain, Stated, Undone, Unsent, Unsigned
from x402guard.kernel.rows import (
    MAX_NANOS,
    WALLET,
    Delivery,
    Evidence,
    HoldKind,
    HoldState,
    Nanos,
    NodeKind,
    Purpose,
    Window,
)

DAY = Window("day", "UTC")
DAY_MS = 86_400_000
LIFECYCLE = "lifecycle"
NOTHING = ("", "")


def intent(**fields):
    return replace(NEW.intent, **fields)


def of(hold):
    return hold.intent.network, hold.intent.token, hold.intent.payer, hold.id


DEAD = NOW_S - 1
BEGUN = {
    "as it should be": ({}, *NOTHING),
    "of nothing": ({"amount": Nanos(0)}, LIFECYCLE, "it would reserve 0"),
    "the most there is": ({"amount": Nanos(MAX_NANOS)}, "room", "it does not fit"),
    "more than there is": ({"amount": Nanos(MAX_NANOS + 1)}, LIFECYCLE, "it would reserve"),
    "tokens in a session": ({"kind": HoldKind.TOKENS, "intent": None}, LIFECYCLE, "lies in no such node"),
    "a tool with an intent": ({"kind": HoldKind.TOOL}, LIFECYCLE, "what has an intent is a payment"),
    "a payment without one": ({"intent": None}, LIFECYCLE, "what has an intent is a payment"),
    "its deadline is over": ({"deadline_unix": DEAD, "intent": intent(valid_until=DEAD)}, LIFECYCLE, "it begins at"),
    "its deadline is now": ({"deadline_unix": NOW_S, "intent": intent(valid_until=NOW_S)}, *NOTHING),
    "presented already": ({"presented": 1}, LIFECYCLE, "it begins at"),
    "a signature for nothing": ({"intent": intent(amount_atomic=0)}, LIFECYCLE, "pays nothing"),
    "a signature for the least": ({"intent": intent(amount_atomic=1)}, *NOTHING),
    "another nonce": ({"intent": intent(nonce=7)}, LIFECYCLE, "its id is"),
    "another deadline": ({"deadline_unix": NOW_S + 9}, LIFECYCLE, "its deadline is"),
    "another chain": ({"intent": intent(chain_id=1)}, LIFECYCLE, "its network is"),
}


@pytest.mark.parametrize(("fields", "rule", "what"), BEGUN.values(), ids=BEGUN)
def test_a_hold_begins(fields, rule, what):
    rows = Rows()
    rows.begin(replace(NEW, **fields))
    says(rows.said(), rule, what)


TOKENS = replace(TOOL, id="tokens", node_id="t", kind=HoldKind.TOKENS)


@pytest.mark.parametrize(
    ("hold", "rule", "what"), [(TOKENS, "", ""), (replace(TOKENS, kind=HoldKind.TOOL), LIFECYCLE, "lies in no such node")]
)  # fmt: skip
def test_tokens_lie_in_token_nodes_and_nothing_else_does(hold, rule, what):
    rows = Rows(more=[node("t", None, NodeKind.TOKENS)])
    rows.begin(hold, is_booked=False)
    rows.view.record("t", "authorize", hold_id=hold.id, held=hold.amount)
    says(rows.said(), rule, what)


@pytest.mark.parametrize(
    ("hold", "rule", "what"),
    [(captured(TOOL, TEN), "", ""), (captured(NEW, TEN), LIFECYCLE, "would begin and end captured")],
)
def test_a_charge_begins_and_ends_in_one_change_and_a_payment_does_not(hold, rule, what):
    rows = Rows()
    rows.begin(replace(hold, state=HoldState.HELD, captured=Nanos(0), closed_ms=0))
    rows.step("capture", hold)
    says(rows.said(), rule, what)


@pytest.mark.parametrize(
    ("lost", "rule", "what"), [({NEW.id}, "", ""), ({"another"}, LIFECYCLE, "has not noted it")], ids=["noted", "not"]
)
def test_what_is_entered_as_lost_this_process_has_noted(lost, rule, what):
    """Then it may be past its deadline and presented, and its token unknown: it is entered as it was."""
    rows = Rows(now={"lost": frozenset(lost)}, opened={"tokens": {}})
    rows.begin(replace(NEW, deadline_unix=DEAD, intent=intent(valid_until=DEAD), presented=2), Lost(NEW.id))
    says(rows.said(), rule, what)


FIXED = {
    "node_id": WALLET, "kind": HoldKind.TOOL, "amount": Nanos(TEN + 1), "created_ms": 1, "deadline_unix": 1,
    "purpose": Purpose("GET"), "purchase_key": "k", "intent": replace(ONE.intent, payee="0x1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_what_is_fixed_stays(name):
    rows = Rows(ended(ONE, HoldState.VOIDED))
    rows.view.put_hold(replace(rows.view.hold(ONE.id), **{name: FIXED[name]}))
    says(rows.said(), LIFECYCLE, f"{name} was ")


CHANGED = {
    "a remark": ({"doubt": "x"}, *NOTHING),
    "an equal purpose": ({"purpose": Purpose()}, *NOTHING),
    "presented again": ({"presented": 2, "instance": "other"}, *NOTHING),
    "presented again by the same": ({"presented": 2}, *NOTHING),
    "presented twice more": ({"presented": 3}, LIFECYCLE, "presented was 1 and would be 3"),
    "presented less often": ({"presented": 0}, LIFECYCLE, "presented was 1 and would be 0"),
    "another instance": ({"instance": "other"}, LIFECYCLE, "another instance answers for it"),
    "no chain any more": ({"chain_evidence": False}, LIFECYCLE, "could no more"),
    "forgiven by no one": ({"delivery": Delivery.FORGIVEN}, LIFECYCLE, "its purchase is closed"),
    "its answer is lost": ({"delivery": Delivery.LOST}, *NOTHING),
    "it closed": ({"closed_ms": START_MS}, LIFECYCLE, f"closed_ms would be {START_MS}, and its steps end at 0"),
    "something is captured": ({"captured": Nanos(1)}, LIFECYCLE, "its steps end held with 0 captured"),
    "another state": ({"state": HoldState.VOIDED}, LIFECYCLE, "its row is voided"),
}


@pytest.mark.parametrize(("fields", "rule", "what"), CHANGED.values(), ids=CHANGED)
def test_without_a_step(fields, rule, what):
    rows = Rows(replace(ONE, presented=1, chain_evidence=True))
    after = replace(rows.view.hold(ONE.id), **fields)
    rows.view.put_hold(after)
    rows.book(after, taken=after.captured, held=0 if after.state is HoldState.HELD else -TEN)
    says(rows.said(), rule, what)


def test_a_chain_may_be_able_to_prove_it_now():
    rows = Rows(ONE)
    rows.view.put_hold(replace(ONE, chain_evidence=True))
    assert rows.said() == ""


FORGIVEN = [
    ("forgive", ByOwner("s", "forgive", "me"), ""), ("forgive", PayAgain(), ""), ("forgive", Unsent(ONE.id), LIFECYCLE),
    ("forgive", None, LIFECYCLE), ("note", PayAgain(), LIFECYCLE),
]  # fmt: skip


@pytest.mark.parametrize(("step", "proof", "rule"), FORGIVEN)
def test_a_purchase_is_forgiven_by_its_owner_or_caller(step, proof, rule):
    rows = Rows(ONE)
    rows.view.take_step(step, replace(ONE, delivery=Delivery.FORGIVEN), proof)
    says(rows.said(), rule, "by neither its owner nor its caller")


def test_what_is_forgiven_already_needs_no_word_again():
    rows = Rows(replace(ONE, delivery=Delivery.FORGIVEN))
    rows.view.put_hold(replace(ONE, delivery=Delivery.FORGIVEN, doubt="x"))
    assert rows.said() == ""


def test_a_step_without_its_row_is_refused():
    rows = Rows(ONE)
    rows.view.put_hold(replace(ONE, doubt="x"))
    says(rows.said(lambda sent: replace(sent, holds=(), steps=(Step(ONE.id, "note", "held", 0, 0),))),
         LIFECYCLE, "its row is not written")  # fmt: skip


VOIDED = ended(ONE, HoldState.VOIDED)
FAULTS = {
    "no step of the table": (VOIDED, "capture", captured(ONE, TEN), {}, "capture from voided to captured"),
    "to another state": (ONE, "capture", VOIDED, {}, "capture from held to voided"),
    "another amount in the row": (ONE, "capture", captured(ONE, TEN), {"captured": Nanos(1)}, "its steps end captured"),
    "another state in the row": (ONE, "void", VOIDED, {"state": HoldState.EXPIRED}, "its steps end voided"),
    "captured while live": (ONE, "note", replace(ONE, captured=Nanos(1)), {}, "it is held with 1 captured"),
}


@pytest.mark.parametrize(("before", "step", "after", "then", "what"), FAULTS.values(), ids=FAULTS)
def test_steps_are_in_the_table_and_end_as_the_row_does(before, step, after, then, what):
    rows = Rows(before)
    proof = Unsigned(ONE.id)
    rows.now = replace(rows.now, unsigned=frozenset([ONE.id]))
    rows.view.take_step(step, after, proof)
    row = replace(after, **then)
    rows.view.put_hold(row)
    held = (TEN if row.state is HoldState.HELD else 0) - (TEN if before.state is HoldState.HELD else 0)
    rows.book(row, held=held, taken=row.captured)
    says(rows.said(), LIFECYCLE, what)


def test_nothing_negative_is_captured():
    rows = Rows(TOOL, captured(LLM, TEN))
    rows.step("capture", captured(TOOL, -1), Stated())
    says(rows.said(), LIFECYCLE, "it is captured with -1 captured")


@pytest.mark.parametrize("first", ["note", None])
def test_a_new_hold_begins_with_authorize(first):
    rows = Rows()
    rows.look_for(NEW.id)
    if first is None:
        rows.view.put_hold(NEW)
    else:
        rows.view.take_step(first, NEW)
    rows.book(NEW, held=TEN)
    says(rows.said(), LIFECYCLE, "begins with another step than authorize")


def by_chain(evidence=Evidence.CHAIN, **more):
    return captured(UPTO, TEN // 2, evidence=evidence, ended_by='{"event":"capture","amount":50000000}', **more)


REOPENED = {
    "by a block that was undone": (by_chain(), Undone(*of(ONE)), *NOTHING),
    "by one that was not final": (by_chain(Evidence.CHAIN_HEAD), Undone(*of(ONE)), *NOTHING),
    "by nothing": (by_chain(), None, LIFECYCLE, "no chain shows that its block was undone"),
    "of another payment": (by_chain(), Undone(*of(NEW)), LIFECYCLE, "no chain shows"),
    "by another proof": (by_chain(), Unsent(ONE.id), LIFECYCLE, "no chain shows"),
    "after a claim": (by_chain(Evidence.CLAIMED), Undone(*of(ONE)), LIFECYCLE, "no chain has ended it"),
}


@pytest.mark.parametrize("closed_ms", [0, START_MS, START_MS - 1, 1, -1])
@pytest.mark.parametrize(("before", "proof", "rule", "what"), REOPENED.values(), ids=REOPENED)
def test_what_a_chain_has_ended_is_open_again(before, proof, rule, what, closed_ms):
    """It closes anew."""
    rows = Rows(before, marks={("exposed", "total"): {"nanos": TEN // 2}, ("exposed", ONE.id): {"nanos": TEN // 2}})
    rows.step(
        "reopen", replace(before, state=HoldState.HELD, captured=Nanos(0), ended_by=None, closed_ms=closed_ms), proof
    )
    if before.evidence is Evidence.CHAIN_HEAD:
        rows.view.put_mark(("exposed", "total"), {"nanos": 0})
        rows.view.put_mark(("exposed", ONE.id), {"nanos": 0})
    if closed_ms:
        says(rows.said(), LIFECYCLE, f"closed_ms would be {closed_ms} by reopen, and is 0")
    else:
        says(rows.said(), rule, what)


@pytest.mark.parametrize(("closed_ms", "rule"), [(0, ""), (START_MS, ""), (START_MS - 1, LIFECYCLE), (-1, LIFECYCLE)])
def test_what_was_taken_in_full_may_keep_when_it_closed(closed_ms, rule):
    before = captured(UPTO, TEN, evidence=Evidence.CHAIN)
    rows = Rows(before)
    rows.step("reopen", replace(before, state=HoldState.HELD, captured=Nanos(0), closed_ms=closed_ms), Undone(*of(ONE)))
    says(rows.said(), rule, f"closed_ms would be {closed_ms} by reopen, and is {START_MS}")


def test_the_last_proof_of_its_steps_counts():
    """Steps without one may follow it."""
    rows = Rows(ONE)
    for proof in (PayAgain(), None):
        rows.view.take_step("forgive", replace(ONE, delivery=Delivery.FORGIVEN), proof)
    assert rows.said() == ""


def test_a_new_payment_is_not_reopened():
    rows = Rows()
    rows.begin(NEW)
    rows.step("capture", captured(NEW, TEN))
    rows.step("reopen", NEW, Undone(*of(NEW)))
    says(rows.said(), LIFECYCLE, "no chain has ended it")


LATE = {"clock_ms": START_MS + 120_000, "now_ms": START_MS + 120_000}
CLOSED = {
    "now": ("capture", {}, {}, START_MS, ""),
    "earlier": ("capture", {}, {}, START_MS - 1, f"by capture, and is {START_MS}"),
    "not at all": ("capture", {}, {}, 0, f"by capture, and is {START_MS}"),
    "by the kernel's clock and not the ledger's": ("capture", {}, {"now_ms": START_MS + 5}, START_MS, ""),
    "a lapse at its deadline": ("lapse", {}, LATE, START_MS + 60_000, ""),
    "a lapse later": ("lapse", {}, LATE, START_MS + 120_000, f"by lapse, and is {START_MS + 60_000}"),
    "in a window of the future": (
        "lapse", {"window": DAY, "since_ms": START_MS + DAY_MS}, LATE, START_MS + DAY_MS, ""),
    "before a window of the future": (
        "capture", {"window": DAY, "since_ms": START_MS + DAY_MS}, {}, START_MS, f"and is {START_MS + DAY_MS}"),
    "a beginning without a window": ("capture", {"since_ms": START_MS + DAY_MS}, {}, START_MS, ""),
}  # fmt: skip


@pytest.mark.parametrize(("step", "session", "now", "closed_ms", "what"), CLOSED.values(), ids=CLOSED)
def test_when_it_closed_is_what_the_windows_work_out(step, session, now, closed_ms, what):
    rows = Rows(TOOL, s=session, now=now)
    rows.step(step, captured(TOOL, TEN, closed_ms=closed_ms))
    if "window" in session and closed_ms < session["since_ms"]:
        rows.put("s", past=TEN)
    says(rows.said(), LIFECYCLE if what else "", what)


def test_a_lapse_closes_when_it_was_made_if_its_deadline_was_before():
    rows = Rows(replace(TOOL, deadline_unix=NOW_S - 9), now=LATE)
    after = captured(TOOL, TEN, deadline_unix=NOW_S - 9)
    rows.step("lapse", after)
    assert rows.said() == ""


@pytest.mark.parametrize(("closed_ms", "rule"), [(START_MS - 5, ""), (START_MS, LIFECYCLE), (0, LIFECYCLE)])
def test_a_correction_leaves_when_it_closed(closed_ms, rule):
    before = captured(LLM, TEN, closed_ms=START_MS - 5)
    rows = Rows(before)
    rows.step("correct", replace(before, captured=Nanos(TEN + 1), closed_ms=closed_ms))
    says(rows.said(), rule, "by correct")


def test_two_steps_that_capture_close_once():
    rows = Rows(LLM)
    rows.step("capture", captured(LLM, TEN))
    rows.step("correct", captured(LLM, TEN + 1))
    assert rows.said() == ""
    rows = Rows(LLM)
    rows.step("capture", captured(LLM, TEN))
    rows.step("correct", captured(LLM, TEN + 1, closed_ms=START_MS + 1))
    says(rows.said(), LIFECYCLE, "by correct, and is")


CLOCK = ByOwner("s", "clock", "me")
CLOCKED = {
    "to now by the clock command": (CLOCK, START_MS, *NOTHING),
    "to another time": (CLOCK, START_MS - 2, LIFECYCLE, "its steps end at"),
    "by another command": (ByOwner("s", "limit", "me"), START_MS, LIFECYCLE, "its steps end at"),
    "by no one": (None, START_MS, LIFECYCLE, "its steps end at"),
}


@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize(("command", "closed_ms", "rule", "what"), CLOCKED.values(), ids=CLOCKED)
def test_the_owners_clock_moves_when_it_closed(command, closed_ms, rule, what, has_step):
    before = captured(LLM, TEN, closed_ms=START_MS + DAY_MS)
    rows = Rows(before)
    if has_step:
        rows.step("correct", replace(before, captured=Nanos(TEN + 1)))
    rows.view.put_hold(replace(rows.view.hold(LLM.id), closed_ms=closed_ms))
    if command is not None:
        rows.view.prove(command)
    says(rows.said(), rule, what)


WORTH = {
    "less by one": (TEN - 1, {}, "worth", "it counts 99999999, and its signature can take 100000000"),
    "exactly": (TEN, {}, *NOTHING),
    "more": (TEN + 1, {}, *NOTHING),
    "an unknown token": (TEN, {"tokens": {}}, "worth", "is not in the kernel's table"),
    "one that is worth more": (TEN, {"tokens": {TOKEN: Token(6, 2_000_000_000)}}, "worth", "can take 200000000"),
    "one of few decimals": (TEN, {"tokens": {TOKEN: Token(5)}}, "worth", "can take 1000000000"),
    "one whose units are worth less than a nano-dollar": (1, {"tokens": {TOKEN: Token(18)}}, *NOTHING),
}


@pytest.mark.parametrize(("amount", "opened", "rule", "what"), WORTH.values(), ids=WORTH)
def test_a_new_payment_counts_what_its_signature_can_take(amount, opened, rule, what):
    rows = Rows(opened=opened)
    hold = replace(NEW, amount=Nanos(amount))
    rows.begin(hold)
    says(rows.said(), rule, what)
    if rule:
        with pytest.raises(IllegalTransition, match=what):
            check_worth(rows.opened, hold)
    else:
        check_worth(rows.opened, hold)


def test_the_live_payment_of_another_process_in_its_own_token_passes():
    rows = Rows(ONE, opened={"tokens": {}})
    rows.view.put_hold(replace(ONE, presented=1, instance="other"))
    assert rows.said() == ""


def test_a_value_is_rounded_up():
    assert [Token(18).worth(each) for each in (0, 1, 10**9, 10**9 + 1)] == [0, 1, 1, 2]
    assert Token(0, 3).worth(2) == 6


OLD_MS = START_MS - DAY_MS
LOST, OPEN, DONE = Delivery.LOST, Delivery.OPEN, Delivery.DONE
TAKEN = captured(ONE, TEN, purchase_key="k")
KEYED = replace(ONE, purchase_key="k")
BOUGHT = {
    "an answer is lost": (replace(KEYED, delivery=LOST), "k", {}, "once"),
    "a request is in flight": (replace(KEYED, delivery=OPEN), "k", {}, ""),
    "an answer was handed over": (replace(KEYED, delivery=DONE), "k", {}, ""),
    "captured, lost": (replace(TAKEN, delivery=LOST), "k", {}, "once"),
    "captured for nothing, lost": (replace(TAKEN, delivery=LOST, captured=Nanos(0)), "k", {}, ""),
    "captured for the least, lost": (replace(TAKEN, delivery=LOST, captured=Nanos(1)), "k", {}, "once"),
    "given back, lost": (ended(replace(KEYED, delivery=LOST), HoldState.VOIDED), "k", {}, ""),
    "lost a day ago": (replace(TAKEN, delivery=LOST, closed_ms=OLD_MS, flying_since_ms=OLD_MS), "k", {}, "once"),
    "lost before": (replace(TAKEN, delivery=LOST, closed_ms=OLD_MS - 1, flying_since_ms=OLD_MS - 1), "k", {}, ""),
    "closed before, lost since": (replace(TAKEN, delivery=LOST, closed_ms=1, flying_since_ms=OLD_MS), "k", {}, "once"),
    "lost before, closed since": (replace(TAKEN, delivery=LOST, closed_ms=OLD_MS, flying_since_ms=1), "k", {}, "once"),
    "of another purchase": (replace(KEYED, purchase_key="j", delivery=LOST), "k", {}, ""),
    "not loaded": (replace(KEYED, delivery=DONE), "k", {"purchase": None}, "once"),
    "another one loaded": (replace(KEYED, delivery=DONE), "k", {"purchase": "j"}, "once"),
    "named, open": (replace(KEYED, purchase_key="named:k", delivery=OPEN), "named:k", {"named": True}, "once"),
    "named, handed over": (replace(KEYED, purchase_key="named:k"), "named:k", {"named": True}, "once"),
    "named, forgiven": (
        replace(KEYED, purchase_key="named:k", delivery=Delivery.FORGIVEN), "named:k", {"named": True}, ""),
    "named, and the last one not loaded": (
        replace(KEYED, purchase_key="named:k", delivery=Delivery.FORGIVEN), "named:k", {}, "once"),
    "without a key": (replace(KEYED, delivery=LOST), None, {}, ""),
}  # fmt: skip


@pytest.mark.parametrize("proof", [None, PayAgain()], ids=["", "again"])
@pytest.mark.parametrize(("known", "key", "loaded", "rule"), BOUGHT.values(), ids=BOUGHT)
def test_a_purchase_is_not_paid_again(known, key, loaded, rule, proof):
    rows = Rows(known, **{"purchase": key, **loaded})
    rows.look_for("a hold that is gone")
    rows.begin(replace(NEW, purchase_key=key), proof)
    says(rows.said(), "" if proof else rule, "its purchase" if "purchase" in loaded or (rule and key[0] == "n" and
         not loaded) else "the same purchase")  # fmt: skip


def test_a_lost_payment_and_a_tool_are_no_second_purchase():
    rows = Rows(replace(KEYED, delivery=LOST), purchase="k", now={"lost": frozenset([NEW.id])})
    rows.begin(replace(NEW, purchase_key="k"), Lost(NEW.id))
    assert rows.said() == ""
    rows = Rows(replace(KEYED, delivery=LOST), purchase="k")
    rows.begin(replace(TOOL, purchase_key="k"))
    assert rows.said() == ""
    rows = Rows(replace(KEYED, delivery=LOST))
    rows.view.put_hold(replace(KEYED, delivery=LOST, doubt="x"))
    assert rows.said() == ""


def test_a_purchase_that_this_change_forgives_may_be_paid_again():
    rows = Rows(replace(KEYED, delivery=LOST), purchase="k")
    rows.view.take_step("forgive", replace(KEYED, delivery=Delivery.FORGIVEN), PayAgain())
    rows.begin(replace(NEW, purchase_key="k"))
    assert rows.said() == ""


def test_two_of_one_purchase_in_one_change():
    rows = Rows(replace(KEYED, delivery=DONE), purchase="k")
    rows.view.put_hold(replace(KEYED, delivery=LOST))
    rows.begin(replace(NEW, purchase_key="k"))
    says(rows.said(), "once", "has paid for the same purchase")


def test_no_bill_is_a_payments_proof():
    rows = Rows(ONE)
    rows.step("void", ended(ONE, HoldState.VOIDED), Billed("nothing"))
    says(rows.said(), "giving back", "would come back by Billed")


@pytest.mark.parametrize("hold", [a_hold("long", "$0.10", kind=HoldKind.LLM)])
def test_the_place_of_a_hold_is_named(hold):
    rows = Rows(hold)
    rows.view.put_hold(replace(hold, presented=9))
    says(rows.said(), LIFECYCLE, "hold long: presented was 0 and would be 9")

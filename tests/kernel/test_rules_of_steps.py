"""What the clauses say that look at each step, at exact types, and at what a row may not say by itself."""

import pytest
from msgspec.structs import replace

from tests.kernel.rows import LLM, NEW, ONE, TEN, TOOL, UPTO, Rows, captured, ended, node, says
from tests.support.ledger import START_MS
from x402guard.kernel.proofs import Billed, ByOwner, Cancelled, Lost, PayAgain, Undone, Unsigned
from x402guard.kernel.rows import WALLET, Delivery, Evidence, HoldState, Nanos, NodeKind, Window

LIFECYCLE, GIVING, BOOKS = "lifecycle", "giving back", "books"
HALF = TEN // 2
PAID = captured(UPTO, HALF, evidence=Evidence.CLAIMED)
CANCELLED = Cancelled(UPTO.intent.network, UPTO.intent.token, UPTO.intent.payer, ONE.id, "0x07")


@pytest.mark.parametrize("step", [None, "forgive"])
@pytest.mark.parametrize("fields", [{"evidence": Evidence.CHAIN}, {"proof": "x"}, {"ended_by": "{}"}])
def test_what_is_believed_of_an_end_changes_by_a_step(fields, step):
    rows = Rows(PAID)
    if step:
        rows.view.take_step(step, PAID, PayAgain())
    rows.view.put_hold(replace(PAID, **fields))
    says(rows.said(), LIFECYCLE, "its evidence or its proof changes without a step")
    rows = Rows(LLM)
    rows.view.take_step("note", replace(LLM, **fields))
    says(rows.said(), LIFECYCLE, "changes without a step")
    rows = Rows(captured(LLM, HALF))
    rows.step("correct", captured(LLM, HALF, **fields))
    assert rows.said() == ""


def test_a_new_hold_ends_as_it_begins():
    rows = Rows()
    rows.begin(replace(TOOL, evidence=Evidence.ESTIMATE))
    assert rows.said() == ""


@pytest.mark.parametrize("then", [Delivery.DONE, Delivery.OPEN])
@pytest.mark.parametrize("was", list(Delivery))
def test_a_lost_answer_is_not_handed_over(was, then):
    rows = Rows(replace(ONE, delivery=was))
    rows.view.put_hold(replace(ONE, delivery=then))
    is_wrong = then is Delivery.DONE and was in (Delivery.LOST, Delivery.FORGIVEN)
    says(rows.said(), LIFECYCLE if is_wrong else "", f"its answer is {was}, and would be handed over")


def test_a_tool_is_not_reopened():
    rows = Rows(captured(TOOL, TEN, evidence=Evidence.CHAIN))
    rows.step("reopen", TOOL, Undone("n", "t", "p", TOOL.id))
    says(rows.said(), LIFECYCLE, "no chain shows that its block was undone")


def test_the_clock_moves_no_end_forward():
    before = captured(LLM, TEN, closed_ms=START_MS - 5)
    rows = Rows(before)
    rows.view.put_hold(replace(before, closed_ms=START_MS))
    rows.view.prove(ByOwner("s", "clock", "me"))
    says(rows.said(), LIFECYCLE, f"closed_ms would be {START_MS}, and its steps end at {START_MS - 5}")


def test_a_lost_payment_counts_what_its_signature_takes_if_its_token_is_known():
    for amount, rule in ((TEN - 1, "worth"), (TEN, "")):
        rows = Rows(now={"lost": frozenset([NEW.id])})
        rows.begin(replace(NEW, amount=Nanos(amount)), Lost(NEW.id))
        says(rows.said(), rule, "its signature can take")
    small = replace(ONE, amount=Nanos(5))
    rows = Rows(small)
    rows.view.put_hold(replace(small, doubt="x"))
    assert rows.said() == "", "what is live was looked at as it was written"


def test_a_hold_that_exists_is_not_entered_as_lost():
    rows = Rows(ONE, now={"lost": frozenset([ONE.id])})
    rows.view.take_step("note", replace(ONE, doubt="x"), Lost(ONE.id))
    assert rows.said() == ""
    before = captured(UPTO, TEN, evidence=Evidence.CHAIN)
    rows = Rows(before, s={"limit": Nanos(2 * TEN)})
    rows.view.take_step("forgive", before, Lost(ONE.id))
    rows.put("s", limit=Nanos(2 * TEN), state="open")
    says(rows.said(), BOOKS, "a kind or state is text")


def test_each_step_that_lowers_has_its_own_proof():
    for first, last in ((None, Billed("usage")), (Billed("usage"), None)):
        rows = Rows(LLM)
        rows.step("capture", captured(LLM, HALF), first)
        rows.step("correct", captured(LLM, TEN), last)
        says(rows.said(), GIVING if first is None else "", "a llm hold would count less by no proof")
    rows = Rows(LLM)
    rows.step("capture", captured(LLM, TEN))
    rows.step("correct", captured(LLM, HALF), Billed("usage"))
    says(rows.said(), GIVING, "a llm hold would count less by Billed")
    rows = Rows(ONE)
    rows.step("capture", captured(ONE, HALF), CANCELLED)
    rows.step("correct", captured(ONE, TEN))
    says(rows.said(), GIVING, f"an exact payment of {TEN} would be captured at {HALF}")
    rows = Rows(UPTO)
    rows.step("capture", captured(UPTO, TEN + 1))
    rows.step("correct", captured(UPTO, TEN))
    says(rows.said(), GIVING, f"{TEN + 1} would be captured, and {TEN} was signed")


def test_a_payment_that_is_taken_for_less_says_so_each_time():
    rows = Rows(PAID)
    rows.step("correct", replace(PAID, evidence=Evidence.CHAIN))
    says(rows.said(), GIVING, "0 would come back by no proof, which does not show that")
    rows = Rows(PAID)
    rows.view.take_step("forgive", replace(PAID, delivery=Delivery.FORGIVEN), PayAgain())
    assert rows.said() == ""
    rows = Rows(captured(LLM, HALF))
    rows.step("correct", captured(LLM, HALF, evidence=Evidence.PROVIDER_USAGE))
    assert rows.said() == ""
    full = captured(UPTO, TEN, evidence=Evidence.CLAIMED)
    rows = Rows(full)
    rows.step("correct", replace(full, evidence=Evidence.CHAIN))
    assert rows.said() == ""
    rows = Rows(ended(UPTO, HoldState.VOIDED))
    rows.step("correct", captured(UPTO, HALF))
    says(rows.said(), GIVING, "would come back by no proof")


WRONG = "a kind or state is text, or an amount is a float"
HOLD_WRONG = {
    **dict.fromkeys(("amount", "captured", "created_ms", "deadline_unix", "flying_since_ms", "closed_ms", "presented"), 0.0),
    "kind": "tool", "state": "held", "delivery": "done", "evidence": "chain",
}  # fmt: skip
NODE_WRONG = {
    **dict.fromkeys(("captured", "held", "granted_in", "granted_out", "live", "past", "since_ms", "created_ms"), 0.0),
    **dict.fromkeys(("last_ms", "seq", "reserve", "limit", "until_ms"), 0.0), "kind": "session", "state": "open",
}  # fmt: skip


@pytest.mark.parametrize("name", HOLD_WRONG)
def test_the_types_of_a_hold_are_exact(name):
    rows = Rows(ONE)
    rows.view.put_hold(replace(ONE, **{name: HOLD_WRONG[name]}))
    says(rows.said(), BOOKS, f"hold {ONE.id}: {WRONG}")


@pytest.mark.parametrize("name", NODE_WRONG)
def test_the_types_of_a_node_are_exact(name):
    rows = Rows(ONE)
    rows.put("s", **{name: NODE_WRONG[name]})
    says(rows.said(), BOOKS, f"node s: {WRONG}")


def test_no_mark_about_money_is_written_twice():
    for kind, rule in (("proof", BOOKS), ("origin", "")):
        rows = Rows(marks={(kind, "x"): None})
        mark = ((kind, "x"), {"hold": ONE.id})
        said = rows.said(lambda sent, mark=mark: replace(sent, marks=(mark, mark)))
        says(said, rule, f"mark {kind} x: it is written twice")


def test_every_node_hangs_below_the_root():
    for parent, what in (("r", "node x: it does not hang below 'wallet'"), ("x", "it is below itself"), ("s", "")):
        rows = Rows(more=[node("r", None, NodeKind.WALLET)])
        rows.before.nodes["x"] = None
        new = node("x", parent)
        says(rows.said(lambda sent, new=new: replace(sent, nodes=(new,))), BOOKS if what else "", what)


def test_two_new_payments_of_one_purchase():
    rows = Rows(purchase="k")
    rows.begin(replace(ONE, purchase_key="k", delivery=Delivery.LOST))
    rows.begin(replace(NEW, purchase_key="k", delivery=Delivery.OPEN))
    says(rows.said(), "once", f"hold {ONE.id} has paid for the same purchase, which is lost")


def test_a_void_is_no_lower_than_nothing():
    rows = Rows(ONE, now={"unsigned": frozenset([ONE.id])})
    rows.step("void", ended(ONE, HoldState.VOIDED), Unsigned(ONE.id))
    rows.view.put_node(replace(rows.view.node(WALLET), starved=1))
    assert rows.said() == ""


def test_what_closes_in_a_window_of_the_future_closes_now_by_the_clock():
    ahead_ms = START_MS + 2 * 86_400_000
    rows = Rows(TOOL, s={"window": Window("day", "UTC"), "since_ms": ahead_ms})
    rows.step("capture", captured(TOOL, TEN, closed_ms=ahead_ms))
    rows.view.put_hold(captured(TOOL, TEN))
    rows.view.prove(ByOwner("s", "clock", "me"))
    assert rows.said() == ""

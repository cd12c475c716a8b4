"""What each clause of the rule giving back says, on rows by hand: which proof frees which hold, and what is exposed."""

import pytest
from msgspec.structs import replace

from tests.kernel.rows import LLM, NEW, ONE, TEN, TOOL, UPTO, Rows, captured, ended, node, says
from tests.support.ledger import PAYEE
from x402guard.kernel.given_back import CLOCK_S
from x402guard.kernel.proofs import (
    AtHead,
    Billed,
    ByOwner,
    Cancelled,
    Final,
    PayAgain,
    Stated,
    Undone,
    Unsent,
    Unsigned,
    UnusedPastDeadline,
)
from x402guard.kernel.rows import Claim, Evidence, HoldKind, HoldState, Nanos, NodeKind

GIVING = "giving back"
VOIDED, EXPIRED, CAPTURED, HELD = HoldState.VOIDED, HoldState.EXPIRED, HoldState.CAPTURED, HoldState.HELD
STEP = {VOIDED: "void", EXPIRED: "expire", CAPTURED: "capture", HELD: "note"}
HALF = TEN // 2
NOTHING = ("", "")
NOT_SHOWN = (GIVING, "which does not show that")
OF_ONE = (ONE.intent.network, ONE.intent.token, ONE.intent.payer, ONE.id)
UNTIL = ONE.deadline_unix
AFTER_MS = (UNTIL - CLOCK_S) * 1000


def others(proof):
    """The same proof, each time of another network, token, payer or nonce."""
    return [replace(proof, **{name: "other"}) for name in ("network", "token", "payer", "nonce")]


UNSIGNED, UNSENT = Unsigned(ONE.id), Unsent(ONE.id)
CANCELLED, UNUSED = Cancelled(*OF_ONE, "0x07"), UnusedPastDeadline(*OF_ONE, UNTIL)
SIGNERS = {"unsigned": frozenset([ONE.id])}
ONCE = {"given": {ONE.id: 1}}
LATE = {"clock_ms": AFTER_MS, "now_ms": AFTER_MS}
PAST = {"clock_ms": AFTER_MS + 9000, "now_ms": AFTER_MS + 9000}
EARLY = {"clock_ms": AFTER_MS - 1000, "now_ms": AFTER_MS - 1000}
AGAIN = replace(ONE, presented=1)
PERMIT = replace(UPTO, intent=replace(UPTO.intent, scheme="exact"))
TESTS = {"test_networks": frozenset([ONE.intent.network])}
FREED = [
    (ONE, ended(ONE, VOIDED), UNSIGNED, SIGNERS, {}, *NOTHING),
    (ONE, ended(ONE, VOIDED), UNSIGNED, {}, {}, *NOT_SHOWN),
    (ONE, ended(ONE, VOIDED), Unsigned(NEW.id), {"unsigned": frozenset([ONE.id, NEW.id])}, {}, *NOT_SHOWN),
    (AGAIN, ended(AGAIN, VOIDED), UNSIGNED, SIGNERS, {}, *NOT_SHOWN),
    (ONE, ended(AGAIN, VOIDED), UNSIGNED, SIGNERS, {}, *NOT_SHOWN),
    (ONE, ended(ONE, EXPIRED), UNSIGNED, SIGNERS, {}, *NOT_SHOWN),
    (ONE, captured(ONE, 0), UNSIGNED, SIGNERS, {}, *NOT_SHOWN),
    (ONE, ended(ONE, VOIDED), UNSENT, ONCE, {}, *NOTHING),
    (ONE, ended(ONE, VOIDED), UNSENT, {}, {}, *NOT_SHOWN),
    (ONE, ended(ONE, VOIDED), UNSENT, {"given": {ONE.id: 0}}, {}, *NOT_SHOWN),
    (ONE, ended(ONE, VOIDED), UNSENT, {"given": {ONE.id: 2}}, {}, *NOT_SHOWN),
    (ONE, ended(ONE, VOIDED), Unsent(NEW.id), ONCE, {}, *NOT_SHOWN),
    (AGAIN, ended(AGAIN, VOIDED), UNSENT, ONCE, {}, *NOT_SHOWN),
    (ONE, ended(ONE, EXPIRED), UNSENT, ONCE, {}, *NOT_SHOWN),
    (ONE, ended(ONE, VOIDED), CANCELLED, {}, {}, *NOTHING),
    (UPTO, captured(UPTO, 0), CANCELLED, {}, {}, *NOTHING),
    (UPTO, captured(UPTO, 1), CANCELLED, {}, {}, *NOT_SHOWN),
    (ONE, ended(ONE, EXPIRED), CANCELLED, {}, {}, *NOT_SHOWN),
    *((ONE, ended(ONE, VOIDED), each, {}, {}, *NOT_SHOWN) for each in others(CANCELLED)),
    (ONE, ended(ONE, EXPIRED), UNUSED, LATE, {}, *NOTHING),
    (ONE, ended(ONE, VOIDED), UNUSED, LATE, {}, *NOTHING),
    (UPTO, captured(UPTO, 1), replace(UNUSED, block_time=UNTIL + 9), PAST, {}, *NOT_SHOWN),
    (UPTO, captured(UPTO, 0), replace(UNUSED, block_time=UNTIL + 9), PAST, {}, *NOTHING),
    (ONE, ended(ONE, EXPIRED), UNUSED, EARLY, {}, *NOT_SHOWN),
    (ONE, ended(ONE, EXPIRED), UNUSED, EARLY, TESTS, *NOTHING),
    (ONE, ended(ONE, EXPIRED), replace(UNUSED, block_time=UNTIL - 1), LATE, {}, *NOT_SHOWN),
    (ONE, ended(ONE, EXPIRED), replace(UNUSED, block_time=UNTIL - 1), LATE, TESTS, *NOT_SHOWN),
    (PERMIT, ended(PERMIT, EXPIRED), UNUSED, LATE, TESTS, *NOT_SHOWN),
    *((ONE, ended(ONE, EXPIRED), each, LATE, {}, *NOT_SHOWN) for each in others(UNUSED)),
    (ONE, ended(ONE, VOIDED), None, SIGNERS, {}, GIVING, "100000000 would come back by no proof"),
    *((ONE, ended(ONE, VOIDED), proof, {**SIGNERS, **ONCE}, {}, *NOT_SHOWN)
      for proof in (Billed("nothing"), Stated(), PayAgain(), ByOwner("s", "forgive", "me"), Undone(*OF_ONE))),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "proof", "now", "opened", "rule", "what"), FREED)
def test_a_payment_comes_back_by_its_own_proof(before, after, proof, now, opened, rule, what):
    rows = Rows(before, now=now, opened=opened)
    if after.state is CAPTURED:
        after = replace(after, closed_ms=rows.now.clock_ms)
    rows.step(STEP[after.state], after, proof)
    says(rows.said(), rule, what)


BILLED, STATED = Billed("usage"), Stated()
TOKENS = replace(TOOL, id="tokens", node_id="t", kind=HoldKind.TOKENS)


@pytest.mark.parametrize(
    ("hold", "proof", "is_free"),
    [(LLM, BILLED, 1), (LLM, STATED, 0), (LLM, None, 0), (TOOL, BILLED, 0), (TOOL, STATED, 1), (TOOL, None, 0),
     (TOKENS, BILLED, 1), (TOKENS, STATED, 1), (TOKENS, None, 0)],
)  # fmt: skip
def test_a_call_comes_back_by_a_bill_and_a_tool_by_the_callers_word(hold, proof, is_free):
    held = {"held": TEN, "live": TEN}
    rows = Rows(hold, s={} if hold is not TOKENS else {"held": 0}, more=[node("t", None, NodeKind.TOKENS, **held)])
    after = captured(hold, HALF)
    if hold is TOKENS:
        rows.view.take_step("capture", after, proof)
        rows.view.record("t", "capture", hold_id=hold.id, held=-TEN, captured=HALF)
    else:
        rows.step("capture", after, proof)
    says(rows.said(), "" if is_free else GIVING, f"a {hold.kind} hold would count less by ")


@pytest.mark.parametrize(("hold", "proof"), [(LLM, BILLED), (TOOL, STATED)])
def test_what_was_captured_is_not_given_back_by_a_bill(hold, proof):
    rows = Rows(captured(hold, TEN))
    rows.step("correct", captured(hold, HALF), proof)
    says(rows.said(), GIVING, f"a {hold.kind} hold would count less by {type(proof).__name__}")


def test_a_bill_and_a_capture_in_full_take_no_proof():
    for hold, amount in ((LLM, TEN), (LLM, TEN + 1), (ONE, TEN), (UPTO, TEN)):
        rows = Rows(hold)
        rows.step("capture", captured(hold, amount))
        assert rows.said() == ""


@pytest.mark.parametrize(
    ("hold", "amount", "evidence", "rule", "what"),
    [
        (ONE, HALF, Evidence.CHAIN, GIVING, "an exact payment of 100000000 would be captured at 50000000"),
        (ONE, TEN + 1, Evidence.CHAIN, GIVING, "an exact payment"),
        (ONE, TEN + 1, Evidence.CHAIN_HEAD, GIVING, "an exact payment"),
        (UPTO, TEN + 1, Evidence.CHAIN, "", ""),
        (UPTO, TEN + 1, Evidence.CHAIN_HEAD, "", ""),
        (UPTO, TEN + 1, Evidence.CLAIMED, GIVING, "100000001 would be captured, and 100000000 was signed"),
        (UPTO, TEN, Evidence.CLAIMED, "", ""),
    ],
)
def test_an_exact_is_captured_at_its_ceiling_and_nothing_above_it_but_by_the_chain(hold, amount, evidence, rule, what):
    rows = Rows(hold, marks={("exposed", "total"): None, ("exposed", ONE.id): None})
    rows.step("capture", captured(hold, amount, evidence=evidence))
    if (evidence, hold) == (Evidence.CHAIN_HEAD, UPTO):
        rows.view.put_mark(("exposed", "total"), {"nanos": 0})
        rows.view.put_mark(("exposed", ONE.id), {"nanos": TEN - amount})
    says(rows.said(), rule, what)


TX = "0x" + "ab" * 32
KEY = f"eip155:84532/{TX}/7"
FINAL = Final(*OF_ONE, PAYEE, 50_000, TX.upper().replace("X", "x"), 7)
HEAD = AtHead(*OF_ONE, PAYEE, 50_000, TX, 7)
ODD = replace(UPTO, amount=Nanos(TEN + 1))
TAKES = {
    "as it was taken": ({}, FINAL, *NOTHING),
    "by another payee": ({}, replace(FINAL, payee="0x1"), *NOT_SHOWN),
    "more": ({}, replace(FINAL, amount_atomic=50_001), *NOT_SHOWN),
    "less": ({}, replace(FINAL, amount_atomic=49_999), *NOT_SHOWN),
    "another row's proof": ({"proof": "x"}, FINAL, *NOT_SHOWN),
    "not final": ({"evidence": Evidence.CHAIN_HEAD}, FINAL, *NOT_SHOWN),
    "a claim": ({"evidence": Evidence.CLAIMED}, FINAL, *NOT_SHOWN),
    "a final word that is not": ({}, HEAD, *NOT_SHOWN),
    "voided": ({"state": VOIDED, "captured": Nanos(0)}, replace(FINAL, amount_atomic=0), *NOT_SHOWN),
    **{f"of another payment {number}": ({}, each, *NOT_SHOWN) for number, each in enumerate(others(FINAL))},
}


@pytest.mark.parametrize(("fields", "proof", "rule", "what"), TAKES.values(), ids=TAKES)
def test_a_transfer_gives_back_what_it_did_not_move(fields, proof, rule, what):
    key = ("proof", f"{proof.network}/{TX}/{proof.log_index}")
    rows = Rows(UPTO, marks={key: None, ("exposed", "total"): None, ("exposed", ONE.id): None})
    after = captured(UPTO, HALF, **{"evidence": Evidence.CHAIN, "proof": KEY, **fields})
    rows.step(STEP[after.state], after, proof)
    rows.view.put_mark(key, {"hold": ONE.id})
    says(rows.said(), rule, what)


def test_what_is_taken_is_rounded_up():
    rows = Rows(ODD, marks={("proof", KEY): {"hold": ONE.id}})
    rows.step("capture", captured(ODD, HALF + 1, evidence=Evidence.CHAIN, proof=KEY), FINAL)
    assert rows.said() == ""


@pytest.mark.parametrize(
    ("mark", "written", "rule", "what"),
    [
        ({"hold": ONE.id}, None, "", ""),
        (None, {"hold": ONE.id}, "", ""),
        ({"hold": ""}, {"hold": ONE.id}, "", ""),
        (None, None, *NOT_SHOWN),
        ({"hold": NEW.id}, None, *NOT_SHOWN),
        (None, {"hold": NEW.id}, *NOT_SHOWN),
        ("not loaded", None, GIVING, f"mark proof/{KEY}: it was not loaded"),
    ],
)
def test_its_mark_is_this_payments(mark, written, rule, what):
    rows = Rows(UPTO, marks={} if mark == "not loaded" else {("proof", KEY): mark})
    rows.step("capture", captured(UPTO, HALF, evidence=Evidence.CHAIN, proof=KEY), FINAL)
    if written:
        rows.view.put_mark(("proof", KEY), written)
    says(rows.said(), rule, what)


def released(first_proof, *, is_written=True, second=KEY):
    """A second payment is proven by the Transfer that proved a first one."""
    before = captured(NEW, TEN, evidence=Evidence.CHAIN, proof=first_proof)
    rows = Rows(UPTO, before, marks={("proof", KEY): {"hold": NEW.id}})
    if is_written:
        rows.step("correct", replace(before, proof=second))
    rows.step("capture", captured(UPTO, HALF, evidence=Evidence.CHAIN, proof=KEY), FINAL)
    rows.view.put_mark(("proof", KEY), {"hold": ONE.id})
    return rows.said()


def test_one_transfer_proves_one_payment():
    """Its mark changes hands as the proof of the first one changes."""
    assert released(KEY, second="another") == ""
    for said in (released(KEY), released(KEY, is_written=False), released("x", second="another")):
        says(said, GIVING, f"mark proof/{KEY}: it proves hold {NEW.id}, whose proof does not change")


def test_another_payment_that_lets_go_of_it_releases_no_mark():
    before = captured(ONE, TEN, evidence=Evidence.CHAIN, proof=KEY)
    rows = Rows(before, marks={("proof", KEY): {"hold": NEW.id}})
    rows.step("correct", replace(before, proof="another"))
    rows.view.put_mark(("proof", KEY), {"hold": ONE.id})
    says(rows.said(), GIVING, f"it proves hold {NEW.id}, whose proof does not change")


def test_a_new_payment_releases_no_mark():
    rows = Rows(UPTO, marks={("proof", KEY): {"hold": NEW.id}})
    rows.begin(replace(NEW, proof="another"))
    rows.step("capture", captured(UPTO, HALF, evidence=Evidence.CHAIN, proof=KEY), FINAL)
    rows.view.put_mark(("proof", KEY), {"hold": ONE.id})
    says(rows.said(), GIVING, "whose proof does not change")


def test_a_mark_that_stays_is_no_second_proof():
    rows = Rows(UPTO, marks={("proof", KEY): {"hold": ONE.id, "note": 1}})
    rows.step("capture", captured(UPTO, HALF, evidence=Evidence.CHAIN, proof=KEY), FINAL)
    rows.view.put_mark(("proof", KEY), {"hold": ONE.id})
    assert rows.said() == ""


@pytest.mark.parametrize(
    ("key", "known", "rule"),
    [(("wallet", "payer"), {"address": "0x1"}, GIVING), (("wallet", "payer"), None, ""),
     (("wallet", "other"), {"address": "0x1"}, ""), (("origin", "payer"), {"address": "0x1"}, "")],
)  # fmt: skip
def test_a_ledger_belongs_to_one_wallet(key, known, rule):
    rows = Rows(marks={key: known})
    rows.view.put_mark(key, {"address": "0x2"})
    says(rows.said(), rule, "mark wallet/payer: a ledger belongs to one wallet, until its owner says so")


@pytest.mark.parametrize(
    ("node", "command", "rule"), [("wallet", "payer", ""), ("s", "payer", GIVING), ("wallet", "limit", GIVING)]
)
def test_its_owner_gives_a_ledger_to_another_key(node, command, rule):
    rows = Rows(marks={("wallet", "payer"): {"address": "0x1"}})
    rows.view.put_mark(("wallet", "payer"), {"address": "0x2", "before": ["0x1"]})
    rows.view.prove(ByOwner(node, command, "me"))
    says(rows.said(), rule, "mark wallet/payer: a ledger belongs to one wallet, until its owner says so")


def test_the_same_wallet_is_written_again():
    rows = Rows(marks={("wallet", "payer"): {"address": "0x1"}})
    said = rows.said(lambda sent: replace(sent, marks=((("wallet", "payer"), {"address": "0x1"}),)))
    assert said == ""


CLAIM = {"evidence": Evidence.CLAIMED, "claim": Claim(Nanos(HALF), "")}
BLIND = replace(UPTO, chain_evidence=False)
TRUSTS = {"unsafe_trust_receipts": True}
CLAIMED = {
    "that is believed": (BLIND, CLAIM, TRUSTS, *NOTHING),
    "that is not believed": (BLIND, CLAIM, {}, *NOT_SHOWN),
    "of what a chain can prove": (UPTO, CLAIM, TRUSTS, *NOT_SHOWN),
    "of less": (BLIND, {**CLAIM, "claim": Claim(Nanos(HALF - 1), "")}, TRUSTS, *NOT_SHOWN),
    "that was not made": (BLIND, {**CLAIM, "claim": None}, TRUSTS, *NOT_SHOWN),
    "by other evidence": (BLIND, {**CLAIM, "evidence": Evidence.ASSUMED}, TRUSTS, *NOT_SHOWN),
    "of a void": (
        BLIND,
        {**CLAIM, "state": VOIDED, "captured": Nanos(0), "claim": Claim(Nanos(0), "")},
        TRUSTS,
        *NOT_SHOWN,
    ),
}


@pytest.mark.parametrize(("hold", "fields", "opened", "rule", "what"), CLAIMED.values(), ids=CLAIMED)
def test_a_claim(hold, fields, opened, rule, what):
    rows = Rows(hold, opened=opened)
    after = captured(hold, HALF, **fields)
    rows.step(STEP[after.state], replace(after, closed_ms=0) if after.state is VOIDED else after)
    says(rows.said(), rule, what)


def test_a_claim_for_nothing_of_an_exact():
    hold = replace(ONE, chain_evidence=False)
    rows = Rows(hold, opened=TRUSTS)
    rows.step("capture", captured(hold, 0, evidence=Evidence.CLAIMED, claim=Claim(Nanos(0), "")))
    says(rows.said(), *NOT_SHOWN)


TOTAL, MINE = ("exposed", "total"), ("exposed", ONE.id)
EXPOSED = {
    "as much as may be": (HALF, None, None, {TOTAL: HALF, MINE: HALF}, *NOTHING),
    "one more than may be": (HALF - 1, None, None, {TOTAL: HALF, MINE: HALF}, GIVING, "more than 49999999"),
    "beside others": (HALF + 5, 5, None, {TOTAL: HALF + 5, MINE: HALF}, *NOTHING),
    "beside too many others": (HALF + 5, 6, None, {TOTAL: HALF + 6, MINE: HALF}, GIVING, "50000006 would be exposed"),
    "counted too low": (TEN, None, None, {TOTAL: HALF - 1, MINE: HALF}, GIVING, "exposed total: 50000000 are exposed"),
    "counted too high": (TEN, None, None, {TOTAL: HALF + 1, MINE: HALF}, GIVING, "50000000 are exposed"),
    "its own too low": (TEN, None, None, {TOTAL: HALF, MINE: 0}, GIVING, f"exposed {ONE.id}"),
    "not counted": (TEN, None, None, {MINE: HALF}, GIVING, "50000000 are exposed"),
    "its own not counted": (TEN, None, None, {TOTAL: HALF}, GIVING, "50000000 are exposed"),
    "in place of a part": (HALF, 30, 10, {TOTAL: HALF + 20, MINE: HALF}, GIVING, "would be exposed"),
    "in place of a part that is counted": (HALF + 20, 30, 10, {TOTAL: HALF + 20, MINE: HALF}, *NOTHING),
    "in place of all": (0, HALF, HALF, {TOTAL: HALF, MINE: HALF}, *NOTHING),
    "a sum that was lost": (TEN, 0, TEN, {TOTAL: 0, MINE: HALF}, *NOTHING),
}  # fmt: skip


@pytest.mark.parametrize(("most", "total", "mine", "written", "rule", "what"), EXPOSED.values(), ids=EXPOSED)
def test_what_is_exposed_stays_within_its_sum(most, total, mine, written, rule, what):
    marks = {("proof", KEY): {"hold": ONE.id}, TOTAL: total, MINE: mine}
    marks = {key: {"nanos": value} if isinstance(value, int) else value for key, value in marks.items()}
    rows = Rows(UPTO, marks=marks, opened={"most_exposed": most})
    rows.step("capture", captured(UPTO, HALF, evidence=Evidence.CHAIN_HEAD, proof=KEY), HEAD)
    for key, nanos in written.items():
        rows.view.put_mark(key, {"nanos": nanos})
    says(rows.said(), rule, what)


def test_what_is_final_is_exposed_no_more():
    before = captured(UPTO, HALF, evidence=Evidence.CHAIN_HEAD, proof=KEY)
    rows = Rows(before, marks={TOTAL: {"nanos": HALF + 3}, MINE: {"nanos": HALF}, ("proof", KEY): {"hold": ONE.id}})
    rows.step("correct", replace(before, evidence=Evidence.CHAIN), FINAL)
    rows.view.put_mark(TOTAL, {"nanos": 3})
    rows.view.put_mark(MINE, {"nanos": 0})
    assert rows.said() == ""


@pytest.mark.parametrize("was", [HALF - 10, HALF])
def test_what_takes_no_less_is_not_refused_for_what_it_exposes(was):
    before = captured(UPTO, was, evidence=Evidence.CLAIMED)
    rows = Rows(before, marks={TOTAL: {"nanos": 0}, MINE: None, ("proof", KEY): {"hold": ONE.id}})
    rows.step("correct", replace(before, captured=Nanos(HALF), evidence=Evidence.CHAIN_HEAD, proof=KEY), HEAD)
    rows.view.put_mark(TOTAL, {"nanos": HALF})
    rows.view.put_mark(MINE, {"nanos": HALF})
    assert rows.said() == ""


def test_one_of_two_that_expose_gives_back():
    """The first one does, and the other one takes no less: the sum is looked at."""
    first = replace(UPTO, id=NEW.id, intent=replace(UPTO.intent, nonce=int(NEW.id, 16)))
    second = captured(UPTO, HALF, evidence=Evidence.CLAIMED)
    other = KEY[:-1] + "8"
    marks = {("proof", KEY): {"hold": NEW.id}, ("proof", other): {"hold": ONE.id}, TOTAL: None, MINE: None}
    marks[("exposed", NEW.id)] = None
    rows = Rows(first, second, marks=marks, opened={"most_exposed": TEN - 1})
    proven = captured(first, HALF, evidence=Evidence.CHAIN_HEAD, proof=KEY)
    rows.step("capture", proven, replace(HEAD, nonce=NEW.id))
    rows.step("correct", replace(second, evidence=Evidence.CHAIN_HEAD, proof=other), replace(HEAD, log_index=8))
    for key, nanos in ((TOTAL, TEN), (MINE, HALF), (("exposed", NEW.id), HALF)):
        rows.view.put_mark(key, {"nanos": nanos})
    says(rows.said(), GIVING, "100000000 would be exposed to undone blocks, more than 99999999")


@pytest.mark.parametrize(("most", "rule"), [(0, GIVING), (1, "")])
def test_the_least_that_may_be_exposed(most, rule):
    hold = replace(UPTO, amount=Nanos(100_000))
    marks = {("proof", KEY): {"hold": ONE.id}, TOTAL: None, MINE: None}
    rows = Rows(hold, marks=marks, opened={"most_exposed": most})
    after = captured(hold, 99_999, evidence=Evidence.CHAIN_HEAD, proof=KEY)
    rows.step("capture", after, replace(HEAD, amount_atomic=99_999))
    for key in (TOTAL, MINE):
        rows.view.put_mark(key, {"nanos": 1})
    says(rows.said(), rule, "1 would be exposed to undone blocks, more than 0")


def test_a_new_hold_that_exposes_gives_nothing_back():
    tool = replace(TOOL, evidence=Evidence.CHAIN_HEAD)
    rows = Rows(marks={TOTAL: None})
    rows.begin(tool)
    rows.step("capture", captured(tool, HALF + HALF))
    assert rows.said() == ""


def test_a_live_hold_with_head_evidence_exposes_nothing():
    """It was open again; then a block shows that nothing was taken of it."""
    hold = replace(UPTO, evidence=Evidence.CHAIN_HEAD)
    marks = {("proof", KEY): {"hold": ONE.id}, TOTAL: None, MINE: None}
    rows = Rows(hold, marks=marks, opened={"most_exposed": TEN})
    rows.step("capture", captured(hold, 0, proof=KEY), replace(HEAD, amount_atomic=0))
    rows.view.put_mark(TOTAL, {"nanos": TEN})
    rows.view.put_mark(MINE, {"nanos": TEN})
    assert rows.said() == ""


@pytest.mark.parametrize("value", [{}, {"hold": 1}, {"hold": ONE.id, "note": 1}, {"hold": True}])
def test_a_mark_of_a_proof_names_a_hold_and_says_no_more(value):
    rows = Rows(marks={("proof", KEY): None})
    rows.view.put_mark(("proof", KEY), value)
    says(rows.said(), GIVING, f"mark proof/{KEY}: it names no hold")


@pytest.mark.parametrize("key", [TOTAL, MINE])
def test_a_mark_of_what_is_exposed_is_moved_by_a_hold(key):
    rows = Rows(UPTO, marks={key: {"nanos": 5}})
    rows.view.put_mark(key, {"nanos": 4})
    says(rows.said(), GIVING, f"{key[0]} {key[1]}: it is written, and no hold moves it")
    rows = Rows(UPTO, marks={key: {"nanos": 5}})
    assert rows.said(lambda sent: replace(sent, marks=((key, {"nanos": 5}),))) == ""

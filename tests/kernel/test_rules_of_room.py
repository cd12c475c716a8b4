"""What each clause of the rules room and durable says, on rows by hand."""

import pytest
from msgspec.structs import replace

from tests.kernel.rows import LLM, NEW, ONE, TEN, TOOL, UPTO, Rows, captured, node, says
from tests.support.ledger import START_MS
from x402guard.kernel.proofs import Billed, ByOwner, Lost, Stated, Undone
from x402guard.kernel.rows import WALLET, Delivery, Evidence, HoldKind, Nanos, NodeKind, NodeState, Window

BOOKS, ROOM, DURABLE = "books", "room", "durable"
NOTHING = ("", "")
DAY, DAY_MS = Window("day", "UTC"), 86_400_000
MIDNIGHT_MS = START_MS - START_MS % DAY_MS


def by_owner(command, node_id="s"):
    return ByOwner(node_id, command, "me")


CENT = TEN // 10


def test_a_new_hold_fits():
    for limit, name in ((TEN, "s"), (TEN, WALLET), (TEN - 1, "s"), (TEN - 1, WALLET)):
        rows = Rows(**{name: {"limit": Nanos(limit)}})
        rows.begin(NEW)
        says(rows.said(), "" if limit == TEN else ROOM, f"it does not fit: '{name}' would be 1 past its limit")


def test_tokens_that_do_not_fit():
    rows = Rows(more=[node("t", None, NodeKind.TOKENS, TEN - 1)])
    hold = replace(TOOL, node_id="t", kind=HoldKind.TOKENS)
    rows.begin(hold, is_booked=False)
    rows.view.record("t", "authorize", hold_id=hold.id, held=TEN)
    says(rows.said(), ROOM, "it does not fit: 't' would be 1 past its limit")


@pytest.mark.parametrize("kind", list(NodeKind)[:4])
def test_a_payment_lies_in_a_session_or_scope(kind):
    rows = Rows(more=[node("x", WALLET, kind)])
    rows.begin(replace(NEW, node_id="x"))
    fits = kind in (NodeKind.SESSION, NodeKind.SCOPE)
    says(rows.said(), "" if fits else ROOM, f"a payment lies in a session or scope, and 'x' is a {kind}")
    rows = Rows(more=[node("x", WALLET, kind)])
    rows.begin(replace(TOOL, node_id="x"))
    assert rows.said() == ""


OVER, TRIPPED, CLOSED = "whose time is over", "which is tripped", "which is closed"
NOT_OPEN = {
    "tripped": ({"state": NodeState.TRIPPED}, {}, TRIPPED),
    "closed": ({"state": NodeState.CLOSED}, {}, CLOSED),
    "closed until now": ({"state": NodeState.CLOSED}, {"state": NodeState.OPEN}, CLOSED),
    "closed from now on": ({}, {"state": NodeState.CLOSED}, CLOSED),
    "until now": ({"until_ms": START_MS}, {}, OVER),
    "until a moment from now": ({"until_ms": START_MS + 1}, {}, ""),
    "over from now on": ({"until_ms": START_MS + 1}, {"until_ms": START_MS}, OVER),
}


@pytest.mark.parametrize("name", ["s", WALLET])
@pytest.mark.parametrize(("before", "then", "what"), NOT_OPEN.values(), ids=NOT_OPEN)
def test_a_new_hold_lies_below_open_nodes(before, then, what, name):
    rows = Rows(**{name: before})
    rows.begin(NEW)
    if then:
        rows.put(name, **then)
    says(rows.said(), ROOM if what else "", what)


def test_a_bill_begins_and_ends_below_what_is_closed():
    rows = Rows(s={"state": NodeState.CLOSED})
    rows.begin(LLM)
    rows.step("capture", captured(LLM, TEN))
    assert rows.said() == ""


def test_a_new_node_takes_a_hold_at_once():
    rows = Rows()
    rows.before.nodes["x"] = None
    rows.view.put_node(node("x", WALLET))
    rows.begin(replace(NEW, node_id="x"))
    assert rows.said() == ""


@pytest.mark.parametrize(
    ("before", "after", "command", "rule"),
    [("tripped", "open", None, ROOM), ("tripped", "closed", None, ROOM), ("tripped", "open", "reset", ""),
     ("tripped", "open", "limit", ROOM), ("tripped", "tripped", None, ""), ("closed", "open", None, ""),
     ("open", "tripped", None, "")],
)  # fmt: skip
def test_a_node_leaves_tripped_by_its_owner(before, after, command, rule):
    rows = Rows(s={"state": NodeState(before)})
    rows.put("s", state=NodeState(after), starved=1)
    if command:
        rows.view.prove(by_owner(command))
    says(rows.said(), rule, "it would be tripped no more, and no owner says so")


def past_limit(*holds, limit=2 * TEN, **fields):
    return Rows(*holds, s={"limit": Nanos(limit), **fields})


def ends(rows, what, *, state=NodeState.TRIPPED):
    rows.put("s", state=state)
    says(rows.said(), *((ROOM, what) if what else NOTHING))


BILL = captured(LLM, 3 * TEN)
TAKEN = captured(UPTO, 0, evidence=Evidence.CHAIN, ended_by="{}")
AGAIN = Undone(*(UPTO.intent.network, UPTO.intent.token, UPTO.intent.payer, UPTO.id))


def test_past_its_limit_a_node_is_carried_by_a_bill_and_tripped():
    for state, what in (
        (NodeState.TRIPPED, ""),
        (NodeState.OPEN, "1 past its limit, and open"),
        (NodeState.CLOSED, "and not tripped"),
    ):
        rows = past_limit(LLM, limit=3 * TEN - 1)
        rows.step("capture", BILL)
        ends(rows, what, state=state)


CARRIED = {
    "a bill": (LLM, "capture", BILL, None, ""),
    "a correction": (captured(LLM, TEN), "correct", BILL, None, ""),
    "a correction of a payment": (
        captured(UPTO, TEN, evidence=Evidence.CHAIN), "correct",
        captured(UPTO, 3 * TEN, evidence=Evidence.CHAIN), None, ""),
    "a payment that is open again": (TAKEN, "reopen", replace(UPTO, closed_ms=0), AGAIN, ""),
    "a payment's capture": (
        UPTO, "capture", captured(UPTO, 3 * TEN, evidence=Evidence.CHAIN), None, "no bill or correction carries it"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "step", "after", "proof", "what"), CARRIED.values(), ids=CARRIED)
def test_what_carries_a_node_past_its_limit(before, step, after, proof, what):
    rows = past_limit(before, limit=TEN - 1 if step == "reopen" else 2 * TEN)
    rows.step(step, after, proof)
    ends(rows, what)


def test_a_charge_and_a_lost_hold_carry():
    rows = past_limit(limit=TEN - 1)
    rows.begin(LLM)
    rows.step("capture", captured(LLM, TEN))
    ends(rows, "")
    rows = past_limit(limit=TEN - 1)
    rows.now = replace(rows.now, lost=frozenset([NEW.id]))
    rows.begin(NEW, Lost(NEW.id))
    ends(rows, "")


def test_a_bill_for_what_was_held_carries_nothing():
    """A child's draw beside it moves the node: the bill itself takes no more than before."""
    rows = Rows(LLM, s={"limit": Nanos(TEN), "granted_out": 0}, more=[node("x", "s")])
    rows.step("capture", captured(LLM, TEN))
    rows.begin(replace(TOOL, node_id="x"), is_booked=False)
    rows.view.record("x", "authorize", hold_id=TOOL.id, held=TEN, granted_in=TEN)
    rows.view.record("s", "grant", granted_in=TEN, granted_out=TEN)
    rows.view.record(WALLET, "grant", granted_out=TEN)
    says(rows.said(), ROOM, "it does not fit: 's' would be 100000000 past its limit")


LOWERED = {
    "by its owner": ({"limit": Nanos(TEN - 1)}, "limit", NodeState.TRIPPED, ""),
    "lowered": ({"limit": Nanos(TEN - 1)}, None, NodeState.TRIPPED, ""),
    "lowered, and open": ({"limit": Nanos(TEN - 1)}, None, NodeState.OPEN, "and open"),
    "lowered, and closed": ({"limit": Nanos(TEN - 1)}, None, NodeState.CLOSED, "and not tripped"),
    "to all that is used": ({"limit": Nanos(TEN)}, None, NodeState.OPEN, ""),
}


@pytest.mark.parametrize("had", [2 * TEN, None])
@pytest.mark.parametrize(("fields", "command", "state", "what"), LOWERED.values(), ids=LOWERED)
def test_a_limit_below_what_is_used(fields, command, state, what, had):
    rows = Rows(ONE, s={"limit": None if had is None else Nanos(had)})
    rows.put("s", **fields)
    if command:
        rows.view.prove(by_owner(command))
    ends(rows, what, state=state)


@pytest.mark.parametrize(
    ("command", "node_id", "rule"), [("clock", "s", ""), ("clock", WALLET, BOOKS), (None, "s", BOOKS)]
)
def test_the_owners_clock_carries_too(command, node_id, rule):
    rows = Rows(ONE, s={"limit": Nanos(TEN - 3), "window": DAY, "since_ms": MIDNIGHT_MS, "past": 5})
    rows.put("s", past=0, state=NodeState.TRIPPED)
    if command:
        rows.view.prove(by_owner(command, node_id))
    says(rows.said(), rule, "past would be 0")


TOO_MUCH = captured(UPTO, 3 * TEN, evidence=Evidence.CHAIN)
NOT_CARRIED = "no bill or correction carries it"


@pytest.mark.parametrize(("command", "what"), [("limit", ""), ("reset", NOT_CARRIED), ("forgive", NOT_CARRIED)])
def test_the_owners_limit_carries_too(command, what):
    rows = past_limit(UPTO)
    rows.step("capture", TOO_MUCH)
    rows.put("s", limit=Nanos(2 * TEN + (command == "limit")))
    rows.view.prove(by_owner(command))
    ends(rows, what)


def test_a_limit_of_nothing():
    rows = past_limit(UPTO, limit=0, state=NodeState.TRIPPED)
    rows.step("capture", TOO_MUCH)
    ends(rows, NOT_CARRIED)
    rows = Rows(captured(LLM, 1), s={"limit": Nanos(1)})
    rows.put("s", limit=Nanos(0))
    ends(rows, "")


def test_a_bill_carries_a_new_node():
    rows = Rows()
    rows.before.nodes["x"] = None
    rows.view.put_node(node("x", WALLET, limit=TEN - 1))
    after = captured(replace(LLM, node_id="x"), TEN)
    rows.begin(replace(LLM, node_id="x"))
    rows.view.take_step("capture", after)
    rows.book(after, held=-TEN, taken=TEN, node_id="x")
    says(rows.said(), ROOM, "node x: it would be 1 past its limit, and open")
    rows.put("x", state=NodeState.TRIPPED)
    assert rows.said() == ""


def test_what_is_past_its_limit_already_may_stay_so():
    for state in NodeState:
        rows = past_limit(ONE, TOOL, limit=TEN, state=NodeState.CLOSED)
        rows.step("capture", captured(TOOL, TEN - CENT), Stated())
        ends(rows, "and open" if state is NodeState.OPEN else "", state=state)


def test_a_token_budget_is_past_its_limit_and_open():
    rows = Rows(more=[node("t", None, NodeKind.TOKENS, 5)])
    rows.view.record("t", "usage", captured=6)
    assert rows.said() == ""


def test_a_child_carries_its_parent_with_it_alone():
    rows = Rows(LLM, s={"limit": Nanos(TEN)}, **{WALLET: {"limit": Nanos(TEN)}})
    rows.step("capture", captured(LLM, TEN + 1))
    rows.put("s", state=NodeState.TRIPPED)
    says(rows.said(), ROOM, "node wallet: it would be 1 past its limit, and open")
    rows.put(WALLET, state=NodeState.TRIPPED)
    assert rows.said() == ""


PASSING = {
    "a new hold": (lambda rows: rows.begin(NEW), DURABLE),
    "a bill": (lambda rows: rows.step("capture", captured(LLM, TEN + 1)), DURABLE),
    "a capture of what was held": (lambda rows: rows.step("capture", captured(LLM, TEN)), ""),
    "something given back": (lambda rows: rows.step("capture", captured(LLM, 1), Billed("usage")), ""),
    "a remark": (lambda rows: rows.view.put_hold(replace(LLM, delivery=Delivery.LOST)), ""),
    "what goes out again": (lambda rows: rows.view.put_hold(replace(LLM, presented=1, instance="x")), DURABLE),
    "a lower limit": (lambda rows: rows.put("s", limit=Nanos(4 * TEN)), DURABLE),
    "the same limit": (lambda rows: rows.put("s", starved=1), ""),
    "a first limit": (lambda rows: rows.put(WALLET, limit=Nanos(9 * TEN)), DURABLE),
    "a trip": (lambda rows: rows.put("s", state=NodeState.TRIPPED), DURABLE),
    "a close": (lambda rows: rows.put("s", state=NodeState.CLOSED), ""),
    "tripped as before": (lambda rows: rows.put("x", starved=1), ""),
    "a command": (lambda rows: (rows.put("s", starved=1), rows.view.prove(by_owner("forgive"))), DURABLE),
    "usage of tokens": (lambda rows: rows.view.record("t", "usage", captured=6), ""),
    "fewer tokens": (lambda rows: rows.put("t", limit=Nanos(1)), ""),
}


@pytest.mark.parametrize(("act", "rule"), PASSING.values(), ids=PASSING)
def test_what_restrains_survives_a_power_cut(act, rule):
    more = [node("t", None, NodeKind.TOKENS), node("x", WALLET, state=NodeState.TRIPPED)]
    rows = Rows(LLM, more=more, **{WALLET: {"limit": None}})
    act(rows)
    says(rows.said(durable=False), rule, "in a change that a power cut may lose")
    assert rows.said() == ""


def test_a_new_node_survives_a_power_cut_and_more_tokens_need_not():
    rows = Rows(more=[node("t", None, NodeKind.TOKENS)])
    rows.before.nodes["x"] = None
    rows.view.put_node(node("x", WALLET))
    says(rows.said(durable=False), DURABLE, "node x: it is restrained")
    rows = Rows(more=[node("t", None, NodeKind.TOKENS)])
    hold = replace(TOOL, node_id="t", kind=HoldKind.TOKENS)
    rows.begin(hold, is_booked=False)
    rows.view.record("t", "authorize", hold_id=hold.id, held=TEN)
    assert rows.said(durable=False) == ""


FLAGGED = {"state": NodeState.TRIPPED, "terminated_by": "overshoot", "warned": 1_000_001}
LOOSER = {
    "an owner's trip becomes an overshoot": ({"state": NodeState.TRIPPED, "terminated_by": "kill_switch"}, {"terminated_by": "overshoot", "warned": 1_000_001}, ROOM),
    "an overshoot of this window becomes one of before": (FLAGGED, {"warned": 900_000}, ROOM),
    "an overshoot becomes an owner's trip": (FLAGGED, {"terminated_by": "kill_switch"}, ""),
    "a soft limit is told": (FLAGGED, {"warned": 1_500_001}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "rule"), LOOSER.values(), ids=LOOSER)
@pytest.mark.parametrize("command", [None, "reset"])
def test_no_trip_is_made_one_that_ends_by_itself(before, after, rule, command):
    rows = Rows(s=before)
    rows.put("s", **after)
    if command:
        rows.view.prove(by_owner(command))
    says(rows.said(), "" if command else rule, "it would be tripped no more, and no owner says so")

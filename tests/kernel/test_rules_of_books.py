"""What each clause of the rules books, room and durable says, on rows by hand."""

import pytest
from msgspec.structs import astuple, replace

from tests.kernel.rows import LLM, NEW, ONE, TEN, TOOL, UPTO, Rows, captured, ended, node, says
from tests.support.ledger import START_MS
from x402guard.kernel.proofs import ByOwner, Final, Lost, Unsigned
from x402guard.kernel.rows import (
    WALLET,
    Evidence,
    HoldState,
    Nanos,
    NodeKind,
    NodeState,
    Window,
    entry_hash,
)

BOOKS, ROOM, DURABLE = "books", "room", "durable"
NOTHING = ("", "")
DAY, DAY_MS = Window("day", "UTC"), 86_400_000
MIDNIGHT_MS = START_MS - START_MS % DAY_MS
BALANCES = ("captured", "held", "granted_in", "granted_out")
ENTRIES = "another amount than its entries"


def by_owner(command, node_id="s"):
    return ByOwner(node_id, command, "me")


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("name", BALANCES)
def test_a_balance_moves_by_its_entries(name, by):
    rows = Rows(ONE, s={"captured": 5, "granted_out": 5, "granted_in": TEN + 10})
    rows.put("s", **{name: getattr(rows.view.node("s"), name) + by})
    says(rows.said(), BOOKS, f"node s: its balances move by {ENTRIES}")


@pytest.mark.parametrize("name", BALANCES)
def test_no_balance_is_negative(name):
    rows = Rows(s={name: -1})
    rows.put("s", starved=1)
    says(rows.said(), BOOKS, "a balance would be negative")


@pytest.mark.parametrize("amounts", [{"held": 5}, {"captured": 5}, {"held": -5}])
def test_a_balance_moves_by_its_holds(amounts):
    rows = Rows(ONE)
    rows.book(ONE, held=amounts.get("held", 0), taken=amounts.get("captured", 0))
    rows.put(WALLET, live=TEN)
    says(rows.said(), BOOKS, "another amount than its holds")


def test_tokens_are_used_without_a_hold_and_money_is_not():
    rows = Rows(more=[node("t", None, NodeKind.TOKENS)])
    rows.view.record("t", "usage", captured=5)
    assert rows.said() == ""
    for hold_id, amount in (("x", 5), (None, -1)):
        rows = Rows(more=[node("t", None, NodeKind.TOKENS, captured=9)])
        rows.view.record("t", "usage", hold_id=hold_id, captured=amount)
        says(rows.said(), BOOKS, "node t: its balances move by another amount than its holds")
    rows = Rows()
    rows.view.record("s", "usage", captured=5, granted_in=5)
    rows.view.record(WALLET, "grant", granted_out=5)
    says(rows.said(), BOOKS, "node s: its balances move by another amount than its holds")


@pytest.mark.parametrize("name", ["s", WALLET])
def test_what_is_live_moves_by_the_holds_below(name):
    rows = Rows(ONE)
    rows.begin(NEW)
    rows.put(name, live=2 * TEN + 1)
    says(rows.said(), BOOKS, f"node {name}: live would be 200000001, and the holds below it move it by 100000000")


def test_a_lender_counts_its_own_live_holds_alone():
    for keeps_idle, live in ((True, TEN), (False, 2 * TEN)):
        rows = Rows(ONE, opened={"keeps_idle": keeps_idle})
        rows.begin(NEW)
        assert rows.view.node(WALLET).live == live
        assert rows.said() == ""
        rows.put(WALLET, live=3 * TEN - live)
        says(rows.said(), BOOKS, "node wallet: live would be")


@pytest.mark.parametrize("fields", [{"seq": 9}, {"head": "x"}])
@pytest.mark.parametrize("is_moved", [False, True])
def test_a_head_is_the_last_entry(fields, is_moved):
    rows = Rows(ONE)
    if is_moved:
        rows.begin(NEW)
    rows.put("s", **fields)
    says(rows.said(), BOOKS, "node s: its head is not its last entry")


@pytest.mark.parametrize(("by", "node_id"), [(1, WALLET), (-1, WALLET)])
def test_a_parent_grants_what_its_children_draw(by, node_id):
    rows = Rows(ONE)
    rows.begin(NEW)
    rows.view.record(node_id, "grant", granted_out=by)
    says(rows.said(), BOOKS, f"node wallet: its children draw {TEN}, and it has granted {TEN + by}")


def without(node_id):
    """The change set without one node's row."""
    return lambda sent: replace(sent, nodes=tuple(each for each in sent.nodes if each.id != node_id))


def entry_of(rows, edit):
    """The change set with its last entry changed and sealed again, and the row's head with it."""

    def change(sent):
        last = replace(sent.entries[-1], **edit)
        last = replace(last, hash=entry_hash(astuple(last)[:-1]))
        nodes = tuple(
            replace(each, head=last.hash, seq=last.seq) if each.id == last.node_id else each for each in sent.nodes
        )
        return replace(sent, entries=(*sent.entries[:-1], last), nodes=nodes)

    return rows.said(change)


def test_a_row_that_is_moved_is_written():
    rows = Rows(ONE)
    rows.begin(NEW)
    says(rows.said(without(WALLET)), BOOKS, "node wallet: its holds or entries move it, and its row is not written")
    rows = Rows(ONE)
    rows.view.record("s", "event")
    says(rows.said(without("s")), BOOKS, "its row is not written")
    for step, after, proof in (
        ("void", ended(ONE, HoldState.VOIDED), Unsigned(ONE.id)),
        ("capture", captured(ONE, TEN), None),
    ):
        rows = Rows(ONE)
        rows.view.take_step(step, after, proof)
        says(rows.said(), BOOKS, "node s: its holds or entries move it")
    rows = Rows(captured(LLM, TEN))
    rows.view.take_step("correct", captured(LLM, TEN + 1))
    says(rows.said(), BOOKS, "node s: its holds or entries move it")


SEALED = {
    "as it is": ({}, ""),
    "a number too high": ({"seq": 3}, "does not follow"),
    "the same number": ({"seq": 1}, "does not follow"),
    "another one before it": ({"previous": "x"}, "does not follow"),
    "now": ({"at_ms": START_MS}, ""),
    "ahead of the clock": ({"at_ms": START_MS + 5}, ""),
    "before now": ({"at_ms": START_MS - 1}, f"is dated {START_MS - 1}, and now is {START_MS + 5}"),
    "after now": ({"at_ms": START_MS + 6}, f"is dated {START_MS + 6}"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "what"), SEALED.values(), ids=SEALED)
def test_an_entry_follows_the_one_before_it(edit, what):
    rows = Rows(now={"now_ms": START_MS + 5}, s={"seq": 1, "head": "h"})
    rows.view.record("s", "event")
    says(entry_of(rows, edit), BOOKS if what else "", what)


def test_an_entry_is_sealed_and_a_second_one_follows_it():
    rows = Rows(s={"seq": 1, "head": "h"})
    rows.view.record("s", "event")
    says(rows.said(lambda sent: replace(sent, entries=(replace(sent.entries[0], data="x"),))), BOOKS, "is not sealed")
    rows.view.record("s", "event")
    assert rows.said() == ""
    says(rows.said(lambda sent: replace(sent, entries=sent.entries[::-1])), BOOKS, "entry 3 does not follow 1")


def test_what_is_written_was_loaded_or_looked_for():
    rows = Rows(ONE)
    rows.begin(NEW)
    for kept, name in ((rows.before.nodes, WALLET), (rows.before.nodes, "s"), (rows.before.holds, NEW.id)):
        row = kept.pop(name)
        says(rows.said(), BOOKS, f"{name}: it is written twice, or was neither loaded nor looked for")
        kept[name] = row
    for kind, rule in (("proof", BOOKS), ("exposed", BOOKS), ("wallet", BOOKS), ("origin", "")):
        rows = Rows()
        rows.view.put_mark((kind, "x"), {"a": 1})
        says(rows.said(), rule, f"mark {kind} x: it is written twice, or was neither")


def test_no_row_is_written_twice():
    rows = Rows(ONE)
    rows.put("s", starved=1)
    rows.view.put_hold(replace(ONE, doubt="x"))
    assert rows.said() == ""
    says(rows.said(lambda sent: replace(sent, nodes=sent.nodes * 2)), BOOKS, "node s: it is written twice")
    says(rows.said(lambda sent: replace(sent, holds=sent.holds * 2)), BOOKS, f"hold {ONE.id}: it is written twice")


UNTIL = {"until_ms": START_MS + 9, "limit": Nanos(TEN), "window": DAY, "since_ms": MIDNIGHT_MS}
FIXED = "its parent, kind, name, time of creation or window would change"
EDITED = {
    "another parent": ({"parent_id": "x"}, None, BOOKS, FIXED),
    "another kind": ({"kind": NodeKind.SCOPE}, None, BOOKS, FIXED),
    "another window": ({"window": Window("week", "UTC")}, None, BOOKS, FIXED),
    "no window": ({"window": None}, None, BOOKS, FIXED),
    "another name": ({"name": "x"}, None, BOOKS, FIXED),
    "another beginning": ({"created_ms": 1}, None, BOOKS, FIXED),
    "a higher limit": ({"limit": Nanos(TEN + 1)}, None, BOOKS, "its limit would rise from 100000000 to 100000001"),
    "no limit": ({"limit": None}, None, BOOKS, "its limit would rise from 100000000 to None"),
    "a higher limit by its owner": ({"limit": Nanos(TEN + 1)}, "limit", *NOTHING),
    "no limit by its owner": ({"limit": None}, "limit", *NOTHING),
    "a higher limit by another command": ({"limit": Nanos(TEN + 1)}, "reset", BOOKS, "its limit would rise"),
    "a lower limit": ({"limit": Nanos(TEN - 1)}, None, *NOTHING),
    "a later end": ({"until_ms": START_MS + 10}, None, BOOKS, "its end would move"),
    "no end": ({"until_ms": None}, None, BOOKS, "its end would move"),
    "an earlier end": ({"until_ms": 0}, None, *NOTHING),
    "its last time earlier": ({"last_ms": START_MS - 1}, None, BOOKS, "last_ms would be"),
    "its last time later": ({"last_ms": START_MS + 6}, None, BOOKS, "last_ms would be"),
    "its last time now": ({"last_ms": START_MS + 5}, None, *NOTHING),
    "its last time earlier by the clock": ({"last_ms": START_MS - 1}, "clock", *NOTHING),
    "its last time later by the clock": ({"last_ms": START_MS + 6}, "clock", BOOKS, "last_ms would be"),
    "another start": ({"since_ms": MIDNIGHT_MS + 1}, None, BOOKS, "its window began at"),
    "another start by the clock": ({"since_ms": MIDNIGHT_MS - 1}, "clock", BOOKS, "its window began at"),
    "something past": ({"past": 1}, None, BOOKS, "past would be 1, and the windows work out 0"),
    "something past by the clock": ({"past": 1}, "clock", BOOKS, "past would be 1"),
    "something past by its owner": ({"past": 1}, "limit", BOOKS, "past would be 1"),
}


@pytest.mark.parametrize(("fields", "command", "rule", "what"), EDITED.values(), ids=EDITED)
def test_a_node_changes_as_its_owner_and_the_windows_say(fields, command, rule, what):
    rows = Rows(s=UNTIL, now={"now_ms": START_MS + 5}, more=[node("x", None, NodeKind.BUDGET)])
    if command is not None:
        rows.view.prove(by_owner(command))
    said = rows.said(lambda sent: replace(sent, nodes=(replace(rows.view.node("s"), **fields),)))
    says(said, rule, what)


AHEAD_MS = MIDNIGHT_MS + DAY_MS
MOVED = {
    "to now": ({"since_ms": MIDNIGHT_MS}, "clock", *NOTHING),
    "not at all": ({"since_ms": AHEAD_MS}, "clock", *NOTHING),
    "to another time": ({"since_ms": MIDNIGHT_MS + 1}, "clock", BOOKS, "its window began at"),
    "by no clock": ({"since_ms": MIDNIGHT_MS}, "limit", BOOKS, "its window began at"),
    "with nothing past": ({"past": 0}, "clock", *NOTHING),
    "with less past": ({"past": 4}, "clock", *NOTHING),
    "with more past": ({"past": 6}, "clock", BOOKS, "past would be 6"),
    "with less than nothing past": ({"past": -1}, "clock", BOOKS, "past would be -1"),
    "with less past by no clock": ({"past": 4}, "limit", BOOKS, "past would be 4"),
}


@pytest.mark.parametrize(("fields", "command", "rule", "what"), MOVED.values(), ids=MOVED)
def test_the_owners_clock_moves_a_window_that_has_not_begun(fields, command, rule, what):
    rows = Rows(captured(LLM, 5), s={"window": DAY, "since_ms": AHEAD_MS, "past": 5})
    rows.view.prove(by_owner(command))
    rows.put("s", **fields)
    says(rows.said(), rule, what)


def test_a_clock_moves_no_window_that_is_none():
    rows = Rows(s={"since_ms": AHEAD_MS})
    rows.view.prove(by_owner("clock"))
    rows.put("s", since_ms=MIDNIGHT_MS)
    says(rows.said(), BOOKS, "its window began at")


def test_where_there_is_no_limit_and_no_end_one_may_be_set():
    rows = Rows(**{WALLET: {"limit": None}})
    rows.put(WALLET, limit=Nanos(1), until_ms=START_MS, last_ms=START_MS)
    assert rows.said() == ""


def test_a_last_time_of_another_clock_stays():
    rows = Rows(s={"last_ms": 5})
    rows.put("s", starved=1)
    assert rows.said() == ""


def test_a_new_window_begins_by_the_kernels_clock():
    rows = Rows(ONE, captured(LLM, 3), s={"window": DAY, "since_ms": MIDNIGHT_MS - DAY_MS})
    after = rows.view.node("s")
    assert (after.since_ms, after.past) == (MIDNIGHT_MS, 3)
    rows.put("s", starved=1)
    assert rows.said() == ""
    rows.put("s", since_ms=MIDNIGHT_MS - DAY_MS, past=0)
    says(rows.said(), BOOKS, "its window began at")


def test_what_closes_in_a_window_that_is_over_is_past():
    """Above it too, and each step for itself; a node beside it is not moved."""
    beside = node("y", WALLET, window=DAY, since_ms=MIDNIGHT_MS)
    tree = [beside, node("x", "s", window=DAY, since_ms=MIDNIGHT_MS, held=TEN, granted_in=TEN, live=TEN)]
    hold = replace(TOOL, node_id="x", deadline_unix=MIDNIGHT_MS // 1000 - 5, created_ms=1)
    rows = Rows(hold, more=tree, s={"window": DAY, "since_ms": MIDNIGHT_MS, "held": 0, "granted_out": TEN})
    after = captured(hold, TEN, closed_ms=(MIDNIGHT_MS // 1000 - 5) * 1000)
    rows.view.take_step("lapse", after)
    rows.view.record("x", "lapse", hold_id=hold.id, held=-TEN, captured=TEN)
    says(rows.said(), BOOKS, "past would be 0, and the windows work out 100000000")
    rows.put("x", past=TEN)
    says(rows.said(), BOOKS, "node s: past would be 0, and the windows work out 100000000")
    rows.put("s", past=TEN)
    rows.put("y", starved=1)
    assert rows.said() == ""
    rows.put(WALLET, past=TEN)
    says(rows.said(), BOOKS, "node wallet: past would be 100000000, and the windows work out 0")


def test_a_root_draws_from_no_one():
    rows = Rows(**{WALLET: {"granted_in": 5}})
    rows.put(WALLET, starved=1)
    says(rows.said(), BOOKS, "node wallet: it uses 0, and would have drawn 5 from None")


KEEPS = {
    "in a store that keeps idle budget": ({"keeps_idle": True}, {}, {}, 5, *NOTHING),
    "in another store": ({}, {}, {}, 5, BOOKS, "it uses 0, and would have drawn 5"),
    "less than it uses": ({"keeps_idle": True}, {}, {}, -5, BOOKS, "it uses 5, and would have drawn 0"),
    "tripped": ({"keeps_idle": True}, {}, {"state": NodeState.TRIPPED}, 5, BOOKS, "would have drawn 5"),
    "from a session": ({"keeps_idle": True}, {"kind": NodeKind.SESSION}, {}, 5, BOOKS, "would have drawn 5"),
    "from a window": (
        {"keeps_idle": True}, {"window": DAY, "since_ms": MIDNIGHT_MS}, {}, 5, BOOKS, "would have drawn 5"),
}  # fmt: skip


@pytest.mark.parametrize(("opened", "wallet", "session", "idle", "rule", "what"), KEEPS.values(), ids=KEEPS)
def test_a_child_keeps_idle_budget_where_its_parent_lends(opened, wallet, session, idle, rule, what):
    amounts = {"granted_in": idle} if idle > 0 else {"captured": -idle}
    rows = Rows(opened=opened, s={**amounts, **session}, **{WALLET: {"granted_out": max(idle, 0), **wallet}})
    rows.put("s", starved=1)
    says(rows.said(), rule, what)


ROOT = {"parent_id": None, "kind": NodeKind.WALLET}
NEW_NODES = {
    "a session": ({}, *NOTHING),
    "a budget of tokens": ({"parent_id": None, "kind": NodeKind.TOKENS, "limit": None}, *NOTHING),
    "a second root": (ROOT, BOOKS, "it would be a second root beside 'wallet'"),
    "a root of another kind": ({"id": "root", "parent_id": None}, BOOKS, "it would be a second root beside 'root'"),
    "the root": ({**ROOT, "id": "root", "limit": None}, *NOTHING),
    "a wallet below": ({"kind": NodeKind.WALLET}, BOOKS, "a wallet does not hang below 's'"),
    "a session below tokens": ({"parent_id": "t"}, BOOKS, "a session does not hang below 't'"),
    "tokens below": ({"kind": NodeKind.TOKENS}, BOOKS, "a tokens does not hang below 's'"),
    "without a limit": ({"limit": None}, BOOKS, "a new node has a limit"),
    "of yesterday": ({"created_ms": START_MS - 1}, BOOKS, "it begins at another time than now"),
    "of tomorrow": ({"created_ms": START_MS + 6}, BOOKS, "it begins at another time than now"),
    "of the ledger's time": ({"created_ms": START_MS + 5}, *NOTHING),
    "with a window": ({"window": DAY, "since_ms": MIDNIGHT_MS}, *NOTHING),
    "with a window of tomorrow": (
        {"window": DAY, "since_ms": MIDNIGHT_MS + DAY_MS},
        BOOKS,
        "it begins at another time",
    ),
    "with a start and no window": ({"since_ms": 1}, BOOKS, "it begins at another time"),
    "with something captured": ({"captured": 1}, BOOKS, ENTRIES),
    "with something held": ({"held": 1}, BOOKS, ENTRIES),
    "with something drawn": ({"granted_in": 1}, BOOKS, ENTRIES),
    "with something granted": ({"granted_out": 1}, BOOKS, ENTRIES),
    "with something live": ({"live": 1}, BOOKS, "live would be 1"),
    "with something past": ({"past": 1}, BOOKS, "past would be 1"),
    "below no one": ({"parent_id": "y"}, BOOKS, "node y: it is neither loaded nor written"),
}


@pytest.mark.parametrize(("fields", "rule", "what"), NEW_NODES.values(), ids=NEW_NODES)
def test_a_new_node(fields, rule, what):
    is_root = fields.get("id") == "root"
    rows = Rows(
        now={"now_ms": START_MS + 5},
        opened={"root": "root"} if is_root else {},
        more=[node("t", None, NodeKind.TOKENS)],
    )
    new = replace(node("x", "s"), **fields)
    rows.before.nodes[new.id] = None
    says(rows.said(lambda sent: replace(sent, nodes=(new,))), rule, what)


def test_steps_count_in_their_order():
    """A correction takes from what is past, and never more than that; what closes in the past after it is added."""
    key = ("proof", "eip155:84532/0x07/0")
    before = captured(UPTO, TEN, evidence=Evidence.CLAIMED, closed_ms=MIDNIGHT_MS - 1)
    rows = Rows(before, s={"window": DAY, "since_ms": MIDNIGHT_MS, "past": 5}, marks={key: {"hold": ONE.id}})
    rows.now = replace(rows.now, lost=frozenset([TOOL.id]))
    late = replace(TOOL, deadline_unix=MIDNIGHT_MS // 1000 - 5, created_ms=1)
    rows.begin(late, Lost(TOOL.id))
    proof = Final(
        UPTO.intent.network, UPTO.intent.token, UPTO.intent.payer, ONE.id, UPTO.intent.payee, 50_000, "0x07", 0
    )
    rows.step("correct", replace(before, captured=Nanos(TEN // 2), evidence=Evidence.CHAIN, proof=key[1]), proof)
    rows.step("lapse", captured(late, TEN, closed_ms=MIDNIGHT_MS - 5_000))
    rows.put("s", past=TEN)
    assert rows.said() == ""


def test_a_step_that_is_not_in_the_table_counts_in_no_window():
    rows = Rows(ONE, s={"window": DAY, "since_ms": MIDNIGHT_MS})
    rows.view.take_step("note", ended(ONE, HoldState.VOIDED))
    rows.view.take_step("note", ONE)
    rows.put("s", starved=1)
    says(rows.said(), "lifecycle", "note from held to voided is not in the table")


@pytest.mark.parametrize(("depth", "rule"), [(1_001, ""), (1_002, BOOKS)])
def test_a_path_ends(depth, rule):
    """A row that is below itself is on a path without an end."""
    chain = [node("0", None, NodeKind.WALLET), *(node(str(each), str(each - 1)) for each in range(1, depth))]
    rows = Rows(more=chain)
    last = str(depth - 1)
    rows.look_for(TOOL.id)
    rows.view.take_step("authorize", replace(TOOL, node_id=last))
    rows.view.record(last, "authorize", hold_id=TOOL.id, held=TEN, granted_in=TEN)
    for above in range(depth - 2, -1, -1):
        rows.view.record(str(above), "grant", granted_out=TEN, granted_in=TEN if above else 0)
    says(rows.said(), rule, "it is below itself")

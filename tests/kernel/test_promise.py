"""Random change sets against the promise, in ten lines. What the kernel lets pass keeps it."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.ledger import START_MS, Clock, a_hold, an_id, usd
from x402guard.errors import IllegalTransition, X402GuardError
from x402guard.kernel.change_set import Now
from x402guard.kernel.commit import check
from x402guard.kernel.proofs import Billed, PayAgain, Stated, Unsent, Unsigned
from x402guard.kernel.rows import WALLET, Delivery, Evidence, HoldKind, HoldState, Nanos, NodeKind, NodeState
from x402guard.kernel.table import STEPS
from x402guard.ledger.authorize import authorize
from x402guard.ledger.sessions import NodeRequest, ensure_wallet, open_node
from x402guard.ledger.view import LedgerView, Scope
from x402guard.stores.memory import MemoryStore
from x402guard.stores.transacts import StoreClock

NAMES = ("first", "second", "third", "new")
AMOUNTS = st.sampled_from([0, 1, 10_000_000, 50_000_000, 90_000_000, -10_000_000, 100_000_000])


def counts(hold):
    return {HoldState.HELD: hold.amount, HoldState.CAPTURED: hold.captured}.get(hold.state, 0)


def promise(nodes, holds, before):
    """Captured and every live ceiling fit under each open limit; no signature is worth more; nothing comes back unproven."""
    for node in nodes.values():
        below = [hold for hold in holds.values() if node.id in (WALLET, hold.node_id)]
        if node.state is NodeState.OPEN and node.limit is not None:
            assert sum(map(counts, below)) <= node.limit
    for hold in holds.values():
        if hold.intent is not None and hold.state is HoldState.HELD:
            assert hold.intent.amount_atomic * 1_000 <= hold.amount
        if hold.id in before:
            assert counts(hold) >= counts(before[hold.id])


EDITS = st.one_of(
    st.tuples(st.just("node"), st.sampled_from([WALLET, "s"]), st.fixed_dictionaries({}, optional={
        "limit": AMOUNTS.map(Nanos), "captured": AMOUNTS, "held": AMOUNTS, "granted_in": AMOUNTS, "granted_out": AMOUNTS,
        "live": AMOUNTS, "past": AMOUNTS, "state": st.sampled_from(list(NodeState))})),
    st.tuples(st.just("hold"), st.sampled_from(NAMES), st.fixed_dictionaries({}, optional={
        "amount": AMOUNTS.map(Nanos), "captured": AMOUNTS.map(Nanos), "state": st.sampled_from(list(HoldState)),
        "node_id": st.sampled_from([WALLET, "s"]), "evidence": st.sampled_from(list(Evidence)),
        "delivery": st.sampled_from(list(Delivery)), "kind": st.sampled_from(list(HoldKind))})),
    st.tuples(st.just("record"), st.sampled_from([WALLET, "s"]), st.fixed_dictionaries({}, optional={
        "captured": AMOUNTS, "held": AMOUNTS, "granted_in": AMOUNTS, "granted_out": AMOUNTS})),
    st.tuples(st.just("step"), st.sampled_from(NAMES), st.tuples(
        st.sampled_from([name for _, name in STEPS] + ["authorize"]),
        st.sampled_from(["", "unsigned", "unsent", "billed", "stated", "again"]))),
    st.tuples(st.just("begin"), st.sampled_from(NAMES), AMOUNTS),
)  # fmt: skip


def a_ledger():
    clock = Clock()
    store = MemoryStore(clock_ms=clock)
    opening = NodeRequest("s", WALLET, NodeKind.SESSION, "s", usd("$0.10"), "o#1")
    store.transact(
        Scope(nodes=(WALLET, "s"), durable=True),
        lambda view: (ensure_wallet(view, usd("$0.10")), open_node(view, opening)),
    )
    for name, kind in (("first", HoldKind.PAYMENT), ("second", HoldKind.TOOL), ("third", HoldKind.PAYMENT)):
        hold = a_hold(name, "$0.02", kind=kind, now_ms=START_MS)
        store.transact(
            Scope(nodes=("s",), holds=(hold.id,), durable=True), lambda view, hold=hold: authorize(view, hold, {})
        )
    return store


def edit(view, what, name, how):
    """Do one thing that a room could do, however wrong."""
    hold_id = name if name == "second" else an_id(name)
    if what == "node":
        view.put_node(replace(view.node(name), **how))
    elif what == "record":
        view.record(name, "event", **how)
    elif what == "begin":
        hold = a_hold(name, "$0.02", now_ms=START_MS)
        view.take_step("authorize", replace(hold, amount=Nanos(how)))
        view.record("s", "authorize", hold_id=hold.id, held=how)
    elif (hold := view.hold(hold_id)) is not None:
        if what == "hold":
            view.put_hold(replace(hold, **how))
        else:
            step, word = how
            after = STEPS.get((hold.state, step), hold.state)
            proof = {"unsigned": Unsigned(hold.id), "unsent": Unsent(hold.id), "billed": Billed("nothing"),
                     "stated": Stated(), "again": PayAgain()}.get(word)  # fmt: skip
            view.take_step(step, replace(hold, state=after), proof)


@settings(max_examples=400, deadline=None)
@given(edits=st.lists(EDITS, min_size=1, max_size=6))
def test_what_passes_keeps_the_promise(edits):
    store = a_ledger()
    scope = Scope(nodes=(WALLET, "s"), holds=(*map(an_id, NAMES), "second"), durable=True)
    loaded = store._rows.load(scope, StoreClock(lambda: START_MS, lambda: START_MS).read)
    view = LedgerView(loaded)
    try:
        for what, name, how in edits:
            edit(view, what, name, how)
        change_set = view.change_set(durable=True)
        check(store.opened, loaded.before, change_set, Now(START_MS, START_MS))
    except (IllegalTransition, X402GuardError):
        return
    before = {
        hold_id: hold for hold_id, hold in loaded.before.holds.items() if hold is not None and hold.intent is not None
    }
    nodes = {node.id: node for node in loaded.before.nodes.values() if node is not None}
    holds = {hold.id: hold for hold in loaded.before.holds.values() if hold is not None}
    nodes |= {node.id: node for node in change_set.nodes}
    holds |= {hold.id: hold for hold in change_set.holds}
    promise(nodes, holds, before)

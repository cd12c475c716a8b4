"""Mutants of whole rooms: one line of theirs is wrong, and then they go on."""

from msgspec.structs import replace

from tests.kernel.mutants import DAY_MS, PROOF, by_chain, mutant, named
from tests.kernel.world import lost_upto
from x402guard.kernel.given_back import EXPOSED, exposed_mark
from x402guard.kernel.proofs import (
    AtHead,
    Billed,
    Stated,
    Unsent,
)
from x402guard.kernel.rows import WALLET, Evidence, HoldKind, Nanos, Node, NodeKind, NodeState
from x402guard.ledger.budgets import balance_grants, trip
from x402guard.ledger.events import Capture, Void
from x402guard.ledger.lost import LateEnd, write_end
from x402guard.ledger.purchases import take_over
from x402guard.ledger.token_budget import open_tokens
from x402guard.ledger.transitions import apply, begin
from x402guard.ledger.view import Scope
from x402guard.x402 import flow, purchase


def in_place_of_authorize(world, write):
    """``purchase`` writes its hold by ``write(view, hold, facts)``."""
    world.patch.setattr(purchase, "authorize", lambda view, hold, facts, undoing, proof: write(view, hold, facts))


@mutant("a tenth of the ceiling is held", "worth")
def _(world):
    hold = purchase._hold
    world.patch.setattr(purchase, "_hold", lambda *given: replace(hold(*given), amount=Nanos(1_000_000)))
    world.buy()


@mutant("the budget is not asked", "room")
def _(world):
    in_place_of_authorize(world, begin)
    world.buy()


@mutant("a tripped session is not asked", "room", wallet=None, session="$5.00")
def _(world):
    world.buy(1)
    trips = Scope(nodes=(world.session.id,), durable=True)
    world.store.transact(trips, lambda view: trip(view, world.session.id, "kill_switch", "stop"))
    world.patch.setattr(purchase, "check_standing", lambda view, context: None)
    in_place_of_authorize(world, begin)
    world.buy()


@mutant("a payment lies among tokens", "lifecycle")
def _(world):
    def write(view, hold, facts):
        if not view.has_node("t/tokens"):
            open_tokens(view, "t/tokens", 10**15, "t")
        return begin(view, replace(hold, node_id="t/tokens"), facts)

    sees(world, "t/tokens")
    in_place_of_authorize(world, write)
    world.buy()


@mutant("a payment is a tool's", "lifecycle")
def _(world):
    in_place_of_authorize(world, lambda view, hold, facts: begin(view, replace(hold, kind=HoldKind.TOOL), facts))
    world.buy()


@mutant("a payment lies in the wallet itself", "room", wallet=None)
def _(world):
    in_place_of_authorize(world, lambda view, hold, facts: begin(view, replace(hold, node_id=WALLET), facts))
    world.buy()


def sees(world, *nodes):
    """Let a purchase load these nodes as well."""
    scope = flow.purchase_scope

    def more(*given):
        asked = scope(*given)
        return replace(asked, nodes=(*asked.nodes, *nodes))

    world.patch.setattr(flow, "purchase_scope", more)


def in_a_node_of_its_own(**fields):
    def write(view, hold, facts):
        node_id = "own"
        if not view.has_node(node_id):
            node = Node(node_id, WALLET, NodeKind.SESSION, node_id, None, view.now_ms, view.now_ms)
            view.put_node(replace(node, **fields))
            view.record(node_id, "open", facts={})
        return begin(view, replace(hold, node_id=node_id), facts)

    return write


@mutant("a payment lies in a session without a limit", "books", wallet=None)
def _(world):
    sees(world, "own")
    in_place_of_authorize(world, in_a_node_of_its_own())
    world.buy()


@mutant("a payment lies below a second root", "books")
def _(world):
    sees(world, "own")
    in_place_of_authorize(world, in_a_node_of_its_own(parent_id=None, kind=NodeKind.WALLET, limit=Nanos(10**9)))
    world.buy()


@mutant("another chain is signed than the one that is held for", "lifecycle")
def _(world):
    hold = purchase._hold

    def other(*given):
        made = hold(*given)
        return replace(made, intent=replace(made.payment(), chain_id=1))

    world.patch.setattr(purchase, "_hold", other)
    world.buy()


@mutant("the deadline is not the one that is signed", "lifecycle")
def _(world):
    hold = purchase._hold
    world.patch.setattr(purchase, "_hold", lambda *given: later(hold(*given)))
    world.buy()


def later(hold):
    return replace(hold, deadline_unix=hold.deadline_unix + 10)


@mutant("a payment's hold need not survive a power cut", "durable", signs=1)
def _(world):
    scope = flow.purchase_scope
    world.patch.setattr(flow, "purchase_scope", lambda *given: replace(scope(*given), durable=False))
    world.buy()


@mutant("a lost purchase is paid again", "once", signs=1)
def _(world):
    world.patch.setattr(purchase, "_unfinished", lambda *given: None)
    world.buy(path="same")


@mutant("the earlier payments of a purchase are not loaded", "once", signs=1)
def _(world):
    scope = flow.purchase_scope
    world.patch.setattr(flow, "purchase_scope", lambda *given: replace(scope(*given), purchase=None))
    world.buy(path="same")


@mutant("a payment is entered as one that the server has lost", "lifecycle")
def _(world):
    from x402guard.kernel.proofs import Lost

    in_place_of_authorize(world, lambda view, hold, facts: begin(view, hold, facts, Lost(hold.id)))
    world.buy()


@mutant("a payment begins and ends in one change", "lifecycle")
def _(world):
    def write(view, hold, facts):
        begin(view, hold, facts)
        apply(view, hold.id, Capture(hold.amount, Evidence.CLAIMED))
        return view.known_hold(hold.id)

    in_place_of_authorize(world, write)
    world.buy()


@mutant("blocks that can be undone give back for all", "giving back", terms=lost_upto)
def _(world):
    for number in range(20):
        world.buy(1)
        for hold in world.live():
            at_head(world, hold, f"0x{number:064x}")


def at_head(world, hold, transaction):
    key = f"{hold.payment().network}/{transaction}/0"
    proof = AtHead(*named(hold), hold.payment().payee, 1_000, transaction, 0)

    def change(view, now):
        apply(view, now.id, Capture(1_000_000, Evidence.CHAIN_HEAD, key), proof)
        view.put_mark(("proof", key), {"hold": now.id})
        view.put_mark(exposed_mark(now.id), {"nanos": now.amount - 1_000_000})
        view.put_mark(EXPOSED, {"nanos": now.amount - 1_000_000})

    world.change(change, hold, marks=(("proof", key), EXPOSED, exposed_mark(hold.id)))


@mutant("one Transfer gives back for two payments", "giving back", terms=lost_upto, signs=6)
def _(world):
    for _ in range(20):
        world.buy(1)
        for hold in world.live():
            world.change(by_chain(1_000_000), hold, marks=(PROOF,))


@mutant("the second presentation was not sent, the first was", "giving back")
def _(world):
    for _ in range(20):
        world.buy(1)
        for hold in world.live():
            world.change(lambda view, now: take_over(view, now, instance=now.instance), hold)
            world.change(lambda view, now: apply(view, now.id, Void("no connection"), Unsent(now.id)), hold)


@mutant("an end that comes late captures less, by nothing", "giving back")
def _(world):
    world.buy(1)
    with_tool(world)
    for _ in range(20):
        for hold in world.live():
            if hold.kind is HoldKind.TOOL:
                world.refused(
                    lambda hold=hold: world.store.transact(
                        *write_end(LateEnd(hold.id, capture=Capture(0, Evidence.ASSUMED)))
                    )
                )
    world.buy()


def with_tool(world):
    for number in range(4):
        world.session.hold("render", up_to="$0.01", arguments={"n": number}).__enter__()


@mutant("a tool's hold is given back as a provider's bill", "giving back")
def _(world):
    with_tool(world)
    for hold in world.live():
        world.change(lambda view, now: apply(view, now.id, Void("x"), Billed("nothing")), hold)
    world.buy()


@mutant("a captured tool is given back", "giving back")
def _(world):
    world.session.charge("render", "$0.05")
    hold = next(each for each in world.holds() if each.kind is HoldKind.TOOL)

    def change(view, now):
        view.take_step("correct", replace(now, captured=Nanos(0)), Stated())
        view.record(now.node_id, "correct", hold_id=now.id, captured=-now.captured)
        balance_grants(view, now.node_id)

    world.change(change, hold)
    world.buy()


@mutant("a tripped session is open again", "room", wallet=None, session="$5.00", signs=1)
def _(world):
    world.buy(1)
    scope = Scope(nodes=(world.session.id,), durable=True)
    world.store.transact(scope, lambda view: trip(view, world.session.id, "kill_switch", "stop"))
    hold = world.live()[0]
    world.change(lambda view, now: view.put_node(replace(view.node(now.node_id), state=NodeState.OPEN)), hold)
    world.buy()


@mutant("what closed two days ago was captured today", "lifecycle", day=True, session="$5.00", wallet=None)
def _(world):
    world.buy(5)
    for hold in world.live():

        def change(view, now):
            view.put_hold(replace(now, closed_ms=view.now_ms - 2 * DAY_MS))
            apply(view, now.id, Capture(now.amount, Evidence.CLAIMED))

        world.change(change, hold)
    world.buy()

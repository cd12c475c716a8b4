"""Mutants of two parts, each of which looks right by itself. A review of the kernel has found the like of them."""

from msgspec.structs import replace

from tests.kernel.mutants import PROOF, by_chain, mutant, named
from tests.kernel.world import lost_upto
from x402guard.kernel.given_back import EXPOSED, exposed_mark
from x402guard.kernel.proofs import AtHead, ByOwner, Final, Stated, Undone
from x402guard.kernel.rows import WALLET, Delivery, Evidence, Hold, HoldKind, Nanos, Node, NodeKind, Purpose
from x402guard.ledger.events import Capture, Reopen, Void
from x402guard.ledger.transitions import apply
from x402guard.ledger.view import LedgerView, Scope
from x402guard.x402 import purchase

TIMES = 20


def of_each(world, *changes, marks=lambda hold: (PROOF,), **bought):
    """Buy one after the other, and make the changes with each payment."""
    for _ in range(TIMES):
        world.buy(1, **bought)
        for hold in world.live():
            for change in changes:
                world.change(change, hold, marks=marks(hold))


def transfer(hold):
    """A Transfer of its own for each payment."""
    return f"0x{int(hold.id, 16) ^ 1:064x}"


def transfer_mark(hold):
    return "proof", f"{hold.payment().network}/{transfer(hold)}/0"


def settled(kind, evidence, exposed=0):
    def change(view, hold):
        key = transfer_mark(hold)
        proof = kind(*named(hold), hold.payment().payee, 1_000, transfer(hold), 0)
        apply(view, hold.id, Capture(1_000_000, evidence, key[1]), proof)
        view.put_mark(key, {"hold": hold.id})
        if exposed:
            view.put_mark(exposed_mark(hold.id), {"nanos": exposed})
            view.put_mark(EXPOSED, {"nanos": exposed})

    return change


@mutant(
    "what an undoable block gave back is called final, by nobody",
    "lifecycle",
    terms=lost_upto,
    exposure="$0.009",
    signs=6,
)
def _(world):
    def final(view, hold):
        view.put_hold(replace(hold, evidence=Evidence.CHAIN))
        view.put_mark(exposed_mark(hold.id), {"nanos": 0})
        view.put_mark(EXPOSED, {"nanos": 0})

    at_head = settled(AtHead, Evidence.CHAIN_HEAD, exposed=9_000_000)
    of_each(world, at_head, final, marks=lambda hold: (transfer_mark(hold), EXPOSED, exposed_mark(hold.id)))


@mutant("a row lets go of the Transfer that has proven it", "lifecycle", terms=lost_upto, signs=6)
def _(world):
    def let_go(view, hold):
        view.put_hold(replace(hold, proof=None))
        view.put_mark(PROOF, {"hold": ""})

    of_each(world, by_chain(1_000_000), let_go)


@mutant("a block is undone, and its amount is believed again as a claim", "giving back", terms=lost_upto, signs=20)
def _(world):
    def believed_again(view, hold):
        apply(view, hold.id, Reopen(0), Undone(*named(hold)))
        apply(view, hold.id, Capture(1_000_000, Evidence.CLAIMED))

    of_each(world, settled(Final, Evidence.CHAIN), believed_again, marks=lambda hold: (transfer_mark(hold),))


@mutant("a mark is written twice", "books", terms=lost_upto)
def _(world):
    real = LedgerView.change_set

    def twice(view, *, durable):
        made = real(view, durable=durable)
        more = ((key, {"hold": ""}) for key, _ in made.marks if key == PROOF)
        return replace(made, marks=(*made.marks, *more))

    world.patch.setattr(LedgerView, "change_set", twice)
    of_each(world, by_chain(1_000_000))


@mutant("the view writes into the rows that the kernel compares with", "books")
def _(world):
    put = LedgerView.put_node

    def both(view, node):
        put(view, node)
        view._loaded.before.nodes[node.id] = node

    def rise(view, hold):
        for node in view.path(hold.node_id):
            view.put_node(replace(node, limit=Nanos(node.limit * 10)))

    world.patch.setattr(LedgerView, "put_node", both)
    world.buy(1)
    world.change(rise, world.live()[0])
    world.buy()


@mutant("the wallet is said not to be there, and begins anew", "books", session="$5.00")
def _(world):
    def anew(view, hold):
        view._loaded.before.nodes[WALLET] = None
        view.put_node(Node(WALLET, None, NodeKind.WALLET, WALLET, Nanos(55_000_000), view.now_ms, view.now_ms))
        view.record(WALLET, "open", facts={})

    world.buy(5)
    world.change(anew, world.live()[0], nodes=(WALLET,))
    world.buy()


@mutant("a state that is a text takes no budget, and its end gives some back", "books")
def _(world):
    tool = "t" * 64
    scope = Scope(nodes=(world.session.id,), holds=(tool,), durable=True)

    def begin_as_text(view):
        now, unix = view.now_ms, view.now_unix
        purpose = Purpose(tool="t")
        hold = Hold(tool, world.session.id, HoldKind.TOOL, Nanos(50_000_000), now, unix + 900, now, "x", purpose)
        view.take_step("authorize", replace(hold, state="held"))
        view.record(hold.node_id, "authorize", hold_id=hold.id)

    world.buy()
    world.refused(lambda: world.store.transact(scope, begin_as_text))
    if world.store.hold(tool) is not None:
        world.refused(lambda: world.store.transact(scope, lambda view: apply(view, tool, Void("x"), Stated())))
    world.buy()


@mutant("the owner accepts a clock, and all is past", "books", day=True, session="$5.00", wallet=None)
def _(world):
    def accepted(view, hold):
        for node in view.path(hold.node_id):
            if node.window is not None:
                view.prove(ByOwner(node.id, "clock", "owner"))
                view.put_node(replace(node, past=node.used * 10))

    world.buy(5)
    world.change(accepted, world.live()[0])
    world.buy()


def _paid_again(delivery):
    def act(world):
        world.patch.setattr(purchase, "_unfinished", lambda *given: None)
        of_each(
            world,
            lambda view, hold: view.put_hold(replace(hold, delivery=delivery)),
            marks=lambda hold: (),
            path="same",
        )

    return act


mutant("a lost answer is called handed over", "lifecycle", signs=1)(_paid_again(Delivery.DONE))
mutant("a lost purchase is forgiven by a text", "books", signs=1)(_paid_again("forgiven"))

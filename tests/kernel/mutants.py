"""Bugs of one line that a room could have. Each names the rule of the kernel that has to stop it.

A mutant is a function of a world. It does what the bug would do; the test then counts what was signed.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from tests.kernel.world import lost_upto
from x402guard.kernel.change_set import Scope
from x402guard.kernel.given_back import EXPOSED, exposed_mark
from x402guard.kernel.money import Nanos
from x402guard.kernel.proofs import (
    AtHead,
    Billed,
    Cancelled,
    Final,
    PayAgain,
    Stated,
    Undone,
    Unsent,
    UnusedPastDeadline,
)
from x402guard.kernel.rows import WALLET, Delivery, Evidence, HoldKind, HoldState, Node, NodeKind, NodeState
from x402guard.ledger.budgets import balance_grants, trip
from x402guard.ledger.events import Capture, Void
from x402guard.ledger.lost import LateEnd, write_end
from x402guard.ledger.purchases import take_over
from x402guard.ledger.token_budget import open_tokens
from x402guard.ledger.transitions import apply, begin
from x402guard.x402 import flow, purchase

TX = "0x" + "ab" * 32
DAY_MS = 86_400_000


@dataclass(frozen=True)
class Mutant:
    name: str
    rule: str
    act: object
    world: dict


MUTANTS = []


def mutant(name, rule, **world):
    """Add a mutant that acts on the whole world."""

    def added(act):
        MUTANTS.append(Mutant(name, rule, act, world))
        return act

    return added


def changed(name, rule, change, *, bought=1, world=None, scope=None):
    """Add a mutant that changes one live payment; *change* is a function of view and hold."""

    def act(world):
        world.buy(bought)
        world.change(change, world.live()[0], **(scope or {}))
        world.buy()

    MUTANTS.append(Mutant(name, rule, act, world or {}))


def frees(view, hold, by):
    view.record(hold.node_id, "event", held=-by, facts={"name": "x"})
    balance_grants(view, hold.node_id)


def each_on_path(**fields):
    def change(view, hold):
        for node in view.path(hold.node_id):
            view.put_node(
                replace(node, **{name: value(node) if callable(value) else value for name, value in fields.items()})
            )

    return change


def limit_with_entry(view, hold):
    for node in view.path(hold.node_id):
        view.record(node.id, "limit", facts={"to": node.limit * 10})
        view.put_node(replace(view.node(node.id), limit=Nanos(node.limit * 10)))


def named(hold):
    payment = hold.payment()
    return payment.network, payment.token, payment.payer, hold.id


def by_chain(amount, *, kind=Final, of=None, scheme=None, payee=None, evidence=Evidence.CHAIN, atomic=None):
    """A capture by a chain proof that is made up, or is another hold's."""

    def change(view, hold):
        key = f"{hold.payment().network}/{TX}/0"
        proof = kind(
            *(of or named(hold)), payee or hold.payment().payee, atomic if atomic is not None else amount // 1000, TX, 0
        )
        apply(view, hold.id, Capture(amount, evidence, key), proof)
        view.put_mark(("proof", key), {"hold": hold.id})

    return change


PROOF = ("proof", f"eip155:84532/{TX}/0")
UPTO = {"terms": lost_upto}
FOREIGN = ("eip155:84532", "0x036CbD53842c5426634e7929541eC2318f3dCF7e", "0x" + "11" * 20, "0" * 64)

# Rows: a room writes what only holds, children, windows or the owner may move.
changed("the balance is freed, the hold stays live", "books", lambda view, hold: frees(view, hold, hold.amount))
changed("the limit rises by ten", "books", each_on_path(limit=lambda node: Nanos(node.limit * 10)))
changed("the limit rises, with an entry", "books", limit_with_entry)
changed("the limit goes", "books", each_on_path(limit=None))
changed("all that was used is past, without a window", "books", each_on_path(past=lambda node: node.used))
changed("the balances are zero", "books", each_on_path(captured=0, held=0, granted_in=0, granted_out=0, live=0))
changed("nothing is live", "books", each_on_path(live=0))
changed(
    "the parent is another one",
    "books",
    lambda view, hold: view.put_node(replace(view.node(hold.node_id), parent_id=None)),
)
changed(
    "a wallet counts tokens",
    "books",
    lambda view, hold: view.put_node(replace(view.node(WALLET), kind=NodeKind.TOKENS)),
)
changed("a ledger's time is a year ahead", "books", each_on_path(last_ms=lambda node: node.last_ms + 365 * DAY_MS))
changed("an entry says another amount than its seal", "books", lambda view, hold: resealed(view, hold))
changed(
    "an entry is left out",
    "books",
    lambda view, hold: (view.record(hold.node_id, "event", facts={}), view.entries.clear()),
)
changed(
    "a window is put beside the budget",
    "books",
    lambda view, hold: view.put_node(replace(view.node(hold.node_id), window=day_window())),
)
changed(
    "the wallet's grant falls alone",
    "books",
    lambda view, hold: view.record(WALLET, "return", granted_out=-view.node(WALLET).granted_out),
    world={"session": "$5.00"},
)
changed(
    "a child draws less than it uses",
    "books",
    lambda view, hold: view.record(hold.node_id, "return", granted_in=-hold.amount),
)
changed(
    "the wallet is written anew, in a scope without it",
    "books",
    lambda view, hold: wallet_anew(view),
    scope={"nodes": ()},
    world={"session": "$5.00"},
)
changed(
    "all that was used is past, on a budget by the day",
    "books",
    lambda view, hold: past_of_day(view, hold, 0),
    world={"day": True, "session": "$5.00", "wallet": None},
)
changed(
    "the window begins a moment earlier",
    "books",
    lambda view, hold: past_of_day(view, hold, 1),
    world={"day": True, "session": "$5.00", "wallet": None},
)
changed(
    "the day begins tomorrow",
    "books",
    lambda view, hold: past_of_day(view, hold, -DAY_MS),
    world={"day": True, "session": "$5.00", "wallet": None},
)
changed("a session lives on after the end of its task", "books", lambda view, hold: longer(view, hold), world={})

# Holds: a room writes a hold beside the table.
changed(
    "a live hold shrinks",
    "lifecycle",
    lambda view, hold: (view.put_hold(replace(hold, amount=Nanos(1))), frees(view, hold, hold.amount - 1)),
)
changed(
    "voided beside the table",
    "lifecycle",
    lambda view, hold: (view.put_hold(replace(hold, state=HoldState.VOIDED)), frees(view, hold, hold.amount)),
)
changed("a hold moves to the wallet", "lifecycle", lambda view, hold: view.put_hold(replace(hold, node_id=WALLET)))
changed(
    "its purchase is closed by no one",
    "lifecycle",
    lambda view, hold: view.put_hold(replace(hold, delivery=Delivery.FORGIVEN)),
)
changed(
    "it was never presented", "lifecycle", lambda view, hold: view.put_hold(replace(hold, presented=hold.presented - 1))
)
changed(
    "another process answers for it", "lifecycle", lambda view, hold: view.put_hold(replace(hold, instance="other"))
)
changed(
    "its deadline was yesterday",
    "lifecycle",
    lambda view, hold: view.put_hold(replace(hold, deadline_unix=hold.deadline_unix - 86_400)),
)
changed(
    "reopened after it was given back unsigned",
    "lifecycle",
    lambda view, hold: undone(view, hold),
)

# Proofs: a sentence, another hold's, or of the wrong kind.
changed(
    "a capture of nothing on a claim",
    "giving back",
    lambda view, hold: apply(view, hold.id, Capture(0, Evidence.CLAIMED)),
)
changed("a void by a sentence", "giving back", lambda view, hold: apply(view, hold.id, Void("nothing was sent")))
changed(
    "a void by what the signer never had, of another hold",
    "giving back",
    lambda view, hold: apply(view, hold.id, Void("x"), Unsent("0" * 64)),
)
changed("a void by a bill", "giving back", lambda view, hold: apply(view, hold.id, Void("x"), Billed("nothing")))
changed("a void by the caller's word", "giving back", lambda view, hold: apply(view, hold.id, Void("x"), Stated()))
changed(
    "a void by the word to pay again", "giving back", lambda view, hold: apply(view, hold.id, Void("x"), PayAgain())
)
changed(
    "a cancellation of another nonce",
    "giving back",
    lambda view, hold: apply(view, hold.id, Void("x"), Cancelled(*FOREIGN, TX)),
)
changed(
    "unused as of a block before its deadline",
    "giving back",
    lambda view, hold: expire(view, hold, hold.deadline_unix - 30),
)
changed(
    "an upto is claimed for nothing",
    "giving back",
    lambda view, hold: apply(view, hold.id, Capture(0, Evidence.CLAIMED)),
    world=UPTO,
)
changed(
    "a chain finding without a proof",
    "giving back",
    lambda view, hold: apply(view, hold.id, Capture(0, Evidence.CHAIN, PROOF[1])),
    world=UPTO,
)
changed("an exact payment taken for half", "giving back", by_chain(5_000_000), scope={"marks": (PROOF,)})
changed(
    "the Transfer of another payment", "giving back", by_chain(1_000, of=FOREIGN), world=UPTO, scope={"marks": (PROOF,)}
)
changed(
    "a Transfer to another payee",
    "giving back",
    by_chain(1_000, payee="0x" + "22" * 20),
    world=UPTO,
    scope={"marks": (PROOF,)},
)
changed(
    "less than the Transfer moved", "giving back", by_chain(1_000, atomic=9_000), world=UPTO, scope={"marks": (PROOF,)}
)
changed("a Transfer whose mark was not loaded", "books", by_chain(1_000, atomic=1), world=UPTO)
changed(
    "the ledger of another wallet",
    "giving back",
    lambda view, hold: view.put_mark(("wallet", "payer"), {"address": "0x" + "33" * 20}),
    scope={"marks": (("wallet", "payer"),)},
)
changed(
    "a remark of what is exposed",
    "giving back",
    lambda view, hold: view.put_mark(EXPOSED, {"nanos": 0, "note": 1}),
    scope={"marks": (EXPOSED,)},
)
changed("a hold that a power cut may lose", "durable", lambda view, hold: again(view, hold), scope={"durable": False})
changed(
    "a trip that a power cut may lose",
    "durable",
    lambda view, hold: trip(view, hold.node_id, "kill_switch", "x"),
    scope={"durable": False},
)
changed("a session is opened again past its limit", "room", lambda view, hold: closed_and_low(view, hold))


def resealed(view, hold):
    view.record(hold.node_id, "event", facts={"name": "x"})
    view.entries[-1] = replace(view.entries[-1], held=-hold.amount)


def day_window():
    from x402guard.ledger.budget_window import check_window

    return check_window("day", "UTC")


def wallet_anew(view):
    view.put_node(Node(WALLET, None, NodeKind.WALLET, WALLET, Nanos(55_000_000), view.now_ms, view.now_ms))
    view.record(WALLET, "open", facts={})


def past_of_day(view, hold, earlier_ms):
    for node in view.path(hold.node_id):
        if node.window is not None:
            view.put_node(replace(node, since_ms=node.since_ms - earlier_ms, past=node.captured + node.granted_out))


def longer(view, hold):
    node = view.node(hold.node_id)
    view.put_node(replace(node, limit=Nanos(node.limit + 1), until_ms=None))


def expire(view, hold, block_time):
    view.take_step("expire", replace(hold, state=HoldState.EXPIRED), UnusedPastDeadline(*named(hold), block_time))
    frees(view, hold, hold.amount)


def undone(view, hold):
    apply(view, hold.id, Void("x"), Unsent(hold.id))
    view.take_step("reopen", replace(hold, ended_by=None), Undone(*named(hold)))
    view.record(hold.node_id, "reopen", hold_id=hold.id, held=hold.amount)
    balance_grants(view, hold.node_id)


def again(view, hold):
    new = replace(hold, id="1" * 64, intent=replace(hold.payment(), nonce=int("1" * 64, 16)), purchase_key=None)
    view._loaded.before.holds.setdefault(new.id, None)
    begin(view, new, {})


def closed_and_low(view, hold):
    node = view.node(hold.node_id)
    view.put_node(replace(node, limit=Nanos(1)))


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
            view._loaded.before.nodes["t/tokens"] = None
            open_tokens(view, "t/tokens", 10**15, "t")
        return begin(view, replace(hold, node_id="t/tokens"), facts)

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


def in_a_node_of_its_own(**fields):
    def write(view, hold, facts):
        node_id = f"x{hold.id[:8]}"
        view._loaded.before.nodes[node_id] = None
        node = Node(node_id, WALLET, NodeKind.SESSION, node_id, None, view.now_ms, view.now_ms)
        view.put_node(replace(node, **fields))
        view.record(node_id, "open", facts={})
        return begin(view, replace(hold, node_id=node_id), facts)

    return write


@mutant("a payment lies in a session without a limit", "books", wallet=None)
def _(world):
    in_place_of_authorize(world, in_a_node_of_its_own())
    world.buy()


@mutant("a payment lies below a second root", "books")
def _(world):
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

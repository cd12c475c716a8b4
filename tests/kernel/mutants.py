"""Bugs of one line that a room could have. Each names the rule of the kernel that has to stop it.

A mutant is a function of a world. It does what the bug would do; the test then counts what was signed.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from tests.kernel.world import lost_upto
from x402guard.kernel.given_back import EXPOSED
from x402guard.kernel.proofs import (
    Billed,
    Cancelled,
    Final,
    PayAgain,
    Stated,
    Undone,
    Unsent,
    UnusedPastDeadline,
)
from x402guard.kernel.rows import WALLET, Delivery, Evidence, HoldState, Nanos, Node, NodeKind
from x402guard.ledger.budgets import balance_grants, trip
from x402guard.ledger.events import Capture, Void
from x402guard.ledger.transitions import apply, begin

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
changed(
    "a hold that a power cut may lose",
    "durable",
    lambda view, hold: again(view, hold),
    scope={"durable": False, "new": ("1" * 64,)},
)
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
    from x402guard.ledger.sessions import check_window

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
    begin(view, new, {})


def closed_and_low(view, hold):
    node = view.node(hold.node_id)
    view.put_node(replace(node, limit=Nanos(1)))

"""Ledger material for tests: a clock to turn, holds without ceremony, and a store opened on it."""

from msgspec.structs import astuple, replace

from x402guard.kernel.commit import NAMED
from x402guard.kernel.given_back import EXPOSED, exposed_mark
from x402guard.kernel.intent import Intent
from x402guard.kernel.proofs import AtHead, Cancelled, Final, Undone, UnusedPastDeadline
from x402guard.kernel.rows import WALLET, Claim, Evidence, Hold, HoldKind, Nanos, NodeKind, Purpose, entry_hash
from x402guard.ledger.authorize import Refusal, authorize
from x402guard.ledger.bills import BILLED_USAGE, STATED
from x402guard.ledger.events import Capture, Correct, Expire, Note, Reopen, Void
from x402guard.ledger.evidence import note_exposed, weigh
from x402guard.ledger.findings import proven
from x402guard.ledger.sessions import NodeRequest, ensure_wallet, open_node
from x402guard.ledger.transitions import apply
from x402guard.ledger.view import Scope
from x402guard.money import dollars_to_nanos
from x402guard.stores import open_store
from x402guard.stores.transacts import Proposal

START_MS = 1_800_000_000_000
PAYER = "0x7324aD89Dfd261E0456e943f5c52DEEcd8288770"
PAYEE = "0x209693Bc6afc0C5328bA36FaF03C514EF312287C"


class Clock:
    """Unix milliseconds that pass only when told to."""

    def __init__(self, now_ms=START_MS):
        self.now_ms = now_ms

    def __call__(self):
        return self.now_ms

    def tick(self, seconds):
        self.now_ms += int(seconds * 1000)


def usd(text) -> Nanos:
    return dollars_to_nanos(text)


def sealed(entry):
    """An entry with the hash over what it says."""
    return replace(entry, hash=entry_hash(astuple(entry)[:-1]))


def an_id(name):
    """The id of a payment's hold that tests name in a word: a nonce in hex. An id stays what it is."""
    return name if len(name) >= 64 else name.encode().hex().rjust(64, "0")


def ids(*names):
    """The ids of payments' holds that tests name in a word."""
    return [an_id(name) for name in names]


def a_transfer(transaction="0x07", log=0):
    """What proves a payment in the books: one Transfer log on the chain of ``an_intent``."""
    return f"eip155:84532/{transaction}/{log}"


def an_intent(nonce=1, amount=100_000, deadline=START_MS // 1000 + 60, scheme="exact", method="eip3009") -> Intent:
    return Intent(
        version=2, scheme=scheme, method=method, network="eip155:84532", network_as_offered="eip155:84532",
        chain_id=84532, token="0x036CbD53842c5426634e7929541eC2318f3dCF7e", domain_name="USDC", domain_version="2",
        payer=PAYER, payee=PAYEE, amount_atomic=amount, valid_after=0, valid_until=deadline, nonce=nonce, spender=None,
        facilitator=None, accepted_json="{}", resource_json=None, extensions_json=None, payment_id=None,
        digest="00" * 32,
    )  # fmt: skip


def a_hold(
    hold_id="h1", amount="$0.10", node="s", kind=HoldKind.PAYMENT, deadline_s=60, now_ms=START_MS, **more
) -> Hold:
    deadline = now_ms // 1000 + deadline_s
    intent = None
    if kind is HoldKind.PAYMENT:
        hold_id, atomic, scheme = an_id(hold_id), usd(amount) // 1000, more.pop("scheme", "exact")
        method = "permit2" if scheme == "upto" else "eip3009"
        intent = more.pop("intent", None) or an_intent(0, atomic, deadline, scheme, method)
        intent = replace(intent, nonce=int(hold_id, 16), valid_until=deadline)
    return Hold(
        id=hold_id, node_id=node, kind=kind, amount=usd(amount), created_ms=now_ms, deadline_unix=deadline,
        flying_since_ms=now_ms, instance="me", purpose=Purpose(), intent=intent, **more,
    )  # fmt: skip


def by_name(view):
    """A view that also finds a payment's hold by the word that a test names it with."""
    plain = view.hold
    view.hold = lambda hold_id: plain(hold_id) or plain(an_id(hold_id))
    known = view.known_hold
    view.known_hold = lambda hold_id: view.hold(hold_id) or known(hold_id)
    return view


def a_proof(view, hold, event):
    """The proof of an event that gives back, made for this hold as its maker would."""
    if hold.intent is None:
        return BILLED_USAGE if hold.kind is HoldKind.LLM else STATED
    named = hold.intent.network, hold.intent.token, hold.intent.payer, hold.id
    match event:
        case Void():
            return view.unsigned(hold.id)
        case Expire(block_time):
            return UnusedPastDeadline(*named, block_time)
        case Reopen():
            return Undone(*named)
        case Capture() | Correct() if event.proof is not None:
            transaction, log_index = event.proof.split("/")[1:]
            kind = Final if event.evidence is Evidence.CHAIN else AtHead
            atomic = event.amount * hold.intent.amount_atomic // hold.amount
            return kind(*named, hold.intent.payee, atomic, transaction, int(log_index))
        case Correct(amount=0):
            return Cancelled(*named, "0x07")
        case _:
            return None


def weigh_proven(view, hold_id, finding, **more):
    """``weigh``, with the proof that the chain reader gives a finding about this hold."""
    hold = view.known_hold(hold_id)
    return weigh(view, hold.id, proven(hold.payment(), finding), **more)


class Books:
    """A store with a wallet and one session ``s``, and one-line verbs on it."""

    def __init__(self, url="memory://", wallet=None, session="$1.00", clock=None, *, store=None, soft=()):
        self.clock = clock or Clock()
        self.store = open_store(url, clock_ms=self.clock) if store is None else store(clock_ms=self.clock)
        limit = None if wallet is None else usd(wallet)
        self.change(lambda view: ensure_wallet(view, limit, soft), nodes=(WALLET,))
        if session is not None:
            self.open("s", session)

    def open_kernel(self, **settings):
        """Open its kernel with other settings than the built-in ones."""
        self.store.open_kernel(replace(self.store.opened, **settings))

    def change(self, change, *, nodes=(), holds=(), durable=True, lost=(), **scope):
        wanted = tuple(dict.fromkeys(each for name in holds for each in (name, an_id(name))))
        asked = Scope(nodes=tuple(nodes), holds=wanted, durable=durable, **scope)
        proposal = Proposal(asked, lambda view: change(by_name(view)))
        self.store.commit(asked, proposal, lost=frozenset(lost))
        return proposal.outcome()

    def open(self, node, budget, parent=WALLET, kind=NodeKind.SESSION):
        limit = None if budget is None else usd(budget)
        request = NodeRequest(node, parent, kind, node, limit, f"opener-of-{node}")
        return self.change(lambda view: open_node(view, request), nodes=(node, parent))

    def hold(self, hold_id="h1", amount="$0.10", node="s", **more) -> Hold | Refusal:
        hold = a_hold(hold_id, amount, node, now_ms=self.clock.now_ms, **more)
        key = hold.purchase_key
        bought = {} if key is None else {"purchase": key, "named": key.startswith(NAMED)}
        return self.change(
            lambda view: authorize(view, hold, {"kind": str(hold.kind)}), nodes=(node,), holds=(hold_id,), **bought
        )

    def step(self, hold_id, event, proof=None):
        """One event, with the proof that it needs: what the signer, the meter or the chain would say."""

        shown = getattr(event, "proof", None)
        marks = (EXPOSED, exposed_mark(an_id(hold_id)), *((("proof", shown),) if shown else ()))

        def change(view):
            hold = view.hold(hold_id)
            after = apply(view, hold_id, event, proof or (hold and a_proof(view, hold, event)))
            if shown:
                view.put_mark(("proof", shown), {"hold": after.id})
            if after.intent is not None:
                note_exposed(view, after)
            return after

        return self.change(change, holds=(hold_id,), marks=marks)

    def believe(self, hold_id, amount):
        """Capture what a server claims for an ``upto`` that no chain can prove. The kernel has to trust receipts."""
        self.step(hold_id, Note(claim=Claim(usd(amount), "")))
        return self.step(hold_id, Capture(usd(amount), Evidence.CLAIMED))

    def stored(self, hold_id):
        """The hold that a test names with a word, as committed, or None."""
        return self.store.hold(hold_id) or self.store.hold(an_id(hold_id))

    def node(self, node="s"):
        return {n.id: n for n in self.store.nodes()}[node]

    def row(self, node="s"):
        """The node as it is stored: a store that keeps idle budget reads it without that."""
        return self.change(lambda view: view.node(node), nodes=(node,))

    def balances(self, node="s"):
        row = self.node(node)
        return row.captured, row.held, row.granted_in, row.granted_out

    def close(self):
        self.store.close()

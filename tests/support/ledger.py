"""Ledger material for tests: a clock to turn, holds without ceremony, and a store opened on it."""

from x402guard.kernel.change_set import Scope

from x402guard.kernel.intent import Intent
from x402guard.kernel.money import Nanos, dollars_to_nanos
from x402guard.kernel.rows import WALLET, Hold, HoldKind, NodeKind, Purpose
from x402guard.ledger.authorize import Refusal, authorize
from x402guard.ledger.sessions import NodeRequest, ensure_wallet, open_node
from x402guard.ledger.transitions import apply
from x402guard.stores import open_store

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
        atomic = usd(amount) // 1000
        intent = more.pop("intent", None) or an_intent(abs(hash(hold_id)) % 2**200, atomic, deadline)
    return Hold(
        id=hold_id, node_id=node, kind=kind, amount=usd(amount), created_ms=now_ms, deadline_unix=deadline,
        flying_since_ms=now_ms, instance="me", purpose=Purpose(), intent=intent, **more,
    )  # fmt: skip


class Books:
    """A store with a wallet and one session ``s``, and one-line verbs on it."""

    def __init__(self, url="memory://", wallet=None, session="$1.00", clock=None, *, store=None, soft=()):
        self.clock = clock or Clock()
        self.store = open_store(url, clock_ms=self.clock) if store is None else store(clock_ms=self.clock)
        limit = None if wallet is None else usd(wallet)
        self.change(lambda view: ensure_wallet(view, limit, soft), nodes=(WALLET,))
        if session is not None:
            self.open("s", session)

    def change(self, change, *, nodes=(), holds=(), durable=True, **scope):
        return self.store.transact(Scope(nodes=tuple(nodes), holds=tuple(holds), durable=durable, **scope), change)

    def open(self, node, budget, parent=WALLET, kind=NodeKind.SESSION):
        limit = None if budget is None else usd(budget)
        request = NodeRequest(node, parent, kind, node, limit, f"opener-of-{node}")
        return self.change(lambda view: open_node(view, request), nodes=(node, parent))

    def hold(self, hold_id="h1", amount="$0.10", node="s", **more) -> Hold | Refusal:
        hold = a_hold(hold_id, amount, node, now_ms=self.clock.now_ms, **more)
        return self.change(
            lambda view: authorize(view, hold, {"kind": str(hold.kind)}), nodes=(node,), holds=(hold_id,)
        )

    def step(self, hold_id, event):
        return self.change(lambda view: apply(view, hold_id, event), holds=(hold_id,))

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

"""The ledger against a ten-line model, under any order of events, with idle budget and without."""

from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.support.examples import examples
from tests.support.ledger import Books, a_transfer, an_id, sealed
from x402guard.kernel.proofs import Cancelled
from x402guard.kernel.rows import Claim, Evidence, HoldState, NodeKind, NodeState
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.budgets import recall
from x402guard.ledger.events import Capture, Correct, Expire, Lapse, Note, Void
from x402guard.ledger.sessions import Closing, close_node
from x402guard.money import format_dollars
from x402guard.stores.memory import MemoryStore

UNIT = 100_000
"""Nano-dollars: a hundredth of it is one atomic unit of the token."""

_LIMITS = {"wallet": 1_000, "s": 700, "s/a": 500, "s/b": 500, "t": 600, "team": 650, "u": 500, "v": 600}
LIMITS = {node: limit * UNIT for node, limit in _LIMITS.items()}
BUDGETS = {"team": NodeKind.BUDGET}
PATHS = {
    "u": ("u", "team", "wallet"),
    "v": ("v", "team", "wallet"),
    "s": ("s", "wallet"),
    "s/a": ("s/a", "s", "wallet"),
    "s/b": ("s/b", "s", "wallet"),
    "t": ("t", "wallet"),
}
PARENTS = {"s": "wallet", "s/a": "s", "s/b": "s", "t": "wallet", "team": "wallet", "u": "team", "v": "team"}
amounts = st.integers(1, 600).map(lambda n: n * UNIT)


def a_cancellation(hold):
    """What shows that nothing of a payment was taken, also after something else did."""
    payment = hold.payment()
    return Cancelled(payment.network, payment.token, payment.payer, hold.id, "0x08")


class Model:
    """All that a budget is: per hold, where it counts and how much. The limit is checked when it is made."""

    def __init__(self):
        self.counted, self.node, self.tripped = {}, {}, set()

    def used(self, node):
        return sum(n for hold, n in self.counted.items() if node in PATHS[self.node[hold]])

    def fits(self, node, amount):
        open_path = not self.tripped & set(PATHS[node])
        return open_path and all(self.used(above) + amount <= LIMITS[above] for above in PATHS[node])


class LedgerMachine(RuleBasedStateMachine):
    holds = Bundle("holds")
    ended = Bundle("ended")
    store = MemoryStore

    def __init__(self):
        super().__init__()
        self.books = Books(wallet=format_dollars(LIMITS["wallet"]), session=None, store=self.store)
        self.books.open_kernel(unsafe_trust_receipts=True)
        for node, parent in PARENTS.items():
            self.books.open(node, format_dollars(LIMITS[node]), parent=parent, kind=BUDGETS.get(node, NodeKind.SESSION))
        self.model = Model()
        self.count = self.transfers = 0

    @rule(target=holds, node=st.sampled_from(sorted(PATHS)), amount=amounts, chain=st.booleans())
    def authorize(self, node, amount, chain):
        self.count += 1
        hold_id = an_id(f"h{self.count}")
        result = self.books.hold(hold_id, format_dollars(amount), node, chain_evidence=chain, scheme="upto")
        assert isinstance(result, Refusal) != self.model.fits(node, amount)
        if isinstance(result, Refusal):
            assert self.books.store.hold(hold_id) is None
            return None
        self.model.node[hold_id], self.model.counted[hold_id] = node, amount
        return hold_id

    def row(self, hold_id):
        return None if hold_id is None else self.books.store.hold(hold_id)

    def transfer(self):
        """One that has proven nothing yet."""
        self.transfers += 1
        return a_transfer(log=self.transfers)

    @rule(target=ended, hold=consumes(holds), share=st.integers(0, 100))
    def capture(self, hold, share):
        row = self.row(hold)
        if row is None:
            return None
        amount = row.amount * share // 100
        if row.chain_evidence:
            self.books.step(hold, Capture(amount, Evidence.CHAIN, self.transfer()))
        else:  # its seller is believed, as the kernel was opened to do
            self.books.step(hold, Note(claim=Claim(amount, "")))
            self.books.step(hold, Capture(amount, Evidence.CLAIMED))
        self.model.counted[hold] = amount
        return hold

    @rule(target=ended, hold=consumes(holds))
    def void(self, hold):
        if self.row(hold) is None:
            return None
        self.books.step(hold, Void("not signed"))
        self.model.counted[hold] = 0
        return hold

    @rule(target=ended, hold=consumes(holds))
    def time_runs_out(self, hold):
        row = self.row(hold)
        if row is None:
            return None
        self.books.clock.tick(61)
        if row.chain_evidence:
            self.books.step(hold, Expire(row.deadline_unix + 1))
            self.model.counted[hold] = 0
        else:
            self.books.step(hold, Lapse())
        return hold

    @rule(hold=ended, share=st.integers(0, 100))
    def the_chain_says_otherwise(self, hold, share):
        row = self.row(hold)
        if row is None:
            return
        amount = row.amount * share // 100
        if amount:
            self.books.step(hold, Correct(amount, Evidence.CHAIN, self.transfer()))
        else:
            self.books.step(hold, Correct(amount, Evidence.CHAIN), a_cancellation(row))
        before, self.model.counted[hold] = self.model.counted[hold], amount
        if amount > before:
            path = PATHS[self.model.node[hold]]
            self.model.tripped |= {node for node in path if self.model.used(node) > LIMITS[node]}

    @invariant()
    def the_books_say_what_the_model_says(self):
        for node, limit in LIMITS.items():
            row = self.books.node(node)
            used = self.model.used(node) if node != "wallet" else sum(self.model.counted.values())
            assert row.used == used
            assert row.used <= limit or row.state is NodeState.TRIPPED
            assert node == "wallet" or row.granted_in == row.used

    @invariant()
    def the_journal_adds_up(self):
        for node in LIMITS:
            mine = [e for e in self.books.store.entries(node) if e.node_id == node]
            row = self.books.node(node)
            assert sum(e.captured for e in mine) == row.captured
            assert sum(e.held for e in mine) == row.held
            previous = ""
            for entry in mine:
                assert entry.previous == previous
                assert sealed(entry).hash == entry.hash
                previous = entry.hash

    @invariant()
    def an_ended_hold_holds_nothing(self):
        live = {hold.id: hold.amount for hold in self.books.store.outstanding()}
        for hold_id, counted in self.model.counted.items():
            if hold_id in live:
                assert live[hold_id] == counted
            else:
                assert self.books.store.hold(hold_id).state is not HoldState.HELD


class FleetMachine(LedgerMachine):
    """The same, where sessions keep idle budget: no one who counts dollars sees a difference."""

    store = staticmethod(partial(MemoryStore, keeps_idle=True))

    @rule(node=st.sampled_from(["s", "t", "u", "v"]))
    def goes_and_comes_back(self, node):
        """A session ends, and is resumed: what it kept idle is given back, and what it counts stays."""
        self.books.change(
            lambda view: close_node(view, node, Closing(f"opener-of-{node}")), nodes=(node,), marks=(("inputs", node),)
        )
        assert self.books.row(node).idle == 0 or node in self.model.tripped
        self.books.open(node, format_dollars(LIMITS[node]), parent=PARENTS[node])

    @rule()
    def all_is_recalled(self):
        self.books.change(lambda view: recall(view, "wallet"), nodes=("wallet",))
        assert not any(self.books.row(node).idle for node in PARENTS)

    @invariant()
    def what_is_lent_is_owed(self):
        rows = {node: self.books.row(node) for node in LIMITS}
        for node, row in rows.items():
            assert node == "wallet" or row.granted_in >= row.used
            assert node not in ("s/a", "s/b") or row.idle == 0
            assert row.state is NodeState.OPEN or row.idle == 0
            below = [each for each in rows.values() if each.parent_id == node]
            assert row.granted_out == sum(each.granted_in for each in below)
            assert row.counted <= LIMITS[node] or row.state is NodeState.TRIPPED


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)

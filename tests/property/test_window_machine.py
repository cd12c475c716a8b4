"""Windowed budgets against a small model: any order of holds, ends and corrections, and however the clock goes on."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tests.support.examples import examples
from tests.support.ledger import Books, a_transfer, an_id
from x402guard.errors import IllegalTransition
from x402guard.kernel.rows import WALLET, Claim, Evidence, HoldKind, Nanos, NodeKind, NodeState, Window
from x402guard.kernel.windows import window_start_ms
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.events import Capture, Correct, Expire, Lapse, Note, Void
from x402guard.ledger.queries import nodes_of
from x402guard.ledger.sessions import NodeRequest, open_node
from x402guard.money import format_dollars

WINDOWS = {
    "month": Window("month", "Asia/Kathmandu"),
    "day": Window("day", "Europe/Berlin"),
    "week": Window("week", "UTC"),
}
UNIT = 100_000
"""Nano-dollars: a hundredth of it is one atomic unit of the token."""

_LIMITS = {"month": 4_000, "day": 1_000, "week": 1_500, "s": 30_000, "s/c": 20_000, "t": 30_000}
LIMITS = {"wallet": None, **{node: limit * UNIT for node, limit in _LIMITS.items()}}
PATHS = {
    "s": ("s", "day", "month", "wallet"),
    "s/c": ("s/c", "s", "day", "month", "wallet"),
    "t": ("t", "week", "month", "wallet"),
}
amounts = st.integers(1, 700).map(lambda n: n * UNIT)
DAY_S = 86_400


class Model:
    """All that a windowed budget is: what is live, and what was captured when."""

    def __init__(self, now):
        self.now, self.live, self.captured, self.node, self.closed, self.tripped = now, {}, {}, {}, {}, {}
        self.expired = set()

    def inside(self, node):
        return [hold for hold, leaf in self.node.items() if node in PATHS[leaf]]

    def held(self, node):
        return sum(self.live.get(hold, 0) for hold in self.inside(node))

    def spent(self, node):
        since = self.since(node)
        return sum(n for hold in self.inside(node) for when, n in self.captured.get(hold, ()) if when >= since)

    def counted(self, node):
        return self.held(node) + self.spent(node)

    def passed(self, node):
        return LIMITS[node] is not None and self.counted(node) > LIMITS[node]

    def fits(self, leaf, amount):
        self.lift()
        if self.tripped.keys() & set(PATHS[leaf]):
            return False
        return all(LIMITS[n] is None or self.counted(n) + amount <= LIMITS[n] for n in PATHS[leaf])

    def capture(self, hold, amount, at=None):
        """*at*: when it closed, if that was before now."""
        ceiling = self.live.pop(hold, 0)
        self.closed[hold] = self.now if at is None else at
        self.captured[hold] = [(self.closed[hold], amount)]
        if amount > ceiling:
            self.trip(hold)

    def correct(self, hold, amount):
        """What comes back is of when it was taken, and so is what is taken again; more than at first is owed now."""
        before, first = sum(n for _, n in self.captured[hold]), self.captured[hold][0][1]
        if hold in self.expired:
            first = before  # its row does not keep what was taken at first: all that is taken again counts now
        back = min(amount - before, min(amount, first) - min(before, first))
        self.captured[hold] += [(self.closed[hold], back), (self.now, amount - before - back)]
        if amount > before:
            self.trip(hold)

    def trip(self, hold):
        for node in PATHS[self.node[hold]]:
            if self.passed(node):
                self.tripped.setdefault(node, self.since(node))

    def since(self, node):
        return window_start_ms(WINDOWS[node], self.now) if node in WINDOWS else 0

    def lift(self):
        """A trip ends with its window, once what is live fits."""
        self.tripped = {node: at for node, at in self.tripped.items() if at == self.since(node) or self.passed(node)}


class WindowMachine(RuleBasedStateMachine):
    live = Bundle("live")
    ended = Bundle("ended")

    def __init__(self):
        super().__init__()
        self.books = Books(session=None)
        self.books.open_kernel(unsafe_trust_receipts=True)
        for node, parent in (("month", WALLET), ("day", "month"), ("week", "month")):
            limit, window = Nanos(LIMITS[node]), WINDOWS[node]
            request = NodeRequest(node, parent, NodeKind.BUDGET, node, limit, "", window=window)
            self.books.change(lambda view, request=request: open_node(view, request), nodes=(node, parent))
        for node, parent in (("s", "day"), ("s/c", "s"), ("t", "week")):
            self.books.open(node, format_dollars(LIMITS[node]), parent=parent)
        self.model = Model(self.books.clock.now_ms)
        self.count = self.transfers = 0

    def begin(self, node, amount, **more):
        self.count += 1
        hold_id = an_id(f"h{self.count}")
        result = self.books.hold(hold_id, format_dollars(amount), node, **more)
        assert isinstance(result, Refusal) != self.model.fits(node, amount)
        if isinstance(result, Refusal):
            return None
        self.model.node[hold_id], self.model.live[hold_id] = node, amount
        return hold_id

    def transfer(self):
        """One that has proven nothing yet."""
        self.transfers += 1
        return a_transfer(log=self.transfers)

    @rule(target=live, node=st.sampled_from(sorted(PATHS)), amount=amounts, chain=st.booleans())
    def authorize(self, node, amount, chain):
        hold_id = self.begin(node, amount, chain_evidence=chain, scheme="upto")
        return multiple() if hold_id is None else hold_id

    @rule(target=ended, node=st.sampled_from(sorted(PATHS)), amount=amounts, share=st.integers(0, 300))
    def a_bill_that_may_be_more_than_was_held(self, node, amount, share):
        hold_id = self.begin(node, amount, kind=HoldKind.LLM)
        if hold_id is None:
            return multiple()
        billed = Nanos(amount * share // 100)
        self.books.step(hold_id, Capture(billed, Evidence.PROVIDER_USAGE))
        self.model.capture(hold_id, billed)
        return hold_id

    @rule(target=ended, hold=consumes(live), share=st.integers(0, 100))
    def capture(self, hold, share):
        amount = Nanos(self.model.live[hold] * share // 100)
        if self.books.store.hold(hold).chain_evidence:
            self.books.step(hold, Capture(amount, Evidence.CHAIN, self.transfer()))
        else:  # its seller is believed, as the kernel was opened to do
            self.books.step(hold, Note(claim=Claim(amount, "")))
            self.books.step(hold, Capture(amount, Evidence.CLAIMED))
        self.model.capture(hold, amount)
        return hold

    @rule(hold=consumes(live))
    def void(self, hold):
        self.books.step(hold, Void("not sent"))
        del self.model.live[hold]

    @rule(target=ended, hold=consumes(live), late=st.integers(0, 3_000))
    def its_time_runs_out(self, hold, late):
        """What expired on the chain is taken all the same; of what no chain can tell the ceiling counts."""
        row = self.books.store.hold(hold)
        self.go_on(row.deadline_unix + 1 - self.books.clock.now_ms // 1000)
        if not row.chain_evidence:
            self.go_on(late * 60)
            self.books.step(hold, Lapse())
            begun = max(window_start_ms(WINDOWS[n], self.model.now) for n in PATHS[row.node_id] if n in WINDOWS)
            # While a window has begun in the future, it counts what lapses: each deadline is before it.
            lapsed = max(row.created_ms, row.deadline_unix * 1000)
            self.model.capture(hold, row.amount, at=begun if begun > self.books.clock.now_ms else lapsed)
            return hold
        self.books.step(hold, Expire(2**40))
        del self.model.live[hold]
        self.model.expired.add(hold)
        self.go_on(late * 60)
        amount = row.amount // 2 + 1000
        self.books.step(hold, Correct(Nanos(amount), Evidence.CHAIN, self.transfer()))
        self.model.capture(hold, amount)
        return hold

    @rule(hold=ended, share=st.integers(0, 200))
    def the_chain_says_otherwise(self, hold, share):
        row = self.books.store.hold(hold)
        later = sum(n for when, n in self.model.captured[hold][1:] if when > self.model.closed[hold])
        amount = max(row.amount * share // 100, later)
        if row.intent is not None:
            self.books.step(hold, Correct(Nanos(amount), Evidence.CHAIN, self.transfer()))
        elif amount >= row.captured:
            self.books.step(hold, Correct(Nanos(amount), Evidence.CHAIN))
        else:  # what was billed is owed: no chain knows of it
            with pytest.raises(IllegalTransition) as refused:
                self.books.step(hold, Correct(Nanos(amount), Evidence.CHAIN))
            assert refused.value.rule == "giving back"
            return
        self.model.correct(hold, amount)

    @rule(seconds=st.sampled_from([1, 3_600, 6 * 3_600, DAY_S, 3 * DAY_S, 8 * DAY_S, 32 * DAY_S]))
    def time_passes(self, seconds):
        self.go_on(seconds)

    @rule(beside=st.sampled_from([-1, 0, 1]), node=st.sampled_from(sorted(WINDOWS)))
    def it_is_nearly_a_new_window(self, beside, node):
        now, window = self.books.clock.now_ms, WINDOWS[node]
        days = next(n for n in range(1, 40) if window_start_ms(window, now + n * DAY_S * 1000) > now)
        begins = window_start_ms(window, now + days * DAY_S * 1000)
        self.go_on((begins - now) // 1000 + beside)

    def go_on(self, seconds):
        self.books.clock.tick(max(0, seconds))
        self.model.now = max(self.model.now, self.books.clock.now_ms)

    @rule(seconds=st.sampled_from([1, 7_200, 2 * DAY_S, 40 * DAY_S]))
    def the_clock_is_set_back(self, seconds):
        """Once something was written in a window, that window goes on, whatever the clock says."""
        written = [self.begin(node, UNIT, scheme="upto") for node in ("s", "t")]
        for hold in filter(None, written):
            self.void(hold)
        if all(written):
            self.books.clock.tick(-seconds)

    @invariant()
    def the_books_say_what_the_model_says(self):
        nodes = nodes_of(self.books.store)
        for node, limit in LIMITS.items():
            row = nodes[node]
            self.model.lift()
            assert (row.live, row.spent) == (self.model.held(node), self.model.spent(node)), node
            assert limit is None or row.counted <= limit or row.state is NodeState.TRIPPED
            assert (row.state is NodeState.TRIPPED) == (node in self.model.tripped)
            assert node == WALLET or row.granted_in == row.used

    @invariant()
    def what_is_live_is_what_is_outstanding(self):
        live = {hold.id: hold.amount for hold in self.books.store.outstanding()}
        assert live == self.model.live


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)

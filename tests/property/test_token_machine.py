"""A budget of tokens against a ten-line model, under any order of events and however the clock goes on."""

from fractions import Fraction
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tests.support.examples import examples
from tests.support.ledger import Clock
from x402guard import BudgetExhausted, ConfigError, TokenBudget
from x402guard.kernel.rows import NodeState
from x402guard.stores import open_store
from x402guard.tools import token_budget as context

MODES = ["raw", "table", "summary", "handle_only"]
FLOORS = [(Fraction(1, 2), "raw"), (Fraction(1, 5), "table")]
amounts = st.integers(1, 400)


class Model:
    """All that a budget of tokens is: what was used, and what is reserved until when."""

    def __init__(self, total):
        self.total, self.used, self.reserved = total, 0, {}

    @property
    def left(self):
        return max(0, self.total - self.used - sum(tokens for tokens, _ in self.reserved.values()))

    def lapse(self, now):
        for name in [name for name, (_, deadline) in self.reserved.items() if deadline < now]:
            self.used += self.reserved.pop(name)[0]

    @property
    def floor(self):
        for above, mode in FLOORS:
            if Fraction(self.left, self.total) > above:
                return mode
        return "summary" if Fraction(self.left, self.total) >= Fraction(1, 20) else "handle_only"


class TokenMachine(RuleBasedStateMachine):
    reserved = Bundle("reserved")
    ended = Bundle("ended")

    @initialize(total=st.sampled_from([100, 1_000]) | st.integers(1, 2_000), share=st.none() | st.integers(1, 100))
    def open(self, total, share):
        self.clock, self.model = Clock(), Model(total)
        self.soft = None if share is None else max(1, total * share // 100)
        opening = lambda url: open_store(url, clock_ms=self.clock)
        with mock.patch.object(context, "open_store", opening):
            self.budget = TokenBudget(total, soft=self.soft)
            assert self.budget.remaining == total
        self.told = False

    def now(self):
        return self.clock.now_ms // 1000

    def counted(self, tokens):
        """What is used goes up, or has just gone up; the soft limit is looked at whenever it may have."""
        self.model.used += tokens
        self.told = self.told or (self.soft is not None and self.model.used >= self.soft)

    @rule(target=reserved, asked=amounts)
    def allocate(self, asked):
        return self.granted(asked)

    @rule(target=reserved, beside=st.sampled_from([-1, 0, 1]))
    def allocate_beside_a_deadline(self, beside):
        ahead = [deadline - self.now() for _, deadline in self.model.reserved.values()]
        self.clock.tick(max(0, min(ahead, default=0) + beside))
        return self.granted(1)

    def granted(self, asked):
        self.model.lapse(self.now())  # an allocation finds what has run out of time
        self.counted(0)
        granted = min(asked, self.model.left)
        if not granted:
            with pytest.raises(BudgetExhausted):
                self.budget.allocate(asked)
            return multiple()
        allocation = self.budget.allocate(asked)
        assert (allocation, allocation.requested) == (granted, asked)
        self.model.reserved[allocation.reservation] = granted, self.now() + 900
        return allocation

    @rule(target=ended, allocation=consumes(reserved), more=st.integers(-400, 400))
    def record(self, allocation, more):
        actual = max(0, allocation + more)
        self.budget.record_usage(actual, allocation)
        lapsed = allocation.reservation not in self.model.reserved
        self.model.reserved.pop(allocation.reservation, None)
        self.counted(max(0, actual - allocation) if lapsed else actual)
        return multiple() if lapsed else allocation

    @rule(target=ended, allocation=consumes(reserved))
    def release(self, allocation):
        self.budget.release(allocation)
        lapsed = allocation.reservation not in self.model.reserved
        self.model.reserved.pop(allocation.reservation, None)
        if lapsed:
            self.counted(0)
        return multiple() if lapsed else allocation

    @rule(percent=st.sampled_from([50, 20, 5, 21, 4]))
    def use_all_but(self, percent):
        self.record_what_nobody_reserved(max(0, self.model.left - self.model.total * percent // 100))

    @rule(actual=st.integers(0, 200))
    def record_unreserved(self, actual):
        self.record_what_nobody_reserved(actual)

    def record_what_nobody_reserved(self, actual):
        self.budget.record_usage(actual)
        self.counted(actual)

    @rule(allocation=ended, actual=st.none() | st.integers(0, 600))
    def a_second_use_is_refused(self, allocation, actual):
        with pytest.raises(ConfigError):
            self.budget.release(allocation) if actual is None else self.budget.record_usage(actual, allocation)

    @rule(seconds=st.sampled_from([1, 60, 450, 2_000]))
    def time_passes(self, seconds):
        self.clock.tick(seconds)

    @invariant()
    def the_budget_says_what_the_model_says(self):
        budget, model = self.budget, self.model
        held = sum(tokens for tokens, _ in model.reserved.values())
        assert (budget.used, budget.reserved, budget.remaining) == (model.used, held, model.left)
        assert (budget.total, budget.usage_fraction) == (model.total, model.used / model.total)
        for mode in MODES:
            assert budget.suggested_mode(mode) == max(mode, model.floor, key=MODES.index)

    @invariant()
    def the_journal_adds_up_and_the_soft_limit_stands_in_it_once(self):
        store = self.budget._keep().store
        entries, node = store.entries(self.budget.limit.node_id), store.nodes()[0]
        assert (sum(e.captured for e in entries), sum(e.held for e in entries)) == (node.captured, node.held)
        assert sum(e.facts().get("name") == "tokens_soft_limit" for e in entries) == self.told
        assert node.state is NodeState.OPEN  # whatever is used, it never trips


TestTokenMachine = TokenMachine.TestCase
TestTokenMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)

"""An ordinary use of a tool is decided the short way: what it writes is what the general way writes, whatever came before."""

import logging
from collections import Counter
from contextlib import suppress
from random import Random
from uuid import uuid4

import pytest

from tests.support.ledger import Clock
from x402guard import Guard, Policy
from x402guard.errors import X402GuardError
from x402guard.kernel.rows import NodeState
from x402guard.ledger.owner import reset_node
from x402guard.ledger.view import Scope
from x402guard.policy.breakers import Breaker
from x402guard.policy.loops import Loop, forget_before
from x402guard.policy.spikes import Spike
from x402guard.policy.steps import reset_mark
from x402guard.stores.memory import MemoryStore
from x402guard.testing.both_ways import ORDINARY, WaysDifferError, both_ways
from x402guard.tools import flow

LOG = logging.getLogger("x402guard")
POLICIES = (
    Policy(),
    Policy(loop=Loop(calls=2, repeats=3, latch_after=4, longest_cycle=3, window_s=5)),
    Policy(loop=Loop(similar=True, own={"write": 1, "s*": None}), breaker=None),
    Policy(spike=Spike(action="trip", window=2, min_step="$0.02"), loop=None),
    Policy(spike=Spike(window=3, min_step="$0.001"), breaker=Breaker(failures=1, rest_s=1)),
    Policy(max_steps=9, max_calls={"search": 4}),
    Policy.careful(),
    Policy(soft_limits=(0.2, 0.5), risk=None, velocity=None, spike=None),
)
TOOLS = ("search", "search", "read", "write", "delete_all", "sum")
COSTS = ("$0", *["$0.000000001"] * 4, *["$0.0001"] * 4, "$0.002", "$0.01", "$0.03", "$0.25")
ARGUMENTS = (None, None, {}, {"q": 1}, {"q": 2}, {"q": "ä\u2028", "trace_id": "x"}, {"trace_id": "y"})
WAITS_MS = (0, 0, 1, 1_500, 2_000, 61_000, 4_000_000, -30_000, -90_000_000)
STEPS = {
    "charge": 16, "hold": 6, "fail": 1, "begin": 1, "again": 8, "slowly": 1, "in_turns": 1, "wait": 8, "jump": 0.3, "child": 0.3, "reset": 1, "kill": 0.1,
}  # fmt: skip
MODES = ({}, {}, {}, {"mode": "shadow"}, {"window": "day"}, {"logged": True})


def drawn(draws):
    """Return a step: its name, and what it takes."""
    [name] = draws.choices([*STEPS], [*STEPS.values()])
    if name in ("charge", "hold", "fail", "begin"):
        return name, draws.choice(TOOLS), draws.choice(COSTS), draws.choice(ARGUMENTS)
    listed = {"again": (1, 2, 3, 5), "wait": WAITS_MS, "child": ("$0.05", "$0.40")}.get(name)
    return (name,) if listed is None else (name, draws.choice(listed))


class Played:
    """A session of one dollar with a policy, and how often its uses were decided the short way, or why not."""

    def __init__(self, policy, folder, *, mode="enforce", window=None, logged=False):
        self.clock, self.counts, self.steady_ms = Clock(), Counter(), 0
        self.store = MemoryStore(
            clock_ms=lambda: self.clock.now_ms, steady_ms=lambda: self.clock.now_ms - self.steady_ms
        )
        self.kill_file = None if folder is None else folder / f"kill-{uuid4().hex}"
        self.guard = Guard(
            ledger=self.store,
            policy=policy,
            background_checks=False,
            kill_file=self.kill_file,
            mode=mode,
            on_notice=lambda _: None,
        )
        above = self.guard if window is None else self.guard.budget("team", "$5.00", per=window)
        self.session = self.payer = above.session("all", budget="$1.00")
        self.level = logging.INFO if logged else logging.WARNING
        self.last = ("charge", "read", "$0.01", None)

    def play(self, steps):
        before, log = LOG.level, LOG
        log.setLevel(self.level)
        try:
            with both_ways(self.counts), self.guard:
                for name, *given_ in steps:
                    with suppress(X402GuardError):
                        getattr(self, f"_{name}")(*given_)
        finally:
            log.setLevel(before)
            if self.kill_file is not None:
                self.kill_file.unlink(missing_ok=True)
        return self.counts

    def _charge(self, tool, cost, arguments):
        self.last = ("charge", tool, cost, arguments)
        self.payer.charge(tool, cost, arguments=arguments)

    def _hold(self, tool, cost, arguments, outcome=None):
        self.last = ("hold", tool, cost, arguments)
        with suppress(ZeroDivisionError), self.payer.hold(tool, up_to=cost, arguments=arguments):
            assert outcome is None or 1 / 0

    def _fail(self, tool, cost, arguments):
        self._hold(tool, cost, arguments, outcome="failed")

    def _begin(self, tool, cost, arguments):
        self.payer.hold(tool, up_to=cost, arguments=arguments, lifetime_s=2).__enter__()

    def _again(self, times):
        name, *given_ = self.last
        for _ in range(times):
            getattr(self, f"_{name}")(*given_)

    def _slowly(self):
        for _ in range(5):
            self._wait(6_000)
            self._again(1)

    def _in_turns(self):
        for number in range(12):
            self._wait(2_600)
            self._charge("read", "$0.0001", {"turn": number % 2})

    def _wait(self, milliseconds):
        self.clock.now_ms += milliseconds

    def _jump(self):
        self.clock.now_ms += 400_000
        self.steady_ms += 400_000

    def _child(self, budget):
        self.payer = self.session.child("part", budget=budget)

    def _reset(self):
        def reset(view):
            if view.node(node).state is NodeState.TRIPPED:
                reset_node(view, node, "me")
            forget_before(view, self.session.id)

        node = self.session.id
        self.store.transact(Scope(nodes=(node,), marks=(reset_mark(node),), durable=True), reset)

    def _kill(self):
        self.kill_file.touch()


def play(policy, steps, folder=None, **modes):
    """Return how often the steps were decided the short way, or why not."""
    return Played(policy, folder, **modes).play(steps)


@pytest.mark.parametrize("seeds", range(0, 120, 20))
def test_the_short_way_decides_and_writes_what_the_general_way_does(seeds, tmp_path):
    counts = Counter()
    for seed in range(seeds, seeds + 20):
        draws = Random(seed)
        policy, modes = POLICIES[seed % len(POLICIES)], draws.choice(MODES)
        counts.update(play(policy, [drawn(draws) for _ in range(80)], tmp_path, **modes))
    assert counts[ORDINARY] > 100


def test_ordinary_uses_go_the_short_way():
    uses = [
        (way, tool, "$0.01", {"n": n}) for n in range(5) for way in ("charge", "hold") for tool in ("search", "read")
    ]
    assert play(Policy(), uses) == {ORDINARY: 20}


def test_what_is_not_ordinary_says_why():
    fails = [("fail", "search", "$0.01", None), ("charge", "search", "$0.01", None)]
    assert play(Policy(), fails) == {ORDINARY: 1, "what it calls has failed before": 1}
    assert play(Policy(), [("charge", "search", "$0", None)]) == {"the owner's rules do not simply allow it": 1}
    assert play(Policy(max_steps=3), [("charge", "read", "$0.01", None)]) == {"policy.counts": 1}


def test_a_short_way_that_differs_is_found(monkeypatch):
    monkeypatch.setattr(flow, "pass_plainly", lambda *_: None)  # it forgets the rows of the guards
    with pytest.raises(WaysDifferError, match=r"the short way writes .* and the general way writes"):
        play(Policy(), [("charge", "read", "$0.01", None)])
    monkeypatch.undo()
    monkeypatch.setattr(flow, "is_plain", lambda *_, **_more: True)  # it forgets the budget
    with pytest.raises(WaysDifferError):
        play(Policy(), [("charge", "read", "$0.25", None)] * 5)

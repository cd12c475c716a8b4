"""A guard's method that says it does nothing at a moment is not called; here it is, and does nothing."""

from typing import get_args

import pytest

from tests.support.ledger import Books, usd
from x402guard import Loop, Policy, Spike, Timeouts, Velocity
from x402guard.kernel.rows import HoldKind
from x402guard.policy.sellers import Seller
from x402guard.policy.step_guard import Moment, StepEnd, StepGuard
from x402guard.policy.steps import Step

PAYEE = "0x" + "ab" * 20
POLICIES = {
    "the usual one": Policy(),
    "careful": Policy.careful(),
    "permissive": Policy.permissive(),
    "no guard": Policy(loop=None, spike=None, breaker=None, velocity=None),
    "every guard": Policy(
        timeouts=Timeouts(step_s=1, session_s=5),
        spike=Spike(action="trip", min_step="$0.01"),
        velocity=Velocity(calls_per_minute=1, dollars_per_hour="$0.10", percent_per_payee=10),
        loop=Loop(calls=1, own={"serp": 2}),
        max_steps=1,
        max_calls={"serp": 1},
        sellers={"api.example": Seller(daily="$0.10")},
    ),
}


def steps(kind):
    named = {HoldKind.TOOL: "serp", HoldKind.TOKENS: ""}.get(kind, "POST api.example/x")
    step = Step(kind, named, "ab" * 32, "s", routes=() if kind is HoldKind.TOOL else ("POST api.example/x",))
    return {False: step, True: step.at(usd("$0.50"), PAYEE if kind is HoldKind.PAYMENT else "")}


ENDS = [StepEnd("h", outcome, late=late) for outcome in ("ok", "failed", "unknown") for late in (False, True)]


def calls(moment, late, kind):
    """All arguments with which a moment may come."""
    both = steps(kind)
    if moment == "marks":
        payees = (PAYEE,) if kind is HoldKind.PAYMENT else ()
        return [((step, payees), {"ending": late}) for step in both.values()]
    if moment == "judge":
        return [((both[late],), {})]
    if moment == "taken":
        return [((both[True], hold_id), {}) for hold_id in ("", "h")]
    if moment == "given_back":
        return [((both[True], 1), {})]
    return [((both[True], end), {}) for end in ENDS]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", HoldKind)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("is_busy", [False, True], ids=["nothing was seen", "much was seen"])
def test_what_says_that_it_does_nothing_does_nothing(name, kind, late, is_busy):
    policy, books, passed = POLICIES[name], Books(), []

    def change(view):
        if is_busy:
            for guard in policy.guards:  # as if the same steps had been taken and had failed again and again
                for _ in range(8):
                    guard.taken(view, steps(kind)[False].at(usd("$0.01")), "h")
                    guard.ended(view, steps(kind)[True], StepEnd("h", "failed"))
        before = (dict(view._marks), list(view.entries), list(view.notices), view.node("s"), view.node("wallet"))
        for guard in policy.guards:
            for moment in get_args(Moment):
                if guard.acts(moment, kind, late=late):
                    assert getattr(guard, moment) in policy.acting[moment, kind, late]
                    continue
                for args, more in calls(moment, late, kind):
                    given = args if moment == "marks" else (view, *args)
                    assert not [*(getattr(guard, moment)(*given, **more) or ())], (guard, moment)
                passed.append(moment)
        assert before == (view._marks, view.entries, view.notices, view.node("s"), view.node("wallet"))

    books.change(change, nodes=("s",))
    assert passed or not policy.guards


def test_a_guard_of_ones_own_is_asked_at_each_moment_that_it_has():
    class Mine(StepGuard):
        def judge(self, view, step):
            return None

    assert [Mine().acts(moment, HoldKind.LLM, late=False) for moment in get_args(Moment)] == [
        False, True, False, False, False,
    ]  # fmt: skip

"""Spike detector: finds a step that costs far more than earlier steps of its kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from typing_extensions import override

from x402guard.errors import SpendSpike
from x402guard.ledger.authorize import ONLY_RESET, Refusal
from x402guard.ledger.budgets import find_shortfall, trip
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.money import Dollars, Nanos, format_dollars
from x402guard.policy.checks import check_choice, check_dollars, check_whole
from x402guard.policy.step_guard import StepGuard
from x402guard.policy.steps import Step

SpikeAction = Literal["warn", "trip"]
SPIKE: Final = "spend_spike"
_MOST: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class Spike(StepGuard):
    """When a step costs too much compared with earlier steps of its kind: payment, LLM call or tool.

    The held amount counts: the price of a payment, the ceiling of a call or tool.

    Args:
        multiplier: a step may cost this many times the mean of the steps before it (1 to 1,000).
        window: how many steps are compared, the new one included (2 to 1,000); fewer steps make no spike.
        action: ``warn`` (an event in the report) or ``trip`` (refuse the step and trip the session).
        min_step: dollars; a cheaper step is no spike.

    Raises ``ConfigError`` naming the setting.
    """

    multiplier: int = 3
    window: int = 5
    action: SpikeAction = "warn"
    min_step: Dollars = "$0.05"
    least: Nanos = field(init=False, repr=False, compare=False, default=Nanos(0))

    def __post_init__(self) -> None:
        check_whole("policy.spike.multiplier", self.multiplier, 1, _MOST)
        check_whole("policy.spike.window", self.window, 2, _MOST)
        check_choice("policy.spike.action", self.action, get_args(SpikeAction))
        object.__setattr__(self, "least", check_dollars("policy.spike.min_step", self.min_step))

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> tuple[MarkKey, ...]:
        return () if ending else (_costs(step), step.reset_key)

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        if not step.priced or self.action != "trip":
            return None
        spike = self.find_spike(view, step)
        if spike is None or find_shortfall(view, step.node_id, step.amount) is not None:
            return None  # the budget refuses what does not fit, without a trip
        trip(view, step.run_id, SPIKE, spike)
        reason = f"{spike}; the session is tripped until its owner resets it"
        return Refusal(SPIKE, reason, step.amount, error=SpendSpike, advice=ONLY_RESET)

    def find_spike(self, view: LedgerView, step: Step) -> str | None:
        """Return why a step is a spike, or None."""
        amount = step.amount
        if amount < self.least:
            return None
        before = _before(view, step)[-(self.window - 1) :]
        total = sum(before)
        # Compared without dividing. If all earlier steps cost nothing, there is nothing to compare with.
        if len(before) < self.window - 1 or total == 0 or amount * len(before) <= self.multiplier * total:
            return None
        mean = format_dollars(-(-total // len(before)))
        return f"{step.name} costs ${format_dollars(amount)}, over {self.multiplier} times the ${mean} of the {len(before)} before it"

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        spike = self.find_spike(view, step)
        if spike is not None:
            view.record(step.node_id, "event", facts={"name": SPIKE, "reason": spike})
        before = _before(view, step)
        costs = [*before, step.amount][-(self.window - 1) :]
        view.put_mark(_costs(step), {"costs": costs, "before": before, "at": view.clock_ms})

    @override
    def given_back(self, view: LedgerView, step: Step, at_ms: int) -> None:
        row = view.mark(_costs(step))
        if row is None or step.amount not in row["costs"]:
            return
        costs = list(row["costs"])
        if costs[-1] == step.amount and row.get("before") is not None:
            costs = row["before"]  # as if the step had never been taken
        else:
            del costs[len(costs) - 1 - costs[::-1].index(step.amount)]
        view.put_mark(_costs(step), {**row, "costs": costs, "before": None})


def _costs(step: Step) -> MarkKey:
    return "spike", f"{step.run_id} {step.kind}"


def _before(view: LedgerView, step: Step) -> list[int]:
    row = view.mark(_costs(step)) or {"costs": [], "at": 0}
    reset = view.mark(step.reset_key)
    return [] if reset is not None and row["at"] <= reset["at"] else list(row["costs"])

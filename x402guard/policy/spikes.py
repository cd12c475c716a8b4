"""Spike detector: finds a step that costs far more than earlier steps of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, Literal, get_args

from typing_extensions import override

from x402guard.errors import ConfigError, SpendSpike
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.ledger.authorize import ONLY_RESET, Refusal
from x402guard.ledger.budgets import find_shortfall, trip
from x402guard.ledger.view import LedgerView
from x402guard.money import Dollars, format_dollars
from x402guard.policy.checks import check_choice, check_dollars, check_whole
from x402guard.policy.step_guard import Moment, Rows, StepGuard, Unusual
from x402guard.policy.steps import Step

SpikeAction = Literal["warn", "trip"]
SPIKE: Final = "spend_spike"
TOKEN_SPIKE: Final = "token_spike"  # noqa: S105 - no password
_LEAST_TOKENS: Final = 2_000
_MOST: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class Spike(StepGuard):
    """When a step costs too much compared with earlier steps of its kind: payment, LLM call or tool.

    The held amount counts: the price of a payment, the ceiling of a call or tool. The tokens that LLM calls have used
    are compared in the same way, from 2,000 on.

    Args:
        multiplier: a step may cost this many times the mean of the steps before it (1 to 1,000).
        window: how many steps are compared, the new one included (2 to 1,000); fewer steps make no spike.
        action: ``warn`` (an event in the report, and a notice) or ``trip`` (refuse the step and trip the run).
        min_step: dollars; a cheaper step is no spike.

    Raises ``ConfigError`` naming the setting.
    """

    multiplier: float = 3
    window: int = 5
    action: SpikeAction = "warn"
    min_step: Dollars = "$0.05"
    least: Nanos = field(init=False, repr=False, compare=False, default=Nanos(0))

    def __post_init__(self) -> None:
        times = self.multiplier
        if isinstance(times, bool) or not isinstance(times, int | float) or not 1 <= times <= _MOST:
            raise ConfigError(f"policy.spike.multiplier: {times!r} is not a number from 1 to {_MOST:,}")
        check_whole("policy.spike.window", self.window, 2, _MOST)
        check_choice("policy.spike.action", self.action, get_args(SpikeAction))
        object.__setattr__(self, "least", check_dollars("policy.spike.min_step", self.min_step))

    @override
    def acts(self, moment: Moment, kind: HoldKind, *, late: bool) -> bool:
        if moment == "judge":
            return late and self.action == "trip"
        if moment == "marks" and late:
            return kind is HoldKind.LLM
        return super().acts(moment, kind, late=late)

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> tuple[MarkKey, ...]:
        if ending:
            return (_tokens(step), step.reset_key) if step.kind is HoldKind.LLM else ()
        return (_costs(step), step.reset_key)

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        if not step.priced or self.action != "trip":
            return None
        spike = self.find_spike(view, step)
        if spike is None or find_shortfall(view, step.node_id, step.amount) is not None:
            return None  # the budget refuses what does not fit, without a trip
        trip(view, step.run_id, SPIKE, spike)
        reason = f"{spike}; the run is tripped until its owner resets it"
        return Refusal(SPIKE, reason, step.amount, error=SpendSpike, advice=ONLY_RESET)

    def find_spike(self, view: LedgerView, step: Step) -> str | None:
        """Return why a step is a spike, or None."""
        amount = step.amount
        if amount < self.least:
            return None
        before = _before(view, step)[-(self.window - 1) :]
        total = sum(before)
        if not self._is_far_above(amount, before):
            return None
        mean = format_dollars(-(-total // len(before)))
        return f"{step.shown} costs ${format_dollars(amount)}, over {self.multiplier:g} times the ${mean} of the {len(before)} before it"

    def _is_far_above(self, now: int, before: list[int]) -> bool:
        # Compared without dividing. If all earlier steps used nothing, there is nothing to compare with.
        enough, total = len(before) >= self.window - 1, sum(before)
        return enough and total > 0 and now * len(before) > Fraction(self.multiplier) * total

    def note_tokens(self, view: LedgerView, step: Step, used: int) -> None:
        """Compare the tokens that an LLM call has used with those of the calls before it, and tell of a spike."""
        row = view.mark(_tokens(step)) or {"used": [], "at": 0}
        reset = view.mark(step.reset_key)
        before = [] if reset is not None and row["at"] <= reset["at"] else list(row["used"])
        view.put_mark(_tokens(step), {"used": [*before, used][-(self.window - 1) :], "at": view.clock_ms})
        if used < _LEAST_TOKENS or not self._is_far_above(used, before):
            return
        mean = -(-sum(before) // len(before))
        reason = f"{step.shown} used {used:,} tokens, over {self.multiplier:g} times the {mean:,} of the {len(before)} before it"
        view.record(step.node_id, "event", facts={"name": TOKEN_SPIKE, "reason": reason, "tokens": used})
        view.tell(TOKEN_SPIKE, "warning", reason, session=step.node_id, rule=TOKEN_SPIKE, facts={"tokens": used})
        if self.action == "trip":
            trip(view, step.run_id, SPIKE, reason)

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        spike = self.find_spike(view, step)
        if spike is not None:
            view.record(step.node_id, "event", facts={"name": SPIKE, "reason": spike})
            view.tell(SPIKE, "warning", spike, session=step.node_id, amount=step.amount, rule=SPIKE)
        view.put_mark(_costs(step), self._with(view, step))

    @override
    def plainly(self, view: LedgerView, step: Step) -> Rows | Unusual:
        if step.amount >= self.least and self.find_spike(view, step) is not None:
            return _FAR_ABOVE
        return ((_costs(step), self._with(view, step)),)

    def _with(self, view: LedgerView, step: Step) -> Mapping[str, Any]:
        """Return the row of the last costs, with that of a step."""
        before = _before(view, step)
        costs = [*before, step.amount][-(self.window - 1) :]
        return {"costs": costs, "before": before, "at": view.clock_ms}

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


_FAR_ABOVE: Final = Unusual("it costs far more than those before it")


def _costs(step: Step) -> MarkKey:
    return "spike", f"{step.run_id} {step.kind}"


def _tokens(step: Step) -> MarkKey:
    """Return the key of the row with the tokens of the run's last LLM calls."""
    return "spike_tokens", step.run_id


def _before(view: LedgerView, step: Step) -> list[int]:
    row = view.mark(_costs(step)) or {"costs": [], "at": 0}
    reset = view.mark(step.reset_key)
    return [] if reset is not None and row["at"] <= reset["at"] else list(row["costs"])

"""The spike detector: a step that costs far more than those of its kind before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from x402guard.errors import ConfigError
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.money import Dollars, Nanos, dollars_to_nanos, format_dollars
from x402guard.policy.steps import Step, reset_mark

SpikeAction = Literal["warn", "trip"]
_MOST: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class Spike:
    """When a step costs too much beside those before it, of its kind: payments, LLM calls and tools each by themselves.

    What counts is what is held: the price of a payment, the ceiling of a call or tool.

    Args:
        multiplier: a step may cost so many times the mean of those before it (1 to 1,000).
        window: how many steps are looked at, the new one included (2 to 1,000); there is no spike before so many.
        action: ``warn`` (an event in the report) or ``trip``: refused, and the session latched until its owner resets it.
        min_step: dollars under which no step is a spike.

    Raises ``ConfigError`` naming the setting.
    """

    multiplier: int = 3
    window: int = 5
    action: SpikeAction = "warn"
    min_step: Dollars = "$0.05"
    least: Nanos = field(init=False, repr=False, compare=False, default=Nanos(0))

    def __post_init__(self) -> None:
        for name, value, least in (("multiplier", self.multiplier, 1), ("window", self.window, 2)):
            if type(value) is not int or not least <= value <= _MOST:
                raise ConfigError(f"policy.spike.{name}: {value!r} is not a whole number from {least} to {_MOST}")
        if self.action not in get_args(SpikeAction):
            raise ConfigError(f"policy.spike.action: {self.action!r} is neither 'warn' nor 'trip'")
        try:
            object.__setattr__(self, "least", dollars_to_nanos(self.min_step, field="policy.spike.min_step"))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error


def _costs(run_id: str, step: Step) -> MarkKey:
    return "spike", f"{run_id} {step.kind}"


def spike_marks(spike: Spike | None, run_id: str, step: Step) -> tuple[MarkKey, ...]:
    """Return the small rows that ``find_spike`` and ``note_cost`` have to see."""
    return () if spike is None else (_costs(run_id, step), reset_mark(run_id))


def find_spike(view: LedgerView, spike: Spike | None, run_id: str, step: Step) -> str | None:
    """Return why a step is a spike, or None."""
    amount = step.amount
    if spike is None or amount < spike.least:
        return None
    before = _before(view, run_id, step)[-(spike.window - 1) :]
    total = sum(before)
    # Compared without dividing; beside steps that cost nothing nothing can be said.
    if len(before) < spike.window - 1 or total == 0 or amount * len(before) <= spike.multiplier * total:
        return None
    mean = format_dollars(-(-total // len(before)))
    return f"{step.name} costs ${format_dollars(amount)}, over {spike.multiplier} times the ${mean} of the {len(before)} before it"


def note_cost(view: LedgerView, spike: Spike | None, run_id: str, step: Step) -> None:
    """Remember what a step costs."""
    if spike is not None:
        before = _before(view, run_id, step)
        costs = [*before, step.amount][-(spike.window - 1) :]
        view.put_mark(_costs(run_id, step), {"costs": costs, "before": before, "at": view.clock_ms})


def forget_cost(view: LedgerView, spike: Spike | None, run_id: str, step: Step) -> None:
    """Take back the cost of a step that was never paid for."""
    row = view.mark(_costs(run_id, step))
    if spike is None or row is None or step.amount not in row["costs"]:
        return
    costs = list(row["costs"])
    if costs[-1] == step.amount and row.get("before") is not None:
        costs = row["before"]  # as if it had never been
    else:
        del costs[len(costs) - 1 - costs[::-1].index(step.amount)]
    view.put_mark(_costs(run_id, step), {**row, "costs": costs, "before": None})


def _before(view: LedgerView, run_id: str, step: Step) -> list[int]:
    row = view.mark(_costs(run_id, step)) or {"costs": [], "at": 0}
    reset = view.mark(reset_mark(run_id))
    return [] if reset is not None and row["at"] <= reset["at"] else list(row["costs"])

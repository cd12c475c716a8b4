"""The protocol of a guard: what every guard over a step can do, inside the transaction that would hold for the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.policy.steps import Step

Outcome = Literal["ok", "failed", "unknown"]
"""How a call ended, as far as the server or tool that was called is concerned; ``unknown`` says nothing of it."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """How a step ended.

    Attributes:
        hold_id: the id of its hold.
        outcome: what it says of the server or tool that was called.
        again: the same payment failed before; it counts once in a streak of failures, and each time for a circuit breaker.
        late: the answer had begun well and was counted as ``ok``, before it failed.
    """

    hold_id: str
    outcome: Outcome
    again: bool = False
    late: bool = False


class StepGuard:
    """A guard does nothing unless it overrides one of these; ``Policy.guards`` lists them in the order in which they judge.

    All run on live rows and only read the rows that ``marks`` names.
    """

    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> Iterable[MarkKey]:  # noqa: ARG002 - none
        """Return the keys of the rows that the other methods see; their number never grows with the run.

        *payees* are the addresses that the step may pay. *ending* is True where only ``ended`` follows.
        """
        return ()

    def judge(self, view: LedgerView, step: Step) -> Refusal | None:  # noqa: ARG002 - no objection
        """Return the objection to a step, or None. It may trip the run; nothing of the step is written.

        Asked twice in a transaction: before the price is known, and at the price (``step.priced``). A guard answers once.
        """
        return None

    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        """Record a step that was held for, by the hold of that id; "" where the step is over already."""

    def given_back(self, view: LedgerView, step: Step, at_ms: int) -> None:
        """Remove a step that was taken at *at_ms* (unix milliseconds) and never paid for."""

    def ended(self, view: LedgerView, step: Step, end: StepEnd) -> None:
        """Record how a step ended. It may trip the run."""

"""The protocol of a guard: what it can do with a step, inside the transaction that writes the step's hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from typing_extensions import override

from x402guard.kernel.change_set import Mark, MarkKey
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import LedgerView
from x402guard.policy.steps import Step

Outcome = Literal["ok", "failed", "unknown"]
"""How a call ended as far as the called server or tool is concerned; ``unknown`` says nothing about it."""


class Unusual(Struct, frozen=True):
    """Why a step is decided by the general way: the short one is for ordinary steps alone."""

    why: str


Rows = tuple[tuple[MarkKey, Mark], ...]
"""Marks that are to be written."""


class StepEnd(Struct, frozen=True):
    """How a step ended.

    Attributes:
        hold_id: the id of its hold.
        outcome: what the end says about the called server or tool.
        again: the same payment failed before; a streak of failures counts it once, a circuit breaker each time.
        late: the answer began and was counted as ``ok`` before it failed.
        begun_ms: when its hold was written, in unix ms; 0 for an end that is no failure.
    """

    hold_id: str
    outcome: Outcome
    again: bool = False
    late: bool = False
    begun_ms: int = 0


Moment = Literal["marks", "judge", "taken", "given_back", "ended"]
"""When a guard is asked: each is the name of a method of ``StepGuard``."""


class StepGuard:
    """Base class of guards. Its methods do nothing. ``Policy.guards`` lists the guards in the order of judging.

    All methods but ``acts`` run on live rows and read only the rows that ``marks`` names.
    """

    def acts(self, moment: Moment, kind: HoldKind, *, late: bool) -> bool:  # noqa: ARG002 - it does not depend on them
        """Return False if the method of a moment does nothing, whatever the step of a kind is: then it is not called.

        *late*: of ``judge``, that the step is priced; of ``marks``, that it is ending.
        """
        return getattr(type(self), moment) is not getattr(StepGuard, moment)

    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> Iterable[MarkKey]:  # noqa: ARG002 - none
        """Return the keys of the rows that the other methods read; their number does not grow with the run.

        *payees* are the addresses that the step may pay. *ending*: only ``ended`` follows.
        """
        return ()

    def judge(self, view: LedgerView, step: Step) -> Refusal | None:  # noqa: ARG002 - no objection
        """Return the objection to a step, or None. It may trip the run; it writes nothing about the step.

        Called before the price is known and again at the price (``step.priced``), in one transaction. It answers once.
        """
        return None

    def plainly(self, view: LedgerView, step: Step) -> Rows | Unusual:  # noqa: ARG002 - it leaves each step to them
        """Return the rows of an ordinary step at its price that ``judge``, ``taken`` and an unknown end would write.

        It writes nothing. *step*: its price is known, whether or not it says so. For a step to which those methods object,
        or of which they write more than rows, it returns ``Unusual``; it may do so for any step.
        """
        return Unusual(f"policy.{type(self).__name__.lower()}")

    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        """Record a step. *hold_id* is the id of its hold, "" if the step is over already."""

    def given_back(self, view: LedgerView, step: Step, at_ms: int) -> None:
        """Remove a step that was taken at *at_ms* (unix milliseconds) and never paid."""

    def ended(self, view: LedgerView, step: Step, end: StepEnd) -> None:
        """Record how a step ended. It may trip the run."""


class PriceGuard(StepGuard):
    """Base class of guards that compare the price of a payment: only a payment has a payee."""

    @override
    def acts(self, moment: Moment, kind: HoldKind, *, late: bool) -> bool:
        if kind is not HoldKind.PAYMENT or (moment == "marks" and late) or (moment == "judge" and not late):
            return False
        return super().acts(moment, kind, late=late)

"""Limits the steps of a run, and the uses of one tool or route."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct
from typing_extensions import override

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import LedgerView
from x402guard.policy.step_guard import Moment, StepGuard
from x402guard.policy.steps import Step, is_named

MAX_STEPS: Final = "max_steps"
MAX_CALLS: Final = "max_calls"


class Counts(Struct, StepGuard, frozen=True):
    """Counts the steps of a run. ``max_steps`` and ``max_calls`` come from the policy."""

    max_steps: int | None
    max_calls: Mapping[str, int]

    def _limits(self, step: Step) -> Iterator[tuple[str, str, int, MarkKey]]:
        if self.max_steps is not None:
            yield MAX_STEPS, "steps", self.max_steps, ("steps", step.run_id)
        for pattern, most in self.max_calls.items():
            if is_named(pattern, step):
                yield MAX_CALLS, f"calls of {pattern}", most, ("calls", f"{step.run_id} {pattern}")

    @override
    def acts(self, moment: Moment, kind: HoldKind, *, late: bool) -> bool:
        if (self.max_steps is None and not self.max_calls) or (late and moment in ("marks", "judge")):
            return False
        return super().acts(moment, kind, late=late)

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> Iterator[MarkKey]:
        return iter(()) if ending else (key for _, _, _, key in self._limits(step))

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        if step.priced:
            return None
        for rule, what, most, key in self._limits(step):
            if _count(view, key) >= most:
                return Refusal(rule, f"this run has taken {most} {what}, which is its limit (policy.{rule})")
        return None

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        for _, _, _, key in self._limits(step):
            view.put_mark(key, {"count": _count(view, key) + 1})

    @override
    def given_back(self, view: LedgerView, step: Step, at_ms: int) -> None:
        for _, _, _, key in self._limits(step):
            if _count(view, key):
                view.put_mark(key, {"count": _count(view, key) - 1})


def _count(view: LedgerView, key: MarkKey) -> int:
    return int((view.mark(key) or {"count": 0})["count"])

"""Time limits for a call, for an agent's step (from an LLM answer to the next LLM request), and for the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from x402guard.errors import SessionTripped
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.authorize import ONLY_RESET, Refusal
from x402guard.ledger.budgets import trip
from x402guard.ledger.view import LedgerView
from x402guard.policy.checks import check_whole
from x402guard.policy.step_guard import Moment, StepEnd, StepGuard
from x402guard.policy.steps import Step, reset_mark

SESSION_TIMEOUT: Final = "session_timeout"
STEP_TIMEOUT: Final = "step_timeout"
LONGEST_S: Final = 366 * 86_400


@dataclass(frozen=True, kw_only=True)
class Timeouts(StepGuard):
    """Time limits in whole seconds (1 to 366 days); None for no limit.

    Args:
        payment_s: the most from sending a payment to the end of the answer that it bought. It has to begin within the
            offer's ``maxTimeoutSeconds`` or the client's own read timeout, whichever is longer.
        tool_s: one use of a decorated tool; None: 10 seconds for an ``async`` one, and no limit for a plain function.
        llm_s: one LLM call, from its request to the end of its answer.
        chunk_s: from one chunk of an LLM's answer to the next.
        step_s: a step of the agent: from an LLM answer, or ``session.step()``, to the next LLM request. After it the
            step's next payment or tool use is refused.
        session_s: the run, from its first opening or its last reset. After it the run is tripped.

    Raises ``ConfigError`` naming the setting.
    """

    payment_s: int | None = 240
    tool_s: int | None = None
    llm_s: int | None = 600
    chunk_s: int | None = 60
    step_s: int | None = None
    session_s: int | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            check_whole(f"policy.timeouts.{name}", getattr(self, name), 1, LONGEST_S, optional=True, what="of seconds ")

    @override
    def acts(self, moment: Moment, kind: HoldKind, *, late: bool) -> bool:
        if moment == "marks":
            return self.step_s is not None or self.session_s is not None
        if moment == "judge":
            return not late and (self.session_s is not None or (self.step_s is not None and kind is not HoldKind.LLM))
        return moment in ("taken", "ended") and self.step_s is not None and kind is HoldKind.LLM

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> tuple[MarkKey, ...]:
        return self.run_marks(step.run_id)

    def run_marks(self, run_id: str) -> tuple[MarkKey, ...]:
        """Return the keys of a run's rows that the other methods read."""
        begun = () if self.step_s is None else (_begun(run_id),)
        return begun if self.session_s is None else (*begun, reset_mark(run_id))

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        return None if step.priced else self.find_late(view, step.run_id, step.kind)

    def find_late(self, view: LedgerView, run_id: str, kind: HoldKind) -> Refusal | None:
        """Return why a step of a kind is too late, or None. Trips a run that is past ``session_s``."""
        if self.session_s is not None and view.has_node(run_id):
            since_ms = max(view.node(run_id).created_ms, int((view.mark(reset_mark(run_id)) or {"at": 0})["at"]))
            if view.now_ms - since_ms > self.session_s * 1000:
                reason = f"the run has gone on for more than {self.session_s} s (policy.timeouts.session_s)"
                trip(view, run_id, SESSION_TIMEOUT, reason)
                reason = f"{reason}; it is tripped until its owner resets it"
                return Refusal(SESSION_TIMEOUT, reason, error=SessionTripped, advice=ONLY_RESET)
        if self.step_s is None or kind is HoldKind.LLM:
            return None
        begun = view.mark(_begun(run_id))
        if begun is None or begun["at"] is None:
            return None
        took_s = (view.now_ms - int(begun["at"])) / 1000
        if took_s <= self.step_s:
            return None
        reason = f"this step began {took_s:.0f} s ago and may take {self.step_s} s (policy.timeouts.step_s)"
        return Refusal(STEP_TIMEOUT, f"{reason}; ask the model again, or call session.step()")

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        if step.kind is HoldKind.LLM and self.step_s is not None:  # the next LLM request ends the agent's step
            view.put_mark(_begun(step.run_id), {"at": None})

    @override
    def ended(self, view: LedgerView, step: Step, end: StepEnd) -> None:
        if step.kind is HoldKind.LLM:
            self.begin_step(view, step.run_id)

    def begin_step(self, view: LedgerView, run_id: str) -> None:
        """Begin a step of the agent: the model has answered, or the agent called ``session.step()``."""
        if self.step_s is not None:
            view.put_mark(_begun(run_id), {"at": view.now_ms})


def _begun(run_id: str) -> MarkKey:
    return "step", run_id

"""Time limits in three layers: a call, a step of the agent from one answer of its model to the next question, and the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from x402guard.errors import ConfigError, SessionTripped
from x402guard.ledger.authorize import ONLY_RESET, Refusal
from x402guard.ledger.budgets import trip
from x402guard.ledger.model import HoldKind
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.policy.steps import reset_mark, run_of

SESSION_TIMEOUT: Final = "session_timeout"
STEP_TIMEOUT: Final = "step_timeout"
_LONGEST_S: Final = 366 * 86_400


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long things may take, in whole seconds (1 to a year); None for any time.

    Args:
        payment_s: from sending a payment to the end of what it bought.
        tool_s: one use of a decorated tool.
        llm_s: one LLM call, from its request to the end of its answer.
        chunk_s: from one piece of an LLM's answer to the next.
        step_s: of the agent: from one LLM answer to the next LLM request, or from ``session.step()``; past it the step's next
            payment or tool is refused.
        session_s: the run, from its first opening or its last reset; past it the session is latched.

    Raises ``ConfigError`` naming the setting.
    """

    payment_s: int | None = 10
    tool_s: int | None = 10
    llm_s: int | None = 600
    chunk_s: int | None = 60
    step_s: int | None = None
    session_s: int | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= _LONGEST_S):
                raise ConfigError(
                    f"policy.timeouts.{name}: {value!r} is not a whole number of seconds from 1 to {_LONGEST_S}, or None"
                )


def _step(run_id: str) -> MarkKey:
    return "step", run_id


def timeout_marks(timeouts: Timeouts, node_id: str) -> tuple[MarkKey, ...]:
    """Return the small rows that the functions below have to see."""
    run_id = run_of(node_id)
    marks = [] if timeouts.step_s is None else [_step(run_id)]
    if timeouts.session_s is not None:
        marks.append(reset_mark(run_id))
    return tuple(marks)


def find_late(view: LedgerView, timeouts: Timeouts, node_id: str, kind: HoldKind) -> Refusal | None:
    """Return why it is too late for a step of a kind, or None. Past the run's own time the run is latched."""
    run_id = run_of(node_id)
    if timeouts.session_s is not None and view.has_node(run_id):
        since_ms = max(view.node(run_id).created_ms, int((view.mark(reset_mark(run_id)) or {"at": 0})["at"]))
        if view.now_ms - since_ms > timeouts.session_s * 1000:
            reason = f"the session has run for more than {timeouts.session_s} s (policy.timeouts.session_s)"
            trip(view, run_id, SESSION_TIMEOUT, reason)
            return Refusal(
                SESSION_TIMEOUT,
                f"{reason}; it is latched until its owner resets it",
                error=SessionTripped,
                advice=ONLY_RESET,
            )
    begun = view.mark(_step(run_id))
    if timeouts.step_s is None or kind is HoldKind.LLM or begun is None or begun["at"] is None:
        return None
    took_s = (view.now_ms - int(begun["at"])) / 1000
    if took_s <= timeouts.step_s:
        return None
    reason = f"this step began {took_s:.0f} s ago and may take {timeouts.step_s} s (policy.timeouts.step_s)"
    return Refusal(STEP_TIMEOUT, f"{reason}; ask the model again, or call session.step()")


def begin_step(view: LedgerView, timeouts: Timeouts, node_id: str) -> None:
    """A step begins: the model has answered, or the agent says so."""
    if timeouts.step_s is not None:
        view.put_mark(_step(run_of(node_id)), {"at": view.now_ms})


def end_step(view: LedgerView, timeouts: Timeouts, node_id: str) -> None:
    """A step is over: the model is asked again."""
    if timeouts.step_s is not None:
        view.put_mark(_step(run_of(node_id)), {"at": None})

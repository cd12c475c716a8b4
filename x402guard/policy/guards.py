"""Every guard over one step, on live rows, inside the transaction that would hold for it: payments, LLM calls and tools alike."""

from __future__ import annotations

from typing import Final

from x402guard.errors import LoopDetected, PolicyDenied, SpendSpike, VelocityExceeded
from x402guard.ledger.authorize import ONLY_RESET, Refusal
from x402guard.ledger.budgets import find_shortfall, trip
from x402guard.ledger.model import Hold, HoldKind
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.policy.breakers import breaker_marks, find_open, note_end, note_try
from x402guard.policy.loops import (
    find_loop,
    forget_step,
    loop_marks,
    note_failure,
    note_step,
    note_success,
    streak_mark,
)
from x402guard.policy.settings import Policy
from x402guard.policy.spikes import find_spike, forget_cost, note_cost, spike_marks
from x402guard.policy.steps import Step, reset_mark, run_of, step_of
from x402guard.policy.timeouts import begin_step, end_step, find_late, timeout_marks
from x402guard.policy.velocity import find_excess, forget_spent, note_spent, velocity_marks

LOOP: Final = "loop_detected"
SPIKE: Final = "spend_spike"
MAX_STEPS: Final = "max_steps"
MAX_CALLS: Final = "max_calls"


def _steps(run_id: str) -> MarkKey:
    return "steps", run_id


def _calls(run_id: str, name: str) -> MarkKey:
    return "calls", f"{run_id} {name}"


def guard_marks(policy: Policy, node_id: str, step: Step, payees: tuple[str, ...] = ()) -> tuple[MarkKey, ...]:
    """Return the small rows that the functions below have to see; their number never grows with the run.

    *payees* are whom a payment may go to.
    """
    run_id = run_of(node_id)
    marks = [
        *loop_marks(policy.loop, run_id, step),
        *spike_marks(policy.spike, run_id, step),
        *velocity_marks(policy.velocity, run_id, step, payees),
        *breaker_marks(policy.breaker, node_id, step, payees),
        *timeout_marks(policy.timeouts, node_id),
    ]
    if policy.max_steps is not None:
        marks.append(_steps(run_id))
    if step.name in policy.max_calls:
        marks.append(_calls(run_id, step.name))
    return tuple(marks)


def judge_step(view: LedgerView, policy: Policy, node_id: str, step: Step) -> Refusal | None:
    """Return what a guard has against a step, or None; a loop latches the run. Nothing of the step is written here."""
    run_id = run_of(node_id)
    early = find_late(view, policy.timeouts, node_id, step.kind) or find_open(view, policy.breaker, node_id, step)
    if early is not None:
        return early
    counted = (
        (MAX_STEPS, "steps", policy.max_steps, _steps(run_id)),
        (MAX_CALLS, f"calls of {step.name}", policy.max_calls.get(step.name), _calls(run_id, step.name)),
    )
    for rule, what, most, key in counted:
        if most is not None and _count(view, key) >= most:
            return Refusal(rule, f"this run has taken {most} {what}, all that it may (policy.{rule})")
    loop = find_loop(view, policy.loop, run_id, step)
    if loop is not None:
        trip(view, run_id, LOOP, loop)
        return Refusal(
            LOOP, f"{loop}; the session is latched until its owner resets it", error=LoopDetected, advice=ONLY_RESET
        )
    return None


def judge_amount(view: LedgerView, policy: Policy, node_id: str, step: Step) -> Refusal | None:
    """Return what a guard has against a step at its price, or None. A spike that is to trip latches the run."""
    run_id = run_of(node_id)
    resting = find_open(view, policy.breaker, node_id, step)
    if resting is not None:
        return resting
    excess = find_excess(view, policy.velocity, run_id, step)
    if excess is not None:
        rule, reason = excess
        return Refusal(
            rule,
            f"{reason} (policy.velocity.{rule})",
            step.amount,
            error=PolicyDenied if rule in ("percent_per_payee", "price_ratio") else VelocityExceeded,
        )
    if policy.spike is None or policy.spike.action != "trip" or find_shortfall(view, node_id, step.amount) is not None:
        return None  # what does not fit refuses itself alone
    spike = find_spike(view, policy.spike, run_id, step)
    if spike is None:
        return None
    trip(view, run_id, SPIKE, spike)
    return Refusal(
        SPIKE,
        f"{spike}; the session is latched until its owner resets it",
        step.amount,
        error=SpendSpike,
        advice=ONLY_RESET,
    )


def note_taken(view: LedgerView, policy: Policy, node_id: str, step: Step, hold_id: str = "") -> None:
    """Remember a step that was held for, by the hold of that id, and its price; "" where it is over already."""
    run_id = run_of(node_id)
    if hold_id:
        note_try(view, policy.breaker, node_id, step, hold_id)
    if step.kind is HoldKind.LLM:
        end_step(view, policy.timeouts, node_id)
    spike = find_spike(view, policy.spike, run_id, step)
    if spike is not None:
        view.record(node_id, "event", facts={"name": SPIKE, "reason": spike})
    note_cost(view, policy.spike, run_id, step)
    note_spent(view, policy.velocity, run_id, step)
    note_step(view, policy.loop, run_id, step)
    if policy.max_steps is not None:
        view.put_mark(_steps(run_id), {"count": _count(view, _steps(run_id)) + 1})
    if step.name in policy.max_calls:
        key = _calls(run_id, step.name)
        view.put_mark(key, {"count": _count(view, key) + 1})


def give_step_back(view: LedgerView, policy: Policy, node_id: str, step: Step, at_ms: int) -> None:
    """Forget a step that was never paid for, taken at *at_ms* (unix milliseconds). Its rows are those of ``guard_marks``."""
    run_id = run_of(node_id)
    forget_step(view, policy.loop, run_id, step, at_ms)
    forget_cost(view, policy.spike, run_id, step)
    forget_spent(view, policy.velocity, run_id, step, at_ms)
    for most, key in ((policy.max_steps, _steps(run_id)), (policy.max_calls.get(step.name), _calls(run_id, step.name))):
        if most is not None and _count(view, key):
            view.put_mark(key, {"count": _count(view, key) - 1})


def delivery_marks(policy: Policy, node_id: str, step: Step) -> tuple[MarkKey, ...]:
    """Return the small rows that ``note_delivery`` and ``note_answer`` have to see."""
    run_id = run_of(node_id)
    watched = breaker_marks(policy.breaker, node_id, step, (step.payee,) if step.payee else ())
    streak = (streak_mark(run_id, step.payee), reset_mark(run_id)) if step.payee else ()
    return (*watched, *streak, *timeout_marks(policy.timeouts, node_id))


def note_delivery(
    view: LedgerView,
    policy: Policy,
    node_id: str,
    hold: Hold,
    *,
    delivered: bool,
    again: bool = False,
    late: bool = False,
) -> None:
    """Count whether a payee delivered what it was paid for; too many failures in a row latch the run.

    One payment, shown *again*, fails once; but whoever does not answer it fails each time. *late*: its answer had begun well.
    """
    run_id, step = run_of(node_id), step_of(hold)
    note_end(view, policy.breaker, node_id, step, hold.id, well=delivered, late=late)
    if delivered:
        note_success(view, run_id, step.payee)
        return
    streak = None if again else note_failure(view, policy.loop, run_id, step.payee, late=late)
    if streak is not None:
        trip(view, run_id, LOOP, streak)


def note_answer(view: LedgerView, policy: Policy, node_id: str, hold: Hold, *, well: bool | None) -> None:
    """Count how an LLM call or the use of a tool ended; with a model's answer a step of the agent begins."""
    step = step_of(hold)
    note_end(view, policy.breaker, node_id, step, hold.id, well=well)
    if step.kind is HoldKind.LLM:
        begin_step(view, policy.timeouts, node_id)


def _count(view: LedgerView, key: MarkKey) -> int:
    return int((view.mark(key) or {"count": 0})["count"])

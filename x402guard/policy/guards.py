"""Every guard over one step, one after the other: payments, LLM calls and tools alike."""

from __future__ import annotations

from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.policy.settings import Policy
from x402guard.policy.step_guard import StepEnd
from x402guard.policy.steps import Step


def guard_marks(
    policy: Policy, step: Step, payees: tuple[str, ...] = (), *, ending: bool = False
) -> tuple[MarkKey, ...]:
    """Return the keys of the rows that the functions below see. *ending* is True where only ``note_end`` follows."""
    keys: list[MarkKey] = []
    for guard in policy.guards:
        keys.extend(guard.marks(step, payees, ending=ending))
    return tuple(keys)


def judge_step(view: LedgerView, policy: Policy, step: Step) -> Refusal | None:
    """Return the first objection to a step, or None; asked before its price is known, and at its price."""
    for guard in policy.guards:
        objection = guard.judge(view, step)
        if objection is not None:
            return objection
    return None


def note_taken(view: LedgerView, policy: Policy, step: Step, hold_id: str = "") -> None:
    """Record a step that was held for, at its price, by the hold of that id; "" where it is over already."""
    for guard in policy.guards:
        guard.taken(view, step, hold_id)


def give_step_back(view: LedgerView, policy: Policy, step: Step, at_ms: int) -> None:
    """Remove a step that was taken at *at_ms* (unix milliseconds) and never paid for."""
    for guard in policy.guards:
        guard.given_back(view, step, at_ms)


def note_end(view: LedgerView, policy: Policy, step: Step, end: StepEnd) -> None:
    """Record how a step ended; too many failures in a row trip the run."""
    for guard in policy.guards:
        guard.ended(view, step, end)

"""Runs every guard over one step, in order. The same for payments, LLM calls and tools."""

from __future__ import annotations

from x402guard.kernel.change_set import MarkKey
from x402guard.ledger.authorize import Refusal, enforced
from x402guard.ledger.view import LedgerView
from x402guard.policy.settings import Policy
from x402guard.policy.step_guard import StepEnd, Unusual
from x402guard.policy.steps import Step


def guard_marks(
    policy: Policy, step: Step, payees: tuple[str, ...] = (), *, ending: bool = False
) -> tuple[MarkKey, ...]:
    """Return the keys of the rows that the functions below read. *ending*: only ``note_end`` follows."""
    keys: list[MarkKey] = []
    for marks in policy.acting["marks", step.kind, ending]:
        keys += marks(step, payees, ending=ending)
    return tuple(keys)


def judge_step(view: LedgerView, policy: Policy, step: Step) -> Refusal | None:
    """Return the first objection to a step, or None. Called before the price is known, and again at the price."""
    for judge in policy.acting["judge", step.kind, step.priced]:
        objection = judge(view, step)
        if objection is not None:
            return enforced(view, objection)
    return None


def note_taken(view: LedgerView, policy: Policy, step: Step, hold_id: str = "") -> None:
    """Record a step at its price. *hold_id* is the id of its hold, "" if the step is over already."""
    for taken in policy.acting["taken", step.kind, False]:
        taken(view, step, hold_id)


def pass_plainly(view: LedgerView, policy: Policy, step: Step) -> Unusual | None:
    """Judge a step at its price and record it, both in one go; or return why the functions above have to do that.

    Then nothing is written. The end of such a step may be unknown: that writes nothing more.
    """
    rows = []
    for plainly in policy.plain[step.kind]:
        found = plainly(view, step)
        if isinstance(found, Unusual):
            return found
        rows += found
    for key, row in rows:
        view.put_mark(key, row)
    return None


def give_step_back(view: LedgerView, policy: Policy, step: Step, at_ms: int) -> None:
    """Remove a step that was taken at *at_ms* (unix milliseconds) and never paid."""
    for given_back in policy.acting["given_back", step.kind, False]:
        given_back(view, step, at_ms)


def note_end(view: LedgerView, policy: Policy, step: Step, end: StepEnd) -> None:
    """Record how a step ended. Too many consecutive failures trip the run."""
    for ended in policy.acting["ended", step.kind, False]:
        ended(view, step, end)

"""Combines the owner's rules, the risk level and the approval threshold into one verdict on a step."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from msgspec import Struct

from x402guard.frozen import replace
from x402guard.kernel.rows import NOTHING, HoldKind, Nanos
from x402guard.ledger.authorize import Refusal, enforced
from x402guard.ledger.budgets import unlent
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars
from x402guard.policy.approvals import judge_sum
from x402guard.policy.risk import judge_risk
from x402guard.policy.rules import judge_rules
from x402guard.policy.settings import Policy
from x402guard.policy.steps import run_of
from x402guard.policy.verdicts import NO_VERDICT, Subject, Verdict, strictest, without_approver


def judge(policy: Policy, subject: Subject) -> Verdict:
    """Return the strictest verdict of all rules. Pure, except for the owner's ``classify``."""
    verdict = judge_rules(policy.rules or (), subject)
    for other in (judge_risk(policy.risk, subject), judge_sum(policy.approvals, subject), _priced_now(policy, subject)):
        verdict = strictest(verdict, other)
    return verdict


def _priced_now(policy: Policy, subject: Subject) -> Verdict:
    """Return the verdict on the price of a tool that was judged without one: a yes to a free call covers $0."""
    if not subject.tool or not subject.amount:
        return NO_VERDICT
    risk = judge_risk(policy.risk, replace(subject, kind=HoldKind.TOOL, names=(subject.tool,)))
    if risk.action != "ask":
        return NO_VERDICT
    reason = f"{risk.reason}; it was asked about for $0.00, and costs ${format_dollars(subject.amount)} now"
    return replace(risk, reason=reason)


Consented = AbstractSet[tuple[Any, ...]]
"""What approvers have allowed: the key of each ``Unasked``."""


class Unasked(Struct, frozen=True):
    """A step that fits the budget and passes every guard, but needs approval first.

    Attributes:
        subject: the step that needs approval.
        verdict: why.
        facts: everything that the answer is about, as plain values. None of it may change after the answer.
        network: of a payment; else "".
        query, body: of a request, cut, for the approver.
        spent: what the run has spent so far, in nano-dollars.
    """

    subject: Subject
    verdict: Verdict
    facts: tuple[Any, ...]
    network: str = ""
    query: str = ""
    body: str = ""
    spent: Nanos = NOTHING

    @property
    def key(self) -> tuple[Any, ...]:
        """What a yes allows: this step at this price, for this rule and number of approvers."""
        subject, verdict = self.subject, self.verdict
        step = (str(subject.kind), *subject.names, subject.amount, subject.payee)
        return (*step, *self.facts, verdict.rule, verdict.approvers)


def spent_so_far(view: LedgerView, node_id: str) -> Nanos:
    """Return what the run of a budget has spent, in nano-dollars."""
    return Nanos(unlent(view, run_of(node_id)).spent)


def verdict_of(policy: Policy, subject: Subject, *, asks: bool) -> Verdict:
    """Return the owner's verdict on a step. Without an approver (*asks* is False) it denies instead of asking."""
    verdict = judge(policy, subject)
    return without_approver(verdict) if verdict.action == "ask" and not asks else verdict


def effective_verdict(view: LedgerView, verdict: Verdict, subject: Subject) -> Verdict:
    """Return the verdict that a step gets. In shadow mode it passes as it is, unasked, and what is noted is the verdict."""
    if not view.shadow:
        return verdict
    enforced(view, would_refuse(verdict, subject))
    return NO_VERDICT


def would_refuse(verdict: Verdict, subject: Subject) -> Refusal | None:
    """Return what shadow mode notes of a verdict: it denies, or an approver would be asked."""
    if verdict.action != "ask":
        return objection(verdict, subject)
    return Refusal(verdict.rule, f"{verdict.reason}; an approver would be asked", subject.amount or None)


def objection(verdict: Verdict, subject: Subject) -> Refusal | None:
    """Return the refusal of a verdict that denies, or None."""
    if verdict.action != "deny":
        return None
    return Refusal(verdict.rule, verdict.reason, subject.amount or None, error=verdict.error)


def verdict_facts(verdict: Verdict) -> dict[str, Any]:
    """Return what the journal keeps of a verdict that lets a call pass."""
    said = {"rule": verdict.rule, "narrowed_by": verdict.narrowed_by, "risk": verdict.level}
    return {name: value for name, value in said.items() if value}

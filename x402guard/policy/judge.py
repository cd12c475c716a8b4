"""What all of the owner's rules come to for one step: its rules as data, its risk, and the sum above which a person is asked."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from x402guard.errors import NeedsReview
from x402guard.ledger.authorize import Refusal
from x402guard.policy.approvals import NEEDS_REVIEW, judge_sum
from x402guard.policy.risk import judge_risk
from x402guard.policy.rules import judge_rules
from x402guard.policy.settings import Policy
from x402guard.policy.verdicts import Subject, Verdict, strictest


def judge(policy: Policy, subject: Subject) -> Verdict:
    """Return the strictest of what the rules say of a step. Pure, but for the owner's own ``classify``."""
    verdict = judge_rules(policy.rules or (), subject)
    for other in (judge_risk(policy.risk, subject), judge_sum(policy.approvals, subject)):
        verdict = strictest(verdict, other)
    return verdict


Consented = AbstractSet[tuple[Any, ...]]
"""What a person has allowed: the key of each ``Unasked``."""


@dataclass(frozen=True, slots=True)
class Unasked:
    """It would fit, and no guard has anything against it; but a person has to allow it first.

    Attributes:
        subject: what is to be allowed.
        verdict: why.
        facts: everything that the answer is about, as plain values: none of it may change after it.
        network: of a payment; else "".
    """

    subject: Subject
    verdict: Verdict
    facts: tuple[Any, ...]
    network: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """All that a yes is good for: this step at this price, and what was asked of how many people."""
        subject, verdict = self.subject, self.verdict
        step = (str(subject.kind), *subject.names, subject.amount, subject.payee)
        return (*step, *self.facts, verdict.rule, verdict.approvers)


def verdict_of(policy: Policy, subject: Subject, *, asks: bool) -> Verdict:
    """Return what the owner's rules say of a step; where they would ask and there is nobody to ask, they deny."""
    verdict = judge(policy, subject)
    if verdict.action == "ask" and not asks:
        reason = f"{verdict.reason}, and this guard has nobody to ask; give it one with Guard(approver=…)"
        return replace(verdict, action="deny", rule=NEEDS_REVIEW, reason=reason, error=NeedsReview)
    return verdict


def objection(verdict: Verdict, subject: Subject) -> Refusal | None:
    """Return the refusal of what the owner's rules deny, or None."""
    if verdict.action != "deny":
        return None
    return Refusal(verdict.rule, verdict.reason, subject.amount or None, error=verdict.error)


def verdict_facts(verdict: Verdict) -> dict[str, Any]:
    """Return what the journal keeps of a verdict that let a call pass."""
    said = {"rule": verdict.rule, "narrowed_by": verdict.narrowed_by, "risk": verdict.level}
    return {name: value for name, value in said.items() if value}

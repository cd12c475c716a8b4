"""What all of the owner's rules come to for one step: its rules as data, its risk, and the sum above which a person is asked."""

from __future__ import annotations

from x402guard.policy.approvals import judge_sum
from x402guard.policy.risk import judge_risk
from x402guard.policy.rules import Subject, Verdict, judge_rules, strictest
from x402guard.policy.settings import Policy


def judge(policy: Policy, subject: Subject) -> Verdict:
    """Return the strictest of what the rules say of a step. Pure, but for the owner's own ``classify``."""
    verdict = judge_rules(policy.rules or (), subject)
    for other in (judge_risk(policy.risk, subject), judge_sum(policy.approvals, subject)):
        verdict = strictest(verdict, other)
    return verdict

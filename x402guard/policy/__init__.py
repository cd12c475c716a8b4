"""The owner's rules: which offers may be paid at all. The budget is not here: it is an invariant of the ledger."""

from x402guard.policy.case import Case, RequestFacts
from x402guard.policy.decide import judge_live, judge_offer, rank
from x402guard.policy.settings import Policy

__all__ = ["Case", "Policy", "RequestFacts", "judge_live", "judge_offer", "rank"]

"""The owner's rules: which offers may be paid at all. The budget is not here: it is an invariant of the ledger."""

from x402guard.policy.case import Case, RequestFacts
from x402guard.policy.decide import judge_live, judge_offer, rank
from x402guard.policy.loops import Loop
from x402guard.policy.settings import Policy
from x402guard.policy.spikes import Spike
from x402guard.policy.velocity import Velocity

__all__ = ["Case", "Loop", "Policy", "RequestFacts", "Spike", "Velocity", "judge_live", "judge_offer", "rank"]

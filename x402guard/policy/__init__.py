"""The owner's rules for steps. The budget is not among them: it is an invariant of the ledger."""

from x402guard.policy.approvals import Answer, ApprovalRequest, Approvals
from x402guard.policy.breakers import Breaker, Bulkhead
from x402guard.policy.loops import Loop
from x402guard.policy.risk import Risk
from x402guard.policy.rules import Rule
from x402guard.policy.sellers import Seller
from x402guard.policy.settings import Policy
from x402guard.policy.spikes import Spike
from x402guard.policy.timeouts import Timeouts
from x402guard.policy.velocity import Velocity
from x402guard.policy.verdicts import Narrow

__all__ = [
    "Answer",
    "ApprovalRequest",
    "Approvals",
    "Breaker",
    "Bulkhead",
    "Loop",
    "Narrow",
    "Policy",
    "Risk",
    "Rule",
    "Seller",
    "Spike",
    "Timeouts",
    "Velocity",
]

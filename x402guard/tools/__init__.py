"""What wraps an agent rather than a request: tools that no transport sees, and what its context may take."""

from x402guard.tools.counting import CharsPerToken
from x402guard.tools.hold import ToolHold
from x402guard.tools.token_budget import Allocation, TokenBudget

__all__ = ["Allocation", "CharsPerToken", "TokenBudget", "ToolHold"]

"""What wraps an agent rather than a request: tools that no transport sees, and what its context may take."""

from x402guard.agent.context import Allocation, TokenBudget
from x402guard.agent.counting import CharsPerToken
from x402guard.agent.tools import ToolHold

__all__ = ["Allocation", "CharsPerToken", "TokenBudget", "ToolHold"]

"""Guards the agent itself: tools that no transport sees, and the tokens of its context."""

from x402guard.tools.counting import CharsPerToken
from x402guard.tools.hold import ToolHold
from x402guard.tools.token_budget import Allocation, TokenBudget

__all__ = ["Allocation", "CharsPerToken", "TokenBudget", "ToolHold"]

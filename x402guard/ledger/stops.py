"""Names how a budget ends, and which calls it has lately been too short for."""

from __future__ import annotations

from typing import Final

from x402guard.kernel.rows import HoldKind

OVER: Final = 0
"""The end of a task's time that is past by any clock, in unix milliseconds."""

TERMINATIONS: Final = (
    "budget_exhausted", "completed", "disputed_usage", "kill_switch", "loop_detected", "not_verified", "overshoot",
    "rolled_back", "session_timeout", "spend_spike", "unexplained_transfer", "watchdog",
)  # fmt: skip
"""Every value of ``terminated_by`` except null."""

STARVED: Final = {HoldKind.PAYMENT: 1, HoldKind.LLM: 2, HoldKind.TOOL: 4}
"""The bit of each kind in ``Node.starved``: set as one is refused for lack of budget, cleared as one is granted."""

TASK_STARVED: Final = 8
"""The bit of a refused delegation: a session that does the work itself, by whatever kind of call, is not short of it."""

ALL_STARVED: Final = sum(STARVED.values()) | TASK_STARVED
"""What a granted payment clears: there is room again."""

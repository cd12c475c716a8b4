"""Runs a tool's function within its time limit and its bulkhead slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from x402guard.errors import CallTimeout
from x402guard.flow.detached import Aside, TooLate, within
from x402guard.flow.ports import Slot

R = TypeVar("R")


class Running:
    """One call of a function.

    Args:
        tool: its name.
        limit_s: seconds that it may take; None for no limit. With a limit, a plain function runs in a separate thread,
            because only that can be left running after a time-out.
        slot: the slot that it keeps until it ends, even after a time-out; None for none.
        hold_id: its hold in the ledger, or None.
    """

    def __init__(self, tool: str, limit_s: int | None, slot: Slot | None, hold_id: str | None) -> None:
        self.tool = tool
        self._limit_s, self.slot, self._hold_id = limit_s, slot, hold_id

    def run(self, call: Callable[[], R]) -> R:
        """Return the function's result or raise its error; ``CallTimeout`` after the time limit."""
        if self._limit_s is None:
            return call()
        slot = self.slot
        aside = Aside(call, lambda _: None if slot is None else slot.leave())
        try:
            return aside.within(self._limit_s)
        except TooLate:
            raise self._timed_out() from None
        finally:
            if aside.was_left:  # by a time-out or Ctrl-C: its thread releases the slot when it ends
                self.slot = None

    async def awaited(self, call: Callable[[], Awaitable[R]]) -> R:
        """``run`` for a coroutine, which is cancelled after the time limit."""
        try:
            return await within(self._limit_s, call)
        except TooLate:
            raise self._timed_out() from None

    def _timed_out(self) -> CallTimeout:
        error = CallTimeout(
            f"tool {self.tool!r} did not end within {self._limit_s} s (its timeout_s, or policy.timeouts.tool_s)"
        )
        error.hold_id = self._hold_id
        return error

    def leave(self) -> None:
        """Release the slot, unless a thread still runs in it."""
        if self.slot is not None:
            self.slot.leave()

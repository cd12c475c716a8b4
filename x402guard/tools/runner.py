"""A tool's function, run within its time and its slot: what takes too long is left behind, and its slot with it."""

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
        limit_s: seconds that it may take; None for any time. With a limit, a plain function runs in a thread of its own: nothing
            else can be left behind.
        slot: what it takes until it is over, be it late; None for none.
        hold_id: its hold in the ledger, where there is one.
    """

    def __init__(self, tool: str, limit_s: int | None, slot: Slot | None, hold_id: str | None) -> None:
        self.tool = tool
        self._limit_s, self._slot, self._hold_id = limit_s, slot, hold_id

    def run(self, call: Callable[[], R]) -> R:
        """Return what the function returns, or raise what it raises; ``CallTimeout`` where it takes too long."""
        if self._limit_s is None:
            return call()
        slot = self._slot
        try:
            return Aside(call, lambda _: None if slot is None else slot.leave()).within(self._limit_s)
        except TooLate:
            self._slot = None  # it is the thread's, until that has ended
            raise self._timed_out() from None

    async def awaited(self, call: Callable[[], Awaitable[R]]) -> R:
        """The same for a coroutine, which is cancelled when its time is over."""
        try:
            return await within(self._limit_s, call)
        except TooLate:
            raise self._timed_out() from None

    def _timed_out(self) -> CallTimeout:
        error = CallTimeout(f"tool {self.tool!r} was not over within {self._limit_s} s")
        error.hold_id = self._hold_id
        return error

    def leave(self) -> None:
        """Leave its slot, where it is still its own."""
        if self._slot is not None:
            self._slot.leave()

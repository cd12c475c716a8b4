"""Reads the time, and sees a wall clock that jumps ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final


class StoreClock:
    """A store's clock. It detects how far the wall clock has jumped ahead since the store was opened.

    Args:
        wall: returns unix milliseconds; default: this machine's clock.
        steady: returns milliseconds from any start, of a clock that cannot be set and also counts while the machine
            sleeps. Default: this machine's steady clock, or *wall* if that is given.
    """

    def __init__(self, wall: Callable[[], int] | None = None, steady: Callable[[], int] | None = None) -> None:
        self._wall = wall or _system_clock_ms
        self._steady = steady or (system_steady_ms if wall is None else wall)
        self._began = (self._wall(), self._steady())

    def __call__(self) -> int:
        """Return the believed time in unix milliseconds: without a jump ahead of the wall clock."""
        now_ms, _ = self.read()
        return now_ms

    def steady_ms(self) -> int:
        """Return milliseconds of the steady clock."""
        return self._steady()

    def read(self) -> tuple[int, int]:
        """Return (the believed time in unix milliseconds, how far the wall clock is ahead of it in milliseconds)."""
        clock_ms, (wall_ms, steady_ms) = self._wall(), self._began
        ahead_ms = max(0, clock_ms - wall_ms - (self._steady() - steady_ms))
        return (clock_ms, 0) if ahead_ms <= _SLACK_MS else (clock_ms - ahead_ms, ahead_ms)


def _system_clock_ms() -> int:
    return time.time_ns() // 1_000_000


_SLACK_MS: Final = 1_000
_STEADY: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The clock that also counts while the machine sleeps: CLOCK_BOOTTIME on Linux, CLOCK_MONOTONIC on macOS."""


def system_steady_ms() -> int:
    """Return milliseconds of this machine's clock that cannot be set."""
    return time.clock_gettime_ns(_STEADY) // 1_000_000

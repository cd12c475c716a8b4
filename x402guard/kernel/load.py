"""The port of a store: the rows that one decision may see, as they are stored, and the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from x402guard.kernel.change_set import Before, ChangeSet
from x402guard.kernel.proofs import Unsigned


class Rows(Protocol):
    """A store's rows within one transaction."""

    def load(self, scope: Any, clock: Clock) -> Loaded:
        """Return the rows that a room asks for with all their ancestors, as of the time of *clock*."""

    def add(self, change_set: ChangeSet) -> None:
        """Take the rows of a change set that was checked. The kernel alone calls it."""


class Clock(Protocol):
    """The clock of a store: the kernel's own, which no room can set."""

    def read(self) -> tuple[int, int]:
        """Return (the believed time in unix milliseconds, how far the machine's clock is ahead of it in milliseconds)."""


class Loaded(Protocol):
    """What a store has loaded for one decision: the rows for the check, and whatever else the room asks to see.

    Times are in unix milliseconds: the store's clock, and the same but never below the last time of a node that was
    loaded. The kernel sets ``forget``: hold → ``Unsigned``, or None.
    """

    before: Before
    clock_ms: int
    now_ms: int
    forget: Callable[[str], Unsigned | None]

    keeps_idle: bool

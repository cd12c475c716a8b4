"""Represents money as integers: nano-dollars in the ledger, atomic units for tokens.

One nano-dollar is 1e-9 US dollars. Every rounding is up, so that a budget may be under-used by a nano-dollar and is
never over-used.
"""

from __future__ import annotations

from typing import Final, NewType

Nanos = NewType("Nanos", int)
"""Nano-dollars: an integer number of 1e-9 US dollars."""

NANOS_PER_DOLLAR: Final = 1_000_000_000
MAX_NANOS: Final = Nanos(10**18)
"""One billion dollars: the largest amount or limit in the ledger. Sums of several fit a signed 64-bit column."""

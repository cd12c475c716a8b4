"""The names in a request: what one may be, and how many there may be."""

from __future__ import annotations

from typing import Final

from x402guard.kernel.rows import WALLET

MOST_NAMES: Final = 200
"""The most names in a list of a request."""

LONGEST_NAME: Final = 200
"""The most characters of a name."""


def is_name(text: str) -> bool:
    """True for a name as a request may have it: text of at most 200 characters that can be printed."""
    return bool(text.strip()) and text.isprintable() and text != WALLET and len(text) <= LONGEST_NAME

"""How much of a result is shown: the scarcer the tokens, the less."""

from __future__ import annotations

from typing import Final, Literal, get_args

from x402guard.errors import ConfigError

Mode = Literal["raw", "table", "summary", "handle_only"]
"""All of it; its rows and columns; what it comes to; or no more than a name to ask for it by. Each shows less than the one before."""

_MODES: Final[tuple[Mode, ...]] = get_args(Mode)


def check_mode(name: str, mode: str) -> Mode:
    """Return *mode*. Raises ``ConfigError`` naming the argument for what is none."""
    for known in _MODES:
        if mode == known:
            return known
    raise ConfigError(f"{name}: {mode!r} is none of {', '.join(_MODES)}")


def suggest_mode(requested: Mode, *, left: int, total: int) -> Mode:
    """Return the mode for *left* tokens of *total*: what was requested, or less, never more.

    Of 100 left: above 50 as requested; from 50 down, a table; from 20 down, a summary; below 5, the handle alone.
    """
    if left * 100 > 50 * total:
        floor: Mode = "raw"
    elif left * 100 > 20 * total:
        floor = "table"
    elif left * 100 >= 5 * total:
        floor = "summary"
    else:
        floor = "handle_only"
    return max(requested, floor, key=_MODES.index)

"""Checks the window of a budget as its owner writes it."""

from __future__ import annotations

from typing import get_args

from x402guard.errors import ConfigError
from x402guard.kernel.rows import Per, Window
from x402guard.kernel.windows import zone_names


def check_window(per: object, tz: object) -> Window:
    """Return a window. Raises ``ConfigError`` for an invalid period or a time zone unknown on this machine."""
    period = next((known for known in get_args(Per) if known == per), None)
    if period is None:
        raise ConfigError(f"per: {per!r} is not one of 'day', 'week' and 'month'")
    if not isinstance(tz, str):
        raise ConfigError(f"tz: {tz!r} is not the name of a time zone; write a name such as 'UTC' or 'Europe/Berlin'")
    if tz not in zone_names():
        raise ConfigError(
            f"tz: {tz!r:.80} is not a time zone that each machine knows; write a name such as 'UTC' or 'Europe/Berlin'"
        )
    return Window(period, tz)

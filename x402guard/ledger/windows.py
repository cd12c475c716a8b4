"""Budgets that begin anew each day, week or month, by the calendar of a place.

A live hold counts in every window that it touches, a capture in the one that it closes in. So a window begins with what is still
held, and nothing that was captured before it. A window never goes back.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import zoneinfo
from functools import lru_cache
from typing import Final, get_args

from x402guard.errors import ConfigError
from x402guard.ledger.model import Node, Per, Window

_UTC: Final = "UTC"


def check_window(per: object, tz: object) -> Window:
    """Return a window. Raises ``ConfigError`` for what is no period, or no time zone that this machine knows."""
    period = next((known for known in get_args(Per) if known == per), None)
    if period is None:
        raise ConfigError(f"per: {per!r} is none of 'day', 'week' and 'month'")
    if not isinstance(tz, str):
        raise ConfigError(f"tz: {tz!r} is no name of a time zone; write 'UTC' or 'Europe/Berlin'")
    try:
        _zone(tz)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigError(f"tz: {tz!r} is no time zone known here; write 'UTC' or 'Europe/Berlin'") from error
    return Window(period, tz)


@lru_cache(maxsize=64)
def _zone(tz: str) -> dt.tzinfo:
    return dt.UTC if tz == _UTC else zoneinfo.ZoneInfo(tz)


def window_start_ms(window: Window, now_ms: int) -> int:
    """Return when the window that *now_ms* falls into began, both in unix milliseconds. A week begins on Monday."""
    zone = _zone(window.tz)
    day = dt.datetime.fromtimestamp(now_ms // 1000, zone).date()
    if window.per == "week":
        day -= dt.timedelta(days=day.weekday())
    elif window.per == "month":
        day = day.replace(day=1)
    return int(dt.datetime.combine(day, dt.time(), zone).timestamp()) * 1000


def rolled(node: Node, now_ms: int) -> Node:
    """Return a node as its window stands at *now_ms* (unix milliseconds); the node itself where it has none."""
    if node.window is None:
        return node
    start_ms = window_start_ms(node.window, now_ms)
    if start_ms <= node.since_ms:
        return node
    return dataclasses.replace(node, since_ms=start_ms, past=node.used - node.live, warned=0)

"""Computes the windows of budgets that restart each day, week or month, by the calendar of a time zone.

A live hold counts in every window during which it is live; a captured amount counts in the window of its capture. So a
window starts with the amount still held and without earlier captures. A window never moves backwards.
"""

from __future__ import annotations

import datetime as dt
from functools import lru_cache
from typing import Final, get_args

from msgspec.structs import replace

from x402guard.errors import ConfigError
from x402guard.kernel.rows import Node, Per, Window

_UTC: Final = "UTC"


def check_window(per: object, tz: object) -> Window:
    """Return a window. Raises ``ConfigError`` for an invalid period or a time zone unknown on this machine."""
    period = next((known for known in get_args(Per) if known == per), None)
    if period is None:
        raise ConfigError(f"per: {per!r} is not one of 'day', 'week' and 'month'")
    if not isinstance(tz, str):
        raise ConfigError(f"tz: {tz!r} is not the name of a time zone; write a name such as 'UTC' or 'Europe/Berlin'")
    if tz not in _names():
        raise ConfigError(
            f"tz: {tz!r:.80} is not a time zone that each machine knows; write a name such as 'UTC' or 'Europe/Berlin'"
        )
    return Window(period, tz)


@lru_cache(maxsize=1)
def _names() -> frozenset[str]:
    """Return the names that are the same on all machines: ``localtime`` and ``posix/…`` are known on some."""
    from importlib.resources import files  # not for ledgers without windows

    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="ascii").split())


@lru_cache(maxsize=64)
def zone(tz: str) -> dt.tzinfo:
    """Return a time zone by the rules of the package tzdata. Raises ``ValueError`` for a name that it does not have.

    The files of a system are as old as its image: two machines would begin the same day at two times, and each would
    give its budget out.
    """
    if tz == _UTC:
        return dt.UTC
    if tz not in _names():
        raise ValueError(f"{tz!r:.80} is no time zone of tzdata")
    from importlib.resources import files
    from zoneinfo import ZoneInfo

    with files("tzdata").joinpath("zoneinfo", *tz.split("/")).open("rb") as rules:
        return ZoneInfo.from_file(rules, key=tz)


_LAST_SEEN: Final[dict[Window, tuple[int, int]]] = {}
"""The start and the end of the window that was asked for last: each change of a ledger asks for the present one."""


def window_start_ms(window: Window, now_ms: int) -> int:
    """Return the start of the window that contains *now_ms*, both in unix milliseconds. A week starts on Monday."""
    start_ms, end_ms = _LAST_SEEN.get(window, (0, 0))
    if not start_ms <= now_ms < end_ms:
        start_ms, end_ms = _midnight_ms(_first_day(window, now_ms), window), window_end_ms(window, now_ms)
        _LAST_SEEN[window] = start_ms, end_ms
    return start_ms


def window_end_ms(window: Window, now_ms: int) -> int:
    """Return the end of the window that contains *now_ms*, where the next one starts, both in unix milliseconds."""
    first = _first_day(window, now_ms)
    if window.per == "month":
        return _midnight_ms((first + dt.timedelta(days=32)).replace(day=1), window)
    return _midnight_ms(first + dt.timedelta(days=7 if window.per == "week" else 1), window)


def _first_day(window: Window, now_ms: int) -> dt.date:
    day = dt.datetime.fromtimestamp(now_ms // 1000, zone(window.tz)).date()
    if window.per == "week":
        return day - dt.timedelta(days=day.weekday())
    return day.replace(day=1) if window.per == "month" else day


def _midnight_ms(day: dt.date, window: Window) -> int:
    return int(dt.datetime.combine(day, dt.time(), zone(window.tz)).timestamp()) * 1000


_APART_MS: Final = 12 * 3_600_000
"""Two starts of windows are further apart than this: nearer ones are one midnight, by two versions of tzdata."""


def rolled(node: Node, now_ms: int) -> Node:
    """Return a node with its window moved to *now_ms* (unix milliseconds); the same node if it has no window."""
    if node.window is None:
        return node
    start_ms = window_start_ms(node.window, now_ms)
    if start_ms < node.since_ms + _APART_MS:
        return node
    return replace(node, since_ms=start_ms, past=node.used - node.live, warned=0)

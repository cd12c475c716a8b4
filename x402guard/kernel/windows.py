"""Computes the windows of budgets that restart each day, week or month, by the calendar of a time zone.

A live hold counts in every window during which it is live; a captured amount counts in the window of its capture. So a
window starts with the amount still held and without earlier captures. A window never moves backwards.
"""

from __future__ import annotations

import datetime as dt
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec.structs import replace

from x402guard.kernel.rows import HoldState, Node, NodeState, Window


@lru_cache(maxsize=1)
def zone_names() -> frozenset[str]:
    """Return the names that are the same on all machines: ``localtime`` and ``posix/…`` are known on some."""
    from importlib.resources import files  # not for ledgers without windows

    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="ascii").split())


@lru_cache(maxsize=64)
def zone(tz: str) -> dt.tzinfo:
    """Return a time zone by the rules of the package tzdata. Raises ``ValueError`` for a name that it does not have.

    The files of a system are as old as its image: two machines would begin the same day at two times, and each would
    give its budget out.
    """
    if tz == "UTC":
        return dt.UTC
    if tz not in zone_names():
        raise ValueError(f"{tz!r:.80} is no time zone of tzdata")
    from importlib.resources import files
    from zoneinfo import ZoneInfo

    with files("tzdata").joinpath("zoneinfo", *tz.split("/")).open("rb") as rules:
        return ZoneInfo.from_file(rules, key=tz)


_LAST_SEEN: Final[dict[Window, tuple[int, int]]] = {}  # start and end: each change asks for the present window


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
    """Return a node with its window moved to *now_ms* (unix ms). A trip by an overshoot ends with its window."""
    if node.window is None:
        return node
    start_ms = window_start_ms(node.window, now_ms)
    if start_ms >= node.since_ms + _APART_MS:
        node = replace(node, since_ms=start_ms, past=node.used - node.live, warned=0)
    over = node.state is NodeState.TRIPPED and node.terminated_by == "overshoot" and node.warned <= 1_000_000
    ends = over and (node.room or 0) >= 0  # what is live may be more than the limit
    return replace(node, state=NodeState.OPEN, terminated_by=None, trip_reason=None) if ends else node


def closing_ms(begun_ms: int, clock_ms: int, *, lapses_ms: int | None = None) -> int:
    """Return when a hold that is captured now closes, in unix ms: the window that counts it is the one this falls into.

    Windows follow the clock and not the ledger's last time, which another machine's clock may have put into the next
    window; and a window that has begun (at *begun_ms*, the latest on the hold's path) counts what closes in it. A lapse
    closes at *lapses_ms*, its deadline, also if it is written days later; but while a window has begun in the future, by
    a clock that was ahead, each deadline is before it, and it would count none.
    """
    now_ms = max(clock_ms, begun_ms)
    if lapses_ms is None or begun_ms > clock_ms:
        return now_ms
    return min(now_ms, lapses_ms)


class Taken(NamedTuple):
    """What a hold takes: its state, what is captured and was captured first (nano-dollars), and when it closed (unix ms)."""

    state: HoldState
    captured: int
    closed_ms: int
    first: int

    def counts(self, amount: int) -> int:
        """Return what a hold of *amount* counts then."""
        return amount if self.state is HoldState.HELD else self.captured


def past_after(node: Node, before: Taken, after: Taken) -> int:
    """Return ``past`` of a node after one step of a hold below it, in nano-dollars.

    A correction counts in the window of the capture, if that is over: an amount given back frees no room in the current
    window. An amount that is taken again after it was given back costs nothing in the current window, up to the amount
    first captured; anything above that counts now. A hold that closes in a window that is over is counted there.
    """
    if node.window is None:
        return node.past
    if before.state is HoldState.CAPTURED:
        if before.closed_ms >= node.since_ms:
            return node.past
        less = before.captured - after.captured
        if less < 0:
            less = min(before.captured, before.first) - min(after.captured, before.first)
        return max(0, node.past - less)
    closes_in_past = before.state is HoldState.HELD and after.state is HoldState.CAPTURED
    return node.past + (after.captured if closes_in_past and after.closed_ms < node.since_ms else 0)

"""When windows begin and end, and what each step of a hold does to what is past: one row of a table for each case."""

import datetime as dt

import pytest
from msgspec.structs import replace

from tests.kernel.rows import node
from x402guard.kernel.rows import WALLET, HoldState, Window
from x402guard.kernel.windows import (
    Taken,
    closing_ms,
    past_after,
    rolled,
    window_end_ms,
    window_start_ms,
    zone,
    zone_names,
)

HELD, CAPTURED, VOIDED = HoldState.HELD, HoldState.CAPTURED, HoldState.VOIDED


def ms(*parts, tz=dt.UTC):
    return int(dt.datetime(*parts, tzinfo=tz).timestamp()) * 1000


BERLIN = zone("Europe/Berlin")
SPANS = {
    "a day": (Window("day", "UTC"), (2026, 3, 4, 12), (2026, 3, 4), (2026, 3, 5), dt.UTC),
    "its first millisecond": (Window("day", "UTC"), (2026, 3, 4), (2026, 3, 4), (2026, 3, 5), dt.UTC),
    "a week begins on Monday": (Window("week", "UTC"), (2026, 3, 4, 12), (2026, 3, 2), (2026, 3, 9), dt.UTC),
    "a Sunday": (Window("week", "UTC"), (2026, 3, 8, 23), (2026, 3, 2), (2026, 3, 9), dt.UTC),
    "a month": (Window("month", "UTC"), (2026, 2, 28, 12), (2026, 2, 1), (2026, 3, 1), dt.UTC),
    "a long month": (Window("month", "UTC"), (2026, 12, 31, 12), (2026, 12, 1), (2027, 1, 1), dt.UTC),
    "a short day in Berlin": (Window("day", "Europe/Berlin"), (2026, 3, 29, 12), (2026, 3, 29), (2026, 3, 30), BERLIN),
    "a month in Berlin": (Window("month", "Europe/Berlin"), (2026, 3, 31, 12), (2026, 3, 1), (2026, 4, 1), BERLIN),
}


@pytest.mark.parametrize("span", SPANS)
def test_a_window_begins_and_ends_at_midnight(span):
    window, at, first, last, tz = SPANS[span]
    at_ms, start_ms, end_ms = ms(*at, tz=tz), ms(*first, tz=tz), ms(*last, tz=tz)
    for asked_ms in (at_ms, start_ms, end_ms - 1):
        assert (window_start_ms(window, asked_ms), window_end_ms(window, asked_ms)) == (start_ms, end_ms)
    assert (window_start_ms(window, end_ms), window_start_ms(window, start_ms - 1)) != (start_ms, start_ms)
    assert window_start_ms(window, end_ms) == end_ms
    assert window_end_ms(window, start_ms - 1) == start_ms
    assert window_start_ms(window, start_ms - 1) < start_ms


def test_only_the_zones_of_tzdata_are_known():
    assert zone("UTC") is dt.UTC
    assert {"Europe/Berlin", "America/New_York"} <= zone_names()
    with pytest.raises(ValueError, match="'localtime' is no time zone of tzdata"):
        zone("localtime")


DAY = Window("day", "UTC")
TODAY = ms(2026, 3, 4)
HOUR = 3_600_000


def in_window(**fields):
    return node("s", WALLET, window=DAY, since_ms=TODAY, **fields)


def test_a_window_rolls_once_and_only_forward():
    row = in_window(captured=7, held=5, granted_out=3, granted_in=15, live=5, past=1, warned=4)
    assert rolled(row, TODAY) is row
    assert rolled(row, TODAY + 24 * HOUR - 1) is row
    assert rolled(row, TODAY - 48 * HOUR) is row
    after = rolled(row, TODAY + 24 * HOUR)
    assert after == replace(row, since_ms=TODAY + 24 * HOUR, past=10, warned=0)
    without = replace(row, window=None)
    assert rolled(without, TODAY + 24 * HOUR) is without
    for apart_ms, moves in ((12 * HOUR - 1, False), (12 * HOUR, True), (13 * HOUR, True)):
        near = replace(row, since_ms=TODAY - apart_ms)
        assert (rolled(near, TODAY) is not near) is moves


CLOSES = {
    "now": ((5, 9, None), 9),
    "in the window that has begun in the future": ((9, 5, None), 9),
    "a lapse at its deadline": ((5, 9, 7), 7),
    "a lapse that is written before": ((5, 9, 11), 9),
    "a lapse as the window begins": ((9, 9, 7), 7),
    "a lapse while the window is in the future": ((9, 8, 7), 9),
}


@pytest.mark.parametrize("case", CLOSES)
def test_when_a_hold_closes(case):
    (begun_ms, clock_ms, lapses_ms), closes = CLOSES[case]
    assert closing_ms(begun_ms, clock_ms, lapses_ms=lapses_ms) == closes


YESTERDAY = TODAY - 1
PAST = {  # what the hold takes before and after, and what is past then, of 100 before
    "captured today": (Taken(HELD, 0, 0, 0), Taken(CAPTURED, 30, TODAY, 30), 100),
    "captured yesterday, written today": (Taken(HELD, 0, 0, 0), Taken(CAPTURED, 30, YESTERDAY, 30), 130),
    "voided": (Taken(HELD, 0, 0, 0), Taken(VOIDED, 0, YESTERDAY, 0), 100),
    "taken after it was void": (Taken(VOIDED, 0, 0, 0), Taken(CAPTURED, 30, YESTERDAY, 30), 100),
    "less, of today": (Taken(CAPTURED, 30, TODAY, 30), Taken(CAPTURED, 10, TODAY, 30), 100),
    "less, of yesterday": (Taken(CAPTURED, 30, YESTERDAY, 30), Taken(CAPTURED, 10, YESTERDAY, 30), 80),
    "the same, of yesterday": (Taken(CAPTURED, 30, YESTERDAY, 30), Taken(CAPTURED, 30, YESTERDAY, 30), 100),
    "given back, of yesterday": (Taken(CAPTURED, 30, YESTERDAY, 30), Taken(HELD, 0, YESTERDAY, 30), 70),
    "more than at first": (Taken(CAPTURED, 30, YESTERDAY, 30), Taken(CAPTURED, 50, YESTERDAY, 30), 100),
    "one more than at first": (Taken(CAPTURED, 30, YESTERDAY, 30), Taken(CAPTURED, 31, YESTERDAY, 30), 100),
    "again, up to the first": (Taken(CAPTURED, 10, YESTERDAY, 30), Taken(CAPTURED, 30, YESTERDAY, 30), 120),
    "again, and more": (Taken(CAPTURED, 10, YESTERDAY, 30), Taken(CAPTURED, 50, YESTERDAY, 30), 120),
    "again, of what was above": (Taken(CAPTURED, 40, YESTERDAY, 30), Taken(CAPTURED, 50, YESTERDAY, 30), 100),
    "never below zero": (Taken(CAPTURED, 300, YESTERDAY, 300), Taken(CAPTURED, 0, YESTERDAY, 300), 0),
}


@pytest.mark.parametrize("case", PAST)
def test_what_is_past_after_a_step(case):
    before, after, past = PAST[case]
    assert past_after(in_window(past=100), before, after) == past
    assert past_after(node("s", WALLET, past=100), before, after) == 100


def test_what_a_hold_counts():
    assert [Taken(state, 3, 0, 3).counts(10) for state in (HELD, CAPTURED)] == [10, 3]

"""Budgets that begin anew: where a day, a week and a month begin, and what counts in them."""

import datetime as dt
import zoneinfo
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ledger import START_MS, Books, Clock, a_transfer, usd
from x402guard.errors import ConfigError
from x402guard.kernel import windows
from x402guard.kernel.rows import WALLET, Evidence, Hold, HoldKind, Node, NodeKind, NodeState, Window
from x402guard.kernel.windows import rolled, window_start_ms
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.budgets import room_on_path, trip
from x402guard.ledger.events import Capture, Correct, Expire, Lapse, Void
from x402guard.ledger.owner import owner_mark, reset_node, set_limit
from x402guard.ledger.queries import nodes_of
from x402guard.ledger.sessions import NodeRequest, check_window, open_node
from x402guard.ledger.verify import verify_journal

DAY = 86_400_000
MIDNIGHT = START_MS // DAY * DAY + DAY  # UTC, after the Friday that START_MS is in: 2027-01-16
ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "America/Havana", "America/Sao_Paulo", "Africa/Cairo", "Asia/Kathmandu",
    "Australia/Lord_Howe", "Pacific/Apia", "Pacific/Kiritimati", "Pacific/Chatham", "Asia/Beirut", "America/St_Johns",
)  # fmt: skip


def at(text) -> int:
    return int(dt.datetime.fromisoformat(text).timestamp()) * 1000


@pytest.mark.parametrize(
    ("per", "tz", "now", "began"),
    [
        ("day", "UTC", "2026-03-10T23:59:59Z", "2026-03-10T00:00:00Z"),
        ("day", "UTC", "2026-03-11T00:00:00Z", "2026-03-11T00:00:00Z"),
        ("day", "Asia/Kathmandu", "2026-01-01T18:14:59Z", "2025-12-31T18:15:00Z"),
        ("day", "Asia/Kathmandu", "2026-01-01T18:15:00Z", "2026-01-01T18:15:00Z"),
        ("day", "Pacific/Kiritimati", "2026-01-01T10:00:00Z", "2026-01-01T10:00:00Z"),
        # 23 hours, and 25
        ("day", "Europe/Berlin", "2026-03-29T21:59:59Z", "2026-03-28T23:00:00Z"),
        ("day", "Europe/Berlin", "2026-03-29T22:00:00Z", "2026-03-29T22:00:00Z"),
        ("day", "Europe/Berlin", "2026-10-25T22:59:59Z", "2026-10-24T22:00:00Z"),
        ("day", "Europe/Berlin", "2026-10-25T23:00:00Z", "2026-10-25T23:00:00Z"),
        ("day", "America/New_York", "2026-03-09T03:59:59Z", "2026-03-08T05:00:00Z"),
        # a day that begins at one, one whose midnight comes twice, one whose last hour does, and one that there never was
        ("day", "America/Sao_Paulo", "2018-11-04T02:59:59Z", "2018-11-03T03:00:00Z"),
        ("day", "America/Sao_Paulo", "2018-11-04T12:00:00Z", "2018-11-04T03:00:00Z"),
        ("day", "America/Havana", "2025-11-02T05:30:00Z", "2025-11-02T04:00:00Z"),
        ("day", "America/Sao_Paulo", "2018-02-18T02:30:00Z", "2018-02-17T02:00:00Z"),
        ("day", "Pacific/Apia", "2011-12-30T10:00:00Z", "2011-12-30T10:00:00Z"),
        ("day", "Pacific/Apia", "2011-12-30T09:59:59Z", "2011-12-29T10:00:00Z"),
        # Monday
        ("week", "UTC", "2026-11-22T23:59:59Z", "2026-11-16T00:00:00Z"),
        ("week", "UTC", "2026-11-23T00:00:00Z", "2026-11-23T00:00:00Z"),
        ("week", "UTC", "2027-01-01T12:00:00Z", "2026-12-28T00:00:00Z"),
        ("week", "Europe/Berlin", "2026-03-29T21:59:59Z", "2026-03-22T23:00:00Z"),
        ("week", "America/New_York", "2026-11-02T04:59:59Z", "2026-10-26T04:00:00Z"),
        ("month", "UTC", "2026-01-31T23:59:59Z", "2026-01-01T00:00:00Z"),
        ("month", "UTC", "2026-12-31T23:59:59Z", "2026-12-01T00:00:00Z"),
        ("month", "UTC", "2027-01-01T00:00:00Z", "2027-01-01T00:00:00Z"),
        ("month", "UTC", "2028-02-29T23:59:59Z", "2028-02-01T00:00:00Z"),
        ("month", "UTC", "2027-03-01T00:00:00Z", "2027-03-01T00:00:00Z"),
        ("month", "Europe/Berlin", "2026-03-31T21:59:59Z", "2026-02-28T23:00:00Z"),
        ("month", "Europe/Berlin", "2026-03-31T22:00:00Z", "2026-03-31T22:00:00Z"),
        ("month", "America/New_York", "2026-11-30T12:00:00Z", "2026-11-01T04:00:00Z"),
    ],
)
def test_where_a_window_begins(per, tz, now, began):
    assert window_start_ms(Window(per, tz), at(now)) == at(began)
    assert window_start_ms(Window(per, tz), at(now) + 999) == at(began)


@given(
    per=st.sampled_from(["day", "week", "month"]),
    tz=st.sampled_from(ZONES),
    now=st.integers(0, 4_000_000_000_000),
    later=st.integers(0, 40 * DAY),
)
def test_it_has_begun_and_goes_on_and_never_back(per, tz, now, later):
    window, zone = Window(per, tz), zoneinfo.ZoneInfo(tz)
    began = window_start_ms(window, now)
    longest = {"day": 1, "week": 7, "month": 31}[per]
    assert now - (longest + 1) * DAY <= began <= now
    assert window_start_ms(window, began) == began <= window_start_ms(window, now + later)
    first, before = (dt.datetime.fromtimestamp(ms / 1000, zone) for ms in (began, began - 1000))
    assert before.date() < first.date()
    assert per != "week" or first.weekday() == 0
    assert per != "month" or first.day == 1


@pytest.mark.parametrize("per", ["", "Day", "hour", "year", 1, None, ["day"], b"day"])
def test_what_is_no_period_is_named(per):
    with pytest.raises(ConfigError, match=r"^per: .* is not one of 'day', 'week' and 'month'"):
        check_window(per, "UTC")


@pytest.mark.parametrize(
    "tz",
    ["", "Berlin", "Europe", "Europe/Berln", "../UTC", "/etc/localtime", "a\0b", "\ud800", "UTC+1", 1, None, b"UTC"],
)
def test_what_is_no_time_zone_is_named(tz):
    with pytest.raises(ConfigError, match=r"^tz: "):
        check_window("day", tz)


# ---- in the ledger ----


def by_the(per="day", *, limit="$2.00", tz="UTC", now_ms=MIDNIGHT - 60_000) -> Books:
    """Books with a windowed budget ``b`` a minute before midnight, a day-less session ``s`` in it, and a child ``s/c``."""
    books = Books(session=None, clock=Clock(now_ms))
    a_budget(books, "b", limit, Window(per, tz))
    books.open("s", "$100", parent="b")
    books.open("s/c", "$50", parent="s")
    return books


def a_budget(books, name, limit, window, parent=WALLET):
    request = NodeRequest(name, parent, NodeKind.BUDGET, name, usd(limit), "", window=window)
    return books.change(lambda view: open_node(view, request), nodes=(name, parent))


def left(books, node="s"):
    return books.change(lambda view: room_on_path(view, node), nodes=(node,))


def spend(books, name, amount, node="s", **more):
    """True where it was held; then it is captured."""
    if isinstance(books.hold(name, amount, node, **more), Refusal):
        return False
    books.step(name, Capture(usd(amount), Evidence.CLAIMED))
    return True


def windowed(books, node="b"):
    """The node as people see it, in its window."""
    seen = nodes_of(books.store)[node]
    return seen.spent, seen.live


def test_what_was_captured_in_a_day_counts_in_that_day_alone():
    books = by_the()
    assert spend(books, "one", "$2.00")
    assert not spend(books, "more", "$0.000000001")
    books.clock.tick(60)
    assert windowed(books) == (0, 0)
    assert left(books) == usd("$2.00")
    assert spend(books, "next", "$1.50", "s/c")
    assert windowed(books) == (usd("$1.50"), 0)
    assert not spend(books, "more", "$0.51")
    assert books.node("b").captured + books.node("b").granted_out == usd("$3.50")


def test_a_hold_from_before_midnight_oversells_neither_day():
    books = by_the()
    assert spend(books, "a", "$1.50")
    books.hold("late", "$0.50", "s/c")
    assert left(books) == 0
    books.clock.tick(120)
    assert left(books) == usd("$1.50")  # it touches the new day as well
    assert spend(books, "b", "$1.50")
    assert left(books) == 0
    books.step("late", Capture(usd("$0.50"), Evidence.CLAIMED))
    assert windowed(books) == (usd("$2.00"), 0)
    assert isinstance(books.hold("more", "$0.000000001"), Refusal)
    assert books.node("b").state is NodeState.OPEN


@pytest.mark.parametrize(
    ("end", "counts"),
    [(Void("not sent"), "$0"), (Expire(2**40), "$0"), (Capture(usd("$0.20"), Evidence.CHAIN, a_transfer()), "$0.20")],
)
def test_what_a_hold_gives_back_after_midnight_is_room_of_the_new_day(end, counts):
    books = by_the()
    assert spend(books, "a", "$1.50")
    books.hold("late", "$0.50", scheme="upto", chain_evidence=True)
    books.clock.tick(120)
    books.step("late", end)
    assert left(books) == usd("$2.00") - usd(counts)
    assert windowed(books) == (usd(counts), 0)


def test_a_hold_counts_in_every_day_that_it_touches_and_its_end_in_one():
    books = by_the()
    books.hold("long", "$0.50")
    for day in range(3):
        assert windowed(books) == (0, usd("$0.50"))
        assert spend(books, f"d{day}", "$1.50")
        assert left(books) == 0
        books.clock.tick(86_400)
    books.step("long", Capture(usd("$0.50"), Evidence.CLAIMED))
    assert windowed(books) == (usd("$0.50"), 0)
    books.clock.tick(86_400)
    assert left(books) == usd("$2.00")


def test_a_hold_that_lapsed_unseen_counts_in_the_day_in_which_that_is_seen():
    books = by_the()
    books.hold("forgotten", "$0.50", kind=HoldKind.TOOL)
    books.clock.tick(86_400)
    books.step("forgotten", Lapse())
    assert windowed(books) == (usd("$0.50"), 0)


def test_a_window_never_goes_back():
    books = by_the()
    assert spend(books, "a", "$2.00")
    books.clock.tick(120)
    assert spend(books, "b", "$1.20")
    books.clock.tick(-120)
    assert windowed(books) == (usd("$1.20"), 0)
    assert left(books) == usd("$0.80")
    assert not spend(books, "c", "$0.81")
    books.clock.tick(120)
    assert left(books) == usd("$0.80")


def test_a_node_whose_window_is_ahead_of_the_clock_stays_in_it():
    books = by_the()
    books.clock.tick(120)
    assert spend(books, "a", "$1.20")
    node = books.node("b")
    assert node.since_ms == MIDNIGHT
    for now_ms in (MIDNIGHT - 1, MIDNIGHT - 40 * DAY, MIDNIGHT, MIDNIGHT + DAY - 1):
        assert rolled(node, now_ms) == node
    assert (rolled(node, MIDNIGHT + DAY).since_ms, rolled(node, MIDNIGHT + DAY).counted) == (MIDNIGHT + DAY, 0)


def test_a_capture_closes_in_the_window_that_counts_it_although_another_clock_is_ahead():
    books = by_the()
    books.open("elsewhere", "$1")
    books.clock.tick(120)
    assert spend(books, "other", "$0.10", node="elsewhere")  # the ledger's last time is after midnight now
    books.clock.tick(-120)
    assert spend(books, "a", "$0.50")
    books.clock.tick(120)
    assert left(books) == usd("$2.00")
    books.step("a", Correct(usd("$0.00"), Evidence.CHAIN))
    assert left(books) == usd("$2.00")


def test_a_day_that_nobody_spent_in_and_a_year():
    books = by_the()
    for years in range(3):
        assert spend(books, f"y{years}", "$2.00")
        books.clock.tick(366 * 86_400)
        assert left(books) == usd("$2.00")


@pytest.mark.parametrize(
    ("per", "first", "same", "after"),
    [
        ("week", "2026-11-16T00:00:00Z", "2026-11-22T23:59:59Z", "2026-11-23T00:00:00Z"),
        ("month", "2028-02-01T00:00:00Z", "2028-02-29T23:59:59Z", "2028-03-01T00:00:00Z"),
    ],
)
def test_weeks_and_months(per, first, same, after):
    books = by_the(per, now_ms=at(first))
    assert spend(books, "a", "$1.00")
    books.clock.now_ms = at(same)
    assert left(books) == usd("$1.00")
    books.clock.now_ms = at(after)
    assert left(books) == usd("$2.00")


def test_a_day_inside_a_month_has_both():
    books = Books(session=None, clock=Clock(at("2027-01-29T12:00:00Z")))
    a_budget(books, "m", "$3.00", Window("month", "UTC"))
    a_budget(books, "d", "$2.00", Window("day", "UTC"), parent="m")
    books.open("s", "$100", parent="d")
    assert spend(books, "a", "$2.00")
    books.clock.tick(86_400)
    refusal = books.hold("b", "$1.01")
    assert "budget 'm' has $1.00 left of $3.00 a month ($2.00 spent)" in refusal.reason
    assert spend(books, "b", "$1.00")
    books.clock.now_ms = at("2027-02-01T00:00:00Z")
    assert left(books) == usd("$2.00")


def test_a_bill_above_the_ceiling_latches_until_the_day_is_over():
    books = by_the()
    books.hold("h", "$1.00", kind=HoldKind.LLM)
    books.step("h", Capture(usd("$2.50"), Evidence.PROVIDER_USAGE))
    assert books.node("b").state is NodeState.TRIPPED
    with pytest.raises(ConfigError, match=r"has used \$2.50 of \$2.00"):
        books.change(lambda view: reset_node(view, "b", "me"), nodes=("b",), durable=True)
    refused = books.hold("f", "$0.10")
    assert "its day ends (2027-01-16 00:00 UTC); its owner can reset it: x402guard reset b" in refused.reason
    books.clock.tick(60)
    assert isinstance(books.hold("g", "$0.10"), Hold)
    assert (books.node("b").state, books.node("b").terminated_by) == (NodeState.OPEN, None)
    [entry] = [each for each in books.store.entries("b") if each.event == "reset"]
    assert entry.facts() == {"by": "the end of its window", "word": "overshoot"}
    problems, _ = verify_journal(books.store.nodes(), books.store.entries(WALLET), None)
    assert problems == []


def test_room_within_the_day_lets_nothing_go():
    books = by_the()
    books.hold("h", "$1.00", kind=HoldKind.LLM)
    for limit in ("$0.50", "$9.00"):
        books.change(
            lambda view, limit=limit: set_limit(view, "b", usd(limit), "me"), nodes=("b",), marks=(owner_mark("b"),)
        )
    assert (books.node("b").state, left(books, "b")) == (NodeState.TRIPPED, usd("$8.00"))
    assert books.hold("g", "$0.10").rule == "session_tripped", "a limit resets nothing"
    books.clock.tick(60)
    assert isinstance(books.hold("g", "$0.10"), Hold)


@pytest.mark.parametrize("word", ["kill_switch", "loop_detected", "rolled_back"])
@pytest.mark.parametrize("first", [False, True])
def test_no_other_trip_ends_with_the_window(word, first):
    books = by_the()
    books.hold("h", "$1.00", kind=HoldKind.LLM)
    trips = [
        lambda: books.change(lambda view: trip(view, "b", word, "why"), nodes=("b",)),
        lambda: books.step("h", Capture(usd("$2.50"), Evidence.PROVIDER_USAGE)),
    ]
    for each in trips if first else trips[::-1]:
        each()
    assert (books.node("b").state, books.node("b").terminated_by) == (NodeState.TRIPPED, word)
    books.clock.tick(3 * DAY // 1000)
    assert books.hold("g", "$0.10").rule == "session_tripped"
    assert f"tripped ({word}: why); only its owner can reset it" in books.hold("g", "$0.10").reason


def test_a_budget_without_a_window_stays_until_it_is_reset():
    books = Books()
    books.hold("h", "$1.00", kind=HoldKind.LLM)
    books.step("h", Capture(usd("$2.50"), Evidence.PROVIDER_USAGE))
    books.clock.tick(400 * DAY // 1000)
    assert "only its owner can reset it" in books.hold("g", "$0.10").reason


def test_what_is_live_over_midnight_and_more_than_the_limit_keeps_it_stopped_until_it_fits():
    books = by_the()
    books.open_kernel(most_exposed=usd("$3.00"))
    books.hold("live", "$1.50", deadline_s=DAY)
    books.hold("h", "$0.50", kind=HoldKind.LLM)
    books.step("h", Capture(usd("$1.00"), Evidence.PROVIDER_USAGE))
    books.change(lambda view: set_limit(view, "b", usd("$1.00"), "me"), nodes=("b",), marks=(owner_mark("b"),))
    books.clock.tick(60)
    assert books.hold("g", "$0.10").rule == "session_tripped"
    books.step("live", Void("unsent"))
    assert isinstance(books.hold("g", "$0.10"), Hold)


# ---- corrections ----


def captured_yesterday(amount="$1.00"):
    books = by_the()
    books.open_kernel(unsafe_trust_receipts=True, most_exposed=usd("$1.00"))
    books.hold("h", "$1.50", scheme="upto")
    books.believe("h", amount)
    books.clock.tick(3_600)
    return books


def test_what_comes_back_of_yesterday_is_no_room_of_today():
    books = captured_yesterday()
    assert spend(books, "today", "$1.50")
    books.step("h", Correct(usd("$0.10"), Evidence.CHAIN, a_transfer()))
    assert windowed(books) == (usd("$1.50"), 0)
    assert left(books) == usd("$0.50")
    assert (left(books, "b"), books.node("s").used) == (usd("$0.50"), usd("$1.60"))


def test_what_comes_back_on_the_same_day_is_room():
    books = by_the()
    spend(books, "h", "$2.00", scheme="upto")
    books.step("h", Correct(usd("$0.50"), Evidence.CHAIN, a_transfer()))
    assert left(books) == usd("$1.50")


def test_what_yesterday_cost_beyond_its_capture_is_owed_today_and_latches_what_it_exceeds():
    books = captured_yesterday()
    assert spend(books, "today", "$1.80")
    books.step("h", Correct(usd("$1.10"), Evidence.CHAIN, a_transfer()))
    assert (windowed(books), books.node("b").state) == ((usd("$1.90"), 0), NodeState.OPEN)
    books.step("h", Correct(usd("$1.50"), Evidence.CHAIN))
    assert (windowed(books), books.node("b").state) == ((usd("$2.30"), 0), NodeState.TRIPPED)


def test_a_correction_that_is_taken_back_goes_on_counting_to_be_on_the_safe_side():
    books = captured_yesterday()
    books.step("h", Correct(usd("$1.50"), Evidence.CHAIN_HEAD))
    assert windowed(books) == (usd("$0.50"), 0)
    books.step("h", Correct(usd("$1.00"), Evidence.CHAIN, a_transfer()))
    assert windowed(books) == (usd("$0.50"), 0)  # nobody knows on which day it was corrected up
    assert left(books) == usd("$1.50")


def test_what_expired_and_was_taken_all_the_same_counts_on_the_day_of_the_proof():
    books = by_the()
    books.hold("h", "$0.50", scheme="upto", chain_evidence=True)
    books.clock.tick(90)
    books.step("h", Expire(2**40))
    books.clock.tick(86_400)
    books.step("h", Correct(usd("$0.50"), Evidence.CHAIN_HEAD))
    assert windowed(books) == (usd("$0.50"), 0)
    books.step("h", Correct(usd("$0.20"), Evidence.CHAIN, a_transfer()))
    assert windowed(books) == (usd("$0.20"), 0)


def test_a_payment_is_corrected_in_the_month_that_goes_on_and_not_in_the_day_that_is_over():
    books = Books(session=None, clock=Clock(at("2027-01-20T23:59:00Z")))
    a_budget(books, "m", "$3.00", Window("month", "UTC"))
    a_budget(books, "d", "$2.00", Window("day", "UTC"), parent="m")
    books.open("s", "$100", parent="d")
    spend(books, "h", "$2.00", scheme="upto")
    books.clock.tick(600)
    books.step("h", Correct(usd("$1.50"), Evidence.CHAIN, a_transfer()))
    assert (windowed(books, "d"), windowed(books, "m")) == ((0, 0), (usd("$1.50"), 0))


def test_a_zone_is_that_of_tzdata_whatever_the_system_has(tmp_path):
    """Images are of different years: the same day would begin at two times."""
    (tmp_path / "Africa").mkdir()
    (tmp_path / "Africa/Cairo").write_bytes(files("tzdata").joinpath("zoneinfo/Etc/GMT-2").read_bytes())
    summer = dt.datetime(2026, 7, 10)
    try:
        zoneinfo.reset_tzpath(to=[tmp_path])
        zoneinfo.ZoneInfo.clear_cache()
        windows.zone.cache_clear()
        assert zoneinfo.ZoneInfo("Africa/Cairo").utcoffset(summer) == dt.timedelta(hours=2)
        assert windows.zone("Africa/Cairo").utcoffset(summer) == dt.timedelta(hours=3)
    finally:
        zoneinfo.reset_tzpath()
        zoneinfo.ZoneInfo.clear_cache()


@pytest.mark.parametrize("first", [2, 3])
def test_two_versions_of_tzdata_give_no_day_out_twice(monkeypatch, first):
    """The one that begins the day earlier begins it for both."""
    began = at("2026-07-10T00:00:00+03:00")
    node = Node(
        "b", WALLET, NodeKind.BUDGET, "b", usd("$1"), 1, 1, window=Window("day", "Africa/Cairo"), since_ms=began
    )
    since = set()
    for hour in range(3 * 24):
        for hours in (first, 5 - first):
            monkeypatch.setattr(windows, "zone", lambda _, hours=hours: dt.timezone(dt.timedelta(hours=hours)))
            monkeypatch.setattr(windows, "_LAST_SEEN", {})  # they are of two processes
            node = rolled(node, began + hour * 3_600_000)
            since.add(node.since_ms)
    assert since == {began + day * DAY for day in range(3)}

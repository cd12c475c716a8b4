"""The report of a budget that begins again adds up, says what binds it, and a repr shows the money."""

import pytest

from tests.support.ledger import START_MS, Clock
from tests.support.merchant import Shop, client, make_guard
from x402guard import SettlementUncertain
from x402guard.kernel.rows import Window
from x402guard.kernel.windows import window_end_ms, window_start_ms
from x402guard.stores import open_store


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def guard(ledger_url, clock):
    store = open_store(ledger_url, clock_ms=clock)
    with make_guard(store, budget="$50.00") as guard:
        yield guard
    store.close()


def test_a_daily_budget_adds_up_within_its_day(guard, clock):
    team = guard.budget("team", "$2.00", per="day", tz="Europe/Berlin")
    for _ in range(3):
        with team.session("s", budget="$2.00") as session:
            session.charge("serp", "$0.50")
        clock.tick(86_400)
    with team.session("s", budget="$2.00") as session:
        session.charge("serp", "$0.25")
        report = team.report().to_dict()
    assert (report["kind"], report["per"], report["budget"]) == ("budget", "day Europe/Berlin", "2.00")
    assert (report["spent"], report["held"], report["remaining"]) == ("0.25", "0.00", "1.75")
    assert (report["spent_total"], report["window"]["spent"]) == ("1.75", "0.25")
    assert report["window"]["to"] - report["window"]["from"] in (82_800, 86_400, 90_000)
    assert report["window"]["from"] <= clock() / 1000 < report["window"]["to"]
    text = team.report().to_text()
    assert [line.split()[0] for line in text.splitlines()[:2]] == ["team", "budget:team"]
    assert "Spent $0.25 of $2.00 today." in text
    assert "$2.00 a day Europe/Berlin, since 18 Jan 2027; $1.75 spent in all" in " ".join(text.split())


@pytest.mark.parametrize("per", ["day", "week", "month"])
@pytest.mark.parametrize("tz", ["UTC", "Europe/Berlin", "America/New_York"])
def test_a_window_ends_where_the_next_one_begins(per, tz):
    window = Window(per, tz)
    for day in range(0, 400, 3):
        now_ms = START_MS + day * 86_400_000
        end_ms = window_end_ms(window, now_ms)
        assert window_start_ms(window, now_ms) <= now_ms < end_ms
        assert window_start_ms(window, end_ms) == end_ms
        assert window_start_ms(window, end_ms - 1_000) == window_start_ms(window, now_ms)


def test_what_is_left_names_the_budget_that_binds_it(guard):
    team = guard.budget("team", "$1.00")
    with team.session("s", budget="$5.00", id="run") as session:
        session.charge("serp", "$0.40")
        report = session.report()
        assert report.to_dict()["bound_by"] == {"kind": "budget", "id": "budget:team", "name": "team"}
        assert "remaining    $0.60, which is what budget 'team' has left" in report.to_text()
        assert team.report().to_dict()["bound_by"] is None
        assert repr(session) == "Session('s', id='run', open, $0.40 spent of $5.00, $0.00 held, $0.60 left)"
        assert repr(team) == "NamedBudget('team', id='budget:team', open, $0.40 spent of $1.00, $0.00 held, $0.60 left)"


def test_a_report_names_route_and_transaction_and_says_a_reason_once(guard):
    with guard.session("s", budget="$5.00", id="run") as session:
        client(session, Shop()).get("https://shop.example/opinion/42?key=1")
        with pytest.raises(SettlementUncertain):
            client(session, Shop(paid=TimeoutError("gone"))).get("https://shop.example/other?key=1")
        session.trip("it talks to strangers")
        with pytest.raises(Exception, match="strangers"):
            session.charge("serp", "$0.01")
        report = session.report()
    assert report.to_dict()["payments"]["by_route"] == {"GET https://shop.example/opinion/42": "0.01"}
    [out] = report.to_dict()["outstanding"]
    assert (out["request"], out["transaction"]) == ("GET https://shop.example/other", None)
    assert report.to_text().count("it talks to strangers") == 1
    assert "key=1" not in report.to_text()


def test_a_notebook_shows_a_report_and_nothing_in_it_is_markup(guard):
    with guard.session("<script>", budget="$1.00") as session:
        shown = session.report()._repr_html_()
    assert shown.startswith('<iframe sandbox="" ')
    assert "<script" not in shown
    assert "&amp;lt;script&amp;gt;" in shown


def test_a_repr_of_what_cannot_be_read_raises_nothing(tmp_path):
    with make_guard(f"sqlite:///{tmp_path / 'l.db'}") as guard:
        session = guard.session("s", budget="$1.00", id="run")
    (tmp_path / "l.db").unlink()
    assert repr(session) == "Session('s', id='run')"

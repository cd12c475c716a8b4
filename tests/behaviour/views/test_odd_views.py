"""Reports of what seldom happens: past a limit, amounts given back, windows, nested budgets, many agents, strange files."""

import json
from datetime import UTC, datetime

import pytest

from tests.behaviour.views.test_view import adds_up, text_of
from tests.support.command_line import typed
from tests.support.ledger import weigh_proven
from tests.support.merchant import Shop, client
from tests.support.scenes import refused
from x402guard import Owner, Policy
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Unused
from x402guard.ledger.owner import trip_node
from x402guard.ledger.view import Scope
from x402guard.views.text import WIDTH, width_of
from x402guard.views.words import json_text

DAY = 86_400
CALM = Policy(loop=None, spike=None, breaker=None, velocity=None)


def report_of(url, node, **between):
    with Owner(url, read_only=True) as owner:
        return owner.report(node, **between)


def at(books):
    return datetime.fromtimestamp(books.store.now_ms() / 1000, UTC)


def given_back(books, node):
    """Correct the last payment of a session to nothing: a final block past its deadline shows it unused."""
    entries = [entry for entry in books.store.entries(node) if entry.event == "capture"]
    hold = books.store.hold(entries[-1].hold_id)
    unused = Unused(hold.deadline_unix + 1)
    scope = Scope(holds=(hold.id,), marks=weigh_marks(hold, unused), durable=True)
    assert books.store.transact(scope, lambda view: weigh_proven(view, hold.id, unused)).captured == 0


def test_past_its_limit_the_limit_stands_inside_the_bar(books, url):
    with books.guard().session("run", budget="$1.00", id="run") as session:
        session.charge("serp", "$0.80")
    with Owner(url) as owner:
        owner.set_budget("run", "0.50", stops=True)
    report = report_of(url, "run")
    assert (report.view.left, report.view.gap) == (-3 * 10**8, 0)
    text, html = " ".join(report.to_text().split()), text_of(report.to_html())
    assert "$0.80 spent + $0.00 still out = $0.80 in all, $0.30 past the limit" in text
    assert "!! past $0.30 past the limit" in text
    assert "$0.80 spent + $0.00 still out = $0.80 in all, $0.30 past the limit" in html
    assert "-$" not in text + html
    assert 'x="62.50%"' in report.to_html()  # the limit, at 0.50 of 0.80


@pytest.mark.parametrize("per", [None, "day"])
def test_what_was_given_back_a_day_later_draws_no_curve_below_zero(books, url, per):
    guard = books.guard()
    window = {"per": "day"} if per else {}
    with guard.budget("team", "$5.00", **window).session("run", budget="$2.00", id="run") as session:
        client(session, Shop()).get("https://courts.example/1")
        books.forward(DAY)
        given_back(books, "run")
        session.charge("serp", "$0.20")
    since = datetime.fromtimestamp(books.store.now_ms() / 1000 - 60, UTC)
    view = report_of(url, "budget:team").view
    assert (view.spent, view.sums.spent) == (2 * 10**8, 2 * 10**8)
    assert view.series[-1].spent == 2 * 10**8
    assert min(point.spent for point in view.series) >= 0
    for node in ("wallet", "run", "budget:team"):
        period = report_of(url, node, since=since)
        assert period.view.sums.spent == 19 * 10**7
        assert period.to_html()
        assert period.to_text()


def test_a_period_counts_its_own_refusals(books, url):
    guard = books.guard(policy=CALM)
    with guard.session("old", budget="$0.10", id="old") as session:
        for _ in range(50):
            refused(session.charge, "maps", "$5.00")
    books.forward(30 * DAY)
    since = at(books)
    with guard.session("new", budget="$1.00", id="new") as session:
        session.charge("serp", "$0.10")
        refused(session.charge, "maps", "$5.00")
    view = report_of(url, "wallet", since=since).view
    assert view.refused == 1
    assert [(row.name, row.refused) for row in view.sessions] == [("new", 1)]
    assert [(row.name, row.refused) for row in view.agents] == [("new", 1)]
    assert view.stops == (("budget_exhausted", 1),)
    assert sum(lane_refusals[2] for lane in view.lanes for lane_refusals in lane.refused) == 1
    assert report_of(url, "wallet").view.refused == 51


def test_a_thousand_refusals_of_one_day_are_all_counted_and_of_a_part_at_least_those_kept(books, url):
    with books.guard(policy=CALM).session("run", budget="$0.10", id="run") as session:
        for number in range(450):
            if number == 300:
                books.forward(60)
                since = at(books)
            refused(session.charge, "maps", "$5.00")
    view = report_of(url, "run").view
    assert (view.refused, sum(day.refusals for day in view.days)) == (450, 450)
    part = report_of(url, "run", since=since)
    assert (part.view.refused, part.view.refusals[0].is_least) == (100, True)
    assert "at least 100 × budget" in part.to_text()


def test_a_parent_is_stopped_by_its_own_lack_not_by_that_of_a_child(books, url):
    with books.guard().session("p", budget="$2.00", id="p") as parent:
        with parent.child("one", budget="$5.00") as one:
            one.charge("serp", "$1.60")
            refused(one.charge, "serp", "$1.00")
        books.forward(10)
        with parent.child("two", budget="$0.05") as two:
            refused(two.charge, "serp", "$0.06")
        report = report_of(url, "p")
    assert (report.view.stopped.requested, report.view.stopped.available) == (10**9, 4 * 10**8)
    assert "'p' has $0.40 left of $2.00" in report.to_dict()["why"]


def test_a_trip_is_that_of_the_session_not_of_a_child_with_its_name(books, url):
    with books.guard().session("orc", budget="$2.00", id="orc") as parent:
        with parent.child("orc", budget="$1.00") as child:
            child.charge("serp", "$0.10")
            parent.trip("it looks wrong")
            books.forward(600)
            scope = Scope(nodes=(child.id,), durable=True)
            books.store.transact(scope, lambda view: trip_node(view, child.id, "once more"))
    view = report_of(url, "orc").view
    trips = [mark for mark in view.marks if mark.kind == "trip"]
    assert [mark.key == "orc" for mark in trips] == [True, False]
    assert view.stopped.at_ms == trips[0].ms < trips[1].ms


def test_a_budget_around_others_stands_for_itself_without_the_limit_of_all(books, url):
    guard = books.guard()
    daily = guard.budget("Daily", "$50.00")
    team = daily.budget("Team", "$20.00")
    with daily.session("direct", budget="$5.00") as session:
        session.charge("serp", "$2.00")
    with team.session("inner", budget="$5.00") as session:
        session.charge("serp", "$1.00")
    view = report_of(url, "wallet").view
    adds_up(view)
    assert [(each.row.name, each.row.sums.spent, each.row.limit) for each in view.customers] == [
        ("Daily itself", 2 * 10**9, None), ("Team", 10**9, 20 * 10**9),
    ]  # fmt: skip


def test_every_session_is_counted_also_one_without_calls(books, url):
    guard = books.guard()
    for number in range(4):
        with guard.session(f"s-{number}", budget="$1.00") as session:
            if number:
                session.charge("serp", "$0.10")
    view = report_of(url, "wallet").view
    assert (view.sessions_count, len(view.sessions)) == (4, 4)


def test_a_stopped_wallet_says_why_beside_its_stopped_sessions(books, url):
    with books.guard().session("s", budget="$1.00") as session:
        refused(session.charge, "serp", "$2.00")
        with Owner(url) as owner:
            owner.trip("wallet", "stolen key?")
    html = text_of(report_of(url, "wallet").to_html())
    assert "stolen key?" in html
    assert "x402guard reset wallet" in html
    assert "1 of 1 session stopped: 1 by budget exhausted." in html


def test_of_thirty_agents_the_dearest_are_shown_with_those_above_them(books, url):
    with books.guard(policy=CALM).session("run", budget="$50.00", id="run") as session:
        for number in range(29):
            with session.child(f"agent-{number}", budget="$1.00") as child:
                child.charge("serp", "$0.01")
        with session.child("group", budget="$20.00") as group, group.child("dear", budget="$10.00") as dear:
            dear.charge("serp", "$9.00")
            refused(dear.charge, "serp", "$9.00")
    text = report_of(url, "run").to_text()
    agents = text[text.index("BY AGENT") :].split("\n\n")[0]
    assert "└ group" in agents
    assert "  └ dear" in agents
    assert "and 20 more" in agents
    assert "$0.20" in agents.splitlines()[-1]


@pytest.mark.parametrize("name", ["名前" * 40, "🤖 robot " * 20, "w" * 200, "é" * 90, "name with words " * 12])
def test_wide_names_and_long_amounts_keep_to_80_columns(books, url, name):
    with books.guard(policy=CALM).session(name[:120].strip(), budget="$999999999.99", id="run") as session:
        with session.child(name[:100].strip(), budget="$999999999.90") as child:
            child.charge(name[:60].strip(), "$123456788.234567901")
            session_word = child
            session_word.trip("名前 " * 60)
        refused(session.charge, "x", "$999999999.00")
    for node in ("run", "wallet"):
        lines = report_of(url, node).to_text().splitlines()
        assert [line for line in lines if width_of(line) > WIDTH] == []
        assert not any("901░" in line for line in lines)


def test_a_hold_past_its_time_is_not_said_to_be_takeable(books, url):
    with books.guard().session("run", budget="$1.00", id="run") as session:
        session.hold("render", up_to="$0.50").__enter__()
    store = books.store
    nodes = store.now_ms() + 3 * DAY * 1000
    from x402guard.views.books import Books, books_of
    from x402guard.views.report import Report

    rows = books_of(store, "run")
    late = Books(rows.nodes, "run", rows.entries, rows.counters, now_ms=nodes)
    for said in (" ".join(Report.of(late).to_text().split()), text_of(Report.of(late).to_html())):
        assert "$0.50 is still out; its time is over, and it is not settled yet." in said
    assert "Its time was over at" in text_of(Report.of(late).to_html())


def test_of_a_period_that_is_over_it_does_not_say_that_nothing_is_out(books, url):
    until = at(books)
    books.forward(10)
    with books.guard().session("run", budget="$1.00", id="run") as session:
        session.hold("render", up_to="$0.50").__enter__()
    html = text_of(report_of(url, "wallet", until=until).to_html())
    assert "Nothing of it" in html
    assert "Nothing that was signed can still be taken" not in html


# -- files and dates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("-", "'-' is no file; write a name such as report.html"),
        (".", "'.' is no file"),
        ("folder", "folder is there and is no plain file"),
        ("link.html", "link.html is there and is no plain file"),
        ("/dev/null", "/dev/null is there and is no plain file"),
        ("out.csv", "out.csv is the name of the CSV beside the page"),
    ],
)
def test_a_page_is_written_to_a_plain_file_or_not_at_all(books, url, tmp_path, name, words):
    with books.guard().session("run", budget="$1.00", id="run"):
        pass
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "not-there.html")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = typed("report", "run", "--html", name, "--ledger", url, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_page_is_for_its_owner_alone_and_an_empty_file_is_replaced(books, url, tmp_path):
    with books.guard().session("run", budget="$1.00", id="run"):
        pass
    (tmp_path / "out.html").touch()
    assert typed("report", "run", "--html", "out.html", "--ledger", url, cwd=tmp_path).returncode == 0
    assert (tmp_path / "out.html").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("typed_date", ["0001-01-01", "9999-12-31T23:59-14:00", "0001-01-01T00:00+14:00"])
@pytest.mark.parametrize("option", ["--since", "--until"])
def test_a_date_of_no_ledger_is_refused(books, url, tmp_path, option, typed_date):
    done = typed("report", "wallet", option, typed_date, "--ledger", url, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"{option}: '{typed_date}' is no time of a ledger" in done.stderr


def test_a_period_from_long_before_the_ledger_has_no_empty_years(books, url):
    with books.guard().session("run", budget="$1.00", id="run") as session:
        session.charge("serp", "$0.10")
    view = report_of(url, "wallet", since=datetime(1975, 1, 1, tzinfo=UTC)).view
    assert len(view.days) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["view"].update(schema="x402guard.view.v2"),
        lambda values: values["view"].pop("sums"),
        lambda values: values["view"].update(tz="Nowhere/Else"),
        lambda values: values["view"].update(tz="../../etc/passwd"),
        lambda values: values.update(spent="9999.00"),
        lambda values: values.pop("view"),
        lambda values: values.update(view=[]),
    ],
)
def test_a_report_whose_view_cannot_be_read_is_shown_as_its_json(books, url, change):
    with books.guard().session("run", budget="$1.00", id="run") as session:
        session.charge("serp", "$0.10")
    report = report_of(url, "run")
    values = report.to_dict()
    change(values)
    read = type(report)(values)
    assert read.view is None
    assert json.loads(read.to_text()) == values
    assert "<pre>" in read.to_html()


def test_json_shows_a_terminal_nothing_that_it_would_execute():
    said = {"transaction": "\x9b31m\u202eabc", "surrogate": "\ud800", "tag": "\U000e0001", "plain": "é 漢 😀"}
    text = json_text(said)
    assert json.loads(text) == said
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "é 漢 😀" in text

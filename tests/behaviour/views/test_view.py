"""One view of a ledger: every sum in it is the ledger's, and text, JSON, HTML and CSV say the same to the nano-dollar."""

import csv
import inspect
import io
import json
import re
from datetime import UTC, datetime
from decimal import Decimal
from html.parser import HTMLParser

import jsonschema
import msgspec
import pytest

from tests.support.processes import ROOT
from tests.support.scenes import busy
from x402guard import ConfigError, Owner, Policy
from x402guard.money import dollars_to_nanos, format_dollars
from x402guard.views.export import export
from x402guard.views.model import EVIDENCE, MOST_CALLS, View
from x402guard.views.text import WIDTH, width_of
from x402guard.views.words import dollars

DAY = 86_400


@pytest.fixture
def scene(books):
    busy(books.guard(), books.forward)
    return books


NODES = ["wallet", "brief-4471", "audit-1", "budget:Kestrel"]


def customer_id(url):
    with Owner(url, read_only=True) as owner:
        return next(row.id for row in owner.sessions() if row.kind == "budget" and row.id != "budget:Kestrel")


def report_of(url, node, **between):
    with Owner(url, read_only=True) as owner:
        return owner.report(node, **between)


def text_of(html):
    found = []

    class Reader(HTMLParser):
        def handle_data(self, data):
            found.append(data)

    Reader().feed(html)
    return " ".join("".join(found).split())


def adds_up(view):
    """Each group of a view sums to what is spent and out; evidence to what is spent; spent, out and left to the limit."""
    total = view.sums.total
    assert view.gap == 0
    if view.limit is not None and view.per is None:
        assert view.spent + view.sums.out + view.left == view.limit
    assert sum(row.sums.total for row in view.kinds) == total
    assert sum(row.sums.total for row in view.agents) == total
    assert sum(row.sums.total for row in (*view.sellers, *view.models, *view.tools)) == total
    assert sum(day.sums.spent for day in view.days) == view.sums.spent
    assert sum(row.amount for row in view.outstanding) == view.sums.out
    if view.customers:
        assert sum(each.row.sums.total for each in view.customers) == total
        assert all(sum(each.days) == each.row.sums.spent for each in view.customers)
    if view.sessions:
        assert sum(row.sums.total for row in view.sessions) == total
    if view.series:
        assert (view.series[-1].spent, view.series[-1].held) == (view.sums.spent, view.sums.out)
    for name, amount in view.sums.parts():
        rows = [call.amount for call in view.calls if call.evidence == name]
        assert view.calls_count > MOST_CALLS or sum(rows) == amount, name


@pytest.mark.parametrize("node", NODES)
def test_every_sum_of_a_view_is_the_ledgers(scene, url, node):
    view = report_of(url, node).view
    adds_up(view)
    with Owner(url, read_only=True) as owner:
        row = next(row for row in owner.sessions() if row.id == node)
    assert (view.spent, view.sums.out) == tuple(dollars_to_nanos(str(each)) for each in (row.spent, row.held))


@pytest.mark.parametrize("node", NODES)
def test_text_json_html_and_csv_say_the_same(scene, url, node):
    report = report_of(url, node)
    view, values = report.view, report.to_dict()
    assert json.loads(report.to_json()) == values
    assert values["view"]["spent"] == view.spent
    assert (values["spent"], values["held"]) == (format_dollars(view.spent), format_dollars(view.sums.out))
    with Owner(url, read_only=True) as owner:
        rows = list(csv.DictReader(io.StringIO("".join(export(owner.captures(node), "csv")), newline="")))
    by_evidence = {"chain": "proven", "claimed": "claimed", "provider_usage": "stated", "estimate": "priced"}
    for name, amount in view.sums.parts()[:-1]:
        of_it = [Decimal(row["dollars"]) for row in rows if by_evidence.get(row["evidence"], "assumed") == name]
        assert sum(of_it) == Decimal(amount) / 10**9
    text, html = " ".join(report.to_text().split()), text_of(report.to_html())
    for name, amount in view.sums.parts():
        word = "still out" if name == "out" else name
        assert f"{word} {dollars(amount)} " in text
        assert f"{word}{dollars(amount)}" in html
    assert f"{dollars(view.spent)} spent + {dollars(view.sums.out)} still out" in html
    for row in (*view.kinds, *view.models, *view.tools, *view.sellers):
        assert f" {row.calls} {dollars(row.sums.total)}" in text


def test_the_values_of_a_view_fit_its_schema(scene, url):
    schema = json.loads((ROOT / "docs" / "reference" / "view.schema.json").read_text())
    for node in NODES:
        report = report_of(url, node)
        jsonschema.validate(report.to_dict()["view"], schema)
        with Owner(url, read_only=True) as owner:
            again = type(report)(owner.report(node).to_dict())
        assert again.to_text() == type(report)(report.to_dict()).to_text()
        assert again.view.sums == report.view.sums


def test_the_schema_in_the_docs_is_that_of_the_code():
    written = json.loads((ROOT / "docs" / "reference" / "view.schema.json").read_text())
    assert written.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert written == _dedented(json.loads(json.dumps(msgspec.json.schema(View))))


def _dedented(schema):
    """The same, each description without the indentation of its docstring, which Python takes out from 3.13 on."""
    if isinstance(schema, list):
        return [_dedented(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: inspect.cleandoc(each) if name == "description" and isinstance(each, str) else _dedented(each)
        for name, each in schema.items()
    }


def test_a_report_read_from_its_json_renders_as_it_did(scene, url):
    report = report_of(url, "brief-4471")
    again = type(report)(json.loads(report.to_json()))
    assert (again.to_text(), again.to_html()) == (report.to_text(), report.to_html())


def test_text_fits_80_columns_and_breaks_no_word_that_fits_a_line(scene, url):
    for node in NODES:
        view, text = report_of(url, node).view, report_of(url, node).to_text()
        assert max(width_of(line) for line in text.splitlines()) <= WIDTH
        for row in view.refusals:
            short = [word for word in row.reason.split() if len(word) < 60]
            said = view.stopped is not None and view.stopped.reason and view.stopped.reason in row.reason
            assert said or set(short) <= set(text.split())


def test_what_it_says_first(scene, url):
    """Which limit, what stopped it, what is still out and until when; who cost most; why the last call was refused."""
    view = report_of(url, "brief-4471").view
    assert view.customer == "Hartmann & Vogel"
    assert (view.stopped.word, view.stopped.requested) == ("budget_exhausted", 9 * 10**9)
    assert [row.to for row in view.outstanding] == ["scans.example", "render"]
    assert view.outstanding[0].cancellable
    assert view.outstanding[0].path == "GET /big"
    assert [(row.rule, row.count) for row in view.refusals] == [("budget", 4)]
    assert (view.agents[0].name, view.agents[0].depth) == ("brief-4471", 0)
    assert [row.depth for row in view.agents] == [0, 1, 1]
    html = text_of(report_of(url, "brief-4471").to_html())
    assert "Its budget stopped it." in html
    assert "Budget: $9.00 did not fit" in html
    wallet = text_of(report_of(url, "wallet").to_html())
    assert re.search(r"Hartmann & Vogel cost most, \$\d", wallet)
    assert re.search(r"The last, by budget at .*: \$9.00 does not fit: session 'brief-4471' has \$\d", wallet)


# -- periods, days and windows ------------------------------------------------------------------------------------------


def at(books):
    return datetime.fromtimestamp(books.store.now_ms() / 1000, UTC)


def test_a_period_counts_what_was_captured_in_it_as_the_csv_does(books, url):
    guard = books.guard()
    begun, moments = at(books), []
    for day, amount in enumerate(("$0.10", "$0.20", "$0.40")):
        moments.append(at(books))
        with guard.budget(f"cus_{day % 2}", "$5.00").session("run", budget="$1.00") as session:
            session.charge("serp", amount)
        books.forward(DAY)
    for since, until, wanted in (
        (None, None, 700), (moments[1], None, 600), (None, moments[1], 100), (moments[1], moments[2], 200),
        (at(books), None, 0), (begun, at(books), 700),
    ):  # fmt: skip
        view = report_of(url, "wallet", since=since, until=until).view
        with Owner(url, read_only=True) as owner:
            captured = sum(row.nanos for row in owner.captures("wallet", since=since, until=until))
        assert view.sums.spent == captured == wanted * 10**6
        adds_up(view)
        assert (view.limit is None) is view.asked or view.kind == "wallet"
    view = report_of(url, "wallet").view
    assert [day.sums.spent for day in view.days] == [100 * 10**6, 200 * 10**6, 400 * 10**6]
    assert [(each.row.name, each.yesterday, each.today) for each in view.customers] == [
        ("cus_0", 0, 400 * 10**6), ("cus_1", 200 * 10**6, 0),
    ]  # fmt: skip
    assert "Yesterday (UTC), cus_1 cost most: $0.20." in text_of(report_of(url, "wallet").to_html())


def test_a_period_that_ends_before_it_begins_is_refused(scene, url):
    with pytest.raises(ConfigError, match="--until: it is not after --since"):
        _ = report_of(url, "wallet", since=at(scene), until=at(scene)).view


def test_a_daily_budget_adds_up_within_its_day_also_after_a_lapse_over_midnight(books, url):
    guard = books.guard()
    team = guard.budget("team", "$2.00", per="day", tz="Europe/Berlin")
    with team.session("s", budget="$2.00") as session:
        session.charge("serp", "$0.50")
        session.hold("render", up_to="$0.30").__enter__()
    books.forward(DAY)
    with team.session("s", budget="$1.00") as session:
        session.charge("serp", "$0.25")
    view = report_of(url, "budget:team").view
    assert (view.spent, view.left, view.spent_total) == (25 * 10**7, 175 * 10**7, 105 * 10**7)
    assert view.gap == 0
    assert view.tz == "Europe/Berlin"
    assert "of $2.00 today" in report_of(url, "budget:team").to_text()


def test_a_year_is_shown_by_months(books, url):
    guard = books.guard()
    for _ in range(5):
        with guard.session("s", budget="$1.00") as session:
            session.charge("serp", "$0.10")
        books.forward(40 * DAY)
    view = report_of(url, "wallet").view
    assert all(re.fullmatch(r"\d{4}-\d\d", day.name) for day in view.days)
    adds_up(view)


@pytest.mark.long
def test_many_calls_are_a_bounded_page_that_still_adds_up(books, url):
    guard = books.guard(policy=Policy(loop=None, spike=None))
    with guard.session("busy", budget="$500.00", id="busy") as session:
        for number in range(1_500):
            session.charge(f"tool-{number % 90}", f"$0.{number % 90 + 10:03d}")
    report = report_of(url, "busy")
    view = report.view
    adds_up(view)
    assert (view.calls_count, len(view.tools), view.tools[-1].name) == (1_500, 26, "and 65 more")
    assert len(view.calls) <= MOST_CALLS
    assert len(view.series) <= 601
    assert len(report.to_html()) < 600_000
    assert "1,500 calls" in text_of(report.to_html(csv="busy.csv"))
    assert "every one is in busy.csv" in text_of(report.to_html(csv="busy.csv"))


def test_without_any_call_there_is_a_page_too(books, url):
    with books.guard().session("quiet", budget="$1.00", id="quiet"):
        pass
    report = report_of(url, "quiet")
    adds_up(report.view)
    assert "Spent $0.00 of $1.00." in report.to_text()
    assert "Nothing was refused." in text_of(report.to_html())


def test_the_six_kinds_of_evidence_are_always_told_in_one_order():
    assert EVIDENCE == ("proven", "claimed", "stated", "priced", "assumed", "out")

"""The page of a report: whatever a seller or an agent has chosen is text in it, and nothing in it asks for anything."""

import base64
import hashlib
import re
import time
from html.parser import HTMLParser

import pytest

from tests.support.command_line import typed
from tests.support.delegations import world
from tests.support.merchant import make_guard
from tests.support.scenes import LONG, SCRIPT, busy
from x402guard import Owner, Policy
from x402guard.views.export import export
from x402guard.views.markup import address, el, foreign, written
from x402guard.views.words import explorer, printable, rounded, short, span

TRANSACTION = "0x" + "ab" * 32


@pytest.fixture(params=["wallet", "brief-4471"])
def page(request, url):
    with world(url) as books:
        busy(books.guard(), books.forward)
    with Owner(url, read_only=True) as owner:
        return owner.report(request.param).to_html()


class Parts(HTMLParser):
    """Every element of a page with its attributes, and the text of its scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.raw, self.text, self._inside = [], {}, [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside in ("script", "style"):
            self.raw[self._inside] = self.raw.get(self._inside, "") + data
        else:
            self.text.append(data)


def test_only_its_own_style_and_script_are_let_in_by_their_hashes(page):
    parts = Parts(page)
    [policy] = [a["content"] for _, a in parts.elements if a.get("http-equiv") == "Content-Security-Policy"]
    hashes = {
        name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in parts.raw.items()
    }
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_nothing_is_asked_for_and_no_attribute_is_style_or_script(page):
    parts = Parts(page)
    for tag, attributes in parts.elements:
        assert tag not in ("img", "iframe", "object", "embed", "link", "base", "form", "use", "image", "foreignObject")
        assert not [
            name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset", "xlink:href")
        ]
        target = attributes.get("href", "#")
        assert target.startswith(("#", "https://sepolia.basescan.org/tx/0x"))
    assert sum(tag == "script" for tag, _ in parts.elements) == 1
    assert "url(" not in parts.raw["style"].replace("url(#h-", "")
    assert "@import" not in parts.raw["style"]


def test_what_others_have_chosen_is_text(page):
    parts = Parts(page)
    text = "".join(parts.text)
    assert SCRIPT in text
    assert SCRIPT not in page
    assert "مترجم" in text
    assert LONG in text
    assert not [char for char in page if not char.isprintable() and char not in "\n\xa0"]
    assert not re.search(r"secret-\d|veiled|\?key=|token=", page)


def test_a_transaction_is_a_link_only_if_it_is_one(page, url):
    links = [a["href"] for tag, a in Parts(page).elements if tag == "a" and a["href"].startswith("https")]
    assert set(links) == {f"https://sepolia.basescan.org/tx/{TRANSACTION}"}
    assert "javascript:" not in page.replace(">javascript:", ">").replace('title="javascript:', 'title="')
    with Owner(url, read_only=True) as owner:
        local = owner.report("brief-4471").to_html(links=False)
    assert "basescan" not in local
    assert "no block explorer knows a local chain" in local


@pytest.mark.parametrize(
    ("network", "transaction", "link"),
    [
        ("eip155:8453", TRANSACTION, f"https://basescan.org/tx/{TRANSACTION}"),
        ("eip155:8453", TRANSACTION + "0", None),
        ("eip155:8453", "0x" + "zz" * 32, None),
        ("eip155:8453", "javascript:alert(1)", None),
        ("eip155:999999", TRANSACTION, None),
        ("https://evil.example", TRANSACTION, None),
        ("eip155:8453", "0x" + "١" * 64, None),
        ("eip155:8453", "", None),
    ],
)
def test_explorers_are_our_own_list(network, transaction, link):
    assert explorer(network, transaction) == link


def test_the_words_of_others_stand_alone_without_control_and_direction_characters():
    assert written(foreign("a\u202eb\x1b<i>")) == "<bdi>a�b�&lt;i&gt;</bdi>"
    assert 'title="0x�' in written(address("0x\u202e" + "1" * 20))


def test_an_element_escapes_text_and_attributes():
    made = written(el("b", "a < b & ", el("i", "</i>"), "c", title="\"'><script>", hidden=True, lang=None, class_="x"))
    assert made == ('<b title="&quot;\'&gt;<script&gt;" hidden="" class="x">a &lt; b &amp; <i>&lt;/i&gt;</i>c</b>')
    [(tag, attributes), _] = Parts(made).elements
    assert (tag, attributes["title"]) == ("b", "\"'><script>")


@pytest.mark.parametrize(
    ("nanos", "shown"),
    [(0, "$0.00"), (1, "$0.000000001"), (356_000_000, "$0.356"), (4_999_999, "$0.004999999"), (5_000_000, "$0.005"),
     (1_383_652_500, "$1.38"), (1_385_000_000, "$1.385"), (1_385_000_001, "$1.39"), (-20_000_000, "-$0.02"),
     (12_345_678_912_000, "$12,345.68")],
)  # fmt: skip
def test_a_headline_rounds_half_up_and_never_to_zero(nanos, shown):
    assert rounded(nanos) == shown


def test_spans_and_short_addresses():
    assert [span(ms) for ms in (0, 51_400, 282_000, 11_100_000, 1_036_800_000)] == [
        "0 s", "51 s", "4 min 42 s", "3 h 5 min", "12 days",
    ]  # fmt: skip
    assert short("0x2322AeFCfC3f306889BD5Cc5bdB4adEe740c1088") == "0x2322…1088"
    assert printable("a\u202eb\x1b[0m\ud800") == "a�b�[0m�"


# -- the command --------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_replaces_no_file_that_is_none(url, tmp_path):
    with world(url) as books:
        busy(books.guard(), books.forward)
    done = typed("report", "brief-4471", "--html", "out.html", "--ledger", url, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"written: out\.html \(\d+ kB\)\n", done.stdout)
    assert "<title>brief-4471: Spent $" in (tmp_path / "out.html").read_text()
    assert typed("report", "brief-4471", "--html", "out.html", "--ledger", url, cwd=tmp_path).returncode == 0
    wrong = typed("report", "brief-4471", "--html", "spend.db", "--ledger", url, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--html: spend.db is there and is no report; name another file" in wrong.stderr
    assert (tmp_path / "spend.db").read_bytes().startswith(b"SQLite format 3")
    nowhere = typed("report", "brief-4471", "--html", "no/out.html", "--ledger", url, cwd=tmp_path)
    assert "--html: no/out.html cannot be written: No such file or directory" in nowhere.stderr


@pytest.mark.long
def test_a_page_with_many_calls_has_a_csv_beside_it(url, tmp_path):
    with world(url) as books, books.guard().session("busy", budget="$100.00", id="busy") as session:
        for number in range(620):
            session.charge(f"tool-{number}", "$0.01")
    done = typed("report", "busy", "--html", "out.html", "--ledger", url, cwd=tmp_path)
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["out.html", "out.csv"]
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 621
    assert "every one is in out.csv" in (tmp_path / "out.html").read_text()
    (tmp_path / "out.csv").write_text("my own table")
    again = typed("report", "busy", "--html", "out.html", "--ledger", url, cwd=tmp_path)
    assert "--html: out.csv is there and is no report" in again.stderr


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_session_of_100_000_rows_is_a_small_page_soon():
    """The page aggregates them, and the CSV beside it has every one. Time of this process: other work does not count."""
    policy = Policy(breaker=None, loop=None, velocity=None, spike=None)
    with make_guard(policy=policy) as guard, guard.session("run", budget="$5000") as session:
        for number in range(50_000):  # a hold and a capture each
            session.charge(f"tool{number % 200}", "$0.01")
        begun = time.process_time()
        report = session.report()
        html = report.to_html(csv="run.csv")
        drawn = time.process_time()
        lines = "".join(export(report.captures(), "csv")).count("\r\n")
        written = time.process_time()
    assert (lines, len(html) < 2_000_000) == (50_001, True)
    assert drawn - begun < 2, drawn - begun
    assert written - drawn < 2, written - drawn

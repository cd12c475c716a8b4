"""What is under way now: every figure is the ledger's, at one moment, for the page and for a terminal."""

import re
import threading
import time
from contextlib import ExitStack

import pytest

from tests.support.command_line import typed
from tests.support.delegations import world
from tests.support.merchant import Shop, accept, client, make_guard, required
from tests.support.scenes import SCRIPT, busy, refused
from x402guard import Approvals, LedgerUnavailable, Owner, Policy
from x402guard.ledger.owner import trip_node
from x402guard.ledger.questions import approval_mark, give_answer
from x402guard.ledger.view import Scope
from x402guard.views import live as live_view
from x402guard.views.live import STATES, chosen, live_of, totals_of
from x402guard.views.live_page import SHOWN, Choice, live_page, sections
from x402guard.views.screen import screen
from x402guard.views.text import width_of


@pytest.fixture(params=["memory", "sqlite"])
def guard(request, url):
    policy = Policy(
        loop=None, spike=None, breaker=None, velocity=None, approvals=Approvals(above="$0.50", timeout_s=60)
    )
    with make_guard("memory://" if request.param == "memory" else url, policy=policy, approver="queue") as made:
        yield made


def live(guard):
    return live_of(guard.shell.store)


def by_name(view, name):
    return next(session for session in view.sessions if session.name == name)


def test_the_sums_of_all_sessions_are_the_wallets(guard):
    busy(guard)
    with guard.session("open", budget="$4.00") as session, session.child("reader", budget="$1.00") as reader:
        reader.charge("serp", "$0.30")
        held = reader.hold("render", up_to="$0.20")
        held.__enter__()
        view = live(guard)
        assert sum(each.spent for each in view.sessions) == view.spent
        assert sum(each.out for each in view.sessions) == view.out == sum(row.amount for row in view.outstanding)
        shown = by_name(view, "open")
        assert (shown.spent, shown.out, shown.left) == (3 * 10**8, 2 * 10**8, 35 * 10**8)
        assert (shown.allocated, shown.agents, shown.state) == (5 * 10**8, ("reader",), "open")
        assert {each.name: each.spent for each in view.customers}["Kestrel"] == 2 * 10**8
        assert by_name(view, "brief-4471").state == "closed"
        held.__exit__(None, None, None)


def test_sessions_that_ask_come_first_then_stopped_ones_then_those_with_least_left(guard):
    def buy(session):
        shop = Shop(lambda request: required(accept(600_000), url=str(request.url)))
        refused(client(session, shop).get, "https://courts.example/bulk?key=1")

    with ExitStack() as opened:
        opened.enter_context(guard.session("rich", budget="$9.00")).charge("serp", "$0.10")
        opened.enter_context(guard.session("poor", budget="$1.00")).charge("serp", "$0.45")
        opened.enter_context(guard.session("stopped", budget="$9.00")).trip("it looks wrong")
        asks = opened.enter_context(guard.session("asks", budget="$9.00"))
        buyer = threading.Thread(target=buy, args=(asks,))
        buyer.start()
        until = time.monotonic() + 10
        while not live(guard).asks and time.monotonic() < until:
            time.sleep(0.01)
        view = live(guard)
        assert [each.name for each in view.sessions] == ["asks", "stopped", "poor", "rich"]
        assert view.counts() == {"asks": 1, "stopped": 1, "open": 2, "closed": 0}
        [ask] = view.asks
        assert ("courts.example/bulk" in ask.what, ask.session, ask.left) == (True, "asks", 9 * 10**9)
        assert (by_name(view, "stopped").word, by_name(view, "stopped").reason) == ("kill_switch", "it looks wrong")
        page = live_page(view, Choice(is_owner=True))
        assert 'data-answer="allow"' in page
        assert "with the query" in page
        plain = live_page(view, Choice())
        assert 'id="stop"' in plain  # hidden, until the server says that who looks is the owner
        assert "data-answer" not in plain
        assert "key=1" not in plain
        assert 'data-key="' not in plain
        assert f"x402guard approvals allow {ask.id}" in plain
        store = guard.shell.store
        [key] = store.marks("approval", "")
        scope = Scope(marks=(approval_mark(key),), durable=True)
        store.transact(scope, lambda view: give_answer(view, key, "ada", allow=False, shown=ask.id))
    buyer.join()


@pytest.mark.parametrize("which", ["wallet", "budget:Casa"])
def test_what_is_stopped_above_a_session_is_stopped_there(guard, which):
    casa = guard.budget("Casa", "$5.00")
    with casa.session("run", budget="$2.00") as session:
        session.charge("serp", "$0.10")
        assert live(guard).allocated == 19 * 10**8
        scope = Scope(nodes=(which,), durable=True)
        guard.shell.store.transact(scope, lambda view: trip_node(view, which, "stolen key?"))
        view = live(guard)
    shown = by_name(view, "run")
    assert (shown.state, shown.reason, shown.word, shown.allocated) == ("stopped", "stolen key?", "kill_switch", 0)
    assert (view.counts()["stopped"], view.allocated) == (1, 0)
    page = live_page(view, Choice())
    assert "stolen key?" in page
    assert [line.words for line in view.lines if line.kind == "stopped"] == ["stolen key?"]
    assert (view.stopped is not None, view.customers[0].stopped is not None) == (which == "wallet", which != "wallet")


def test_what_has_ended_stopped_does_not_stand_before_what_is_open(guard):
    for number in range(3):
        with guard.session(f"ended-{number}", budget="$1.00") as session:
            session.trip("enough")
    with guard.session("alive", budget="$1.00"):
        view = live(guard)
        assert [each.name for each in chosen(view.sessions)] == ["alive"]
        assert view.counts() == {"asks": 0, "stopped": 0, "open": 1, "closed": 3}
        assert by_name(view, "ended-0").word == "kill_switch"


def test_what_is_allocated_is_no_more_than_the_customer_has_left(guard):
    casa = guard.budget("Casa", "$5.00")
    with ExitStack() as opened:
        for number in range(3):
            opened.enter_context(casa.session(f"s-{number}", budget="$10.00"))
        opened.enter_context(guard.session("other", budget="$1.00"))
        assert live(guard).allocated == 6 * 10**9


def test_a_session_with_many_agents_is_found_by_each(guard):
    with guard.session("run", budget="$9.00") as session, ExitStack() as opened:
        inner = session
        for number in range(9):
            inner = opened.enter_context(inner.child(f"a{number}", budget="$1.00"))
        view = live(guard)
    assert [each.name for each in chosen(view.sessions, agent="a8")] == ["run"]
    assert [each.name for each in chosen(view.sessions, find="a8")] == ["run"]
    assert "a5 and 3 more" in live_page(view, Choice())


def test_a_ledger_that_is_opened_for_writing_while_it_is_read_is_looked_at_again(url):
    with make_guard(url) as guard, guard.session("run", budget="$1.00") as session:
        session.charge("serp", "$0.10")
    with Owner(url, read_only=True) as owner:
        with pytest.raises(LedgerUnavailable, match="look again"), owner._store.at_one_moment() as ledger:
            ledger.nodes()
            with make_guard(url) as guard, guard.session("other", budget="$1.00") as session:
                session.charge("serp", "$0.10")
            ledger.nodes()
        assert owner.live().spent == 2 * 10**8


def test_what_has_happened_is_told_last_first(guard):
    with guard.session("run", budget="$1.00") as session:
        session.charge("serp", "$0.10")
        client(session, Shop()).get("https://courts.example/1?key=1")
        session.record_usage("openai", "gpt-4o-mini", {"input_tokens": 10, "output_tokens": 1})
        refused(session.charge, "maps", "$5.00")
        session.trip("enough")
        lines = live(guard).lines
    assert [(line.kind, line.to) for line in lines if line.kind != "stopped"] == [
        ("refused", "budget"), ("stated", "gpt-4o-mini"), ("claimed", "courts.example"), ("priced", "serp"),
    ] or {line.kind for line in lines} == {"refused", "stated", "claimed", "priced", "stopped"}  # fmt: skip
    assert [line.words for line in lines if line.kind == "stopped"] == ["enough"]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [({}, {"a", "b", "c"}), ({"find": "READ"}, {"a"}), ({"find": "d"}, {"a", "d"}), ({"state": "closed"}, {"d"}),
     ({"customer": "Casa"}, {"b"}), ({"agent": "reader"}, {"a"}), ({"find": "nothing like it"}, set())],
)  # fmt: skip
def test_sessions_are_found_by_text_customer_agent_and_state(guard, wanted, names):
    with guard.session("d", budget="$1.00", id="ended"):
        pass
    with (
        guard.session("a", budget="$1.00", id="one") as one,
        one.child("reader", budget="$0.50"),
        guard.budget("Casa", "$5.00").session("b", budget="$1.00", id="two"),
        guard.session("c", budget="$1.00", id="three"),
    ):
        found = chosen(live(guard).sessions, **wanted)
    assert {session.name for session in found} == names


def test_a_section_changes_only_if_its_figures_do(guard):
    with guard.session("run", budget="$1.00") as session:
        session.charge("serp", "$0.10")
        first = sections(live(guard), Choice())
        again = sections(live(guard), Choice())
        session.charge("serp", "$0.10")
        third = sections(live(guard), Choice())
    assert first == again
    assert {"now", "sessions", "lines"} <= {name for name in first if third[name] != first[name]}
    assert {"now", "asks", "sessions", "customers", "out", "lines"} < set(first)


def test_an_empty_ledger_and_one_without_limits_are_shown(guard):
    page = live_page(live(guard), Choice())
    assert "There is none yet." in page
    assert "Nothing is out." in page
    assert "\n".join(screen(live(guard), 80, 24)).count("none") == 1


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (132, 50), (200, 80), (10, 3)])
def test_a_screen_is_as_wide_and_as_high_as_the_terminal(guard, size):
    busy(guard)
    with guard.session(SCRIPT, budget="$1.00"), guard.session("w" * 60, budget="$1.00"):
        lines = screen(live(guard), *size)
    assert {width_of(line) for line in lines} == {max(60, size[0])}
    assert len(lines) <= max(16, size[1])
    assert all(char.isprintable() for line in lines for char in line)


def test_watch_prints_one_screen_into_a_pipe(url, tmp_path):
    with world(url) as books:
        busy(books.guard(), books.forward)
        with books.guard().session("open", budget="$1.00") as session:
            session.charge("serp", "$0.10")
            done = typed("watch", "--once", "--ledger", url, cwd=tmp_path)
            assert (done.returncode, done.stderr) == (0, "")
            assert re.search(r"│   open .*\$0\.90 +\$1\.00 │", done.stdout)
            assert "x402guard watch" in done.stdout.splitlines()[0]
            as_json = typed("watch", "--json", "--ledger", url, cwd=tmp_path)
            assert '"spent": ' in as_json.stdout
    wrong = typed("watch", "--state", "odd", "--ledger", url, cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--state: 'odd' is not one of 'asks', 'stopped', 'open', 'closed'" in wrong.stderr


def test_many_sessions_are_a_page_of_a_hundred(url):
    with make_guard(url) as guard, ExitStack() as opened:
        for number in range(300):
            opened.enter_context(guard.session(f"s-{number}", budget="$1.00"))
        view = live(guard)
    page = live_page(view, Choice())
    assert (len(view.sessions), page.count('<tr><td class="what">')) == (300, SHOWN)
    assert "300 of 300 sessions; 300 open" in page
    assert f"The first {SHOWN} are shown" in page
    assert "s-299" in live_page(view, Choice(find="s-299"))


@pytest.fixture
def few(monkeypatch):
    """As if a view had the three newest budgets beside those that have not ended."""
    monkeypatch.setattr(live_view, "_NEWEST", 3)


def test_those_that_have_ended_are_counted_and_the_newest_and_the_ones_that_are_looked_for_are_listed(guard, few):
    budget = guard.budget("Kestrel", "$9.00")
    for number in range(10):
        with (budget if number < 5 else guard).session(f"over{number}", budget="$0.50") as session:
            session.charge("serp", "$0.01")
    with guard.session("open", budget="$0.50"):
        view = live(guard)
        assert sorted(each.name for each in view.sessions) == ["open", "over8", "over9"]
        assert (view.ever, view.counts()) == (11, {"asks": 0, "stopped": 0, "open": 1, "closed": 10})
        assert totals_of(guard.shell.store).counts == view.counts()
        for find, customer, names in (
            ("OVER2", "", {"over2"}),
            ("kestrel", "", {"over2", "over3", "over4"}),
            ("", "Kestrel", {"over2", "over3", "over4"}),
            ("over%", "", set()),
            ("nobody", "", set()),
        ):
            found = live_of(guard.shell.store, find=find or customer)
            shown = chosen(found.sessions, find=find, customer=customer, state="closed" if customer else "")
            assert {each.name for each in shown} == names, (find, customer)
            assert found.ever == 11


def test_a_hold_and_a_refusal_of_a_session_that_has_ended_have_its_name(guard, few):
    with guard.session("first", budget="$0.50") as session:
        refused(session.charge, "serp", "$0.60")
        hold = session.hold("render", up_to="$0.20")
        hold.__enter__()
    for number in range(4):
        guard.session(f"later{number}", budget="$0.10").close()
    view = live(guard)
    assert [row.session for row in view.outstanding] == ["first"]
    assert [line.session for line in view.lines if line.kind == "refused"] == ["first"]
    assert totals_of(guard.shell.store).outstanding == 1
    hold.__exit__(None, None, None)


def test_the_states_are_told_in_the_order_of_urgency():
    assert STATES == ("asks", "stopped", "open", "closed")

"""People are told before a budget is gone: once for each part of it, by log, function and report."""

import asyncio
import logging
import threading
from decimal import Decimal

import httpx
import pytest

from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import URL, Shop, accept, async_client, client, make_guard, required
from x402guard import (
    Guard,
    Notice,
    Policy,
    SettlementUncertain,
    TokenBudget,
)
from x402guard.ledger.owner import owner_mark, set_limit
from x402guard.ledger.view import Scope
from x402guard.money import dollars_to_nanos
from x402guard.stores import open_store

SOFT = ("soft_limit", "tokens_soft_limit")
pytestmark = pytest.mark.usefixtures("inline_notices")
QUIET = Policy(loop=None, breaker=None)


class Told(list):
    """A function for ``on_notice`` that keeps soft limits; ``percents`` of what it was told, of one budget or of all."""

    def __call__(self, notice):
        assert isinstance(notice, Notice)
        if notice.kind in SOFT:
            self.append(notice)

    def percents(self, name=None):
        return [n.facts["percent"] for n in self if n.kind in SOFT and name in (None, n.facts["name"])]


@pytest.fixture
def told():
    return Told()


def events(session):
    return [event for event in session.report().to_dict()["events"] if event["event"] in SOFT]


def spend_cents(session, *amounts):
    for cents in amounts:
        session.charge("serp", f"$0.{cents:02d}")


def test_each_part_is_told_once_in_the_log_to_the_function_and_in_the_report(ledger_url, told, caplog):
    with make_guard(ledger_url, on_notice=told, policy=QUIET) as guard, guard.session("run", budget="$1.00") as session:
        seen = []
        for _ in range(20):
            spend_cents(session, 5)
            seen.append(len(told))
        assert seen == [0] * 9 + [1] * 6 + [2] * 2 + [3] * 3
        assert told.percents() == [50, 80, 90]
        assert [event["percent"] for event in events(session)] == [50, 80, 90]
    first = told[0]
    assert (first.kind, first.severity, first.session) == ("soft_limit", "warning", session.id)
    assert (first.amount, first.limit) == (Decimal("0.50"), Decimal("1.00"))
    assert (first.facts["name"], first.facts["spent"], first.facts["budget"]) == ("run", "0.50", "1.00")
    logged = [r for r in caplog.records if r.name == "x402guard" and r.event in SOFT]
    assert {r.levelno for r in logged} == {logging.WARNING}
    assert [r.message for r in logged] == [notice.message for notice in told]
    assert logged[0].message == "session 'run' has spent $0.50 of $1.00, over 50 %"


def test_one_step_past_all_three_tells_of_each(ledger_url, told):
    with make_guard(ledger_url, on_notice=told, policy=QUIET) as guard, guard.session("run", budget="$1.00") as session:
        spend_cents(session, 95)
    assert sorted(told.percents()) == [50, 80, 90]


@pytest.mark.parametrize(
    ("soft", "percents"),
    [
        (0.9, [90]), ("0.25", [25]), (Decimal("0.5"), [50]), ((0.8, 0.2, 0.8), [20, 80]), (0.125, [12.5]), ([], []),
        (0.000001, [0.0001]), (0.999999, [99.9999]), (None, [50, 80, 90]),
    ],
)  # fmt: skip
def test_a_session_names_its_own_parts(ledger_url, told, soft, percents):
    with make_guard(ledger_url, on_notice=told, policy=QUIET) as guard:
        with guard.session("run", budget="$1.00", soft_limit=soft) as session:
            spend_cents(session, *[1] * 99)
            session.charge("serp", "$0.01")
    assert told.percents() == percents


@pytest.mark.parametrize(("soft", "percents"), [((), []), (0.3, [30]), ((0.1, 0.2), [10, 20])])
def test_the_policy_names_the_parts_of_every_budget(ledger_url, told, soft, percents):
    policy = Policy(soft_limits=soft)
    with make_guard(ledger_url, on_notice=told, policy=policy, budget="$2.00") as guard:
        customer = guard.budget("c", "$2.00")
        with customer.session("run", budget="$2.00") as session, session.child("k", budget="$2.00") as child:
            spend_cents(child, *[5] * 36)
    for name in ("wallet", "c", "run", "k"):
        assert told.percents(name) == percents


def test_what_counts_is_what_was_captured_and_not_what_is_held(ledger_url, told):
    shop = Shop(required(accept(500_000)), paid=httpx.ReadError("reset"))
    with make_guard(ledger_url, on_notice=told, policy=QUIET) as guard, guard.session("run", budget="$1.00") as session:
        with session.hold("render", up_to="$0.45") as job:
            with pytest.raises(SettlementUncertain):
                client(session, shop).get(URL)
            assert (session.held, told) == (Decimal("0.95"), [])
            job.capture("$0.01")
        assert told == []


def test_a_bill_of_a_provider_tells(ledger_url, told):
    answer = httpx.Response(200, json=completion())  # 20 tokens at $2.50 and 5 at $10 a million: $0.0001
    with (
        make_guard(ledger_url, on_notice=told, policy=QUIET) as guard,
        guard.session("run", budget="$0.00018") as session,
    ):
        client(session, lambda _: answer).post(CHAT, json=ask(max_completion_tokens=6))
        assert (session.spent, told.percents()) == (Decimal("0.0001"), [50])


def test_a_payment_in_a_task_tells_when_its_time_is_over(ledger_url, told):
    clock = Clock()
    store, shop = (
        open_store(ledger_url, clock_ms=clock),
        Shop(paid=lambda _request, _shop: httpx.Response(200, json={})),
    )
    with make_guard(store, on_notice=told, policy=QUIET) as guard, guard.session("run", budget="$0.02") as session:

        async def buy(number):
            async with async_client(session, shop) as http:
                return (await http.get(f"{URL}/{number}")).status_code

        assert asyncio.run(buy(1)) == 200
        assert (session.held, told) == (Decimal("0.01"), [])
        clock.tick(600)  # no chain can tell: it counts
        assert asyncio.run(buy(2)) == 200
        assert (session.spent, told.percents()) == (Decimal("0.01"), [50])
    store.close()


def test_many_threads_and_two_guards_are_told_once(tmp_path):
    url, told = f"sqlite:///{tmp_path / 'l.db'}", Told()
    with make_guard(url, on_notice=told, policy=QUIET) as one, make_guard(url, on_notice=told, policy=QUIET) as other:
        sessions = [one.session("run", budget="$1.00", id="run"), other.session("run", id="run")]
        gate = threading.Barrier(8)

        def spend(number):
            gate.wait(30)
            spend_cents(sessions[number % 2], *[1] * 12)

        threads = [threading.Thread(target=spend, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(told.percents()) == [50, 80, 90]


def test_a_restart_tells_nothing_again(tmp_path):
    url, told = f"sqlite:///{tmp_path / 'l.db'}", Told()
    for _ in range(3):
        with (
            make_guard(url, on_notice=told, policy=QUIET) as guard,
            guard.session("run", budget="$1.00", id="run") as session,
        ):
            spend_cents(session, 20)
    assert told.percents() == [50]


def test_a_new_day_tells_anew(ledger_url, told):
    clock = Clock()
    store = open_store(ledger_url, clock_ms=clock)
    with make_guard(store, on_notice=told, policy=QUIET) as guard:
        session = guard.budget("c", "$1.00", per="day").session("run", budget="$100")
        for _ in range(2):
            spend_cents(session, 60, 25)
            clock.tick(86_400)
    assert told.percents("c") == [50, 80, 50, 80]
    store.close()


def test_a_limit_that_was_raised_tells_of_its_own_parts(ledger_url, told):
    with (
        make_guard(ledger_url, on_notice=told, policy=QUIET) as guard,
        guard.session("run", budget="$1.00", id="run") as session,
    ):
        spend_cents(session, 95)
        told.clear()
        scope = Scope(nodes=("run",), marks=(owner_mark("run"),), durable=True)
        ten = dollars_to_nanos("$10")
        guard.shell.store.transact(scope, lambda view: set_limit(view, "run", ten, "me"))
        for _ in range(9):
            session.charge("serp", "$1.00")
    assert told.percents() == [50, 80, 90]


def test_tokens_that_a_session_was_given_tell_and_others_do_not(ledger_url, told):
    with make_guard(ledger_url, on_notice=told, policy=QUIET) as guard:
        with guard.session("run", budget="$1.00", tokens=1_000) as session:
            for _ in range(20):
                session.tokens.record_usage(50)
        with guard.session("free", budget="$1.00") as other:
            other.tokens.record_usage(100_000)
        assert [event["percent"] for event in events(session)] == [50, 80, 90]
    assert [(n.kind, n.facts["percent"]) for n in told] == [("tokens_soft_limit", p) for p in (50, 80, 90)]
    assert (told[0].facts["used_tokens"], told[0].facts["soft_tokens"], told[0].session) == (500, 500, session.id)


@pytest.mark.parametrize("error", [ValueError("boom"), KeyError("name"), RecursionError()])
def test_a_function_that_fails_is_logged_and_felt_by_no_payment(ledger_url, caplog, error):
    def fails(_notice):
        raise error

    with make_guard(ledger_url, on_notice=fails) as guard, guard.session("run", budget="$0.02") as session:
        assert client(session, Shop()).get(URL).status_code == 200
        session.charge("serp", "$0.01")
        assert session.spent + session.held == Decimal("0.02")
    assert "on_notice failed" in caplog.text


def test_a_function_may_look_at_the_books_and_spend_itself(ledger_url):
    seen = []

    def looks(notice):
        if notice.kind not in SOFT:
            return
        seen.append((notice.facts["percent"], session.remaining, session.report().to_dict()["spent"]))
        session.charge("mail", "$0.01")

    with make_guard(ledger_url, on_notice=looks) as guard, guard.session("run", budget="$1.00") as session:
        spend_cents(session, 50, 1, 30)
    assert [percent for percent, _, _ in seen] == [50, 80]
    assert seen[0] == (50, Decimal("0.50"), "0.50")


@pytest.fixture
def session(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:
        yield session


def test_a_soft_limit_crossed_by_a_lapse_is_said(caplog):
    clock = Clock()
    store = open_store("memory://", clock_ms=clock)
    with Guard(ledger=store) as guard, guard.session("s", budget="$1", tokens=TokenBudget(1_000, soft=500)) as session:
        session.tokens.allocate(600)
        clock.tick(901)
        with caplog.at_level(logging.WARNING, "x402guard"):
            session.tokens.allocate(1)
        assert [record.getMessage() for record in caplog.records] == [
            "tokens: 600 of 1,000 are used in 's'; the soft limit is 500"
        ]

"""Budgets with a name: parents of many sessions, by the day; what nests in them; and a clock that jumps."""

import threading
from contextlib import ExitStack
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.ledger import START_MS, Clock
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from x402guard import BudgetExhausted, ConfigError, PolicyDenied, SessionClosed, SessionTripped, SettlementUncertain
from x402guard.ledger.owner import owner_mark, reset_node, set_limit
from x402guard.ledger.view import Scope
from x402guard.money import dollars_to_nanos
from x402guard.stores import open_store

DAY_S = 86_400
MIDNIGHT = START_MS // 86_400_000 * 86_400_000 + 86_400_000  # UTC
BEFORE = MIDNIGHT - 60_000


@pytest.fixture
def opened(ledger_url):
    """Opens guards on one ledger, on one clock that can be turned and one that nobody turns."""
    clock, steady = Clock(BEFORE), Clock(0)
    with ExitStack() as stack:
        first = open_store(ledger_url, clock_ms=clock)
        stack.callback(first.close)

        def make(*, again=False, watched=False, **more):
            store = first
            if again or watched:
                store = open_store(ledger_url, clock_ms=clock, steady_ms=steady if watched else None)
                stack.callback(store.close)
            return stack.enter_context(make_guard(store, **more))

        make.clock, make.steady = clock, steady
        yield make


def owner(guard, change, node_id):
    scope = Scope(nodes=(node_id,), marks=(owner_mark(node_id),), durable=True)
    return guard.shell.store.transact(scope, lambda view: change(view, node_id))


def raised(guard, node_id, amount):
    owner(guard, lambda view, node: set_limit(view, node, dollars_to_nanos(amount), "me"), node_id)


def test_one_budget_is_the_parent_of_many_sessions_and_guards(opened):
    one, other = opened(), opened()
    with one.budget("customer-7", "$2.00").session("a", budget="$5.00") as first:
        first.charge("serp", "$1.50")
    with other.budget("customer-7").session("b", budget="$5.00") as second:
        assert (second.remaining, second.limit) == (Decimal("0.50"), Decimal("5.00"))
        with pytest.raises(BudgetExhausted, match=r"budget .customer-7. has \$0.50 left of \$2.00") as refused:
            second.charge("serp", "$0.51")
        assert refused.value.available == Decimal("0.50")
        second.charge("serp", "$0.50")
    assert (one.budget("customer-7").spent, one.budget("customer-7").remaining) == (Decimal("2.00"), Decimal(0))
    one.session("unrelated", budget="$5.00").charge("serp", "$5.00")


def test_a_payment_an_llm_call_and_a_tool_come_out_of_it_and_it_begins_anew(opened):
    guard = opened()
    customer = guard.budget("customer-7", "$0.10", per="day")
    with customer.session("s", budget="$5.00") as session:
        client(session, Shop()).get(URL)
        client(session, lambda _: httpx.Response(200, json=completion())).post(CHAT, json=ask())
        session.charge("serp", "$0.0899")
        assert (customer.spent, customer.remaining) == (Decimal("0.10"), 0)
        with pytest.raises(BudgetExhausted, match=r"\$0.10 a day"):
            client(session, Shop()).get(f"{URL}/2")
        opened.clock.tick(60)
        assert (customer.spent, customer.remaining) == (0, Decimal("0.10"))
        client(session, Shop()).get(f"{URL}/2")
        assert session.spent == Decimal("0.11")


def test_a_payment_that_is_out_at_midnight_counts_on_both_days_and_once_when_it_closes(opened):
    guard, seen = opened(), []
    customer = guard.budget("customer-7", "$0.10", per="day")

    def at_midnight(_request, _shop):
        opened.clock.tick(120)
        seen.append((customer.held, customer.spent, customer.remaining))
        return httpx.Response(200, json={})

    with customer.session("s", budget="$5.00") as session:
        session.charge("serp", "$0.08")
        client(session, Shop(required(accept(20_000)), paid=at_midnight)).get(URL)
        assert seen == [(Decimal("0.02"), 0, Decimal("0.08"))]
        with pytest.raises(BudgetExhausted):
            session.charge("serp", "$0.09")
        session.charge("serp", "$0.08")
        assert (customer.spent + customer.held, customer.remaining) == (Decimal("0.10"), 0)


def test_it_begins_by_the_calendar_of_its_zone(opened):
    opened.clock.now_ms = MIDNIGHT - 3_601_000  # 23:59:59 in Berlin
    guard = opened()
    berlin = guard.budget("berlin", "$1.00", per="day", tz="Europe/Berlin")
    utc = guard.budget("utc", "$1.00", per="day")
    for customer in (berlin, utc):
        customer.session("s", budget="$1.00", id=f"for-{customer.name}").charge("serp", "$0.40")
    opened.clock.tick(1)
    assert (berlin.remaining, utc.remaining) == (Decimal("1.00"), Decimal("0.60"))


def test_a_month_around_a_day_around_sessions(opened):
    guard = opened()
    team = guard.budget("team", "$3.00", per="month")
    customer = team.budget("customer-7", "$2.00", per="day")
    session = customer.session("s", budget="$50")
    session.charge("serp", "$2.00")
    opened.clock.tick(60)
    assert (customer.remaining, team.remaining) == (Decimal("1.00"), Decimal("1.00"))
    with pytest.raises(BudgetExhausted, match=r"budget 'team' has \$1.00 left of \$3.00 a month"):
        session.charge("serp", "$1.01")
    session.charge("serp", "$1.00")


def test_after_a_restart_it_stands_where_it_stood(tmp_path):
    url, clock = f"sqlite:///{tmp_path / 'l.db'}", Clock(BEFORE)
    for left in ("2.00", "1.50", "1.00"):
        store = open_store(url, clock_ms=clock)
        with make_guard(store) as guard:
            customer = guard.budget("customer-7", "$2.00", per="day", tz="Europe/Berlin")
            assert customer.remaining == Decimal(left)
            customer.session("s", budget="$5.00").charge("serp", "$0.50")
        store.close()
    store = open_store(url, clock_ms=clock)
    with make_guard(store) as guard:
        clock.tick(DAY_S)
        assert guard.budget("customer-7").remaining == Decimal("2.00")
    store.close()


# ---- who may change what ----


def test_it_is_lowered_and_never_raised_and_keeps_its_window(opened):
    guard = opened()
    guard.budget("c", "$2.00", per="day")
    with pytest.raises(ConfigError, match="can be lowered and never raised"):
        guard.budget("c", "$2.01", per="day")
    with pytest.raises(
        ConfigError, match=r"limit: budget 'c' .* the owner raises it: x402guard budget set budget:c 2\.01$"
    ):
        guard.budget("c", "$2.01", per="day")
    for limit in (None, "$2.00"):
        with pytest.raises(ConfigError, match="tz: 'Europe/Berlin' goes with per"):
            guard.budget("c", limit, tz="Europe/Berlin")
    for more in ({}, {"per": "week"}, {"per": "day", "tz": "Europe/Berlin"}):
        with pytest.raises(ConfigError, match="per: budget 'c' has the window day in UTC"):
            guard.budget("c", "$2.00", **more)
    assert guard.budget("c", "$1.00", per="day").limit == Decimal("1.00")
    assert guard.budget("c").limit == Decimal("1.00")
    with pytest.raises(ConfigError, match="limit: the budget 'unknown' is new; give it a limit"):
        guard.budget("unknown")


def test_what_the_owner_raised_stays_raised_however_often_it_was(opened):
    guard = opened()
    customer = guard.budget("c", "$2.00", per="day")
    for limit in ("$5.00", "$8.00"):
        raised(guard, customer.id, limit)
        assert guard.budget("c", "$2.00", per="day").limit == dollars_to_nanos(limit) / Decimal(10**9)


def test_one_that_was_tripped_and_reset_is_good_again(opened):
    guard = opened()
    customer = guard.budget("c", "$2.00")
    session, other = customer.session("s", budget="$1.00"), guard.session("other", budget="$1.00")
    customer.trip("chargeback")
    with pytest.raises(SessionTripped, match="budget 'c' is tripped"):
        session.charge("serp", "$0.01")
    other.charge("serp", "$0.01")
    owner(guard, lambda view, node: reset_node(view, node, "me"), customer.id)
    session.charge("serp", "$0.01")
    guard.budget("c", "$2.00").session("t", budget="$1.00").charge("serp", "$0.01")


@pytest.mark.parametrize("limit", [None, "$1.00"])
def test_a_budget_that_stands_elsewhere_is_not_taken_for_one_inside(opened, limit):
    guard = opened()
    guard.budget("customer-7", "$100")
    team = guard.budget("team", "$1.00")
    with pytest.raises(ConfigError, match="customer-7"):
        team.budget("customer-7", limit)


def test_a_session_is_resumed_under_its_own_parent_alone(opened):
    guard = opened()
    one, other = guard.budget("one", "$1"), guard.budget("other", "$1")
    one.session("s", budget="$1", id="run").close()
    for elsewhere in (other, guard):
        with pytest.raises(ConfigError, match="id: 'run' is already a session under 'budget:one'"):
            elsewhere.session("s", budget="$1", id="run")
    one.session("s", id="run").charge("serp", "$0.10")


def test_a_session_that_took_the_id_is_not_taken_for_the_budget(opened):
    guard = opened()
    with pytest.raises(ConfigError, match="budget:c"):
        guard.session("s", budget="$1", id="budget:c")


def test_a_session_without_a_budget_is_an_error_unless_there_is_a_default(opened):
    guard = opened()
    for parent in (guard, guard.budget("c", "$9")):
        with pytest.raises(ConfigError, match="a new one needs budget="):
            parent.session("s")
    capped = opened(session_budget="$0.25")
    for parent in (capped, capped.budget("c")):
        assert parent.session("s").limit == Decimal("0.25")
    assert capped.session("s", budget="$3", id="run").limit == 3
    assert capped.session("s", id="run").limit == 3  # it has one


# ---- what nests ----


def test_remaining_and_would_exceed_say_what_passes_at_every_level(opened):
    guard = opened(budget="$3.00")
    customer = guard.budget("c", "$2.00", per="day")
    guard.session("t", budget="$9").charge("b", "$1.90")
    with customer.session("s", budget="$1.50", reserve="$0.10") as session, session.child("k", budget="$5.00") as child:
        session.charge("a", "$0.20")
        expected = {customer: "0.90", session: "0.90", child: "0.90"}  # the wallet has the least
        for account, left in expected.items():
            assert account.remaining == Decimal(left)
        assert not child.would_exceed("$0.90")
        assert child.would_exceed("$0.900000001")
        with pytest.raises(BudgetExhausted, match="the wallet has"):
            child.charge("c", "$0.900000001")
        child.charge("c", "$0.90")
        assert (child.remaining, session.spent, customer.spent) == (0, Decimal("1.10"), Decimal("1.10"))


def test_the_holds_of_a_closed_child_count_above_until_each_ends(opened):
    guard = opened()
    customer = guard.budget("c", "$2.00", per="day")
    shop = Shop(required(accept(500_000)), paid=httpx.ReadError("reset"))
    with customer.session("s", budget="$1.00") as session:
        with session.child("k", budget="$0.80") as child:
            with pytest.raises(SettlementUncertain):
                client(child, shop).get(URL)
            job = child.hold("render", up_to="$0.20")
            job.__enter__()
        with pytest.raises(SessionClosed):
            child.charge("serp", "$0.01")
        assert [(a.held, a.remaining) for a in (session, customer)] == [
            (Decimal("0.70"), Decimal("0.30")), (Decimal("0.70"), Decimal("1.30"))
        ]  # fmt: skip
        with pytest.raises(BudgetExhausted):
            session.charge("serp", "$0.31")
        job.capture("$0.05")
        job.__exit__(None, None, None)
        assert [(a.held, a.spent, a.remaining) for a in (session, customer)] == [
            (Decimal("0.50"), Decimal("0.05"), Decimal("0.45")), (Decimal("0.50"), Decimal("0.05"), Decimal("1.45"))
        ]  # fmt: skip


def test_a_scope_narrows_what_tasks_and_threads_do_inside_it(opened):
    guard, passed = opened(), []
    customer = guard.budget("c", "$2.00")

    def charge(session):
        try:
            session.charge("serp", "$0.20")
            passed.append(1)
        except BudgetExhausted:
            passed.append(0)

    async def tasks(session):
        async def task():
            await anyio.to_thread.run_sync(charge, session)

        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(task)

    with customer.session("s", budget="$1.00") as session:
        with session.scope("$0.50") as scope:
            anyio.run(tasks, session)
            bound = [threading.Thread(target=scope.bind(charge), args=(session,)) for _ in range(2)]
            for thread in bound:
                thread.start()
                thread.join(30)
            assert (sum(passed), len(passed), scope.spent) == (2, 4, Decimal("0.40"))
            with scope.scope("$0.05"), pytest.raises(BudgetExhausted):
                session.charge("serp", "$0.06")
        charge(session)
        assert (sum(passed), customer.spent) == (3, Decimal("0.60"))


# ---- a clock that jumps ----


def attempts(session):
    return {
        "payment": lambda: client(session, Shop()).get(URL),
        "llm": lambda: client(session, lambda _: httpx.Response(200, json=completion())).post(CHAT, json=ask()),
        "tool": lambda: session.charge("serp", "$0.01"),
        "hold": lambda: session.hold("serp", up_to="$0.01").__enter__(),
    }


@pytest.mark.parametrize("kind", ["payment", "llm", "tool", "hold"])
def test_a_clock_that_jumps_ahead_refuses_until_it_is_right(opened, kind):
    guard = opened(watched=True, max_clock_jump_s=300)
    with guard.budget("c", "$2.00", per="day").session("s", budget="$1.00") as session:
        opened.clock.tick(301)
        with pytest.raises(PolicyDenied, match=r"jumped 301 s ahead .*max_clock_jump_s is 300") as refused:
            attempts(session)[kind]()
        assert refused.value.rule == "clock"
        assert (session.spent, session.held) == (0, 0)
        opened.clock.tick(-1)
        attempts(session)[kind]()


def test_time_that_passes_is_no_jump(opened):
    guard = opened(watched=True)
    with guard.session("s", budget="$1.00") as session:
        for _ in range(5):
            opened.clock.tick(DAY_S)
            opened.steady.tick(DAY_S)
            session.charge("serp", "$0.01")
        opened.clock.tick(-1_000)
        session.charge("serp", "$0.01")


def test_small_jumps_add_up(opened):
    guard = opened(watched=True)
    with guard.session("s", budget="$1.00") as session:
        for _ in range(3):
            opened.clock.tick(100)
            session.charge("serp", "$0.01")
        opened.clock.tick(1)
        with pytest.raises(PolicyDenied, match="clock"):
            session.charge("serp", "$0.01")


@pytest.mark.parametrize("end", ["nothing", "capture", "void"])
def test_a_jump_begins_no_window_that_has_not_come(opened, end):
    guard = opened(watched=True)
    customer = guard.budget("c", "$2.00", per="day")
    with customer.session("s", budget="$9.00") as session:
        session.charge("serp", "$1.90")
        with ExitStack() as until:
            job = until.enter_context(session.hold("render", up_to="$0.10"))
            opened.clock.tick(600)  # past midnight
            with pytest.raises(PolicyDenied, match="clock"):
                session.charge("serp", "$0.01")
            if end != "nothing":
                job.capture("$0.10") if end == "capture" else job.void()
                until.close()
            opened.clock.tick(-600)
            with pytest.raises((BudgetExhausted, PolicyDenied)):
                session.charge("serp", "$0.11")
            job.void() if end == "nothing" else None


def test_a_jump_ends_nothing_before_its_time(opened):
    guard = opened(watched=True)
    with guard.session("s", budget="$1.00") as session, session.hold("render", up_to="$0.10") as job:
        opened.clock.tick(DAY_S)
        with pytest.raises(PolicyDenied, match="clock"):
            session.charge("serp", "$0.01")
        opened.clock.tick(-DAY_S)
        assert session.held == Decimal("0.10")
        job.void()


def test_a_jump_of_a_year_spoils_no_budget_that_is_opened_meanwhile(opened):
    guard = opened(watched=True)
    with guard.session("s", budget="$9.00") as session:
        opened.clock.tick(366 * DAY_S)
        customer = guard.budget("c", "$2.00", per="day")
        with pytest.raises(PolicyDenied, match="clock"):
            session.charge("serp", "$0.01")
        opened.clock.tick(-366 * DAY_S)
    for _ in range(3):
        customer.session("s", budget="$2.00").charge("serp", "$2.00")
        for clock in (opened.clock, opened.steady):
            clock.tick(DAY_S)


def test_a_budget_that_is_known_is_opened_again_without_a_write(ledger_url, monkeypatch):
    with make_guard(ledger_url) as guard:
        guard.budget("acme", "$5.00", per="day")
        begun, store = [], guard.shell.store
        usual = store.transact
        monkeypatch.setattr(store, "transact", lambda *args, **more: begun.append(args) or usual(*args, **more))
        guard.budget("acme", "$5.00", per="day")
        guard.budget("acme")
        assert begun == []
        guard.budget("acme", "$4.00", per="day")  # a lower limit is a change
        assert len(begun) == 1
        with pytest.raises(ConfigError, match="never raised"):
            guard.budget("acme", "$9.00", per="day")
        with pytest.raises(ConfigError, match="has the window"):
            guard.budget("acme", "$4.00", per="month")


def test_a_budget_is_opened_off_the_event_loop(ledger_url):
    async def opened():
        budget = await guard.abudget("acme", "$5.00", per="day")
        inner = await budget.abudget("team", "$2.00")
        return budget.limit, inner.limit

    with make_guard(ledger_url) as guard:
        assert anyio.run(opened) == (Decimal(5), Decimal(2))

"""Tools that cost money, in every form a program may write them in: what is held, what is booked, and on whose word."""

import contextlib
import functools
import inspect
import sqlite3
import threading
from decimal import Decimal

import anyio
import anyio.lowlevel
import pytest

from tests.support.ledger import Clock
from tests.support.tool_forms import (
    CEILING,
    BrokenError,
    amounts,
    awaited,
    check,
    events,
    every_block,
    every_decorated,
    every_form,
    plain,
    said,
)
from x402guard import BudgetExhausted, Guard, Policy, SessionClosed, SessionTripped, Timeouts
from x402guard.stores import open_store


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def guard(ledger_url, clock):
    store = open_store(ledger_url, clock_ms=clock)
    with Guard(ledger=store) as guard:
        yield guard
    store.close()


@pytest.fixture
def session(guard):
    with guard.session("research", budget="$1.00") as session:
        yield session


@pytest.mark.one_in(3)
@every_form
@pytest.mark.parametrize("cost", ["$0.02", CEILING, "$0.08", "$0", Decimal("0.000000001")])
def test_what_was_said_is_booked_be_it_below_at_or_past_the_ceiling(session, form, cost):
    seen = []
    form.use(session, cost, seen)
    assert seen == [(Decimal("0.05"), 0)]  # the ceiling was held while it ran
    check(session, str(cost).lstrip("$"), "estimate")
    assert [event["event"] for event in events(session)] == ["authorize", "capture"]
    assert session.report().to_dict()["state"] == "open"  # past the ceiling, and not past the budget


@pytest.mark.one_in(3)
@every_form
@pytest.mark.parametrize("error", [BrokenError("serp is down"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_what_raises_costs_its_ceiling_and_the_exception_comes_through_unchanged(session, form, error):
    with pytest.raises(type(error)) as caught:
        form.use(session, error, [])
    assert caught.value is error
    check(session, "0.05", "assumed")
    [capture] = events(session, "capture")
    assert type(error).__name__ in capture["note"]


@every_decorated
def test_a_call_of_a_tool_with_a_fixed_cost_costs_it_and_returns_what_it_returned(session, form):
    held = []
    tool = form.decorate(session.tool(cost="$0.01", name="serp"), lambda what: held.append(session.held) or [what])
    assert [form.call(tool, what=word) for word in ("Roe", "Wade")] == [["Roe"], ["Wade"]]
    assert held == [Decimal("0.01")] * 2
    check(session, "0.02", "estimate", calls=2)


def test_a_tool_under_a_decorator_that_gives_it_an_argument_is_called_as_it_was_before(session):
    def serp(client, query):
        return client, query

    @session.tool(cost="$0.01")
    @functools.wraps(serp)
    def giving(*args):
        return serp("client", *args)

    assert giving("Roe") == ("client", "Roe")
    check(session, "0.01", "estimate")


@pytest.mark.parametrize("backend", [None, "asyncio", "trio"])
def test_a_charge_is_booked_at_once_and_its_receipt_says_so(session, backend):
    charge = functools.partial(session.acharge if backend else session.charge, arguments={"q": "Roe"})
    receipt = anyio.run(charge, "serp", "$0.01", backend=backend) if backend else charge("serp", "$0.01")
    assert (receipt.amount, receipt.state, receipt.evidence) == (Decimal("0.01"), "captured", "estimate")
    assert not receipt.in_doubt
    check(session, "0.01", "estimate")
    assert [event["hold_id"] for event in events(session)] == [receipt.hold_id] * 2


def test_a_tool_is_called_in_reports_as_its_function_is_and_looks_as_it_did(session):
    @session.tool(cost="$0.01")
    def opinions(case, *, court="scotus"):
        """Find opinions."""
        return case, court

    assert opinions("Roe", court="ca9") == ("Roe", "ca9")
    assert (opinions.__name__, opinions.__doc__) == ("opinions", "Find opinions.")
    assert list(inspect.signature(opinions).parameters) == ["case", "court"]
    session.charge("serp", "$0.02")
    by_tool = amounts(session.report().to_dict()["tools"]["by_tool"])
    assert by_tool == {"opinions": Decimal("0.01"), "serp": Decimal("0.02")}


# -- the end of a block ----------------------------------------------------------------------------------------------------


@every_block
def test_a_block_that_says_nothing_captures_its_ceiling(session, block):
    hold = block.run(session.hold("serp", up_to=CEILING), lambda hold: None)
    check(session, "0.05", "assumed")
    assert (hold.receipt.amount, hold.receipt.evidence, hold.receipt.state) == (Decimal("0.05"), "assumed", "captured")
    assert hold.receipt.note == "its cost was not reported"


@every_block
def test_what_was_voided_costs_nothing_and_all_of_it_is_free_again(session, block):
    hold = block.run(session.hold("serp", up_to="$1.00"), lambda hold: hold.void("no result, no fee"))
    check(session, "0", calls=0)
    assert (hold.receipt.amount, hold.receipt.state, hold.receipt.evidence) == (0, "voided", None)
    assert (hold.receipt.note, hold.receipt.hold_id) == ("no result, no fee", hold.hold_id)
    [void] = events(session, "void")
    assert void["reason"] == "no result, no fee"
    session.charge("serp", "$1.00")


@every_block
def test_an_exception_after_the_word_keeps_the_word(session, block):
    for end in (lambda hold: hold.capture("$0.02"), lambda hold: hold.void()):
        with pytest.raises(BrokenError):
            block.run(session.hold("serp", up_to=CEILING), lambda hold, end=end: (end(hold), said(BrokenError())))
    check(session, "0.02", "estimate")


@pytest.mark.parametrize("end", ["nothing is said", "it raises"])
def test_a_free_tool_costs_nothing_however_it_ends(session, end):
    """A hold of zero takes a nano-dollar while it lasts, says the page; and no longer."""
    hold = session.hold("serp", up_to="$0")
    try:
        with hold:
            assert session.held == Decimal("0.000000001")
            said(BrokenError() if end == "it raises" else None)
    except BrokenError:
        assert end == "it raises"
    assert (session.spent, hold.receipt.amount) == (0, 0)


@pytest.mark.parametrize("free_nothing", ["$0.02", "$0", CEILING, None, "void"])
def test_what_lapsed_counts_its_ceiling_and_no_late_word_frees_any_of_it(session, clock, free_nothing):
    with session.hold("serp", up_to=CEILING, lifetime_s=60) as hold:
        clock.tick(60)
        session.charge("serp", "$0")
        assert session.held == Decimal("0.05")  # not a second too early
        clock.tick(1)
        session.charge("serp", "$0")
        assert (session.spent, session.held) == (Decimal("0.05"), 0)
        if free_nothing is not None:
            hold.void("too late") if free_nothing == "void" else hold.capture(free_nothing)
    check(session, "0.05", "assumed", calls=3)
    assert (hold.receipt.amount, hold.receipt.state, hold.receipt.evidence) == (Decimal("0.05"), "captured", "assumed")


def test_what_is_said_past_the_ceiling_after_it_lapsed_is_added(session, clock):
    with session.hold("serp", up_to=CEILING) as hold:
        clock.tick(901)
        session.charge("serp", "$0")
        hold.capture("$1.08")
    check(session, "1.08", "estimate", calls=2)
    assert (hold.receipt.amount, hold.receipt.evidence) == (Decimal("1.08"), "estimate")
    assert session.report().to_dict()["terminated_by"] == "overshoot"


# -- no ----------------------------------------------------------------------------------------------------------------------


def uses(session, ran):
    """One use of a tool in each form."""

    async def hold():
        async with session.hold("serp", up_to="$0.02"):
            ran.append("async with")

    def block():
        with session.hold("serp", up_to="$0.02"):
            ran.append("with")

    fixed, told = session.tool(cost="$0.02"), session.tool(cost=lambda result: "$0", up_to="$0.02")
    return [
        lambda: session.charge("serp", "$0.02"),
        lambda: anyio.run(session.acharge, "serp", "$0.02"),
        block,
        lambda: anyio.run(hold),
        lambda: fixed(plain(ran.append))(what="fixed"),
        lambda: anyio.run(functools.partial(told(awaited(ran.append)), what="told")),
    ]


@every_form
def test_a_cost_past_the_budget_is_owed_in_full_and_latches_the_session(session, form):
    form.use(session, "$1.20", [])
    check(session, "1.20", "estimate")
    report, ran = session.report().to_dict(), []
    assert (report["state"], report["terminated_by"]) == ("tripped", "overshoot")
    for use in uses(session, ran):
        with pytest.raises(SessionTripped):
            use()
    assert ran == []
    check(session, "1.20", "estimate")


def test_what_does_not_fit_is_refused_before_anything_runs_and_what_just_fits_is_not(session):
    session.charge("serp", "$0.99")
    ran = []
    for use in uses(session, ran):
        with pytest.raises(BudgetExhausted) as refused:
            use()
        assert (refused.value.requested, refused.value.available) == (Decimal("0.02"), Decimal("0.01"))
    assert ran == []
    check(session, "0.99", "estimate")
    [refusals] = session.report().to_dict()["refusals"]
    assert (refusals["rule"], refusals["count"]) == ("budget", 6)
    session.charge("serp", "$0.01")
    check(session, "1", "estimate", calls=2)


def test_a_session_that_has_ended_pays_for_nothing(guard):
    with guard.session("research", budget="$1.00") as session:
        pass
    ran = []
    for use in uses(session, ran):
        with pytest.raises(SessionClosed):
            use()
    assert ran == []
    check(session, "0", calls=0)


def test_the_innermost_budget_in_context_pays(session):
    for use in uses(session, []):  # $0.02 each, and one that is told to cost nothing
        with session.child("child", budget="$0.02") as child:
            use()
            with pytest.raises(BudgetExhausted):
                session.charge("serp", "$0.03")
            assert child.spent in (0, Decimal("0.02"))
        with session.scope("$0.01") as scope:
            with pytest.raises(BudgetExhausted):
                use()
            session.charge("serp", "$0.01")
            assert (scope.spent, scope.remaining) == (Decimal("0.01"), 0)
    assert (session.spent, session.held) == (Decimal("0.16"), 0)


def test_a_hold_is_ended_in_the_budget_that_it_began_in(session):
    with session.child("child", budget="$0.10") as child:
        hold = session.hold("serp", up_to=CEILING)
        hold.__enter__()
    hold.capture("$0.02")
    hold.__exit__(None, None, None)
    assert (child.spent, child.held, session.spent) == (Decimal("0.02"), 0, Decimal("0.02"))


def test_a_plain_function_runs_in_its_callers_thread_unless_a_limit_is_asked_for():
    """What belongs to one thread, such as a connection of sqlite3, works in a tool; only a limit needs another thread."""
    here = threading.get_ident()
    with Guard(ledger="memory://") as guard, guard.session("s", budget="$1.00") as session:
        with contextlib.closing(sqlite3.connect(":memory:")) as rows:
            count = session.tool(cost="$0.01", name="count")(lambda: rows.execute("SELECT 1").fetchone())
            assert count() == (1,)
        assert session.tool(cost="$0.01", name="where", timeout_s=60)(threading.get_ident)() != here
    with (
        Guard(ledger="memory://", policy=Policy(timeouts=Timeouts(tool_s=60))) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        assert session.tool(cost="$0.01", name="where")(threading.get_ident)() != here
        assert session.tool(cost="$0.01", name="where", timeout_s=0)(threading.get_ident)() == here

"""What is declared once, and pays from the session in context: tools at module level, and sessions of an event loop."""

import asyncio
import gc
import inspect
import threading
import time
from decimal import Decimal

import anyio
import pytest

import x402guard
from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, ConfigError, install, uninstall
from x402guard.guard.named_budget import BudgetParent, SessionOptions

RAN = []


@x402guard.tool(cost="$0.01")
def search(query):
    RAN.append(query)
    return x402guard.current_session().id


@x402guard.tool(cost=lambda found: "$0.02", up_to="$0.05", name="deep")
async def asearch(query):
    await anyio.sleep(0)
    return x402guard.current_session().id


@pytest.fixture
def guard(ledger_url):
    RAN.clear()
    with make_guard(ledger_url) as guard:
        yield guard


def test_a_tool_at_module_level_pays_from_the_session_in_context(guard):
    for name in ("a", "b"):
        with guard.session(name, budget="$1.00", id=name) as session:
            assert search("Roe") == name
            assert anyio.run(asearch, "Roe") == name
            assert session.spent == Decimal("0.03")
            with session.scope("$0.005"), pytest.raises(BudgetExhausted):
                search("Wade")
    assert RAN == ["Roe", "Roe"]


def test_tasks_and_bound_threads_pay_from_their_own_session(guard):
    async def one(name):
        async with guard.asession(name, budget="$1.00", id=name) as session:
            assert await asearch("Roe") == name
            assert await asyncio.to_thread(search, "Roe") == name
            return session.spent

    async def all_of_them():
        return await asyncio.gather(*(one(f"s{number}") for number in range(20)))

    assert asyncio.run(all_of_them()) == [Decimal("0.03")] * 20
    with guard.session("s", budget="$1.00", id="s") as session:
        found = []
        thread = threading.Thread(target=session.bind(lambda: found.append(search("Roe"))))
        thread.start()
        thread.join()
        assert found == ["s"]


def test_without_a_session_nothing_runs(guard):
    guard.session("s", budget="$1.00").close()
    for call in (lambda: search("Roe"), lambda: anyio.run(asearch, "Roe")):
        with pytest.raises(ConfigError, match=r"session: none is in context; enter `with guard\.session"):
            call()
    assert RAN == []


def test_what_is_installed_pays_where_no_session_is_in_context(guard):
    session = install("$1.00", guard=guard)
    try:
        search_in_no_context = x402guard.tool(cost="$0.01", name="s")(lambda: "found")
        assert search_in_no_context() == "found"
        assert session.spent == Decimal("0.01")
        with guard.session("own", budget="$1.00", id="own"):
            assert search("Roe") == "own"
    finally:
        uninstall()
    with pytest.raises(ConfigError, match="none is in context"):
        search_in_no_context()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "cost: give the cost of a call"),
        ({"cost": 0.01}, "money is never a float"),
        ({"cost": "lots"}, "cost: 'lots' is not a dollar amount"),
        ({"cost": "$0.01", "price": 1}, "price: tool() takes"),
        ({"cost": "$0.01", "timeout_s": -1}, "timeout_s: -1 is not a whole number"),
    ],
)
def test_a_mistake_in_a_declaration_is_told_where_it_is_declared(options, says):
    with pytest.raises((ConfigError, TypeError, ValueError)) as caught:
        x402guard.tool(**options)(lambda: None)
    assert says in str(caught.value)
    with pytest.raises(ConfigError, match="tool: write @"):
        x402guard.tool(lambda: None)


def test_a_session_of_an_event_loop_opens_and_ends_as_any_other(guard):
    async def go():
        async with guard.asession("s", budget="$1.00", id="run") as session:
            assert x402guard.current_session() is session
            await session.acharge("serp", "$0.10")
        assert x402guard.current_session() is None
        with pytest.raises(ZeroDivisionError):
            async with guard.asession("s", id="run"):
                1 / 0  # noqa: B018 - the error of the block
        with pytest.raises(ConfigError, match=r"budget: there is no session .* to resume, and a new one needs budget="):
            async with guard.asession("other"):
                pass
        team = guard.budget("team", "$5.00")
        async with team.asession("inside", budget="$1.00") as inside:
            await inside.acharge("serp", "$0.10")
        assert team.spent == Decimal("0.10")

    anyio.run(go)
    assert guard.session("s", id="run").spent == Decimal("0.10")


def test_a_task_that_is_cancelled_while_its_session_opens_leaves_none_open(guard, monkeypatch):
    slow = BudgetParent.session

    def opened(self, *names, **options):
        time.sleep(0.2)
        return slow(self, *names, **options)

    monkeypatch.setattr(BudgetParent, "session", opened)

    async def go():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(opens(), 0.05)  # asyncio's own way to cancel breaks through anyio's shields

    async def opens():
        async with guard.asession("s", budget="$1.00", id="run"):
            raise AssertionError("the block has run")

    asyncio.run(go())
    states, ends_s = [], time.monotonic() + 5
    while states != ["closed"] and time.monotonic() < ends_s:
        time.sleep(0.01)
        states = [str(node.state) for node in guard.shell.store.nodes() if node.id == "run"]
    assert states == ["closed"]


async def longest_hold_of(work):
    """The longest that *work* holds up an event loop, as a share of the loop's whole work for it.

    The thread's own time counts, so other processes do not; a share is the same on a slow machine and on a fast one.
    """
    held_s = []

    async def beats():
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0.002)
            held_s.append(time.thread_time() - begun)

    begun = time.thread_time()
    beating = asyncio.create_task(beats())
    await work()
    beating.cancel()
    return max(held_s) / (time.thread_time() - begun)


def hold_of_four_hundred_sessions(ledger):
    with make_guard(f"sqlite:///{ledger}") as guard:

        async def one(number):
            async with guard.asession(f"s{number}", budget="$1.00") as session:
                await session.acharge("serp", "$0.01")

        async def all_of_them():
            await asyncio.gather(*(one(number) for number in range(400)))

        return asyncio.run(longest_hold_of(all_of_them))


@pytest.mark.long
def test_four_hundred_sessions_at_once_hold_up_no_event_loop(tmp_path):
    # A collection of garbage walks all objects of the test run, which no user's program holds: it waits meanwhile.
    gc.collect()
    gc.disable()
    try:
        shares = [hold_of_four_hundred_sessions(tmp_path / f"{number}.db") for number in range(5)]
    finally:
        gc.enable()
    assert min(shares) <= 0.25, shares


def test_asession_takes_what_session_takes():
    taken = inspect.signature(BudgetParent.session).parameters
    assert set(SessionOptions.__annotations__) == set(taken) - {"self", "name"}

"""Paid tools of a real MCP server, over stdio and streamable HTTP, bought through the guard on a chain."""

import subprocess
import sys
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path

import anyio
import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError

from x402guard import (
    AlreadyPaid,
    ApprovalDenied,
    Approvals,
    BudgetExhausted,
    ConfigError,
    Guard,
    GuardedMCPSession,
    LoopDetected,
    Owner,
    PaidNotDelivered,
    Policy,
    PolicyDenied,
    Risk,
    SessionTripped,
    SettlementUncertain,
)
from x402guard.adapters.mcp_client import names_another_tool

pytestmark = [pytest.mark.chain]

ROOT = Path(__file__).parents[2]
DIME = Decimal("0.1")
WAYS = pytest.mark.parametrize("way", ["stdio", "http"])


@pytest.fixture(scope="module")
def seller(net):
    return [sys.executable, "-m", "tests.support.mcp_seller"], [net.facilitator, net.payee, net.token]


@asynccontextmanager
async def connected(way, seller):
    command, where = seller
    if way == "stdio":
        server = StdioServerParameters(command=command[0], args=[*command[1:], "stdio", *where], cwd=ROOT)
        async with Client(stdio_client(server)) as client:
            yield client
        return
    with subprocess.Popen([*command, "http", *where], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = await anyio.to_thread.run_sync(lambda: process.stdout.readline().strip())
            async with Client(url) as client:
                yield client
        finally:
            process.kill()


def using(way, seller, session, work, **more):
    """Run *work* of a guarded client, in an event loop of its own."""
    done = []

    async def go():
        async with connected(way, seller) as client:
            done.append(await work(GuardedMCPSession(client, session, server="seller", **more)))

    try:
        anyio.run(go)
    except* (
        httpx2.TransportError
    ):  # over HTTP a client whose server has died cancels its calls, and says why as it is left
        pass
    return done[0] if done else None


@WAYS
def test_a_paid_tool_is_bought_and_a_free_one_is_not(way, net, seller, guarded):
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def work(mcp):
            assert {tool.name for tool in (await mcp.list_tools()).tools} >= {"echo", "weather"}
            free = await mcp.call_tool("echo", {"text": "hello"})
            paid = await mcp.call_tool("weather", {"city": "Oslo"})
            coded = await mcp.call_tool("coded", {"city": "Rome"})
            return free, paid, coded

        free, paid, coded = using(way, seller, session, work)
        assert (free.content[0].text, free.meta) == ("hello", None) or "x402guard/receipt" not in (free.meta or {})
        assert (paid.content[0].text, coded.content[0].text) == ("sunny in Oslo", "sunny in Rome")
        receipt = paid.meta["x402guard/receipt"]
        assert (receipt["amount"], receipt["evidence"], receipt["in_doubt"]) == ("0.10", "claimed", False)
        assert (session.spent, session.held) == (2 * DIME, 0)
        assert session.reconcile().still_open == 0
        report = session.report().to_dict()
        assert report["evidence"]["chain"] == "0.20"
    assert before - net.balance(net.payer) == 200_000


@WAYS
def test_a_budget_for_two_buys_two(way, net, seller, guarded):
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$0.25") as session:

        async def work(mcp):
            for city in ("Oslo", "Rome"):
                await mcp.call_tool("weather", {"city": city})
            with pytest.raises(BudgetExhausted):
                await mcp.call_tool("weather", {"city": "Bern"})
            return (await mcp.call_tool("runs")).content[0].text

        assert using(way, seller, session, work) == "2"
        assert session.spent == 2 * DIME
    assert before - net.balance(net.payer) == 200_000


@WAYS
def test_a_lost_answer_is_presented_again_and_never_paid_twice(way, net, seller, guarded):
    """The server dies after it was paid; a new one of its name gets the same payment, and the chain says that it was taken."""
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def dies(mcp):
            with pytest.raises(SettlementUncertain) as caught:
                with anyio.fail_after(30):
                    await mcp.call_tool("dies", {"city": "Oslo"})
            assert caught.value.money_may_have_moved

        using(way, seller, session, dies)
        assert session.held == DIME
        [hold] = guard.shell.store.outstanding()

        async def again(mcp):
            with pytest.raises((PaidNotDelivered, SettlementUncertain)) as caught:
                await mcp.call_tool("dies", {"city": "Oslo"})
            return caught.value.hold_id

        assert using(way, seller, session, again) == hold.id
        session.reconcile()
        assert (session.spent, session.held) == (DIME, 0)

        async def again_after_the_chain(mcp):
            with pytest.raises(PaidNotDelivered):
                await mcp.call_tool("dies", {"city": "Oslo"})

        using(way, seller, session, again_after_the_chain)
    assert before - net.balance(net.payer) == 100_000


@WAYS
def test_a37_terms_for_another_tool_are_refused(way, net, seller, guarded):
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def work(mcp):
            with pytest.raises(PolicyDenied) as caught:
                await mcp.call_tool("swapped", {"city": "Oslo"})
            return caught.value

        error = using(way, seller, session, work)
        assert (error.rule, error.money_may_have_moved) == ("swapped_tool", False)
        assert "another tool" in str(error)
        assert (session.held, session.spent) == (0, 0)


@pytest.mark.parametrize(
    ("url", "is_another"),
    [
        ("mcp://tool/weather", False), ("mcp://tool/weather/", False), ("mcp://tool/srv/weather", False),
        ("mcp://api.example/tools/another", False), ("https://tool/another", False), ("mcp://weather-server", False),
        ("mcp:weather-server", False), ("mcp://", False),
        ("mcp://tool/another", True), ("mcp://Tool/another", True), ("mcp://tool:443/another", True),
        ("mcp://x@tool/another", True), ("mcp://tool./another", True), ("mcp:/tool/another", True),
        ("mcp:tool/another", True), ("mcp:///another", True), ("mcp://tool", True), ("mcp://[/weather", True),
    ],
)  # fmt: skip
def test_a37_a_resource_names_another_tool_however_it_is_spelt(url, is_another):
    assert names_another_tool({"resource": {"url": url}}, "weather") is is_another
    assert not names_another_tool({"resource": url}, "weather")


@WAYS
def test_a_tool_whose_resource_is_the_servers_own_is_paid(way, net, seller, guarded):
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def work(mcp):
            return (await mcp.call_tool("placed", {"city": "Oslo"})).content[0].text

        assert using(way, seller, session, work) == "sunny in Oslo"
        assert session.spent == DIME


def test_a37_a_server_that_became_another_one_is_refused(net, seller, guarded):
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def work(mcp):
            mcp._known = ("another", "1")
            with pytest.raises(PolicyDenied, match="has become another server"):
                await mcp.call_tool("weather", {"city": "Oslo"})

        using("stdio", seller, session, work)
        assert session.held == 0


@WAYS
def test_a_tool_that_fails_after_the_quote_says_what_it_may_have_cost(way, net, seller, guarded):
    """The official server settles only what it has delivered: an error of its own leaves the payment unused."""
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:
        result = using(way, seller, session, lambda mcp: mcp.call_tool("closes", {"city": "Oslo"}))
        assert result.is_error
        receipt = result.meta["x402guard/receipt"]
        assert (receipt["state"], receipt["in_doubt"]) == ("held", True)
        assert (session.held, session.spent) == (DIME, 0)
    assert net.balance(net.payer) == before


def test_loops_stop_a_free_tool_and_a_paid_one(net, seller, guarded):
    with guarded(policy=Policy(breaker=None)) as guard:
        for tool, arguments in (("echo", {"text": "again"}), ("weather", {"city": "Oslo"})):
            with guard.session("s", budget="$5.00") as session:

                async def work(mcp, tool=tool, arguments=arguments):
                    with pytest.raises((LoopDetected, SessionTripped)):
                        for _ in range(40):
                            await mcp.call_tool(tool, arguments)

                using("stdio", seller, session, work)


def test_a_risky_tool_needs_approval_and_a_cap_ends_calls(net, seller, guarded):
    policy = Policy(breaker=None, risk=Risk(levels={"seller/echo": "HIGH"}), approvals=Approvals())
    with (
        guarded(policy=policy, approver=lambda _request: False) as guard,
        guard.session("s", budget="$1.00") as session,
    ):

        async def work(mcp):
            with pytest.raises((ApprovalDenied, PolicyDenied)):
                await mcp.call_tool("echo", {"text": "hello"})

        using("stdio", seller, session, work)


def test_a_cost_of_ones_own_is_held_and_captured(net, seller, guarded):
    with guarded() as guard, guard.session("s", budget="$0.05") as session:

        async def work(mcp):
            await mcp.call_tool("echo", {"text": "a"})
            with pytest.raises(BudgetExhausted):
                await mcp.call_tool("echo", {"text": "b"})

        using("stdio", seller, session, work, costs={"echo": "$0.03"})
        assert session.spent == Decimal("0.03")


def test_names_prices_and_answers_as_by_http(net, seller, guarded):
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def work(mcp):
            with pytest.raises(PolicyDenied) as caught:
                await mcp.call_tool("weather", {"city": "Oslo"}, max_price="$0.05")
            assert caught.value.rule == "price_above_quote"
            await mcp.call_tool("weather", {"city": "Oslo"}, purchase="forecast 7")
            with pytest.raises(AlreadyPaid):
                await mcp.call_tool("weather", {"city": "Oslo"}, purchase="forecast 7")
            with pytest.raises(MCPError):
                await mcp.call_tool("no such tool", {"city": "Oslo"})
            with pytest.raises(ConfigError, match="arguments"):
                await mcp.call_tool("echo", {"text": object()})

        using("stdio", seller, session, work)
        assert session.spent == DIME


def test_tasks_at_once_buy_what_the_budget_pays_for(net, seller, guarded):
    with guarded() as guard, guard.session("s", budget="$0.30") as session:
        bought, refused = [], []

        async def work(mcp):
            async def one(number):
                try:
                    await mcp.call_tool("weather", {"city": str(number)})
                    bought.append(number)
                except BudgetExhausted:
                    refused.append(number)

            async with anyio.create_task_group() as tasks:
                for number in range(12):
                    tasks.start_soon(one, number)

        using("http", seller, session, work)
        assert (len(bought), len(refused), session.spent) == (3, 9, 3 * DIME)


def test_a_cancelled_call_is_in_doubt_and_counts(net, seller, guarded, tmp_path):
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def work(mcp):
            original = mcp._mcp.call_tool

            async def slow(name, arguments=None, **more):
                if "meta" in more:
                    await anyio.sleep(60)
                return await original(name, arguments, **more)

            mcp._mcp.call_tool = slow
            with anyio.move_on_after(2) as scope:
                await mcp.call_tool("weather", {"city": "Oslo"})
            assert scope.cancelled_caught

        using("stdio", seller, session, work)
        assert session.held == DIME
        with Owner(tmp_path / "spend.db", read_only=True) as owner:
            assert owner.live().out == 10**8


@pytest.mark.parametrize(
    ("mcp", "server", "words"),
    [
        (object(), "seller", "mcp: a object has no call_tool"),
        (None, "seller", "mcp: a NoneType has no call_tool"),
        ("client", "", "server: give the server a name"),
        ("client", 7, "server: give the server a name"),
        ("client", "ftp://x", "place: 'ftp://x'"),
        ("client", "https://user:pw@x/mcp", "place"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_by_name(mcp, server, words):
    class Calls:
        async def call_tool(self, *_args, **_more):
            raise AssertionError

    with Guard(ledger="memory://") as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(ConfigError, match=words):
            GuardedMCPSession(Calls() if mcp == "client" else mcp, session, server=server)
        with pytest.raises(ConfigError, match="session"):
            GuardedMCPSession(Calls(), object(), server="seller")

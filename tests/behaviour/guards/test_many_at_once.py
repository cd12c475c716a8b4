"""Agents that do many things at once: what happens to all of them in one moment is one thing that happened."""

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal

import httpx
import pytest

from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import URL, async_client, b64, client, make_guard, offer_response, receipt, required
from x402guard import Loop, LoopDetected, Policy, SessionTripped
from x402guard.stores import open_store


async def gathered(session, most, at_once):
    async def provider(_request):
        await asyncio.sleep(0.01)
        return httpx.Response(200, json=completion())

    free = asyncio.Semaphore(at_once)
    async with async_client(session, provider) as http:

        async def one():
            async with free:
                return await http.post(CHAT, json=ask())

        found = await asyncio.gather(*(one() for _ in range(most)), return_exceptions=True)
    return Counter(type(each) for each in found)


def in_threads(session, most, at_once):
    def provider(_request):
        time.sleep(0.01)
        return httpx.Response(200, json=completion())

    http = client(session, provider)

    def one():
        try:
            return type(http.post(CHAT, json=ask()))
        except LoopDetected as error:
            return type(error)

    with ThreadPoolExecutor(at_once) as threads:
        return Counter(threads.map(lambda _: one(), range(most)))


@pytest.mark.parametrize(("most", "at_once"), [(12, 12), (20, 20), (100, 100), (30, 4), (100, 16)])
@pytest.mark.parametrize("way", ["tasks", "threads"])
def test_an_agent_that_samples_is_refused_and_not_tripped(ledger_url, way, most, at_once):
    clock = Clock()
    with make_guard(open_store(ledger_url, clock_ms=clock)) as guard, guard.session("s", budget="$9.00") as session:
        found = asyncio.run(gathered(session, most, at_once)) if way == "tasks" else in_threads(session, most, at_once)
        assert found == {httpx.Response: 10, LoopDetected: most - 10}
        assert session.report().to_dict()["state"] == "open"
        client(session, lambda _: httpx.Response(200, json=completion())).post(
            CHAT, json=ask(messages=[{"role": "user", "content": "which is best?"}])
        )


def test_one_that_goes_on_after_its_refusals_is_tripped():
    """Within two seconds refusals count once; those of a loop that thinks between them, or goes on, trip it."""
    clock = Clock()
    with make_guard(open_store("memory://", clock_ms=clock)) as guard, guard.session("s", budget="$9.00") as session:
        for _ in range(10):
            session.charge("serp", "$0.01", arguments={"q": "Roe"})
        told = []
        for _ in range(41):
            try:
                session.charge("serp", "$0.01", arguments={"q": "Roe"})
            except (LoopDetected, SessionTripped) as error:
                told.append(type(error))
            clock.tick(0.1)
        assert told == [LoopDetected] * 41
        with pytest.raises(SessionTripped):
            session.charge("serp", "$0.01", arguments={"q": "Roe"})


@pytest.mark.parametrize("more", [{"window_s": 3}, {"window_s": 1}, {"latch_after": 40}, {"latch_after": 1}])
def test_a_loop_that_goes_on_is_tripped_before_its_window_has_moved_on(more):
    clock, loop = Clock(), Loop(calls=3, **more)
    policy = Policy(loop=loop, breaker=None)
    with make_guard(open_store("memory://", clock_ms=clock), policy=policy) as guard:
        with guard.session("s", budget="$9.00") as session, pytest.raises(SessionTripped):
            for _ in range(loop.window_s * 20):
                with suppress(LoopDetected):
                    session.charge("serp", "$0.01", arguments={"q": "Roe"})
                clock.tick(0.05)
        assert session.spent == Decimal("0.03")


class Blip:
    """A seller that answers 503 to all payments that are under way at one moment, and is well again."""

    def __init__(self, most):
        self.most, self.all, self.served = most, asyncio.Event(), 0

    async def __call__(self, request):
        if "payment-signature" not in request.headers:
            return offer_response(required(url=str(request.url)))
        self.served += 1
        if self.served < self.most:
            await self.all.wait()
        self.all.set()
        if self.served <= self.most:
            return httpx.Response(503)
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, json={})


@pytest.mark.parametrize("most", [5, 8])
def test_one_fault_of_a_seller_that_fails_all_that_is_under_way_trips_no_run(ledger_url, most):
    async def main(session):
        seller = Blip(most)
        async with async_client(session, seller) as http:
            found = await asyncio.gather(*(http.get(f"{URL}-{n}") for n in range(most)))
            assert [each.status_code for each in found] == [503] * most
            assert (await http.get(f"{URL}-another")).status_code == 200

    with (
        make_guard(ledger_url, policy=Policy(breaker=None)) as guard,
        guard.session("s", budget="$5.00") as session,
    ):
        asyncio.run(main(session))
        assert session.report().to_dict()["state"] == "open"


@pytest.mark.parametrize(("at_once", "most"), [(1, 5), (2, 10), (8, 24), (16, 32), (50, 66)])
def test_a_seller_that_delivers_nothing_stops_a_run_that_buys_much_at_once(at_once, most):
    """One fault fails all that is under way, and the next fault all again: three times the number in a row is the end."""

    async def main(session):
        served = []

        async def seller(request):
            if "payment-signature" not in request.headers:
                return offer_response(required(url=str(request.url)))
            served.append(request.url)
            await asyncio.sleep(0.02)
            return httpx.Response(503)

        async def worker(http, n):
            with suppress(SessionTripped):
                for turn in range(100):
                    await http.get(f"{URL}/{n}/{turn}")

        async with async_client(session, seller) as http:
            await asyncio.gather(*(worker(http, n) for n in range(at_once)))
        return len(served)

    policy = Policy(breaker=None, bulkhead=None, loop=Loop())
    with make_guard(policy=policy) as guard, guard.session("s", budget="$50.00") as session:
        assert asyncio.run(main(session)) <= most
        assert session.report().to_dict()["terminated_by"] == "loop_detected"


def charges(session, clock, calls, gap_s):
    """So many equal charges; what each said."""
    told = []
    for _ in range(calls):
        try:
            session.charge("serp", "$0.01", arguments={"q": "Roe"})
            told.append("paid")
        except (LoopDetected, SessionTripped) as error:
            told.append(type(error).__name__)
        clock.tick(gap_s)
    return told


@pytest.mark.parametrize(("calls", "gap_s"), [(14, 0.1), (25, 0.1), (60, 0.05), (100, 0.02)])
def test_a_loop_in_bursts_that_waits_as_it_is_told_is_tripped_by_the_third(calls, gap_s):
    clock = Clock()
    with make_guard(open_store("memory://", clock_ms=clock)) as guard, guard.session("s", budget="$9.00") as session:
        told = []
        for _ in range(6):
            told += charges(session, clock, calls, gap_s)
            clock.tick(60)
        assert 10 <= told.count("paid") <= 30
        assert told[-1] == "SessionTripped"


@pytest.mark.parametrize(
    ("calls", "gap_s", "pause_s"), [(11, 0.1, 60), (12, 0.1, 60), (40, 0.1, 180), (100, 0.01, 180)]
)
def test_one_that_polls_or_samples_now_and_then_is_not_tripped(calls, gap_s, pause_s):
    """A poll that waits after its refusal, and a sample of many at once every few minutes, for an hour."""
    clock = Clock()
    with make_guard(open_store("memory://", clock_ms=clock)) as guard, guard.session("s", budget="$9.00") as session:
        for number in range(3_600 // pause_s):
            told = charges(session, clock, calls, gap_s)
            assert told.count("paid") >= 9
            session.charge("report", "$0.001", arguments={"number": number})  # something new
            clock.tick(pause_s)
        assert session.report().to_dict()["state"] == "open"


SAID = [
    "https://weather/forecast",
    "https://evil:8443/forecast",
    "https://[2001:db8::1]/forecast",
    "https://evil.example/forecast",
]


@pytest.mark.parametrize("place", SAID)
def test_a_host_without_a_dot_is_no_tool_of_this_machine(place):
    with (
        make_guard(policy=Policy(loop=Loop(own={"forecast": None}))) as guard,
        guard.session("s", budget="$5") as session,
    ):
        with pytest.raises(LoopDetected):
            for n in range(40):
                session.pay(required(url=place)).settled(receipt(transaction=f"0x{n:064x}"))


@pytest.mark.parametrize("place", ["mcp://weather/forecast", "MCP://weather/forecast"])
def test_a_payment_for_a_tool_of_this_machine_repeats_as_the_tool_does(place):
    with (
        make_guard(policy=Policy(loop=Loop(own={"forecast": None}))) as guard,
        guard.session("s", budget="$5") as session,
    ):
        for n in range(40):
            session.pay(required(), place=place).settled(receipt(transaction=f"0x{n:064x}"))

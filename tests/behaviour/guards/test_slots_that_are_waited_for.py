"""LLM calls wait for no slot by default, and whoever waits for one longer than a second is told, and finds it in the report."""

import threading
import time

import anyio
import httpx
import pytest

from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import Shop, client, make_guard
from x402guard import AsyncGuardedTransport, Bulkhead, Policy

AT_ONCE = Policy(loop=None, spike=None, velocity=None)
ONE = Policy(loop=None, breaker=None, bulkhead=Bulkhead(per_host=1, per_tool=1))
LATENCY_S = 0.2


def test_a_hundred_calls_at_once_wait_for_their_answers_alone():
    async def slow(_request):
        await anyio.sleep(LATENCY_S)
        return httpx.Response(200, json=completion())

    async def posted(session):
        transport = AsyncGuardedTransport(session, httpx.MockTransport(slow))
        async with httpx.AsyncClient(transport=transport) as http, anyio.create_task_group() as group:
            for n in range(100):
                group.start_soon(lambda number: http.post(CHAT, json=ask(seed=number)), n)

    with make_guard(policy=AT_ONCE) as guard, guard.session("s", budget="$5.00") as session:
        began = time.monotonic()
        anyio.run(posted, session)
        assert time.monotonic() - began < 8 * LATENCY_S  # with eight slots it takes thirteen times the latency


@pytest.mark.parametrize("awaited", [False, True])
def test_a_call_that_waits_is_told_of_and_stands_in_the_report(awaited):
    notices, free = [], threading.Event()

    def slow(request):
        if request.url.path == "/first":
            free.wait(5)
        return Shop()(request)

    with make_guard(policy=ONE, on_notice=notices.append) as guard, guard.session("s", budget="$5.00") as session:
        first = threading.Thread(target=client(session, slow).get, args=("https://courts.example/first",))
        first.start()
        while not session.held:
            time.sleep(0.01)

        def let_go():
            time.sleep(2.3)
            free.set()

        threading.Thread(target=let_go).start()

        async def second():
            async def shop(request):
                return Shop()(request)

            transport = AsyncGuardedTransport(session, httpx.MockTransport(shop))
            async with httpx.AsyncClient(transport=transport) as http:
                await http.get("https://courts.example/second")

        if awaited:
            anyio.run(second)
        else:
            client(session, Shop()).get("https://courts.example/second")
        first.join()
        report = session.report()
        events = [event for event in report.to_dict()["events"] if event["event"] == "slot_waited"]
    told = [each for each in notices if each.kind == "slot_waited"]
    assert [(each.facts["place"], each.facts["slots"]) for each in told] == [("host courts.example", 1)]
    assert (
        "waits for a slot of host courts.example: 1 of the run are under way there (policy.bulkhead)" in told[0].message
    )
    assert [(event["place"], event["seconds"]) for event in events] == [("host courts.example", 2)]
    assert "1 call waited for a slot of host courts.example, the longest 2 s (policy.bulkhead)" in " ".join(
        report.to_text().split()
    )


def test_one_that_waits_a_moment_is_not_told_of():
    notices = []
    with make_guard(policy=ONE, on_notice=notices.append) as guard, guard.session("s", budget="$5.00") as session:
        threads = [
            threading.Thread(target=client(session, Shop()).get, args=(f"https://courts.example/{n}",))
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "waited" not in session.report().to_text()
    assert not [each for each in notices if each.kind == "slot_waited"]

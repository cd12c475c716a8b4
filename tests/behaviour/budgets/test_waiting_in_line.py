"""A call that does not fit only because others are under way waits in line; what cannot come free is refused at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, SYNC, Answer, Provider, ask, completion, metered
from tests.support.merchant import make_guard
from tests.support.processes import start
from x402guard import BudgetExhausted, Bulkhead, Policy
from x402guard.ledger.purchases import DEFAULT_FLIGHT_S
from x402guard.stores import open_store

UNLIMITED = ask(max_completion_tokens=None)
SECOND = Policy(wait_for_budget_s=1)


@pytest.fixture
def session(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00", id="run") as session:
        yield session


class Elsewhere:
    """Holds $0.80 in a thread of its own until ``end`` is called; then $0.10 of it are captured."""

    def __init__(self, session, amount="$0.80"):
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(session, amount))
        self._thread.start()
        assert self._begun.wait(10)

    def _run(self, session, amount):
        with session.hold("render", up_to=amount) as job:
            self._begun.set()
            self._over.wait(60)
            job.capture("$0.10")

    def end(self, after_s=0.0):
        threading.Timer(after_s, self._over.set).start()

    def __enter__(self):
        return self

    def __exit__(self, *_left_by):
        self._over.set()
        self._thread.join(10)


def timed(call):
    begun = time.monotonic()
    with pytest.raises(BudgetExhausted) as caught:
        call()
    return caught.value, time.monotonic() - begun


def test_a_call_waits_until_another_one_has_ended(session):
    with Elsewhere(session) as other:
        other.end(after_s=0.3)
        session.charge("serp", "$0.50")
    assert session.spent == Decimal("0.60")
    assert session.report().to_dict()["refusals"] == []


def test_an_awaited_call_waits_and_the_loop_goes_on(session):
    async def go():
        turns = 0

        @session.tool(cost="$0.50")
        async def search():
            return turns

        async def turning():
            nonlocal turns
            while True:
                turns += 1
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turning)
            with Elsewhere(session) as other:
                other.end(after_s=0.3)
                assert await search() > 10
            tasks.cancel_scope.cancel()

    anyio.run(go)
    assert session.spent == Decimal("0.60")


def test_what_does_not_come_free_in_time_is_refused_with_what_is_held(ledger_url):
    with make_guard(ledger_url, policy=SECOND) as guard, guard.session("s", budget="$1.00") as session:
        with Elsewhere(session):
            error, took_s = timed(lambda: session.charge("serp", "$0.50"))
        assert (error.retry, error.retry_after, error.available) == ("later", 1, Decimal("0.20"))
        assert "1 call under way holds $0.80, for which it has waited 1 s (policy.wait_for_budget_s)" in str(error)
        assert 0.9 < took_s < 5
        assert len(session.report().to_dict()["refusals"]) == 1


def test_without_a_wait_the_refusal_comes_at_once_and_says_the_same(ledger_url):
    policy = Policy(wait_for_budget_s=0)
    with make_guard(ledger_url, policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        with Elsewhere(session, "$0.40"), Elsewhere(session, "$0.40"):
            error, took_s = timed(lambda: session.charge("serp", "$0.50"))
        assert (error.retry, error.retry_after) == ("later", 1)
        assert str(error).endswith("; 2 calls under way hold $0.80")
        assert took_s < 0.5


def test_what_would_not_fit_without_them_is_refused_at_once(session):
    session.charge("serp", "$0.15")
    with Elsewhere(session):
        error, took_s = timed(lambda: session.charge("serp", "$0.90"))
    assert (error.retry, error.retry_after) == ("after_change", None)
    assert took_s < 0.5


def test_nothing_waits_for_a_hold_of_its_own(session):
    """It ends only after the call that would wait for it."""
    with session.hold("render", up_to="$0.80") as job:
        _, took_s = timed(lambda: session.charge("serp", "$0.50"))
        job.void()

    @session.tool(cost="$0.80")
    def outer():
        return timed(lambda: session.charge("serp", "$0.50"))[1]

    @session.tool(cost="$0.80", timeout_s=30)
    def outer_in_a_thread():
        return timed(lambda: session.charge("serp", "$0.15"))[1]

    assert max(took_s, outer()) < 0.5
    with pytest.raises(BudgetExhausted):
        outer_in_a_thread()


def test_nothing_waits_for_an_answer_that_it_reads_itself():
    with metered(budget="$0.10") as session:
        answer = Answer.of(completion({"prompt_tokens": 20, "completion_tokens": 5}))
        with ExitStack() as open_answers:
            transport = SYNC.transport(session, Provider(session, answer))
            http = open_answers.enter_context(httpx.Client(transport=transport))
            open_answers.enter_context(http.stream("POST", CHAT, json=UNLIMITED))
            assert session.held > 0
            _, took_s = timed(lambda: session.charge("serp", "$0.09"))
        assert took_s < 0.5


def test_a_blocking_call_never_holds_up_the_loop_whose_task_it_would_wait_for(session):
    @session.tool(cost=lambda _: "$0.01", up_to="$0.80")
    async def slow(charged):
        await charged.wait()

    async def go():
        charged = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow, charged)
            await anyio.sleep(0.1)
            error, took_s = timed(lambda: session.charge("serp", "$0.50"))
            assert (error.retry, took_s < 2) == ("later", True)
            charged.set()

    for backend in ("asyncio", "trio"):
        anyio.run(go, backend=backend)
    assert session.context.lines == {}


def test_nothing_waits_for_a_payment_in_doubt(tmp_path):
    clock = Clock()
    store = open_store("memory://", clock_ms=clock)
    with make_guard(store) as guard, guard.session("s", budget="$1.00") as session:
        with Elsewhere(session):
            clock.tick(DEFAULT_FLIGHT_S + 1)  # no answer after flight_s: whether it ends is unknown
            _, took_s = timed(lambda: session.charge("serp", "$0.50"))
        assert took_s < 0.5


def test_calls_wait_in_order_of_arrival(session):
    ended = []
    with Elsewhere(session) as other, ThreadPoolExecutor(4) as threads:

        def waits(number):
            with session.hold("serp", up_to="$0.90") as job:
                ended.append(number)
                job.void()

        asked = []
        for number in range(4):
            asked.append(threads.submit(waits, number))
            lines = session.shell and session.context.lines
            ends_s = time.monotonic() + 5
            while sum(map(len, lines.values())) <= number and time.monotonic() < ends_s:
                time.sleep(0.005)
        other.end()
        for each in asked:
            each.result(20)
    assert ended == [0, 1, 2, 3]
    assert not any(session.context.lines.values())


def test_one_that_is_cancelled_leaves_the_line(session):
    async def go():
        @session.tool(cost="$0.90")
        async def search():
            return "found"

        with Elsewhere(session) as other:
            with anyio.move_on_after(0.2) as given_up:
                await search()
            assert given_up.cancelled_caught
            assert not any(session.context.lines.values())
            other.end()
            assert await search() == "found"

    anyio.run(go)
    assert session.held == 0


def test_a_call_that_waits_keeps_no_place_at_a_tool_that_others_need(ledger_url):
    """Else the second in line would keep the place that the first one needs, and both would wait until the end."""
    policy = Policy(bulkhead=Bulkhead(per_tool=1))
    with make_guard(ledger_url, policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        serp = session.tool(cost=lambda _: "$0.01", up_to="$0.50", name="serp")(lambda query: query)
        with Elsewhere(session) as other, ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(serp, query) for query in ("a", "b")]
            ends_s = time.monotonic() + 5
            while sum(map(len, session.context.lines.values())) < 2 and time.monotonic() < ends_s:
                time.sleep(0.005)
            assert sum(map(len, session.context.lines.values())) == 2
            begun = time.monotonic()
            other.end()
            assert {each.result(20) for each in asked} == {"a", "b"}
            assert time.monotonic() - begun < 3


OTHER_PROCESS = """
import sys, time
from tests.support.merchant import make_guard
with make_guard(sys.argv[1]) as guard, guard.session("s", id="run") as session:
    with session.hold("render", up_to="$0.80") as job:
        print("held", flush=True)
        sys.stdin.readline()
        job.capture("$0.10")
"""


def test_a_call_waits_for_one_of_another_process(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard, guard.session("s", budget="$1.00", id="run") as session:
        with start(OTHER_PROCESS, url) as other:
            assert other.stdout.readline().strip() == "held"
            threading.Timer(0.3, lambda: (other.stdin.write("end\n"), other.stdin.flush())).start()
            session.charge("serp", "$0.50")
            assert other.wait(20) == 0
        assert session.spent == Decimal("0.60")


def test_sixteen_calls_without_a_limit_share_one_dollar():
    """Six of gpt-4o's 16,384 tokens at $10 a million fit at once; the others pass as those end."""
    usage = {"prompt_tokens": 20, "completion_tokens": 5}

    def call(session, number):
        asked = {**UNLIMITED, "messages": [{"role": "user", "content": f"chapter {number}"}]}
        provider = Provider(session, lambda _request: (time.sleep(0.05), Answer.of(completion(usage)))[1])
        return SYNC.post(session, provider, asked)[0].extensions["x402guard"]

    with metered(budget="$1.00") as session, ThreadPoolExecutor(16) as threads:
        receipts = list(threads.map(call, [session] * 16, range(16)))
        assert len({receipt.hold_id for receipt in receipts}) == 16
        assert not any(receipt.shortened for receipt in receipts)
        assert session.held == 0

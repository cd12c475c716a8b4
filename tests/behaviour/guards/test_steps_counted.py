"""Which steps count for loops, streaks of failures and means: answers that come late, calls that were never billed, tools that cost nothing."""

import itertools
from types import SimpleNamespace

import anyio
import httpx
import pytest

from tests.support.agent import Agent, owner_resets
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, open_terms, receipt
from tests.support.signers import SpySigner
from x402guard import (
    CallTimeout,
    CircuitOpen,
    Loop,
    LoopDetected,
    PaymentRefused,
    Policy,
    SessionTripped,
    SettlementUncertain,
    SignerError,
    Spike,
    Velocity,
)
from x402guard.policy import Breaker, Timeouts
from x402guard.stores import open_store

SETTLED = {"PAYMENT-RESPONSE": b64(receipt())}


class Slow(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Two pieces of an answer with more than ``payment_s`` between them, by a clock that is not the machine's."""

    def __init__(self, clock, pause_s=241):
        self.clock, self.pause_s = clock, pause_s

    def __iter__(self):
        yield b"{"
        self.clock.tick(self.pause_s)
        yield b"}"

    async def __aiter__(self):
        for piece in self:
            yield piece


@pytest.fixture
def watch(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("x402guard.http.deadline.time", SimpleNamespace(monotonic=lambda: clock.now_ms / 1000))
    return clock


def buy_slowly(mode, session, watch, number, **pause):
    slow = Slow(watch, **pause)
    shop = Shop(open_terms, paid=lambda _request, _shop: httpx.Response(200, headers=SETTLED, stream=slow))
    if mode == "sync":
        return client(session, shop).get(URL, params={"n": number})

    async def go():
        async with async_client(session, shop) as http:
            return await http.get(URL, params={"n": number})

    return anyio.run(go)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_answer_that_has_begun_comes_whole_after_the_time_of_its_offer(watch, mode):
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        assert buy_slowly(mode, session, watch, 1, pause_s=239).content == b"{}"
        with pytest.raises(CallTimeout) as cut:
            buy_slowly(mode, session, watch, 2)
    assert (cut.value.retry, cut.value.money_may_have_moved) == ("no", True)
    assert "pays no second time" in cut.value.advice
    assert "policy.timeouts.payment_s" in cut.value.advice


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_answers_that_are_settled_and_come_late_are_failures_in_a_row(ledger_url, watch, mode):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$5.00") as session:
        for number in range(5):
            with pytest.raises(CallTimeout):
                buy_slowly(mode, session, watch, number)
        with pytest.raises(SessionTripped, match="loop_detected"):
            buy_slowly(mode, session, watch, 6)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_answers_that_are_settled_and_come_late_open_the_breaker(ledger_url, watch, mode):
    with make_guard(ledger_url, policy=Policy(breaker=Breaker(failures=3))) as guard:
        with guard.session("s", budget="$5.00") as session:
            for number in range(3):
                with pytest.raises(CallTimeout):
                    buy_slowly(mode, session, watch, number)
            with pytest.raises(CircuitOpen):
                buy_slowly(mode, session, watch, 4)


def busy(_request):
    return httpx.Response(429)


@pytest.mark.parametrize("models", [("gpt-4o", "gpt-4o-mini"), ("gpt-4o", "gpt-4o-mini", "gpt-4.1")])
def test_models_asked_in_turn_that_are_all_busy_make_no_cycle(ledger_url, models):
    policy = Policy(loop=Loop(latch_after=1, calls=3, own={}), velocity=Velocity(calls_per_day=3), breaker=None)
    with make_guard(ledger_url, policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        for model in itertools.islice(itertools.cycle(models), 30):
            assert client(session, busy).post(CHAT, json=ask(model=model)).status_code == 429
        assert session.report().to_dict()["state"] == "open"


def test_tools_held_in_turn_and_given_back_make_no_cycle(ledger_url):
    with make_guard(ledger_url, policy=Policy(loop=Loop(latch_after=1, calls=3), breaker=None)) as guard:
        with guard.session("s", budget="$5.00") as session:
            for number in range(30):
                with session.hold("serp", up_to="$0.01", arguments={"q": number % 2}) as job:
                    job.void()
            assert session.report().to_dict()["state"] == "open"


@pytest.mark.parametrize("free", ["look", "recall"])
def test_a_tool_that_costs_nothing_loops_like_any_other(ledger_url, free):
    with make_guard(ledger_url, policy=Policy(loop=Loop(latch_after=1, calls=3), breaker=None)) as guard:
        with guard.session("s", budget="$5.00") as session:
            agent = Agent(session)
            for _ in range(3):
                agent.look() if free == "look" else agent.recall(1)
            with pytest.raises(LoopDetected):
                agent.look() if free == "look" else agent.recall(1)


@pytest.mark.parametrize("free", ["look", "recall"])
@pytest.mark.parametrize(
    "policy",
    [
        Policy(max_steps=3),
        Policy(max_calls={"look": 3, "recall": 3}),
        Policy(velocity=Velocity(calls_per_hour=3)),
    ],
    ids=["max_steps", "max_calls", "calls_per_hour"],
)
def test_a_tool_that_costs_nothing_counts_as_a_step(ledger_url, policy, free):
    with make_guard(ledger_url, policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        agent = Agent(session)
        for number in range(3):
            agent.look() if free == "look" else agent.recall(number)
        with pytest.raises(PaymentRefused):
            agent.look() if free == "look" else agent.recall(4)


@pytest.mark.parametrize("free", ["look", "recall"])
def test_a_tool_that_costs_nothing_is_refused_in_a_step_that_is_late(ledger_url, free):
    clock = Clock()
    store = open_store(ledger_url, clock_ms=clock)
    with make_guard(store, policy=Policy(timeouts=Timeouts(step_s=10))) as guard:
        with guard.session("s", budget="$5.00") as session:
            agent = Agent(session)
            session.step()
            clock.tick(11)
            with pytest.raises(PaymentRefused, match="step_s"):
                agent.look() if free == "look" else agent.recall(4)
    store.close()


def test_failures_before_a_reset_do_not_count_after_it(ledger_url):
    clock = Clock()
    store = open_store(ledger_url, clock_ms=clock)
    shop = Shop(open_terms, paid=httpx.ReadError("reset"))
    with make_guard(store) as guard, guard.session("s", budget="$5.00", id="run") as session:
        numbers = itertools.count()

        def fails(times):
            for number in itertools.islice(numbers, times):
                with pytest.raises(SettlementUncertain):
                    client(session, shop).get(URL, params={"n": number})

        fails(5)
        with pytest.raises(SessionTripped):
            client(session, shop).get(URL, params={"n": "more"})
        owner_resets(store, "run")
        clock.tick(1)
        fails(4)
        assert session.report().to_dict()["state"] == "open"
        fails(1)
        assert session.report().to_dict()["terminated_by"] == "loop_detected"
    store.close()


@pytest.mark.parametrize("back_s", [6, 30, 3_600])
def test_a_clock_that_was_set_back_switches_no_loop_detector_off(ledger_url, back_s):
    clock = Clock()
    store = open_store(ledger_url, clock_ms=clock)
    with make_guard(store) as guard, guard.session("s", budget="$5.00") as session:
        agent = Agent(session)
        agent.charge(1)
        clock.tick(-back_s)
        rules = [agent.take("charge", 2) for _ in range(100)]
        assert rules[:11] == [*[None] * 10, "loop_detected"]
    store.close()


def test_what_is_held_and_given_back_lifts_no_mean(ledger_url):
    with make_guard(ledger_url, policy=Policy(spike=Spike(action="trip"), breaker=None)) as guard:
        with guard.session("s", budget="$5.00") as session:
            agent = Agent(session)
            for number in range(4):
                agent.charge(number, 2)
            for cents in (
                6,
                9,
                14,
                23,
                39,
                63,
            ):  # none of them a spike beside those before it, and none of them paid for
                try:
                    with session.hold("serp", up_to=f"$0.{cents:02d}") as job:
                        job.void()
                except PaymentRefused:
                    break
            assert agent.take("charge", 9, 90) in ("spend_spike", "session_tripped")


def test_a_payment_that_was_never_signed_is_no_step(ledger_url):
    refusals = [SignerError("not now")] * 4

    def refuse(_hold):
        if refusals:
            raise refusals.pop()

    policy = Policy(loop=Loop(latch_after=1, calls=2), velocity=Velocity(calls_per_day=2), max_steps=2, breaker=None)
    with make_guard(ledger_url, policy=policy, signer=SpySigner(before=refuse)) as guard:
        with guard.session("s", budget="$5.00") as session:
            agent = Agent(session)
            for _ in range(4):
                with pytest.raises(SignerError):
                    agent.pay()
            assert [agent.take("pay") for _ in range(3)] == [None, None, "max_steps"]

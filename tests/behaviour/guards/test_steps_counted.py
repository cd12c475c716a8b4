"""Latches where they are easily lost: answers that come late, calls that were never billed, owners who say it twice."""

import itertools
import threading
from types import SimpleNamespace

import anyio
import httpx
import pytest
from typer.testing import CliRunner

from tests.support.agent import Agent, owner_resets
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, receipt, required
from x402guard import (
    CallTimeout,
    CircuitOpen,
    Loop,
    LoopDetected,
    PaymentRefused,
    Policy,
    SessionTripped,
    SettlementUncertain,
    Spike,
    Velocity,
)
from x402guard.cli import app
from x402guard.policy import Breaker, Timeouts
from x402guard.stores import open_store

SETTLED = {"PAYMENT-RESPONSE": b64(receipt())}


def open_terms(request):
    return required(url=str(request.url))


class Slow(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Two pieces of an answer with eleven seconds between them, by a clock that is not the machine's."""

    def __init__(self, clock):
        self.clock = clock

    def __iter__(self):
        yield b"{"
        self.clock.tick(11)
        yield b"}"

    async def __aiter__(self):
        for piece in self:
            yield piece


@pytest.fixture
def watch(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("x402guard.http.deadline.time", SimpleNamespace(monotonic=lambda: clock.now_ms / 1000))
    return clock


def buy_slowly(mode, session, watch, number):
    shop = Shop(open_terms, paid=lambda _request, _shop: httpx.Response(200, headers=SETTLED, stream=Slow(watch)))
    if mode == "sync":
        return client(session, shop).get(URL, params={"n": number})

    async def go():
        async with async_client(session, shop) as http:
            return await http.get(URL, params={"n": number})

    return anyio.run(go)


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
    policy = Policy(loop=Loop(calls=3, own={}), velocity=Velocity(calls_per_day=3), breaker=None)
    with make_guard(ledger_url, policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        for model in itertools.islice(itertools.cycle(models), 30):
            assert client(session, busy).post(CHAT, json=ask(model=model)).status_code == 429
        assert session.report().to_dict()["state"] == "open"


def test_tools_held_in_turn_and_given_back_make_no_cycle(ledger_url):
    with make_guard(ledger_url, policy=Policy(loop=Loop(calls=3), breaker=None)) as guard:
        with guard.session("s", budget="$5.00") as session:
            for number in range(30):
                with session.hold("serp", up_to="$0.01", arguments={"q": number % 2}) as job:
                    job.void()
            assert session.report().to_dict()["state"] == "open"


@pytest.mark.parametrize("free", ["look", "recall"])
def test_a_tool_that_costs_nothing_loops_like_any_other(ledger_url, free):
    with make_guard(ledger_url, policy=Policy(loop=Loop(calls=3), breaker=None)) as guard:
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


def command(url, *arguments):
    done = CliRunner().invoke(app, [*arguments, "--ledger", url])
    return done.exit_code, done.output + str(done.exception or "")


def test_a_limit_that_the_owner_raised_twice_stays_when_the_agent_opens_it_as_before(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard:
        guard.session("s", budget="$0.10", id="run").close()
        for limit in ("$1.00", "$2.00"):
            assert command(url, "budget", "set", "run", limit)[0] == 0
        with guard.session("s", budget="$0.10", id="run") as session:
            assert str(session.limit) == "2.00"
            session.charge("film", "$1.50")


def test_a_limit_that_the_owner_raised_and_lowered_stays_when_the_agent_opens_it_as_before(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard:
        guard.session("s", budget="$0.10", id="run").close()
        for limit in ("$1.00", "$0.05"):
            assert command(url, "budget", "set", "run", limit)[0] == 0
        with guard.session("s", budget="$0.10", id="run") as session:
            assert str(session.limit) == "0.05"


@pytest.mark.parametrize("per", [None, "day"])
def test_a_named_budget_that_is_reset_pays_again(tmp_path, per):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard:
        customer = guard.budget("customer", "$1.00", per=per)
        session = customer.session("s", budget="$0.50")
        for _ in range(2):
            assert command(url, "trip", "customer")[0] == 0
            with pytest.raises(SessionTripped):
                session.charge("serp", "$0.01")
            assert command(url, "reset", "customer")[0] == 0
            session.charge("serp", "$0.01")


def test_no_word_of_an_agents_opens_what_is_latched_or_raises_what_is_set(ledger_url):
    with make_guard(ledger_url) as guard:
        session = guard.session("s", budget="$0.50", id="run")
        session.trip("why")
        for _ in range(3):  # opened, closed and opened again
            with guard.session("s", id="run") as again, pytest.raises(SessionTripped):
                again.charge("serp", "$0.01")
        with guard.session("s", budget="$0.40", id="run") as lower, pytest.raises(SessionTripped):
            lower.charge("serp", "$0.01")
        for asked in ("$0.41", "$0.50", "$99"):
            with pytest.raises(Exception, match="never"):
                guard.session("s", budget=asked, id="run")
        assert session.report().to_dict()["terminated_by"] == "kill_switch"


def test_a_session_that_is_latched_while_a_tool_runs_books_what_it_cost(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$0.50") as session:
        with session.hold("render", up_to="$0.10") as job:
            session.trip("why")
            job.capture("$0.04")
        report = session.report().to_dict()
        assert (report["state"], report["spent"], report["held"]) == ("tripped", "0.04", "0.00")


def test_a_session_that_is_latched_while_its_payment_is_out_takes_what_was_bought(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$0.50") as session:

        def trips(request, _shop):
            session.trip("while it is out")
            return httpx.Response(200, headers=SETTLED, json={"path": request.url.path})

        assert client(session, Shop(open_terms, paid=trips)).get(URL).status_code == 200
        report = session.report().to_dict()
        assert (report["state"], report["spent"], report["held"]) == ("tripped", "0.01", "0.00")


def test_a_session_that_is_latched_between_its_402_and_its_payment_signs_nothing(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$0.50") as session:

        def terms(request):
            session.trip("while it was asked")
            return required(url=str(request.url))

        shop = Shop(terms)
        with pytest.raises(SessionTripped):
            client(session, shop).get(URL)
        assert (shop.payments, session.held) == ([], 0)


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


def test_the_owner_sets_a_limit_below_what_is_used_and_the_session_is_latched_until_it_is_raised(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard, guard.session("s", budget="$1.00", id="run") as session:
        session.charge("serp", "$0.30")
        assert command(url, "budget", "set", "run", "$0.20")[1] == "session run (s): $0.20, $0.00 left, tripped\n"
        assert Agent(session).tries_everything() == {"session_tripped"}
        code, said = command(url, "reset", "run")
        assert (code != 0, "budget set run $0.30" in said) == (True, True)
        assert command(url, "budget", "set", "run", "$0.35")[0] == 0
        with pytest.raises(SessionTripped, match="overshoot"):
            session.charge("serp", "$0.01")  # a limit raised is no reset
        assert command(url, "reset", "run")[0] == 0
        session.charge("serp", "$0.05")
        words = [(event["event"], event.get("by", "")) for event in session.report().to_dict()["events"]]
        assert [word for word, _ in words if word in ("trip", "reset", "limit")] == ["limit", "trip", "limit", "reset"]
        assert all(by for word, by in words if word in ("reset", "limit"))


def test_a_reset_of_one_session_opens_no_other_and_not_the_wallet(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard:
        one, other = (guard.session(name, budget="$1.00", id=name) for name in ("one", "other"))
        for session in (one, other):
            session.trip("why")
        assert command(url, "reset", "one")[0] == 0
        one.charge("serp", "$0.01")
        with pytest.raises(SessionTripped):
            other.charge("serp", "$0.01")
        assert command(url, "trip", "wallet")[0] == 0
        assert command(url, "reset", "other")[0] == 0
        for session in (one, other):
            with pytest.raises(SessionTripped, match="wallet"):
                session.charge("serp", "$0.01")


def test_velocity_and_maxima_are_not_given_back_by_a_reset(ledger_url):
    store = open_store(ledger_url, clock_ms=Clock())
    policy = Policy(max_steps=2, velocity=Velocity(calls_per_day=2), breaker=None)
    with make_guard(store, policy=policy) as guard, guard.session("s", budget="$5.00", id="run") as session:
        agent = Agent(session)
        assert [agent.take("charge", number) for number in range(3)] == [None, None, "max_steps"]
        session.trip("why")
        owner_resets(store, "run")
        assert agent.take("charge", 4) == "max_steps"
    store.close()


@pytest.mark.parametrize("by", ["method", "file"])
def test_after_the_latch_nothing_is_signed_whatever_is_under_way(ledger_url, tmp_path, by):
    """Eight threads pay as fast as they can; whatever the merchant has seen was held before the latch, and is listed or ended."""
    stop, shop = tmp_path / "stop", Shop(open_terms)
    paid_some = threading.Event()
    with make_guard(ledger_url, policy=Policy(loop=None, bulkhead=None), kill_file=stop) as guard:
        session = guard.session("s", budget="$5.00")
        latched = []

        def pays(thread):
            http = client(session, shop)
            for number in range(200):
                try:
                    http.get(URL, params={"n": f"{thread}-{number}"})
                except SessionTripped:
                    latched.append(thread)
                    return
                paid_some.set()

        threads = [threading.Thread(target=pays, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        assert paid_some.wait(timeout=30)
        stop.touch() if by == "file" else session.trip("a person saw it")
        for thread in threads:
            thread.join(timeout=60)
        report = session.report().to_dict()
    events = [event["event"] for event in report["events"]]
    assert sorted(latched) == list(range(8))
    assert "authorize" not in events[events.index("trip") :]
    assert events.count("authorize") == len(shop.nonces) == events.count("capture") > 0
    assert (report["held"], report["outstanding"], report["terminated_by"]) == ("0.00", [], "kill_switch")

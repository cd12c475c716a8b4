"""What latches and what does not: one test a row, each after the agent has swallowed the refusal."""

import threading

import httpx
import pytest
from typer.testing import CliRunner

from tests.support.agent import Agent, owner_resets
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import OTHER_PAYEE, PAYEE, URL, Shop, b64, client, make_guard, receipt, required
from x402guard import (
    BudgetExhausted,
    Loop,
    LoopDetected,
    PaymentRefused,
    Policy,
    SessionTripped,
    SettlementUncertain,
    SpendSpike,
    Spike,
    Velocity,
)
from x402guard.cli import app
from x402guard.policy import Breaker, Rule, Timeouts
from x402guard.stores import open_store

pytestmark = pytest.mark.usefixtures("_before_the_books")


class Run:
    """One session on a clock, its agent, and its store."""

    def __init__(self, url, policy, budget="$5.00", **more):
        self.clock = Clock()
        self.url, self.policy, self.more = url, policy, more
        self.store = open_store(url, clock_ms=self.clock)
        self.guard = make_guard(self.store, policy=policy, **more)
        self.session = self.guard.session("s", budget=budget, id="run")
        self.agent = Agent(self.session)

    def report(self):
        return self.session.report().to_dict()

    def starts_again(self):
        """The agent's process ends, and another opens the session; books in memory stay, their guard goes."""
        self.guard.close()
        if self.url != "memory://":
            self.store.close()
            self.store = open_store(self.url, clock_ms=self.clock)
        self.guard = make_guard(self.store, policy=self.policy, **self.more)
        self.session = self.guard.session("s", id="run")
        self.agent = Agent(self.session)

    def is_latched(self, word):
        """Nothing is signed, asked or run any more, now and after a restart, until the owner has reset it."""
        for _ in range(2):
            before = self.agent.reached
            assert self.agent.tries_everything() == {"session_tripped"}
            assert self.agent.reached == before
            with pytest.raises(SessionTripped, match=word):
                self.session.child("fresh", budget="$0.10").charge("other", "$0.01")
            assert (self.report()["state"], self.report()["terminated_by"]) == ("tripped", word)
            self.starts_again()
        assert self.agent.take("charge", 1) == "session_tripped"
        owner_resets(self.store, "run")
        assert self.agent.take("charge", 2) is None
        assert (self.report()["state"], self.report()["terminated_by"]) == ("open", None)
        assert "reset" in [event["event"] for event in self.report()["events"]]

    def goes_on(self):
        assert self.report()["state"] == "open"
        assert self.report()["terminated_by"] is None
        assert self.agent.tries_everything() == {None}

    def close(self):
        self.guard.close()
        self.store.close()


@pytest.fixture
def start(ledger_url):
    runs = []

    def begin(policy=None, **more):
        runs.append(Run(ledger_url, policy or Policy(breaker=None), **more))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.mark.parametrize("kind", Agent.KINDS)
def test_a_loop_latches(start, kind):
    run = start(Policy(loop=Loop(latch_after=1, calls=3), breaker=None))
    for _ in range(3):
        assert run.agent.take(kind, 7) is None
    with pytest.raises(LoopDetected):
        getattr(run.agent, kind)(7)
    run.is_latched("loop_detected")


@pytest.mark.parametrize("kind", Agent.KINDS)
def test_a_spike_that_is_to_trip_latches(start, kind):
    run = start(Policy(spike=Spike(action="trip"), breaker=None))
    for number in range(4):
        assert run.agent.take(kind, number, 2) is None
    with pytest.raises(SpendSpike):
        getattr(run.agent, kind)(5, 9)
    run.is_latched("spend_spike")


def test_a_spike_that_is_only_told_latches_nothing(start):
    run = start()
    for number in range(4):
        run.agent.pay(number, 2)
    run.agent.charge(5, 1)
    assert run.agent.take("charge", 6, 90) is None
    run.goes_on()


def test_the_method_latches_and_lists_what_is_out_with_its_end(start):
    run = start()
    shop = Shop(paid=httpx.ReadError("reset"))
    with pytest.raises(SettlementUncertain):
        client(run.session, shop).get(URL)
    [lost] = run.report()["outstanding"]
    with run.session.hold("render", up_to="$0.03"):
        listed = run.session.trip("it talks to strangers")
        assert [(str(out.amount), out.payee) for out in listed] == [("0.01", PAYEE), ("0.03", "render")]
        assert (listed[0].hold_id, listed[0].deadline) == (lost["hold_id"], lost["deadline"])
        assert listed[0].deadline == run.clock.now_ms // 1000 + 60
        assert listed[1].deadline == run.clock.now_ms // 1000 + 900
    with pytest.raises(SessionTripped):
        client(run.session, shop).get(URL)  # the one in doubt is not shown again either
    assert len(shop.payments) == 1
    run.is_latched("kill_switch")


def test_the_first_reason_stands_however_often_it_is_tripped(start):
    run = start(Policy(loop=Loop(latch_after=1, calls=1), breaker=None))
    run.agent.take("charge")
    assert run.agent.take("charge") == "loop_detected"
    run.session.trip("and again")
    assert [event["reason"] for event in run.report()["events"] if event["event"] == "trip"][1:] == []
    run.is_latched("loop_detected")


@pytest.mark.parametrize("named", ["run", "s"])
def test_the_command_latches_and_lists_what_is_out(tmp_path, named):
    run = Run(f"sqlite:///{tmp_path / 'l.db'}", Policy(breaker=None))
    with pytest.raises(SettlementUncertain):
        client(run.session, Shop(paid=httpx.ReadError("reset"))).get(URL)
    done = CliRunner().invoke(app, ["trip", named, "--reason", "a\x1b[2Jb", "--ledger", run.url])
    assert done.exit_code == 0
    assert f"$0.01 to {PAYEE}" in done.output
    assert "out until 2027-01-15 08:01:00 UTC" in done.output
    assert run.report()["state"] == "tripped"
    run.is_latched("kill_switch")
    run.session.trip("once more")
    said = CliRunner().invoke(app, ["reset", named, "--ledger", run.url])
    assert said.output == "session run (s) is open\n"
    assert run.agent.take("pay") is None
    run.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [*Agent.KINDS, "look", "recall"])
def test_a_kill_file_latches_whatever_the_agent_tries_first(start, tmp_path, kind):
    stop = tmp_path / "stop"
    run = start(kill_file=stop)
    assert run.agent.take("charge", 1) is None
    stop.touch()
    before = run.agent.reached
    step = getattr(run.agent, kind)
    with pytest.raises(SessionTripped):
        step() if kind == "look" else step(2)
    assert run.agent.reached == before
    stop.unlink()
    run.is_latched("kill_switch")


def test_a_kill_file_that_stays_latches_again_after_a_reset(start, tmp_path):
    stop = tmp_path / "stop"
    run = start(kill_file=stop)
    stop.touch()
    for _ in range(2):
        assert run.agent.take("pay") == "session_tripped"
        assert run.report()["terminated_by"] == "kill_switch"
        owner_resets(run.store, "run")
    assert run.agent.reached == (0, 0, 0)


def test_a_kill_file_stops_every_run_and_a_reset_opens_one_alone(start, tmp_path):
    stop = tmp_path / "stop"
    run = start(kill_file=stop)
    other = Agent(run.guard.session("other", budget="$1.00"))
    stop.touch()
    assert {run.agent.take("charge"), other.take("charge")} == {"session_tripped"}
    stop.unlink()
    owner_resets(run.store, "run")
    assert (run.agent.take("charge"), other.take("charge")) == (None, "session_tripped")


@pytest.mark.parametrize("kind", ["think", "hold"])
def test_a_bill_above_its_ceiling_latches_what_it_exceeds(start, kind):
    run = start(budget="$0.0018" if kind == "think" else "$0.05")
    if kind == "think":  # the words have bytes for 400 tokens, where a hundred were counted
        words = ask(messages=[{"role": "user", "content": "word " * 100}])
        above = completion({"prompt_tokens": 400, "completion_tokens": 100})
        reply = client(run.session, lambda _request: httpx.Response(200, json=above)).post(CHAT, json=words)
        assert reply.status_code == 200
    else:
        with run.session.hold("render", up_to="$0.02") as job:
            job.capture("$0.09")
    assert run.report()["terminated_by"] == "overshoot"
    assert run.agent.tries_everything() == {"session_tripped"}
    assert run.agent.reached == (0, 0, 0)
    run.starts_again()
    assert run.agent.take("charge") == "session_tripped"


def test_a_usage_that_the_request_cannot_have_caused_latches_nothing_that_it_fits_into(start):
    run = start()
    hidden = completion({"prompt_tokens": 2_000, "completion_tokens": 5})
    client(run.session, lambda _request: httpx.Response(200, json=hidden)).post(CHAT, json=ask())
    run.goes_on()


def test_a_bill_above_its_ceiling_that_fits_all_the_same_latches_nothing(start):
    run = start()
    with run.session.hold("render", up_to="$0.02") as job:
        job.capture("$0.09")
    run.goes_on()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [*Agent.KINDS, "look", "recall"])
def test_past_its_own_time_the_session_is_latched_whatever_the_agent_tries_first(start, kind):
    run = start(Policy(timeouts=Timeouts(session_s=60), breaker=None))
    run.clock.tick(60)
    assert run.agent.take("charge", 1) is None
    run.clock.tick(0.001)
    before = run.agent.reached
    step = getattr(run.agent, kind)
    with pytest.raises(SessionTripped):
        step() if kind == "look" else step(2)
    assert run.agent.reached == before
    run.is_latched("session_timeout")


def test_past_its_time_a_payment_in_doubt_is_not_signed_once_more(start):
    run = start(Policy(timeouts=Timeouts(session_s=30), breaker=None))
    shop = Shop(paid=httpx.ReadError("reset"))
    with pytest.raises(SettlementUncertain):
        client(run.session, shop).get(URL)
    run.clock.tick(31)
    with pytest.raises(SessionTripped):
        client(run.session, shop).get(URL)
    assert len(shop.payments) == 1


def test_a_reset_gives_a_session_its_whole_time_again_and_an_opening_does_not(start):
    run = start(Policy(timeouts=Timeouts(session_s=60), breaker=None))
    run.clock.tick(50)
    run.starts_again()
    run.clock.tick(11)
    assert run.agent.take("charge") == "session_timeout"
    owner_resets(run.store, "run")
    run.clock.tick(60)
    assert run.agent.take("charge", 1) is None
    run.clock.tick(1)
    assert run.agent.take("charge", 2) == "session_timeout"


def test_a_payment_that_does_not_fit_refuses_only_itself(start):
    run = start(budget="$0.20")
    assert run.agent.take("pay", 1, 50) == "budget"
    assert run.agent.take("pay", 2, 10) is None
    assert run.agent.take("pay", 3, 50) == "budget"
    assert run.agent.take("pay", 4, 10) is None
    run.session.close()
    assert (run.report()["state"], run.report()["terminated_by"]) == ("closed", None)
    assert run.report()["spent"] == "0.20"


@pytest.mark.parametrize("kind", Agent.KINDS)
def test_a_session_that_closes_after_a_refusal_with_no_later_payment_ended_by_exhaustion(start, kind):
    run = start(budget="$0.10")
    run.agent.pay(1, 5)
    assert run.agent.take(kind, 2, 50) == "budget"
    run.session.close()
    assert run.report()["terminated_by"] == "budget_exhausted"


def test_a_block_left_by_its_refusal_ended_by_exhaustion_and_one_left_by_another_error_did_not(start):
    run = start(budget="$0.10")
    with pytest.raises(BudgetExhausted), run.session:
        run.agent.pay(1, 50)
    assert run.report()["terminated_by"] == "budget_exhausted"
    run.starts_again()
    assert run.report()["terminated_by"] is None
    with pytest.raises(ZeroDivisionError), run.session:
        run.agent.pay(1, 5)
        1 / 0  # noqa: B018
    assert run.report()["terminated_by"] == "error"


@pytest.mark.parametrize("kind", Agent.KINDS)
@pytest.mark.parametrize(("window", "frees_s"), [("minute", 65), ("hour", 3_660), ("day", 90_000)])
def test_velocity_frees_with_its_window(start, kind, window, frees_s):
    run = start(Policy(velocity=Velocity(**{f"calls_per_{window}": 2}), breaker=None))
    for number in range(2):
        assert run.agent.take(kind, number) is None
    assert run.agent.take(kind, 3) == f"calls_per_{window}"
    assert run.agent.take(kind, 3) == f"calls_per_{window}"
    run.clock.tick(frees_s)
    assert run.agent.take(kind, 3) is None
    assert run.report()["state"] == "open"


def test_a_breaker_half_opens(start):
    run = start(Policy(breaker=Breaker(failures=2, rest_s=30)))
    answers = [500, 500]
    paid = lambda _request, _shop: httpx.Response(answers.pop() if answers else 200, headers=ok)
    ok = {"PAYMENT-RESPONSE": b64(receipt())}
    shop = Shop(lambda request: required(url=str(request.url)), paid=paid)
    http = client(run.session, shop)
    for number in range(2):
        assert http.get(URL, params={"n": number}).status_code == 500
    with pytest.raises(PaymentRefused, match="failed 2 times in a row"):
        http.get(URL, params={"n": 3})
    run.clock.tick(31)
    assert http.get(URL, params={"n": 3}).status_code == 200
    run.goes_on()


def test_a_denial_is_for_that_offer_alone(start):
    rule = Rule(name="not-them", action="deny", payees=[OTHER_PAYEE])
    run = start(Policy(rules=[rule], breaker=None))
    run.agent.payee = OTHER_PAYEE
    assert run.agent.take("pay", 1) == "not-them"
    run.agent.payee = PAYEE
    assert run.agent.take("pay", 1) is None
    run.goes_on()


def test_a_step_that_is_late_refuses_itself_until_the_model_is_asked(start):
    run = start(Policy(timeouts=Timeouts(step_s=10), breaker=None))
    run.agent.think(1)
    run.clock.tick(11)
    for kind in ("pay", "charge", "hold", "use"):
        assert run.agent.take(kind, 1) == "step_timeout"
    assert run.agent.reached == (0, 1, 0)
    assert run.agent.take("think", 2) is None
    run.goes_on()


def test_a_budget_that_is_tripped_stops_what_is_under_it_until_it_is_reset(start):
    run = start()
    customer = run.guard.budget("customer", "$1.00")
    agent = Agent(customer.session("s", budget="$0.50"))
    assert agent.take("pay") is None
    customer.trip("they cancelled")
    assert agent.tries_everything() == {"session_tripped"}
    assert agent.session.report().to_dict()["state"] == "open"
    run.goes_on()
    owner_resets(run.store, customer.id)
    assert agent.take("pay", 2) is None


def test_of_fifty_threads_in_one_loop_as_many_pass_as_may(start):
    run = start(Policy(loop=Loop(latch_after=1, calls=10), breaker=None))
    rules, barrier = [], threading.Barrier(50)

    def step():
        barrier.wait(timeout=30)
        rules.append(run.agent.take("charge"))

    threads = [threading.Thread(target=step) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (rules.count(None), rules.count("loop_detected")) == (10, 1)
    assert rules.count("session_tripped") == 39
    run.is_latched("loop_detected")

"""What an owner's reset gives back: the loops count anew, the spikes and the session's time; and it survives a power cut."""

import subprocess
import time
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from tests.support.agent import Agent, owner_resets
from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from tests.support.terminal import at_terminal
from x402guard import (
    IllegalTransition,
    Loop,
    Policy,
    SessionTripped,
    Spike,
    Velocity,
)
from x402guard.cli import app
from x402guard.ledger.owner import reset_node
from x402guard.ledger.view import Scope
from x402guard.policy import Timeouts
from x402guard.stores import open_store


def reset(url):
    return CliRunner().invoke(app, ["reset", "run", "--ledger", url])


@pytest.mark.parametrize("kind", Agent.KINDS)
def test_after_the_command_loops_count_anew(tmp_path, kind):
    url, clock = f"sqlite:///{tmp_path / 'l.db'}", Clock(time.time_ns() // 10**6 - 30_000)
    store = open_store(url, clock_ms=clock)
    with make_guard(store, policy=Policy(loop=Loop(latch_after=1, calls=3, window_s=86_400), breaker=None)) as guard:
        agent = Agent(guard.session("s", budget="$5.00", id="run"))
        for _ in range(2):
            assert [agent.take(kind, 1) for _ in range(4)] == [None, None, None, "loop_detected"]
            assert reset(url).output == "session run (s) is open\n"
            clock.now_ms = time.time_ns() // 10**6 + 1_000  # the command goes by the machine's clock
    store.close()


def test_after_the_command_spikes_are_looked_at_anew_and_the_time_begins_anew(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    clock = Clock(time.time_ns() // 10**6 - 30_000)
    store = open_store(url, clock_ms=clock)
    policy = Policy(spike=Spike(action="trip"), timeouts=Timeouts(session_s=60), breaker=None)
    with make_guard(store, policy=policy) as guard:
        agent = Agent(guard.session("s", budget="$5.00", id="run"))
        assert [agent.take("charge", number, 2) for number in range(4)] == [None] * 4
        assert agent.take("charge", 5, 9) == "spend_spike"
        assert reset(url).exit_code == 0
        clock.tick(62)  # since it was opened, and about half of it since the reset
        assert agent.take("charge", 6, 9) is None
    store.close()


def test_a_reset_that_would_not_survive_a_power_cut_is_not_made(ledger_url):
    with make_guard(ledger_url) as guard:
        session = guard.session("s", budget="$5.00", id="run")
        session.trip("why")
        with pytest.raises(IllegalTransition, match="power cut"):
            guard.shell.store.transact(Scope(nodes=("run",)), lambda view: reset_node(view, "run", "the owner"))
        assert session.report().to_dict()["state"] == "tripped"


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


def test_the_owner_sets_a_limit_below_what_is_used_and_the_session_is_latched_until_it_is_raised(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard, guard.session("s", budget="$1.00", id="run") as session:
        session.charge("serp", "$0.30")
        refused = command(url, "budget", "set", "run", "0.20")[1]
        assert "$1.00 → $0.20 stops session run (s): $0.30 is used; write it without the $" in refused
        assert session.limit == Decimal("1.00")
        lowered = command(url, "budget", "set", "run", "0.20", "--yes")[1]
        assert lowered == "session run (s): $1.00 → $0.20, $0.00 left, tripped\n"
        assert Agent(session).tries_everything() == {"session_tripped"}
        code, said = command(url, "reset", "run")
        assert (code != 0, "budget set run 0.30" in said) == (True, True)
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


def test_a_shell_that_reads_the_sign_as_a_variable_stops_no_wallet(tmp_path):
    """`budget set wallet $20.00` arrives as 0.00, $0.50 as bash.50, and $5.00 as .00."""
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url, budget="$5.00") as guard, guard.session("s", budget="$1.00") as session:
        arrived = subprocess.run(
            ["bash", "-c", "echo $20.00; echo $0.50; echo $5.00"], capture_output=True, text=True, check=True
        ).stdout.split()
        assert arrived == ["0.00", "bash.50", ".00"]
        for word in arrived:
            code, said = command(url, "budget", "set", "wallet", word)
            assert (code != 0, "write it without the $, which a shell reads as a variable: 20.00" in said) == (
                True,
                True,
            )
        session.charge("serp", "$0.30")
        for written in ("20.00", "$20.00", "20"):
            assert "→ $20.00" in command(url, "budget", "set", "wallet", written)[1]


@pytest.mark.parametrize(("answer", "state"), [("n", "open"), ("y", "tripped"), ("", "open")])
def test_a_limit_that_stops_a_budget_is_asked_about_at_a_terminal(tmp_path, answer, state):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard, guard.session("s", budget="$1.00", id="run") as session:
        session.charge("serp", "$0.30")
        said = at_terminal([answer], "budget", "set", "run", "0.10", "--ledger", url)
        assert "$1.00 → $0.10 stops session run (s): $0.30 is used. Set it? [y/N]" in said
        assert ("nothing is changed" in said) == (state == "open")
        assert session.report().to_dict()["state"] == state

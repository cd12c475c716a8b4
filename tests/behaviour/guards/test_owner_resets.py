"""What an owner's reset gives back: the loops count anew, the spikes and the session's time; and it survives a power cut."""

import time

import pytest
from typer.testing import CliRunner

from tests.support.agent import Agent
from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from x402guard import IllegalTransition, Loop, Policy, Spike
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
    with make_guard(store, policy=Policy(loop=Loop(calls=3, window_s=86_400), breaker=None)) as guard:
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

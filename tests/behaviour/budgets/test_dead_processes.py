"""What a process that died leaves in a budget with a window, and what its owner does to a limit meanwhile."""

import os
from contextlib import closing
from datetime import UTC, datetime

import pytest

from tests.support import processes
from tests.support.command_line import typed
from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, ConfigError
from x402guard.stores import open_store

DAY_S = 86_400

DIES = """
import os, sys, httpx
from x402guard import Guard, GuardedTransport

def dies(request):
    os._exit(9)

with Guard(ledger=sys.argv[1]) as guard:
    team = guard.budget("team", "$0.01", per="day", tz=sys.argv[3])
    with team.session("worker", budget="$0.01") as session:
        if sys.argv[2] == "tool":
            with session.hold("render", up_to="$0.009"):
                os._exit(9)
        asks = {"model": "gpt-4o", "service_tier": "default", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 890}
        with httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(dies))) as http:
            http.post("https://api.openai.com/v1/chat/completions", json=asks)
"""


@pytest.fixture
def dead(request, tmp_path):
    """A ledger in which a worker died with most of its team's dollars held, and a clock that can be set."""
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    # Where it is about noon, so that the deadline is on the same day.
    done = processes.run(DIES, url, request.param, f"Etc/GMT{datetime.now(UTC).hour - 12:+d}")
    assert done.returncode == 9, done.stderr
    return url


def at_day(url, day):
    clock = Clock(int(os.stat(url.removeprefix("sqlite:///")).st_mtime * 1000))
    clock.tick(day * DAY_S)
    return closing(open_store(url, clock_ms=clock))


@pytest.mark.parametrize("dead", ["llm", "tool"], indirect=True)
@pytest.mark.parametrize("wakes", ["opening", "reconcile", "another session"])
def test_its_ceiling_counts_on_its_own_day_and_on_no_later_one(dead, wakes):
    with at_day(dead, 0) as store, make_guard(store) as guard:
        team = guard.budget("team")
        assert team.held > team.limit / 2
        with team.session("next", budget="$0.005") as session, pytest.raises(BudgetExhausted):
            session.charge("serp", "$0.003")
    for day in (1, 2):
        with at_day(dead, day) as store, make_guard(store) as guard:
            if wakes == "reconcile":
                guard.reconcile()
            team = guard.budget("team")
            if wakes == "another session":
                with guard.session("elsewhere", budget="$1") as elsewhere:
                    elsewhere.charge("serp", "$0.0001")
            assert (team.held, team.spent) == (0, 0)
            with team.session("next", budget="$0.01") as session:
                session.charge("serp", "$0.01")
            assert team.remaining == 0


def test_every_process_starts_after_the_owner_has_changed_the_wallets_limit(tmp_path):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    make_guard(url, budget="$1.00").close()
    for limit in ("$5.00", "$0.50", "$3.00"):
        assert typed("budget", "set", "wallet", limit, "--ledger", url, cwd=tmp_path).returncode == 0
        with make_guard(url, budget="$1.00") as guard, guard.session("s", budget="$2") as session:
            assert f"${session.remaining:.2f}" == (limit if limit == "$0.50" else "$2.00")
    with pytest.raises(ConfigError, match=r"Guard asks for \$2\.00"):
        make_guard(url, budget="$2.00")

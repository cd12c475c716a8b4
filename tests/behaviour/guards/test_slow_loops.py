"""The same call again and again is a loop without a clock: what counts is that nothing new is done between."""

import httpx
import pytest

from tests.behaviour.guards.test_loops import STEPS, answer_of, searches
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask
from tests.support.merchant import client, make_guard
from x402guard import ConfigError, Loop, LoopDetected, Policy
from x402guard.stores import open_store

SLOW = 8  # seconds between calls: fewer than ten in a minute


def slowly(act, clock, times):
    """How often a call passes that is made again and again, slowly."""
    for passed in range(times):
        clock.tick(SLOW)
        try:
            act()
        except LoopDetected as refused:
            return passed, str(refused)
    return times, ""


@pytest.mark.parametrize("step", STEPS)
def test_the_same_call_is_a_loop_however_slowly_it_is_made(ledger_url, step):
    clock = Clock()
    with make_guard(open_store(ledger_url, clock_ms=clock)) as guard, guard.session("slow", budget="$50.00") as session:
        passed, told = slowly(step(session), clock, 220)
        assert passed == 25
        assert "was called 25 times, identically, and nothing new between (policy.loop.repeats" in told
        for _ in range(2):
            clock.tick(SLOW)
            with pytest.raises(LoopDetected):
                step(session)()
        assert session.report().to_dict()["state"] == "tripped"


def test_paging_that_advances_is_no_loop_and_a_new_call_lets_the_same_one_pass_again(ledger_url):
    clock = Clock()
    with (
        make_guard(open_store(ledger_url, clock_ms=clock)) as guard,
        guard.session("pages", budget="$50.00") as session,
    ):
        for page in range(300):
            clock.tick(SLOW)
            session.charge("serp", "$0.01", arguments={"q": "Roe", "page": page})
        for page in range(20):
            assert slowly(searches(session), clock, 20) == (20, "")
            session.charge("serp", "$0.01", arguments={"q": "Roe", "page": 1_000 + page})


def test_asking_the_model_between_makes_no_use_of_a_tool_new(ledger_url):
    clock = Clock()
    with (
        make_guard(open_store(ledger_url, clock_ms=clock)) as guard,
        guard.session("agent", budget="$50.00") as session,
    ):
        http, search, asked = client(session, answer_of), searches(session), iter(range(1_000))

        def turn():
            said = [{"role": "tool", "tool_call_id": f"call_{next(asked)}", "content": "nothing was found"}]
            http.post(CHAT, json=ask(messages=said))
            search()

        assert slowly(turn, clock, 220)[0] == 25


def test_calls_in_turn_are_a_loop_too_where_none_is_new(ledger_url):
    clock, policy = Clock(), Policy(loop=Loop(longest_cycle=1))
    with make_guard(open_store(ledger_url, clock_ms=clock), policy=policy) as guard:
        with guard.session("turns", budget="$50.00") as session:
            names = iter(["a", "b", "c"] * 100)
            passed, _ = slowly(lambda: session.charge(next(names), "$0.01", arguments={"q": 1}), clock, 220)
            assert passed == 77  # the count begins with the last new one, the first "c"


def test_a_longer_conversation_with_the_same_last_message_is_the_same_call(ledger_url):
    clock, history = Clock(), []
    with make_guard(open_store(ledger_url, clock_ms=clock)) as guard, guard.session("chat", budget="$50.00") as session:
        http = client(session, answer_of)

        def turn():
            history.extend([{"role": "assistant", "content": f"{len(history)}"}, {"role": "user", "content": "go on"}])
            http.post(CHAT, json=ask(messages=list(history)))

        assert slowly(turn, clock, 40)[0] == 25


def test_what_was_given_back_does_not_count(ledger_url):
    clock = Clock()
    with make_guard(open_store(ledger_url, clock_ms=clock)) as guard, guard.session("void", budget="$50.00") as session:
        for _ in range(60):
            clock.tick(SLOW)
            with session.hold("serp", up_to="$0.05", arguments={"q": "Roe"}) as job:
                job.void("nothing was done")


def test_a_number_of_repeats_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"policy\.loop\.repeats"):
        Loop(repeats=0)


def test_a_call_that_was_given_back_counts_for_no_loop(ledger_url):
    clock = Clock()
    policy = Policy(breaker=None, velocity=None)
    with (
        make_guard(open_store(ledger_url, clock_ms=clock), policy=policy) as guard,
        guard.session("outage", budget="$50.00") as session,
    ):
        status = [503]
        http = client(
            session, lambda request: answer_of(request) if status[0] == 200 else httpx.Response(503, text="busy")
        )

        def call():
            http.post(CHAT, json=ask())

        assert slowly(call, clock, 60) == (60, "")  # nothing was bought
        status[0] = 200
        assert slowly(call, clock, 20) == (20, "")
        status[0] = 503
        assert slowly(call, clock, 3) == (3, "")  # and nothing is forgotten
        status[0] = 200
        assert slowly(call, clock, 60)[0] == 5

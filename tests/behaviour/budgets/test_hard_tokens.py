"""A hard limit of tokens: a call that may not fit is limited to what is left, or refused; nothing is sent past it."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.support.ledger import Clock
from tests.support.llm_provider import (
    ERROR,
    SYNC,
    Answer,
    Provider,
    ask,
    both_modes,
    chunk,
    completion,
    every_way,
    metered,
    sse,
)
from tests.support.llm_replies import used
from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, ConfigError, Policy, TokenBudget, TokensExhausted

OPENED = {
    "TokenBudget(hard=True)": {"tokens": TokenBudget},
    "token_limit, a number": {"tokens": int, "token_limit": "refuse"},
}


def hard(total):
    """A session under a hard limit, opened in one of the two ways."""
    return lambda guard, way: guard.session(
        "s", budget="$50", **({"tokens": TokenBudget(total, hard=True)} if "hard" in way else
                              {"tokens": total, "token_limit": "refuse"})
    )  # fmt: skip


def posted(way, session, *answers, body=None):
    provider = Provider(session, *answers)
    way.post(session, provider, body)
    return provider


def balance(session):
    return session.tokens.used, session.tokens.reserved


@pytest.mark.parametrize("opened", OPENED)
@every_way
def test_a_call_is_limited_to_what_is_left_and_refused_when_nothing_useful_is(way, opened):
    with make_guard() as guard:
        session = hard(400)(guard, opened)
        provider = posted(way, session, Answer.of(completion(used(20, 90))), body=ask(max_completion_tokens=300))
        assert (provider.bodies[0]["max_completion_tokens"], balance(session)) == (300, (110, 0))
        provider = posted(way, session, Answer.of(completion(used(20, 200))), body=ask(max_completion_tokens=300))
        limit = provider.bodies[0]["max_completion_tokens"]
        assert 200 <= limit < 290 - 20, "what is left, without the input"
        assert balance(session) == (330, 0)
        with pytest.raises(TokensExhausted, match=r"do not fit into the 70 that are left of 400 tokens") as caught:
            posted(way, session, body=ask(messages=[{"role": "user", "content": "word " * 60}]))
        assert (caught.value.rule, caught.value.code, balance(session), session.held) == (
            "tokens",
            "tokens_exhausted",
            (330, 0),
            0,
        )
        assert isinstance(caught.value, BudgetExhausted)


@both_modes
def test_a_call_without_a_limit_gets_one_that_fits(way):
    with make_guard() as guard:
        session = guard.session("s", budget="$50", tokens=2_000, token_limit="refuse")
        provider = posted(way, session, body=ask(max_completion_tokens=None))
        assert 1_900 <= provider.bodies[0]["max_completion_tokens"] < 2_000


def test_several_choices_share_what_is_left():
    with make_guard() as guard:
        session = guard.session("s", budget="$50", tokens=400, token_limit="refuse")
        provider = posted(SYNC, session, body=ask(n=3, max_completion_tokens=300))
        limit = provider.bodies[0]["max_completion_tokens"]
        assert 300 < 3 * limit < 400


ENDS = {
    "a stream that is cut": (Answer.stream(*sse(chunk("Yes.")), breaks="ReadError"), ask(stream=True), "all"),
    "no usage": (Answer.of(completion(usage=None)), ask(), "all"),
    "a provider's error": (Answer.of(ERROR, 503), ask(), "none"),
    "a 400": (Answer.of(ERROR, 400), ask(), "none"),
    "no connection": ("ConnectError", ask(), "all"),
}


@both_modes
@pytest.mark.parametrize("end", ENDS)
def test_what_was_reserved_is_counted_or_given_back_with_the_hold(way, end):
    answer, body, counted = ENDS[end]
    with metered() as outer:
        session = outer.child("c", budget="$4", tokens=1_000, token_limit="refuse")
        provider = Provider(session, answer)
        reserved = []
        provider.answers = [lambda _request: reserved.append(session.tokens.reserved) or answer]
        with suppress(way.library.HTTPError):
            way.post(session, provider, body)
        assert reserved[0] > 100
        assert balance(session) == (reserved[0] if counted == "all" else 0, 0)


def test_sixteen_threads_at_once_never_reserve_more_than_there_is():
    with make_guard(policy=Policy(loop=None)) as guard:
        session = guard.session("s", budget="$50", tokens=1_000, token_limit="refuse")
        begin, seen, lock = threading.Barrier(16), [], threading.Lock()

        def call(_number):
            begin.wait()

            def answers(request):
                [node] = session.shell.store.nodes(session.tokens.limit.node_id)  # both figures of one moment
                with lock:
                    seen.append(node.captured + node.held)
                out = min(60, json.loads(request.content)["max_completion_tokens"])  # as a provider keeps its limit
                return Answer.of(completion(used(20, out)))

            try:
                SYNC.post(session, Provider(session, answers), ask())
            except TokensExhausted:
                return "refused"
            return "answered"

        with ThreadPoolExecutor(16) as pool:
            ends = list(pool.map(call, range(16)))
        assert max(seen) <= 1_000
        assert session.tokens.used <= 1_000
        assert session.tokens.reserved == 0
        assert "refused" in ends


def test_a_call_that_ends_after_it_lapsed_counts_once():
    clock = Clock()
    with metered(clock=clock) as outer:
        session = outer.child("c", budget="$4", tokens=1_000, token_limit="refuse")

        def slow(_request):
            clock.tick(901)
            SYNC.post(session, Provider(session, Answer.of(completion(used(20, 5)))), ask())
            return Answer.of(completion(used(20, 90)))

        SYNC.post(session, Provider(session, slow), ask())
        lapsed = session.tokens.used - 25
        assert lapsed >= 110, "the reservation counted when it lapsed, and more than it came later"
        assert session.tokens.reserved == 0


def test_what_has_no_bound_in_tokens_is_refused_under_a_hard_limit():
    picture = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    body = ask(messages=[{"role": "user", "content": [picture]}])
    with metered(allowances={"image_url": "$0.05"}) as outer:
        session = outer.child("c", budget="$4", tokens=1_000, token_limit="refuse")
        with pytest.raises(TokensExhausted, match=r"messages\[0\].*no bound"):
            SYNC.post(session, Provider(session), body)


def test_a_soft_limit_comes_before_the_hard_one_and_is_told_to_its_owner():
    told = []
    with make_guard(on_notice=told.append) as guard:
        session = guard.session("s", budget="$50", tokens=TokenBudget(400, soft=100, hard=True))
        posted(SYNC, session, Answer.of(completion(used(20, 90))), body=ask(max_completion_tokens=300))
    [notice] = told
    assert (notice.kind, notice.session) == ("tokens_soft_limit", session.id)
    assert notice.facts["used_tokens"] == 110


@pytest.mark.parametrize("limiting", ["stop", None, True, ""])
def test_a_wrong_way_to_limit_is_named(limiting):
    with make_guard() as guard, pytest.raises(ConfigError, match="token_limit: "):
        guard.session("s", budget="$1", token_limit=limiting)
    with pytest.raises(ConfigError, match="hard: "):
        TokenBudget(100, hard="yes")


@pytest.mark.parametrize("usage", [{**used(20, 900), "x": -1}, used(20, 10**9)], ids=["contradicting", "absurd"])
def test_a_disputed_usage_counts_its_tokens_too(usage):
    with make_guard() as guard:
        session = guard.session("s", budget="$50", tokens=1_000, token_limit="refuse")
        sent = 0
        with pytest.raises(TokensExhausted):
            for _ in range(5):
                posted(SYNC, session, Answer.of(completion(usage)))
                sent += 1
        assert sent <= 2
        assert session.tokens.used >= 920


def test_a_child_with_tokens_of_its_own_is_limited_as_the_session_around_it():
    with make_guard() as guard:
        session = guard.session("s", budget="$50", tokens=1_000, token_limit="refuse")
        child = session.child("c", budget="$4", tokens=400)
        limited = posted(SYNC, child, Answer.of(completion(used(20, 300))), body=ask(max_completion_tokens=6_000))
        assert json.loads(limited.requests[-1].content)["max_completion_tokens"] < 400
        assert session.child("d", budget="$4").tokens is session.tokens


def test_a_child_that_shares_the_tokens_of_its_session_cannot_limit_them_alone():
    with make_guard() as guard:
        session = guard.session("s", budget="$50", tokens=50_000)
        with pytest.raises(ConfigError, match="token_limit: a child shares the tokens of its session"):
            session.child("c", budget="$4", token_limit="refuse")
        hard = guard.session("t", budget="$50", tokens=50_000, token_limit="refuse")
        assert hard.child("c", budget="$4", token_limit="refuse").tokens is hard.tokens


def test_a_resumed_session_may_name_its_own_tokens_for_a_child():
    with make_guard() as guard:
        guard.session("s", budget="$50", id="run", tokens=50_000)
        again = guard.session("s", id="run")
        assert again.child("c", budget="$1", tokens=again.tokens).tokens is again.tokens

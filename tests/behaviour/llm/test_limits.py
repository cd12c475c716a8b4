"""What is held for a call that sets no output limit, what becomes of a bill above its ceiling, and books that fail."""

import json
import threading
import time
from decimal import Decimal

import pytest

from tests.support.faults import Faulty
from tests.support.llm_provider import (
    CHAT,
    COST,
    ERROR,
    GEMINI,
    SYNC,
    Answer,
    Provider,
    ask,
    both_modes,
    completion,
    every_way,
    metered,
)
from x402guard import BudgetExhausted, LedgerUnavailable, ModelPrice, SessionTripped, Unpriced
from x402guard.stores import open_store

UNLIMITED = ask(max_completion_tokens=None)
CALLS = {
    "openai chat": (CHAT, UNLIMITED, ("max_completion_tokens",)),
    "openai, two choices": (CHAT, {**UNLIMITED, "n": 2}, ("max_completion_tokens",)),
    "openai responses": (
        "https://api.openai.com/v1/responses",
        {"model": "gpt-4o", "input": "hi"},
        ("max_output_tokens",),
    ),
    "azure": (
        "https://res.openai.azure.com/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21",
        {"messages": UNLIMITED["messages"]},
        ("max_completion_tokens",),
    ),
    "anthropic": (
        "https://api.anthropic.com/v1/messages",
        {**UNLIMITED, "model": "claude-sonnet-4-5"},
        ("max_tokens",),
    ),
    "gemini": (
        f"{GEMINI}:generateContent",
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"temperature": 0.5}},
        ("generationConfig", "maxOutputTokens"),
    ),
    "gemini, plain": (
        f"{GEMINI}:generateContent",
        {"contents": [{"parts": [{"text": "hi"}]}]},
        ("generationConfig", "maxOutputTokens"),
    ),
    "mistral": (
        "https://api.mistral.ai/v1/chat/completions",
        {**UNLIMITED, "model": "mistral-large-2512"},
        ("max_tokens",),
    ),
    "cohere": ("https://api.cohere.com/v2/chat", {**UNLIMITED, "model": "c4ai-aya-expanse-32b"}, ("max_tokens",)),
    "deepseek": ("https://api.deepseek.com/chat/completions", {**UNLIMITED, "model": "deepseek-chat"}, ("max_tokens",)),
}
each_call = pytest.mark.parametrize(("url", "body", "field"), CALLS.values(), ids=CALLS)


def whole(url, body, **settings):
    """What is held for the most that the model can answer with, the call being answered with an error that costs nothing."""
    with metered(budget="$1000", **settings) as session:
        provider = Provider(session, Answer.of(ERROR, 400))
        response, _ = SYNC.post(session, provider, body, url=url)
        assert provider.bodies == [body]
        assert "output_limited" not in [event["event"] for event in session.report().to_dict()["events"]]
        assert "x402guard" not in response.extensions
        return provider.held[0]


def some(amount, parts):
    """One part of so many, in whole nano-dollars."""
    return (amount / parts).quantize(Decimal("1e-9"))


def taken_out(body, path):
    """The value at *path*, and the body without it."""
    body = json.loads(json.dumps(body))
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    return inner.pop(path[-1]), body


# -- fit -------------------------------------------------------------------------------------------------------------------


@each_call
def test_fit_holds_the_models_maximum_where_it_just_fits(url, body, field):
    held = whole(url, body)
    with metered(budget=held) as session:
        provider = Provider(session, Answer.of(ERROR, 400))
        SYNC.post(session, provider, body, url=url)
        assert (provider.bodies, provider.held) == ([body], [held])


@both_modes
@each_call
def test_fit_writes_a_limit_where_it_does_not_fit(way, url, body, field):
    budget = some(whole(url, body), 2)
    with metered(budget=budget) as session:
        provider = Provider(session, "ReadError", Answer.of(ERROR, 429))
        with pytest.raises(way.library.ReadError):
            way.post(session, provider, body, url=url)
        limit, rest = taken_out(provider.bodies[0], field)
        assert rest == (
            {**body, "generationConfig": {}} if "generationConfig" in field and "generationConfig" not in body else body
        )
        [held] = provider.held
        one_more = held / limit  # at least what one token more would have added
        assert budget - one_more <= held <= budget, "nothing else is held, so it may hold all that is left"
        assert limit >= 1_024
        [event] = [e for e in session.report().to_dict()["events"] if e["event"] == "output_limited"]
        assert (event["output_tokens"], event["model"]) == (limit, body.get("model") or event["model"])
        # Its answer was lost, so it is held until it is known, and nothing is left: the next one does not get in between.
        with pytest.raises(BudgetExhausted):
            way.post(session, provider, body, url=url)


@both_modes
@each_call
def test_fit_leaves_three_quarters_to_others_that_hold_something(way, url, body, field):
    budget = some(whole(url, body), 2)
    with metered(budget=budget) as session, session.hold("a tool", up_to=some(budget, 10)):
        provider = Provider(session, Answer.of(ERROR, 429))
        way.post(session, provider, body, url=url)
        limit, _ = taken_out(provider.bodies[0], field)
        left = budget - some(budget, 10)
        held = provider.held[0] - some(budget, 10)
        assert left / 4 - held / limit <= held <= left / 4


@every_way
@pytest.mark.parametrize(("used", "shortened"), [(9_988, False), (9_989, True)])
def test_an_answer_that_ends_at_the_limit_that_we_wrote_is_told(way, used, shortened):
    notices = []
    answer = completion({"prompt_tokens": 20, "completion_tokens": used})
    answer["choices"][0]["finish_reason"] = "length"
    with metered(budget="$0.10", guard={"on_notice": notices.append}) as session:
        response, chunks = way.post(session, Provider(session, Answer.of(answer)), UNLIMITED)
        receipt = response.extensions["x402guard"]
        assert (receipt.output_limit, receipt.shortened) == (9_989, shortened)
        assert json.loads(b"".join(chunks)) == answer
    told = [notice for notice in notices if notice.kind == "output_shortened"]
    assert [notice.facts["output_tokens"] for notice in told] == [9_989] * shortened


def test_an_answer_that_ends_at_the_callers_own_limit_is_not_shortened():
    answer = completion({"prompt_tokens": 20, "completion_tokens": 100})
    with metered(budget="$0.10") as session:
        response, _ = SYNC.post(session, Provider(session, Answer.of(answer)), ask(max_completion_tokens=100))
        assert not response.extensions["x402guard"].shortened


@every_way
def test_the_limit_that_we_wrote_stands_in_the_receipt(way):
    usage = {"prompt_tokens": 20, "completion_tokens": 5}
    with metered(budget="$0.10") as session:
        provider = Provider(session, Answer.of(completion(usage)))
        response, _ = way.post(session, provider, UNLIMITED)
        receipt = response.extensions["x402guard"]
        assert (
            receipt.output_limit == provider.bodies[0]["max_completion_tokens"] == 9_989
        )  # ($0.10 - 44 x $2.50/M) / $10/M
        assert (receipt.amount, receipt.evidence) == (COST, "provider_usage")
        assert provider.requests[0].headers["content-length"] == str(len(provider.requests[0].content))


@both_modes
@each_call
def test_fit_refuses_where_what_is_left_pays_for_less_than_1024_tokens(way, url, body, field):
    held = whole(url, body)
    with metered(budget=some(held, 1000)) as session:
        provider = Provider(session)
        with pytest.raises(
            BudgetExhausted,
            match=rf"{'.'.join(field)}: the request sets no output limit, and the one that the guard would write, \d+ tokens",
        ) as caught:
            way.post(session, provider, body, url=url)
        assert (provider.requests, session.held, session.spent) == ([], 0, 0)
        assert caught.value.requested > caught.value.available
        assert not caught.value.money_may_have_moved


def test_fit_refuses_at_1023_tokens_and_writes_1024():
    price = {"m": ModelPrice(input="$0", output="$1000", max_output=100_000)}
    for budget, written in (("$1.023", None), ("$1.024", 1_024)):
        with metered(budget=budget, models=price) as session:
            provider = Provider(session)
            if written is None:
                with pytest.raises(BudgetExhausted):
                    SYNC.post(session, provider, {**UNLIMITED, "model": "m"})
            else:
                SYNC.post(session, provider, {**UNLIMITED, "model": "m"})
            assert [sent.get("max_completion_tokens") for sent in provider.bodies] == [written] * len(provider.bodies)
            assert bool(provider.bodies) == (written is not None)


def test_three_calls_at_once_without_a_limit_wait_for_each_other_and_all_fit():
    """The first holds all that is left, and is slow: the others wait, and are not told that the budget is used up."""
    with metered(budget="$0.10") as session:
        provider, began, errors = Provider(session, *[Answer.of() for _ in range(3)]), threading.Barrier(3), []

        def ask_slowly():
            began.wait()
            try:
                with SYNC.library.Client(transport=SYNC.transport(session, provider)) as http:
                    with http.stream("POST", CHAT, json=UNLIMITED) as response:
                        time.sleep(0.1)  # the answer of a model takes its time
                        response.read()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=ask_slowly) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert max(sent["max_completion_tokens"] for sent in provider.bodies) == 9_989
        assert (session.held, session.spent) == (0, 3 * COST)


def test_one_that_could_never_fit_is_told_so_at_once():
    price = {"m": ModelPrice(input="$0", output="$1000", max_output=100_000)}
    with metered(budget="$1.50", models=price) as session, session.hold("a tool", up_to="$0.50"):
        began = time.monotonic()
        with pytest.raises(BudgetExhausted, match=r"for a quarter of the \$1\.00 that is left") as refused:
            SYNC.post(session, Provider(session), {**UNLIMITED, "model": "m"})
        assert time.monotonic() - began < 5, "the hold of this very task is not waited for"
        assert str(refused.value.requested) == "1.024"


# -- the other settings ----------------------------------------------------------------------------------------------------


@each_call
def test_model_max_holds_the_maximum_or_refuses(url, body, field):
    held = whole(url, body, unbounded_output="model_max")
    assert held == whole(url, body)
    left = some(held, 2)
    with metered(budget=left, unbounded_output="model_max") as session:
        provider = Provider(session)
        with pytest.raises(BudgetExhausted) as caught:
            SYNC.post(session, provider, body, url=url)
        assert (caught.value.requested, caught.value.available) == (held, left)
        assert (provider.requests, session.held) == ([], 0)


@both_modes
@each_call
def test_refuse_refuses_naming_the_field(way, url, body, field):
    with metered(unbounded_output="refuse") as session:
        provider = Provider(session)
        with pytest.raises(Unpriced, match=".".join(field)) as caught:
            way.post(session, provider, body, url=url)
        assert caught.value.rule == "unbounded_output"
        assert (provider.requests, session.held) == ([], 0)


@pytest.mark.parametrize("setting", ["fit", "model_max", "average", "refuse"])
def test_a_limit_of_the_callers_own_is_what_is_held_for_under_every_setting(setting):
    with metered(unbounded_output=setting) as session:
        provider = Provider(session)
        SYNC.post(session, provider)
        assert (provider.outcome, provider.bodies) == ("usage", [ask()])


@pytest.mark.parametrize("setting", ["fit", "model_max", "average"])
def test_a_model_whose_maximum_nobody_knows_is_refused_by_name(setting):
    price = {"house-model": ModelPrice(input="$1", output="$2")}
    with metered(unbounded_output=setting, models=price) as session:
        provider = Provider(session)
        with pytest.raises(Unpriced, match="the maximum output of 'house-model' is unknown"):
            SYNC.post(session, provider, {**UNLIMITED, "model": "house-model"})
        assert (provider.requests, session.held) == ([], 0)


DEAR = Answer.of(completion({"prompt_tokens": 20, "completion_tokens": 16_384}))
DEAR_COST = Decimal("0.16389")  # 20 x 2,500 + 16,384 x 10,000 nano-dollars


@both_modes
def test_average_holds_the_maximum_first_and_then_the_mean_marked_as_an_estimate(way, ledger_url):
    with metered(ledger_url, unbounded_output="average") as session:
        provider = Provider(session, Answer.of(), DEAR, Answer.of())
        for _ in range(3):
            way.post(session, provider, UNLIMITED)
        assert provider.bodies == [UNLIMITED] * 3
        spent = [0, COST, COST + DEAR_COST]
        held = [now - 0 for now in provider.held]
        assert held[0] > DEAR_COST
        assert held[1:] == [COST, (COST + DEAR_COST) / 2]
        assert session.spent == spent[2] + COST
        marks = [entry.facts()["ceiling"]["estimate"] for entry in entries(session) if entry.event == "authorize"]
        assert marks == [False, True, True]


def entries(session):
    return session.shell.store.entries(session.id)


@both_modes
def test_average_overshoots_by_one_call_at_most(way, ledger_url):
    with metered(ledger_url, unbounded_output="average") as session:
        way.post(session, Provider(session), UNLIMITED)
        with session.child("c", budget="$0.0005") as child:
            provider = Provider(child, DEAR)
            assert way.post(child, provider, UNLIMITED)[0].status_code == 200
            assert child.spent == DEAR_COST
            with pytest.raises(SessionTripped, match="overshoot"):
                way.post(child, provider, UNLIMITED)
            assert len(provider.requests) == 1


def test_calls_at_an_average_that_are_out_together_overshoot_by_one_call_at_most():
    """Each is held at next to nothing: five that turn out dear may not pass the budget five times."""
    with metered(unbounded_output="average") as session:
        SYNC.post(session, Provider(session), UNLIMITED)
        with session.child("c", budget="$0.50") as child:
            http = SYNC.library.Client(transport=SYNC.transport(child, Provider(child, DEAR)))
            open_ = []
            for _ in range(8):
                try:
                    open_.append(http.send(http.build_request("POST", CHAT, json=UNLIMITED), stream=True))
                except BudgetExhausted:
                    break
            for response in open_:
                response.read()
            assert child.spent <= Decimal("0.50") + DEAR_COST


# -- a bill above its ceiling ----------------------------------------------------------------------------------------------

WORDY = ask(messages=[{"role": "user", "content": "word " * 100}])
ABOVE = Answer.of(completion({"prompt_tokens": 400, "completion_tokens": 100}))
ABOVE_COST = Decimal(
    "0.002"
)  # 400 x 2,500 + 100 x 10,000 nano-dollars: the body has bytes for that, tiktoken counts 100


@every_way
def test_a_plausible_bill_above_its_ceiling_is_booked_in_full_and_the_answer_handed_over(way, ledger_url):
    with metered(ledger_url) as session:
        provider = Provider(session, ABOVE)
        response, chunks = way.post(session, provider, WORDY)
        assert provider.held[0] < ABOVE_COST == session.spent
        assert json.loads(b"".join(chunks)) == completion({"prompt_tokens": 400, "completion_tokens": 100})
        assert response.extensions["x402guard"].amount == ABOVE_COST
        assert Decimal(session.report().to_dict()["evidence"]["provider_usage"]) == ABOVE_COST


@both_modes
@pytest.mark.parametrize(
    ("wallet", "parent", "trips"),
    [("$1", "$1", ["child"]), ("$1", "$0.0019", ["parent", "child"]), ("$0.00191", "$0.0019", None)],
)
def test_it_trips_every_budget_that_it_exceeds_and_no_other(way, ledger_url, wallet, parent, trips):
    with metered(ledger_url, budget=parent, guard={"budget": wallet}) as session:
        with session.child("child", budget="$0.0018") as child:
            provider = Provider(child, ABOVE)
            assert way.post(child, provider, WORDY)[0].status_code == 200
            nodes = {node.id: node for node in session.shell.store.nodes()}
            tripped = [
                {"wallet": "wallet", session.id: "parent", child.id: "child"}[i]
                for i, n in nodes.items()
                if n.terminated_by
            ]
            assert tripped == (trips or ["wallet", "parent", "child"])
            with pytest.raises(SessionTripped, match="overshoot"):
                way.post(child, provider, ask())
            assert len(provider.requests) == 1
            assert child.report().to_dict()["terminated_by"] == "overshoot"
        if trips == ["child"]:
            assert way.post(session, Provider(session), ask())[0].status_code == 200


# -- books that cannot be written ------------------------------------------------------------------------------------------


@pytest.fixture
def faulty(ledger_url):
    store = Faulty(open_store(ledger_url))
    store.inline = ledger_url == "memory://"
    return store


committed_or_not = pytest.mark.parametrize("committed", [False, True], ids=["not written", "answer lost"])


@both_modes
@committed_or_not
def test_books_that_fail_before_the_call_mean_that_nothing_is_sent_and_nothing_held(way, faulty, committed):
    with metered(store=faulty) as session:
        provider = Provider(session)
        faulty.fail(1, LedgerUnavailable("disk full"), committed=committed)
        with pytest.raises(LedgerUnavailable) as caught:
            way.post(session, provider)
        assert not caught.value.money_may_have_moved
        assert (provider.requests, session.held, session.spent) == ([], 0, 0)


@both_modes
@committed_or_not
@pytest.mark.parametrize(
    "answer", [Answer.of(), Answer.of(ERROR, 429), Answer.of(ERROR, 408), Answer.of(ERROR, 503)], ids=lambda a: a.status
)
def test_books_that_fail_at_the_end_do_not_take_the_answer_away(way, faulty, committed, answer):
    with metered(store=faulty) as session:
        provider = Provider(session, answer)
        faulty.fail(2, LedgerUnavailable("disk full"), committed=committed)
        response, chunks = way.post(session, provider)
        assert (response.status_code, b"".join(chunks)) == (answer.status, answer.pieces[0])
        if faulty.is_shared and answer.status in (200, 408):  # what it cost is written later, by another thread
            until_s = time.monotonic() + 10
            while session.held and time.monotonic() < until_s:
                time.sleep(0.01)
            assert session.held == 0
        elif not committed:
            assert (session.held, session.spent) == (provider.held[0], 0)
        if answer.status in (200, 408):
            assert response.extensions["x402guard"].in_doubt


@both_modes
def test_books_that_fail_after_a_lost_answer_leave_the_librarys_own_error(way, faulty):
    with metered(store=faulty) as session:
        if session.shell.late_writes is not None:
            session.shell.late_writes.close()  # an end that fails here is not written later
        provider = Provider(session, "ReadTimeout")
        faulty.fail(2, LedgerUnavailable("disk full"))
        with pytest.raises(way.library.ReadTimeout) as caught:
            way.post(session, provider)
        assert "could not be captured: disk full" in caught.value.__notes__[0]
        assert session.held == provider.held[0]

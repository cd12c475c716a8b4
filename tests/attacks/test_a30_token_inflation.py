"""Row 30: what a provider says was used is booked, up to the most that the model can take; the rest is disputed."""

import json
from decimal import Decimal, localcontext

import pytest

from tests.support.ledger import Clock
from tests.support.llm_provider import (
    CHAT,
    COST,
    GEMINI,
    USED,
    WAYS,
    Answer,
    Provider,
    ask,
    chunk,
    completion,
    every_way,
    metered,
    sse,
)
from x402guard import SessionTripped
from x402guard.stores import open_store

WORDY = ask(messages=[{"role": "user", "content": "word " * 100}])
ANTHROPIC = "https://api.anthropic.com/v1/messages"
BILLION = 10**9


@pytest.fixture(params=["memory", "sqlite"])
def books(request, ledger):
    """A ledger that survives being looked at."""
    return open_store("memory://" if request.param == "memory" else ledger)


@pytest.fixture
def way(mode):
    return WAYS[0 if mode == "sync" else 1]


def openai(into, out, **more):
    return {"prompt_tokens": into, "completion_tokens": out, **more}


def of(raw) -> Answer:
    """A completion whose usage is this text, be it JSON or not."""
    return Answer.of(json.dumps(completion("USAGE")).replace('"USAGE"', raw))


def nodes(session):
    return {node.name: node for node in session.shell.store.nodes()}


MOST = Decimal("0.822528")
"""128,000 tokens of gpt-4o's window x 4,250 + 16,384 of its longest answer x 17,000 nano-dollars: its dearest rates."""


def assert_disputed(way, session, provider, body=None, url=CHAT, claimed=None, spent=None):
    """A part of the claim is booked, the rest is told as disputed, and the answer is the caller's. Nothing is tripped."""
    _, chunks = way.post(session, provider, body, url=url)
    [hold] = provider.held
    assert b"".join(chunks) == b"".join(provider.answers[0].pieces)
    assert session.held == 0
    assert hold <= session.spent < 20
    if spent is not None:
        assert session.spent == spent
    report = session.report().to_dict()
    [note] = [event for event in report["events"] if event["event"] == "note"]
    [capture] = [event for event in report["events"] if event["event"] == "capture"]
    assert capture["note"].startswith("disputed: ")
    told = Decimal(note["claim"]["amount"])
    with localcontext(prec=1000):
        assert Decimal(report["disputed"]) == max(0, told - session.spent)
    if claimed is not None:
        assert told == Decimal(claimed)
    assert (report["terminated_by"], report["state"]) == (None, "open")


def assert_latched(way, session, provider, body=None, url=CHAT):
    """With disputes="latch" the same bill also trips the session, and no budget above it."""
    way.post(session, provider, body, url=url)
    report = session.report().to_dict()
    assert (report["terminated_by"], report["state"]) == ("disputed_usage", "tripped")
    with pytest.raises(SessionTripped, match="disputed_usage"):
        way.post(session, provider, body, url=url)
    assert len(provider.requests) == 1


def assert_ceiling(way, session, provider, body=None, url=CHAT):
    """Nothing that can be believed was stated: the ceiling, and no dispute."""
    way.post(session, provider, body, url=url)
    assert provider.outcome == "ceiling"
    assert session.report().to_dict()["terminated_by"] is None


# -- inflation -------------------------------------------------------------------------------------------------------------


@every_way
def test_a30_a_billion_tokens_are_disputed_and_do_not_empty_the_wallet(way, books):
    with metered(store=books, guard={"budget": "$6"}) as session:
        provider = Provider(session, Answer.of(completion(openai(20, BILLION))))
        # The claim is 20 x 2,500 + 10^9 x 10,000 nano-dollars.
        assert_disputed(way, session, provider, claimed="10000.00005", spent=MOST)
        wallet = nodes(session)["wallet"]
        assert (wallet.used, wallet.state, wallet.terminated_by) == (int(session.spent * 10**9), "open", None)


def test_a30_only_the_session_that_was_lied_to_is_tripped(way, books):
    with metered(store=books, guard={"budget": "$6"}) as parent:
        sibling = parent.child("sibling", budget="$1")
        with parent.child("lied to", budget="$0.50") as child:
            way.post(child, Provider(child, Answer.of(completion(openai(20, BILLION)))))
        tripped = {name: node.terminated_by for name, node in nodes(parent).items() if node.state == "tripped"}
        assert tripped == {"lied to": "overshoot"}  # $0.82 is booked, and passes its limit alone
        assert nodes(parent)["s"].used == int(child.spent * 10**9)
        for session in (sibling, parent):
            assert way.post(session, Provider(session))[0].status_code == 200


def test_a30_a_scope_latches_its_session(way):
    """A scope is left in a moment; what it was lied to about is its session's."""
    with metered(disputes="latch") as session, session.scope("$0.90") as scope:
        provider = Provider(session, Answer.of(completion(openai(20, BILLION))))
        way.post(scope, provider)
        assert nodes(session)["s"].terminated_by == "disputed_usage"
        with pytest.raises(SessionTripped):
            way.post(scope, provider)


LIMITED = {
    # the body, the output that its limit allows, and what that costs
    "the request's limit": (ask(), 100, "0.00105"),
    "the limit of each choice": (ask(n=3), 300, "0.00305"),
    "the limit that we wrote": (ask(max_completion_tokens=None), 9_989, "0.09994"),
}


@pytest.mark.parametrize("disputes", ["book", "latch"])
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("limited", LIMITED)
def test_a30_a_token_beyond_the_limit_is_booked_and_latches_only_if_the_owner_says_so(way, limited, more, disputes):
    body, limit, cost = LIMITED[limited]
    with metered(budget="$0.10", disputes=disputes) as session:
        provider = Provider(session, Answer.of(completion(openai(20, limit + more))))
        if more and disputes == "latch":
            assert_latched(way, session, provider, body)
        else:
            way.post(session, provider, body)
            assert session.report().to_dict()["terminated_by"] is None
        assert session.spent == Decimal(cost) + more * Decimal("0.00001")
        if limited == "the limit that we wrote":
            assert provider.bodies[0]["max_completion_tokens"] == limit


def bytes_of(body):
    """More input tokens than this, the request cannot have: one for each byte, and what frames messages."""
    return len(json.dumps(body)) + 200


def test_a30_more_input_than_the_request_has_bytes_is_booked_and_told_once(way, books):
    into = bytes_of(WORDY)
    with metered(store=books) as session:
        provider = Provider(session, *[Answer.of(completion(openai(into, 5)))] * 3)
        for _ in range(3):
            way.post(session, provider, WORDY)
        assert session.spent == 3 * (into * Decimal("0.0000025") + 5 * Decimal("0.00001"))
        report = session.report().to_dict()
        [event] = [event for event in report["events"] if event["event"] == "hidden_input"]
        assert (report["terminated_by"], event["place"]) == (None, "api.openai.com gpt-4o")
        first, second, third = provider.held
        assert second == third == first + event["tokens"] * Decimal("0.0000025")  # held for from then on


def test_a30_more_input_than_the_request_has_bytes_latches_if_the_owner_says_so(way):
    with metered(disputes="latch") as session:
        usage = openai(bytes_of(WORDY), 5)
        assert_latched(way, session, Provider(session, Answer.of(completion(usage))), WORDY)


def test_a30_as_much_input_as_the_request_has_bytes_is_plausible_and_owed(way, books):
    with metered(store=books) as session:
        way.post(session, Provider(session, Answer.of(completion(openai(500, 5)))), WORDY)
        assert session.spent == Decimal("0.0013")  # 500 x 2,500 + 5 x 10,000 nano-dollars
        assert session.report().to_dict()["terminated_by"] is None


LIES = {
    "negative output": openai(20, -5),
    "negative input": openai(-20, 5),
    "negative cached": openai(20, 5, prompt_tokens_details={"cached_tokens": -1}),
    "fractional output": openai(20, 0.5),
    "fractional input": openai(20.5, 5),
    "cached above input": openai(20, 5, prompt_tokens_details={"cached_tokens": 21}),
    "reasoning above output": openai(20, 5, completion_tokens_details={"reasoning_tokens": BILLION}),
    "all cached and none read": openai(0, 5, prompt_tokens_details={"cached_tokens": 1}),
}
RAW_LIES = {
    "400 digits": '{"prompt_tokens": 20, "completion_tokens": %s}' % ("9" * 400),
    "400 digits of input": '{"prompt_tokens": %s, "completion_tokens": 5}' % ("9" * 400),
    "19 digits": '{"prompt_tokens": 20, "completion_tokens": 9223372036854775808}',
    "1e30": '{"prompt_tokens": 20, "completion_tokens": 1e30}',
    "1e300": '{"prompt_tokens": 20, "completion_tokens": 1e300}',
    "a billion and a half": '{"prompt_tokens": 20, "completion_tokens": 1000000000.5}',
    "odd keys": '{"prompt_tokens": 20, "completion_tokens": 5, "\\ud800": -1}',
}


@pytest.mark.parametrize("usage", [*map(json.dumps, LIES.values()), *RAW_LIES.values()], ids=[*LIES, *RAW_LIES])
def test_a30_counts_that_no_call_can_have_are_disputed(way, books, usage):
    with metered(store=books) as session:
        assert_disputed(way, session, Provider(session, of(usage)))


NOT_NUMBERS = {
    "NaN": '{"prompt_tokens": 20, "completion_tokens": NaN}',
    "Infinity": '{"prompt_tokens": 20, "completion_tokens": Infinity}',
    "-Infinity": '{"prompt_tokens": 20, "completion_tokens": -Infinity}',
    "401 digits": '{"prompt_tokens": 20, "completion_tokens": %s}' % ("9" * 401),
    "10,000 digits": '{"prompt_tokens": 20, "completion_tokens": %s}' % ("9" * 10_000),
    "an endless exponent": '{"prompt_tokens": 20, "completion_tokens": 1e99999999999999999999}',
    "1e400": '{"prompt_tokens": 20, "completion_tokens": 1e400}',
    "1e-400": '{"prompt_tokens": 20, "completion_tokens": 1e-400}',
    "text": '{"prompt_tokens": "20", "completion_tokens": "5"}',
    "true": '{"prompt_tokens": true, "completion_tokens": true}',
    "a list": '{"prompt_tokens": [20], "completion_tokens": [5]}',
    "nested": '{"prompt_tokens": {"value": 20}, "completion_tokens": 5}',
    "twice": '{"prompt_tokens": 20, "completion_tokens": 5, "completion_tokens": 0}',
}


@pytest.mark.parametrize("usage", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
def test_a30_what_is_no_number_costs_the_ceiling(way, usage):
    with metered() as session:
        assert_ceiling(way, session, Provider(session, of(usage)))


STREAMS = {
    "openai": (
        CHAT,
        ask(stream=True, stream_options={"include_usage": True}),
        sse(chunk("Yes."), chunk(finish="stop"), chunk(choices=[], usage=openai(20, BILLION)), "[DONE]"),
    ),
    "openai, early and high": (
        CHAT,
        ask(stream=True, stream_options={"include_usage": True}),
        sse(chunk("Yes.", usage=openai(20, BILLION)), chunk(finish="stop", usage=openai(20, BILLION)), "[DONE]"),
    ),
    "anthropic": (
        ANTHROPIC,
        ask(model="claude-sonnet-4-5", max_tokens=100, max_completion_tokens=None, stream=True),
        sse(
            {"type": "message_start", "message": {"usage": {"input_tokens": 20, "output_tokens": 1}}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": BILLION}},
            {"type": "message_stop"},
        ),
    ),
    "gemini": (
        f"{GEMINI}:streamGenerateContent?alt=sse",
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 100}},
        sse(
            {
                "candidates": [{"content": {"parts": [{"text": "Yes."}]}, "finishReason": "STOP"}],
                "usageMetadata": {
                    "promptTokenCount": 20,
                    "candidatesTokenCount": BILLION,
                    "totalTokenCount": BILLION + 20,
                },
            }
        ),
    ),
    "gemini's thoughts": (
        f"{GEMINI}:streamGenerateContent?alt=sse",
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 100}},
        sse(
            {
                "candidates": [{"content": {"parts": [{"text": "Yes."}]}, "finishReason": "STOP"}],
                "usageMetadata": {"promptTokenCount": 20, "candidatesTokenCount": 5, "thoughtsTokenCount": BILLION},
            }
        ),
    ),
}


@pytest.mark.parametrize(("url", "body", "events"), STREAMS.values(), ids=STREAMS)
def test_a30_a_stream_can_claim_no_more_than_a_whole_answer(way, url, body, events):
    with metered(budget="$50") as session:
        assert_disputed(way, session, Provider(session, Answer.stream(*events)), body, url=url)


OPENROUTER = "https://openrouter.ai/api/v1/chat/completions"
ROUTED = ask(model="openai/gpt-4o", max_tokens=100, max_completion_tokens=None)


@pytest.mark.parametrize("cost", ["-0.01", "1e30", "10000000000", "1e99999999999999999999"])
def test_a30_a_gateways_own_charge_may_be_impossible_too(way, books, cost):
    with metered(store=books) as session:
        answer = of(f'{{"prompt_tokens": 20, "completion_tokens": 5, "cost": {cost}}}')
        way.post(session, Provider(session, answer), ROUTED, url=OPENROUTER)
        assert session.held == 0
        assert provider_held(session) <= session.spent <= Decimal("1.60")


def provider_held(session):
    """The hold of the only call."""
    [hold] = [event for event in session.report().to_dict()["events"] if event["event"] == "authorize"]
    return Decimal(hold["amount"])


@pytest.mark.parametrize("disputes", ["book", "latch"])
def test_a30_a_lie_that_comes_after_the_hold_has_lapsed_is_booked_all_the_same(disputes):
    clock = Clock()
    with metered(clock=clock, disputes=disputes) as session:
        way = WAYS[0]
        provider = Provider(session, Answer.of(completion(openai(20, BILLION))), Answer.of())
        http = way.library.Client(transport=way.transport(session, provider))
        late = http.send(http.build_request("POST", CHAT, json=ask()), stream=True)
        clock.tick(901)
        way.post(session, provider)
        late.read()
        assert session.spent == MOST + COST
        assert session.report().to_dict()["terminated_by"] == {"book": None, "latch": "disputed_usage"}[disputes]


# -- deflation -------------------------------------------------------------------------------------------------------------

SILENT = {
    "missing": None,
    "null": "null",
    "empty": "{}",
    "a list": "[]",
    "text": '"none"',
    "a number": "0",
    "false": "false",
    "nulls": '{"prompt_tokens": null, "completion_tokens": null}',
    "output alone": '{"completion_tokens": 5}',
    "another provider's": '{"input_tokens": 20, "output_tokens": 5}',
}


@every_way
@pytest.mark.parametrize("usage", SILENT.values(), ids=SILENT)
def test_a30_silence_costs_the_ceiling(way, usage):
    answer = Answer.of({"choices": completion()["choices"]}) if usage is None else of(usage)
    with metered() as session:
        assert_ceiling(way, session, Provider(session, answer))


DEFLATED = {
    "no usage": sse(chunk("Yes."), chunk(finish="stop"), "[DONE]"),
    "usage null": sse(chunk("Yes."), chunk(choices=[], usage=None), "[DONE]"),
    "usage empty": sse(chunk("Yes."), chunk(choices=[], usage={}), "[DONE]"),
    "the first of many": sse(chunk("Yes.", usage=USED), chunk("No.")),
    "unreadable": [
        *sse(chunk("Yes.")),
        b'data: {"choices": [], "usage": {"prompt_tokens": 0, "comple\n\n',
        *sse("[DONE]"),
    ],
}


@pytest.mark.parametrize("events", DEFLATED.values(), ids=DEFLATED)
def test_a30_a_stream_that_does_not_say_costs_the_ceiling(way, events):
    with metered() as session:
        assert_ceiling(way, session, Provider(session, Answer.stream(*events)), ask(stream=True))


def test_a30_a_tool_whose_fee_nobody_states_costs_its_allowance(way):
    body = {"model": "gpt-4o", "input": "hi", "max_output_tokens": 100, "tools": [{"type": "code_interpreter"}]}
    with metered(allowances={"code_execution": "$0.03"}) as session:
        answer = Answer.of({"output": [], "usage": {"input_tokens": 20, "output_tokens": 5}})
        way.post(session, Provider(session, answer), body, url="https://api.openai.com/v1/responses")
        assert session.spent == COST + Decimal("0.03")

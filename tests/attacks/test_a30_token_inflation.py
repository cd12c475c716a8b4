"""Row 30: whatever a provider says was used, the wallet is charged no more than was held for it, unless that is plausible."""

import json
from decimal import Decimal

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


def assert_disputed(way, session, provider, body=None, url=CHAT, claimed=None):
    """The ceiling is captured, the claim kept beside it, the session tripped and nobody else; the answer is the caller's."""
    _, chunks = way.post(session, provider, body, url=url)
    [hold] = provider.held
    assert b"".join(chunks) == b"".join(provider.answers[0].pieces)
    assert (session.held, session.spent) == (0, hold)
    report = session.report().to_dict()
    assert (report["terminated_by"], report["state"]) == ("disputed_usage", "tripped")
    assert {key: Decimal(value) for key, value in report["evidence"].items() if Decimal(value)} == {"assumed": hold}
    [note] = [event for event in report["events"] if event["event"] == "note"]
    [capture] = [event for event in report["events"] if event["event"] == "capture"]
    assert capture["note"].startswith("disputed: ")
    if claimed is not None:
        assert Decimal(note["claim"]["amount"]) == Decimal(claimed)
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
        assert_disputed(way, session, provider, claimed="10000.00005")  # 20 x 2,500 + 10^9 x 10,000 nano-dollars
        wallet = nodes(session)["wallet"]
        assert (wallet.used, wallet.state, wallet.terminated_by) == (int(session.spent * 10**9), "open", None)


def test_a30_only_the_session_that_was_lied_to_is_tripped(way, books):
    with metered(store=books, guard={"budget": "$6"}) as parent:
        sibling = parent.child("sibling", budget="$1")
        with parent.child("lied to", budget="$1") as child:
            assert_disputed(way, child, Provider(child, Answer.of(completion(openai(20, BILLION)))))
        tripped = {name for name, node in nodes(parent).items() if node.state == "tripped"}
        assert tripped == {"lied to"}
        assert nodes(parent)["s"].used == int(child.spent * 10**9)
        for session in (sibling, parent):
            assert way.post(session, Provider(session))[0].status_code == 200


def test_a30_a_scope_trips_its_session(way):
    """A scope is left in a moment; what it was lied to about is its session's."""
    with metered() as session, session.scope("$0.50") as scope:
        provider = Provider(session, Answer.of(completion(openai(20, BILLION))))
        way.post(scope, provider)
        assert nodes(session)["s"].terminated_by == "disputed_usage"
        with pytest.raises(SessionTripped):
            way.post(scope, provider)


@pytest.mark.parametrize(("more", "disputed"), [(0, False), (1, True)])
def test_a30_one_token_more_than_the_limit_is_impossible(way, more, disputed):
    with metered() as session:
        provider = Provider(session, Answer.of(completion(openai(20, 100 + more))))
        if disputed:
            assert_disputed(way, session, provider)
        else:
            way.post(session, provider)
            assert (session.spent, session.report().to_dict()["terminated_by"]) == (Decimal("0.00105"), None)


@pytest.mark.parametrize(("more", "disputed"), [(0, False), (1, True)])
def test_a30_the_limit_is_each_choices(way, more, disputed):
    with metered() as session:
        provider = Provider(session, Answer.of(completion(openai(20, 300 + more))))
        if disputed:
            assert_disputed(way, session, provider, ask(n=3))
        else:
            way.post(session, provider, ask(n=3))
            assert session.spent == Decimal("0.00305")


@pytest.mark.parametrize(("more", "disputed"), [(0, False), (1, True)])
def test_a30_the_limit_that_we_wrote_binds_the_provider(way, more, disputed):
    with metered(budget="$0.10") as session:
        body = ask(max_completion_tokens=None)
        provider = Provider(session, Answer.of(completion(openai(20, 2_489 + more))))
        if disputed:
            assert_disputed(way, session, provider, body)
        else:
            way.post(session, provider, body)
            assert session.spent == Decimal("0.02494")
        assert provider.bodies[0]["max_completion_tokens"] == 2_489


def bytes_of(body):
    """More input tokens than this, the request cannot have: one for each byte, and what frames messages."""
    return len(json.dumps(body)) + 200


def test_a30_more_input_than_the_request_has_bytes_is_impossible(way, books):
    with metered(store=books) as session:
        usage = openai(bytes_of(WORDY), 5)
        assert_disputed(way, session, Provider(session, Answer.of(completion(usage))), WORDY)


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
    with metered() as session:
        assert_disputed(way, session, Provider(session, Answer.stream(*events)), body, url=url)


OPENROUTER = "https://openrouter.ai/api/v1/chat/completions"
ROUTED = ask(model="openai/gpt-4o", max_tokens=100, max_completion_tokens=None)


@pytest.mark.parametrize("cost", ["-0.01", "1e30", "10000000000", "1e99999999999999999999"])
def test_a30_a_gateways_own_charge_may_be_impossible_too(way, books, cost):
    with metered(store=books) as session:
        answer = of(f'{{"prompt_tokens": 20, "completion_tokens": 5, "cost": {cost}}}')
        way.post(session, Provider(session, answer), ROUTED, url=OPENROUTER)
        assert session.held == 0
        assert Decimal(session.report().to_dict()["evidence"]["assumed"]) == session.spent < Decimal("0.01")


def test_a30_a_lie_that_comes_after_the_hold_has_lapsed_trips_the_session_all_the_same():
    clock = Clock()
    with metered(clock=clock) as session:
        way = WAYS[0]
        provider = Provider(session, Answer.of(completion(openai(20, BILLION))), Answer.of())
        http = way.library.Client(transport=way.transport(session, provider))
        late = http.send(http.build_request("POST", CHAT, json=ask()), stream=True)
        clock.tick(901)
        way.post(session, provider)
        late.read()
        assert session.spent == provider.held[0] + COST
        assert session.report().to_dict()["terminated_by"] == "disputed_usage"


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

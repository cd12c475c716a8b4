"""Calls of unusual form are held at what they can cost: links, tiers, other models, odd paths, and ends that state too little."""

import json
from decimal import Decimal

import pytest

from tests.support.llm_provider import CHAT, SYNC, Answer, Provider, ask, chunk, completion, metered, sse
from x402guard import BudgetExhausted, ModelPrice, Narrow, Policy, Rule, Unpriced

BUSY = Answer.of({"error": {"message": "x"}}, 429)
LINK = "https://files.example/hour.mp3"


def sent(body, url=CHAT, *, headers=(), answer=None, budget="$1000", **settings):
    """Send one call. Return what was held for it, what counts, and the body as it left."""
    with metered(budget=budget, **settings) as session:
        provider = Provider(session, answer or BUSY)
        SYNC.post(session, provider, body, url=url, headers=headers)
        return provider.held[0], session.spent, provider.bodies[0]


PARTS = [
    {"type": "audio_url", "audio_url": {"url": LINK}},
    {"type": "audio_url", "audio_url": LINK},
    {"type": "input_audio", "input_audio": LINK},
    {"type": "input_audio", "input_audio": {"data": LINK, "format": "mp3"}},
    {"type": "image", "image": LINK},
    {"type": "video", "video": LINK},
    {"type": "input_video", "input_video": LINK},
]


@pytest.mark.parametrize("part", PARTS, ids=json.dumps)
@pytest.mark.parametrize("place", ["together", "own"])
def test_a_link_that_the_provider_fetches_has_no_bound(part, place):
    url, more = "https://api.together.xyz/v1/chat/completions", {}
    model = "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8"
    if place == "own":
        url, model = "http://127.0.0.1:8000/v1/chat/completions", "voice"
        more = {
            "endpoints": {"http://127.0.0.1:8000/v1": "local"},
            "models": {"voice": ModelPrice(input="$1", output="$1")},
        }
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(Unpriced, match="does not bound its cost"):
        sent(body, url, **more)


MESSAGES = "https://api.anthropic.com/v1/messages"
CLAUDE = {"model": "claude-haiku-4-5", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
RESPONSES = "https://api.openai.com/v1/responses"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (MESSAGES, {**CLAUDE, "fallbacks": "default"}),
        (MESSAGES, {**CLAUDE, "fallbacks": [{"model": "claude-opus-4-8"}]}),
        (RESPONSES, {"model": "gpt-4o", "input": "hi", "max_output_tokens": 100, "multi_agent": {"enabled": True}}),
        ("https://api.x.ai/v1/chat/completions", ask(model="grok-4.20-multi-agent")),
    ],
)
def test_what_may_call_other_models_has_no_bound(url, body):
    with pytest.raises(Unpriced, match="unbounded_input"):
        sent(body, url)


@pytest.mark.parametrize("asked", ["default", "standard", None])
def test_a_dearer_tier_of_the_owners_holds_whatever_the_request_says(asked):
    body = ask(model="gpt-5.4", max_completion_tokens=1_000, service_tier=asked)
    usage = {"prompt_tokens": 10, "completion_tokens": 1_000, "total_tokens": 1_010}
    answer = Answer.of(completion(usage, model="gpt-5.4", service_tier="priority"))
    held, spent, _ = sent(body, answer=answer, price_context={"service_tier": "priority"})
    assert held >= spent > Decimal("0.03")


def test_a_maximum_of_the_owners_above_the_models_is_the_models():
    body = ask(max_completion_tokens=None)
    prices = {"models": {"gpt-4o": ModelPrice(input="$2.50", output="$10", max_output=128_000)}}
    assert sent(body, **prices)[2].get("max_completion_tokens", 16_384) == 16_384


def test_what_is_switched_off_has_a_bound():
    off = {"model": "gpt-4o", "input": "hi", "max_output_tokens": 100, "multi_agent": {"enabled": False}}
    assert sent(off, RESPONSES)[0] > 0


def test_an_escaped_slash_in_a_free_path_is_free():
    url = "https://api.openai.com/v1/things/org%2Fllama"
    with metered(free=[url]) as session:
        provider = Provider(session, BUSY)
        SYNC.post(session, provider, ask(), url=url)
        assert (len(provider.bodies), session.spent, session.held) == (1, 0, 0)


def test_a_request_for_the_standard_tier_is_not_held_at_the_owners_cheaper_one():
    usage = {"prompt_tokens": 10, "completion_tokens": 100_000, "total_tokens": 100_010}
    answer = Answer.of(completion(usage, model="gpt-5.4", service_tier="default"))
    body = ask(model="gpt-5.4", max_completion_tokens=100_000, service_tier="default")
    cheaper = {"price_context": {"service_tier": "flex"}}
    with pytest.raises(BudgetExhausted):
        sent(body, answer=answer, budget="$0.80", **cheaper)
    held, spent, _ = sent(body, answer=answer, **cheaper)
    assert held >= spent > Decimal("1.49")
    assert sent(ask(model="gpt-5.4", max_completion_tokens=100_000), **cheaper)[0] < Decimal("0.80")


VERTEX = (
    "https://us-central1-aiplatform.googleapis.com/v1/projects/p/locations/us-central1/publishers/google/models/"
    "gemini-3.8-flash-tts:generateContent"
)


def test_a_narrowed_call_is_held_at_the_tier_of_its_header():
    def gemini(limit):
        parts = [{"role": "user", "parts": [{"text": "hi"}]}]
        return {"contents": parts, "generationConfig": {"maxOutputTokens": limit}}

    header = {"X-Vertex-AI-LLM-Shared-Request-Type": "priority"}
    rule = Policy(rules=[Rule(name="shorter", action="narrow", output_limit=5_000)])
    narrowed = sent(gemini(10_000), VERTEX, headers=header, guard={"policy": rule})
    asked = sent(gemini(5_000), VERTEX, headers=header)
    assert narrowed[0] == asked[0]
    assert narrowed[2]["generationConfig"] == {"maxOutputTokens": 5_000}
    assert Narrow(output_limit=5_000).output_limit == 5_000


def started(output):
    usage = {"input_tokens": 20, "output_tokens": output}
    return {"type": "message_start", "message": {"id": "m", "model": "claude-haiku-4-5", "content": [], "usage": usage}}


@pytest.mark.parametrize("counts", [{}, {"output_tokens": None}, {"input_tokens": 20}])
def test_a_stream_that_ends_without_its_output_is_billed_at_its_ceiling(counts):
    text = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word " * 50}}
    last = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": counts}
    answer = Answer(200, sse(started(1), text, last, {"type": "message_stop"}), {"content-type": "text/event-stream"})
    held, spent, _ = sent({**CLAUDE, "stream": True}, MESSAGES, answer=answer)
    assert spent == held
    early = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 3}}
    answer = Answer(
        200, sse(started(1), early, text, last, {"type": "message_stop"}), {"content-type": "text/event-stream"}
    )
    held, spent, _ = sent({**CLAUDE, "stream": True}, MESSAGES, answer=answer)
    assert spent == held
    last["usage"] = {"output_tokens": 50}
    answer = Answer(200, sse(started(1), text, last, {"type": "message_stop"}), {"content-type": "text/event-stream"})
    held, spent, _ = sent({**CLAUDE, "stream": True}, MESSAGES, answer=answer)
    assert spent < held


@pytest.mark.parametrize("ended", [1, 2])
def test_a_stream_of_two_answers_is_whole_when_both_have_ended(ended):
    usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
    ends = [chunk(finish="stop", usage=usage) for _ in range(ended)]
    for index, each in enumerate(ends):
        each["choices"][0]["index"] = index
    answer = Answer(200, sse(chunk("Yes."), *ends), {"content-type": "text/event-stream"})
    held, spent, _ = sent(ask(n=2, stream=True, stream_options={"include_usage": True}), answer=answer)
    assert (spent < held) is (ended == 2)


@pytest.mark.parametrize("status", [302, 303])
def test_an_answer_that_a_get_brings_counts(status):
    answer = Answer(status, [b""], {"location": "https://api.openai.com/v1/answer/1"})
    held, spent, _ = sent(ask(), answer=answer)
    assert spent == held


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4o-2027-01-01"])
def test_a_maximum_of_the_owners_is_written_into_the_request(model):
    prices = {"models": {model: ModelPrice(input="$2.50", output="$10", max_output=1_000)}}
    held, _, body = sent(ask(model=model, max_completion_tokens=None), **prices)
    assert body["max_completion_tokens"] == 1_000
    assert held < Decimal("0.02")


ODD = ["/v1/files/..;/chat/completions", "/v1/files/%252e%252e/chat/completions", "/v1/files%5c..%5cchat/completions"]


@pytest.mark.parametrize("path", ODD)
def test_a_path_is_free_if_it_is_so_however_it_is_read(path):
    """``free`` is about files; a server may read the path as a call of a model."""
    with metered(free=["https://api.openai.com/v1/files*"]) as session:
        provider = Provider(session, BUSY)
        try:
            SYNC.post(session, provider, ask(), url=f"https://api.openai.com{path}")
        except Unpriced:
            assert provider.held == []
        else:
            assert provider.held[0] > 0


def test_a_plain_path_on_the_list_is_free():
    with metered(free=["https://api.openai.com/v1/files*"]) as session:
        provider = Provider(session, BUSY)
        SYNC.post(session, provider, ask(), url="https://api.openai.com/v1/files/a.b/c")
        assert (provider.held[0] if provider.held else 0, session.spent) == (0, 0)

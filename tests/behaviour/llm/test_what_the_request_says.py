"""What an answer leaves open is read from its request, and a price of nothing needs a reason."""

from decimal import Decimal

import httpx
import pytest

from tests.behaviour.llm.test_counts_not_read import CHAT_DONE, OPENAI, RESPONDED, asks, booked
from tests.support.merchant import make_guard
from x402guard import GuardedTransport

CLAUDE = "https://api.anthropic.com/v1/messages"
ROUTER = "https://openrouter.ai/api/v1/chat/completions"
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"}
SEARCH = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "queries": ["a"]}}


@pytest.mark.parametrize(
    ("ttl", "split", "dollars_a_million"),
    [("1h", None, 6), (None, None, 3.75), ("5m", None, 3.75), ("1h", {"ephemeral_5m_input_tokens": 9_000}, 3.75)],
)
def test_a_cache_that_is_not_split_was_kept_for_the_longest_time_that_was_asked_for(ttl, split, dollars_a_million):
    control = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    system = [{"type": "text", "text": "so " * 12_000, "cache_control": control}]
    usage = {"input_tokens": 10, "output_tokens": 20, "cache_creation_input_tokens": 9_000}
    usage |= {} if split is None else {"cache_creation": {"ephemeral_1h_input_tokens": 0, **split}}
    amount, told = booked(CLAUDE, asks("claude-sonnet-4-5", system=system), usage, **MESSAGE)
    assert (amount, told) == (10 * 3_000 + 20 * 15_000 + round(9_000 * dollars_a_million * 1_000), [])


A_SEARCH = 10_000_000
"""Nano-dollars of one search: $10 a thousand (OpenAI's pricing page, web search)."""


@pytest.mark.parametrize(("items", "stated", "searches"), [(1, 3, 3), (3, 1, 1), (2, None, 2), (2, -1, 2), (0, 2, 2)])
def test_searches_are_as_many_as_the_answer_counts(items, stated, searches):
    asked = {"model": "gpt-4o", "input": "so " * 12_000, "max_output_tokens": 20_000, "tools": [{"type": "web_search"}]}
    around = {"status": "completed", "object": "response", "allowances": {"web_search": "$0.01"}}
    plain, _ = booked(f"{OPENAI}/responses", asked, RESPONDED, output=[], **around)
    around |= {} if stated is None else {"tool_usage": {"web_search": {"num_requests": stated}}}
    amount, _ = booked(f"{OPENAI}/responses", asked, RESPONDED, output=[SEARCH] * items, **around)
    assert amount - plain == searches * A_SEARCH


@pytest.mark.parametrize(
    ("model", "more", "dollars"),
    [
        ("openai/gpt-4o", {"cost": 0}, "0.0325"),
        ("openai/gpt-4o", {}, "0.0325"),
        ("owner/model:free", {"cost": 0}, "0"),
        ("owner/model:free", {}, "1.95"),  # a price that only a session knows is the dearest of all
    ],
)
def test_a_cost_of_nothing_needs_a_reason(model, more, dollars):
    usage = {"prompt_tokens": 9_000, "completion_tokens": 1_000, **more}
    answer = httpx.MockTransport(lambda _: httpx.Response(200, json={"model": model, "usage": usage, **CHAT_DONE}))
    with make_guard() as guard, guard.session("s", budget="$50.00") as session:
        session.register_model("owner/model:free", input="$1.00", output="$1.00")
        with httpx.Client(transport=GuardedTransport(session, answer)) as http:
            http.post(ROUTER, json=asks(model))
        assert session.spent == Decimal(dollars)


def test_the_cost_that_perplexity_states_is_read():
    usage = {"prompt_tokens": 900, "completion_tokens": 100, "cost": {"total_cost": 0.00506}}
    amount, told = booked("https://api.perplexity.ai/chat/completions", asks("sonar"), usage, **CHAT_DONE)
    assert (amount, told) == (5_060_000, [])


def test_the_cached_tokens_of_moonshot_cost_what_cached_ones_do():
    url = "https://api.moonshot.ai/v1/chat/completions"
    usage = {"prompt_tokens": 9_000, "completion_tokens": 100}
    plain, _ = booked(url, asks("kimi-k2-0905-preview"), usage, **CHAT_DONE)
    cached, told = booked(url, asks("kimi-k2-0905-preview"), {**usage, "cached_tokens": 8_000}, **CHAT_DONE)
    assert cached < plain
    assert told == []


SPEAKS = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
TEXT_ONLY = {"completion_tokens_details": {"audio_tokens": 0, "text_tokens": 200}}


@pytest.mark.parametrize(
    ("model", "more", "details", "a_million"),
    [  # gpt-audio: text 10, sound 64 dollars a million of output
        ("gpt-audio", SPEAKS, {}, 64),
        ("gpt-audio", SPEAKS, TEXT_ONLY, 10),
        ("gpt-audio", SPEAKS, {"completion_tokens_details": {"audio_tokens": 100}}, 37),
        ("gpt-audio", {}, {}, 10),
    ],
)
def test_an_output_whose_kind_is_not_stated_is_the_dearest_that_was_asked_for(model, more, details, a_million):
    asked, url = asks(model, **more), f"{OPENAI}/chat/completions"
    amount, told = booked(url, asked, {"prompt_tokens": 100, "completion_tokens": 200, **details}, **CHAT_DONE)
    assert (amount, told) == (100 * 2_500 + 200 * a_million * 1_000, [])


@pytest.mark.parametrize(
    ("kinds", "details", "a_million"),
    [
        (["TEXT", "IMAGE"], [], 120),
        (["TEXT"], [], 12),
        (["TEXT", "IMAGE"], [{"modality": "TEXT", "tokenCount": 50}], 12),
    ],
)
def test_a_picture_of_geminis_that_is_not_stated_as_one_is_billed_as_one(kinds, details, a_million):
    url = "https://generativelanguage.googleapis.com/v1beta/models/gemini-3-pro-image-preview:generateContent"
    config = {"maxOutputTokens": 10_000, "responseModalities": kinds}
    asked = {"contents": [{"parts": [{"text": "draw " * 200}]}], "generationConfig": config}
    usage = {
        "promptTokenCount": 100,
        "candidatesTokenCount": 50,
        "totalTokenCount": 150,
        "candidatesTokensDetails": details,
    }
    amount, _ = booked(url, asked, usage, field="usageMetadata", candidates=[{"finishReason": "STOP"}])
    assert amount == 100 * 2_000 + 50 * a_million * 1_000

"""What makes a call dearer where a reader would not look: in the conversation, the path, the query, or one round of many."""

import json
from decimal import Decimal

import httpx
import pytest

from tests.behaviour.llm.test_newer_answers import CLAUDE, HI, OPENAI, booked
from tests.support.merchant import make_guard
from x402guard import GuardedTransport, Metering
from x402guard.errors import Unpriced

GEMINI = "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-flash:generateContent"
AZURE = "https://acme.openai.azure.com"
ROUTER = "https://openrouter.ai/api/v1/chat/completions"
SEARCH = {"type": "web_search_20260318", "name": "web_search"}


def asking(**more):
    return {"model": "gpt-5", "input": "hi", "max_output_tokens": 500, **more}


def adds(definition):
    block = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}
    return {"model": "claude-sonnet-4-5", "max_tokens": 100, "messages": [{"role": "user", "content": [block]}]}


DEARER = {
    "a tool that an item of the input adds": (
        f"{OPENAI}/responses",
        asking(input=[{"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}]}]),
        r"input\[0\]\.tools\[0\]\.type",
    ),
    "a tool that a search has found": (
        f"{OPENAI}/responses",
        asking(input=[{"type": "tool_search_output", "tools": [{"type": "image_generation"}]}]),
        r"input\[0\]\.tools\[0\]\.type",
    ),
    "a tool that a message adds": (CLAUDE, adds(SEARCH), r"messages\[0\]\.content\[0\]\.tool\.definition\.type"),
    "servers that a message adds": (
        CLAUDE,
        adds({"type": "mcp_toolset", "mcp_server_name": "x"}),
        r"messages\[0\]\.content\[0\]\.tool\.definition\.type",
    ),
    "no object for a tool that is added": (CLAUDE, adds("web_search"), r"tool\.definition: a str is not an object"),
    "Vertex may route it": (
        GEMINI,
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"routingConfig": {"autoMode": {}}}},
        r"generationConfig\.routingConfig",
    ),
    "a picture at OpenRouter": (
        ROUTER,
        {"model": "google/gemini-2.5-flash-image", "messages": HI, "max_tokens": 100},
        "model",
    ),
    "a search with each answer at OpenRouter": (
        ROUTER,
        {"model": "perplexity/sonar", "messages": HI, "max_tokens": 100},
        "model",
    ),
    "two tiers": (
        f"{OPENAI}/chat/completions",
        {"model": "gpt-5", "messages": HI, "max_tokens": 9, "service_tier": "priority", "serviceTier": "default"},
        "service_tier: it differs from serviceTier",
    ),
    "some fields of the answer": (f"{GEMINI}?fields=candidates", {"contents": []}, "some fields of the answer alone"),
    "some fields, escaped": (f"{GEMINI}?key=k&%24Fields=candidates", {"contents": []}, "some fields of the answer"),
    "a deployment's other paths": (
        f"{AZURE}/openai/Deployments/gpt-5-pro/responses",
        asking(model="gpt-4o-mini"),
        "the price of this path of azure is unknown",
    ),
}


@pytest.mark.parametrize("dearer", DEARER)
def test_what_may_cost_more_than_the_hold_is_refused_by_its_place(dearer):
    url, asked, words = DEARER[dearer]
    with pytest.raises(Unpriced, match=words):
        booked(url, asked, {})


def test_a_mask_in_a_header_is_refused_as_well():
    with make_guard(metering=Metering()) as guard, guard.session("s", budget="$5.00") as session:
        inner = httpx.MockTransport(lambda _: httpx.Response(200, json={}))
        with httpx.Client(transport=GuardedTransport(session, inner)) as http:
            with pytest.raises(Unpriced, match="some fields"):
                http.post(GEMINI, json={"contents": []}, headers={"X-Goog-FieldMask": "candidates"})


def test_a_tool_of_the_callers_own_is_added_without_a_question():
    counts = {"input_tokens": 9, "output_tokens": 9}
    spent, _ = booked(CLAUDE, adds({"name": "look", "input_schema": {"type": "object"}}), {"usage": counts})
    assert spent == Decimal("0.000162")


@pytest.mark.parametrize(
    "path",
    ["/openai/deployments/gpt-5-pro/chat/completions", "/OpenAI/Deployments/gpt-5-pro/chat/completions",
     "/openai/deployments/gpt-5-pro/extensions/chat/completions"],
)  # fmt: skip
def test_azures_model_is_the_deployments_however_its_path_is_written(path):
    answer = {"usage": {"prompt_tokens": 10, "completion_tokens": 100, "total_tokens": 110}}
    asked = {"model": "gpt-4o-mini", "messages": HI, "max_completion_tokens": 100}
    assert booked(f"{AZURE}{path}?api-version=1", asked, answer)[0] == Decimal("0.01215")  # $15 and $120 a million


def test_a_tool_that_ran_unasked_without_a_price_costs_the_ceiling():
    used = {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20}
    plain, _ = booked(f"{OPENAI}/responses", asking(), {"model": "gpt-5", "output": [], "usage": used})
    ran = [{"type": "image_generation_call", "id": "x", "result": "AAA"}]
    spent, report = booked(f"{OPENAI}/responses", asking(), {"model": "gpt-5", "output": ran, "usage": used})
    assert spent > 30 * plain
    assert "a tool without a price or an allowance ran" in str(report["events"])


def test_a_usage_without_its_output_costs_the_ceiling():
    asked = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 1_000}}
    answer = {"candidates": [{"finishReason": "STOP"}], "usageMetadata": {"promptTokenCount": 5}}
    assert booked(GEMINI, asked, answer)[0] >= Decimal("0.0025")
    whole = {**answer, "usageMetadata": {"promptTokenCount": 5, "totalTokenCount": 5}}
    assert booked(GEMINI, asked, whole)[0] == Decimal("0.0000015")


def test_a_round_that_writes_the_cache_for_an_hour_costs_what_an_hour_costs():
    none = {"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    split = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 60_000}
    turn = {**none, "type": "compaction", "cache_creation_input_tokens": 60_000, "cache_creation": split}
    usage = {**none, "cache_creation": dict.fromkeys(split, 0), "iterations": [turn]}
    asked = {"model": "claude-opus-4-6", "max_tokens": 100, "messages": [{"role": "user", "content": "word " * 60_000}]}
    asked |= {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert booked(CLAUDE, asked, {"model": "claude-opus-4-6", "content": [], "usage": usage})[0] == Decimal("0.6")


def held(url, body):
    """Return what is held for a call while its answer is awaited, in dollars."""
    seen = []
    with make_guard(metering=Metering()) as guard, guard.session("s", budget="$50.00") as session:
        answer = lambda _: seen.append(session.held) or httpx.Response(500, json={})
        with httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(answer))) as http:
            http.post(url, content=body, headers={"content-type": "application/json"})
    return seen[0]


def test_an_escaped_key_is_the_key():
    asked = {"model": "claude-opus-4-6", "max_tokens": 10, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = json.dumps({**asked, "messages": [{"role": "user", "content": "word " * 20_000}]})
    assert held(CLAUDE, body.replace("cache_control", "cache\\u005fcontrol")) == held(CLAUDE, body)
    assert held(CLAUDE, body) > held(CLAUDE, body.replace("cache_control", "other\\u005fcontrol"))


def test_numbers_and_names_in_the_conversation_count_as_they_are_read():
    points = [{"x": 1_000 + n, "y": 1_999 - n} for n in range(900)]
    call = {"type": "computer_call", "call_id": "c", "actions": [{"type": "drag", "path": points}]}
    here = held(f"{OPENAI}/responses", json.dumps(asking(model="gpt-5.4", max_output_tokens=16, input=[call])))
    text = json.dumps(points, separators=(",", ":"))
    there = held(f"{OPENAI}/responses", json.dumps(asking(model="gpt-5.4", max_output_tokens=16, input=text)))
    assert here > there * Decimal("0.8")


def test_the_ids_of_tokens_are_a_token_each():
    body = {"model": "text-embedding-3-small", "input": [[100_000] * 1_000]}
    assert held(f"{OPENAI}/embeddings", json.dumps(body)) < Decimal("0.00003")


def test_a_call_that_fills_the_cache_and_answers_nothing_is_sent():
    usage = {"input_tokens": 2, "output_tokens": 0, "cache_creation_input_tokens": 5_000, "cache_read_input_tokens": 0}
    content = [{"type": "text", "text": "word " * 5_000, "cache_control": {"type": "ephemeral"}}]
    asked = {"model": "claude-sonnet-4-5", "max_tokens": 0, "messages": [{"role": "user", "content": content}]}
    assert booked(CLAUDE, asked, {"content": [], "usage": usage})[0] == Decimal("0.018756")


def test_pictures_that_gemini_has_searched_for_are_searches():
    asked = {"contents": [{"parts": [{"text": "hi"}]}], "tools": [{"google_search": {}}]}
    asked |= {"generationConfig": {"maxOutputTokens": 10}}
    url = GEMINI.replace("gemini-2.5-flash", "gemini-3-pro-preview")
    used = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    costs = []
    for found in (
        {"imageSearchQueries": list("abcde")},
        {"webSearchQueries": list("abcde")},
        {"webSearchQueries": ["a"]},
    ):
        answer = {"candidates": [{"finishReason": "STOP", "groundingMetadata": found}], "usageMetadata": used}
        costs.append(booked(url, asked, answer, allowances={"web_search": "$0.10"})[0])
    assert costs[0] == costs[1] > costs[2]


def test_a_charge_of_nothing_is_none_where_tokens_were_used():
    counts = {"prompt_tokens": 100, "completion_tokens": 1_000, "total_tokens": 1_100}
    message = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    asked = {"messages": HI, "max_tokens": 1_000}
    for url, model, said in (
        ("https://api.x.ai/v1/chat/completions", "grok-4", {"cost_in_usd_ticks": 0}),
        (ROUTER, "openai/gpt-5", {"cost": 0.0001, "is_byok": True}),
    ):
        spent, _ = booked(url, {**asked, "model": model}, {**message, "model": model, "usage": counts | said})
        assert spent > Decimal("0.005"), url


def chunk(index, finish, out):
    counts = {"prompt_tokens": 10, "completion_tokens": out, "total_tokens": 10 + out}
    return {"choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": finish}], "usage": counts}


EVENTS = [
    chunk(0, None, 1),
    chunk(1, None, 2),
    chunk(0, "stop", 3),
    *(chunk(1, None, n) for n in range(4, 500)),
    chunk(1, "stop", 500),
]


@pytest.mark.parametrize(
    "first", [[], [{"choices": [], "usage": chunk(0, None, 1)["usage"]}]], ids=["choices", "none first"]
)
@pytest.mark.parametrize(("read", "whole"), [(1, False), (3, False), (100, False), (len(EVENTS), True)])
def test_a_running_usage_is_the_calls_only_once_each_choice_has_ended(read, whole, first):
    events = [*first, *EVENTS]

    class Parts(httpx.SyncByteStream):
        def __iter__(self):
            yield from (b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)

    asked = {"model": "grok-4", "messages": HI, "max_completion_tokens": 5_000, "n": 2, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    with make_guard(metering=Metering()) as guard, guard.session("s", budget="$50.00") as session:
        answer = httpx.MockTransport(
            lambda _: httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Parts())
        )
        with httpx.Client(transport=GuardedTransport(session, answer)) as http:
            with http.stream("POST", "https://api.x.ai/v1/chat/completions", json=asked) as response:
                parts = response.iter_raw()
                for _ in range(len(first) + read):
                    next(parts)
        assert (session.spent < Decimal("0.02")) is whole

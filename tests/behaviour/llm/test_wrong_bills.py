"""Bills that were wrong, each worked out by hand from the vendor's list of prices: what is held, what is booked."""

from __future__ import annotations

import json
from decimal import Decimal

import httpx
import pytest

from tests.behaviour.llm.test_counts_not_read import CHAT_DONE, HI, OPENAI, WORDS, asks, booked
from tests.support.merchant import client, make_guard
from x402guard import BudgetExhausted, Metering, ModelPrice
from x402guard.llm.leaves import counts_of

CLAUDE = "https://api.anthropic.com/v1/messages"
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"}
RESPONSE = {"status": "completed", "object": "response", "output": []}


def gemini(host, model):
    return f"https://{host}/v1/projects/p/locations/l/publishers/google/models/{model}:generateContent"


ASKED_GEMINI = {
    "contents": [{"role": "user", "parts": [{"text": WORDS}]}],
    "generationConfig": {"maxOutputTokens": 16_000},
}


def held(url, asked, *, status=200, answer=None, headers=None, **metering):
    """What is held for a request, in nano-dollars, as the server sees it."""
    seen = []

    def server(request):
        seen.append(session.held)
        return httpx.Response(status, json=answer or {"error": "no"}, headers=headers)

    with make_guard(metering=Metering(**metering)) as guard, guard.session("s", budget="$9000.00") as session:
        client(session, server).post(url, json=asked)
    return int(seen[0] * 10**9)


# -- regions (2, 3, 4) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "model", "used", "bill"),
    [
        ("eu.api.openai.com", "gpt-6-sol", (300, 90), 1_650_000),
        ("api.openai.com", "gpt-6-sol", (300, 90), 1_500_000),
        ("mtls.api.openai.com", "gpt-6-sol", (300, 90), 1_500_000),
        ("mtls-eu.api.openai.com", "gpt-6-sol", (300, 90), 1_650_000),
        ("eu.api.openai.com", "gpt-4o", (300, 90), 1_650_000),  # older: no factor; 300 x 2,500 + 90 x 10,000
        ("gov.api.openai.com", "gpt-4o", (300, 90), 1_815_000),
        ("api.eu.mistral.ai", "mistral-large-latest", (300, 90), None),
        ("us.api.x.ai", "grok-4.3", (300, 90), None),
        ("us-api.together.ai", "openai/gpt-oss-120b", (300, 90), None),
    ],
)
def test_a_region_costs_more_where_its_vendor_says_so(host, model, used, bill):
    usage = {"prompt_tokens": used[0], "completion_tokens": used[1]}
    amount, told = booked(f"https://{host}/v1/chat/completions", asks(model), usage, **CHAT_DONE)
    if bill is None:
        plain = {
            "api.eu.mistral.ai": "api.mistral.ai",
            "us.api.x.ai": "api.x.ai",
            "us-api.together.ai": "api.together.ai",
        }[host]
        factor = Decimal("1.25") if "together" in host else Decimal("1.1")
        standard, _ = booked(f"https://{plain}/v1/chat/completions", asks(model), usage, **CHAT_DONE)
        bill = -(-standard * factor // 1)
    assert (amount, told) == (bill, [])


@pytest.mark.parametrize(
    ("host", "model", "bill"),
    [
        ("europe-west4-aiplatform.googleapis.com", "gemini-3.5-flash", 1_155_000),
        ("aiplatform.eu.rep.googleapis.com", "gemini-3.5-flash", 1_155_000),
        ("aiplatform.googleapis.com", "gemini-3.5-flash", 1_050_000),
        ("europe-west4-aiplatform.googleapis.com", "gemini-2.5-flash", 400 * 300 + 50 * 2_500),
    ],
)
def test_a_region_of_vertex_costs_a_tenth_more_for_newer_models(host, model, bill):
    usage = {"promptTokenCount": 400, "candidatesTokenCount": 50, "totalTokenCount": 450}
    amount, _ = booked(
        gemini(host, model), ASKED_GEMINI, usage, field="usageMetadata", candidates=[{"finishReason": "STOP"}]
    )
    assert amount == bill


def test_a_region_is_held_for():
    asked = {"model": "gpt-6-astra", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 16_000}
    plain, there = (held(f"https://{host}/v1/chat/completions", asked, price_context={"service_tier": "default"})
                    for host in ("api.openai.com", "eu.api.openai.com"))  # fmt: skip
    assert abs(there - plain * Decimal("1.1")) <= 1
    metering = Metering(price_context={"service_tier": "default"})
    with make_guard(metering=metering) as guard, guard.session("s", budget="$0.81") as session:
        with pytest.raises(BudgetExhausted):
            client(session, lambda _: httpx.Response(200)).post(
                "https://eu.api.openai.com/v1/chat/completions", json=asked
            )


# -- other models within an answer (6, 7, 25) ------------------------------------------------------------------------------

ADVISED = {
    "input_tokens": 225,
    "output_tokens": 1_000,
    "iterations": [
        {"type": "message", "input_tokens": 225, "output_tokens": 400},
        {"type": "advisor_message", "model": "claude-fable-5", "input_tokens": 1_500, "output_tokens": 2_000},
        {"type": "message", "input_tokens": 0, "output_tokens": 600},
    ],
}
"""225 x 2,000 + 1,000 x 10,000 of sonnet-5, and 1,500 x 10,000 + 2,000 x 50,000 of fable-5."""
ADVISER = {"type": "advisor_20260301", "name": "advisor", "model": "claude-fable-5"}


def test_an_adviser_is_billed_at_its_own_prices_and_its_allowance_is_not_added():
    asked = asks("claude-sonnet-5", tools=[ADVISER])
    amount, told = booked(CLAUDE, asked, ADVISED, allowances={"provider_tool": "$0.01"}, **MESSAGE)
    assert (amount, told) == (125_450_000, [])


def test_a_reported_adviser_costs_the_same():
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        receipt = session.record_usage("anthropic", "claude-sonnet-5", ADVISED)
        assert session.spent == Decimal("0.12545")
        assert receipt.usage == {"input_tokens": 1_725, "output_tokens": 3_000}


@pytest.mark.parametrize("uses", [None, 1, 5])
def test_an_adviser_is_held_for_as_often_as_it_may_be_asked(uses):
    tool = {**ADVISER, "max_tokens": 2_048, **({} if uses is None else {"max_uses": uses})}
    allowed = {"allowances": {"provider_tool": "$0.01"}}
    plain = held(CLAUDE, asks("claude-sonnet-5"))
    assert held(CLAUDE, asks("claude-sonnet-5", tools=[tool]), **allowed) > plain + (uses or 1) * 2_048 * 50_000


def test_an_unlisted_adviser_costs_what_the_dearest_of_its_vendor_does():
    usage = json.loads(json.dumps(ADVISED).replace("claude-fable-5", "claude-muse-9"))
    with make_guard() as guard, guard.session("s", budget="$50.00") as session:
        session.record_usage("anthropic", "claude-sonnet-5", usage)
        dearest = session.meter.book.dearest("anthropic", 1_796_000_000)
        price = session.meter.book.cost(dearest, {"input_tokens": 1_500, "output_tokens": 2_000}, {})
        assert session.spent == Decimal("0.01045") + price


def test_a_compaction_is_a_request_of_its_own_below_the_long_tier():
    rounds = [
        {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3_500},
        {"type": "message", "input_tokens": 60_000, "output_tokens": 1_000},
    ]
    usage = {"input_tokens": 60_000, "output_tokens": 1_000, "iterations": rounds}
    asked = asks("claude-sonnet-4-5", context_management={"edits": [{"type": "compact_20260112"}]})
    asked["messages"] = [{"role": "user", "content": WORDS * 20}]
    amount, _ = booked(CLAUDE, asked, usage, allowances={"stored_conversation": "$1.00"}, **MESSAGE)
    assert amount == 787_500_000


# -- tools (9, 11, 18, 20) -------------------------------------------------------------------------------------------------

PICTURED = {"image_gen": {"input_tokens": 60, "output_tokens": 7_024, "total_tokens": 7_084,
                          "input_tokens_details": {"text_tokens": 60, "image_tokens": 0}}}  # fmt: skip


def responded(tools, *, allowances, output=(), **more):
    asked = {"model": "gpt-4o", "input": WORDS, "max_output_tokens": 16_000, "tools": tools}
    usage = {"input_tokens": 800, "output_tokens": 200}  # 800 x 2,500 + 200 x 10,000 = 4,000,000
    return booked(
        f"{OPENAI}/responses", asked, usage, allowances=allowances, **{**RESPONSE, "output": list(output), **more}
    )


def test_the_model_that_made_a_picture_is_billed_at_its_own_prices():
    tool = {"type": "image_generation", "model": "gpt-image-2"}
    made = [{"type": "image_generation_call", "id": "i", "status": "completed"}]
    amount, told = responded([tool], allowances={"image_generation": "$0.01"}, output=made, tool_usage=PICTURED)
    assert (amount, told) == (215_020_000, [])
    nothing = {"image_gen": dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), 0)}
    amount, _ = responded([tool], allowances={"image_generation": "$0.01"}, output=made, tool_usage=nothing)
    assert amount == 14_000_000


def test_a_picture_is_held_for():
    tool = {"type": "image_generation", "model": "gpt-image-2"}
    asked = {"model": "gpt-4o", "input": "hi", "max_output_tokens": 100, "tools": [tool]}
    assert held(f"{OPENAI}/responses", asked, allowances={"image_generation": "$0.01"}) > 215_020_000


def test_another_count_of_tool_usage_is_never_nothing():
    amount, told = responded([], allowances={}, tool_usage={"holograms": {"num_requests": 2}})
    assert (amount, told) == (104_000_000, ["tool_usage.holograms.num_requests"])


@pytest.mark.parametrize(
    ("limit", "dollars"),
    [("64g", "1.92"), ("16g", "0.48"), ("4g", "0.12"), ("1g", "0.03"), (None, "0.03"), ("96g", "1.92")],
)
def test_a_container_costs_what_its_memory_does(limit, dollars):
    container = {"type": "auto"} if limit is None else {"type": "auto", "memory_limit": limit}
    tool = {"type": "code_interpreter", "container": container}
    ran = [{"type": "code_interpreter_call", "id": "c", "status": "completed"}]
    allowed = {"allowances": {"code_execution": "$0.03"}}
    assert responded([tool], output=ran, **allowed)[0] == 4_000_000 + int(Decimal(dollars) * 10**9)
    asked = {"model": "gpt-4o", "input": "hi", "max_output_tokens": 100}
    plain, there = (held(f"{OPENAI}/responses", {**asked, **more}, **allowed) for more in ({}, {"tools": [tool]}))
    assert there - plain >= int(Decimal(dollars) * 10**9)


GROUNDS = {"googleSearch": {}, "googleMaps": {}}


@pytest.mark.parametrize(
    ("tools", "chunks", "fee"),
    [
        (["googleMaps"], ["maps"], 25_000_000),
        (["googleMaps"], [], 25_000_000),
        (["googleSearch"], ["web"], 35_000_000),
        (["googleSearch", "googleMaps"], ["web", "maps"], 60_000_000),
        (["googleSearch", "googleMaps"], ["maps"], 25_000_000),
        (["googleSearch", "googleMaps"], [], 35_000_000),
        (["googleSearch"], None, 0),
    ],
)
def test_google_maps_has_a_price_of_its_own_before_gemini_3(tools, chunks, fee):
    metadata = (
        {}
        if chunks is None
        else {"groundingMetadata": {"groundingChunks": [{kind: {}} for kind in chunks], "webSearchQueries": ["a"]}}
    )
    asked = {**ASKED_GEMINI, "tools": [{name: GROUNDS[name]} for name in tools]}
    usage = {"promptTokenCount": 400, "candidatesTokenCount": 50, "totalTokenCount": 450}
    answer = {"field": "usageMetadata", "candidates": [{"finishReason": "STOP", **metadata}]}
    amount, _ = booked(
        gemini("aiplatform.googleapis.com", "gemini-2.5-flash"),
        asked,
        usage,
        allowances={"web_search": "$0.05"},
        **answer,
    )
    assert amount == 245_000 + fee


QUERIES = [(["a", "a", ""], 1), (["a", "b"], 2), ([""], 0), (["a", " a "], 1), ([], 1)]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("queries", "unique"), QUERIES)
def test_a_query_is_billed_once_and_an_empty_one_never(queries, unique, streams):
    model = gemini("aiplatform.googleapis.com", "gemini-3.5-flash")
    usage = {"promptTokenCount": 25, "candidatesTokenCount": 50, "totalTokenCount": 75}
    grounded = {"groundingMetadata": {"webSearchQueries": queries, "groundingChunks": [{"web": {}}]}}
    asked = {**ASKED_GEMINI, "tools": [{"googleSearch": {}}]}
    whole = {"candidates": [{"finishReason": "STOP", **grounded}], "usageMetadata": usage}

    def server(_request):
        if not streams:
            return httpx.Response(200, json=whole)
        parts = [{"candidates": [{**grounded}]}, whole]
        text = "".join(f"data: {json.dumps(part)}\n\n" for part in parts)
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    with (
        make_guard(metering=Metering(allowances={"web_search": "$0.05"})) as guard,
        guard.session("s", budget="$5.00") as session,
    ):
        url = model.replace("generateContent", "streamGenerateContent?alt=sse") if streams else model
        client(session, server).post(url, json=asked)
        assert session.spent * 10**9 == 487_500 + unique * 14_000_000


# -- units, caches and tiers (12 to 16) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "bill"),
    [
        (  # OpenAI's own example: 55 text in, 64 of it cached before, 13 audio in, 30 text and 91 audio out
            {"input_tokens": 132, "output_tokens": 121, "total_tokens": 253,
             "input_token_details": {"text_tokens": 119, "audio_tokens": 13, "image_tokens": 0, "cached_tokens": 64,
                                     "cached_tokens_details": {"text_tokens": 64, "audio_tokens": 0, "image_tokens": 0}},
             "output_token_details": {"text_tokens": 30, "audio_tokens": 91}},
            55 * 4_000 + 64 * 400 + 13 * 32_000 + 30 * 16_000 + 91 * 64_000,
        ),
        (
            {"input_tokens": 1_200, "output_tokens": 800, "input_token_details": {"audio_tokens": 1_200},
             "output_token_details": {"audio_tokens": 800}},
            89_600_000,
        ),
        (  # LangChain's names
            {"input_tokens": 300, "output_tokens": 100, "total_tokens": 400,
             "input_token_details": {"audio": 200, "cache_read": 0}, "output_token_details": {"audio": 60, "reasoning": 0}},
            100 * 4_000 + 200 * 32_000 + 40 * 16_000 + 60 * 64_000,
        ),
    ],
    ids=["realtime", "all audio", "langchain"],
)  # fmt: skip
def test_nested_details_are_billed_by_what_they_are_of(usage, bill):
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        receipt = session.record_usage("openai", "gpt-realtime", usage)
        assert (session.spent * 10**9, receipt.evidence) == (bill, "provider_usage")


WRITTEN = {"input_tokens": 10_000, "output_tokens": 100}


@pytest.mark.parametrize(
    ("details", "asked_for", "bill"),
    [
        ({"cache_write_tokens": 9_000, "cache_write_tokens_details": {"ttl_12h_tokens": 9_000}}, None, 39_000_000),
        ({"cache_write_tokens": 9_000, "cache_write_tokens_details": {"ttl_30m_tokens": 9_000}}, "12h", 25_500_000),
        ({"cache_write_tokens": 9_000}, None, 25_500_000),
        ({"cache_write_tokens": 9_000}, "12h", 39_000_000),
    ],
)
def test_a_cache_of_twelve_hours_costs_twice_the_input(details, asked_for, bill):
    asked = {"model": "gpt-6.1-sol", "input": WORDS, "max_output_tokens": 16_000}
    asked |= {} if asked_for is None else {"prompt_cache_options": {"ttl": asked_for}}
    amount, told = booked(f"{OPENAI}/responses", asked, {**WRITTEN, "input_tokens_details": details}, **RESPONSE)
    assert (amount, told) == (bill, [])
    if asked_for is None and "ttl_12h_tokens" in str(details):
        with make_guard() as guard, guard.session("s", budget="$5.00") as session:
            session.record_usage("openai", "gpt-6.1-sol", {**WRITTEN, "input_tokens_details": details})
            assert session.spent * 10**9 == bill


def test_a_cache_of_twelve_hours_is_held_for():
    asked = {"model": "gpt-6.1-sol", "input": WORDS, "max_output_tokens": 100}
    short, long = (held(f"{OPENAI}/responses", {**asked, **more}, price_context={"service_tier": "default"})
                   for more in ({}, {"prompt_cache_options": {"ttl": "12h"}}))  # fmt: skip
    assert long > Decimal("1.55") * short  # 4 in place of 2.50 dollars a million


def test_azures_tiers_cost_what_they_do_at_the_maker_of_the_model():
    url = "https://r.openai.azure.com/openai/deployments/gpt-5.5/chat/completions"
    usage = {"prompt_tokens": 410, "completion_tokens": 900}
    amount, _ = booked(url, asks("gpt-5.5"), usage, service_tier="priority", **CHAT_DONE)
    assert amount == 72_625_000
    asked = asks("gpt-5.5", max_tokens=100)
    plain, dear = (held(url, {**asked, **more}) for more in ({}, {"service_tier": "priority"}))
    assert dear == plain * Decimal("2.5")


# -- pictures (19) ---------------------------------------------------------------------------------------------------------

PNG = "iVBORw0KGgoAAAANSUhEUgAAASwAAAEsCAIAAAD2HxkiAAAA"  # the head of a picture of 300 x 300


@pytest.mark.parametrize(
    ("more", "each"), [({}, 1_121), ({"mediaResolution": {"level": "x", "numTokens": 9_000}}, 9_000)]
)
def test_pictures_are_held_at_what_newer_gemini_models_count_for_one(more, each):
    part = {"inlineData": {"mimeType": "image/png", "data": PNG}, **more}
    url = "https://generativelanguage.googleapis.com/v1beta/models/gemini-4-argon:generateContent"
    asked = {"contents": [{"parts": [part] * 10}], "generationConfig": {"maxOutputTokens": 1}}
    with make_guard() as guard, guard.session("s", budget="$50.00") as session:
        client(session, lambda _: httpx.Response(200, json={})).post(url, json=asked)
        [event] = [e for e in session.report().to_dict()["events"] if e["event"] == "authorize"]
        assert event["ceiling"]["input_tokens"] >= 10 * each


# -- prices of one's own (21) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("price", "bill"),
    [
        (ModelPrice(input="2.20", output="11.00"), 1_321_650_000),
        (ModelPrice(like="gpt-6-sol", factor="1.1"), 1_321_650_000),
        (ModelPrice(input="2.20", output="11.00", above={}), 661_100_000),
        (
            ModelPrice(input="2.20", output="11.00", above={200_000: {"input": "5.00", "output": "20.00"}}),
            1_502_000_000,
        ),
    ],
)
def test_a_price_of_ones_own_has_the_longer_tier_of_the_book(price, bill):
    usage = {"prompt_tokens": 300_000, "completion_tokens": 100}
    metering = Metering(models={"gpt-6-sol": price}, price_context={"service_tier": "default"})
    answer = {"model": "gpt-6-sol", "usage": usage, **CHAT_DONE}
    with make_guard(metering=metering) as guard, guard.session("s", budget="$50.00") as session:
        client(session, lambda _: httpx.Response(200, json=answer)).post(
            f"{OPENAI}/chat/completions",
            json=asks("gpt-6-sol", max_tokens=100, messages=[{"role": "user", "content": WORDS * 26}]),
        )
        assert session.spent * 10**9 == bill


def test_the_counts_of_an_answer_have_names():
    assert dict(counts_of(PICTURED))["image_gen.output_tokens"] == 7_024
    assert HI[0]["role"] == "user"

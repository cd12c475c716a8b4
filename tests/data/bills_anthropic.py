"""Anthropic's messages in one piece.

What was written to a cache and read from it comes on top of ``input_tokens``: 1.25 times the price for five minutes, twice
for an hour, a tenth to read. Thinking lies inside ``output_tokens``. A search costs $10 per 1,000. The answer's ``speed``
decides the rate, and ``inference_geo: us`` makes every token, and no search, cost a tenth more.
"""

from typing import Any

from tests.data.bills_shape import Bill, text

URL = "https://api.anthropic.com/v1/messages"
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


def ask(model: str, words: int, limit: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": limit, "messages": [{"role": "user", "content": text(words)}], **more}


def kept(model: str, words: int, limit: int, ttl: str = "5m", **more: Any) -> dict[str, Any]:
    """A request whose text is to be kept in the cache."""
    block = {"type": "text", "text": text(words), "cache_control": {"type": "ephemeral", "ttl": ttl}}
    asked = [{"role": "user", "content": "And now?"}]
    return {"model": model, "max_tokens": limit, "system": [block], "messages": asked, **more}


def usage(
    into: int, out: int, *, five: int = 0, hour: int = 0, read: int = 0, geo: str = "global", **more: Any
) -> dict[str, Any]:
    return {
        "input_tokens": into,
        "cache_creation_input_tokens": five + hour,
        "cache_read_input_tokens": read,
        "cache_creation": {"ephemeral_5m_input_tokens": five, "ephemeral_1h_input_tokens": hour},
        "output_tokens": out,
        "service_tier": "standard",
        "inference_geo": geo,
        **more,
    }


def searches(count: int) -> dict[str, Any]:
    return {"server_tool_use": {"web_search_requests": count, "web_fetch_requests": 0}}


def said(words: str = "Grüße, 世界 🌍") -> dict[str, Any]:
    return {"type": "text", "text": words, "citations": None}


def message(model: str, used: dict[str, Any], *content: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "id": "msg_01Q2wJkYtC5Yx7ZbLr9aVnHd",
        "type": "message",
        "role": "assistant",
        "container": None,
        "content": list(content) or [said()],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": used,
    }


_THOUGHT = {"type": "thinking", "thinking": "Let me see.", "signature": "EqoBCkgIARABGAIiQL8d"}
_SEARCHED = (
    {"type": "server_tool_use", "id": "srvtoolu_01", "name": "web_search", "input": {"query": "newest opinions"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_01", "content": []},
)

ANTHROPIC: list[Bill] = [
    Bill(
        name="anthropic",
        url=URL,
        request=ask("claude-haiku-4-5", 12, limit=64),
        answer=message("claude-haiku-4-5-20251001", usage(12, 6, geo="not_available")),
        nanos=42_000,
        arithmetic="12 in x 1,000 + 6 out x 5,000 = 42,000",
    ),
    Bill(
        name="anthropic-cache-comes-on-top",
        url=URL,
        request=kept("claude-sonnet-4-5", 9_221, limit=500),
        answer=message("claude-sonnet-4-5-20250929", usage(21, 393, five=1_200, read=8_000, geo="not_available")),
        nanos=12_858_000,
        arithmetic="21 in x 3,000 + 1,200 written x 3,750 + 8,000 read x 300 + 393 out x 15,000 = 12,858,000",
    ),
    Bill(
        name="anthropic-an-hour-costs-twice-the-input",
        url=URL,
        request=kept("claude-opus-4-6", 3_600, limit=500, ttl="1h"),
        answer=message("claude-opus-4-6", usage(100, 200, five=1_000, hour=2_000, read=500)),
        nanos=32_000_000,
        arithmetic="100 in x 5,000 + 1,000 for 5 min x 6,250 + 2,000 for an hour x 10,000 + 500 read x 500"
        " + 200 out x 25,000 = 32,000,000",
    ),
    Bill(
        name="anthropic-thinking-lies-inside-the-output",
        url=URL,
        request=ask("claude-sonnet-4-5", 43, limit=4_096, thinking={"type": "enabled", "budget_tokens": 2_000}),
        answer=message(
            "claude-sonnet-4-5-20250929",
            usage(43, 2_048, geo="not_available", output_tokens_details={"thinking_tokens": 1_800}),
            _THOUGHT,
            said(),
        ),
        nanos=30_849_000,
        arithmetic="43 in x 3,000 + 2,048 out x 15,000 = 30,849,000",
    ),
    Bill(
        name="anthropic-two-searches",
        url=URL,
        request=ask("claude-sonnet-4-5", 6_039, limit=1_024, tools=[SEARCH]),
        answer=message(
            "claude-sonnet-4-5-20250929", usage(6_039, 931, geo="not_available", **searches(2)), *_SEARCHED, said()
        ),
        nanos=52_082_000,
        arithmetic="6,039 in x 3,000 + 931 out x 15,000 + 2 searches x 10,000,000 = 52,082,000",
    ),
    Bill(
        name="anthropic-as-long-as-the-short-rate-goes",
        url=URL,
        request=kept("claude-sonnet-4-5", 200_000, limit=500),
        answer=message("claude-sonnet-4-5-20250929", usage(10_000, 400, read=190_000, geo="not_available")),
        nanos=93_000_000,
        arithmetic="10,000 in x 3,000 + 190,000 read x 300 + 400 out x 15,000 = 93,000,000",
    ),
    Bill(
        name="anthropic-the-long-rate-counts-the-cache-too",
        url=URL,
        request=kept("claude-sonnet-4-5", 205_000, limit=500),
        answer=message("claude-sonnet-4-5-20250929", usage(5_000, 400, five=10_000, read=190_000, geo="not_available")),
        nanos=228_000_000,
        arithmetic="5,000 in x 6,000 + 10,000 written x 7,500 + 190,000 read x 600 + 400 out x 22,500 = 228,000,000",
    ),
    Bill(
        name="anthropic-one-token-into-the-long-rate",
        url=URL,
        request=ask("claude-haiku-5-5", 100_001, limit=200),
        answer=message("claude-haiku-5-5", usage(100_001, 100)),
        nanos=50_250_500,
        arithmetic="100,001 in x 500 + 100 out x 2,500 = 50,250,500",
    ),
    Bill(
        name="anthropic-fast",
        url=URL,
        request=ask("claude-opus-4-8", 1_000, limit=600, speed="fast"),
        answer=message("claude-opus-4-8", usage(1_000, 500, speed="fast")),
        nanos=35_000_000,
        arithmetic="1,000 in x 10,000 + 500 out x 50,000 = 35,000,000",
        genai="takes the speed from its caller, not from the answer: fast",
    ),
    Bill(
        name="anthropic-fast-became-standard",
        url=URL,
        request=ask("claude-opus-5", 1_000, limit=600, speed="fast"),
        answer=message("claude-opus-5", usage(1_000, 500, speed="standard")),
        nanos=17_500_000,
        arithmetic="1,000 in x 5,000 + 500 out x 25,000 = 17,500,000",
    ),
    Bill(
        name="anthropic-in-the-us-tokens-cost-a-tenth-more",
        url=URL,
        request=kept("claude-opus-4-6", 3_400, limit=400, inference_geo="us", tools=[SEARCH]),
        answer=message(
            "claude-opus-4-6", usage(1_000, 300, five=400, read=2_000, geo="us", **searches(1)), *_SEARCHED, said()
        ),
        nanos=27_600_000,
        arithmetic="1,000 in x 5,500 + 400 written x 6,875 + 2,000 read x 550 + 300 out x 27,500"
        " + 1 search x 10,000,000 = 27,600,000",
        genai="knows no inference_geo",
    ),
    Bill(
        name="anthropic-fast-in-the-us",
        url=URL,
        request=ask("claude-opus-5-5", 1_000, limit=300, speed="fast", inference_geo="us"),
        answer=message("claude-opus-5-5", usage(1_000, 200, geo="us", speed="fast")),
        nanos=17_600_000,
        arithmetic="1,000 in x 8,800 + 200 out x 44,000 = 17,600,000",
        genai="knows no inference_geo, and takes the speed from its caller",
    ),
    Bill(
        name="anthropic-batch",
        url=URL,
        request=kept("claude-sonnet-4-5", 1_000, limit=200),
        answer=message("claude-sonnet-4-5-20250929", usage(800, 100, read=200) | {"service_tier": "batch"}),
        nanos=1_980_000,
        arithmetic="800 in x 1,500 + 200 read x 150 + 100 out x 7,500 = 1,980,000",
        genai="asked without a context it knows of no batch",
        price_context={"processing": "batch"},
    ),
]

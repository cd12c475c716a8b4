"""Anthropic's messages as a stream: the usage at the start is a placeholder, and what a delta counts is the sum so far."""

from typing import Any

from tests.data.bills_anthropic import SEARCH, URL, ask, kept, message, searches, usage
from tests.data.bills_shape import CEILING, SSE, Bill, cut, events

PING = {"type": "ping"}


def block(index: int, empty: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": empty},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def words(index: int = 0) -> list[dict[str, Any]]:
    said = [{"type": "text_delta", "text": part} for part in ("Grü", "ße, ", "世界", " 🌍")]
    return block(index, {"type": "text", "text": ""}, *said)


def start(model: str, used: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message_start", "message": {**message(model, used), "content": [], "stop_reason": None}}


def so_far(stop: str | None = "end_turn", **used: Any) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": used}


def streamed(first: dict[str, Any], *parts: dict[str, Any]) -> str:
    return events(first, PING, *parts, {"type": "message_stop"})


_THOUGHT = block(
    0,
    {"type": "thinking", "thinking": "", "signature": ""},
    {"type": "thinking_delta", "thinking": "Let me see."},
    {"type": "signature_delta", "signature": "EqoBCkgIARABGAIiQL8d"},
)
_SEARCHED = [
    *block(
        0,
        {"type": "server_tool_use", "id": "srvtoolu_01", "name": "web_search", "input": {}},
        {"type": "input_json_delta", "partial_json": '{"query": "newest opinions"}'},
    ),
    *block(1, {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_01", "content": []}),
]
_OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}, "request_id": "req_01"}

ANTHROPIC_STREAMS: list[Bill] = [
    Bill(
        name="anthropic-stream-starts-with-a-placeholder",
        url=URL,
        request=ask("claude-haiku-4-5", 25, limit=64, stream=True),
        stream=streamed(
            start("claude-haiku-4-5-20251001", usage(25, 1, geo="not_available")), *words(), so_far(output_tokens=15)
        ),
        content_type=SSE,
        nanos=100_000,
        arithmetic="25 in x 1,000 + 15 out x 5,000 = 100,000",
    ),
    Bill(
        name="anthropic-stream-a-delta-overrides-the-start",
        url=URL,
        request=ask("claude-sonnet-4-5", 10_682, limit=1_024, stream=True, tools=[SEARCH]),
        stream=streamed(
            start("claude-sonnet-4-5-20250929", usage(2_679, 3, geo="not_available")),
            *_SEARCHED,
            *words(2),
            so_far(
                input_tokens=10_682,
                cache_creation_input_tokens=0,
                cache_read_input_tokens=0,
                output_tokens=510,
                **searches(1),
            ),
        ),
        content_type=SSE,
        nanos=49_696_000,
        arithmetic="10,682 in x 3,000 + 510 out x 15,000 + 1 search x 10,000,000 = 49,696,000",
    ),
    Bill(
        name="anthropic-stream-deltas-are-no-summands",
        url=URL,
        request=kept("claude-opus-4-6", 1_030, limit=400, ttl="1h", stream=True),
        stream=streamed(
            start("claude-opus-4-6", usage(30, 2, hour=1_000)),
            *_THOUGHT,
            so_far(None, input_tokens=30, cache_creation_input_tokens=1_000, output_tokens=100),
            *words(1),
            so_far(
                input_tokens=30,
                cache_creation_input_tokens=1_000,
                cache_read_input_tokens=0,
                output_tokens=240,
                output_tokens_details={"thinking_tokens": 96},
            ),
        ),
        content_type=SSE,
        nanos=16_150_000,
        arithmetic="30 in x 5,000 + 1,000 for an hour x 10,000 + 240 out x 25,000 = 16,150,000",
    ),
    Bill(
        name="anthropic-stream-fast",
        url=URL,
        request=ask("claude-opus-5-5", 500, limit=200, stream=True, speed="fast"),
        stream=streamed(
            start("claude-opus-5-5", usage(500, 1, speed="fast")),
            *words(),
            so_far(input_tokens=500, cache_creation_input_tokens=0, cache_read_input_tokens=0, output_tokens=100),
        ),
        content_type=SSE,
        nanos=8_000_000,
        arithmetic="500 in x 8,000 + 100 out x 40,000 = 8,000,000",
        genai="takes the speed from its caller, not from the answer: fast",
    ),
    Bill(
        name="anthropic-stream-cut-off",
        url=URL,
        request=ask("claude-sonnet-4-5", 25, limit=1_000, stream=True),
        stream=cut(
            streamed(
                start("claude-sonnet-4-5-20250929", usage(25, 1, geo="not_available")),
                *words(),
                so_far(output_tokens=15),
            ),
            before="message_delta",
        ),
        content_type=SSE,
        nanos=CEILING,
        arithmetic="1,000 out x 15,000 = 15,000,000",
        genai="would take the placeholder at the start for the usage",
        evidence="assumed",
    ),
    Bill(
        name="anthropic-stream-ends-in-an-error",
        url=URL,
        request=ask("claude-haiku-4-5", 25, limit=1_000, stream=True),
        stream=events(
            start("claude-haiku-4-5-20251001", usage(25, 1, geo="not_available")), PING, *words()[:3], _OVERLOADED
        ),
        content_type=SSE,
        nanos=CEILING,
        arithmetic="1,000 out x 5,000 = 5,000,000",
        genai="would take the placeholder at the start for the usage",
        evidence="assumed",
    ),
]

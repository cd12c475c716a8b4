"""OpenAI and Azure: chat completions that stream. The last chunk has no choices, and the usage of them all."""

from typing import Any

from tests.data.bills_openai import AZURE, CHAT, ask, usage
from tests.data.bills_shape import CEILING, SSE, Bill, cut, sse, text

WORDS = ("", "Grü", "ße", ", ", "世界", " 🌍")


def streamed(model: str, words: int, limit: int, **more: Any) -> dict[str, Any]:
    return ask(model, words, limit, stream=True, stream_options={"include_usage": True}, **more)


def chunk(model: str, choices: list[dict[str, Any]], used: dict[str, Any] | None, tier: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-CfQ9bV2sKq8Wn4TtY0mXc6Zr1LhPa",
        "object": "chat.completion.chunk",
        "created": 1795348800,
        "model": model,
        "service_tier": tier,
        "system_fingerprint": "fp_560af6e559",
        "choices": choices,
        "usage": used,
        "obfuscation": "mH3vQ0",
    }


def delta(finish: str | None = None, **said: Any) -> dict[str, Any]:
    return {"index": 0, "delta": said, "logprobs": None, "finish_reason": finish}


def chunks(model: str, used: dict[str, Any], tier: str = "default", says: list[dict[str, Any]] | None = None) -> str:
    start = delta(role="assistant", content=WORDS[0], refusal=None)
    said = says or [delta(content=word) for word in WORDS[1:]]
    finish = "stop" if says is None else "tool_calls"
    parts = [chunk(model, [each], None, tier) for each in (start, *said, delta(finish))]
    return sse(*parts, chunk(model, [], used, tier), "[DONE]")


def call(**part: Any) -> dict[str, Any]:
    return delta(tool_calls=[{"index": 0, **part}])


_CALLS = [
    call(id="call_1", type="function", function={"name": "get_opinion", "arguments": ""}),
    call(function={"arguments": '{"docket":'}),
    call(function={"arguments": '"42"}'}),
]
_TOOL = {
    "type": "function",
    "function": {"name": "get_opinion", "parameters": {"type": "object", "properties": {"docket": {"type": "string"}}}},
}
_AZURE_FIRST = {
    "choices": [],
    "created": 0,
    "id": "",
    "model": "",
    "object": "",
    "prompt_filter_results": [
        {"prompt_index": 0, "content_filter_results": {"hate": {"filtered": False, "severity": "safe"}}}
    ],
}

OPENAI_STREAMS: list[Bill] = [
    Bill(
        name="openai-stream",
        url=CHAT,
        request=streamed("gpt-4o-mini", 21, limit=50),
        stream=chunks("gpt-4o-mini-2024-07-18", usage(21, 18)),
        content_type=SSE,
        nanos=13_950,
        arithmetic="21 in x 150 + 18 out x 600 = 13,950",
    ),
    Bill(
        name="openai-stream-of-a-tool-call",
        url=CHAT,
        request=streamed("gpt-5", 1_500, limit=1_000, tools=[_TOOL], reasoning_effort="low"),
        stream=chunks("gpt-5-2025-08-07", usage(1_500, 700, cached=1_280, reasoning=640), says=_CALLS),
        content_type=SSE,
        nanos=7_435_000,
        arithmetic="220 in x 1,250 + 1,280 cached x 125 + 700 out x 10,000 = 7,435,000",
    ),
    Bill(
        name="openai-stream-auto-became-priority",
        url=CHAT,
        request=streamed("gpt-5-mini", 1_000, limit=200, service_tier="auto"),
        stream=chunks("gpt-5-mini-2025-08-07", usage(1_000, 100), tier="priority"),
        content_type=SSE,
        nanos=810_000,
        arithmetic="1,000 in x 450 + 100 out x 3,600 = 810,000",
        genai="takes the tier from its caller, not from the answer: priority",
    ),
    Bill(
        name="openai-stream-cut-off",
        url=CHAT,
        request=streamed("gpt-4o-mini", 20, limit=500),
        stream=cut(chunks("gpt-4o-mini-2024-07-18", usage(20, 18)), before='"finish_reason":"stop"'),
        content_type=SSE,
        nanos=CEILING,
        arithmetic="500 out x 600 = 300,000",
        genai="no usage ever came",
        evidence="assumed",
    ),
    Bill(
        name="openai-stream-cut-off-before-its-usage",
        url=CHAT,
        request=streamed("gpt-4o", 20, limit=100),
        stream=cut(chunks("gpt-4o-2024-08-06", usage(20, 18)), before='"choices":[],'),
        content_type=SSE,
        nanos=CEILING,
        arithmetic="100 out x 10,000 = 1,000,000",
        genai="no usage ever came",
        evidence="assumed",
    ),
    Bill(
        name="azure-stream-begins-without-a-model",
        url=AZURE,
        request={
            "model": "gpt-4o",
            "messages": [{"role": "user", "content": text(40)}],
            "max_tokens": 30,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        stream=sse(_AZURE_FIRST) + chunks("gpt-4o-2024-11-20", usage(40, 20)),
        content_type="text/event-stream",
        nanos=300_000,
        arithmetic="40 in x 2,500 + 20 out x 10,000 = 300,000",
    ),
]

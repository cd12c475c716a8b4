"""Cohere bills ``billed_units``; ``tokens`` is what the model saw, with a preamble that nobody pays for."""

from typing import Any

from tests.data.bills_shape import SSE, Bill, events, sse, text

CHAT = "https://api.cohere.com/v2/chat"
EMBED = "https://api.cohere.com/v2/embed"


def ask(model: str, words: int, limit: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text(words)}], "max_tokens": limit, **more}


def usage(billed: int, out: int, *, seen: int) -> dict[str, Any]:
    return {
        "billed_units": {"input_tokens": billed, "output_tokens": out},
        "tokens": {"input_tokens": seen, "output_tokens": out},
        "cached_tokens": 0,
    }


def answer(used: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "c14c80c3-18eb-4519-9460-6c92edd8cfb4",
        "finish_reason": "COMPLETE",
        "message": {"role": "assistant", "content": [{"type": "text", "text": "Grüße, 世界 🌍"}]},
        "usage": used,
    }


def streamed(used: dict[str, Any]) -> str:
    empty = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}

    def part(kind: str, **content: str) -> dict[str, Any]:
        return {"type": kind, "index": 0, "delta": {"message": {"content": content}}}

    return events(
        {"id": "29f14a5a-11de-4cae-9800-25e4747408ea", "type": "message-start", "delta": {"message": empty}},
        part("content-start", type="text", text=""),
        *(part("content-delta", text=word) for word in ("Grü", "ße, ", "世界", " 🌍")),
        {"type": "content-end", "index": 0},
        {"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": used}},
    ) + sse("[DONE]")


COHERE: list[Bill] = [
    Bill(
        name="cohere-bills-less-than-it-saw",
        url=CHAT,
        request=ask("command-a-03-2025", 71, limit=500),
        answer=answer(usage(5, 418, seen=71)),
        nanos=4_192_500,
        arithmetic="5 in x 2,500 + 418 out x 10,000 = 4,192,500",
    ),
    Bill(
        name="cohere-half-a-nano-dollar-is-one",
        url=CHAT,
        request=ask("command-r7b-12-2024", 70, limit=50),
        answer=answer(usage(7, 33, seen=70)),
        nanos=5_213,
        arithmetic="7 in x 37.5 + 33 out x 150 = 5,212.5, up to 5,213",
    ),
    Bill(
        name="cohere-stream",
        url=CHAT,
        request=ask("command-r-08-2024", 77, limit=100, stream=True),
        stream=streamed(usage(11, 60, seen=77)),
        content_type=SSE,
        nanos=37_650,
        arithmetic="11 in x 150 + 60 out x 600 = 37,650",
    ),
    Bill(
        name="cohere-embed",
        url=EMBED,
        request={
            "model": "embed-v4.0",
            "texts": [text(14), text(16)],
            "input_type": "search_document",
            "embedding_types": ["float"],
            "output_dimension": 256,
        },
        answer={
            "id": "da6e531f-54c5-4a73-bf92-f60566d8d753",
            "embeddings": {"float": [[0.016296387, -0.008354187], [0.04663086, -0.023239136]]},
            "texts": [text(14), text(16)],
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 30}},
            "response_type": "embeddings_by_type",
        },
        nanos=3_600,
        arithmetic="30 in x 120 = 3,600",
    ),
]

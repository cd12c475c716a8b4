"""Answers like OpenAI's responses: one object with the whole answer, or the events that build it."""

import secrets
import time
from collections.abc import Iterator

from x402guard.testing.engine import JSON
from x402guard.testing.llm_calls import Completion, LlmCall
from x402guard.testing.llm_shapes import Document, Rendered, Stream, compact, pieces, reported, sse, tier, within

_ECHOED: dict[str, JSON] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}


def responses(call: LlmCall, completion: Completion) -> Rendered:
    """POST /v1/responses."""
    finished = _finished(call, completion)
    if not call.streams:
        return Document(finished)
    numbered = (content | {"sequence_number": number} for number, content in enumerate(_events(finished)))
    return Stream(tuple(sse(content, event=content["type"]) for content in numbered))


def _finished(call: LlmCall, completion: Completion) -> dict[str, JSON]:
    output, limited = within(call.body.get("max_output_tokens"), completion.output_tokens)
    used = {
        "input_tokens": completion.input_tokens,
        "input_tokens_details": {
            "cached_tokens": completion.cached_tokens,
            "cache_write_tokens": completion.cache_write_tokens,
        },
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": min(completion.reasoning_tokens, output)},
        "total_tokens": completion.input_tokens + output,
    }
    now = int(time.time())
    content = {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": now,
        "status": "incomplete" if limited else "completed",
        "background": False,
        "completed_at": None if limited else now,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if limited else None,
        "model": completion.model or call.model,
        "output": list(_items(completion, "incomplete" if limited else "completed")),
        "service_tier": tier(call, completion, "default"),
        "user": None,
    }
    echoed = {name: call.body.get(name, default) for name, default in _ECHOED.items()}
    return content | echoed | ({"usage": None} | reported(completion, "usage", used))


def _items(completion: Completion, status: str) -> Iterator[dict[str, JSON]]:
    if completion.text or not completion.tool_calls:
        part = _part(completion.text)
        name = f"msg_{secrets.token_hex(24)}"
        yield {"id": name, "type": "message", "status": status, "content": [part], "role": "assistant"}
    for tool in completion.tool_calls:
        yield {
            "id": f"fc_{secrets.token_hex(24)}",
            "type": "function_call",
            "status": status,
            "arguments": compact(dict(tool.arguments)),
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": tool.name,
        }


def _part(text: str) -> dict[str, JSON]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _events(finished: dict[str, JSON]) -> Iterator[dict[str, JSON]]:
    begun = finished | {"status": "in_progress", "completed_at": None, "incomplete_details": None}
    begun |= {"output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(finished["output"]):
        filled = _message_events if item["type"] == "message" else _function_events
        empty: dict[str, JSON] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        added = item | {"status": "in_progress"} | empty
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        yield from filled(index, item)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{finished['status']}", "response": finished}


def _message_events(index: int, item: JSON) -> Iterator[dict[str, JSON]]:
    text = item["content"][0]["text"]
    place = {"item_id": item["id"], "output_index": index, "content_index": 0}
    yield {"type": "response.content_part.added", **place, "part": _part("")}
    for piece in pieces(text):
        yield {"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": _part(text)}


def _function_events(index: int, item: JSON) -> Iterator[dict[str, JSON]]:
    place = {"item_id": item["id"], "output_index": index}
    yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}

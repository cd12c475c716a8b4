"""Answers like Anthropic: messages, as a document and as a stream, and token counts."""

import secrets
from collections.abc import Iterator

from x402guard.testing.engine import JSON
from x402guard.testing.llm_calls import Completion, LlmCall
from x402guard.testing.llm_shapes import (
    Document,
    Endpoint,
    Provider,
    Rendered,
    Stream,
    compact,
    pieces,
    reported,
    sse,
    within,
)

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_COUNTED = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


def _messages(call: LlmCall, completion: Completion) -> Rendered:
    """POST /v1/messages."""
    output, limited = within(call.body["max_tokens"], completion.output_tokens)
    used = _usage(completion, output)
    ended = "tool_use" if completion.tool_calls else "end_turn"
    message = {
        "model": completion.model or call.model,
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "content": list(_blocks(completion)),
        "stop_reason": "max_tokens" if limited else ended,
        "stop_sequence": None,
        "stop_details": None,
    }
    if not call.streams:
        return Document(message | reported(completion, "usage", used))
    return Stream(tuple(sse(content, event=content["type"]) for content in _events(completion, message, used)))


def _usage(completion: Completion, output: int) -> dict[str, JSON]:
    hour = completion.cache_write_1h_tokens
    kept = {"ephemeral_5m_input_tokens": completion.cache_write_tokens - hour, "ephemeral_1h_input_tokens": hour}
    return {
        "input_tokens": completion.input_tokens,
        "cache_creation_input_tokens": completion.cache_write_tokens,
        "cache_read_input_tokens": completion.cached_tokens,
        "cache_creation": kept,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": min(completion.reasoning_tokens, output)},
        "service_tier": completion.service_tier or "standard",
        "inference_geo": "not_available",
    }


def _blocks(completion: Completion) -> Iterator[dict[str, JSON]]:
    if completion.text or not completion.tool_calls:
        yield {"type": "text", "text": completion.text}
    for tool in completion.tool_calls:
        name = f"toolu_{secrets.token_hex(12)}"
        yield {"type": "tool_use", "id": name, "name": tool.name, "input": dict(tool.arguments)}


def _events(completion: Completion, message: JSON, used: dict[str, JSON]) -> Iterator[dict[str, JSON]]:
    begun = {name: count for name, count in used.items() if name != "output_tokens_details"} | {"output_tokens": 1}
    opening = message | {"content": [], "stop_reason": None} | reported(completion, "usage", begun)
    yield {"type": "message_start", "message": opening}
    for index, block in enumerate(message["content"]):
        empty: dict[str, JSON] = {"text": ""} if block["type"] == "text" else {"input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        if index == 0:
            yield {"type": "ping"}
        for delta in _deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stopped = {name: message[name] for name in ("stop_reason", "stop_sequence", "stop_details")}
    total = {name: used[name] for name in (*_COUNTED, "output_tokens_details")}
    yield {"type": "message_delta", "delta": stopped} | reported(completion, "usage", total)
    yield {"type": "message_stop"}


def _deltas(block: JSON) -> Iterator[dict[str, JSON]]:
    if block["type"] == "text":
        for piece in pieces(block["text"]):
            yield {"type": "text_delta", "text": piece}
        return
    written = compact(block["input"])
    for part in ("", written[: len(written) // 2], written[len(written) // 2 :]):
        yield {"type": "input_json_delta", "partial_json": part}


def _count_tokens(_call: LlmCall, completion: Completion) -> Document:
    """POST /v1/messages/count_tokens."""
    return Document({"input_tokens": completion.input_tokens})


def _error(_call: LlmCall, status: int, message: str) -> JSON:
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": f"req_{secrets.token_hex(12)}"}


ANTHROPIC = Provider(
    "anthropic",
    (
        Endpoint("/v1/messages", _messages, ("model", "messages", "max_tokens")),
        Endpoint("/v1/messages/count_tokens", _count_tokens, ("model", "messages")),
    ),
    _error,
    id_header="request-id",
)
"""Replaces https://api.anthropic.com."""

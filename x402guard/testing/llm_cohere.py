"""Answers like Cohere's version 2: chat, as a document and as a stream, and embeddings."""

import secrets
import uuid
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
    packed,
    pieces,
    reported,
    sse,
    vector,
    within,
)

TEMPLATE_TOKENS = 71
"""The tokens that Cohere's prompt template adds to the input: in `usage.tokens`, but not in `usage.billed_units`."""

_DONE = b"data: [DONE]\n\n"


def _chat(call: LlmCall, completion: Completion) -> Rendered:
    """POST /v2/chat."""
    output, limited = within(call.body.get("max_tokens"), completion.output_tokens)
    finish = "TOOL_CALL" if completion.tool_calls else "COMPLETE"
    finish = "MAX_TOKENS" if limited else finish
    used = reported(completion, "usage", _usage(completion, output))
    name, tools = str(uuid.uuid4()), [_tool_call(index, completion) for index in range(len(completion.tool_calls))]
    if call.streams:
        events = _events(name, completion.text, tools, {"finish_reason": finish, **used})
        return Stream((*(sse(content, event=content["type"]) for content in events), _DONE))
    message: dict[str, JSON] = {"role": "assistant"}
    if completion.text or not tools:
        message["content"] = [{"type": "text", "text": completion.text}]
    if tools:
        message["tool_calls"] = tools
    return Document({"id": name, "message": message, "finish_reason": finish, **used})


def _usage(completion: Completion, output: int) -> dict[str, JSON]:
    return {
        "billed_units": {"input_tokens": completion.input_tokens, "output_tokens": output},
        "tokens": {"input_tokens": completion.input_tokens + TEMPLATE_TOKENS, "output_tokens": output},
        "cached_tokens": completion.cached_tokens,
    }


def _tool_call(index: int, completion: Completion) -> dict[str, JSON]:
    tool = completion.tool_calls[index]
    function = {"name": tool.name, "arguments": compact(dict(tool.arguments))}
    return {"id": f"{tool.name}_{secrets.token_hex(6)}", "type": "function", "function": function}


def _events(name: str, text: str, tools: list[JSON], ended: JSON) -> Iterator[dict[str, JSON]]:
    empty = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
    yield {"id": name, "type": "message-start", "delta": {"message": empty}}
    if text or not tools:
        opened = {"content": {"type": "text", "text": ""}}
        yield {"type": "content-start", "index": 0, "delta": {"message": opened}}
        for piece in pieces(text):
            yield {"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": piece}}}}
        yield {"type": "content-end", "index": 0}
    for index, tool in enumerate(tools):
        opened = {"tool_calls": tool | {"function": tool["function"] | {"arguments": ""}}}
        yield {"type": "tool-call-start", "index": index, "delta": {"message": opened}}
        written = {"tool_calls": {"function": {"arguments": tool["function"]["arguments"]}}}
        yield {"type": "tool-call-delta", "index": index, "delta": {"message": written}}
        yield {"type": "tool-call-end", "index": index}
    yield {"id": name, "type": "message-end", "delta": ended}


def _embed(call: LlmCall, completion: Completion) -> Document:
    """POST /v2/embed: vectors as numbers (`float`), as `base64`, or both, as requested."""
    texts = call.body.get("texts") or []
    vectors = [vector(text, call.body.get("output_dimension")) for text in texts]
    written = {"float": vectors, "base64": [packed(numbers) for numbers in vectors]}
    kinds = call.body.get("embedding_types") or ["float"]
    billed = {"api_version": {"version": "2"}} | reported(
        completion, "billed_units", {"input_tokens": completion.input_tokens}
    )
    return Document(
        {
            "id": str(uuid.uuid4()),
            "texts": texts,
            "embeddings": {kind: written[kind] for kind in kinds if kind in written},
            "meta": billed,
            "response_type": "embeddings_by_type",
        }
    )


def _error(_call: LlmCall, _status: int, message: str) -> JSON:
    return {"id": str(uuid.uuid4()), "message": message}


COHERE = Provider(
    "cohere",
    (
        Endpoint("/v2/chat", _chat, ("model", "messages")),
        Endpoint("/v2/embed", _embed, ("model", "input_type")),
    ),
    _error,
    id_header="x-debug-trace-id",
)
"""Replaces https://api.cohere.com."""

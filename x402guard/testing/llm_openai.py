"""Answers like OpenAI and Azure OpenAI: chat completions, embeddings, images, models. Responses: `llm_responses`."""

import time

from x402guard.testing.engine import JSON
from x402guard.testing.llm_calls import Completion, LlmCall
from x402guard.testing.llm_chat import Chat, ChatDialect
from x402guard.testing.llm_responses import responses
from x402guard.testing.llm_shapes import Document, Endpoint, Provider, packed, reported, sse, tier, vector

MODELS = ("gpt-5.2", "gpt-5.2-mini", "text-embedding-3-small")
"""The models in a list of models. Any other model is served too."""

_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_ERROR_TYPES = {401: "invalid_request_error", 429: "rate_limit_error"}
_ERROR_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


def openai_error(_call: LlmCall, status: int, message: str) -> JSON:
    """An error in the shape of OpenAI and compatible providers."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": _ERROR_CODES.get(status)}}


def _inputs(content: JSON) -> list[JSON]:
    """The inputs of an embedding, one by one: texts, or lists of tokens."""
    one = not isinstance(content, list) or (content and all(isinstance(part, int) for part in content))
    return [content] if one else content


def embeddings(call: LlmCall, completion: Completion) -> Document:
    """POST /v1/embeddings: a vector for every input, as numbers or as base64."""
    in_base64 = call.body.get("encoding_format") == "base64"
    vectors = [vector(part, call.body.get("dimensions")) for part in _inputs(call.body["input"])]
    data = [
        {"object": "embedding", "index": index, "embedding": packed(numbers) if in_base64 else numbers}
        for index, numbers in enumerate(vectors)
    ]
    used = {"prompt_tokens": completion.input_tokens, "total_tokens": completion.input_tokens}
    content = {"object": "list", "data": data, "model": completion.model or call.model}
    return Document(content | reported(completion, "usage", used))


def models(_call: LlmCall, _completion: Completion) -> Document:
    """GET /v1/models: the list of models."""
    data = [{"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "x402guard"} for name in MODELS]
    return Document({"object": "list", "data": data})


def images(call: LlmCall, completion: Completion) -> Document:
    """POST /v1/images/generations: images of one pixel, billed in tokens."""
    count = call.body.get("n")
    pictures = [{"b64_json": _PIXEL}] * (count if isinstance(count, int) and count > 0 else 1)
    used = {
        "input_tokens": completion.input_tokens,
        "input_tokens_details": {"image_tokens": 0, "text_tokens": completion.input_tokens},
        "output_tokens": completion.output_tokens,
        "total_tokens": completion.input_tokens + completion.output_tokens,
    }
    return Document({"created": int(time.time()), "data": pictures} | reported(completion, "usage", used))


class _Azure(ChatDialect):
    """OpenAI's dialect with content filter results: in every choice, and in a first chunk without choices."""

    def choice(self, index: int, finish_reason: str | None, **content: JSON) -> dict[str, JSON]:
        return super().choice(index, finish_reason, **content) | {"content_filter_results": _UNFILTERED}

    def about(self, chat: Chat) -> dict[str, JSON]:
        served = tier(chat.call, chat.completion, None)
        return {"system_fingerprint": "fp_x402guard"} | ({"service_tier": served} if served else {})

    def beside(self, chat: Chat) -> dict[str, JSON]:
        del chat
        return {"prompt_filter_results": _PROMPT_FILTER}

    def opening(self, chat: Chat) -> list[bytes]:
        del chat
        nothing = {"choices": [], "created": 0, "id": "", "model": "", "object": ""}
        return [sse(nothing | {"prompt_filter_results": _PROMPT_FILTER})]


_UNFILTERED = {kind: {"filtered": False, "severity": "safe"} for kind in ("hate", "self_harm", "sexual", "violence")}
_PROMPT_FILTER = [{"prompt_index": 0, "content_filter_results": _UNFILTERED}]


def _azure_error(_call: LlmCall, status: int, message: str) -> JSON:
    return {"error": {"code": str(status), "message": message}}


_CHAT = ("model", "messages")
_openai_chat, _azure_chat = ChatDialect(), _Azure()
_DEPLOYMENT = "/openai/deployments/{model}"

OPENAI = Provider(
    "openai",
    (
        Endpoint("/v1/chat/completions", _openai_chat, _CHAT),
        Endpoint("/v1/responses", responses, ("model",)),
        Endpoint("/v1/embeddings", embeddings, ("model", "input")),
        Endpoint("/v1/images/generations", images, ("prompt",)),
        Endpoint("/v1/models", models, method="GET"),
    ),
    openai_error,
)
"""Replaces https://api.openai.com."""

AZURE = Provider(
    "azure",
    (
        Endpoint(f"{_DEPLOYMENT}/chat/completions", _azure_chat, ("messages",)),
        Endpoint(f"{_DEPLOYMENT}/embeddings", embeddings, ("input",)),
        Endpoint(f"{_DEPLOYMENT}/images/generations", images, ("prompt",)),
        Endpoint("/openai/responses", responses, ("model",)),
        Endpoint("/openai/v1/chat/completions", _azure_chat, _CHAT),
        Endpoint("/openai/v1/responses", responses, ("model",)),
        Endpoint("/openai/v1/embeddings", embeddings, ("model", "input")),
    ),
    _azure_error,
)
"""Replaces https://RESOURCE.openai.azure.com, by deployment or by model."""

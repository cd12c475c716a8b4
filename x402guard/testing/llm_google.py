"""Answers like Gemini: content, as a document and as two kinds of stream, token counts, and embeddings."""

import secrets

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
    vector,
    within,
)

_STATES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_VERSIONS = ("v1beta", "v1")


def _generate(call: LlmCall, completion: Completion) -> Rendered:
    """POST /v1beta/models/MODEL:generateContent, and :streamGenerateContent."""
    settings = call.body.get("generationConfig")
    settings = settings if isinstance(settings, dict) else {}
    asked = settings.get("candidateCount")
    candidates = asked if isinstance(asked, int) and asked > 1 else 1
    limit = settings.get("maxOutputTokens")
    limit = limit * candidates if isinstance(limit, int) else None
    # The limit applies to thoughts and text together, and the thoughts come first.
    thoughts, _ = within(limit, completion.thoughts_tokens)
    output, limited = within(None if limit is None else limit - thoughts, completion.output_tokens)
    parts: list[JSON] = [{"text": piece} for piece in _texts(call, completion)]
    parts += [{"functionCall": {"name": tool.name, "args": dict(tool.arguments)}} for tool in completion.tool_calls]
    about = {"modelVersion": completion.model or call.model, "responseId": secrets.token_urlsafe(16)}
    finish = "MAX_TOKENS" if limited else "STOP"
    if not call.streams:
        used = _usage(call, completion, thoughts, output)
        return Document(_content(candidates, parts, finish) | reported(completion, "usageMetadata", used) | about)
    chunks = []
    for number, part in enumerate(parts, start=1):
        used = _usage(call, completion, thoughts, output * number // len(parts))
        content = _content(candidates, [part], finish if number == len(parts) else None)
        chunks.append(content | reported(completion, "usageMetadata", used) | about)
    return _stream(call, chunks)


def _texts(call: LlmCall, completion: Completion) -> list[str]:
    if not completion.text:
        return [] if completion.tool_calls else [""]
    return pieces(completion.text) if call.streams else [completion.text]


def _content(candidates: int, parts: list[JSON], finish: str | None) -> dict[str, JSON]:
    candidate = {"content": {"parts": parts, "role": "model"}} | ({"finishReason": finish} if finish else {})
    return {"candidates": [candidate | {"index": index} for index in range(candidates)]}


def _usage(call: LlmCall, completion: Completion, thoughts: int, output: int) -> dict[str, JSON]:
    cached = completion.cached_tokens
    asked = call.body.get("serviceTier")
    counts: dict[str, JSON] = {
        "promptTokenCount": completion.input_tokens,
        "candidatesTokenCount": output,
        "totalTokenCount": completion.input_tokens + thoughts + output,
        "promptTokensDetails": _modalities(completion.input_tokens),
    }
    if cached:
        counts |= {"cachedContentTokenCount": cached, "cacheTokensDetails": _modalities(cached)}
    if thoughts:
        counts |= {"thoughtsTokenCount": thoughts}
    return counts | {"serviceTier": completion.service_tier or (asked if isinstance(asked, str) else "standard")}


def _modalities(tokens: int) -> JSON:
    return [{"modality": "TEXT", "tokenCount": tokens}]


def _stream(call: LlmCall, chunks: list[dict[str, JSON]]) -> Stream:
    if call.query.get("alt") == "sse":
        return Stream(tuple(sse(chunk, end="\r\n") for chunk in chunks))
    written = [("[" if number == 0 else ",\r\n") + compact(chunk) for number, chunk in enumerate(chunks)]
    written[-1] += "]"
    return Stream(tuple(part.encode() for part in written), "application/json; charset=UTF-8")


def _count_tokens(_call: LlmCall, completion: Completion) -> Document:
    """POST /v1beta/models/MODEL:countTokens."""
    tokens = completion.input_tokens
    return Document({"totalTokens": tokens, "promptTokensDetails": _modalities(tokens)})


def _embed(call: LlmCall, completion: Completion) -> Document:
    """POST /v1beta/models/MODEL:embedContent."""
    return Document({"embedding": _embedding(call.body)} | _embedding_usage(completion))


def _embed_batch(call: LlmCall, completion: Completion) -> Document:
    """POST /v1beta/models/MODEL:batchEmbedContents."""
    requests = call.body["requests"]
    return Document({"embeddings": [_embedding(request) for request in requests]} | _embedding_usage(completion))


def _embedding(request: JSON) -> JSON:
    return {"values": vector(request.get("content"), request.get("outputDimensionality"))}


def _embedding_usage(completion: Completion) -> dict[str, JSON]:
    tokens = completion.input_tokens
    used = {"promptTokenCount": tokens, "promptTokensDetails": _modalities(tokens)}
    return reported(completion, "usageMetadata", used)


def _error(call: LlmCall, status: int, message: str) -> JSON:
    state = _STATES.get(status, "INTERNAL" if status >= 500 else "FAILED_PRECONDITION")
    content = {"error": {"code": status, "message": message, "status": state}}
    # A stream in the form of an array stays an array for an error.
    return [content] if call.streams and call.query.get("alt") != "sse" else content


_METHODS = (
    ("generateContent", _generate, ("contents",)),
    ("streamGenerateContent", _generate, ("contents",)),
    ("countTokens", _count_tokens, ()),
    ("embedContent", _embed, ("content",)),
    ("batchEmbedContents", _embed_batch, ("requests",)),
)

GOOGLE = Provider(
    "google",
    tuple(
        Endpoint(f"/{version}/models/{{model}}:{name}", answer, required)
        for version in _VERSIONS
        for name, answer, required in _METHODS
    ),
    _error,
)
"""Replaces https://generativelanguage.googleapis.com."""

"""A request to an LLM provider, read: the model, the output it asks for, and all that makes up its input."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.errors import Unpriced
from x402guard.ledger.authorize import Refusal
from x402guard.llm.content import Unbounded, find_unbounded, read_content, tools_of
from x402guard.llm.media import Media
from x402guard.llm.routes import Flavour, Route
from x402guard.strict_json import NotReadable, read_object

UNREADABLE: Final = "unreadable_request"

_TOKENS_A_MESSAGE: Final = 8
_TOKENS_A_TOOL: Final = 32
_TOKENS_A_CALL: Final = 32
_TOKENS_OF_TOOL_USE: Final = 800
"""What Anthropic adds to a request with tools, and again for each tool of its own making (its page on tool use)."""

_LIMITS: Final[Mapping[Flavour, tuple[tuple[str, ...], ...]]] = {
    "chat": (("max_completion_tokens",), ("max_tokens",)),
    "completions": (("max_tokens",),),
    "responses": (("max_output_tokens",),),
    "messages": (("max_tokens",),),
    "gemini": (
        ("generationConfig", "maxOutputTokens"),
        ("generationConfig", "max_output_tokens"),
        ("generation_config", "max_output_tokens"),
        ("generation_config", "maxOutputTokens"),
    ),
    "cohere": (("max_tokens",),),
}
_READS_MAX_TOKENS: Final = frozenset({"deepseek", "mistral"})
"""Who knows nothing of ``max_completion_tokens``: a limit that is not read is none."""

_CHOICES: Final[Mapping[Flavour, tuple[tuple[str, ...], ...]]] = {
    "chat": (("n",),),
    "completions": (("n",), ("best_of",)),
    "gemini": (
        ("generationConfig", "candidateCount"),
        ("generationConfig", "candidate_count"),
        ("generation_config", "candidate_count"),
        ("generation_config", "candidateCount"),
    ),
}
_NOT_INPUT: Final = frozenset({"model", "stream", "stream_options", "user", "safety_identifier", "prompt_cache_key"})
_MAX_INT: Final = 10**12


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call as it was asked for.

    Attributes:
        route: where it goes.
        model: the name as it was sent.
        body: the request's body, decoded; never changed.
        streams: the answer is to come in pieces.
        limit: the most output tokens asked for, one choice, or None where the request sets no limit.
        choices: how many answers are asked for.
        texts: what is to be counted.
        slack: input tokens to allow beyond the texts: what frames messages and tools, and token ids.
        media: pictures, sounds and documents within the body.
        unbounded: what the body's size does not bound.
        predicted: bytes of predicted output, which are billed as output where the prediction was wrong.
        context: which prices the request asks for: ``service_tier``, ``speed``.
        us_only: inference in the United States is asked for.
        caches: the request marks what is to be cached.
        speaks: the answer may hold sound.
    """

    route: Route
    model: str
    body: Mapping[str, Any]
    streams: bool
    limit: int | None
    choices: int
    texts: tuple[str, ...]
    slack: int
    media: tuple[Media, ...]
    unbounded: tuple[Unbounded, ...]
    predicted: int
    context: Mapping[str, str]
    us_only: bool
    caches: bool
    speaks: bool

    @property
    def asked_for_usage(self) -> bool:
        """True where the caller wants usage in an OpenAI stream."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True


def read_call(route: Route, body: bytes | None, content_encoding: str = "") -> Call | Refusal:
    """Return the call that *body* is, or why it cannot be priced."""
    if body is None:
        return _no(
            "body", "it streams past max_body_bytes, so it cannot be priced; send it in memory, or raise the limit"
        )
    if content_encoding.strip().lower() not in ("", "identity"):
        return _no("content-encoding", f"a {content_encoding[:40]} body cannot be read; send it uncompressed")
    try:
        sent = read_object(body)
    except NotReadable as error:
        return _no("body", f"{error}; a metered call has to be one JSON object")
    model = sent.get("model") if route.model is None else route.model
    if not isinstance(model, str) or not model.strip() or len(model) > 300:
        return _no("model", "it names no model; nothing else says what the call costs")
    return _read(route, model.removeprefix("models/"), sent, caches=b"cache_control" in body)


def _read(route: Route, model: str, sent: dict[str, Any], *, caches: bool) -> Call | Refusal:
    paths = _LIMITS.get(route.flavour, ())
    if route.provider in _READS_MAX_TOKENS:
        paths = tuple(path for path in paths if path != ("max_completion_tokens",))
    limits = _numbers(sent, paths)
    if isinstance(limits, Refusal):
        return limits
    choices = _numbers(sent, _CHOICES.get(route.flavour, ()))
    if isinstance(choices, Refusal):
        return choices
    content = read_content(sent, _NOT_INPUT)
    embeds = route.flavour in ("embeddings", "gemini_embed", "cohere_embed")
    modalities = sent.get("modalities")
    return Call(
        route=route,
        model=model,
        body=sent,
        streams=sent.get("stream") is True or route.streams,
        limit=0 if embeds else max(limits) if limits else None,
        choices=max(choices, default=1) * _prompts(route, sent),
        texts=tuple(content.texts),
        slack=content.numbers + _frame(route, sent),
        media=tuple(content.media),
        unbounded=(*find_unbounded(route, model, sent), *content.unbounded),
        predicted=_predicted(sent),
        context={key: sent[key] for key in ("service_tier", "speed") if isinstance(sent.get(key), str)},
        us_only=sent.get("inference_geo") == "us",
        caches=caches or route.flavour != "messages",
        speaks=isinstance(modalities, list) and "audio" in modalities,
    )


def _no(field: str, reason: str) -> Refusal:
    return Refusal(UNREADABLE, f"{field}: {reason}", error=Unpriced)


def _numbers(sent: Mapping[str, Any], paths: tuple[tuple[str, ...], ...]) -> list[int] | Refusal:
    """Return the whole numbers that stand at *paths*; null counts as left out."""
    found = []
    for path in paths:
        value: Any = sent
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= _MAX_INT:
            return _no(".".join(path), f"{str(value)[:40]!r} is not a whole number from 1 on")
        found.append(value)
    return found


def _frame(route: Route, sent: Mapping[str, Any]) -> int:
    turns: list[Any] = next(
        (sent[key] for key in ("messages", "input", "contents") if isinstance(sent.get(key), list)), []
    )
    tools = tools_of(sent)
    said = sum(1 for turn in turns if type(turn) is not int)  # a number is a token
    tokens = _TOKENS_A_CALL + _TOKENS_A_MESSAGE * said + _TOKENS_A_TOOL * len(tools)
    if route.flavour == "messages" and tools:
        own = sum(1 for tool in tools if isinstance(tool, dict) and tool.get("type") not in (None, "custom"))
        tokens += _TOKENS_OF_TOOL_USE * (1 + own)
    return tokens


def _prompts(route: Route, sent: Mapping[str, Any]) -> int:
    """Return how many prompts are answered: a list of them is, and a list of token ids is one."""
    prompt = sent.get("prompt")
    many = route.flavour == "completions" and isinstance(prompt, list) and any(type(p) is not int for p in prompt)
    return len(prompt) if many and isinstance(prompt, list) else 1


def _predicted(sent: Mapping[str, Any]) -> int:
    prediction = sent.get("prediction")
    return len(str(prediction).encode("utf-8", "surrogatepass")) if prediction is not None else 0


def limit_field(call: Call) -> str:
    """Return the field in which a call's provider reads an output limit."""
    flavour = call.route.flavour
    if flavour == "gemini":
        return "generationConfig.maxOutputTokens"
    if flavour == "responses":
        return "max_output_tokens"
    own = flavour == "chat" and call.route.provider in ("openai", "azure")
    return "max_completion_tokens" if own else "max_tokens"


def write_limit(call: Call, limit: int) -> dict[str, Any]:
    """Return the call's body with an output limit of *limit* tokens for each choice, in the field its provider reads."""
    body = dict(call.body)
    flavour = call.route.flavour
    if flavour == "gemini":
        key = "generation_config" if "generation_config" in body else "generationConfig"
        given = body.get(key)
        body[key] = {**(given if isinstance(given, dict) else {}), "maxOutputTokens": limit}
        return body
    field = limit_field(call)
    if field == "max_completion_tokens":
        body.pop("max_tokens", None)  # null, or it would be the limit
    body[field] = limit
    return body


def lower_limits(call: Call, body: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    """Return *body* with every output limit in it lowered to *limit* tokens, and one set where there is none; None lowers none."""
    if limit is None or call.route.flavour not in _LIMITS:
        return dict(body)
    lowered, found = dict(body), False
    for outer, *inner in _LIMITS[call.route.flavour]:
        value = lowered.get(outer)
        if not inner and type(value) is int:
            lowered[outer], found = min(value, limit), True
        elif inner and isinstance(value, dict) and type(value.get(inner[0])) is int:
            lowered[outer], found = {**value, inner[0]: min(value[inner[0]], limit)}, True
    read_by_provider = found and not (call.route.provider in _READS_MAX_TOKENS and "max_tokens" not in lowered)
    return lowered if read_by_provider else write_limit(dataclasses.replace(call, body=lowered), limit)


def removed_fields(body: Mapping[str, Any], names: Collection[str]) -> set[str]:
    """Return those of a body's own fields that are named, in either spelling: Gemini takes ``safetySettings`` and ``safety_settings``."""
    wanted = {name.replace("_", "").lower() for name in names}
    return {key for key in body if key.replace("_", "").lower() in wanted}


def ask_for_usage(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a streaming request's body such that the provider states the usage at the stream's end."""
    options = body.get("stream_options")
    return {**body, "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}

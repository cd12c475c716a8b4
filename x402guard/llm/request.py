"""Reads a request to an LLM provider: its model, its output limit and its input."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import Unpriced
from x402guard.ledger.authorize import Refusal
from x402guard.llm.content import Unbounded, find_unbounded, find_unknown, read_content, tools_of
from x402guard.llm.leaves import count_of
from x402guard.strict_json import NotReadable, objects_in, read_object
from x402guard.vendors.media import Media
from x402guard.vendors.model_price import plain_tier
from x402guard.vendors.routes import Flavour, Route

UNREADABLE: Final = "unreadable_request"
_TOKENS_A_MESSAGE: Final = 8
_TOKENS_A_TOOL: Final = 32
_TOKENS_A_CALL: Final = 32
_TOKENS_OF_TOOL_USE: Final = 800
"""The tokens that Anthropic adds for a request with tools, and for each tool that it defines (its page on tool use)."""

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
    "converse": (("inferenceConfig", "maxTokens"),),
}
_READS_MAX_TOKENS: Final = frozenset({"deepseek", "mistral", "novita", "perplexity", "together", "zai"})
"""Providers that ignore, or do not document, ``max_completion_tokens``: there it sets no limit."""

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
_NOT_INPUT: Final = frozenset(
    {"model", "stream", "stream_options", "user", "safety_identifier", "prompt_cache_key", "service_tier", "serviceTier",
     "speed", "inference_geo"}
)  # fmt: skip
_MAX_INT: Final = 10**12


class Call(Struct, frozen=True):
    """One LLM call as requested.

    Attributes:
        route: its endpoint and flavour.
        model: the name as sent.
        body: the decoded body of the request; never changed.
        streams: True if a stream is requested.
        limit: the output limit in tokens for one choice, or None if the request sets none.
        choices: the number of requested answers.
        texts: the texts to count.
        slack: input tokens beyond the texts: the framing of messages and tools, and token ids.
        media: images, audio, video and documents in the body.
        unbounded: the parts whose cost the body's size does not bound.
        predicted: bytes of predicted output, which are billed as output if the prediction was wrong.
        context: the requested price tiers: ``service_tier``, ``speed``.
        tier: what Vertex's header requests, which is sent with any body; "" for nothing.
        us_only: True if inference in the United States is requested.
        caches: True if the request may write to a cache.
        speaks: True if the answer may contain audio.
        keeps_long: True if the request asks OpenAI to keep a cache for 12 hours.
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
    tier: str = ""
    keeps_long: bool = False

    @property
    def asked_for_usage(self) -> bool:
        """True if the caller requested usage in an OpenAI stream."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True


def read_call(route: Route, body: bytes | None, content_encoding: str = "", tier: str = "") -> Call | Refusal:
    """Return the call in *body*, or a refusal if it cannot be priced. *tier* is the tier that Vertex's header requests."""
    if body is None:
        return _unreadable(
            "body", "it streams past max_body_bytes, so it cannot be priced; send it in memory, or raise the limit"
        )
    if content_encoding.strip().lower() not in ("", "identity"):
        return _unreadable("content-encoding", f"a {content_encoding[:40]} body cannot be read; send it uncompressed")
    try:
        sent = read_object(body)
    except NotReadable as error:
        key = f" ({error.words[:60]!r})" if error.words else ""  # the caller's own words
        return _unreadable("body", f"{error}{key}; a metered call has to be one JSON object")
    model = sent.get("model") if route.model is None else route.model
    if not isinstance(model, str) or not model.strip() or len(model) > 300:
        return _unreadable("model", "the request names no model, so it cannot be priced")
    unknown = find_unknown(sent)
    if unknown is not None:
        return Refusal(UNREADABLE, unknown, error=Unpriced)
    by_header = {"service_tier": plain_tier(tier)} if tier and route.endpoint.dialect in ("google", "bedrock") else {}
    tiers = _tiers(sent) | by_header
    named = {plain_tier(sent[name]) for name in ("service_tier", "serviceTier") if isinstance(sent.get(name), str)}
    if len(named) > 1:
        return _unreadable("service_tier", "it differs from serviceTier; leave one of them out")
    caches = b"cache_control" in body or (b"\\u" in body and any("cache_control" in each for each in objects_in(sent)))
    read = _read(route, model.removeprefix("models/"), sent, tiers, caches=caches)
    may_keep = (b"12h" in body or b"\\u" in body) and route.flavour in ("chat", "responses")
    keeps_long = may_keep and any(each.get("ttl") == "12h" for each in objects_in(sent))
    return replace(read, tier=tier, keeps_long=keeps_long) if (tier or keeps_long) and isinstance(read, Call) else read


def _tiers(sent: Mapping[str, Any]) -> dict[str, str]:
    """Return the price tiers that a body requests, by the names of the price book."""
    named = {"service_tier": sent.get("service_tier"), "speed": sent.get("speed")}
    listed = sent.get("serviceTier")
    if isinstance(listed, str) or (isinstance(listed, dict) and isinstance(listed.get("type"), str)):
        named["service_tier"] = listed if isinstance(listed, str) else listed["type"]
    performance = sent.get("performanceConfig")
    if isinstance(performance, dict):  # Bedrock's faster hardware, whose price no book has
        named["latency"] = performance.get("latency")
    return {key: plain_tier(value) for key, value in named.items() if isinstance(value, str)}


def _read(route: Route, model: str, sent: dict[str, Any], tiers: Mapping[str, str], *, caches: bool) -> Call | Refusal:
    paths = _LIMITS.get(route.flavour, ())
    if route.provider in _READS_MAX_TOKENS:
        paths = tuple(path for path in paths if path != ("max_completion_tokens",))
    # Anthropic's max_tokens of 0 fills the cache, and answers nothing.
    limits = _numbers(sent, paths, least=0 if route.flavour == "messages" else 1)
    if isinstance(limits, Refusal):
        return limits
    choices = _numbers(sent, _CHOICES.get(route.flavour, ()))
    if isinstance(choices, Refusal):
        return choices
    embeds = route.flavour in ("embeddings", "gemini_embed", "cohere_embed")
    content = read_content(sent, _NOT_INPUT, has_token_ids=embeds or route.flavour == "completions")
    modalities = sent.get("modalities")
    return Call(
        route=route,
        model=model,
        body=sent,
        streams=sent.get("stream") is True or route.streams,
        limit=0 if embeds else max(1, *limits) if limits else None,
        choices=max(choices, default=1) * _prompts(route, sent),
        texts=tuple(content.texts),
        slack=content.numbers + _frame(route, sent),
        media=tuple(content.media),
        unbounded=(*find_unbounded(route, model, sent), *content.unbounded),
        predicted=_predicted(sent),
        context=tiers,
        us_only=costs_more_there(sent.get("inference_geo")),
        caches=caches or route.flavour != "messages",
        speaks=isinstance(modalities, list) and "audio" in modalities,
    )


def costs_more_there(geo: object) -> bool:
    """True for an ``inference_geo`` of Anthropic's that is not known to cost the standard price."""
    return isinstance(geo, str) and geo not in ("", "global", "not_available")


def _unreadable(field: str, reason: str) -> Refusal:
    return Refusal(UNREADABLE, f"{field}: {reason}", error=Unpriced)


def _numbers(sent: Mapping[str, Any], paths: tuple[tuple[str, ...], ...], *, least: int = 1) -> list[int] | Refusal:
    """Return the whole numbers from *least* on at *paths*; null counts as missing."""
    found = []
    for path in paths:
        value: Any = sent
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            continue
        if type(value) is not int or not least <= value <= _MAX_INT:
            return _unreadable(".".join(path), f"{str(value)[:40]!r} is not a whole number from {least} on")
        found.append(value)
    return found


def _frame(route: Route, sent: Mapping[str, Any]) -> int:
    turns: list[Any] = next(
        (sent[key] for key in ("messages", "input", "contents") if isinstance(sent.get(key), list)), []
    )
    tools = tools_of(sent)
    said = sum(1 for turn in turns if type(turn) is not int)  # a number is a token id
    tokens = _TOKENS_A_CALL + _TOKENS_A_MESSAGE * said + _TOKENS_A_TOOL * len(tools)
    if route.flavour == "messages" and tools:
        own = sum(1 for tool in tools if isinstance(tool, dict) and tool.get("type") not in (None, "custom"))
        tokens += _TOKENS_OF_TOOL_USE * (1 + own)
    return tokens


def _prompts(route: Route, sent: Mapping[str, Any]) -> int:
    """Return the number of prompts: the length of a list of prompts, and 1 for a list of token ids."""
    prompt = sent.get("prompt")
    many = route.flavour == "completions" and isinstance(prompt, list) and any(type(p) is not int for p in prompt)
    return len(prompt) if many and isinstance(prompt, list) else 1


def _predicted(sent: Mapping[str, Any]) -> int:
    prediction = sent.get("prediction")
    return len(str(prediction).encode("utf-8", "surrogatepass")) if prediction is not None else 0


def output_kinds(call: Call) -> set[str]:
    """Return the kinds of output, beside text, that a request asks for: ``audio``, ``image``."""
    found = {"audio"} if call.speaks else set()
    for outer in ("generationConfig", "generation_config") if call.route.flavour == "gemini" else ():
        config = call.body.get(outer)
        for inner in ("responseModalities", "response_modalities"):
            listed = config.get(inner) if isinstance(config, dict) else None
            found |= {str(each).lower() for each in listed} if isinstance(listed, list) else set()
    return found & {"audio", "image"}


def asked_tokens(call: Call) -> int:
    """Return the most tokens that a request to Gemini asks for one picture (``mediaResolution.numTokens``); 0 for none."""
    names = ("numTokens", "num_tokens")
    return max((count_of(each.get(name)) for each in objects_in(call.body) for name in names), default=0)


def limit_field(call: Call) -> str:
    """Return the field of the output limit at a call's provider."""
    flavour = call.route.flavour
    if flavour == "gemini":
        return "generationConfig.maxOutputTokens"
    if flavour in ("responses", "converse"):
        return "max_output_tokens" if flavour == "responses" else "inferenceConfig.maxTokens"
    own = flavour == "chat" and call.route.provider in ("openai", "azure")
    return "max_completion_tokens" if own else "max_tokens"


def write_limit(call: Call, limit: int) -> dict[str, Any]:
    """Return the call's body with an output limit of *limit* tokens for each choice, in the provider's field."""
    body = dict(call.body)
    flavour = call.route.flavour
    if flavour == "gemini":
        key = "generation_config" if "generation_config" in body else "generationConfig"
        given = body.get(key)
        body[key] = {**(given if isinstance(given, dict) else {}), "maxOutputTokens": limit}
        return body
    if flavour == "converse":
        given = body.get("inferenceConfig")
        body["inferenceConfig"] = {**(given if isinstance(given, dict) else {}), "maxTokens": limit}
        return body
    field = limit_field(call)
    if field == "max_completion_tokens":
        body.pop("max_tokens", None)  # it can only be null here: a number would be the call's limit
    body[field] = limit
    return body


def lower_limits(call: Call, body: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    """Return *body* with all output limits lowered to *limit* tokens, or set if there is none; None changes nothing."""
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
    return lowered if read_by_provider else write_limit(replace(call, body=lowered), limit)


def cap_price(body: Mapping[str, Any], prompt: Decimal, completion: Decimal) -> dict[str, Any]:
    """Return the body of an OpenRouter request that no endpoint dearer than these prices may answer.

    *prompt* and *completion* are in dollars per million tokens. A lower price that the caller has set stays.
    """
    provider = body.get("provider")
    given = provider.get("max_price") if isinstance(provider, dict) else None
    caps = dict(given) if isinstance(given, dict) else {}
    for key, price in (("prompt", prompt), ("completion", completion)):
        own = caps.get(key)
        lower = isinstance(own, int | Decimal) and not isinstance(own, bool) and 0 <= own < price
        caps[key] = own if lower else price
    return {**body, "provider": {**(provider if isinstance(provider, dict) else {}), "max_price": caps}}


def removed_fields(body: Mapping[str, Any], names: Collection[str]) -> set[str]:
    """Return the body's fields in *names*, in either spelling (for Gemini: ``safetySettings``, ``safety_settings``)."""
    wanted = {name.replace("_", "").lower() for name in names}
    return {key for key in body if key.replace("_", "").lower() in wanted}


def ask_for_usage(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a streaming request with the option that makes the provider state the usage at the end."""
    options = body.get("stream_options")
    return {**body, "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}

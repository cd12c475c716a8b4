"""Reads and prices the caller-reported usage of a call that no transport saw; refuses it if its price is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from x402guard.errors import Unpriced
from x402guard.flow.capture import Bill
from x402guard.flow.ports import Usage
from x402guard.kernel.rows import MAX_NANOS, Evidence, Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.token_budget import MOST_TOKENS
from x402guard.llm.bill import price_stated
from x402guard.llm.content import Unbounded, kind_of
from x402guard.llm.leaves import is_count
from x402guard.llm.meter import Meter
from x402guard.llm.rates import UNPRICED, Rates, find_rates, whole_nanos
from x402guard.llm.request import Call
from x402guard.llm.tools_used import tools_run
from x402guard.llm.usage import Stated, check_parts, read_usage
from x402guard.vendors.prices import PriceBook
from x402guard.vendors.routes import Dialect, Flavour, MeteredHost, Route

_UNIT: Final = re.compile(
    r"(input|output)(_[a-z]+)*_tokens|cache_([a-z]+_)?(read|write)(_5m|_1h)?_tokens|(web|social|storage|rerank)_searches|code_executions",
    re.ASCII,
)
_SHAPES: Final[tuple[tuple[str, Flavour], ...]] = (
    ("completion_tokens", "chat"),
    ("prompt_tokens", "embeddings"),
    ("promptTokenCount", "gemini"),
    ("inputTokens", "converse"),
    ("billed_units", "cohere"),
    ("cache_read_input_tokens", "messages"),
    ("cache_creation_input_tokens", "messages"),
    ("server_tool_use", "messages"),
    ("input_tokens", "responses"),
)
"""A field of a usage → its flavour; the first field that is present counts."""

_MAKERS: Final[Mapping[Flavour, str]] = {
    "chat": "openai",
    "embeddings": "openai",
    "responses": "openai",
    "messages": "anthropic",
    "gemini": "google",
    "converse": "aws",
    "cohere": "cohere",
    "cohere_embed": "cohere",
}
_DIALECTS: Final[Mapping[Flavour, Dialect]] = {"messages": "anthropic", "gemini": "google", "cohere": "cohere"}
_ALSO_CALLED: Final = {"bedrock": "aws", "amazon": "aws", "gemini": "google", "vertex": "google", "vertexai": "google"}
_COUNTS_SEARCHES: Final = frozenset({"responses", "messages", "gemini"})
_SEPARATES: Final = re.compile(r"_([a-z])")
_FIX: Final = '{"input_tokens": 200, "output_tokens": 100}, or the usage as the provider states it'


@dataclass(frozen=True, slots=True)
class Statement:
    """The report of a call.

    Attributes:
        provider: the provider's id in the price book.
        model: the requested model.
        flavour: the shape of the answer, or None if the usage is in the price book's units.
        answer: the answer, or its part with the usage; or the usage itself, in units.
        messages: what was sent to the model, for the loop detector; None if unknown.
    """

    provider: str
    model: str
    flavour: Flavour | None
    answer: Mapping[str, Any]
    messages: object = field(default=None, repr=False)


def read_statement(provider: str, model: str, usage: Mapping[str, Any]) -> Statement:
    """Return the statement of a *usage* in the price book's units or in a provider's format.

    Raises ``ValueError`` naming the argument if it cannot be read.
    """
    provider, model = _known_as(provider), _plain_name(model)
    if usage and all(isinstance(key, str) and _UNIT.fullmatch(key) for key in usage):
        # The price book's input_tokens include cached tokens; Anthropic's do not.
        return Statement(provider, model, None, usage)
    if not usage:
        raise ValueError(f"usage: it is empty; write {_FIX}")
    usage = _in_camels(usage) if "prompt_token_count" in usage else usage
    flavour = _flavour_of(usage)
    if flavour is None:
        shown = ", ".join(sorted(map(str, usage))[:6])
        raise ValueError(f"usage: {shown[:200]} is not a known format of token counts; write {_FIX}")
    # LangChain has one shape for all providers: its input includes what was cached, as OpenAI's does.
    if flavour == "responses" and provider == "anthropic" and "input_token_details" not in usage:
        flavour = "messages"
    billed = usage.get("billed_units")
    if flavour == "cohere" and isinstance(billed, dict) and "output_tokens" not in billed:
        return Statement(provider, model, "cohere_embed", {"meta": usage})
    field = "usageMetadata" if flavour == "gemini" else "usage"
    return Statement(provider, model, flavour, {field: usage})


def read_answer(answer: Mapping[str, Any], provider: str | None, model: str | None) -> Statement:
    """Return the statement of a whole *answer*. *provider* and *model* override those that it names.

    Raises ``ValueError`` naming the argument that is missing.
    """
    if "usage_metadata" in answer:
        answer = _in_camels(answer)
    flavour = _answer_flavour(answer)
    if flavour is None:
        raise ValueError(
            "response: it states no readable usage; report it with session.record_usage(provider, model, usage)"
        )
    named = answer.get("model") or answer.get("modelVersion") if model is None else model
    if not isinstance(named, str) or not named:
        raise ValueError('model: the response does not name its model; write session.wrap(response, model="…")')
    made_by = _MAKERS[flavour] if provider is None else _known_as(provider)
    return Statement(made_by, _plain_name(named), flavour, answer)


def _known_as(provider: str) -> str:
    """Return a provider's id in the price book, also for its other common names."""
    folded = provider.strip().lower()
    return _ALSO_CALLED.get(folded, folded)


def _plain_name(model: str) -> str:
    """Return a model's name as in the price book. Raises ``ValueError`` for a name that reports cannot show."""
    name = model.removeprefix("models/")
    if not name.isprintable() or len(name) > 300:
        raise ValueError(f"model: {name[:60]!a} is not the name of a model")
    return name


def _answer_flavour(answer: Mapping[str, Any]) -> Flavour | None:
    if isinstance(answer.get("usageMetadata"), dict):
        return "gemini"
    meta, usage = answer.get("meta"), answer.get("usage")
    if isinstance(meta, dict) and isinstance(meta.get("billed_units"), dict):
        return "cohere_embed"
    if not isinstance(usage, dict):
        return None
    return "messages" if answer.get("type") == "message" else _flavour_of(usage)


def _flavour_of(usage: Mapping[str, Any]) -> Flavour | None:
    return next((flavour for field, flavour in _SHAPES if field in usage), None)


def _in_camels(value: Any) -> Any:
    """Return the snake_case keys of Google's libraries as the camelCase keys of its API."""
    if isinstance(value, dict):
        return {_SEPARATES.sub(lambda m: m[1].upper(), str(key)): _in_camels(item) for key, item in value.items()}
    return [_in_camels(item) for item in value] if isinstance(value, list) else value


def price_statement(meter: Meter, statement: Statement, at_unix: int) -> tuple[Bill, Rates] | Refusal:
    """Return the cost of a reported call by the prices of *at_unix* (unix seconds), or a refusal if it is unknown.

    Raises ``ValueError`` for impossible counts.
    """
    try:
        return _priced(meter, statement, at_unix)
    except ValueError as error:
        said = str(error)[:300]
        raise ValueError(said if said.startswith("usage: ") else f"usage: {said}; write {_FIX}") from error


def _priced(meter: Meter, statement: Statement, at_unix: int) -> tuple[Bill, Rates] | Refusal:
    stated = _stated(statement, meter.book)
    call = _call(statement, produces=stated.usage.get("output_tokens", 0) > 0)
    rates = find_rates(call, meter.settings, meter.book, at_unix)
    if isinstance(rates, Refusal):
        return rates
    allowed = _tools_run(meter, statement, stated)
    if isinstance(allowed, Refusal):
        return allowed
    priced = price_stated(call, rates, meter.settings, stated, None)
    rates, stated, usage, amount = priced.rates, priced.stated, priced.stated.all_usage, Nanos(priced.amount + allowed)
    if amount > MAX_NANOS:
        raise ValueError("usage: it would cost more than a billion dollars")
    for unit, count in usage.items():
        if count > MOST_TOKENS:
            raise ValueError(f"usage: more than {MOST_TOKENS:,} {unit} are impossible")
    note = priced.note or ("tools at their allowance" if allowed else "")
    evidence = Evidence.ESTIMATE if note else Evidence.PROVIDER_USAGE
    return Bill(amount, evidence, usage, note, unread=stated.unread_names), rates


def _tools_run(meter: Meter, statement: Statement, stated: Stated) -> Nanos | Refusal:
    """Return the allowances of the tools that the provider ran, or a refusal if one has no allowance."""
    total = Decimal(0)
    for name in tools_run(statement.flavour or "chat", statement.answer):
        kind = kind_of(name)
        if kind in {part.kind for part in stated.others}:
            continue  # what its model has used is stated
        allowance = meter.settings.allowance(kind)
        if allowance is None:
            hint = f'Metering(allowances={{"{kind}": "$0.05"}})'
            return Refusal(
                UNPRICED, f"response: {name[:60]} was run, and its cost is unknown; set {hint}", error=Unpriced
            )
        total += allowance
    return whole_nanos(total)


def _stated(statement: Statement, book: PriceBook) -> Stated:
    if statement.flavour is not None:
        _check_numbers(_usage_of(statement.answer))
        stated = read_usage(_call(statement, produces=True), statement.answer, book, completes=False)
    else:
        stated = Stated(dict(_counts(statement.answer)), {}, None, us_only=False, counted=frozenset())
    if not stated.usage:
        raise ValueError(f"usage: it counts nothing; write {_FIX}")
    check_parts(stated.usage)
    if statement.flavour is not None and "input_audio_seconds" not in stated.usage:  # which is in the total, too
        check_total(_usage_of(statement.answer), stated.usage)
    return stated


def _usage_of(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    found: object = next((answer[field] for field in ("usage", "usageMetadata", "meta") if field in answer), {})
    return found if isinstance(found, Mapping) else {}


def _counts(usage: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for unit, count in usage.items():
        if type(count) is not int or count < 0:
            vast = type(count) is int and count < -(10**40)
            shown = "far below zero" if vast else repr(count)[:40] if isinstance(count, (int, str)) else str(count)[:40]
            raise ValueError(f"usage: {unit} is {shown}, but has to be a whole number that is not negative")
        if count:
            yield unit, count


def _call(statement: Statement, *, produces: bool) -> Call:
    """Return the known part of the call. The request is unknown, so every counted tool may have been offered."""
    flavour: Flavour = statement.flavour or "chat"
    endpoint = MeteredHost(statement.provider, _DIALECTS.get(flavour, "openai"), "")
    kinds = ("web_search", "file_search") if flavour in _COUNTS_SEARCHES else ()
    return Call(
        route=Route(endpoint, flavour),
        model=statement.model,
        body={},
        streams=False,
        limit=None if produces else 0,
        choices=1,
        texts=(),
        slack=0,
        media=(),
        unbounded=tuple(Unbounded("tools", kind) for kind in kinds),
        predicted=0,
        context={},
        us_only=False,
        caches=False,
        speaks=False,
    )


_TOTALS: Final = ("total_tokens", "totalTokenCount", "totalTokens")


def _check_numbers(usage: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a count that is not a number."""
    for key, value in usage.items():
        if is_count(str(key)) and isinstance(value, str | bool | bytes | float):
            raise ValueError(f"{str(key)[:60]} is a {type(value).__name__}, but has to be a number")


def check_total(usage: Mapping[str, Any], read: Usage) -> None:
    """Raise ``ValueError`` if the stated total is more than the parts that were read: a part would not be priced."""
    parts = read.get("input_tokens", 0) + read.get("output_tokens", 0)
    for name in _TOTALS:
        total = usage.get(name)
        if isinstance(total, (int, Decimal)) and total > parts:
            raise ValueError(f"{name} is {str(total)[:40]}, but the sum of the stated parts is {parts}")

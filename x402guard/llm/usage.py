"""Reads the usage that an answer states, after normalizing each provider's special cases for the price book."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

from msgspec import Struct

from x402guard.flow.ports import Usage
from x402guard.llm.events import SEARCHED
from x402guard.llm.leaves import Unread, read_leaves
from x402guard.llm.prices import PriceBook
from x402guard.llm.request import Call, costs_more_there, plain_tier
from x402guard.llm.routes import Flavour

_NOT_COUNTS: Final = frozenset(
    {"cost", "cost_details", "is_byok", "queue_time", "prompt_time", "completion_time", "total_time"}
)
_COUNTS: Final = re.compile(r"(tokens|count|requests|queries)$", re.IGNORECASE)
_TICKS: Final = 10**10
_SUMMED: Final = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


class Impossible(ValueError):  # noqa: N818 - becomes a dispute
    """An impossible usage: counts below zero, parts larger than the whole, fractions of a token.

    ``plain`` says it without the provider's own words.
    """

    def __init__(self, message: str, plain: str = "") -> None:
        super().__init__(message)
        self.plain = plain or message


class Stated(Struct, frozen=True):
    """The usage that an answer states.

    Attributes:
        usage: counts by unit of the price book.
        context: the price tiers it was billed at, as far as stated.
        charged: the dollars that the gateway states it charged, or None.
        us_only: True if it was answered in the United States on request, which costs more.
        counted: kinds of provider-run tools whose use is among the counts.
        unread: counts that nothing reads.
    """

    usage: Usage
    context: Mapping[str, str]
    charged: Decimal | None
    us_only: bool
    counted: frozenset[str]
    unread: Unread = ()

    @property
    def unread_names(self) -> tuple[str, ...]:
        """The names of the counts that nothing reads, where no stated charge includes them."""
        return tuple(name for name, _ in self.unread) if self.charged is None else ()


def read_usage(
    call: Call, answer: Mapping[str, Any], book: PriceBook, *, repaired: bool = False, completes: bool = True
) -> Stated:
    """Return what *answer* states. Raises ``Impossible``, and ``ValueError`` if it states no readable usage.

    *repaired*: read impossible counts at their dearest meaning in place of raising: below zero as zero, fractions
    rounded up, totals at least as large as their parts. *completes*: a total above its parts counts as output.
    """
    flavour = call.route.flavour
    field = "usageMetadata" if flavour in ("gemini", "gemini_embed") else "usage"
    found = answer.get(field)
    stated = found if isinstance(found, dict) else {}
    if repaired:
        stated = _repaired(stated)
        answer = {**answer, field: stated} if isinstance(found, dict) else answer
    else:
        _check_counts(stated)
    answer = _normalized(call, answer, stated)
    usage = dict(book.extract(call.route.provider, flavour, answer))
    hidden = _beyond_parts(stated, usage) if completes else 0
    if hidden:
        usage["output_tokens"] = usage.get("output_tokens", 0) + hidden
    meta = answer.get("meta")
    whole = meta if flavour == "cohere_embed" and isinstance(meta, dict) else stated
    more, unread = read_leaves(flavour, whole, book.reads(call.route.provider, flavour), usage)
    usage |= more
    searches = dict(_tools_used(call, answer, stated))
    usage |= {UNITS[kind]: count for kind, count in searches.items() if kind in UNITS}
    if repaired:
        usage = _covering_parts(usage)
    else:
        check_parts(usage)
    return Stated(
        usage={unit: count for unit, count in usage.items() if count},
        context=dict(_context(answer, stated)),
        charged=_charged(call, stated, repaired=repaired),
        us_only=costs_more_there(stated.get("inference_geo")) or (call.us_only and "inference_geo" not in stated),
        counted=frozenset(searches) & frozenset(UNITS),
        unread=unread,
    )


def check_parts(usage: Usage) -> None:
    """Raise ``Impossible`` if a part of the tokens is more than their total."""
    into, out = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    for unit, count in usage.items():
        whole = out if unit.startswith("output_") else into
        if unit.endswith("_tokens") and count > whole:
            raise Impossible(f"{count} {unit} are more than the total of {whole}")


def _covering_parts(usage: Usage) -> dict[str, int]:
    """Return *usage* with totals that are at least as large as each of their parts."""
    covered = dict(usage)
    for unit, count in usage.items():
        if unit.endswith("_tokens"):
            whole = "output_tokens" if unit.startswith("output_") else "input_tokens"
            covered[whole] = max(covered.get(whole, 0), count)
    return covered


def _repaired(value: Any) -> Any:
    """Return a stated usage in which each count is a whole number that is not negative."""
    if isinstance(value, dict):
        return {key: item if key in _NOT_COUNTS else _repaired(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_repaired(item) for item in value]
    if isinstance(value, Decimal) and value.is_finite():
        return max(0, int(value.to_integral_value(rounding=ROUND_CEILING)))
    return max(0, value) if type(value) is int else value


def _check_counts(stated: Mapping[str, Any]) -> None:
    pending = [(key, value) for key, value in stated.items() if key not in _NOT_COUNTS]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.items())
        elif isinstance(value, list):
            pending.extend((key, item) for item in value)
        elif isinstance(value, Decimal) and not _COUNTS.search(key):
            continue  # a time, a rate or a price that the provider adds
        elif isinstance(value, Decimal) and (not value.is_finite() or value < 0 or value != value.to_integral_value()):
            said = str(value)[:40]
            raise Impossible(f"{key!a:.60} is {said}", f"a count is {said}")
        elif type(value) is int and value < 0:
            said = str(value) if value > -(10**40) else "far below zero"
            raise Impossible(f"{key!a:.60} is {said}", f"a count is {said}")


def _normalized(call: Call, answer: Mapping[str, Any], stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the answer with a provider's special fields in the standard form of its flavour."""
    written = _whole(stated.get("cache_creation_input_tokens"))
    if call.route.flavour == "messages" and written and not stated.get("cache_creation") and _keeps_an_hour(call.body):
        # The answer does not say how long it is kept: the longest that was asked for.
        stated = {**stated, "cache_creation": {"ephemeral_1h_input_tokens": written, "ephemeral_5m_input_tokens": 0}}
        answer = {**answer, "usage": stated}
    iterations = stated.get("iterations")  # Anthropic: the total leaves out compactions; the sum includes them
    if isinstance(iterations, list) and iterations:
        rounds = [each for each in iterations if isinstance(each, dict)]
        counts = _at_least(stated, rounds, _SUMMED)
        whole, *splits = [_object(each.get("cache_creation")) for each in (stated, *rounds)]  # by how long it is kept
        keys = {key for each in (whole, *splits) for key in each}
        if keys:
            counts["cache_creation"] = {**whole, **_at_least(whole, splits, keys)}
        return {**answer, "usage": {**stated, **counts}}
    hits = stated.get("prompt_cache_hit_tokens")  # DeepSeek
    if call.route.provider == "moonshotai" and hits is None:
        hits = stated.get("cached_tokens")
    details = stated.get("prompt_tokens_details")
    if isinstance(hits, int) and not (isinstance(details, dict) and details.get("cached_tokens")):
        usage = {
            **stated,
            "prompt_tokens_details": {**(details if isinstance(details, dict) else {}), "cached_tokens": hits},
        }
        return {**answer, "usage": usage}
    return answer


def _keeps_an_hour(body: Mapping[str, Any]) -> bool:
    """True if a request asks for a cache of an hour."""
    pending: list[Any] = [body]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            control = each.get("cache_control")
            if isinstance(control, Mapping) and control.get("ttl") == "1h":
                return True
            pending.extend(each.values())
        elif isinstance(each, list):
            pending.extend(each)
    return False


def _at_least(stated: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, Any]:
    """Return the counts of *keys*: as stated, or as the rounds add up to, if that is more."""
    return {key: max(_whole(stated.get(key)), sum(_whole(each.get(key)) for each in rounds)) for key in keys}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(count: object) -> int:
    """Return a count as it is, and 0 for what is none."""
    return count if type(count) is int else 0


_TOTALS: Final = ("total_tokens", "totalTokenCount", "totalTokens")


def _beyond_parts(stated: Mapping[str, Any], usage: Usage) -> int:
    """Return the tokens by which a stated total exceeds its parts: hidden thinking, which is billed as output."""
    total = max((_whole(stated.get(name)) for name in _TOTALS), default=0)
    return max(0, total - usage.get("input_tokens", 0) - usage.get("output_tokens", 0))


def _context(answer: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the price tiers that the answer was billed at, as the answer states them."""
    for tier in (
        answer.get("service_tier"),
        stated.get("service_tier"),
        stated.get("serviceTier"),
        stated.get("trafficType"),
    ):
        if isinstance(tier, str):
            plain = plain_tier(tier)
            yield ("processing", "batch") if plain == "batch" else ("service_tier", plain)
    if isinstance(stated.get("speed"), str):
        yield "speed", stated["speed"]


def _charged(call: Call, stated: Mapping[str, Any], *, repaired: bool) -> Decimal | None:
    """Return the charge that the provider states, in dollars; None if it states none.

    To OpenRouter's fee the provider's bill is added with the caller's own key. xAI states ten-thousand-millionths of a
    dollar, tools included (docs.x.ai, Cost Tracking). *repaired*: an impossible charge is none, so that the tokens are
    priced.
    """
    parts: list[object] = [None]
    if call.route.provider == "openrouter":
        details = stated.get("cost_details")
        upstream = details.get("upstream_inference_cost") if isinstance(details, dict) else None
        if stated.get("is_byok") is not True:
            parts = [stated.get("cost")]
        elif upstream is not None:  # else the fee alone is stated, and the tokens are the provider's bill
            parts = [stated.get("cost"), upstream]
    elif call.route.provider == "perplexity":
        parts = [_object(stated.get("cost")).get("total_cost")]
    elif call.route.provider == "x-ai" and type(ticks := stated.get("cost_in_usd_ticks")) is int and ticks != 0:
        parts = [Decimal(ticks) / _TICKS]
    charges = [Decimal(part) for part in parts if isinstance(part, int | Decimal) and not isinstance(part, bool)]
    if not isinstance(parts[0], int | Decimal) or isinstance(parts[0], bool):
        return None
    wrong = [charge for charge in charges if not charge.is_finite() or charge < 0]
    if wrong and not repaired:
        raise Impossible(f"cost is {str(wrong[0])[:40]}")
    total = sum(charges, Decimal(0))
    # Nothing is a price only where a reason for it is known, as a free model or no output: else the tokens are priced.
    is_free = call.model.endswith(":free") or not _whole(stated.get("completion_tokens"))
    return None if wrong or (total == 0 and not is_free) else total


UNITS: Final = {"web_search": "web_searches", "file_search": "storage_searches"}
"""Kinds of tools whose calls are counted → unit in the price book."""

MOST_USES: Final = 1_000
"""The most uses of one tool in one answer that are booked; more are disputed."""

_CALLS: Final = {"web_search_call": "web_search", "file_search_call": "file_search"}


def _tools_used(call: Call, answer: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (kind, count) for the priced provider-run tools that an answer shows to have run."""
    flavour: Flavour = call.route.flavour
    if flavour == "responses":
        output = answer.get("output")
        counted = _object(_object(answer.get("tool_usage")).get("web_search")).get("num_requests")
        types = [_called(item) for item in output if isinstance(item, dict)] if isinstance(output, list) else []
        for name, kind in _CALLS.items():
            asked = any(part.kind == kind for part in call.unbounded)
            if kind == "web_search" and type(counted) is int and counted >= 0:
                yield kind, counted  # one item may be several requests, and several items one
            elif asked or name in types:
                yield kind, types.count(name)
    elif flavour == "messages":
        tools = stated.get("server_tool_use")
        count = tools.get("web_search_requests") if isinstance(tools, dict) else None
        asked = any(part.kind == "web_search" for part in call.unbounded)
        if isinstance(count, int) or asked:
            yield "web_search", count if isinstance(count, int) else 0
    elif flavour == "gemini":
        asked, searches = any(part.kind == "web_search" for part in call.unbounded), _grounded(call.model, answer)
        if asked or searches:
            yield "web_search", searches
    elif _searches_each_call(call):
        yield "web_search", 1  # billed per call, with or without a search


def _searches_each_call(call: Call) -> bool:
    searches = any(part.kind == "web_search" for part in call.unbounded)
    return searches and call.route.flavour == "chat" and call.route.provider in ("openai", "azure")


def _called(item: Mapping[str, Any]) -> str | None:
    """Return the type of an output item; None for opening a found page, which is free."""
    action = item.get("action")
    opens = isinstance(action, dict) and action.get("type") not in (None, "search")
    return None if opens else item.get("type")


def _grounded(model: str, answer: Mapping[str, Any]) -> int:
    """Return the searches that Gemini bills: each query from version 3 on, each grounded answer before version 3."""
    candidates = answer.get("candidates")
    queries = grounded = 0
    for candidate in candidates if isinstance(candidates, list) else ():
        metadata = candidate.get("groundingMetadata") if isinstance(candidate, dict) else None
        if isinstance(metadata, dict) and metadata:
            for name in SEARCHED:
                asked = metadata.get(name)
                queries += len(asked) if isinstance(asked, list) else 0
            grounded = 1
    return grounded if model.startswith(("gemini-1", "gemini-2")) else max(queries, grounded)


_CALLER_RUNS: Final = frozenset(
    {"function_call", "custom_tool_call", "computer_call", "local_shell_call", "shell_call", "apply_patch_call"}
)
_COUNTED: Final = frozenset({"web_search_call", "file_search_call"})
_FREE_REQUESTS: Final = frozenset({"web_search_requests", "web_fetch_requests"})


def tools_run(flavour: Flavour, answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tools that the provider ran and bills separately, and that no count of the usage covers."""
    if flavour == "responses":
        output = answer.get("output")
        for item in output if isinstance(output, list) else ():
            kind = str(item.get("type", "")) if isinstance(item, Mapping) else ""
            if kind.endswith("_call") and kind not in _CALLER_RUNS | _COUNTED:
                yield kind.removesuffix("_call")
    elif flavour == "messages":
        usage = answer.get("usage")
        ran = usage.get("server_tool_use") if isinstance(usage, Mapping) else None
        for name, count in ran.items() if isinstance(ran, Mapping) else ():
            if count and name not in _FREE_REQUESTS:
                yield str(name).removesuffix("_requests")

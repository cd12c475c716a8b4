"""Reads the usage that an answer states, after normalizing each provider's special cases for the price book."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

from msgspec import Struct

from x402guard.flow.ports import Usage
from x402guard.llm.leaves import Unread, count_of, is_number, read_leaves
from x402guard.llm.rates import NOT_DEARER
from x402guard.llm.request import Call, costs_more_there
from x402guard.llm.tool_costs import adviser_of, models_of_tools
from x402guard.llm.tools_used import UNITS, maps_cost, tools_used
from x402guard.strict_json import objects_in
from x402guard.vendors.model_price import plain_tier
from x402guard.vendors.models import base_name
from x402guard.vendors.prices import LONG_WRITES, PriceBook

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


class Part(Struct, frozen=True):
    """What another model than the one asked has used in an answer: an adviser, a fallback, a tool's own model."""

    model: str
    usage: Usage
    kind: str
    """The kind of tool that it was, one of ``ALLOWANCES``."""


class Stated(Struct, frozen=True):
    """The usage that an answer states.

    Attributes:
        usage: counts by unit of the price book, for the model that was asked.
        rounds: the same counts by request to that model, where the answer is several; prices go by the size of each.
        others: what other models have used.
        splits_output: True if the answer says of which kind its output is: text, sound or pictures.
        fees: dollars of tools that have a list price and no unit in the book.
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
    rounds: tuple[Usage, ...] = ()
    others: tuple[Part, ...] = ()
    fees: Decimal = Decimal(0)
    splits_output: bool = False

    @property
    def all_usage(self) -> Usage:
        """All counts, those of other models among them."""
        if not self.others:
            return self.usage
        total: Counter[str] = Counter(self.usage)
        for part in self.others:
            total.update(part.usage)
        return dict(total)

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
    rounds, others = _rounds_of(call, answer, stated)
    usages = [_extracted(call, {**answer, "usage": each}, book) for each in rounds]
    usage = _summed(usages) if rounds else _extracted(call, answer, book)
    hidden = _beyond_parts(stated, usage) if completes and not rounds else 0
    if hidden:
        usage["output_tokens"] = usage.get("output_tokens", 0) + hidden
    more, unread = read_leaves(
        flavour, _leaves_of(flavour, answer, stated), book.reads(call.route.provider, flavour), usage
    )
    usage |= more
    if call.keeps_long and "cache_write_tokens_details" not in _object(stated.get("input_tokens_details")):
        usage[LONG_WRITES] = usage.get("cache_write_tokens", 0)  # the longest that was asked for
    searches = dict(tools_used(call, answer, stated))
    usage |= {UNITS[kind]: count for kind, count in searches.items() if kind in UNITS}
    if repaired:
        usage = _covering_parts(usage)
    else:
        check_parts(usage)
    parts, more_unread = _parts_of(call, others, answer, book)
    return Stated(
        usage={unit: count for unit, count in usage.items() if count},
        context=dict(_context(answer, stated)),
        charged=_charged(call, stated, repaired=repaired),
        us_only=costs_more_there(stated.get("inference_geo")) or (call.us_only and "inference_geo" not in stated),
        counted=frozenset(searches) & frozenset(UNITS),
        unread=(*unread, *more_unread),
        rounds=(*usages, _difference(usage, _summed(usages))) if len(usages) > 1 and not repaired else (),
        others=parts,
        splits_output=_splits_output(stated),
        fees=maps_cost(call, answer)[0] if flavour == "gemini" else Decimal(0),
    )


def _extracted(call: Call, answer: Mapping[str, Any], book: PriceBook) -> dict[str, int]:
    """Return the counts of one request to a model."""
    field = "usageMetadata" if call.route.flavour in ("gemini", "gemini_embed") else "usage"
    stated = answer.get(field)
    answer = _normalized(call, answer, stated if isinstance(stated, dict) else {})
    return dict(book.extract(call.route.provider, call.route.flavour, answer))


def _summed(usages: Iterable[Usage]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in usages:
        total.update(each)
    return dict(total)


def _difference(usage: Usage, parts: Usage) -> Usage:
    return {unit: count - parts.get(unit, 0) for unit, count in usage.items() if count > parts.get(unit, 0)}


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
    written = count_of(stated.get("cache_creation_input_tokens"))
    if call.route.flavour == "messages" and written and not stated.get("cache_creation") and _keeps_an_hour(call.body):
        # The answer does not say how long it is kept: the longest that was asked for.
        stated = {**stated, **_kept_an_hour(stated)}
        answer = {**answer, "usage": stated}
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
    """True if a request asks for a cache of an hour. ``caching`` is an adviser's."""
    controls = (each.get(name) for each in objects_in(body) for name in ("cache_control", "caching"))
    return any(isinstance(control, Mapping) and control.get("ttl") == "1h" for control in controls)


def _rounds_of(
    call: Call, answer: Mapping[str, Any], stated: Mapping[str, Any]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return Anthropic's requests to models within one answer: those to the model that was asked, and those to others.

    The totals of an answer leave out compactions and other models; what they have beyond the rounds is one more.
    """
    listed = stated.get("iterations") if call.route.flavour == "messages" else None
    stated_rounds = [each for each in listed if each is not None] if isinstance(listed, list) else []
    if not all(isinstance(each, dict) for each in stated_rounds):
        raise ValueError("iterations: a round is no object")
    rounds: list[Mapping[str, Any]] = [
        {**each, **{key: count_of(each.get(key)) for key in _SUMMED}} for each in stated_rounds
    ]
    if not rounds:
        return [], []
    own, others = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for each in rounds:
        (own if _is_own(call, answer, each) else others).append(each)
    summed = [each for each in rounds if each.get("type") not in ("compaction", "advisor_message")]
    rest: dict[str, Any] = {
        key: max(0, count_of(stated.get(key)) - sum(count_of(each.get(key)) for each in summed)) for key in _SUMMED
    }
    split = _object(stated.get("cache_creation"))
    if count_of(split.get(_HOUR)) > sum(count_of(_object(each.get("cache_creation")).get(_HOUR)) for each in own):
        own = [each if each.get("cache_creation") else {**each, **_kept_an_hour(each)} for each in own]
        rest |= _kept_an_hour(rest)
    return [*own, rest] if not own or any(count_of(count) for count in rest.values()) else own, others


def _is_own(call: Call, answer: Mapping[str, Any], each: Mapping[str, Any]) -> bool:
    """True for a request to the model that was asked, under any of its names; an adviser is another model, named or not."""
    named = each.get("model")
    if each.get("type") == "advisor_message":
        return False
    if not isinstance(named, str) or not named:
        return True
    is_fallback = each.get("type") == "fallback_message"
    return is_same_model(call.model, named) or (not is_fallback and named == answer.get("model"))


def is_same_model(asked: str, named: str) -> bool:
    """True if an answer names the model that was asked, without a gateway's or a region's prefix, or with a date."""
    bare = asked.rpartition("/")[2]
    return len(named) <= _LONGEST_NAME and (
        named in (asked, bare)
        or (base_name(named) or named) == (base_name(bare) or bare)
        or re.search(rf"[./]{re.escape(named)}(-v\d+(:\d+)?)?$", asked) is not None
    )


_LONGEST_NAME: Final = 200


_HOUR: Final = "ephemeral_1h_input_tokens"


def _kept_an_hour(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how long a cache is kept whose time is not stated: the longest."""
    return {
        "cache_creation": {_HOUR: count_of(stated.get("cache_creation_input_tokens")), "ephemeral_5m_input_tokens": 0}
    }


def _splits_output(stated: Mapping[str, Any]) -> bool:
    """True if a usage says the kind of its output, also as zero."""
    if stated.get("candidatesTokensDetails"):
        return True
    details = (_object(stated.get(name)) for name in ("completion_tokens_details", "output_tokens_details"))
    return any(f"{kind}_tokens" in each for each in details for kind in ("text", "audio", "image"))


def _parts_of(
    call: Call, others: list[Mapping[str, Any]], answer: Mapping[str, Any], book: PriceBook
) -> tuple[tuple[Part, ...], Unread]:
    """Return what other models have used, and the counts of it that nothing reads."""
    if not others and "tool_usage" not in answer:
        return (), ()
    parts, unread = [], list[tuple[str, int]]()
    flavour, reads = call.route.flavour, book.reads(call.route.provider, call.route.flavour)
    named = (each.get("model") for each in others)
    models = [name if isinstance(name, str) and name else adviser_of(call) for name in named]
    listed = [
        *((model, each, "provider_tool") for model, each in zip(models, others, strict=True)),
        *models_of_tools(call, answer),
    ]
    for model, used, kind in listed:
        usage = _extracted(call, {"usage": used}, book)
        usage["output_tokens"] = usage.get("output_tokens", 0) + _beyond_parts(used, usage)
        more, names = read_leaves(flavour, used, reads, usage) if kind != "provider_tool" else ({}, ())
        parts.append(Part(model, {unit: count for unit, count in (usage | more).items() if count}, kind))
        unread += names
    return tuple(parts), tuple(unread)


def _leaves_of(flavour: str, answer: Mapping[str, Any], stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return all that an answer states of its usage, without what is read elsewhere."""
    meta, tools = answer.get("meta"), answer.get("tool_usage")
    if flavour == "cohere_embed" and isinstance(meta, dict):
        return meta
    if flavour != "responses" or not isinstance(tools, dict):
        return stated
    searched, pictured = tools.get("web_search"), tools.get("image_gen")
    left = {key: each for key, each in tools.items() if key not in ("web_search", "image_gen")}
    # What is read elsewhere, if it has the form in which it is read.
    if isinstance(searched, dict):
        left["web_search"] = {
            key: each for key, each in searched.items() if key != "num_requests" or not is_number(each)
        }
    else:
        left["web_search"] = searched
    left["image_gen"] = None if isinstance(pictured, dict) else pictured
    return {**stated, "tool_usage": left}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


_TOTALS: Final = ("total_tokens", "totalTokenCount", "totalTokens")


def _beyond_parts(stated: Mapping[str, Any], usage: Usage) -> int:
    """Return the tokens by which a stated total exceeds its parts: hidden thinking, which is billed as output."""
    if count_of(stated.get("prompt_audio_seconds")):
        return 0  # the tokens of a sound that is billed by its seconds
    total = max((count_of(stated.get(name)) for name in _TOTALS), default=0)
    return max(0, total - usage.get("input_tokens", 0) - usage.get("output_tokens", 0))


def _context(answer: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the price tiers that the answer was billed at, as the answer states them."""
    named = (
        answer.get("service_tier"),
        stated.get("service_tier"),
        stated.get("serviceTier"),
        stated.get("trafficType"),
    )
    tiers = [
        plain_tier(tier) for tier in (*named, _object(answer.get("serviceTier")).get("type")) if isinstance(tier, str)
    ]
    for plain in sorted(tiers, key=lambda tier: tier not in NOT_DEARER):  # of two, the dearer one
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
    is_free = call.model.endswith(":free") or not any(
        count_of(stated.get(name)) for name in ("completion_tokens", "output_tokens")
    )
    return None if wrong or (total == 0 and not is_free) else total

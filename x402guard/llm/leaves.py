"""Finds the counts of a stated usage that nothing reads: what is stated and not understood is never nothing.

Each number of a usage is read as a unit of the price book, or it is known here to repeat another one or to cost nothing,
or it is unread: ``bill`` books it at the dearest rate of its model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_CEILING, Decimal
from itertools import islice
from typing import Any, Final, TypeGuard

from x402guard.vendors.routes import Flavour

Unread = tuple[tuple[str, int], ...]
"""The counts that nothing reads: (name, count)."""

MOST_LEAVES: Final = 200
"""The most counts of a usage that are looked at one by one; the rest is one more count."""

_A_TOTAL: Final = "it is a total; what it has beyond its parts counts as output"
_A_PART: Final = "it is a part of a count that is read, at the same price"
_PRICED: Final = "it is read; a model without a price of its own for it bills it as its other tokens"
_AN_ECHO: Final = "it repeats a count that is read"
_A_WHOLE: Final = "only its billed units are billed"
_A_TIME: Final = "it is a time"
_A_CHARGE: Final = "it is money, and read as what was charged"
_A_TOOL: Final = "tools that ran are counted by themselves"

_OPENAI: Final[Mapping[str, str]] = {
    "total_tokens": _A_TOTAL,
    "prompt_tokens": _AN_ECHO,
    "completion_tokens": _AN_ECHO,
    "input_tokens": _AN_ECHO,
    "output_tokens": _AN_ECHO,
    "prompt_tokens_details.text_tokens": _A_PART,
    "prompt_tokens_details.audio_tokens": _PRICED,
    "prompt_tokens_details.image_tokens": _PRICED,
    "prompt_tokens_details.cache_write_tokens": _PRICED,
    "input_tokens_details.cache_write_tokens": _PRICED,
    "input_tokens_details.text_tokens": _A_PART,
    "input_tokens_details.cached_tokens": _A_PART,
    "input_tokens_details.cache_write_tokens_details.ttl_30m_tokens": _A_PART,
    "completion_tokens_details.text_tokens": _A_PART,
    "completion_tokens_details.audio_tokens": _PRICED,
    "completion_tokens_details.reasoning_tokens": _A_PART,
    "completion_tokens_details.accepted_prediction_tokens": _A_PART,
    "completion_tokens_details.rejected_prediction_tokens": _A_PART,
    "output_tokens_details.text_tokens": _A_PART,
    "output_tokens_details.reasoning_tokens": _A_PART,
    "prompt_cache_hit_tokens": _A_PART,
    "prompt_cache_miss_tokens": _A_PART,
    "prompt_tokens_details.cached_tokens": _A_PART,
    "cached_tokens": _A_PART,
    "reasoning_tokens": _A_PART,
    "num_server_side_tools_used": _A_TOOL,
    "num_cached_tokens": _A_PART,
    "output_token_details.reasoning": _A_PART,
    "prompt_token_details.cached_tokens": _A_PART,
    "queue_time": _A_TIME,
    "prompt_time": _A_TIME,
    "completion_time": _A_TIME,
    "total_time": _A_TIME,
    "cost": _A_CHARGE,
    "cost_in_usd_ticks": _A_CHARGE,
}
_ANTHROPIC: Final[Mapping[str, str]] = {
    "input_tokens": _AN_ECHO,
    "output_tokens": _AN_ECHO,
    "cache_creation_input_tokens": _AN_ECHO,
    "cache_read_input_tokens": _AN_ECHO,
    "cache_creation.ephemeral_5m_input_tokens": _AN_ECHO,
    "cache_creation.ephemeral_1h_input_tokens": _AN_ECHO,
    "output_tokens_details.thinking_tokens": _A_PART,
}
_GOOGLE: Final[Mapping[str, str]] = {
    "totalTokenCount": _A_TOTAL,
    "promptTokensDetails.tokenCount": _A_PART,
    "candidatesTokensDetails.tokenCount": _A_PART,
    "cacheTokensDetails.tokenCount": _A_PART,
    "toolUsePromptTokensDetails.tokenCount": _A_PART,
    "thoughtsTokenCount": _AN_ECHO,
    "toolUsePromptTokenCount": _AN_ECHO,
    "cachedContentTokenCount": _A_PART,
    "candidatesTokenCount": _AN_ECHO,
    "promptTokenCount": _AN_ECHO,
}
_COHERE: Final[Mapping[str, str]] = {
    "tokens.input_tokens": _A_WHOLE,
    "tokens.output_tokens": _A_WHOLE,
    "billed_units.input_tokens": _AN_ECHO,
    "billed_units.output_tokens": _AN_ECHO,
    "cached_tokens": _A_PART,
}
_BEDROCK: Final[Mapping[str, str]] = {
    "totalTokens": _A_TOTAL,
    "inputTokens": _AN_ECHO,
    "outputTokens": _AN_ECHO,
    "cacheReadInputTokens": _AN_ECHO,
    "cacheWriteInputTokens": _AN_ECHO,
    "cacheReadInputTokenCount": _AN_ECHO,
    "cacheWriteInputTokenCount": _AN_ECHO,
}
KNOWN: Final[Mapping[str, Mapping[str, str]]] = {
    **dict.fromkeys(("chat", "completions", "responses", "embeddings"), _OPENAI),
    "messages": _ANTHROPIC,
    **dict.fromkeys(("gemini", "gemini_embed"), _GOOGLE),
    **dict.fromkeys(("cohere", "cohere_embed"), _COHERE),
    "converse": _BEDROCK,
}
"""Flavour → what is in no unit of the book, and why it costs nothing by itself."""

INSIDE: Final[Mapping[str, str]] = {
    "cost": _A_CHARGE,
    "cost_details": _A_CHARGE,
    "context_details": _AN_ECHO,
    "server_side_tool_usage_details": _A_TOOL,
}
"""Objects of which no number is a count that is read here."""

_ROUNDS: Final = "iterations."
_CACHED: Final = {
    f"{details}.cached_tokens_details.{kind}_tokens": f"cache_{kind}_read_tokens"
    for details in ("prompt_tokens_details", "input_tokens_details", "input_token_details")
    for kind in ("audio", "image", "text")
}
UNIT_OF: Final[Mapping[str, str]] = {
    **_CACHED,
    "cached_tokens_details.cached_image_tokens": "cache_image_read_tokens",
    "cached_tokens_details.cached_text_tokens": "cache_text_read_tokens",
    "prompt_audio_seconds": "input_audio_seconds",
    "prompt_tokens_details.audio_tokens": "input_audio_tokens",
    "prompt_tokens_details.image_tokens": "input_image_tokens",
    "prompt_tokens_details.video_tokens": "input_video_tokens",
    "completion_tokens_details.audio_tokens": "output_audio_tokens",
    "completion_tokens_details.image_tokens": "output_image_tokens",
    "completion_tokens_details.video_tokens": "output_video_tokens",
    "input_tokens_details.audio_tokens": "input_audio_tokens",
    "input_tokens_details.image_tokens": "input_image_tokens",
    "output_tokens_details.audio_tokens": "output_audio_tokens",
    "output_tokens_details.image_tokens": "output_image_tokens",
    "input_token_details.audio_tokens": "input_audio_tokens",
    "input_token_details.text_tokens": "input_text_tokens",
    "input_token_details.image_tokens": "input_image_tokens",
    "input_token_details.cached_tokens": "cache_read_tokens",
    "input_token_details.cache_read": "cache_read_tokens",
    "input_token_details.cache_creation": "cache_write_tokens",
    "input_token_details.ephemeral_5m_input_tokens": "cache_write_5m_tokens",
    "input_token_details.ephemeral_1h_input_tokens": "cache_write_1h_tokens",
    "input_token_details.audio": "input_audio_tokens",
    "output_token_details.audio": "output_audio_tokens",
    "output_token_details.audio_tokens": "output_audio_tokens",
    "output_token_details.text_tokens": "output_text_tokens",
    "input_tokens_details.cache_write_tokens_details.ttl_12h_tokens": "cache_write_12h_tokens",
    "prompt_tokens_details.cache_write_tokens_details.ttl_12h_tokens": "cache_write_12h_tokens",
    "billed_units.image_tokens": "input_image_tokens",
    "billed_units.search_units": "rerank_searches",
}
"""Counts that the extractor of a flavour may leave out → the book's unit."""


def counts_of(stated: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (name with dots, count rounded up) for each number above zero, also in a text, at any depth.

    Of a usage that is too large the rest is one more count, larger than any model's window.
    """
    pending: list[tuple[str, Any]] = [("", stated)]
    seen = found = 0
    while pending:
        name, value = pending.pop()
        inner: Iterable[tuple[str, Any]] = ()
        if isinstance(value, Mapping):
            inner = ((f"{name}.{_plain(key)}"[:_LONGEST] if name else _plain(key), each) for key, each in value.items())
        elif isinstance(value, list | tuple):
            inner = ((name, each) for each in value)
        elif (count := _count(name, value)) > 0:
            found += 1
            yield name, count
        pending.extend(islice(inner, _MOST_SEEN))
        seen += 1
        if found == MOST_LEAVES or seen + len(pending) > _MOST_SEEN:
            if pending:
                yield "more_counts", _VAST
            return


def _count(name: str, value: object) -> int:
    return count_of(value) if not isinstance(value, str) or _NAMES.search(name) else 0


_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


def count_of(value: object) -> int:
    """Return a count, also of a text of digits, rounded up; 0 for what is none."""
    if not is_number(value):
        return 0
    return int(Decimal(value).to_integral_value(rounding=ROUND_CEILING))


def is_number(value: object) -> TypeGuard[int | Decimal | str]:
    """True for a finite number, zero among them, and for a text of digits."""
    if isinstance(value, str):
        return len(value) < _DIGITS and _NUMBER.fullmatch(value) is not None
    return isinstance(value, int | Decimal) and not isinstance(value, bool) and Decimal(value).is_finite()


def _plain(key: object) -> str:
    return _PLAIN.sub("", str(key)[:_LONGEST_KEY])  # names are words of the provider's, and a dot is ours


def read_leaves(
    flavour: Flavour, stated: Mapping[str, Any], reads: frozenset[str], usage: Mapping[str, int]
) -> tuple[dict[str, int], Unread]:
    """Return the units that the extractor has left out, and the counts that nothing reads.

    *reads* are the names that the extractor reads, *usage* what it has read.
    """
    more: dict[str, int] = {}
    unread: dict[str, int] = {}
    known, is_claude = KNOWN.get(flavour, _OPENAI), flavour == "messages"
    for whole, count in counts_of(stated):
        # Each round has the counts of a whole usage, and they are read with it.
        name = whole.removeprefix(_ROUNDS) if is_claude else whole
        first = name.partition(".")[0]
        if name in reads or first in INSIDE or (is_claude and name == whole and first == "server_tool_use"):
            continue
        unit = UNIT_OF.get(name)
        if unit is not None and name == whole:
            if not usage.get(unit):
                more[unit] = more.get(unit, 0) + count
        elif (name not in known and not is_measure(name)) or (name == whole and _is_more(name, known, count, usage)):
            unread[name] = unread.get(name, 0) + count
    for unit in [unit for unit in more if unit.endswith("_tokens")]:
        if more[unit] > usage.get("output_tokens" if unit.startswith("output_") else "input_tokens", 0):
            unread[unit] = more.pop(unit)  # more than the total that it is a part of
    written = more.get("cache_write_5m_tokens", 0) + more.get("cache_write_1h_tokens", 0)
    if written > max(more.get("cache_write_tokens", 0), usage.get("cache_write_tokens", 0)):
        more["cache_write_tokens"] = written  # LangChain leaves the sum out where it has the parts
    cached = sum(count for unit, count in more.items() if unit.startswith("cache_") and unit.endswith("_read_tokens"))
    cached -= more.get("cache_read_tokens", 0)
    if cached > max(more.get("cache_read_tokens", 0), usage.get("cache_read_tokens", 0)):
        more["cache_read_tokens"] = cached  # the parts without their sum
    for kind in ("audio", "image"):  # what was cached of a kind is of that kind
        of_kind, whole = more.get(f"cache_{kind}_read_tokens", 0), f"input_{kind}_tokens"
        if of_kind > max(more.get(whole, 0), usage.get(whole, 0)):
            more[whole] = of_kind
    if "input_image_tokens" in more:
        unread.pop("billed_units.images", None)  # the same images
    if "input_audio_seconds" in more:
        more["audio_seconds"] = more["input_audio_seconds"]  # the book wants the whole as well
    return more, tuple(unread.items())


def _is_more(name: str, known: Mapping[str, str], count: int, usage: Mapping[str, int]) -> bool:
    """True for a count that is more than what it is known to repeat, or to be a part of."""
    if known.get(name) not in (_AN_ECHO, _A_PART):
        return False
    return count > usage.get("output_tokens" if _OUTPUT.search(name) else "input_tokens", 0)


_OUTPUT: Final = re.compile("(?i)output|completion|candidates|thoughts|reasoning")


def is_measure(name: str) -> bool:
    """True for a time, a rate or money. What is billed by its length is of audio or video, or is named by seconds."""
    return _MEASURE.search(name) is not None and _MEDIA.search(name) is None


def is_count(name: str) -> bool:
    """True for a name that says that its value is a count."""
    return _NAMES.search(name) is not None


_MEASURE: Final = re.compile(
    r"(^|[._])time_to_|_per_|_(ms|ns|us)$|(^|[._])([a-z_]*_)?(time|latency|duration|cost|price)$"
)
_MEDIA: Final = re.compile("audio|video")
_PLAIN: Final = re.compile(r"[^A-Za-z0-9_]")
_NAMES: Final = re.compile(
    r"(tokens?|count|seconds|requests|queries|searches|units|images|pages|characters)$", re.IGNORECASE
)
_LONGEST, _LONGEST_KEY, _DIGITS = 200, 60, 20
_MOST_SEEN: Final = 10_000
_VAST: Final = 10**12

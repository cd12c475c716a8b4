"""Finds the counts of a stated usage that nothing reads: what is stated and not understood is never nothing.

Each number of a usage is read as a unit of the price book, or it is known here to repeat another one or to cost nothing,
or it is unread: ``bill`` books it at the dearest rate of its model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

from x402guard.llm.routes import Flavour

Unread = tuple[tuple[str, int], ...]
"""The counts that nothing reads: (name, count)."""

MOST_LEAVES: Final = 200
"""The most numbers of a usage that are looked at; a usage with more is read as far as that."""

_A_TOTAL: Final = "it is a total; what it has beyond its parts counts as output"
_A_PART: Final = "it is a part of a count that is read, at the same price"
_PRICED: Final = "it is read; a model without a price of its own for it bills it as its other tokens"
_AN_ECHO: Final = "it repeats a count that is read"
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
    "num_sources_used": _A_TOOL,
    "queue_time": _A_TIME,
    "prompt_time": _A_TIME,
    "completion_time": _A_TIME,
    "total_time": _A_TIME,
    "cost": _A_CHARGE,
    "cost_in_usd_ticks": _A_CHARGE,
}
_ANTHROPIC: Final[Mapping[str, str]] = {
    "output_tokens_details.thinking_tokens": _A_PART,
    "server_tool_use.web_search_requests": _A_TOOL,
    "server_tool_use.web_fetch_requests": _A_TOOL,
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
    "tokens.input_tokens": _AN_ECHO,
    "tokens.output_tokens": _AN_ECHO,
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

INSIDE: Final[Mapping[str, str]] = {"cost": _A_CHARGE, "cost_details": _A_CHARGE, "server_tool_use": _A_TOOL}
"""Objects of which no number is a count that is read here."""

_ROUNDS: Final = "iterations."
_UNITS: Final[Mapping[str, str]] = {
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
    "input_token_details.cached_tokens_details.audio_tokens": "cache_audio_read_tokens",
    "input_token_details.cached_tokens_details.text_tokens": "cache_text_read_tokens",
    "output_token_details.audio_tokens": "output_audio_tokens",
    "output_token_details.text_tokens": "output_text_tokens",
    "billed_units.image_tokens": "input_image_tokens",
    "billed_units.search_units": "rerank_searches",
}
"""Counts that the extractor of a flavour may leave out → the book's unit."""


def counts_of(stated: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (name with dots, count rounded up) for each number above zero, also in a text, at any depth."""
    pending: list[tuple[str, Any]] = [("", stated)]
    looked = 0
    while pending and looked < MOST_LEAVES:
        name, value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend((f"{name}.{key}" if name else str(key), each) for key, each in value.items())
        elif isinstance(value, list | tuple):
            pending.extend((name, each) for each in value)
        elif isinstance(value, int | Decimal) and not isinstance(value, bool):
            looked += 1
            count = int(Decimal(value).to_integral_value(rounding=ROUND_CEILING)) if Decimal(value).is_finite() else 0
            if count > 0:
                yield name, count


def read_leaves(
    flavour: Flavour, stated: Mapping[str, Any], reads: frozenset[str], usage: Mapping[str, int]
) -> tuple[dict[str, int], Unread]:
    """Return the units that the extractor has left out, and the counts that nothing reads.

    *reads* are the names that the extractor reads, *usage* what it has read.
    """
    more: dict[str, int] = {}
    unread: dict[str, int] = {}
    known = KNOWN.get(flavour, _OPENAI)
    for whole, count in counts_of(stated):
        name = whole.removeprefix(_ROUNDS)  # each round has the counts of a whole usage, and they are read with it
        if name in reads or name.partition(".")[0] in INSIDE:
            continue
        unit = _UNITS.get(name)
        if unit is not None:
            if name == whole and not usage.get(unit):
                more[unit] = more.get(unit, 0) + count
        elif name not in known and not _MEASURE.search(name):
            shown = _PLAIN.sub("", name)[:60] or "a count"
            unread[shown] = unread.get(shown, 0) + count
    seconds = more.get("input_audio_seconds", 0) + more.get("output_audio_seconds", 0)
    return (more | {"audio_seconds": seconds} if seconds else more), tuple(
        unread.items()
    )  # the book wants the whole as well


_MEASURE: Final = re.compile(r"(^|[._])time_to_|_per_|(^|[._])([a-z_]*_)?(time|latency|duration|cost|price)(_ms|_ns)?$")
"""A time, a rate or money. What is billed by its length is named by seconds."""
_PLAIN: Final = re.compile(r"[^A-Za-z0-9_.]")  # names are words of the provider's

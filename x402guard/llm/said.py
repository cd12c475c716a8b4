"""A usage that somebody hands us is read strictly: a count that nobody knows would be a cost of zero."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from x402guard.flow.ports import Usage
from x402guard.llm.routes import Flavour

_COUNTS: Final = re.compile(r"(tokens?|count|units?)$", re.IGNORECASE)
_KNOWN: Final[Mapping[Flavour, frozenset[str]]] = {
    "chat": frozenset({"prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "prompt_cache_hit_tokens",
                       "prompt_cache_miss_tokens"}),
    "embeddings": frozenset({"prompt_tokens", "total_tokens"}),
    "responses": frozenset({"input_tokens", "output_tokens", "total_tokens"}),
    "messages": frozenset({"input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"}),
    "gemini": frozenset({"promptTokenCount", "candidatesTokenCount", "totalTokenCount", "cachedContentTokenCount",
                         "thoughtsTokenCount", "toolUsePromptTokenCount"}),
    "converse": frozenset({"inputTokens", "outputTokens", "totalTokens", "cacheReadInputTokens", "cacheWriteInputTokens",
                           "cacheReadInputTokenCount", "cacheWriteInputTokenCount"}),
    "cohere": frozenset({"cached_tokens", "tokens", "billed_units"}),
    "cohere_embed": frozenset({"tokens", "billed_units"}),
}  # fmt: skip
"""The counts that are read of each dialect's usage, or are known to repeat others."""

_TOTALS: Final = ("total_tokens", "totalTokenCount", "totalTokens")
_CALLER_RUNS: Final = frozenset(
    {"function_call", "custom_tool_call", "computer_call", "local_shell_call", "shell_call", "apply_patch_call"}
)
_COUNTED: Final = frozenset({"web_search_call", "file_search_call"})
_FREE_REQUESTS: Final = frozenset({"web_search_requests", "web_fetch_requests"})


def check_said(flavour: Flavour, usage: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a count that nobody reads, or that is no number: what it costs would be left out."""
    known = _KNOWN.get(flavour, frozenset())
    for key, value in usage.items():
        name = str(key)[:60]
        if _COUNTS.search(name) and name not in known and value:
            raise ValueError(f"{name} is no count that is known beside {', '.join(sorted(known))}")
        if name in known and value is not None and not isinstance(value, (Mapping, int, Decimal)):
            raise ValueError(f"{name} is a {type(value).__name__}, and is to be a number")


def check_total(usage: Mapping[str, Any], read: Usage) -> None:
    """Raise ``ValueError`` where the total that is said is more than the parts that were read: something would be left out."""
    parts = read.get("input_tokens", 0) + read.get("output_tokens", 0)
    for name in _TOTALS:
        total = usage.get(name)
        if isinstance(total, (int, Decimal)) and total > parts:
            raise ValueError(f"{name} is {str(total)[:40]}, and the parts that are stated come to {parts}")


def tools_run(flavour: Flavour, answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the provider ran for an answer, and bills beside the tokens, and no count of a usage has."""
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

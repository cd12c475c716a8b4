"""Finds the tools that an answer shows a provider to have run: those with counts, and those without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from x402guard.llm.content import declared_tools
from x402guard.llm.events import SEARCHED
from x402guard.llm.leaves import count_of, is_number
from x402guard.llm.request import Call
from x402guard.vendors.routes import Flavour

UNITS: Final = {"web_search": "web_searches", "file_search": "storage_searches"}
"""Kinds of tools whose calls are counted → unit in the price book."""

MOST_USES: Final = 1_000
"""The most uses of one tool in one answer that are booked; more are disputed."""

_CALLS: Final = {"web_search_call": "web_search", "file_search_call": "file_search"}


def tools_used(call: Call, answer: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (kind, count) for the priced provider-run tools that an answer shows to have run."""
    flavour: Flavour = call.route.flavour
    if flavour == "responses":
        output = answer.get("output")
        counted = _stated_searches(answer)
        types = [_called(item) for item in output if isinstance(item, dict)] if isinstance(output, list) else []
        for name, kind in _CALLS.items():
            asked = any(part.kind == kind for part in call.unbounded)
            if kind == "web_search" and is_number(counted) and count_of(counted) >= 0:
                yield kind, count_of(counted)  # one item may be several requests, and several items one
            elif asked or name in types:
                yield kind, types.count(name)
    elif flavour == "messages":
        tools = stated.get("server_tool_use")
        count = tools.get("web_search_requests") if isinstance(tools, dict) else None
        asked = any(part.kind == "web_search" for part in call.unbounded)
        if is_number(count) or asked:
            yield "web_search", count_of(count)
    elif flavour == "gemini":
        asked, searches = any(part.kind == "web_search" for part in call.unbounded), _grounded(call, answer)
        if asked or searches:
            yield "web_search", searches
    elif searches_each_call(call):
        yield "web_search", 1  # billed per call, with or without a search


def searches_each_call(call: Call) -> bool:
    """True for OpenAI's models of chat that search: each call is billed as one search."""
    searches = any(part.kind == "web_search" for part in call.unbounded)
    return searches and call.route.flavour == "chat" and call.route.provider in ("openai", "azure")


def _called(item: Mapping[str, Any]) -> str | None:
    """Return the type of an output item; None for opening a found page, which is free."""
    action = item.get("action")
    opens = isinstance(action, dict) and action.get("type") not in (None, "search")
    return None if opens else item.get("type")


def _stated_searches(answer: Mapping[str, Any]) -> object:
    tools = answer.get("tool_usage")
    searched = tools.get("web_search") if isinstance(tools, dict) else None
    return searched.get("num_requests") if isinstance(searched, dict) else None


def _grounding(answer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    candidates = answer.get("candidates")
    for candidate in candidates if isinstance(candidates, list) else ():
        metadata = candidate.get("groundingMetadata") if isinstance(candidate, dict) else None
        if isinstance(metadata, dict) and metadata:
            yield metadata


def _grounded(call: Call, answer: Mapping[str, Any]) -> int:
    """Return the searches that Gemini bills: before version 3, each grounded answer; from it on, each query once.

    Empty queries are free (ai.google.dev, Grounding with Google Search).
    """
    found = list(_grounding(answer))
    if is_grounded_by_prompt(call.model):
        return int(bool(found) and not maps_cost(call, answer)[1])
    listed = [metadata.get(name) for metadata in found for name in SEARCHED]
    queries = [query for each in listed if isinstance(each, list) for query in each]
    unique = {query.strip() for query in queries if isinstance(query, str)} - {""}
    return len(unique) or int(bool(found) and not queries)


def is_grounded_by_prompt(model: str) -> bool:
    """True for models that bill each grounded prompt; those from Gemini 3 on bill each query."""
    return model.startswith(("gemini-1", "gemini-2"))


def grounds_by(call: Call) -> tuple[bool, bool]:
    """Return whether a request to Gemini asks for grounding by Google Search, and by Google Maps."""
    tools = [tool for _, tool in declared_tools(call.body) if isinstance(tool, dict)]
    names = {name.replace("_", "").lower() for tool in tools for name in tool}
    return any("search" in name for name in names), "googlemaps" in names


def maps_cost(call: Call, answer: Mapping[str, Any]) -> tuple[Decimal, bool]:
    """Return the dollars that Google Maps added to an answer of Gemini, and whether it alone grounded it."""
    found = list(_grounding(answer))
    if not found or not is_grounded_by_prompt(call.model):
        return Decimal(0), False
    listed = [metadata.get("groundingChunks") for metadata in found]
    kinds = {
        kind for each in listed if isinstance(each, list) for chunk in each if isinstance(chunk, dict) for kind in chunk
    }
    searched, mapped = grounds_by(call)
    by_maps = "maps" in kinds or (mapped and not searched)
    return (MAPS if by_maps else Decimal(0)), by_maps and "web" not in kinds


MAPS: Final = Decimal("0.025")
"""Dollars of a prompt that Google Maps grounds, before Gemini 3 (the pricing page of the Gemini API)."""


_CALLER_RUNS: Final = frozenset(
    {"function_call", "custom_tool_call", "computer_call", "local_shell_call", "apply_patch_call"}
)
_COUNTED: Final = frozenset({"web_search_call", "file_search_call"})
_FREE_REQUESTS: Final = frozenset({"web_search_requests", "web_fetch_requests"})


def tools_run(flavour: Flavour, answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tools that the provider ran and bills separately, and that no count of the usage covers."""
    if flavour == "responses":
        output = answer.get("output")
        for item in output if isinstance(output, list) else ():
            kind = str(item.get("type", "")) if isinstance(item, Mapping) else ""
            place = item.get("environment") if kind == "shell_call" else None
            is_callers = kind == "shell_call" and not (isinstance(place, Mapping) and place.get("type") != "local")
            if kind.endswith("_call") and kind not in _CALLER_RUNS | _COUNTED and not is_callers:
                yield kind.removesuffix("_call")
    elif flavour == "messages":
        usage = answer.get("usage")
        ran = usage.get("server_tool_use") if isinstance(usage, Mapping) else None
        for name, count in ran.items() if isinstance(ran, Mapping) else ():
            if count and name not in _FREE_REQUESTS:
                yield str(name).removesuffix("_requests")

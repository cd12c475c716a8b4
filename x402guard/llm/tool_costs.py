"""What the tools that a provider runs cost, where its list of prices says it: containers, advisers, a tool's own model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from x402guard.flow.ports import Usage
from x402guard.llm.content import declared_tools
from x402guard.llm.leaves import count_of, counts_of
from x402guard.llm.rates import Rates, find_model
from x402guard.llm.request import Call
from x402guard.llm.tools_used import MAPS, grounds_by, is_grounded_by_prompt, searches_each_call
from x402guard.vendors.models import model_maximum

_CONTAINERS: Final[Mapping[str, Decimal]] = {
    "1g": Decimal("0.03"), "4g": Decimal("0.12"), "16g": Decimal("0.48"), "64g": Decimal("1.92"),
}  # fmt: skip
"""OpenAI's memory → dollars of a session of 20 minutes (its pricing page, built-in tools)."""

_PICTURE: Final = 16_384
"""Output tokens that one picture is held at: more than the documented ones of any size and quality."""

_PICTURES: Final = ("gpt-image-2.5-sunburst", "gpt-image-2")
"""Models whose prices a picture of an unlisted one is billed at. OpenAI's tool takes one of theirs by default."""

_LONGEST: Final = 128_000


def own_tools(call: Call, start: str) -> list[Mapping[str, Any]]:
    """Return the tools of a request whose type begins with *start*."""
    return [
        tool
        for _, tool in declared_tools(call.body)
        if isinstance(tool, dict) and str(tool.get("type", "")).startswith(start)
    ]


def container_cost(call: Call) -> Decimal:
    """Return the dollars of the containers that a request to OpenAI asks for by their memory; 0 for those by an id."""
    asked = [tool.get("container") for tool in own_tools(call, "code_interpreter")]
    asked += [tool.get("environment") for tool in own_tools(call, "shell")]
    made = [each for each in asked if isinstance(each, dict) and str(each.get("type", "")).endswith("auto")]
    dearest = max(_CONTAINERS.values())
    return sum((_CONTAINERS.get(str(each.get("memory_limit") or "1g"), dearest) for each in made), Decimal(0))


def models_of_tools(call: Call, answer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield (model, stated usage, kind) for each tool of an answer that states the usage of a model of its own."""
    tools = answer.get("tool_usage")
    used = tools.get("image_gen") if call.route.flavour == "responses" and isinstance(tools, dict) else None
    if isinstance(used, dict) and next(counts_of(used), None) is not None:
        cached = used.get("cached_tokens")
        whole = {"input_tokens": 0, "output_tokens": 0, **used}
        details = {**_details(used), "cached_tokens": cached}
        yield _picture_model(call), {**whole, "input_tokens_details": details}, "image_generation"


def _details(used: Mapping[str, Any]) -> Mapping[str, Any]:
    details = used.get("input_tokens_details")
    return details if isinstance(details, dict) else {}


def _picture_model(call: Call) -> str:
    named = {str(tool.get("model") or _PICTURES[0]) for tool in own_tools(call, "image_generation")}
    return named.pop() if len(named) == 1 else _PICTURES[0]


def adviser_of(call: Call) -> str:
    """Return the model of a request's adviser; "" if it names none, or several."""
    named = {str(tool.get("model") or "") for tool in own_tools(call, "advisor")}
    return named.pop() if len(named) == 1 else ""


def rates_of_other(rates: Rates, provider: str, model: str) -> Rates:
    """Return the prices of another model that took part in an answer: for an unlisted one, of its maker's dearest."""
    book, at_unix = rates.book, rates.priced.at_unix
    named = (model, *(_PICTURES if model.startswith(("gpt-image", "chatgpt-image")) else ()))
    homes = (provider, "anthropic") if model.startswith("claude") else (provider,)
    pairs = ((home, name) for home in homes for name in named)
    found = next((found for home, name in pairs if (found := find_model(book, home, name, at_unix))), None)
    if found is None:
        dearest = book.dearest(provider, at_unix)
        found = (rates.priced, rates.based_on) if dearest is None else (dearest, None)
    return Rates(book, *found, {}, rates.factor)


def pictured(usage: Usage, priced_units: frozenset[str]) -> Usage:
    """Return the usage of a model of pictures: its output is of pictures unless it is said to be something else."""
    told = {"output_image_tokens", "output_text_tokens"} & usage.keys()
    if told or "output_image_tokens" not in priced_units:
        return usage
    return {**usage, "output_image_tokens": usage.get("output_tokens", 0)}


def listed_costs(call: Call, rates: Rates, kinds: Collection[str], tokens: int) -> Iterator[tuple[str, Decimal]]:
    """Yield (kind, dollars) for those of *kinds* whose cost in a request the vendor's list bounds, or at least begins."""
    if "code_execution" in kinds:
        yield "code_execution", container_cost(call)
    if "image_generation" in kinds:
        yield "image_generation", _pictures_cost(call, rates)
    if "web_search" in kinds:
        yield "web_search", _searches_cost(call, rates)
    if "file_search" in kinds:
        yield "file_search", _file_searches_cost(call, rates)
    if "provider_tool" in kinds:
        yield "provider_tool", _advisers_cost(call, rates, tokens)


def _advisers_cost(call: Call, rates: Rates, tokens: int) -> Decimal:
    """Return the most that the advisers of a request to Anthropic cost, for as many uses as it says, or else for one.

    *tokens* are those of its input: an adviser reads them, and the answer so far.
    """
    total, limit = Decimal(0), call.limit or _LONGEST
    for tool in own_tools(call, "advisor"):
        model, uses, longest = (
            str(tool.get("model", "")),
            count_of(tool.get("max_uses")),
            count_of(tool.get("max_tokens")),
        )
        known = model_maximum("anthropic", model)
        out = longest or (known.output_tokens if known else _LONGEST)
        other = rates_of_other(rates, call.route.provider, model)
        one = other.dollars({"input_tokens": tokens + limit, "output_tokens": out})
        total += one * max(uses, 1)
    return total


def _pictures_cost(call: Call, rates: Rates) -> Decimal:
    """Return what one picture costs for each tool of a request to OpenAI that makes some."""
    tools = own_tools(call, "image_generation") if call.route.flavour == "responses" else []
    if not tools:
        return Decimal(0)
    other = rates_of_other(rates, call.route.provider, _picture_model(call))
    return other.dollars(pictured({"output_tokens": _PICTURE}, other.priced.units)) * len(tools)


def _searches_cost(call: Call, rates: Rates) -> Decimal:
    """Return what the searches of a request cost at most: as many as it says, or else one for each tool."""
    if call.route.flavour == "gemini":
        searched, mapped = grounds_by(call)
        maps = MAPS if mapped and is_grounded_by_prompt(call.model) else Decimal(0)
        return maps + (_search(rates) if searched or (mapped and not maps) else Decimal(0))
    uses = [max(count_of(tool.get("max_uses")), 1) for tool in own_tools(call, "web_search")]
    if searches_each_call(call):
        uses = [*uses, 1]
    return _search(rates) * max(sum(uses), count_of(call.body.get("max_tool_calls")) if uses else 0)


def _file_searches_cost(call: Call, rates: Rates) -> Decimal:
    """Return what one search in files costs for each tool of a request."""
    tools = own_tools(call, "file_search")
    return (
        rates.dollars({"storage_searches": len(tools)})
        if tools and "storage_searches" in rates.priced.units
        else Decimal(0)
    )


def _search(rates: Rates) -> Decimal:
    return rates.dollars({"web_searches": 1}) if "web_searches" in rates.priced.units else Decimal(0)

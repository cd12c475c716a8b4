"""The dearest that tokens of a model can cost, and the price of the counts that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal, localcontext
from typing import Final

from x402guard.flow.ports import Usage
from x402guard.llm.rates import EXACT, Rates
from x402guard.llm.tools_used import MOST_USES
from x402guard.vendors.prices import PriceBook, PricedModel

_PER: Final = 1_000_000
WINDOW: Final = 1_048_576
"""The context window, in tokens, of a model whose window is not known."""


def dearest_parts(
    book: PriceBook, priced: PricedModel, window: int, longest: int, context: Mapping[str, str]
) -> tuple[Decimal, Decimal]:
    """Return the most that so many tokens can cost, in dollars: those of input, and those of output."""
    plain: Usage = {"input_tokens": window}
    before = book.cost(priced, plain, context)
    into = max(book.cost(priced, _alone(unit, window), context) for unit in priced.units if _is_input(unit))
    out = max(
        book.cost(priced, {**plain, "output_tokens": longest, unit: longest}, context) - before
        for unit in (priced.units | {"output_tokens"})
        if unit.startswith("output_") and unit.endswith("_tokens")
    )
    return into, out


def _is_input(unit: str) -> bool:
    return unit.endswith("_tokens") and not unit.startswith("output_")


def _alone(unit: str, tokens: int) -> Usage:
    """Return the usage of *tokens* of input that are all counted as *unit*."""
    usage = {"input_tokens": tokens, unit: tokens}
    if "_write_" in unit:
        usage["cache_write_tokens"] = tokens
    elif unit.startswith("cache_") and unit != "cache_read_tokens":  # cache_audio_read_tokens and its like
        usage |= {"cache_read_tokens": tokens, unit.replace("cache_", "input_").replace("_read", ""): tokens}
    return usage


_TOKENS_EACH: Final[Mapping[str, int]] = {"seconds": 100, "pages": 5_000, "images": 10_000}
"""What one of them is taken for where a model has no price for it: more tokens than any vendor counts for it."""
_FEES: Final = ("requests", "queries", "searches", "search", "units", "calls", "uses", "sources", "classifications")
_FEE: Final = Decimal("0.05")
"""Dollars of one use of what has no price: more than any listed fee of a search or a tool."""
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def unread_cost(rates: Rates, unread: Iterable[tuple[str, int]], most: int | None = None) -> Decimal:
    """Return the dollars of counts that nothing reads: at the dearest rate that the model's prices allow.

    *most* are the tokens that the model can take at all, if the request is known: all such counts together are no more,
    and all fees together no more than ``MOST_USES``.
    """
    tokens, uses, total = most or 2 * max(WINDOW, rates.priced.context_window or 0), MOST_USES, Decimal(0)
    with localcontext(EXACT):
        dearest = _dearest_token(rates)
        for name, count in unread:
            words = [word.lower() for word in _WORDS.findall(name)]
            kind = "tokens" if words[-1:] == ["tokens"] else next((word for word in words if word in _TOKENS_EACH), "")
            priced = [unit for unit in rates.priced.units if kind in _TOKENS_EACH and unit.endswith(f"_{kind}")]
            if kind != "tokens" and not set(words).isdisjoint(_FEES):
                uses, some, price = uses - min(count, uses), min(count, uses), _FEE
            else:
                some = min(count * (1 if priced else _TOKENS_EACH.get(kind, 1)), tokens)
                tokens, price = tokens - some, max((_price_of(rates, unit) for unit in priced), default=dearest)
            total += price * some
        return total * rates.factor


def _price_of(rates: Rates, unit: str) -> Decimal:
    whole = {"audio_seconds": _PER} if unit.endswith("audio_seconds") else {}  # the book wants it beside its parts
    return rates.book.cost(rates.priced, {**whole, unit: _PER}, rates.context) / _PER


def _dearest_token(rates: Rates) -> Decimal:
    return max(max(dearest_parts(rates.book, rates.priced, _PER, _PER, each)) for each in ({}, rates.context)) / _PER

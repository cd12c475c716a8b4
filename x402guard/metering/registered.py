"""Prices that people give: the owner's in place of the book's, a session's for what the book lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.money import Dollars, Nanos, dollars_to_nanos, nanos_to_decimal
from x402guard.ports import PriceBook, PricedModel, Usage

__all__ = ["ModelPrice", "RegisteredBook"]

_PER: Final = 1_000_000
_UNITS: Final = frozenset({"input_tokens", "output_tokens", "cache_read_tokens"})


@dataclass(frozen=True, kw_only=True)
class ModelPrice:
    """What a model costs, in dollars per million tokens.

    Args:
        input: for input that was not read from a cache.
        output: for output, hidden reasoning included.
        cached_input: for input read from a cache; the same as ``input`` when left out.
        max_output: the most tokens that it answers with; calls without a limit of their own are held at that.

    Raises ``ConfigError`` naming the argument.
    """

    input: Dollars
    output: Dollars
    cached_input: Dollars | None = None
    max_output: int | None = None
    rates: tuple[Decimal, Decimal, Decimal] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = (self.input, self.output, self.input if self.cached_input is None else self.cached_input)
        names = ("input", "output", "cached_input")
        rates = tuple(nanos_to_decimal(_nanos(name, price)) for name, price in zip(names, given, strict=True))
        object.__setattr__(self, "rates", rates)
        if self.max_output is not None and (type(self.max_output) is not int or self.max_output < 1):
            raise ConfigError(f"max_output: {self.max_output!r} is not a number of tokens")

    def cost(self, usage: Usage) -> Decimal:
        """Return what *usage* costs in dollars, exact. Raises ``ValueError`` where more was cached than was read."""
        into, out, cached = self.rates
        read = usage.get("cache_read_tokens", 0)
        fresh = usage.get("input_tokens", 0) - read
        if fresh < 0:
            raise ValueError(f"{read} tokens from a cache are more than all input")
        return (fresh * into + read * cached + usage.get("output_tokens", 0) * out) / _PER


def _nanos(name: str, price: Dollars) -> Nanos:
    try:
        return dollars_to_nanos(price, field=name)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{error} (dollars per million tokens)") from error


@dataclass(frozen=True)
class RegisteredBook:
    """A price book with prices of people's own before it.

    Attributes:
        book: what is asked for everything else.
        owner: name → price, whatever the book says.
        session: name → price, for what the book lacks, or dearer than the book's.
    """

    book: PriceBook
    owner: Mapping[str, ModelPrice] = field(default_factory=dict)
    session: Mapping[str, ModelPrice] = field(default_factory=dict)

    def _own(self, model: str) -> tuple[str, ModelPrice] | None:
        if model in self.owner:
            return "owner", self.owner[model]
        return ("session", self.session[model]) if model in self.session else None

    def find(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """See ``PriceBook.find``."""
        own = self._own(model)
        if own is None:
            return self.book.find(provider, model, at_unix)
        source, price = own
        return PricedModel(provider, model, at_unix, source, "", price.max_output, _UNITS)

    def cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """See ``PriceBook.cost``."""
        own = self._own(priced.model) if priced.source in ("owner", "session") else None
        return self.book.cost(priced, usage, context) if own is None else own[1].cost(usage)

    def extract(self, provider: str, flavour: str, answer: Mapping[str, Any]) -> Usage:
        """See ``PriceBook.extract``."""
        return self.book.extract(provider, flavour, answer)

    def register(self, model: str, price: ModelPrice, at_unix: int) -> RegisteredBook:
        """Return the book with one more price of a session's.

        A session can price what nobody has a price for, and make a model dearer; never cheaper, or it would have a way round
        its budget. Raises ``ConfigError``.
        """
        if not isinstance(model, str) or not model.strip():
            raise ConfigError(f"model: {model!r} is not the name of a model")
        into, out, cached = price.rates
        standing = self.owner.get(model) or self.session.get(model)
        if standing is not None and any(new < old for new, old in zip(price.rates, standing.rates, strict=True)):
            raise ConfigError(f"model: {model!r} has a price already, and a session cannot lower it; the owner can")
        for provider in _PROVIDERS:
            known = self.book.find(provider, model, at_unix)
            if known is None or not {"input_tokens", "output_tokens"} <= known.units:
                continue
            usages: tuple[tuple[Usage, Decimal], ...] = (
                ({"input_tokens": _PER}, into),
                ({"output_tokens": _PER}, out),
                ({"input_tokens": _PER, "cache_read_tokens": _PER}, cached),
            )
            if any(self.book.cost(known, usage, {}) > rate for usage, rate in usages):
                raise ConfigError(
                    f"model: the book prices {model!r} ({provider}), and a session cannot lower that; "
                    "the owner can, with Metering(models={…})"
                )
        return replace(self, session={**self.session, model: price})


_PROVIDERS: Final = ("openai", "anthropic", "google", "mistral", "cohere", "groq", "deepseek")
"""Whose names a session's own prices are compared with."""

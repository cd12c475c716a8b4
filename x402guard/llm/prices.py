"""Prices that people give: the owner's in place of the book's, a session's for what the book lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.flow.ports import PriceBook, PricedModel, Usage
from x402guard.llm.names import base_name
from x402guard.llm.routes import ENDPOINTS
from x402guard.money import Dollars, Nanos, dollars_to_nanos, nanos_to_decimal

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
        session: name → price, for what has none, or dearer: what a session says is never less than what stood before.
    """

    book: PriceBook
    owner: Mapping[str, ModelPrice] = field(default_factory=dict)
    session: Mapping[str, ModelPrice] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """True where the book has loaded what it needs."""
        return bool(getattr(self.book, "ready", True))

    def find(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """See ``PriceBook.find``."""
        before = self._before(provider, model, at_unix)
        price = self.session.get(model)
        return before if price is None else _priced("session", price, provider, model, at_unix, before=before)

    def suggest(self, provider: str, model: str) -> str | None:
        """See ``PriceBook.suggest``."""
        asked: Callable[[str, str], str | None] | None = getattr(self.book, "suggest", None)
        return None if asked is None else asked(provider, model)

    def _before(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """What stands without the session: of a dated name that nobody knows, its base model's where that is asked for."""
        price = self.owner.get(model)
        if price is not None:
            return _priced("owner", price, provider, model, at_unix)
        found = self.book.find(provider, model, at_unix)
        base = base_name(model) if found is None and model in self.session else None
        return found if base is None else self.book.find(provider, base, at_unix)

    def cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """See ``PriceBook.cost``."""
        if priced.source == "owner" and priced.model in self.owner:
            return self.owner[priced.model].cost(usage)
        if priced.source != "session" or priced.model not in self.session:
            return self.book.cost(priced, usage, context)
        own = self.session[priced.model].cost(usage)
        before = self._before(priced.provider, priced.model, priced.at_unix)
        return own if before is None else max(own, self.cost(before, usage, context))

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
        standing = self.session.get(model) or self.owner.get(model)
        if standing is not None and any(new < old for new, old in zip(price.rates, standing.rates, strict=True)):
            raise ConfigError(f"model: {model!r} has a price already, and a session cannot lower it; the owner can")
        if standing is None:
            self._check_against_book(model, price, at_unix)
        return replace(self, session={**self.session, model: price})

    def _check_against_book(self, model: str, price: ModelPrice, at_unix: int) -> None:
        into, out, cached = price.rates
        usages: tuple[tuple[Usage, Decimal], ...] = (
            ({"input_tokens": _PER}, into),
            ({"output_tokens": _PER}, out),
            ({"input_tokens": _PER, "cache_read_tokens": _PER}, cached),
        )
        for provider in dict.fromkeys(endpoint.provider for endpoint in ENDPOINTS):
            for name in filter(None, (model, base_name(model))):
                known = self.book.find(provider, name, at_unix)
                if known is not None and any(self.book.cost(known, usage, {}) > rate for usage, rate in usages):
                    raise ConfigError(
                        f"model: the book prices {name!r} ({provider}), and a session cannot lower that; "
                        "the owner can, with Metering(models={…})"
                    )


def _priced(
    source: str, price: ModelPrice, provider: str, model: str, at_unix: int, *, before: PricedModel | None = None
) -> PricedModel:
    return PricedModel(
        provider=provider,
        model=model,
        at_unix=at_unix,
        source=source,
        version="",
        context_window=price.max_output or (None if before is None else before.context_window),
        units=_UNITS if before is None else _UNITS | before.units,
        contexts=frozenset() if before is None else before.contexts,
    )

"""Registered prices: the owner's replace those of the price book; a session's add models that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, Protocol

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.flow.ports import Usage
from x402guard.frozen import replace
from x402guard.kernel.rows import Nanos
from x402guard.llm.models import base_name
from x402guard.llm.routes import METERED_HOSTS
from x402guard.money import Dollars, dollars_to_nanos, nanos_to_decimal

_PER: Final = 1_000_000
_UNITS: Final = frozenset({"input_tokens", "output_tokens", "cache_read_tokens"})


@dataclass(frozen=True, kw_only=True)
class ModelPrice:
    """The price of a model, in dollars per million tokens.

    Args:
        input: for input that was not read from a cache.
        output: for output, hidden reasoning included.
        cached_input: for input read from a cache; default: the same as ``input``.
        max_output: the model's maximum output in tokens; calls without an output limit are held at it.

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
        """Return the exact cost of *usage* in dollars. Raises ``ValueError`` if cached input exceeds all input."""
        into, out, cached = self.rates
        read = usage.get("cache_read_tokens", 0)
        fresh = usage.get("input_tokens", 0) - read
        if fresh < 0:
            raise ValueError(f"{read} cached tokens are more than all input tokens")
        return (fresh * into + read * cached + usage.get("output_tokens", 0) * out) / _PER


def _nanos(name: str, price: Dollars) -> Nanos:
    try:
        return dollars_to_nanos(price, field=name)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{error} (dollars per million tokens)") from error


@dataclass(frozen=True)
class RegisteredBook:
    """A price book with registered prices in front of it.

    Attributes:
        book: prices all other models.
        owner_prices: name → price; it replaces the book's.
        session_prices: name → price, for a model without a price, or a higher price: a session never lowers one. Where the
            book lists the provider, no model costs less than its dearest one, unless the owner has given it a price.
    """

    book: PriceBook
    owner_prices: Mapping[str, ModelPrice] = field(default_factory=dict)
    session_prices: Mapping[str, ModelPrice] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """True once the book has loaded its data."""
        return bool(getattr(self.book, "ready", True))

    def find(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """Return the prices of a model (see ``PriceBook``)."""
        before = self._before(provider, model, at_unix)
        price = self.session_prices.get(model)
        return before if price is None else _priced("session", price, provider, model, at_unix, before=before)

    def suggest(self, provider: str, model: str) -> str | None:
        """Return a hint for an unknown name (see ``PriceBook``)."""
        asked: Callable[[str, str], str | None] | None = getattr(self.book, "suggest", None)
        return None if asked is None else asked(provider, model)

    def _before(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """Return the prices without the session's. For an unknown dated name that it prices, use the base model's."""
        price = self.owner_prices.get(model)
        if price is not None:
            return _priced("owner", price, provider, model, at_unix)
        found = self.book.find(provider, model, at_unix)
        base = base_name(model) if found is None and model in self.session_prices else None
        return found if base is None else self.book.find(provider, base, at_unix)

    def dearest(self, provider: str, at_unix: int) -> PricedModel | None:
        """Return a provider's dearest model (see ``PriceBook``)."""
        asked: Callable[[str, int], PricedModel | None] | None = getattr(self.book, "dearest", None)
        return None if asked is None else asked(provider, at_unix)

    def cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """Return the cost of *usage* (see ``PriceBook``)."""
        if priced.source == "owner" and priced.model in self.owner_prices:
            return self.owner_prices[priced.model].cost(usage)
        if priced.source != "session" or priced.model not in self.session_prices:
            return self.book.cost(priced, usage, context)
        own = self.session_prices[priced.model].cost(usage)
        floor = self._before(priced.provider, priced.model, priced.at_unix)
        if floor is None:  # an agent may name any price for a model that it has made up
            floor = self.dearest(priced.provider, priced.at_unix)
        return own if floor is None else max(own, self.cost(floor, _of_tokens(usage, floor), context))

    def extract(self, provider: str, flavour: str, answer: Mapping[str, Any]) -> Usage:
        """Return the usage that an answer states (see ``PriceBook``)."""
        return self.book.extract(provider, flavour, answer)

    def reads(self, provider: str, flavour: str) -> frozenset[str]:
        """Return the names of the counts that ``extract`` reads (see ``PriceBook``)."""
        asked: Callable[[str, str], frozenset[str]] | None = getattr(self.book, "reads", None)
        return frozenset() if asked is None else asked(provider, flavour)

    def register(self, model: str, price: ModelPrice, at_unix: int) -> RegisteredBook:
        """Return the book with one more price of a session.

        A session can price an unpriced model or raise a price. It cannot lower one, because that would bypass its
        budget. Raises ``ConfigError``.
        """
        if not isinstance(model, str) or not model.strip():
            raise ConfigError(f"model: {model!r} is not the name of a model")
        standing = self.session_prices.get(model) or self.owner_prices.get(model)
        if standing is not None and any(new < old for new, old in zip(price.rates, standing.rates, strict=True)):
            raise ConfigError(f"model: {model!r} has a price already; only the owner can lower it")
        if standing is None:
            self._check_against_book(model, price, at_unix)
        return replace(self, session_prices={**self.session_prices, model: price})

    def _check_against_book(self, model: str, price: ModelPrice, at_unix: int) -> None:
        into, out, cached = price.rates
        usages: tuple[tuple[Usage, Decimal], ...] = (
            ({"input_tokens": _PER}, into),
            ({"output_tokens": _PER}, out),
            ({"input_tokens": _PER, "cache_read_tokens": _PER}, cached),
        )
        for provider in dict.fromkeys(endpoint.provider for endpoint in METERED_HOSTS):
            for name in filter(None, (model, base_name(model))):
                known = self.book.find(provider, name, at_unix)
                if known is not None and any(self.book.cost(known, usage, {}) > rate for usage, rate in usages):
                    raise ConfigError(
                        f"model: the price book has a price for {name!r} ({provider}); only the owner can lower it, with "
                        "Metering(models={…})"
                    )


def _of_tokens(usage: Usage, priced: PricedModel) -> Usage:
    """Return the part of a usage that a model has prices for."""
    return {
        unit: count
        for unit, count in usage.items()
        if unit in priced.units or unit in ("input_tokens", "output_tokens")
    }


def _priced(
    source: str, price: ModelPrice, provider: str, model: str, at_unix: int, *, before: PricedModel | None = None
) -> PricedModel:
    return PricedModel(
        provider=provider,
        model=model,
        at_unix=at_unix,
        source=source,
        version="",
        context_window=None if before is None else before.context_window,
        max_output=price.max_output,
        units=_UNITS if before is None else _UNITS | before.units,
        contexts=frozenset() if before is None else before.contexts,
    )


class PricedModel(Struct, frozen=True):
    """The prices of one model at one moment: ``PriceBook.find`` returns it, and ``PriceBook.cost`` takes it.

    Attributes:
        provider: the provider's id in the book.
        model: the model's id in the book.
        at_unix: the moment, in unix seconds; prices change by date, and some by the hour.
        source, version: the source of the prices, for the ledger.
        context_window: the model's context window in tokens, or None if the book does not state it.
        max_output: the maximum output in tokens that the owner or the session has set, or None.
        units: the units with their own price.
        contexts: the (key, value) pairs with other prices, such as ``("service_tier", "flex")``.
    """

    provider: str
    model: str
    at_unix: int
    source: str
    version: str
    context_window: int | None
    units: frozenset[str]
    contexts: frozenset[tuple[str, str]] = frozenset()
    max_output: int | None = None


class PriceBook(Protocol):
    """The prices of models, and the reading of usage in answers. Makes no network requests."""

    def find(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """Return the prices of a model at *at_unix* (unix seconds), or None for an unknown model.

        Matches exact names only: the caller handles dated names.
        """

    def suggest(self, provider: str, model: str) -> str | None:
        """Return a sentence with a hint for an unknown name, or None."""

    def dearest(self, provider: str, at_unix: int) -> PricedModel | None:
        """Return the provider's dearest model for text at *at_unix* (unix seconds); None if the book lists none."""

    def cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """Return the cost of *usage* in dollars, exact and not rounded.

        *context* selects other prices from ``priced.contexts``. Raises ``ValueError`` for contradictory counts.
        """

    def extract(self, provider: str, flavour: str, answer: Mapping[str, Any]) -> Usage:
        """Return the usage that a provider's answer states. Raises ``ValueError`` if it states no readable usage."""

    def reads(self, provider: str, flavour: str) -> frozenset[str]:
        """Return the names, with dots, of the counts of a usage that ``extract`` reads."""


class TokenCounter(Protocol):
    """Counts tokens before a call, so that its worst case can be held. Has to be thread-safe."""

    def count(self, text: str, *, provider: str, model: str) -> int:
        """Return the number of tokens of *text* for a provider's *model*.

        Raises ``LookupError`` for a model without a known vocabulary. After any error, bytes are counted instead.
        """

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
from x402guard.vendors.model_price import ModelPrice, PriceTable, scaled
from x402guard.vendors.models import base_name
from x402guard.vendors.routes import METERED_HOSTS

_PER: Final = 1_000_000


LONG_WRITES: Final = "cache_write_12h_tokens"
"""The unit of tokens that OpenAI writes into a cache for 12 hours; they are among ``cache_write_tokens``, too."""
_LONG_WRITE: Final = 2
"""How many times the price of plain input one of them costs."""


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

    def family(self, provider: str, model: str, at_unix: int) -> str | None:
        """Return the name of the most similar model (see ``PriceBook``)."""
        asked: Callable[[str, str, int], str | None] | None = getattr(self.book, "family", None)
        return None if asked is None else asked(provider, model, at_unix)

    def _before(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """Return the prices without the session's. For an unknown dated name that it prices, use the base model's."""
        price = self.owner_prices.get(model)
        if price is not None:
            before = self._liked(provider, model, price, at_unix)
            if before is None and price.like is not None:
                return None
            return _priced("owner", price, provider, model, at_unix, before=before)
        found = self.book.find(provider, model, at_unix)
        base = base_name(model) if found is None and model in self.session_prices else None
        return found if base is None else self.book.find(provider, base, at_unix)

    def _liked(self, provider: str, model: str, price: ModelPrice, at_unix: int) -> PricedModel | None:
        """Return the book's prices that an owner's price is measured by: of the model that it names, or of the same name.

        A model of another provider is named with it: ``openai/gpt-6-sol``.
        """
        name = price.like or model
        found = self.book.find(provider, name, at_unix)
        home, _, bare = name.partition("/")
        return self.book.find(home, bare, at_unix) if found is None and price.like is not None and bare else found

    def _own_cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        price = self.owner_prices[priced.model]
        before = self._liked(priced.provider, priced.model, price, priced.at_unix)
        if price.like is not None:
            if before is None:
                raise ValueError(f"{price.like!r} is no longer in the book")
            other = self.owner_prices.get(price.like)
            if other is not None and other.like is None:  # which the owner has priced as well
                return (
                    self.cost(
                        _priced("owner", other, priced.provider, price.like, priced.at_unix, before=before),
                        usage,
                        context,
                    )
                    * price.times
                )
            return self.book.cost(before, usage, context) * price.times
        factors = [by for key, by in price.tier_factors.items() if key in context.values()]
        cost_at = getattr(self.book, "cost_at", None)
        if cost_at is None or (before is None and price.is_plain):
            return price.cost(usage) * max(factors, default=Decimal(1))
        table: PriceTable = price.table
        if before is not None:
            standard = self.book.table(before, {})
            table = price.completed(standard)
            others = {key: value for key, value in context.items() if value not in price.tier_factors}
            if others:
                table = scaled(table, standard, self.book.table(before, others))
        cost: Decimal = cost_at(table, usage)
        return cost * max(factors, default=Decimal(1))

    def dearest(self, provider: str, at_unix: int) -> PricedModel | None:
        """Return a provider's dearest model (see ``PriceBook``)."""
        asked: Callable[[str, int], PricedModel | None] | None = getattr(self.book, "dearest", None)
        return None if asked is None else asked(provider, at_unix)

    def cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """Return the cost of *usage* (see ``PriceBook``)."""
        if LONG_WRITES in usage:
            return self._with_long_writes(priced, usage, context)
        if priced.source == "owner" and priced.model in self.owner_prices:
            return self._own_cost(priced, usage, context)
        if priced.source != "session" or priced.model not in self.session_prices:
            return self.book.cost(priced, usage, context)
        own = self.session_prices[priced.model].cost(usage)
        floor = self._before(priced.provider, priced.model, priced.at_unix)
        if floor is None:  # an agent may name any price for a model that it has made up
            floor = self.dearest(priced.provider, priced.at_unix)
        return own if floor is None else max(own, self.cost(floor, _of_tokens(usage, floor), context))

    def is_flat(self, priced: PricedModel, context: Mapping[str, str]) -> bool:
        """Return whether a token costs the same in each request; False for prices of the owner or the session."""
        asked: Callable[..., bool] | None = getattr(self.book, "is_flat", None)
        return asked is not None and priced.source not in ("owner", "session") and asked(priced, context)

    def _with_long_writes(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """Return the cost of a usage with tokens kept in a cache for 12 hours, which no book has a unit for."""
        plain = {unit: count for unit, count in usage.items() if unit != LONG_WRITES}
        size = max(1, plain.get("input_tokens", 0))  # a longer request has other prices
        read, written = (
            self.cost(priced, {"input_tokens": size, **more}, context) / size
            for more in ({}, {"cache_write_tokens": size})
        )
        return self.cost(priced, plain, context) + usage[LONG_WRITES] * max(Decimal(0), _LONG_WRITE * read - written)

    def extract(self, provider: str, flavour: str, answer: Mapping[str, Any]) -> Usage:
        """Return the usage that an answer states (see ``PriceBook``)."""
        return self.book.extract(provider, flavour, answer)

    def reads(self, provider: str, flavour: str) -> frozenset[str]:
        """Return the names of the counts that ``extract`` reads (see ``PriceBook``)."""
        asked: Callable[[str, str], frozenset[str]] | None = getattr(self.book, "reads", None)
        return frozenset() if asked is None else asked(provider, flavour)

    def tier_factor(self, provider: str, model: str | None, tier: tuple[str, str], at_unix: int) -> Decimal | None:
        """Return how many times the standard price a tier costs (see ``PriceBook``)."""
        asked: Callable[..., Decimal | None] | None = getattr(self.book, "tier_factor", None)
        return None if asked is None else asked(provider, model, tier, at_unix)

    def table(self, priced: PricedModel, context: Mapping[str, str]) -> PriceTable:
        """Return the book's table of a model (see ``PriceBook``)."""
        return self.book.table(priced, context)

    def cost_at(self, table: PriceTable, usage: Usage) -> Decimal:
        """Return the cost of *usage* by a table (see ``PriceBook``)."""
        return self.book.cost_at(table, usage)

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
    own = {("processing" if tier == "batch" else key, tier) for tier in price.tier_factors for key in _TIERS}
    region = price.region_factor if price.like is not None or source == "session" else price.region_factor or Decimal(1)
    return PricedModel(
        provider=provider,
        model=model,
        at_unix=at_unix,
        source=source,
        version="",
        context_window=None if before is None else before.context_window,
        max_output=price.max_output,
        units=frozenset(price.table) | (frozenset() if before is None else before.units),
        contexts=frozenset(own) | (frozenset() if before is None else before.contexts),
        region_factor=region,
        like=price.like or "",
    )


_TIERS: Final = ("service_tier", "speed")


class PricedModel(Struct, frozen=True):
    """The prices of one model at one moment: ``PriceBook.find`` returns it, and ``PriceBook.cost`` takes it.

    Attributes:
        provider: the provider's id in the book.
        model: the model's id in the book.
        at_unix: the moment, in unix seconds; prices change by date, and some by the hour.
        source, version: the source of the prices, for the ledger.
        context_window: the model's context window in tokens, or None if the book does not state it.
        max_output: the maximum output in tokens that the owner or the session has set, or None.
        region_factor: the owner's factor at regional hosts; None for the vendor's.
        like: the model of the book that the owner's price is like, or "".
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
    region_factor: Decimal | None = None
    like: str = ""

    @property
    def known_as(self) -> str:
        """The name by which windows, pictures and regions of the model are known."""
        return self.like.rpartition("/")[2] or self.model


class PriceBook(Protocol):
    """The prices of models, and the reading of usage in answers. Makes no network requests."""

    def find(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """Return the prices of a model at *at_unix* (unix seconds), or None for an unknown model.

        Matches exact names only: the caller handles dated names.
        """

    def suggest(self, provider: str, model: str) -> str | None:
        """Return a sentence with a hint for an unknown name, or None."""

    def family(self, provider: str, model: str, at_unix: int) -> str | None:
        """Return the name of the provider's text model that is the most similar one, or its dearest; None for no model."""

    def dearest(self, provider: str, at_unix: int) -> PricedModel | None:
        """Return the provider's dearest model for text at *at_unix* (unix seconds); None if the book lists none."""

    def cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """Return the cost of *usage* in dollars, exact and not rounded.

        *context* selects other prices from ``priced.contexts``. Raises ``ValueError`` for contradictory counts.
        """

    def is_flat(self, priced: PricedModel, context: Mapping[str, str]) -> bool:
        """Return whether each token of text costs the same, however long a request is. A book may lack this method."""

    def extract(self, provider: str, flavour: str, answer: Mapping[str, Any]) -> Usage:
        """Return the usage that a provider's answer states. Raises ``ValueError`` if it states no readable usage."""

    def reads(self, provider: str, flavour: str) -> frozenset[str]:
        """Return the names, with dots, of the counts of a usage that ``extract`` reads."""

    def tier_factor(self, provider: str, model: str | None, tier: tuple[str, str], at_unix: int) -> Decimal | None:
        """Return how many times the standard price a *tier* costs at *at_unix*, for a model of that name at any provider.

        For None as the model: the most that any tier of the provider's does. None if the book does not say.
        """

    def table(self, priced: PricedModel, context: Mapping[str, str]) -> PriceTable:
        """Return all prices of a model in a context, in dollars for one of each unit."""

    def cost_at(self, table: PriceTable, usage: Usage) -> Decimal:
        """Return the cost of *usage* by a table, in dollars, exact and not rounded. Raises as ``cost``."""


class TokenCounter(Protocol):
    """Counts tokens before a call, so that its worst case can be held. Has to be thread-safe."""

    def count(self, text: str, *, provider: str, model: str) -> int:
        """Return the number of tokens of *text* for a provider's *model*.

        Raises ``LookupError`` for a model without a known vocabulary. After any error, bytes are counted instead.
        """

"""Prices that people give: the owner's in place of the book's, a session's for what the book lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final, Protocol

from x402guard.errors import ConfigError
from x402guard.flow.ports import Usage
from x402guard.llm.models import base_name
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


@dataclass(frozen=True, slots=True)
class PricedModel:
    """One model's prices as they stood at one moment: what a price book finds, and is shown again to work out a cost.

    Attributes:
        provider: the provider's id in the book.
        model: the model's id in the book.
        at_unix: the moment, in unix seconds; prices change by date, and some by the hour.
        source, version: where the prices are from, for the ledger.
        context_window: tokens that the model can take, or None where the book does not say.
        units: the units that have a price of their own.
        contexts: the (key, value) pairs that the model has other prices for, such as ``("service_tier", "flex")``.
    """

    provider: str
    model: str
    at_unix: int
    source: str
    version: str
    context_window: int | None
    units: frozenset[str]
    contexts: frozenset[tuple[str, str]] = frozenset()


class PriceBook(Protocol):
    """What models cost, and how providers say what was used. Fetches nothing from a network."""

    def find(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """Return the prices of a model at a moment (unix seconds), or None for one that the book does not know.

        Exact names alone: the rules about dated names are not the book's.
        """

    def suggest(self, provider: str, model: str) -> str | None:
        """Return a sentence on what an unknown name may have been meant for, or None."""

    def cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """Return what *usage* costs in dollars, exact and not rounded.

        *context* chooses other prices out of ``priced.contexts``. Raises ``ValueError`` for counts that contradict each other.
        """

    def extract(self, provider: str, flavour: str, answer: Mapping[str, Any]) -> Usage:
        """Return the usage that a provider's answer states. Raises ``ValueError`` where it states none that can be read."""


class TokenCounter(Protocol):
    """Counts tokens before a call, so that its worst case can be held. Used from several threads at once."""

    def count(self, text: str, *, provider: str, model: str) -> int:
        """Return how many tokens *text* is for a provider's *model*.

        Raises ``LookupError`` for a model whose vocabulary it does not have. Whatever it raises, bytes are counted instead.
        """

"""``GenaiPriceBook``: the price book on genai-prices, with bundled prices or an imported file. No network access."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Context, Decimal
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from x402guard.flow.ports import Usage
from x402guard.vendors.genai_usage import bundled, extractor_of, names_read
from x402guard.vendors.model_price import PriceTable, Tiers
from x402guard.vendors.prices import PricedModel

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import (
        ModelInfo,
        ModelPrice,
        Provider,
        StartDateConstraint,
        TimeOfDateConstraint,
    )

K = TypeVar("K")
V = TypeVar("V")

_MAKERS: Final = ("openai", "anthropic", "google", "mistral", "cohere", "deepseek")
_LONGEST_NAME: Final = 300
_MOST_NAMES: Final = 10_000


class GenaiPriceBook:
    """Prices and usage extractors of the providers in genai-prices.

    Args:
        snapshot: genai-prices data in place of the bundled data.
        source, version: the source of the prices, as written in the ledger.
    """

    def __init__(
        self, snapshot: DataSnapshot | None = None, *, source: str = "genai-prices", version: str | None = None
    ) -> None:
        self._snapshot = snapshot
        self._source = source
        self._version = version
        self._names: dict[tuple[str, str], tuple[Provider, ModelInfo] | None] = {}
        self._priced: dict[tuple[str, str], _Priced] = {}
        self._dearest: dict[tuple[str, int], PricedModel | None] = {}
        self._found: dict[tuple[object, ...], PricedModel] = {}
        self._rates: dict[tuple[object, ...], tuple[ModelPrice, _Line | None]] = {}
        self._tiers: dict[int, tuple[_Tier, ...]] = {}
        self._in_force: dict[tuple[int, int], tuple[bool, ...]] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_raw(cls, providers: list[Any], *, source: str, version: str) -> GenaiPriceBook:
        """Return the book of *providers*, decoded JSON in genai-prices' format. Raises ``ValueError`` if invalid."""
        from genai_prices.data_snapshot import DataSnapshot
        from genai_prices.types import _providers_from_raw

        snapshot = DataSnapshot(providers=_providers_from_raw(providers), from_auto_update=False)
        book = cls(snapshot, source=source, version=version)
        for provider, model in book.names():
            for label, price in book.every_price(provider, model, 0).items():
                if not price.is_finite() or price < 0:
                    raise ValueError(f"{provider}'s {model} has the price {price} for {label}")
        return book

    @property
    def ready(self) -> bool:
        """True once the prices have loaded."""
        return self._snapshot is not None

    @property
    def snapshot(self) -> DataSnapshot:
        """The data, loaded on first use."""
        with self._lock:
            if self._snapshot is None:
                import genai_prices
                from genai_prices.data_snapshot import DataSnapshot

                self._version = self._version or genai_prices.__version__
                # Not genai-prices' global snapshot: other code in the process may update that from the network.
                self._snapshot = DataSnapshot(providers=bundled(), from_auto_update=False)
            return self._snapshot

    def find(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """Return the prices of a model (see ``PriceBook``)."""
        found = self._look_up(provider, model)
        if found is None:
            return None
        home, info = found
        at_unix = _off_peak(at_unix) if provider == "deepseek" else at_unix
        key = (provider, model, self._conditions_at(self._know(home, info), at_unix))
        priced = self._found.get(key)
        if priced is None:
            priced = _keep(self._found, key, self._priced_model(home, info, at_unix))
        return replace(priced, at_unix=at_unix)

    def _conditions_at(self, known: _Priced, at_unix: int) -> tuple[bool, ...]:
        """Return which conditions of a model's prices hold at *at_unix*: the same ones, the same prices."""
        if not known.conditions:
            return ()
        key = (id(known.info), at_unix)
        holding = self._in_force.get(key)
        if holding is None:
            moment = _moment(at_unix)
            holding = _keep(self._in_force, key, tuple(each.active(moment) for each in known.conditions))
        return holding

    def _priced_model(self, home: Provider, info: ModelInfo, at_unix: int) -> PricedModel:
        prices = info.get_prices(_moment(at_unix))
        variants = info.price_variants or () if any(info is own for own in home.models) else ()
        return PricedModel(
            provider=home.id,
            model=info.id,
            at_unix=at_unix,
            source=self._source,
            version=self._version or "",
            context_window=info.context_window,
            units=frozenset(unit for unit, key in _price_keys().items() if getattr(prices, key) is not None),
            contexts=frozenset(
                pair
                for variant in variants
                if variant.constraint is None or variant.constraint.active(_moment(at_unix))
                for pair in variant.when.items()
            ),
        )

    def cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """Return the cost of *usage* (see ``PriceBook``). Of several matching contexts, the first one counts."""
        known = self._priced.get((priced.provider, priced.model))
        if known is None:
            raise ValueError(f"{priced.provider}'s {priced.model!r} was not found in this book")
        prices, line = self._rates_of(priced, known, context)
        if line is not None and usage.keys() <= _PLAIN:
            into, out = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
            if type(into) is int and type(out) is int and into >= 0 and out >= 0:
                return line.cost(into, out)
        return _cost_of(prices, usage)

    def is_flat(self, priced: PricedModel, context: Mapping[str, str]) -> bool:
        """Return whether text costs the same for each token, however long a request is (see ``PriceBook``)."""
        known = self._priced.get((priced.provider, priced.model))
        return known is not None and self._rates_of(priced, known, context)[1] is not None

    def _know(self, home: Provider, info: ModelInfo) -> _Priced:
        key = (home.id, info.id)
        known = self._priced.get(key)
        if known is None or known.info is not info:
            known = self._priced[key] = _Priced(info, tuple(_conditions_of(info)))
        return known

    def _rates_of(
        self, priced: PricedModel, known: _Priced, context: Mapping[str, str]
    ) -> tuple[ModelPrice, _Line | None]:
        info = known.info
        chosen = {key: value for key, value in context.items() if (key, value) in priced.contexts} if context else {}
        # Two models of the book may have one id, and the book keeps all of them: the object tells them apart.
        key = (id(info), self._conditions_at(known, priced.at_unix), *chosen.items())
        rates = self._rates.get(key)
        if rates is None:
            prices: ModelPrice = info.get_prices(_moment(priced.at_unix), chosen or None)
            rates = _keep(self._rates, key, (prices, _line_of(prices)))
        return rates

    def extract(self, provider: str, flavour: str, answer: Mapping[str, Any]) -> Usage:
        """Return the usage that an answer states (see ``PriceBook``)."""
        try:
            _, counts = extractor_of(provider, flavour).extract(answer)
            return {key: int(value) for key, value in vars(counts).items()}
        except (AttributeError, TypeError, LookupError) as error:  # a field of another type than the extractor expects
            raise ValueError(f"the usage cannot be read: {type(error).__name__}") from error

    def reads(self, provider: str, flavour: str) -> frozenset[str]:
        """Return the names of the counts that ``extract`` reads (see ``PriceBook``)."""
        return names_read(provider, flavour)

    def suggest(self, provider: str, model: str) -> str | None:
        """Return a hint for an unknown name (see ``PriceBook``)."""
        from difflib import get_close_matches  # for an error

        near = get_close_matches(model, [name for home, name in self.names() if home == provider], n=1, cutoff=0.85)
        if near:
            return f"did you mean {near[0]!r}?"
        others = [home for home in _MAKERS if home != provider and self._look_up(home, model) is not None]
        return f"it is {others[0]}'s." if others else None

    def family(self, provider: str, model: str, at_unix: int) -> str | None:
        """Return the name of the most similar model (see ``PriceBook``)."""
        from difflib import get_close_matches  # for an error

        near = get_close_matches(model, [name for home, name in self.names() if home == provider], n=5, cutoff=0.75)
        for name in near:
            found = self.find(provider, name, at_unix)
            if found is not None and {"input_tokens", "output_tokens"} <= found.units:
                return name
        dearest = self.dearest(provider, at_unix)
        return None if dearest is None else dearest.model

    def dearest(self, provider: str, at_unix: int) -> PricedModel | None:
        """Return a provider's dearest model for text (see ``PriceBook``): by a token of input and one of output."""
        day = at_unix // 86_400
        try:
            return self._dearest[provider, day]
        except KeyError:
            return _keep(self._dearest, (provider, day), self._find_dearest(provider, at_unix))

    def _find_dearest(self, provider: str, at_unix: int) -> PricedModel | None:
        homes = {provider, "openai"} if provider == "azure" else {provider}  # Azure sells OpenAI's models
        listed = [
            (self._priced_model(home, info, at_unix), home, info)
            for home in self.snapshot.providers
            if home.id in homes
            for info in home.models
        ]
        for_text = [each for each in listed if {"input_tokens", "output_tokens"} <= each[0].units]
        one: Usage = {"input_tokens": 1, "output_tokens": 1}
        for _, home, info in for_text:
            self._know(home, info)
        return max((each[0] for each in for_text), key=lambda priced: self.cost(priced, one, {}), default=None)

    def listing(self, at_unix: int) -> Iterator[tuple[str, str, Mapping[str, Decimal]]]:
        """Yield (provider, model, unit → price) at *at_unix* (unix seconds); the first tier of a tiered price.

        Prices are in dollars per million tokens or per thousand searches.
        """
        for provider in self.snapshot.providers:
            for info in provider.models:
                prices = info.get_prices(_moment(at_unix))
                found = {unit: getattr(prices, key) for unit, key in _price_keys().items()}
                yield (
                    provider.id,
                    info.id,
                    {unit: getattr(price, "base", price) for unit, price in found.items() if price is not None},
                )

    def tier_factor(self, provider: str, model: str | None, tier: tuple[str, str], at_unix: int) -> Decimal | None:
        """Return how many times the standard price a tier costs (see ``PriceBook``)."""
        day = at_unix // 86_400
        if day not in self._tiers:
            _keep(self._tiers, day, tuple(self._find_tiers(at_unix)))
        if model is None:
            homes = {provider, "openai"} if provider == "azure" else {provider}
            return max((row.times for row in self._tiers[day] if row.provider in homes), default=None)
        return max((row.times for row in self._tiers[day] if (row.model, row.tier) == (model, tier)), default=None)

    def _find_tiers(self, at_unix: int) -> Iterator[_Tier]:
        for home in self.snapshot.providers:
            for info in home.models:
                if not info.price_variants:
                    continue
                self._know(home, info)
                priced = self._priced_model(home, info, at_unix)
                standard = self.table(priced, {})
                for key, value in priced.contexts:
                    tier = self.table(priced, {key: value})
                    times = [
                        price / known[start]
                        for unit, tiers in tier.items()
                        for known in (dict(standard.get(unit, ())),)
                        for start, price in tiers
                        if known.get(start)
                    ]
                    if times:
                        yield _Tier(home.id, info.id, (key, value), max(Decimal(1), *times))

    def table(self, priced: PricedModel, context: Mapping[str, str]) -> PriceTable:
        """Return all prices of a model in a context (see ``PriceBook``)."""
        known = self._priced.get((priced.provider, priced.model))
        if known is None:
            raise ValueError(f"{priced.provider}'s {priced.model!r} was not found in this book")
        prices, _ = self._rates_of(priced, known, context)
        found: dict[str, Tiers] = {}
        for unit, key in _price_keys().items():
            price, per = getattr(prices, key), _measures()[unit]
            if price is not None:
                more = ((tier.start, tier.price / per) for tier in getattr(price, "tiers", ()))
                found[unit] = ((0, getattr(price, "base", price) / per), *more)
        return found

    def cost_at(self, table: PriceTable, usage: Usage) -> Decimal:
        """Return the cost of *usage* by a table (see ``PriceBook``)."""
        return _cost_of(_prices_of(tuple(table.items())), usage)

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield (provider, name) for every model: its id and every other name that the book lists for it."""
        for provider in self.snapshot.providers:
            for name in dict.fromkeys(name for info in provider.models for name in (info.id, *_names_of(info.match))):
                yield provider.id, name

    def every_price(self, provider: str, name: str, at_unix: int) -> Mapping[str, Decimal]:
        """Return label → price for all prices of a model (any time, tier, context); empty for an unknown name.

        The label of a price in force at *at_unix* (unix seconds) is its unit. Other labels add the condition:
        ``input_tokens above 200000``, ``input_tokens (processing=batch)``, ``input_tokens from 2027-02-01``.
        """
        found = self._look_up(provider, name)
        if found is None:
            return {}
        info = found[1]
        prices = dict(_leaves(info.get_prices(_moment(at_unix)), ""))
        for conditional in info.prices if isinstance(info.prices, list) else ():
            if conditional.constraint is not None:
                prices |= dict(_leaves(conditional.prices, _when(conditional.constraint)))
        for variant in info.price_variants or ():
            chosen = ", ".join(f"{key}={value}" for key, value in sorted(variant.when.items()))
            prices |= dict(_leaves(variant.prices, f" ({chosen})"))
        return prices

    def _look_up(self, provider: str, model: str) -> tuple[Provider, ModelInfo] | None:
        if len(model) > _LONGEST_NAME:
            return None  # an answer may name anything, and what was looked up is kept
        key = (provider, model)
        try:
            return self._names[key]
        except KeyError:
            home = next((p for p in self.snapshot.providers if p.id == provider), None)
            info = None if home is None else home.find_model(model, all_providers=self.snapshot.providers)
            return _keep(self._names, key, None if home is None or info is None else (home, info))


_PER: Final = 1_000_000
_PER_TOKEN: Final = Decimal(_PER)
_EXACT: Final = Context(prec=1_000)
_PLAIN: Final = frozenset({"input_tokens", "output_tokens"})


class _Line(Struct, frozen=True):
    """The cost of text at prices without tiers: of the request, of a token in and of a token out.

    Whole multiples of ``10**-places`` dollars: to multiply and add integers takes a fifth of what decimals take.
    """

    request: int
    into: int
    out: int
    places: int

    def cost(self, into: int, out: int) -> Decimal:
        """Return the cost of so many tokens in dollars, exactly."""
        return Decimal(self.request + self.into * into + self.out * out).scaleb(-self.places, _EXACT)


class _Tier(Struct, frozen=True):
    """A tier of the book, and how many times the standard price of its model it costs."""

    provider: str
    model: str
    tier: tuple[str, str]
    times: Decimal


class _Priced(Struct, frozen=True):
    """A model that was found, and the conditions on the date and the hour that its prices have."""

    info: ModelInfo
    conditions: tuple[StartDateConstraint | TimeOfDateConstraint, ...]


def _cost_of(prices: ModelPrice, usage: Usage) -> Decimal:
    from genai_prices import Usage as Counts

    unknown = sorted(usage.keys() - _price_keys().keys())
    if unknown:
        raise ValueError(f"{unknown[0]} is not a unit with prices")
    return Decimal(prices.calc_price(Counts(**_with_overlaps(usage)))["total_price"])


def _with_overlaps(usage: Usage) -> Usage:
    """Return a usage that says how many cached tokens are of sound or pictures: as few as it leaves room for, the dearest."""
    into, more = usage.get("input_tokens", 0), dict[str, int]()
    for way in ("read", "write"):
        cached = usage.get(f"cache_{way}_tokens", 0)
        for kind in ("audio", "image", "video") if cached else ():
            of_kind, both = usage.get(f"input_{kind}_tokens", 0), f"cache_{kind}_{way}_tokens"
            if of_kind and both not in usage:
                more[both] = max(0, cached + of_kind - into)
    return {**usage, **more} if more else usage


def _line_of(prices: ModelPrice) -> _Line | None:
    """Return the line, as genai-prices computes its points; None if prices have tiers or lack a kind of token."""
    if any(hasattr(price, "tiers") for price in vars(prices).values()):
        return None
    points: tuple[Usage, ...] = ({}, {"input_tokens": _PER}, {"output_tokens": _PER})
    try:
        request, into, out = (_cost_of(prices, point) for point in points)
    except ValueError:
        return None  # the price of such a model is asked for each time, and the error with it
    costs = (request, _EXACT.divide(into - request, _PER_TOKEN), _EXACT.divide(out - request, _PER_TOKEN))
    places = max(0, *(-int(cost.as_tuple().exponent) for cost in costs))
    of_request, of_into, of_out = (int(cost.scaleb(places, _EXACT)) for cost in costs)
    return _Line(of_request, of_into, of_out, places)


def _conditions_of(info: ModelInfo) -> Iterator[StartDateConstraint | TimeOfDateConstraint]:
    conditional = info.prices if isinstance(info.prices, list) else []
    for each in (*conditional, *(info.price_variants or ())):
        if each.constraint is not None:
            yield each.constraint


def _keep(known: dict[K, V], key: K, value: V) -> V:
    """Keep *value* and return it. Another thread may clear what is known at any time, so no caller reads it again."""
    if len(known) > _MOST_NAMES:
        known.clear()
    known[key] = value
    return value


@cache
def _price_keys() -> Mapping[str, str]:
    """Return unit → the name of its price."""
    from genai_prices.data_units import unit_data

    return {unit: str(facts["price_key"]) for unit, facts in unit_data.items()}


@cache
def _measures() -> Mapping[str, int]:
    """Return unit → how many of it a price is for."""
    from genai_prices.data_units import unit_data

    return {unit: int(str(facts["per"])) for unit, facts in unit_data.items()}


@lru_cache(maxsize=_MOST_NAMES)
def _prices_of(table: tuple[tuple[str, Tiers], ...]) -> ModelPrice:
    """Return a table as genai-prices has it."""
    from genai_prices.types import ModelPrice, Tier, TieredPrices

    prices: dict[str, Any] = {}
    for unit, ((_, first), *more) in table:
        if unit in _measures():
            per = _measures()[unit]
            tiers = [Tier(start, price * per) for start, price in more]
            prices[_price_keys()[unit]] = TieredPrices(first * per, tiers) if tiers else first * per
    return ModelPrice(**prices)


def _leaves(prices: ModelPrice, suffix: str) -> Iterator[tuple[str, Decimal]]:
    for unit, key in _price_keys().items():
        price = getattr(prices, key)
        if price is None:
            continue
        yield f"{unit}{suffix}", getattr(price, "base", price)
        for tier in getattr(price, "tiers", ()):
            yield f"{unit} above {tier.start}{suffix}", tier.price


def _when(constraint: StartDateConstraint | TimeOfDateConstraint) -> str:
    start = getattr(constraint, "start_date", None)
    if start is not None:
        return f" from {start}"
    return f" at {getattr(constraint, 'start_time', '')}-{getattr(constraint, 'end_time', '')}"


def _names_of(match: Any) -> Iterator[str]:
    """Yield the exact names in a matching rule of the book."""
    if isinstance(name := getattr(match, "equals", None), str):
        yield name
    for inner in getattr(match, "or_", ()):
        yield from _names_of(inner)


def _off_peak(at_unix: int) -> int:
    """Return a moment of the same day with DeepSeek's prices: its peak hours are those of weekdays, which no book says.

    Source: api-docs.deepseek.com/quick_start/pricing. Days of Beijing; no peak hour is of another day in UTC.
    """
    day = at_unix // _DAY_S
    is_weekend = (day + 3) % 7 >= 5  # day 0 was a Thursday
    return day * _DAY_S + _DAY_S // 2 if is_weekend else at_unix


_DAY_S: Final = 86_400


def _moment(at_unix: int) -> datetime:
    return datetime.fromtimestamp(at_unix, UTC)

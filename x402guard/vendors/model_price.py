"""``ModelPrice``: the owner's price of a model, whole or in part; a price book completes what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.flow.ports import Usage
from x402guard.kernel.rows import Nanos
from x402guard.money import Dollars, dollars_to_nanos, nanos_to_decimal

Tiers = tuple[tuple[int, Decimal], ...]
"""The price of one unit in dollars, by the input tokens of the request from which it holds: the first is from 0."""

PriceTable = Mapping[str, Tiers]
"""The prices of a model by unit of the price book."""

_PER: Final = 1_000_000
_NAMED: Final = {"input": "input_tokens", "output": "output_tokens", "cached_input": "cache_read_tokens"}
_MOST_FACTOR: Final = Decimal(1_000)

UNITS: Final = frozenset(
    {
        *(f"{kind}{end}_tokens" for kind in ("input", "output") for end in ("", "_text", "_audio", "_image", "_video")),
        *(f"cache{kind}_read_tokens" for kind in ("", "_text", "_audio", "_image", "_video")),
        "cache_write_tokens", "cache_write_5m_tokens", "cache_write_1h_tokens",
        "input_characters", "audio_seconds", "input_audio_seconds", "output_audio_seconds", "input_images", "input_pixels",
        "input_document_pages", "rerank_searches", "web_searches", "social_searches",
        "storage_searches", "code_executions", "requests",
    }
)  # fmt: skip
"""The units that a price may have: tokens by the million, all others each."""


@dataclass(frozen=True, kw_only=True)
class ModelPrice:
    """The price of a model, in dollars per million tokens.

    Where the price book knows the model, it completes what is not said: dearer kinds of tokens, longer requests and
    dearer tiers cost as many times the price as they do in the book.

    Args:
        input: for input that was not read from a cache.
        output: for output, hidden reasoning included.
        cached_input: for input read from a cache; default: the same as ``input``.
        max_output: the model's maximum output in tokens; calls without an output limit are held at it.
        units: unit → price, in dollars per million tokens, or for each one of what is no token:
            ``{"cache_write_1h_tokens": "6.00", "input_audio_seconds": "0.0001", "requests": "0.005"}``.
        above: input tokens → the prices of a longer request: ``{272_000: {"input": "4.40", "output": "16.50"}}``; an
            empty one says that there are none.
        tiers: a tier's name → the factor on every token price there: ``{"priority": "2.5", "batch": "0.5"}``.
        region: the factor on every token price at a regional host; default: 1.
        like: a model of the book whose prices hold, in place of all others, times ``factor``.
        factor: see ``like``.

    Raises ``ConfigError`` naming the argument.
    """

    input: Dollars | None = None
    output: Dollars | None = None
    cached_input: Dollars | None = None
    max_output: int | None = None
    units: Mapping[str, Dollars] = field(default_factory=dict)
    above: Mapping[int, Mapping[str, Dollars]] | None = None
    tiers: Mapping[str, Dollars] = field(default_factory=dict)
    region: Dollars | None = None
    like: str | None = None
    factor: Dollars | None = None
    rates: tuple[Decimal, Decimal, Decimal] = field(init=False, repr=False, compare=False)
    table: PriceTable = field(init=False, repr=False, compare=False)
    tier_factors: Mapping[str, Decimal] = field(init=False, repr=False, compare=False)
    region_factor: Decimal | None = field(init=False, repr=False, compare=False)
    times: Decimal = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_output is not None and (type(self.max_output) is not int or self.max_output < 1):
            raise ConfigError(f"max_output: {self.max_output!r} is not a number of tokens")
        if self.like is not None:
            self._check_like()
        elif self.factor is not None:
            raise ConfigError('factor: it is on the prices of another model; name that with like="…"')
        zero = Decimal(0)
        plain = (zero, zero, zero) if self.like is not None else self._plain_rates()
        self._set("rates", plain)
        self._set("table", {} if self.like is not None else self._read_table(plain))
        for name in ("units", "tiers"):
            self._set(name, dict(_mapping(name, getattr(self, name))))
        self._set(
            "tier_factors", {plain_tier(str(tier)): _factor(f"tiers[{tier!r}]", by) for tier, by in self.tiers.items()}
        )
        self._set("region_factor", None if self.region is None else _factor("region", self.region))
        self._set("times", Decimal(1) if self.factor is None else _factor("factor", self.factor))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_like(self) -> None:
        if not isinstance(self.like, str) or not self.like.strip():
            raise ConfigError(f"like: {self.like!r} is not the name of a model")
        given = [name for name in ("input", "output", "cached_input", "above") if getattr(self, name) is not None]
        given += [name for name in ("units", "tiers") if getattr(self, name)]
        if given:
            raise ConfigError(f"{given[0]}: {self.like!r} says all prices; leave out {given[0]}, or like")

    def _plain_rates(self) -> tuple[Decimal, Decimal, Decimal]:
        for name in ("input", "output"):
            if getattr(self, name) is None:
                raise ConfigError(f'{name}: it is missing; write {name}="2.00", or like="the name of a model"')
        given = (self.input, self.output, self.input if self.cached_input is None else self.cached_input)
        into, out, cached = (_price(name, price) for name, price in zip(_NAMED, given, strict=True))
        return into, out, cached

    def _read_table(self, plain: tuple[Decimal, Decimal, Decimal]) -> PriceTable:
        prices = {unit: price / _PER for unit, price in zip(_NAMED.values(), plain, strict=True)}
        prices |= {_unit(f"units.{name}", name): _each("units", name, price)
                   for name, price in _mapping("units", self.units).items()}  # fmt: skip
        prices = _with_parts(prices)
        table: dict[str, Tiers] = {unit: ((0, price),) for unit, price in prices.items()}
        longer = {} if self.above is None else _mapping("above", self.above)
        for start, more in sorted((_start(start), more) for start, more in longer.items()):
            known = {_unit(f"above[{start}].{name}", _NAMED.get(name, name)): name for name in _mapping("above", more)}
            new = known.keys() - table.keys()
            if new:
                raise ConfigError(
                    f"above[{start}].{known[min(new)]}: it has no price for shorter requests; name it in units too"
                )
            if self.cached_input is None and "input_tokens" in known:
                known.setdefault("cache_read_tokens", known["input_tokens"])
            for unit, tiers in table.items():
                name = known.get(unit)
                price = tiers[-1][1] if name is None else _each(f"above[{start}]", name, more[name])
                table[unit] = (*tiers, (start, price))
        return table

    @property
    def is_plain(self) -> bool:
        """True if input, output and cached input say all: without tiers, other units, or another model's prices."""
        return self.like is None and not self.units and not self.above

    def cost(self, usage: Usage) -> Decimal:
        """Return the exact cost of *usage* in dollars. Raises ``ValueError`` if cached input exceeds all input."""
        into, out, cached = self.rates
        read = usage.get("cache_read_tokens", 0)
        fresh = usage.get("input_tokens", 0) - read
        if fresh < 0:
            raise ValueError(f"{read} cached tokens are more than all input tokens")
        return (fresh * into + read * cached + usage.get("output_tokens", 0) * out) / _PER

    def completed(self, book: PriceTable) -> PriceTable:
        """Return the table with what *book*, the price book's table of the model, says beyond it."""
        table = dict(self.table)
        for unit, tiers in book.items():
            if unit in table:
                if self.above is None and tiers[0][1]:
                    own, first = table[unit][0][1], tiers[0][1]
                    table[unit] = ((0, own), *((start, _times(own, price, first)) for start, price in tiers[1:]))
            elif unit.endswith("_tokens"):
                whole = "output_tokens" if unit.startswith("output_") else "input_tokens"
                mine, standard = table[whole], book.get(whole, ())
                table[unit] = tuple(
                    (start, _times(_at(mine, start), _at(tiers, start), _at(standard, start)))
                    for start in sorted({each[0] for each in (*mine, *tiers)})
                )
            else:
                table[unit] = tiers
        return table


def _at(tiers: Tiers, start: int) -> Decimal:
    """Return the price of a request of so many tokens; 0 for a unit without a price."""
    return next((price for begins, price in reversed(tiers) if begins <= start), Decimal(0))


def _times(own: Decimal, price: Decimal, standard: Decimal) -> Decimal:
    """Return *own* times what *price* is of the book's *standard* one, at least *own*: a cheaper one is the book's alone."""
    return max(own, own * price / standard) if standard else own


def plain_tier(name: str) -> str:
    """Return a tier's name in lower case, without Google's prefixes."""
    return name.lower().removeprefix("service_tier_").removeprefix("on_demand_")


def scaled(table: PriceTable, standard: PriceTable, dearer: PriceTable) -> PriceTable:
    """Return *table* times what a tier costs in the book, where it costs more than the *standard* one."""
    found = {}
    for unit, tiers in table.items():
        before, after = dict(standard.get(unit, ())), dict(dearer.get(unit, ()))
        found[unit] = tuple(
            (start, _times(price, after.get(start, after.get(0, price)), before.get(start, before.get(0, price))))
            for start, price in tiers
        )
    return found


def _with_parts(given: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """Return prices with those that the book wants beside them: of what a unit is a part of, or has in common with another.

    What is not said costs the dearer of the two.
    """
    prices = dict(given)
    if prices.keys() & {"input_audio_seconds", "output_audio_seconds"}:
        prices.setdefault(
            "audio_seconds", max(prices.get(f"{way}_audio_seconds", Decimal(0)) for way in ("input", "output"))
        )
    if any(unit.startswith("cache_write_") for unit in prices):
        prices.setdefault("cache_write_tokens", prices["input_tokens"])
    for kind in ("text", "audio", "image", "video"):
        whole, read, written = (
            f"{name}_tokens" for name in (f"input_{kind}", f"cache_{kind}_read", f"cache_{kind}_write")
        )
        if read in prices:
            prices.setdefault(whole, prices["input_tokens"])
        if whole in prices:
            prices.setdefault(read, max(prices[whole], prices["cache_read_tokens"]))
            if "cache_write_tokens" in prices:
                prices.setdefault(written, max(prices[whole], prices["cache_write_tokens"]))
            for keep in ("5m", "1h"):
                if f"cache_write_{keep}_tokens" in prices:
                    longer = f"cache_{kind}_write_{keep}_tokens"
                    prices.setdefault(longer, max(prices[whole], prices[f"cache_write_{keep}_tokens"]))
    return prices


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: {value!r} is not a mapping")
    return value


def _unit(field_name: str, unit: str) -> str:
    if unit not in UNITS:
        from difflib import get_close_matches  # for an error

        near = get_close_matches(str(unit), UNITS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see docs/reference/metering.md"
        raise ConfigError(f"{field_name}: {unit!r} is not a unit with a price; {hint}")
    return unit


def _each(where: str, name: str, price: Dollars) -> Decimal:
    dollars = _price(f"{where}.{name}", price)
    return dollars / _PER if _NAMED.get(name, name).endswith("_tokens") else dollars


def _start(start: object) -> int:
    text = str(start).replace("_", "")
    if isinstance(start, bool) or not text.isdecimal() or not 0 < int(text) < 10**12:
        raise ConfigError(f"above: {start!r} is not a number of input tokens, such as 200_000")
    return int(text)


def _factor(name: str, by: Dollars) -> Decimal:
    try:
        found = nanos_to_decimal(dollars_to_nanos(by, field=name))
    except ValueError:
        found = Decimal(0)
    except TypeError as error:  # a float
        raise ConfigError(str(error)) from error
    if not 0 < found <= _MOST_FACTOR:
        raise ConfigError(f'{name}: {by!r} is not a factor above 0 and up to {_MOST_FACTOR}, such as "1.1"')
    return found


def _price(name: str, price: Dollars | None) -> Decimal:
    return nanos_to_decimal(_nanos(name, "" if price is None else price))


def _nanos(name: str, price: Dollars) -> Nanos:
    try:
        return dollars_to_nanos(price, field=name)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{error} (dollars per million tokens)") from error

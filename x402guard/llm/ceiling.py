"""Computes the ceiling of a call before it is sent."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import Unpriced
from x402guard.flow.ports import Usage
from x402guard.kernel.rows import NANOS_PER_DOLLAR, Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.llm.media import Media, audio_tokens, image_tokens
from x402guard.llm.models import READ_ON, base_name, model_maximum
from x402guard.llm.prices import PriceBook, PricedModel, TokenCounter
from x402guard.llm.request import Call
from x402guard.llm.settings import Metering
from x402guard.llm.usage import MOST_USES

UNPRICED: Final = "unpriced"
UNBOUNDED_INPUT: Final = "unbounded_input"
UNBOUNDED_OUTPUT: Final = "unbounded_output"

US_ONLY: Final = Decimal("1.1")
"""Anthropic's factor on every token price for inference in the United States only."""

_EXACT: Final = Context(prec=1000)
_PER: Final = 1_000_000
_COUNTED_BY_BYTES: Final = "bytes"
_MOST_COUNTED: Final = 4_000_000
"""The most characters, over all texts, that a counter gets. Of longer input every byte counts as one token."""


def whole_nanos(dollars: Decimal) -> Nanos:
    """Return dollars in nano-dollars, rounded up. A call's cost is rounded only here."""
    exact = _EXACT.multiply(dollars, Decimal(NANOS_PER_DOLLAR))
    return Nanos(int(exact.to_integral_value(rounding=ROUND_CEILING, context=_EXACT)))


class Rates(Struct, frozen=True):
    """A model's prices for one call.

    Attributes:
        book: the source of the prices.
        priced: the model in the book.
        based_on: the model whose price a dated name uses, or None if the book has the name itself.
        context: selects the model's other prices: the most expensive that may apply.
    """

    book: PriceBook
    priced: PricedModel
    based_on: str | None
    context: Mapping[str, str]

    def facts(self) -> dict[str, str]:
        """Return the journal facts of the prices: source, version, day and model."""
        day = dt.datetime.fromtimestamp(self.priced.at_unix, dt.UTC).date().isoformat()
        priced = self.priced
        facts = {"source": priced.source, "version": priced.version, "date": day, "model": priced.model}
        return facts if self.based_on is None else {**facts, "based_on": self.based_on}

    def dollars(self, usage: Usage, *, us_only: bool = False) -> Decimal:
        """Return the cost of *usage* in dollars, not rounded. Raises ``ValueError`` for contradictory counts."""
        with localcontext(_EXACT):
            cost = self.book.cost(self.priced, usage, self.context)
            if not us_only:
                return cost
            fees = {unit: count for unit, count in usage.items() if not unit.endswith("_tokens")}
            searches = self.book.cost(self.priced, fees, self.context) if fees else Decimal(0)
            return (cost - searches) * US_ONLY + searches


class Ceiling(Struct, frozen=True):
    """The most that a call can cost, as a linear function: a fixed part and a price for each output token.

    Attributes:
        rates: the prices.
        input_tokens: the upper bound of the input, used for the hold.
        counted_by: what counted them: ``tiktoken``, ``bytes`` or the class of a user's own counter.
        input_bound: the most input tokens that are possible for this body; None if a part of it has no bound.
        worst: the ways to bill the input, one of which is the dearest.
        beside: dollars beside the tokens: allowances and media.
        per_output: dollars for one output token of each choice.
        choices: the number of answers.
        limit: the requested output limit, in tokens, or None.
        extra_output: output tokens that may be billed beyond the limit: a wrong prediction.
        maximum: the most tokens that the model can answer with, or None if unknown.
        maximum_from: the source of *maximum*.
        learned: input tokens in it that the server is known to add by itself.
    """

    rates: Rates
    input_tokens: int
    counted_by: str
    input_bound: int | None
    worst: tuple[Usage, ...]
    beside: Decimal
    us_only: bool
    per_output: Decimal
    choices: int
    limit: int | None
    extra_output: int
    maximum: int | None
    maximum_from: str
    learned: int = 0

    @property
    def fixed(self) -> Decimal:
        """The dollars for everything except output."""
        return self.input_dollars + self.beside

    @property
    def input_dollars(self) -> Decimal:
        """The dollars for the input, billed in its dearest way."""
        return max(self.rates.dollars(usage, us_only=self.us_only) for usage in self.worst)

    def unit_prices(self) -> tuple[Decimal, Decimal]:
        """Return the prices of the hold, in dollars per million tokens: input, and output of one choice."""
        tokens = max(1, self.input_tokens)
        with localcontext(_EXACT):
            into = self.rates.dollars({"input_tokens": tokens}) * _PER / tokens
            return round(into, 9), round(self.per_output * _PER / self.choices, 9)

    def hiding(self, tokens: int) -> Ceiling:
        """Return the ceiling with *tokens* more of input, which the server adds to each request."""
        if not tokens:
            return self
        return replace(
            self,
            learned=self.learned + tokens,
            input_tokens=self.input_tokens + tokens,
            input_bound=None if self.input_bound is None else self.input_bound + tokens,
            worst=tuple(
                {unit: count if unit == "input_audio_tokens" else count + tokens for unit, count in usage.items()}
                for usage in self.worst
            ),
        )

    def amount(self, limit: int) -> Nanos:
        """Return the ceiling in nano-dollars for an output limit in tokens."""
        with localcontext(_EXACT):
            return whole_nanos(self.fixed + self.per_output * (limit + self.extra_output))

    def affordable(self, nanos: int) -> int:
        """Return the largest output limit whose ceiling is at most *nanos* nano-dollars; 0 or less if there is none."""
        with localcontext(_EXACT):
            left = Decimal(nanos) / NANOS_PER_DOLLAR - self.fixed - self.per_output * self.extra_output
            if self.per_output == 0:
                return self.maximum or 0
            return int(left // self.per_output) if left > 0 else 0


def find_ceiling(
    call: Call, settings: Metering, book: PriceBook, counter: TokenCounter, at_unix: int
) -> Ceiling | Refusal:
    """Return the ceiling of *call* by the prices of *at_unix* (unix seconds), or a refusal if it cannot be computed."""
    rates = find_rates(call, settings, book, at_unix)
    if isinstance(rates, Refusal):
        return rates
    allowed = _allowances(call, settings)
    if isinstance(allowed, Refusal):
        return allowed
    media = _media(call, rates, settings)
    if isinstance(media, Refusal):
        return media
    tokens, counted_by, by_bytes = _count(call, rates.priced.model, counter)
    added = call.slack + media.tokens + call.route.endpoint.hidden_input
    held, bound = tokens + added, by_bytes + added
    usage = {"input_tokens": held, **({"input_audio_tokens": media.audio} if media.audio else {})}
    maximum, maximum_from = _maximum(call, rates)
    return Ceiling(
        rates=rates,
        input_tokens=held,
        counted_by=counted_by,
        input_bound=None if call.unbounded or media.unsized else bound,
        worst=tuple(_worst_inputs(usage, call, rates.priced)),
        beside=allowed + media.dollars,
        us_only=call.us_only,
        per_output=_per_output(usage, call, rates),
        choices=call.choices,
        limit=call.limit,
        extra_output=call.predicted,
        maximum=maximum,
        maximum_from=maximum_from,
    )


def find_rates(call: Call, settings: Metering, book: PriceBook, at_unix: int) -> Rates | Refusal:
    """Return the prices of a call's model at *at_unix* (unix seconds), or a refusal if there are none."""
    provider, asked = call.route.provider, settings.aliases.get(call.model, call.model)
    found = find_model(book, provider, asked, at_unix)
    if found is None:
        hint = f'session.register_model({call.model!r}, input="$3.00", output="$15.00")'
        if call.route.endpoint.dialect == "azure":
            hint = f'Metering(aliases={{{call.model!r}: "gpt-4o"}}) for the model behind the deployment, or {hint}'
        else:
            hint += " (at the price of the provider's dearest model at least; Metering(models={…}) may name any)"
        meant = "" if asked == call.model else f" (that is {asked!r} by its alias)"
        return Refusal(
            UNPRICED,
            f"model: {provider} has no price for {call.model!r}{meant}; {_suggest(book, provider, asked)}{hint}",
            error=Unpriced,
        )
    priced, based_on = found
    produces = call.limit != 0
    if "input_tokens" not in priced.units or (produces and "output_tokens" not in priced.units):
        return Refusal(
            UNPRICED,
            f"model: {call.model!r} has no price for text tokens, so {call.route.flavour} calls cannot be priced",
            error=Unpriced,
        )
    if call.speaks and "output_audio_tokens" not in priced.units:
        return Refusal(
            UNPRICED, f"modalities: the price book has no price for audio output of {call.model!r}", error=Unpriced
        )
    context = dict(settings.price_context)
    asked_tiers = dict(call.context)
    if provider in _PROJECT_TIERS and not context.keys() & {"service_tier", "processing"}:
        asked_tiers.setdefault("service_tier", "auto")
    for key, asked_for in asked_tiers.items():
        # "auto" may become the most expensive tier.
        value = "priority" if asked_for == "auto" and (key, "priority") in priced.contexts else asked_for
        if value in NOT_DEARER:
            if value in _STANDARD and context.get(key) in NOT_DEARER:
                del context[key]  # it asks for what the owner's cheaper tier is not
            continue
        if (key, value) in priced.contexts:
            context[key] = value
        else:
            return Refusal(
                UNPRICED, f"{key}: the price of {value!r} for {call.model!r} is unknown; leave it out", error=Unpriced
            )
    return Rates(book, priced, based_on, context)


def find_model(book: PriceBook, provider: str, model: str, at_unix: int) -> tuple[PricedModel, str | None] | None:
    """Return the prices of a model, and the model whose price a dated name uses, or None; None for an unknown model."""
    priced = book.find(provider, model, at_unix)
    if priced is not None:
        return priced, None
    base = base_name(model)
    priced = None if base is None else book.find(provider, base, at_unix)
    return None if priced is None else (priced, base)


def _suggest(book: PriceBook, provider: str, model: str) -> str:
    suggested = book.suggest(provider, model)
    return "" if suggested is None else f"{suggested} Or "


_STANDARD: Final = frozenset({"default", "on_demand", "standard", "standard_only"})

NOT_DEARER: Final = frozenset(
    {
        "auto",
        "batch",
        "default",
        "flex",
        "offpeak",
        "on_demand",
        "provisioned_throughput",
        "standard",
        "standard_only",
        "traffic_type_unspecified",
        "unspecified",
    }
)
"""Tiers that cost at most as much as the standard one. A cheaper one does not lower a hold: the provider may not grant it.

Every other one is taken for dearer, also one that is not known.
"""

DEAREST_TIER: Final = 2
"""A tier without a price counts this many times the standard price: the most of any tier in the price book."""

_PROJECT_TIERS: Final = frozenset({"openai", "azure"})
"""Providers whose projects have a tier of their own for calls that name none."""

_WINDOW: Final = 1_048_576
"""The context window, in tokens, of a model whose window is not known."""


def most_possible(ceiling: Ceiling, rates: Rates, usage: Usage, *, factor: Decimal) -> Nanos:
    """Return the most, in nano-dollars, that one answer can cost: the whole window and the longest output, at the dearest rates.

    *rates* are those that the answer is billed at, and *factor* is on them. Tools that the provider ran are counted as
    *usage* states them, up to ``MOST_USES`` each.
    """
    priced, (window, longest) = rates.priced, most_tokens(ceiling, rates)
    fees = {
        unit: min(count, _MOST_SECONDS if unit.endswith("_seconds") else MOST_USES)
        for unit, count in usage.items()
        if not unit.endswith("_tokens")
    }
    contexts = [{}, *({key: value} for key, value in priced.contexts), dict(rates.context)]
    with localcontext(_EXACT):
        dearest = max(sum(_dearest(rates.book, priced, window, longest, context)) for context in contexts) * factor
        dearest += ceiling.beside + (rates.book.cost(priced, fees, {}) if fees else 0)
    return Nanos(max(whole_nanos(dearest), ceiling.amount(ceiling.limit or 0)))


def most_tokens(ceiling: Ceiling, rates: Rates) -> tuple[int, int]:
    """Return the most tokens of input and of output that one answer can take."""
    known = rates.priced.context_window if rates.priced.source not in ("owner", "session") else None
    window = known or _WINDOW
    if _has_long_rates(rates, window):  # the book's window is older than its prices for longer requests
        window = max(window, _WINDOW)
    window = max(window, ceiling.input_bound or 0, ceiling.input_tokens)
    return window, (ceiling.maximum or window) * ceiling.choices + ceiling.extra_output


def _has_long_rates(rates: Rates, window: int) -> bool:
    """True if a token costs more in a request that is longer than *window* tokens."""
    short, long = ({"input_tokens": tokens} for tokens in (window, _WINDOW))
    return rates.dollars(long) * window > rates.dollars(short) * _WINDOW


def _dearest(
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


_MOST_SECONDS: Final = 86_400
_TOKENS_EACH: Final[Mapping[str, int]] = {"seconds": 100, "pages": 5_000, "images": 10_000}
"""What one of them is taken for where a model has no price for it: more tokens than any vendor counts for it."""
_FEES: Final = ("requests", "queries", "searches", "search", "units", "calls", "uses", "sources", "classifications")
_FEE: Final = Decimal("0.05")
"""Dollars of one use of what has no price: more than any listed fee of a search or a tool."""
_WORDS: Final = re.compile(r"[A-Z]?[a-z]+")


def unread_cost(rates: Rates, unread: Iterable[tuple[str, int]], most: int | None = None) -> Decimal:
    """Return the dollars of counts that nothing reads: at the dearest rate that the model's prices allow.

    *most* are the tokens that the model can take at all, if the request is known: all such counts together are no more,
    and all fees together no more than ``MOST_USES``.
    """
    tokens, uses, total = most or 2 * max(_WINDOW, rates.priced.context_window or 0), MOST_USES, Decimal(0)
    with localcontext(_EXACT):
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
    return total


def _price_of(rates: Rates, unit: str) -> Decimal:
    whole = {"audio_seconds": _PER} if unit.endswith("audio_seconds") else {}  # the book wants it beside its parts
    return rates.book.cost(rates.priced, {**whole, unit: _PER}, rates.context) / _PER


def _dearest_token(rates: Rates) -> Decimal:
    return max(max(_dearest(rates.book, rates.priced, _PER, _PER, each)) for each in ({}, rates.context)) / _PER


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


def _allowances(call: Call, settings: Metering) -> Decimal | Refusal:
    total = Decimal(0)
    for part in call.unbounded:
        allowance = settings.allowance(part.kind)
        if allowance is None:
            reason = f"{part.field}: the size of the request does not bound its cost ({part.kind})"
            return Refusal(
                UNBOUNDED_INPUT,
                f'{reason}; leave it out, or set Metering(allowances={{"{part.kind}": "$0.10"}})',
                error=Unpriced,
            )
        total += allowance
    return total


class _MediaCost(Struct, frozen=True):
    tokens: int
    audio: int
    dollars: Decimal
    unsized: bool


def _media(call: Call, rates: Rates, settings: Metering) -> _MediaCost | Refusal:
    tokens = audio = 0
    dollars, unsized = Decimal(0), False
    for part in call.media:
        counted = _media_tokens(part, call, rates)
        kind = "image_url" if part.kind == "image" else part.kind
        allowance = settings.allowance(kind)
        if counted is not None:
            tokens += counted
            audio += counted if part.kind == "audio" and "input_audio_tokens" in rates.priced.units else 0
        elif allowance is not None:
            dollars += allowance
            unsized = True
        else:
            reason = f"{part.field}: the cost of this {part.kind} cannot be computed from its bytes"
            return Refusal(UNBOUNDED_INPUT, f'{reason}; set Metering(allowances={{"{kind}": "$0.05"}})', error=Unpriced)
    return _MediaCost(tokens, audio, dollars, unsized)


def _media_tokens(part: Media, call: Call, rates: Rates) -> int | None:
    if part.kind == "image":
        return image_tokens(call.route.provider, rates.priced.model, part)
    if part.kind == "audio":
        # Audio without its own price may be a gap in the book. Only Google is known to bill it as text then.
        known = "input_audio_tokens" in rates.priced.units or call.route.provider == "google"
        return audio_tokens(part) if known else None
    return None


def _count(call: Call, model: str, counter: TokenCounter) -> tuple[int, str, int]:
    """Return (tokens, counter name, bytes). After an error the bytes count: a count that is too low is no ceiling."""
    by_bytes = sum(len(text.encode("utf-8", "surrogatepass")) + 1 for text in call.texts)
    if sum(map(len, call.texts)) > _MOST_COUNTED:
        return by_bytes, _COUNTED_BY_BYTES, by_bytes
    try:
        counts = [counter.count(text, provider=call.route.provider, model=model) for text in call.texts]
    except Exception:  # noqa: BLE001 - if a counter fails, the bytes count
        return by_bytes, _COUNTED_BY_BYTES, by_bytes
    if any(type(count) is not int or count < 0 for count in counts):
        return by_bytes, _COUNTED_BY_BYTES, by_bytes
    name = str(getattr(counter, "name", type(counter).__name__))
    return min(sum(counts) + len(counts), by_bytes), name, by_bytes


def _worst_inputs(usage: Usage, call: Call, priced: PricedModel) -> Iterator[Usage]:
    """Yield every way to bill the input: plain, or written into a cache at a higher price."""
    held = usage["input_tokens"]
    yield usage
    if call.caches and "input_audio_tokens" not in usage:
        for unit in ("cache_write_tokens", "cache_write_1h_tokens"):
            if unit in priced.units:
                yield {**usage, "cache_write_tokens": held, unit: held}


def _per_output(usage: Usage, call: Call, rates: Rates) -> Decimal:
    """Return the dollars for one output token of all choices together, at the price tier of this request's size."""
    if call.limit == 0:
        return Decimal(0)
    # Audio has to be requested; any other output with its own price may come without a request.
    silent = not call.speaks and call.route.provider != "google"
    own = {unit for unit in rates.priced.units if unit.startswith("output_") and unit.endswith("_tokens")}
    kinds = {"output_tokens", *own} - ({"output_audio_tokens"} if silent else set())
    without = rates.dollars(usage, us_only=call.us_only)
    with localcontext(_EXACT):
        dearest = max(
            rates.dollars({**usage, "output_tokens": _PER, kind: _PER}, us_only=call.us_only) - without
            for kind in kinds
        )
        return dearest / _PER * call.choices


def _maximum(call: Call, rates: Rates) -> tuple[int | None, str]:
    if call.limit == 0:
        return 0, "no output"
    own = rates.priced.max_output
    provider, names = call.route.provider, (call.model, rates.priced.model)
    known = [row for name in names if (row := model_maximum("openai" if provider == "azure" else provider, name))]
    if known:
        largest = max(known, key=lambda row: row.output_tokens)
        if own is not None and own < largest.output_tokens:
            return own, "max_output of its price"
        return largest.output_tokens, f"{largest.page}, read on {READ_ON}"
    if own is not None:
        return own, "max_output of its price"
    window = rates.priced.context_window
    return window, "the context window" if window is not None else "unknown"

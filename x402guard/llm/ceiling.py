"""Computes the ceiling of a call before it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import Final

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from x402guard.errors import Unpriced
from x402guard.flow.ports import Usage
from x402guard.kernel.rows import NANOS_PER_DOLLAR, Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.llm.dearest import WINDOW, dearest_parts
from x402guard.llm.rates import EXACT, Rates, find_rates, whole_nanos
from x402guard.llm.request import Call, asked_tokens
from x402guard.llm.settings import Metering
from x402guard.llm.tool_costs import listed_costs
from x402guard.llm.tools_used import MOST_USES
from x402guard.vendors.media import Media, audio_tokens, image_tokens
from x402guard.vendors.models import READ_ON, model_maximum
from x402guard.vendors.prices import LONG_WRITES, PriceBook, PricedModel, TokenCounter

UNBOUNDED_INPUT: Final = "unbounded_input"
UNBOUNDED_OUTPUT: Final = "unbounded_output"

_PER: Final = 1_000_000
_COUNTED_BY_BYTES: Final = "bytes"
_MOST_COUNTED: Final = 4_000_000
"""The most characters, over all texts, that a counter gets. Of longer input every byte counts as one token."""


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
        input_dollars: the dollars for the input, billed in its dearest way. They follow from *worst*.
    """

    rates: Rates
    input_tokens: int
    counted_by: str
    input_bound: int | None
    worst: tuple[Usage, ...]
    beside: Decimal
    per_output: Decimal
    choices: int
    limit: int | None
    extra_output: int
    maximum: int | None
    maximum_from: str
    learned: int = 0
    input_dollars: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        force_setattr(self, "input_dollars", max(self.rates.dollars(usage) for usage in self.worst))

    @property
    def fixed(self) -> Decimal:
        """The dollars for everything except output."""
        return self.input_dollars + self.beside

    def unit_prices(self) -> tuple[Decimal, Decimal]:
        """Return the prices of the hold, in dollars per million tokens: input, and output of one choice."""
        tokens = max(1, self.input_tokens)
        with localcontext(EXACT):
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
        with localcontext(EXACT):
            return whole_nanos(self.fixed + self.per_output * (limit + self.extra_output))

    def affordable(self, nanos: int) -> int:
        """Return the largest output limit whose ceiling is at most *nanos* nano-dollars; 0 or less if there is none."""
        with localcontext(EXACT):
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
    media = _media(call, rates, settings)
    if isinstance(media, Refusal):
        return media
    tokens, counted_by, by_bytes = _count(call, rates.priced.known_as, counter)
    added = call.slack + media.tokens + call.route.endpoint.hidden_input
    held, bound = tokens + added, by_bytes + added
    allowed = _allowances(call, settings, rates, held)
    if isinstance(allowed, Refusal):
        return allowed
    usage = {"input_tokens": held, **({"input_audio_tokens": media.audio} if media.audio else {})}
    maximum, maximum_from = _maximum(call, rates)
    return Ceiling(
        rates=rates,
        input_tokens=held,
        counted_by=counted_by,
        input_bound=None if call.unbounded or media.unsized else bound,
        worst=tuple(_worst_inputs(usage, call, rates.priced)),
        beside=allowed + media.dollars,
        per_output=_per_output(usage, call, rates),
        choices=call.choices,
        limit=call.limit,
        extra_output=call.predicted,
        maximum=maximum,
        maximum_from=maximum_from,
    )


def most_possible(ceiling: Ceiling, rates: Rates, usage: Usage) -> Nanos:
    """Return the most, in nano-dollars, that one answer can cost: the whole window and the longest output, at the dearest rates.

    *rates* are those that the answer is billed at. Tools that the provider ran are counted as *usage* states them, up to
    ``MOST_USES`` each.
    """
    priced, (window, longest) = rates.priced, most_tokens(ceiling, rates)
    fees = {
        unit: min(count, _MOST_SECONDS if unit.endswith("_seconds") else MOST_USES)
        for unit, count in usage.items()
        if not unit.endswith("_tokens")
    }
    contexts = [{}, *({key: value} for key, value in priced.contexts), dict(rates.context)]
    with localcontext(EXACT):
        dearest = (
            max(sum(dearest_parts(rates.book, priced, window, longest, context)) for context in contexts) * rates.factor
        )
        dearest += ceiling.beside + (rates.book.cost(priced, fees, {}) if fees else 0)
    return Nanos(max(whole_nanos(dearest), ceiling.amount(ceiling.limit or 0)))


def most_tokens(ceiling: Ceiling, rates: Rates) -> tuple[int, int]:
    """Return the most tokens of input and of output that one answer can take."""
    known = rates.priced.context_window if rates.priced.source not in ("owner", "session") else None
    window = known or WINDOW
    if _has_long_rates(rates, window):  # the book's window is older than its prices for longer requests
        window = max(window, WINDOW)
    window = max(window, ceiling.input_bound or 0, ceiling.input_tokens)
    return window, (ceiling.maximum or window) * ceiling.choices + ceiling.extra_output


def _has_long_rates(rates: Rates, window: int) -> bool:
    """True if a token costs more in a request that is longer than *window* tokens."""
    if rates.is_flat:
        return False
    short, long = ({"input_tokens": tokens} for tokens in (window, WINDOW))
    return rates.dollars(long) * window > rates.dollars(short) * WINDOW


_MOST_SECONDS: Final = 86_400


def _allowances(call: Call, settings: Metering, rates: Rates, tokens: int) -> Decimal | Refusal:
    """Return what is held for the parts that a request does not bound: their allowances, or their list prices if more."""
    allowed: dict[str, Decimal] = {}
    for part in call.unbounded:
        allowance = settings.allowance(part.kind)
        if allowance is None:
            reason = f"{part.field}: the size of the request does not bound its cost ({part.kind})"
            return Refusal(
                UNBOUNDED_INPUT,
                f"{reason}; leave it out, or {_allow(part.kind)}",
                error=Unpriced,
            )
        allowed[part.kind] = allowed.get(part.kind, Decimal(0)) + allowance
    for kind, known in listed_costs(call, rates, allowed, tokens):
        allowed[kind] = max(allowed[kind], known)
    return sum(allowed.values(), Decimal(0))


def _allow(kind: str) -> str:
    return f'hold its price for it with Metering(allowances={{"{kind}": "…"}}), in dollars for one'


class _MediaCost(Struct, frozen=True):
    tokens: int
    audio: int
    dollars: Decimal
    unsized: bool


def _media(call: Call, rates: Rates, settings: Metering) -> _MediaCost | Refusal:
    tokens = audio = 0
    dollars, unsized = Decimal(0), False
    asked = asked_tokens(call) if call.media and call.route.provider == "google" else 0
    for part in call.media:
        counted = _media_tokens(part, call, rates, asked)
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
            return Refusal(UNBOUNDED_INPUT, f"{reason}; {_allow(kind)}", error=Unpriced)
    return _MediaCost(tokens, audio, dollars, unsized)


def _media_tokens(part: Media, call: Call, rates: Rates, asked: int) -> int | None:
    """Return the most tokens of a part; *asked* are the most that the request asks for one picture."""
    if part.kind == "image":
        counted = image_tokens(call.route.provider, rates.priced.known_as, part)
        return None if counted is None else max(counted, asked)
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
        if call.keeps_long:
            yield {**usage, "cache_write_tokens": held, LONG_WRITES: held}


def _per_output(usage: Usage, call: Call, rates: Rates) -> Decimal:
    """Return the dollars for one output token of all choices together, at the price tier of this request's size."""
    if call.limit == 0:
        return Decimal(0)
    # Audio has to be requested; any other output with its own price may come without a request.
    silent = not call.speaks and call.route.provider != "google"
    own = {unit for unit in rates.priced.units if unit.startswith("output_") and unit.endswith("_tokens")}
    kinds = {"output_tokens", *own} - ({"output_audio_tokens"} if silent else set())
    without = rates.dollars(usage)
    with localcontext(EXACT):
        dearest = max(rates.dollars({**usage, "output_tokens": _PER, kind: _PER}) - without for kind in kinds)
        return dearest / _PER * call.choices


def _maximum(call: Call, rates: Rates) -> tuple[int | None, str]:
    if call.limit == 0:
        return 0, "no output"
    own = rates.priced.max_output
    provider, names = call.route.provider, dict.fromkeys((call.model, rates.priced.model, rates.priced.known_as))
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

"""Finds the prices of a call: those of its hold, and those that its answer is billed at."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import Unpriced
from x402guard.flow.ports import Usage
from x402guard.kernel.rows import NANOS_PER_DOLLAR, Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.llm.hints import unpriced_model
from x402guard.llm.request import Call
from x402guard.llm.settings import Metering
from x402guard.vendors.models import base_name, served_as
from x402guard.vendors.prices import PriceBook, PricedModel
from x402guard.vendors.regions import region_factor
from x402guard.vendors.routes import MeteredHost

UNPRICED: Final = "unpriced"

US_ONLY: Final = Decimal("1.1")
"""Anthropic's factor on every token price for inference in the United States only."""

EXACT: Final = Context(prec=1000)
_FEES: Final = ("_searches", "_executions", "requests")


def whole_nanos(dollars: Decimal) -> Nanos:
    """Return dollars in nano-dollars, rounded up. A call's cost is rounded only here."""
    exact = EXACT.multiply(dollars, Decimal(NANOS_PER_DOLLAR))
    return Nanos(int(exact.to_integral_value(rounding=ROUND_CEILING, context=EXACT)))


class Rates(Struct, frozen=True):
    """A model's prices for one call.

    Attributes:
        book: the source of the prices.
        priced: the model in the book.
        based_on: the model whose price a dated name uses, or None if the book has the name itself.
        context: selects the model's other prices: the most expensive that may apply.
        factor: on every price of a token: of a region, and of a tier that the book does not price for the model.
    """

    book: PriceBook
    priced: PricedModel
    based_on: str | None
    context: Mapping[str, str]
    factor: Decimal = Decimal(1)

    def facts(self) -> dict[str, str]:
        """Return the journal facts of the prices: source, version, day and model; a factor that is not 1."""
        day = dt.datetime.fromtimestamp(self.priced.at_unix, dt.UTC).date().isoformat()
        priced = self.priced
        facts = {"source": priced.source, "version": priced.version, "date": day, "model": priced.model}
        facts |= {} if self.factor == 1 else {"factor": str(self.factor)}
        return facts if self.based_on is None else {**facts, "based_on": self.based_on}

    @property
    def is_flat(self) -> bool:
        """True if the book says that a token costs the same in each request, however long it is."""
        asked: Callable[[PricedModel, Mapping[str, str]], bool] | None = getattr(self.book, "is_flat", None)
        return asked is not None and asked(self.priced, self.context)

    def dollars(self, usage: Usage) -> Decimal:
        """Return the cost of *usage* in dollars, not rounded. Raises ``ValueError`` for contradictory counts."""
        with localcontext(EXACT):
            cost = self.book.cost(self.priced, usage, self.context)
            if self.factor == 1:
                return cost
            fees = {unit: count for unit, count in usage.items() if unit.endswith(_FEES)}
            beside = self.book.cost(self.priced, fees, self.context) if fees else Decimal(0)
            return (cost - beside) * self.factor + beside


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

_STANDARD: Final = frozenset({"default", "on_demand", "standard", "standard_only"})
_PROJECT_TIERS: Final = frozenset({"openai", "azure"})
"""Providers whose projects have a tier of their own for calls that name none."""

_DEAREST_TIER: Final = Decimal(2)
"""The least that an unknown tier counts; more where the book has a dearer one of the provider's."""

_KNOWN_TIERS: Final = (
    ("openai", "ultrafast", re.compile(""), Decimal(6)),  # its pages of gpt-6-astra and gpt-6.1-sol
    ("google", "priority", re.compile(r"gemini-[3-9]"), Decimal("1.8")),  # ai.google.dev/gemini-api/docs/pricing
)
"""Tiers that the book lacks: provider, tier, models, times the standard price."""


def find_rates(call: Call, settings: Metering, book: PriceBook, at_unix: int) -> Rates | Refusal:
    """Return the prices of a call's model at *at_unix* (unix seconds), or a refusal if there are none."""
    provider, asked = call.route.provider, settings.aliases.get(call.model, call.model)
    found = find_model(book, provider, asked, at_unix)
    if found is None:
        return unpriced(unpriced_model(call, asked, book, at_unix, settings.models))
    priced, based_on = found
    produces = call.limit != 0
    by_length = "audio_seconds" in priced.units and not call.route.endpoint.host  # a sound that was reported
    if by_length:
        return Rates(book, priced, based_on, dict(settings.price_context), fixed_factor(call.route.endpoint, priced))
    if "input_tokens" not in priced.units or (produces and "output_tokens" not in priced.units):
        return unpriced(
            f"model: {call.model!r} has no price for text tokens, so {call.route.flavour} calls cannot be priced"
        )
    if call.speaks and "output_audio_tokens" not in priced.units:
        return unpriced(f"modalities: the price book has no price for audio output of {call.model!r}")
    context, factor = dict(settings.price_context), fixed_factor(call.route.endpoint, priced)
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
            continue
        times = _tier(book, priced, (key, value))
        if times is None:
            return unpriced(f"{key}: the price of {value!r} for {call.model!r} is unknown; leave it out")
        factor *= times
    return Rates(book, priced, based_on, context, factor * (US_ONLY if call.us_only else 1))


def unpriced(reason: str) -> Refusal:
    """Return the refusal of a call that cannot be priced."""
    return Refusal(UNPRICED, reason, error=Unpriced)


def fixed_factor(endpoint: MeteredHost, priced: PricedModel) -> Decimal:
    """Return the factor of an endpoint's region: the owner's for the model, or else the vendor's."""
    if priced.region_factor is None:
        return region_factor(endpoint, priced.known_as)
    return priced.region_factor if endpoint.regional else Decimal(1)


def _tier(book: PriceBook, priced: PricedModel, tier: tuple[str, str]) -> Decimal | None:
    known = book.tier_factor(priced.provider, priced.known_as, tier, priced.at_unix)
    listed = (
        times
        for provider, name, models, times in _KNOWN_TIERS
        if (provider, name) == (priced.provider, tier[1]) and models.match(priced.known_as)
    )
    return next(listed, None) if known is None else known


def find_model(book: PriceBook, provider: str, model: str, at_unix: int) -> tuple[PricedModel, str | None] | None:
    """Return the prices of a model, and the model whose price a dated name uses, or None; None for an unknown model."""
    model = served_as(provider, model)
    priced = book.find(provider, model, at_unix)
    if priced is not None:
        return priced, None
    base = base_name(model)
    priced = None if base is None else book.find(provider, base, at_unix)
    return None if priced is None else (priced, base)


def billed_rates(
    call: Call, rates: Rates, settings: Metering, tiers: Mapping[str, str], *, us_only: bool
) -> tuple[Rates, str]:
    """Return the prices that a stated usage is billed at, and a note if the book lacks the price of its tier.

    *tiers* are those that the answer states. A tier without a price counts as many times the standard price as for that
    model at another provider, or else as the provider's dearest tier in the book.
    """
    context, priced, note = dict(settings.price_context), rates.priced, ""
    factor = fixed_factor(call.route.endpoint, priced) * (US_ONLY if us_only else 1)
    # A tier that only the request names counts only if it costs more.
    asked = {key: value for key, value in call.context.items() if value not in NOT_DEARER}
    for key, value in {**asked, **tiers}.items():
        if (key, value) in priced.contexts:
            context[key] = value
        elif value not in NOT_DEARER:
            dearest = rates.book.tier_factor(priced.provider, None, (key, value), priced.at_unix) or _DEAREST_TIER
            times = _tier(rates.book, priced, (key, value)) or max(dearest, _DEAREST_TIER)
            factor, note = factor * times, f"a tier without a price, at {times} times the standard one"
    return replace(rates, context=context, factor=factor), note

"""What the refusal of a model, or of a path, without a price says. No hint has a number that was not looked up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from x402guard.kernel.rows import NANOS_PER_DOLLAR
from x402guard.llm.request import Call
from x402guard.money import format_dollars
from x402guard.vendors.model_price import ModelPrice
from x402guard.vendors.models import READ_ON, base_name
from x402guard.vendors.prices import PriceBook, PricedModel
from x402guard.vendors.routes import MeteredHost, dialect_of

_TUNED: Final = re.compile(r"ft:(?P<base>[^:]+)(:.*)?")
_TUNED_FACTORS: Final = {
    "gpt-4.1": "1.5", "gpt-4.1-mini": "2", "gpt-4.1-nano": "2", "gpt-4o": "1.5", "gpt-4o-mini": "2", "o4-mini": "3.637",
    "gpt-3.5-turbo": "6",
}  # fmt: skip
"""How many times its base model a tuned one costs (developers.openai.com/api/docs/pricing, fine-tuning)."""


def unpriced_model(
    call: Call, asked: str, book: PriceBook, at_unix: int, owner_prices: Mapping[str, ModelPrice]
) -> str:
    """Return why a model is refused that has no price, and where its price may come from."""
    provider, model = call.route.provider, call.model
    meant = "" if asked == model else f" (that is {asked!r} by its alias)"
    suggested = book.suggest(provider, asked)
    own = owner_prices.get(asked)
    if own is not None and own.like is not None:
        return (
            f"model: metering.models says that {asked!r} costs as much as {own.like!r}, for which {provider} has no price in "
            f"the book; name a listed model, as `x402guard prices list` shows them"
        )
    parts = [f"model: {provider} has no price for {model!r}{meant}" + (f"; {suggested}" if suggested else ".")]
    if call.route.endpoint.dialect == "azure":
        parts.append(f'Name the model behind the deployment: Metering(aliases={{{model!r}: "…"}}).')
    like = _like(provider, asked, book, at_unix)
    if like is None:
        parts.append(f'Give it one: Metering(models={{{model!r}: ModelPrice(input="…", output="…")}}).')
        return " ".join(parts)
    name, factor, known = like
    times = f', factor="{factor}"' if factor else ""
    parts.append(
        f"A newer price book may have it (`x402guard prices update`; yours is {known.source} {known.version}, looked up on "
        f"{READ_ON}). Or price it as {name}{f' times {factor}' if factor else ''}, at {_shown(book, known, factor)}: "
        f"Metering(models={{{model!r}: ModelPrice(like={name!r}{times})}})"
    )
    return " ".join(parts)


def _like(provider: str, asked: str, book: PriceBook, at_unix: int) -> tuple[str, str, PricedModel] | None:
    """Return (name, factor or "", prices) of the model that an unknown one is most likely to cost as much as."""
    tuned = _TUNED.fullmatch(asked)
    if tuned is not None:
        base = base_name(tuned["base"]) or tuned["base"]
        known = book.find(provider, base, at_unix)
        if known is not None and base in _TUNED_FACTORS:
            return base, _TUNED_FACTORS[base], known
    family = book.family(provider, asked, at_unix)
    known = None if family is None else book.find(provider, family, at_unix)
    return None if family is None or known is None else (family, "", known)


def _shown(book: PriceBook, priced: PricedModel, factor: str) -> str:
    times = Decimal(factor or "1")
    into, out = (book.cost(priced, {unit: 1}, {}) * 1_000_000 * times for unit in ("input_tokens", "output_tokens"))
    return f"${_dollars(into)} in and ${_dollars(out)} out per million tokens"


def _dollars(amount: Decimal) -> str:
    return format_dollars(int(amount * NANOS_PER_DOLLAR))


def unpriced_path(endpoint: MeteredHost, method: str, address: str, path: str) -> str:
    """Return why a request to a path of a metered host is refused, and what its owner can say of it."""
    said = f"{method} {address.partition('://')[2]}: the price of this path of {endpoint.provider} is unknown"
    dialect = dialect_of(path)
    if dialect is not None and dialect[0] != endpoint.dialect:
        base = address.removesuffix(dialect[1])
        said += f'; it has the form of {dialect[0]}\'s API: Metering(endpoints={{"{base}": "{dialect[0]}"}}); or'
    else:
        said += ";"
    return (
        f'{said} give it a price with Metering(fixed_prices={{"{address}": "…"}}), in dollars for one request, or, only if it '
        f'costs nothing, list it with Metering(free=["{address}"])'
    )

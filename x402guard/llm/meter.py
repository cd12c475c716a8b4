"""Which conversation a request needs: metered, at a fixed price, free, refused, or none of ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from x402guard.errors import Unpriced
from x402guard.ledger.authorize import Refusal
from x402guard.llm.ceiling import UNPRICED
from x402guard.llm.prices import PriceBook, TokenCounter
from x402guard.llm.routes import Route, find_endpoint, find_route
from x402guard.llm.settings import Metering, place_of
from x402guard.money import Nanos
from x402guard.policy.patterns import plain_host, plain_path

_LOOKS_LIKE_A_CALL: Final = re.compile(
    r".*(/chat/completions|/v\d+\w*/(completions|responses|messages|embeddings)|/models/[^/]+:(stream)?[gG]enerateContent)"
)
_COSTS_NOTHING: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE", "TRACE"})


@dataclass(frozen=True, slots=True)
class Meter:
    """What LLM calls are held and priced by.

    Attributes:
        settings: the owner's word.
        book: prices, people's own before the library's.
        counter: counts tokens before a call.
    """

    settings: Metering
    book: PriceBook
    counter: TokenCounter

    @property
    def ready(self) -> bool:
        """True where book and counter have loaded what they need, so that using them is over in microseconds."""
        return all(getattr(part, "ready", True) for part in (self.book, self.counter))


@dataclass(frozen=True, slots=True)
class Unmetered:
    """A request that looks like an LLM call, to a host that nobody meters: it goes out, and the books say so."""

    place: str


@dataclass(frozen=True, slots=True)
class FixedPrice:
    """A request that costs what its owner says, in nano-dollars, whatever it says."""

    provider: str
    place: str
    amount: Nanos


def classify(meter: Meter, method: str, host: str, url: str) -> Route | FixedPrice | Unmetered | Refusal | None:
    """Return what a request is; None for one that is not metered, or costs nothing.

    *method* in upper case; *host* with the port where it is not the default. On a metered host, what nobody can price is
    refused: images, sound, batches and agents cost money too.
    """
    settings, host, path = meter.settings, plain_host(host), plain_path(urlsplit(url).path)
    endpoint = find_endpoint(host, path, settings.hosts)
    place = place_of(host, path)
    if method in _COSTS_NOTHING or settings.is_free(place):
        return None
    if endpoint is None:
        return Unmetered(place) if _LOOKS_LIKE_A_CALL.fullmatch(path) else None
    fixed = settings.fixed_price(place)
    if fixed is not None:
        return FixedPrice(endpoint.provider, place, fixed)
    route = find_route(endpoint, path)
    if route is None:
        address = f"{urlsplit(url).scheme}://{place}"
        return Refusal(
            UNPRICED,
            f"{method} {place}: nothing says what this path of {endpoint.provider}'s costs; give it a price with "
            f'Metering(fixed_prices={{"{address}": "$0.04"}}), or, only if it costs nothing, list it with '
            f'Metering(free=["{address}"])',
            error=Unpriced,
        )
    return None if route.flavour == "free" else route

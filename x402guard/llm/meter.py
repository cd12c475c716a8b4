"""Classifies a request: metered call, fixed price, free, refused, or not an LLM call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qsl

from msgspec import Struct

from x402guard.errors import Unpriced
from x402guard.flow.request import RequestFacts, split_path
from x402guard.kernel.rows import Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.llm.hints import unpriced_path
from x402guard.llm.rates import UNPRICED
from x402guard.llm.settings import Metering, place_of
from x402guard.policy.patterns import plain_host, readings
from x402guard.strict_json import NotReadable, read_object
from x402guard.vendors.prices import RegisteredBook, TokenCounter
from x402guard.vendors.routes import MeteredHost, Route, dialect_of, find_endpoint, find_route

_LOOKS_LIKE_A_CALL: Final = re.compile(
    r"(?i).*(/chat/completions|/(v\d+\w*|openai|api)/(completions|responses|messages|embeddings|embed|rerank)|/messages/batches|/models/[^/]+:((stream)?([gG]enerateContent|[rR]awPredict)|predict)"
    r"|/model/[^/]+/(invoke|converse)(-with-response-stream|-stream)?|/v2/(chat|rerank)|/audio/transcriptions)"
)
_COSTS_NOTHING: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE", "TRACE"})


class Meter(Struct, frozen=True):
    """The settings, the price book (with the owner's and the session's prices) and the token counter for LLM calls."""

    settings: Metering
    book: RegisteredBook
    counter: TokenCounter

    @property
    def ready(self) -> bool:
        """True once the price book and a counter of the user's own have loaded, so that each use takes microseconds."""
        return all(getattr(part, "ready", True) for part in (self.book, self.counter))

    def loads(self, provider: str, model: str) -> bool:
        """True if a count for a model would load its vocabulary."""
        asked: Callable[[str, str], bool] | None = getattr(self.counter, "loads", None)
        return asked is not None and asked(provider, model)

    def warm(self) -> None:
        """Load the prices and the counter's vocabulary."""
        self.book.find("openai", "gpt-4o", 0)
        getattr(self.counter, "warm", lambda: None)()


class Unmetered(Struct, frozen=True):
    """A request that looks like an LLM call to an unmetered host: it is sent, and the ledger records an event."""

    route_name: str


class FixedPrice(Struct, frozen=True):
    """A request with a fixed price in nano-dollars: that the owner set, or that a list says (see ``listed``).

    ``model`` is its model, or ""; ``source`` is who says the price.
    """

    provider: str
    route_name: str
    amount: Nanos
    model: str = ""
    source: str = "owner"


class Polled(Struct, frozen=True):
    """A poll of a response of OpenAI's that may run in the background, and the endpoint that it goes to."""

    response_id: str
    endpoint: MeteredHost


_POLL: Final = re.compile(r"(?:/[^/]+)*/responses/(?P<id>[^/]{1,200})")


def classify(
    meter: Meter,
    method: str,
    host: str,
    url: str,
    *,
    upgrades: bool = False,
    masked: bool = False,
    overrides: bool = False,
) -> Route | FixedPrice | Unmetered | Polled | Refusal | None:
    """Return how to handle a request; None if it is not metered or free.

    *method* is upper case; *host* includes the port if it is not the default. On a metered host, a request that cannot
    be priced is refused: images, audio, batches and agents cost money too, and so does what runs over a connection that
    the request *upgrades*. One that asks Google for some fields of its answer alone, in its query or *masked* by a
    header, is refused as well: the counts may not be among them; and so is one with a header that *overrides* its method.
    """
    settings, host, (path, *others) = meter.settings, plain_host(host), readings(split_path(url).path)
    endpoint = find_endpoint(host, path, settings.hosts)
    route_name = place_of(host, path)
    # What is free, or has a fixed price, is so however its server reads the path.
    # No route of a model has an escape in it.
    odd = tuple([place_of(host, other) for other in others if "%" not in other]) if others else ()
    if upgrades and endpoint is not None and not _is_free(settings, route_name, odd):
        reason = f"{method} {route_name} upgrades the connection, and what runs over it cannot be metered"
        return Refusal(UNPRICED, reason, error=Unpriced, advice="Call the model by plain requests.")
    if overrides and endpoint is not None:
        reason = f"{method} {route_name} has a header that names another method, so it is unknown which call it is"
        return Refusal(
            UNPRICED, reason, error=Unpriced, advice="Send the method itself, without X-HTTP-Method-Override."
        )
    if method in _COSTS_NOTHING or _is_free(settings, route_name, odd):
        poll = _POLL.fullmatch(path)
        if method != "GET" or endpoint is None or poll is None or _is_free(settings, route_name, odd):
            return None
        return Polled(poll["id"], endpoint)
    if endpoint is None:
        return Unmetered(route_name) if _LOOKS_LIKE_A_CALL.fullmatch(path) else None
    fixed = settings.fixed_price(route_name)
    if fixed is not None and all(settings.fixed_price(each) == fixed for each in odd):
        return FixedPrice(endpoint.provider, route_name, fixed)
    route = find_route(endpoint, path)
    if route is None:
        address = f"{split_path(url).scheme}://{route_name}"
        return Refusal(UNPRICED, unpriced_path(endpoint, method, address, path), error=Unpriced)
    if route.flavour.startswith("gemini") and (masked or _masks(url)):
        reason = f"{method} {route_name} asks for some fields of the answer alone, so its usage may not be in it"
        return Refusal(UNPRICED, reason, error=Unpriced, advice="Leave out fields= and X-Goog-FieldMask.")
    return None if route.flavour == "free" else route


_SAYS: Final = frozenset(
    {"messages", "contents", "prompt", "input", "inputs", "texts", "message", "query", "instances", "system"}
)
_NAMES_MODEL: Final = re.compile(r"/models?/|/deployments/")
_MOST_LOOKED_AT: Final = 16_777_216


def speaks_to_a_model(path: str, body: bytes | None) -> bool:
    """True if a body has the shape of an LLM call, or cannot be looked at: it streams, is too large, or is no JSON."""
    if body is None or len(body) > _MOST_LOOKED_AT:
        return True
    try:
        said = read_object(body)
    except NotReadable:
        return bool(body.strip())  # a form, or packed, or what other readers may take for JSON
    return not _SAYS.isdisjoint(said) and ("model" in said or _NAMES_MODEL.search(path) is not None)


def unknown_host(request: RequestFacts, route: Unmetered) -> Refusal:
    """Return the refusal of an apparent LLM call to a host that is not metered."""
    says = "looks like an LLM call, but its host is not metered (policy.unknown_llm_hosts)"
    if request.begun:  # a seller's redirect has named the path: its words are not shown
        return Refusal(
            "unknown_llm_host", f"what {request.begun} redirected to {says}", error=Unpriced, words=request.host
        )
    base = request.url.partition("?")[0]
    dialect = dialect_of(split_path(request.url).path)
    if dialect is not None:
        base = base.removesuffix(dialect[1])
    fix = f'Metering(endpoints={{"{base}": "{"openai" if dialect is None else dialect[0]}"}})'
    return Refusal(
        "unknown_llm_host",
        f"{route.route_name} {says}; name its provider with {fix}, or, only if it costs nothing, list it with "
        f'Metering(free=["{base}*"])',
        error=Unpriced,
    )


def _is_free(settings: Metering, route_name: str, odd: tuple[str, ...]) -> bool:
    return settings.is_free(route_name) and all(map(settings.is_free, odd))


def _masks(url: str) -> bool:
    query = url.partition("?")[2].partition("#")[0]
    return any(name.lower() in ("fields", "$fields") for name, _ in parse_qsl(query, keep_blank_values=True))

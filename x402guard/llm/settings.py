"""``Metering``: the owner's settings for LLM calls, checked when it is constructed."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Final, Literal, get_args
from urllib.parse import urlsplit

from msgspec.structs import replace

from x402guard.errors import ConfigError
from x402guard.flow.address import DEFAULT_PORTS
from x402guard.kernel.rows import Nanos
from x402guard.llm.content import ALLOWANCES
from x402guard.money import Dollars, dollars_to_nanos, nanos_to_decimal
from x402guard.policy.checks import check_choice, check_flag, check_whole
from x402guard.policy.patterns import plain_host, plain_path
from x402guard.vendors.model_price import ModelPrice
from x402guard.vendors.prices import PriceBook, TokenCounter
from x402guard.vendors.routes import METERED_HOSTS, Dialect, MeteredHost, find_route

UnboundedOutput = Literal["fit", "model_max", "average", "refuse"]
Disputes = Literal["book", "latch"]

_DIALECTS: Final[Mapping[str, Dialect]] = {
    "anthropic": "anthropic",
    "azure": "azure",
    "cohere": "cohere",
    "google": "google",
    "mistral": "mistral",
}
_KNOWN: Final = tuple(dict.fromkeys(endpoint.provider for endpoint in METERED_HOSTS))
_CONTEXTS: Final = {
    "processing": ("batch",),
    "service_tier": ("default", "flex", "priority", "fast", "scale"),
    "speed": ("fast",),
    "search_type": ("fast", "web"),
    "route": ("mistral/eu",),
}


_MOST_HIDDEN: Final = 10_000_000


@dataclass(frozen=True)
class Endpoint:
    """A metered endpoint of the owner's: a server of your own, or a gateway.

    Args:
        provider: one of the price book, or your own name for models to which you give prices. The dialect is OpenAI's
            unless it is anthropic, azure, cohere, google or mistral.
        hidden_input: input tokens that the server adds to each request (a system prompt, a chat template); they are
            held for, too.
        key: the environment variable with the key that ``x402guard proxy`` sends there; "" sends none.

    Raises ``ConfigError`` naming the field.
    """

    provider: str
    hidden_input: int = 0
    key: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.provider, str) and self.provider):
            raise ConfigError(f"metering.endpoints: provider: {self.provider!r} is not the name of a provider")
        check_whole("metering.endpoints: hidden_input", self.hidden_input, 0, _MOST_HIDDEN)
        if not isinstance(self.key, str) or not (self.key == "" or self.key.isidentifier()):
            raise ConfigError(
                "metering.endpoints: key: write the name of a variable, such as OPENAI_API_KEY, not the key itself"
            )


@dataclass(frozen=True, kw_only=True)
class Metering:
    """How LLM calls are held and priced.

    Args:
        unbounded_output: the handling of calls without an output limit. ``fit``: hold the model's maximum if it fits
            the remaining budget; else write an affordable limit into the request: what the remaining budget pays for, or a
            quarter of that while other calls hold something of it; under 1,024 tokens, wait for those, or refuse. ``model_max``: hold the maximum or refuse. ``average``: hold the mean of
            this ledger's calls to that model. ``refuse``.
        include_usage: request usage in OpenAI streams if the caller did not, and hide the extra chunk from the caller.
        endpoints: base URL → provider or ``Endpoint``, for other hosts: ``{"http://127.0.0.1:8000/v1": "openai"}``.
        aliases: a model's name as sent → its name in the price book (for an Azure deployment, say).
        models: name → ``ModelPrice``, in place of the book's price.
        free: URLs of metered hosts that cost nothing; a ``*`` at the end matches any suffix.
        fixed_prices: URL of a metered host → the price of one request, in dollars.
        allowances: kind → dollars to hold for each part whose cost the request's size does not bound; the kinds are in
            ``docs/reference/metering.md``.
        price_context: selects other prices of the book for every call, such as ``{"processing": "batch"}``. A call to
            OpenAI or Azure that names no ``service_tier`` is held at the dearest one that the project may have, unless
            ``{"service_tier": "default"}`` says otherwise.
        disputes: after a usage that the request cannot have caused: ``book`` (it is in the ledger; the session goes on
            unless a limit is passed) or ``latch`` (and the session is tripped until its owner resets it).
        counter: counts tokens before a call; default: tiktoken with its bundled vocabularies.
        prices: a price book, or the path of a file from ``x402guard prices update``; default: the bundled price book.

    Raises ``ConfigError`` naming the setting.
    """

    unbounded_output: UnboundedOutput = "fit"
    include_usage: bool = True
    endpoints: Mapping[str, str | Endpoint] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, ModelPrice] = field(default_factory=dict)
    free: Collection[str] = ()
    fixed_prices: Mapping[str, Dollars] = field(default_factory=dict)
    allowances: Mapping[str, Dollars] = field(default_factory=dict)
    price_context: Mapping[str, str] = field(default_factory=dict)
    counter: TokenCounter | None = None
    prices: PriceBook | Path | str | None = None
    disputes: Disputes = "book"
    hosts: tuple[MeteredHost, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if self.unbounded_output not in get_args(UnboundedOutput):
            choices = ", ".join(get_args(UnboundedOutput))
            raise ConfigError(f"metering.unbounded_output: {self.unbounded_output!r} is none of {choices}")
        check_flag("metering.include_usage", self.include_usage)
        check_choice("metering.disputes", self.disputes, get_args(Disputes))
        for name in ("aliases", "price_context"):
            _check_texts(name, getattr(self, name))
        for key, value in self.price_context.items():
            if value not in _CONTEXTS.get(key, ()):
                known = "; ".join(f"{name}: {', '.join(values)}" for name, values in _CONTEXTS.items())
                raise ConfigError(
                    f"metering.price_context: no model has another price for {key}={value!r}; known are {known}"
                )
        for name, price in _mapping("models", self.models).items():
            if not isinstance(price, ModelPrice):
                raise ConfigError(f"metering.models: {name!r} needs a ModelPrice(input=…, output=…), not {price!r}")
        self._set("hosts", tuple(_endpoint(url, given) for url, given in _mapping("endpoints", self.endpoints).items()))
        _mapping("fixed_prices", self.fixed_prices)
        self._set("_free", tuple(_pattern("free", url) for url in _collection("free", self.free)))
        self._set("_fixed", {_pattern("fixed_prices", url): _dollars(f"fixed_prices[{url!r}]", price)
                             for url, price in self.fixed_prices.items()})  # fmt: skip
        unknown = sorted(set(_mapping("allowances", self.allowances)) - set(ALLOWANCES), key=str)
        if unknown:
            raise ConfigError(f"metering.allowances: {unknown[0]!r} is none of {', '.join(ALLOWANCES)}")
        self._set("_allowed", {kind: nanos_to_decimal(_dollars(f"allowances[{kind!r}]", price))
                               for kind, price in self.allowances.items()})  # fmt: skip
        if isinstance(self.prices, Path):
            self._set("prices", str(self.prices))
        if self.counter is not None and not _counts(self.counter):
            raise ConfigError(
                f"metering.counter: {self.counter!r} has no count(text, *, provider, model); a counter for contexts, such as "
                "CharsPerToken, only estimates, so it cannot be used to hold money"
            )
        if self.prices is not None and not isinstance(self.prices, str) and not hasattr(self.prices, "find"):
            raise ConfigError(f"metering.prices: {self.prices!r} is neither a path nor a price book")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def allowance(self, kind: str) -> Decimal | None:
        """Return the dollars to hold for one part of a kind, or None if the owner set none."""
        allowed: Mapping[str, Decimal] = self._allowed  # type: ignore[attr-defined]
        return allowed.get(kind)

    def is_free(self, route_name: str) -> bool:
        """True if the owner lists a route (see ``place_of``) as free."""
        patterns: tuple[str, ...] = self._free  # type: ignore[attr-defined]
        return any(_matches(pattern, route_name) for pattern in patterns)

    def fixed_price(self, route_name: str) -> Nanos | None:
        """Return the owner's price of one request to a route (see ``place_of``), in nano-dollars, or None."""
        prices: Mapping[str, Nanos] = self._fixed  # type: ignore[attr-defined]
        return next((price for pattern, price in prices.items() if _matches(pattern, route_name)), None)


def place_of(host: str, path: str) -> str:
    """Return the name of a route in ``free`` and ``fixed_prices``: host (with the port if not the default) and path."""
    return f"{host}{path}".rstrip("/")


def _matches(pattern: str, route_name: str) -> bool:
    return route_name.startswith(pattern[:-1]) if pattern.endswith("*") else route_name == pattern


def _split(field_name: str, url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or port == 0 or parts.query or parts.username:
        raise ConfigError(f"metering.{field_name}: {url!r} is not a URL such as 'https://llm.example/v1'")
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    host = name if port in (None, DEFAULT_PORTS[parts.scheme]) else f"{name}:{port}"
    return plain_host(host), plain_path(parts.path).rstrip("/")


def _counts(counter: object) -> bool:
    count = getattr(counter, "count", None)
    if isinstance(counter, type) or not callable(count):
        return False
    try:
        inspect.signature(count).bind("", provider="", model="")
    except TypeError:
        return False
    except ValueError:
        return True  # a C function without a signature
    return True


def _endpoint(url: str, given: object) -> MeteredHost:
    if not isinstance(url, str) or not isinstance(given, str | Endpoint):
        raise ConfigError(f"metering.endpoints: {url!r} → {given!r}: write a URL → a provider's name or Endpoint(…)")
    known = given if isinstance(given, Endpoint) else Endpoint(given)
    host, path = _split("endpoints", url)
    found = MeteredHost(known.provider, _DIALECTS.get(known.provider, "openai"), host, path, known.hidden_input)
    if find_route(replace(found, path=""), path) is not None:
        raise ConfigError(
            f"metering.endpoints: {url!r} is the URL of one route; write the base URL for an SDK, such as '…/v1'"
        )
    if known.provider not in _KNOWN:
        _refuse_near(known.provider)
    return found


def _refuse_near(provider: str) -> None:
    from difflib import get_close_matches  # for an error

    near = get_close_matches(provider, _KNOWN, n=1, cutoff=0.8)
    if near:
        raise ConfigError(f"metering.endpoints: {provider!r} is not a provider with prices; did you mean {near[0]!r}?")


def _pattern(field_name: str, url: object) -> str:
    if not isinstance(url, str):
        raise ConfigError(f"metering.{field_name}: {url!r} is not a URL")
    return place_of(*_split(field_name, url))


def _dollars(name: str, amount: Dollars) -> Nanos:
    try:
        return dollars_to_nanos(amount, field=f"metering.{name}")
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _mapping(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"metering.{name}: {value!r} is not a mapping")
    return value


def _collection(name: str, value: object) -> Collection[object]:
    if isinstance(value, str) or not isinstance(value, Collection):
        raise ConfigError(f"metering.{name}: write a list of URLs, not {value!r}")
    return value


def _check_texts(name: str, value: object) -> None:
    for key, item in _mapping(name, value).items():
        if not (isinstance(key, str) and key and isinstance(item, str) and item):
            raise ConfigError(f"metering.{name}: {key!r} → {item!r}: both have to be non-empty strings")

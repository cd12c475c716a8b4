"""Says where a request to the proxy is meant to go: a URL in its path, or the API of an LLM provider by its name."""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import unquote

import httpx
from msgspec import Struct, field

from x402guard.errors import ConfigError
from x402guard.flow.address import is_loopback
from x402guard.http.request import address_of
from x402guard.llm.settings import Endpoint, Metering, place_of
from x402guard.vendors.routes import find_endpoint, find_route

CREDENTIALS: Final = ("authorization", "x-api-key", "x-goog-api-key", "api-key")
"""The headers in which SDKs send the key of an API."""


class Upstream(Struct, frozen=True):
    """The API of an LLM provider, as its SDKs name it.

    Attributes:
        base: the base URL that its SDK has by default.
        key: the environment variable with the key of the API.
        header: the header that carries the key.
    """

    base: str
    key: str
    header: str = "authorization"


PROVIDERS: Final[Mapping[str, Upstream]] = {
    "openai": Upstream("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "anthropic": Upstream("https://api.anthropic.com", "ANTHROPIC_API_KEY", "x-api-key"),
    "google": Upstream("https://generativelanguage.googleapis.com", "GEMINI_API_KEY", "x-goog-api-key"),
    "mistral": Upstream("https://api.mistral.ai", "MISTRAL_API_KEY"),
    "cohere": Upstream("https://api.cohere.com", "CO_API_KEY"),
    "groq": Upstream("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "deepseek": Upstream("https://api.deepseek.com", "DEEPSEEK_API_KEY"),
    "openrouter": Upstream("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "together": Upstream("https://api.together.xyz/v1", "TOGETHER_API_KEY"),
    "fireworks": Upstream("https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "x-ai": Upstream("https://api.x.ai/v1", "XAI_API_KEY"),
}


def upstreams(endpoints: Mapping[str, str | Endpoint]) -> dict[str, Upstream]:
    """Return the providers by name, with the owner's endpoints (base URL → provider) in place of the public ones.

    Raises ``ConfigError`` for two endpoints of one provider: its name would say neither.
    """
    found: dict[str, Upstream] = dict(PROVIDERS)
    named: dict[str, str] = {}
    for base, given in endpoints.items():
        provider = given.provider if isinstance(given, Endpoint) else given
        if provider in named:
            raise ConfigError(
                f"metering.endpoints: {named[provider]!r} and {base!r} are both {provider!r}, so /{provider} is neither; "
                "send requests to /URL instead, and name one of them otherwise"
            )
        named[provider] = base
        known = PROVIDERS.get(provider)
        # An endpoint of the settings that is called openai gets no key of OpenAI's by its name.
        key = given.key if isinstance(given, Endpoint) else ""
        found[provider] = Upstream(base.rstrip("/"), key, "authorization" if known is None else known.header)
    return found


class Keys(Struct, frozen=True):
    """Where the keys of the owner's accounts go along.

    Attributes:
        values: the environment.
        metering: the owner's settings: endpoints beside the public ones, and paths with a price or without one.
        listed: what else they may be used for: ``METHOD /NAME/path``, with ``*`` for anything (``proxy.paths``).
    """

    values: Mapping[str, str]
    metering: Metering = field(default_factory=Metering)
    listed: Collection[str] = ()

    def go_along(self, method: str, url: httpx.URL, name: str, base: str) -> bool:
        """True for a call of the provider *name* that is priced, for ``GET …/models``, and for what is listed.

        A key is its owner's account: what reads stored chats, deletes models or makes keys is no call of an agent. DELETE
        is none in any case.
        """
        path = url.raw_path.partition(b"?")[0].decode("ascii", "replace")
        below, host = path.removeprefix(httpx.URL(base).path.rstrip("/")), address_of(url).host
        if method == "DELETE" or _ENDS_A_PATH.search(unquote(below)):
            return False
        if method == "GET" and _MODELS.fullmatch(below):
            return True
        if any(fnmatchcase(f"{method} /{name}{below}", each) for each in self.listed):
            return True
        where = place_of(host, path)
        if method != "POST":
            return False
        if self.metering.is_free(where) or self.metering.fixed_price(where) is not None:
            return True
        endpoint = find_endpoint(host, path, self.metering.hosts)
        route = None if endpoint is None else find_route(endpoint, path)
        return route is not None and (route.flavour != "free" or _FREE.fullmatch(below) is not None)


_MODELS: Final = re.compile(r"(/v[0-9]+[a-z]*)?(/openai)?/models")
_FREE: Final = re.compile(
    r"(/v[0-9]+[a-z]*)?(/openai)?/((chat/)?moderations|responses/input_tokens|messages/count_tokens|(de)?tokenize|models/[\w.-]+:countTokens)"
)
"""What costs nothing and changes nothing: as it stands, and not behind another path."""

_ENDS_A_PATH: Final = re.compile(r"[\x00-\x1f?#]")
"""What some servers take for the end of a path."""


class Target(Struct, frozen=True):
    """Where one request goes.

    Attributes:
        url: the whole URL, as it was written.
        upstream: the provider that it was named by, or None for a URL.
        name: the name of that provider.
    """

    url: str
    upstream: Upstream | None = None
    name: str = ""


def target(path: str, query: str, known: Mapping[str, Upstream]) -> Target | str:
    """Return where a request goes by its raw *path* and *query*, or a sentence saying why it goes nowhere."""
    rest = path.removeprefix("/")
    after = f"?{query}" if query else ""
    for scheme in ("https", "http"):
        if rest.startswith(f"{scheme}:/"):
            where = rest[len(scheme) + 1 :].lstrip("/")  # some clients write one slash for two
            host, slash, below = where.partition("/")
            return Target(f"{scheme}://{_BRACKET.sub(_bracket, host)}{slash}{below}{after}") if where else _NOWHERE
    name, slash, below = rest.partition("/")
    upstream = known.get(name)
    if upstream is not None and any(_leads_out(part) for part in below.split("/")):
        return f"{below[:60]!r} leads out of /{name}: its key is for what is below {upstream.base}"
    if upstream is not None:
        return Target(f"{upstream.base}{slash}{below}{after}", upstream, name)
    if not name:
        return _NOWHERE
    return f"{name[:60]!r} is neither a URL nor a provider; write /https://host/path, or one of /{', /'.join(known)}"


_BRACKET: Final = re.compile("%5([BD])", re.IGNORECASE)
"""What some clients write for the brackets of an IPv6 address: to them it stands in a path."""


def _bracket(found: re.Match[str]) -> str:
    return "[" if found[1] in "Bb" else "]"


_NOWHERE: Final = "the path names no URL; write /https://host/path, with the whole URL after the slash"


def _leads_out(part: str) -> bool:
    """True for a segment of a path that servers read as another place: the owner's key goes along."""
    plain = unquote(part)
    return "/" in plain or "\\" in plain or any(_is_dots(each) for each in re.split(r"[/\\]", unquote(plain)))


def _is_dots(segment: str) -> bool:
    return segment.partition(";")[0].strip() in (".", "..")


def climbs(raw_path: bytes) -> bool:
    """True if a path has dots between escapes or backslashes: some clients read them as the segment above, some not."""
    path = raw_path.partition(b"?")[0].decode("ascii", "replace")
    odd = [part for part in path.split("/") if part not in (".", "..")]
    return any(_is_dots(each) for part in odd for each in unquote(part).split("\\"))


def leads_back(host: str, port: int | None, own: tuple[str, int]) -> bool:
    """True if an address is that of the proxy itself: a request to it would go round for ever."""
    own_host, own_port = own
    if port != own_port:
        return False
    name = host.strip("[]").rstrip(".").lower().removeprefix("::ffff:")
    here = {own_host, "0.0.0.0", "::", socket.gethostname().lower()}  # noqa: S104 - compared, not listened at
    return name in here or is_loopback(name)


def token_in(value: str) -> str:
    """Return a credential without its scheme; "" for none."""
    scheme, _, rest = value.strip().partition(" ")
    return rest.strip() if rest and scheme.lower() == "bearer" else value.strip()


def plain_text(value: bytes) -> str:
    """Return the text of a header with what is packed into Basic credentials."""
    text = value.decode("latin-1")
    scheme, _, rest = text.strip().partition(" ")
    if scheme.lower() != "basic":
        return text
    try:
        return f"{text} {base64.b64decode(rest, validate=True).decode('latin-1')}"
    except ValueError:
        return text

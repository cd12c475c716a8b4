"""Which request is an LLM call: host and path, and nothing else, decide the provider and the shape of the bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Dialect = Literal["openai", "azure", "anthropic", "google", "mistral", "cohere"]
"""Whose paths and bodies an endpoint speaks."""

Flavour = Literal[
    "chat",
    "completions",
    "responses",
    "embeddings",
    "messages",
    "gemini",
    "gemini_embed",
    "cohere",
    "cohere_embed",
    "converse",
    "free",
]
"""The shape of one route's bodies; ``free`` costs nothing. No route is Bedrock's ``converse``: it is reported, not seen."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A metered host: everything sent to it by a method that may cost is priced, listed as free, or refused.

    Attributes:
        provider: the id of the provider whose prices hold, in the price book.
        dialect: whose paths and bodies it speaks.
        host: a host name, ``*.example.com`` for all below a domain, or ``host:port``.
        path: what its paths begin with, "" for all of them.
    """

    provider: str
    dialect: Dialect
    host: str
    path: str = ""

    def covers(self, host: str, path: str) -> bool:
        """True where a request to *host* (with the port where it is not the default) and *path* belongs here."""
        name = host.partition(":")[0] if ":" not in self.host and not host.startswith("[") else host
        if self.host.startswith("*."):
            return name.endswith(self.host[1:]) and len(name) >= len(self.host)
        return name == self.host and (path == self.path or path.startswith(f"{self.path}/") or not self.path)


@dataclass(frozen=True, slots=True)
class Route:
    """What a request to a metered host is.

    Attributes:
        endpoint: whose it is.
        flavour: the shape of its bodies.
        model: the model that the path names, or None where the body does.
        streams: True where the path says so.
    """

    endpoint: Endpoint
    flavour: Flavour
    model: str | None = None
    streams: bool = False

    @property
    def provider(self) -> str:
        """The provider's id in the price book."""
        return self.endpoint.provider


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint("openai", "openai", "api.openai.com"),
    Endpoint("openai", "openai", "*.api.openai.com"),
    Endpoint("anthropic", "anthropic", "api.anthropic.com"),
    Endpoint("google", "google", "generativelanguage.googleapis.com"),
    Endpoint("google", "google", "aiplatform.googleapis.com"),
    Endpoint("google", "google", "*.aiplatform.googleapis.com"),
    Endpoint("mistral", "mistral", "api.mistral.ai"),
    Endpoint("mistral", "mistral", "codestral.mistral.ai"),
    Endpoint("cohere", "cohere", "api.cohere.com"),
    Endpoint("cohere", "cohere", "api.cohere.ai"),
    Endpoint("groq", "openai", "api.groq.com"),
    Endpoint("deepseek", "openai", "api.deepseek.com"),
    Endpoint("openrouter", "openai", "openrouter.ai"),
    Endpoint("openrouter", "openai", "api.openrouter.ai"),
    Endpoint("azure", "azure", "*.openai.azure.com"),
    Endpoint("azure", "azure", "*.cognitiveservices.azure.com"),
    Endpoint("azure", "azure", "*.services.ai.azure.com"),
    # OpenAI's dialect, and prices in the book.
    Endpoint("x-ai", "openai", "api.x.ai"),
    Endpoint("together", "openai", "api.together.xyz"),
    Endpoint("together", "openai", "api.together.ai"),
    Endpoint("fireworks", "openai", "api.fireworks.ai"),
    Endpoint("cerebras", "openai", "api.cerebras.ai"),
    Endpoint("perplexity", "openai", "api.perplexity.ai"),
    Endpoint("moonshotai", "openai", "api.moonshot.ai"),
    Endpoint("moonshotai", "openai", "api.moonshot.cn"),
    Endpoint("novita", "openai", "api.novita.ai"),
    Endpoint("zai", "openai", "api.z.ai"),
)
"""The hosts that are metered without being told. ``-aiplatform`` hosts of single regions are matched by ``find_endpoint``."""

_REGIONAL: Final = re.compile(r"[a-z0-9-]+-aiplatform\.googleapis\.com(:[0-9]+)?", re.ASCII)

_ANY: Final = r"(?:/[^/]+)*"
_OPENAI: Final[tuple[tuple[str, Flavour], ...]] = (
    (rf"{_ANY}/chat/completions", "chat"),
    (rf"{_ANY}/completions", "completions"),
    (rf"{_ANY}/responses", "responses"),
    (rf"{_ANY}/embeddings", "embeddings"),
    (rf"{_ANY}/moderations", "free"),
    (rf"{_ANY}/responses/input_tokens", "free"),
    (rf"{_ANY}/responses/[^/]+/cancel", "free"),
)
_GOOGLE: Final = rf"{_ANY}/models/(?P<model>[^/:]+)"
_PATHS: Final[Mapping[Dialect, tuple[tuple[str, Flavour], ...]]] = {
    "openai": _OPENAI,
    "azure": (
        (r"/openai/deployments/(?P<model>[^/]+)/chat/completions", "chat"),
        (r"/openai/deployments/(?P<model>[^/]+)/completions", "completions"),
        (r"/openai/deployments/(?P<model>[^/]+)/embeddings", "embeddings"),
        (r"/anthropic/v1/messages", "messages"),
        (r"/anthropic/v1/messages/count_tokens", "free"),
        *_OPENAI,
    ),
    "anthropic": ((r"/v1/messages", "messages"), (r"/v1/messages/count_tokens", "free")),
    "google": (
        (rf"{_GOOGLE}:(?P<stream>streamGenerateContent)", "gemini"),
        (rf"{_GOOGLE}:generateContent", "gemini"),
        (rf"{_GOOGLE}:(?:batchEmbedContents|embedContent)", "gemini_embed"),
        (rf"{_GOOGLE}:countTokens", "free"),
        (rf"{_ANY}/openai/chat/completions", "chat"),
        (rf"{_ANY}/openai/embeddings", "embeddings"),
    ),
    "mistral": (
        (r"/v1/chat/completions", "chat"),
        (r"/v1/fim/completions", "completions"),
        (r"/v1/embeddings", "embeddings"),
        (r"/v1/moderations", "free"),
        (r"/v1/chat/moderations", "free"),
    ),
    "cohere": (
        (r"/v2/chat", "cohere"),
        (r"/v2/embed", "cohere_embed"),
        (r"/v1/embed", "cohere_embed"),
        (r"/v1/(?:de)?tokenize", "free"),
    ),
}


_WILDCARDS: Final = tuple(endpoint for endpoint in ENDPOINTS if endpoint.host.startswith("*."))
_BY_HOST: Final = {host: tuple(each for each in ENDPOINTS if each.host == host) for host in {e.host for e in ENDPOINTS}}


def find_endpoint(host: str, path: str, configured: tuple[Endpoint, ...]) -> Endpoint | None:
    """Return the endpoint that a request belongs to: the owner's own first, the longest path first; or None."""
    for endpoint in sorted(configured, key=lambda e: -len(e.path)):
        if endpoint.covers(host, path):
            return endpoint
    name = host if host.startswith("[") else host.partition(":")[0]
    for endpoint in (*_BY_HOST.get(name, ()), *_WILDCARDS):
        if endpoint.covers(host, path):
            return endpoint
    return Endpoint("google", "google", host) if _REGIONAL.fullmatch(host) else None


def find_route(endpoint: Endpoint, path: str) -> Route | None:
    """Return what a path of a metered host is, or None for one that nobody can price."""
    rest = path[len(endpoint.path) :]
    for pattern, flavour in _PATHS[endpoint.dialect]:
        match = re.fullmatch(pattern, rest)
        if match is not None:
            named = match.groupdict()
            model = named.get("model")
            return Route(endpoint, flavour, model, bool(named.get("stream")))
    return None

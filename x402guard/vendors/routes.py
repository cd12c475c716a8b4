"""Finds LLM calls by host and path only: they decide the provider and the shape of the bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal
from urllib.parse import unquote

from msgspec import Struct
from msgspec.structs import replace

Dialect = Literal["openai", "azure", "anthropic", "google", "mistral", "cohere", "bedrock"]
"""The vendor whose API an endpoint implements."""

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
    "messages_batch",
    "gemini_batch",
    "mistral_batch",
    "rerank",
    "transcription",
    "free",
]
"""The shape of a route's bodies; ``free`` costs nothing."""


class MeteredHost(Struct, frozen=True):
    """A metered host: each request with a method that may cost is priced, listed as free, or refused.

    Attributes:
        provider: the provider's id in the price book.
        dialect: the vendor whose API it implements.
        host: a host name, ``*.example.com`` for all subdomains, or ``host:port``.
        path: the prefix of its paths, "" for all paths.
        hidden_input: the input tokens that the server adds to each request, as its owner knows them.
        regional: True for a host of one region, where a vendor may charge more.
    """

    provider: str
    dialect: Dialect
    host: str
    path: str = ""
    hidden_input: int = 0
    regional: bool = False

    def covers(self, host: str, path: str) -> bool:
        """True if a request to *host* (with the port if it is not the default) and *path* belongs to this endpoint."""
        name = host.partition(":")[0] if ":" not in self.host and not host.startswith("[") else host
        if self.host.startswith("*."):
            return name.endswith(self.host[1:]) and len(name) >= len(self.host)
        return name == self.host and (path == self.path or path.startswith(f"{self.path}/") or not self.path)


class Route(Struct, frozen=True):
    """The route of a request to a metered host.

    Attributes:
        endpoint: the metered host.
        flavour: the shape of its bodies.
        model: the model in the path, or None if the body names it.
        streams: True if the path requests a stream.
    """

    endpoint: MeteredHost
    flavour: Flavour
    model: str | None = None
    streams: bool = False

    @property
    def provider(self) -> str:
        """The provider's id in the price book."""
        return self.endpoint.provider


METERED_HOSTS: Final[tuple[MeteredHost, ...]] = (
    MeteredHost("openai", "openai", "api.openai.com"),
    MeteredHost("openai", "openai", "mtls.api.openai.com"),
    MeteredHost("openai", "openai", "gov.api.openai.com", regional=True),
    MeteredHost("openai", "openai", "*.api.openai.com", regional=True),
    MeteredHost("anthropic", "anthropic", "api.anthropic.com"),
    MeteredHost("google", "google", "generativelanguage.googleapis.com"),
    MeteredHost("google", "google", "aiplatform.googleapis.com"),
    MeteredHost("google", "google", "aiplatform.mtls.googleapis.com"),
    MeteredHost("google", "google", "*.aiplatform.googleapis.com", regional=True),
    MeteredHost("anthropic", "anthropic", "claude.googleapis.com"),
    MeteredHost("mistral", "mistral", "api.mistral.ai"),
    MeteredHost("mistral", "mistral", "api.eu.mistral.ai", regional=True),
    MeteredHost("mistral", "mistral", "api.us.mistral.ai", regional=True),
    MeteredHost("mistral", "mistral", "codestral.mistral.ai"),
    MeteredHost("cohere", "cohere", "api.cohere.com"),
    MeteredHost("cohere", "cohere", "api.cohere.ai"),
    MeteredHost("groq", "openai", "api.groq.com"),
    MeteredHost("deepseek", "openai", "api.deepseek.com"),
    MeteredHost("openrouter", "openai", "openrouter.ai"),
    MeteredHost("openrouter", "openai", "api.openrouter.ai"),
    # OpenRouter's regions have endpoints with prices of their own, and it states them.
    MeteredHost("openrouter", "openai", "eu.openrouter.ai"),
    MeteredHost("openrouter", "openai", "us.openrouter.ai"),
    MeteredHost("azure", "azure", "*.openai.azure.com"),
    MeteredHost("azure", "azure", "*.cognitiveservices.azure.com"),
    MeteredHost("azure", "azure", "*.services.ai.azure.com"),
    MeteredHost("azure", "azure", "*.api.cognitive.microsoft.com"),
    # Hosts with OpenAI's dialect and with prices in the book.
    MeteredHost("x-ai", "openai", "api.x.ai"),
    MeteredHost("x-ai", "openai", "*.api.x.ai", regional=True),
    MeteredHost("together", "openai", "api.together.xyz"),
    MeteredHost("together", "openai", "api.together.ai"),
    MeteredHost("together", "openai", "us-api.together.ai", regional=True),
    MeteredHost("together", "openai", "ca-api.together.ai", regional=True),
    MeteredHost("fireworks", "openai", "api.fireworks.ai"),
    MeteredHost("fireworks", "openai", "us.api.fireworks.ai"),  # its models have names of their own there
    MeteredHost("cerebras", "openai", "api.cerebras.ai"),
    MeteredHost("perplexity", "openai", "api.perplexity.ai"),
    MeteredHost("moonshotai", "openai", "api.moonshot.ai"),
    MeteredHost("moonshotai", "openai", "api.moonshot.cn"),
    MeteredHost("novita", "openai", "api.novita.ai"),
    MeteredHost("zai", "openai", "api.z.ai"),
    MeteredHost("zhipuai", "openai", "open.bigmodel.cn"),
    MeteredHost("minimax", "openai", "api.minimax.io"),
    MeteredHost("minimax", "openai", "api.minimaxi.com"),
)
"""The hosts that are metered by default. ``find_endpoint`` also matches the patterns of hosts with a region in their name."""

_REGIONAL: Final = (
    (
        re.compile(
            r"([a-z0-9-]+-aiplatform|aiplatform\.[a-z0-9-]+\.rep)(\.mtls)?\.googleapis\.com(:[0-9]+)?", re.ASCII
        ),
        MeteredHost("google", "google", "", regional=True),
    ),
    (
        re.compile(
            r"bedrock-(runtime|mantle)(-fips)?\.[a-z0-9-]+\.(amazonaws\.(com(\.cn)?|eu)|api\.aws)(:[0-9]+)?", re.ASCII
        ),
        MeteredHost("aws", "bedrock", ""),  # its models are named with their region
    ),
    (
        re.compile(r"aws-external-anthropic\.[a-z0-9-]+\.api\.aws(:[0-9]+)?", re.ASCII),
        MeteredHost("anthropic", "anthropic", ""),
    ),
)
"""Hosts with a region in their name."""

_ANY: Final = r"(?:/[^/]+)*"
_DEPLOYED: Final = rf"{_ANY}/deployments/(?P<model>[^/]+)"
_OPENAI: Final[tuple[tuple[str, Flavour | None], ...]] = (
    # Azure reads paths in any case; the model is the deployment's, whatever the body names.
    (rf"(?i:{_DEPLOYED}(?:/extensions)?/chat/completions)", "chat"),
    (rf"(?i:{_DEPLOYED}/completions)", "completions"),
    (rf"(?i:{_DEPLOYED}/embeddings)", "embeddings"),
    (rf"(?i:{_ANY}/deployments/.*)", None),
    (rf"{_ANY}/chat/completions", "chat"),
    (rf"{_ANY}/completions", "completions"),
    (rf"{_ANY}/responses", "responses"),
    (rf"{_ANY}/embeddings", "embeddings"),
    # The format of Anthropic, which many gateways have beside OpenAI's.
    (rf"{_ANY}/v1/messages", "messages"),
    (rf"{_ANY}/v1/messages/count_tokens", "free"),
    (rf"{_ANY}/audio/transcriptions", "transcription"),
    (rf"{_ANY}/moderations", "free"),
    (rf"{_ANY}/responses/input_tokens", "free"),
    (rf"{_ANY}/responses/[^/]+/cancel", "free"),
)
_GOOGLE: Final = rf"{_ANY}/models/(?P<model>[^/:]+)"
_PATHS: Final[Mapping[Dialect, tuple[tuple[str, Flavour | None], ...]]] = {
    "openai": _OPENAI,
    "azure": _OPENAI,
    "anthropic": (
        (rf"(?:{_ANY}/invoke)?/v1/messages", "messages"),
        (rf"(?:{_ANY}/invoke)?/v1/messages/count_tokens", "free"),
        (r"/v1/messages/batches", "messages_batch"),
        (r"/v1/messages/batches/[^/]+/cancel", "free"),
    ),
    "bedrock": (
        (r"/model/(?P<model>[^/]*anthropic\.[^/]+)/(?:invoke|(?P<stream>invoke-with-response-stream))", "messages"),
        (r"/model/(?P<model>[^/]+)/(?:converse|(?P<stream>converse-stream))", "converse"),
        (r"/model/[^/]+/count-tokens", "free"),
        *_OPENAI,
    ),
    "google": (
        (rf"{_GOOGLE}:(?P<stream>streamGenerateContent)", "gemini"),
        (rf"{_GOOGLE}:generateContent", "gemini"),
        (rf"{_GOOGLE}:(?:batchEmbedContents|embedContent)", "gemini_embed"),
        (rf"{_GOOGLE}:batchGenerateContent", "gemini_batch"),
        (rf"{_GOOGLE}:countTokens", "free"),
        (rf"{_ANY}/publishers/anthropic/models/count-tokens:rawPredict", "free"),
        (
            rf"{_ANY}/publishers/anthropic/models/(?P<model>[^/:]+):(?:rawPredict|(?P<stream>streamRawPredict))",
            "messages",
        ),
        (rf"{_ANY}/open(?:ai|api)/chat/completions", "chat"),
        (rf"{_ANY}/open(?:ai|api)/embeddings", "embeddings"),
    ),
    "mistral": (
        (r"/v1/chat/completions", "chat"),
        (r"/v1/fim/completions", "completions"),
        (r"/v1/embeddings", "embeddings"),
        (r"/v1/batch/jobs", "mistral_batch"),
        (r"/v1/batch/jobs/[^/]+/cancel", "free"),
        (r"/v1/audio/transcriptions", "transcription"),
        (r"/v1/moderations", "free"),
        (r"/v1/chat/moderations", "free"),
    ),
    "cohere": (
        (r"/v2/chat", "cohere"),
        (r"/v2/embed", "cohere_embed"),
        (r"/v1/embed", "cohere_embed"),
        (r"/v[12]/rerank", "rerank"),
        (r"/v1/(?:de)?tokenize", "free"),
    ),
}

_WILDCARDS: Final = tuple(endpoint for endpoint in METERED_HOSTS if endpoint.host.startswith("*."))
_SUFFIXES: Final = tuple(endpoint.host[1:] for endpoint in _WILDCARDS)
_BY_HOST: Final = {
    host: tuple(each for each in METERED_HOSTS if each.host == host) for host in {e.host for e in METERED_HOSTS}
}


@lru_cache(maxsize=1024)
def find_endpoint(host: str, path: str, configured: tuple[MeteredHost, ...]) -> MeteredHost | None:
    """Return the endpoint of a request, or None. The owner's endpoints come first, longest path first."""
    for endpoint in sorted(configured, key=lambda e: -len(e.path)):
        if endpoint.covers(host, path):
            return endpoint
    name = host if host.startswith("[") else host.partition(":")[0]
    for endpoint in _BY_HOST.get(name) or (_WILDCARDS if name.endswith(_SUFFIXES) else ()):
        if endpoint.covers(host, path):
            return endpoint
    return next((replace(named, host=host) for pattern, named in _REGIONAL if pattern.fullmatch(host)), None)


def find_route(endpoint: MeteredHost, path: str) -> Route | None:
    """Return the route of a path of a metered host, or None if it is unknown and so cannot be priced."""
    rest = path[len(endpoint.path) :]
    for pattern, flavour in _PATHS[endpoint.dialect]:
        match = re.fullmatch(pattern, rest)
        if match is not None:
            if flavour is None:
                return None
            named = match.groupdict()
            model = named.get("model")
            return Route(endpoint, flavour, None if model is None else unquote(model), bool(named.get("stream")))
    return None


_FORMS: Final[tuple[tuple[str, Dialect], ...]] = (
    ("/v1/messages", "anthropic"),
    ("/chat/completions", "openai"),
    ("/v2/chat", "cohere"),
)


def dialect_of(path: str) -> tuple[Dialect, str] | None:
    """Return the dialect that a path has the form of, and the end of the path by which it is known; None for none."""
    return next(((dialect, end) for end, dialect in _FORMS if path.endswith(end)), None)

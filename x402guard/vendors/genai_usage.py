"""Finds the extractor of genai-prices that reads the usage of a vendor's answer, and what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from genai_prices.types import Provider, UsageExtractor

_FLAVOURS: Final[Mapping[str, tuple[str, ...]]] = {
    "chat": ("chat", "default"),
    "completions": ("chat", "default"),
    "responses": ("responses",),
    "embeddings": ("embeddings",),
    "messages": ("anthropic", "default"),
    "gemini": ("default",),
    "gemini_embed": ("default",),
    "cohere": ("default",),
    "cohere_embed": ("embeddings",),
    "converse": ("default",),
}
"""Flavour → the genai-prices extractors that read it, in order of preference."""

_DIALECTS: Final[Mapping[str, str]] = {
    "messages": "anthropic",
    "gemini": "google",
    "gemini_embed": "google",
    "cohere": "cohere",
    "cohere_embed": "cohere",
    "converse": "aws",
}
"""Flavour → the provider whose extractor reads it if the call's own provider has none."""

_ROOTS: Final[Mapping[str, str]] = {
    "chat": "prompt_tokens", "completions": "prompt_tokens", "embeddings": "prompt_tokens", "responses": "input_tokens",
    "messages": "cache_read_input_tokens", "converse": "inputTokens",
}  # fmt: skip
"""Flavour → a field that its extractor has to read; excludes a default extractor of another flavour."""


def bundled() -> list[Provider]:
    """Return the data of the installed genai-prices."""
    from genai_prices.data import providers

    return providers


@cache
def extractor_of(provider: str, flavour: str) -> UsageExtractor:
    """Return the extractor of a flavour, of the provider or of its maker. Raises ``ValueError`` if there is none."""
    for home_id in (provider, _DIALECTS.get(flavour, "openai")):
        # Extractors come from the bundled data only: an imported price file could omit parts of a bill.
        home = next((p for p in bundled() if p.id == home_id), None)
        extractors = {e.api_flavor: e for e in (home.extractors if home is not None else None) or ()}
        for name in _FLAVOURS[flavour]:
            extractor = extractors.get(name)
            if extractor is not None and _reads(extractor, _ROOTS.get(flavour)):
                return extractor
    raise ValueError(f"no extractor reads the usage of {provider}'s {flavour}")


@cache
def names_read(provider: str, flavour: str) -> frozenset[str]:
    """Return the names, with dots, of the counts that the extractor of a flavour reads."""
    extractor = extractor_of(provider, flavour)
    root = [extractor.root] if isinstance(extractor.root, str) else list(extractor.root)
    paths = ([mapping.path] if isinstance(mapping.path, str) else mapping.path for mapping in extractor.mappings)
    # The first part is the usage itself. A condition on the entries of a list has no name.
    return frozenset(".".join([*root[1:], *(part for part in path if isinstance(part, str))]) for path in paths)


def _reads(extractor: UsageExtractor, field: str | None) -> bool:
    return field is None or any(mapping.path == field for mapping in extractor.mappings)

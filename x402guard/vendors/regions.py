"""What a call costs more at a vendor's regional host: the factor on its prices, by model.

Each row is from the vendor's page of its regions or prices, read as a stored copy of November 2026. A model that is not
known to be free of the factor has it: a hold that is too large costs nothing, and a bill that is too small does.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from msgspec import Struct

from x402guard.vendors.routes import MeteredHost

_ONE: Final = Decimal(1)


class _Region(Struct, frozen=True):
    """The factor of a provider's regional hosts, and the models that cost the same everywhere."""

    factor: Decimal
    same: re.Pattern[str] | None = None


_TENTH: Final = Decimal("1.1")
_REGIONS: Final = {
    # Models released since 5 March 2026: developers.openai.com/api/docs/guides/data-residency.
    "openai": _Region(
        _TENTH,
        re.compile(
            r"(ft:)?(gpt-3\.5|gpt-4|chatgpt-4o|o[134](-|$)|gpt-5(-|$)|gpt-5\.[0123](-|$)|text-|tts-|whisper-|davinci|babbage"
            r"|computer-use-preview|gpt-audio|gpt-realtime(-mini)?(-2025.*)?$|gpt-image-1)"
        ),
    ),
    # Every host but the global one: cloud.google.com/gemini-enterprise-agent-platform, pricing; platform.claude.com, pricing.
    "google": _Region(
        _TENTH,
        re.compile(
            r"gemini-(1|2)\b|gemini-3-(pro|flash)|gemini-3\.1-pro|gemini-embedding|text-|textembedding"
            r"|claude-(3|opus-4(-1)?(@|-20|$)|sonnet-4(@|-20|$)|4-)"
        ),
    ),
    "mistral": _Region(_TENTH),  # docs.mistral.ai/inference/regional-inference
    "x-ai": _Region(_TENTH),  # docs.x.ai/developers/advanced-api-usage/regions
    "together": _Region(Decimal("1.25")),  # docs.together.ai/docs/serverless/geo-specific-inference
}
_FOR_ALL: Final = frozenset({"gov.api.openai.com"})
"""Hosts where every model has the factor."""


def region_factor(endpoint: MeteredHost, model: str) -> Decimal:
    """Return the factor on a model's token prices at an endpoint: 1 at a global one."""
    region = _REGIONS.get(endpoint.provider) if endpoint.regional else None
    if region is None:
        return _ONE
    same = region.same is not None and region.same.match(model) and endpoint.host not in _FOR_ALL
    return _ONE if same else region.factor

"""Libraries whose requests pass no httpx transport, so that nothing of theirs is held or paid."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Unseen:
    """A library, by the name it is imported by, and what to do about it."""

    name: str
    hint: str


_CLIENT: Final = "use a client that takes an httpx one"
_KNOWN: Final = (
    Unseen("requests", f"{_CLIENT}, or keep paid and metered calls out of it"),
    Unseen("aiohttp", _CLIENT),
    Unseen("boto3", "Bedrock is not metered; call models through a provider that speaks HTTP to httpx"),
    Unseen("botocore", "Bedrock is not metered; call models through a provider that speaks HTTP to httpx"),
    Unseen("grpc", "gRPC is not metered; Google's clients take transport='rest'"),
    Unseen("pycurl", _CLIENT),
    Unseen("urllib3", _CLIENT),
)


_GOOGLE: Final = Unseen(
    "google.genai",
    "its asynchronous calls go by aiohttp where that is installed; give it "
    "http_options=HttpOptions(httpx_async_client=httpx2.AsyncClient())",
)


def unseen_libraries(*, loaded: bool) -> list[Unseen]:
    """Return what this process has loaded, or else what is installed, that no transport of ours sees.

    What web3 loads by itself (requests, aiohttp) is left out where web3 is what loaded it: it is ours, and sends nothing.
    """
    if not loaded:
        return [library for library in _KNOWN if importlib.util.find_spec(library.name) is not None]
    ours: set[str] = {"requests", "aiohttp", "urllib3"} if "web3" in sys.modules else set()
    if {"openai", "anthropic"} & sys.modules.keys():
        ours = {*ours, "aiohttp"}  # loaded for clients of theirs that are httpx2's, and seen
    if "requests" in sys.modules:
        ours = {*ours, "urllib3"}  # one name is enough
    found = [library for library in _KNOWN if library.name in sys.modules and library.name not in ours]
    if {"google.genai", "aiohttp"} <= sys.modules.keys():
        found.append(_GOOGLE)
    return found

"""Clients that send past our transports: finds the loaded ones, and refuses aiohttp's calls to metered hosts."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct

from x402guard.flow.address import DEFAULT_PORTS
from x402guard.flow.drivers import run_async
from x402guard.flow.refusals import enforce
from x402guard.http.exchange import GUARDED_SEND
from x402guard.http.guarded import FindsPayer, has_guard
from x402guard.ledger.authorize import Refusal
from x402guard.llm.meter import Meter, Polled, Unmetered, classify

_SEAM: Final = "_request"


def refuse_aiohttp(payers: FindsPayer, meter: Meter) -> Callable[[], None]:
    """Refuse every aiohttp request to a metered host, except by guarded clients. Returns the function that undoes it.

    Does nothing if aiohttp is not installed. A refusal raises ``PolicyDenied`` and is counted in the ledger.
    """
    try:
        from aiohttp import ClientSession
    except ImportError:
        return lambda: None
    original = getattr(ClientSession, _SEAM)

    async def request(session: Any, method: str, url: Any, **more: Any) -> Any:
        if not GUARDED_SEND.get():
            await _refuse_metered(payers, meter, method, str(session._build_url(url)))  # noqa: SLF001 - a base URL counts
        return await original(session, method, url, **more)

    setattr(ClientSession, _SEAM, request)
    return lambda: setattr(ClientSession, _SEAM, original)


async def _refuse_metered(payers: FindsPayer, meter: Meter, method: str, url: str) -> None:
    parts = urlsplit(url)
    if not parts.hostname:
        return
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if parts.port not in (None, DEFAULT_PORTS.get(parts.scheme)):
        host = f"{host}:{parts.port}"
    if isinstance(classify(meter, method.upper(), host.lower(), url), Unmetered | Polled | None):
        return
    reason = (
        f"{method.upper()} {host}{parts.path} goes by aiohttp, which the guard does not see; give the SDK a client of httpx or "
        "httpx2's (google-genai: http_options=HttpOptions(httpx_async_client=httpx2.AsyncClient()))"
    )
    payer = payers.innermost()
    await run_async(enforce(payer.context, Refusal("unseen", reason)), payer.shell)


def clients_past_guard() -> list[str]:
    """Return what is wrong with each client that has a guarded transport and also sends by one that is not guarded.

    A client's ``proxy=`` and ``mounts=`` go past its ``transport=``.
    """
    found, kinds = [], _client_kinds()
    for client in gc.get_objects():
        if not isinstance(client, kinds):
            continue
        transport, mounts = client._transport, client._mounts  # noqa: SLF001 - there is no public way
        if not has_guard(transport):
            continue
        past = [pattern.pattern for pattern, mount in mounts.items() if not has_guard(mount or transport)]
        if past:
            kind = type(client)
            found.append(
                f"{kind.__module__.partition('.')[0]}.{kind.__name__} sends {', '.join(past)} past its guarded transport (proxy= or "
                "mounts=); give the guard the proxy: GuardedTransport(session, transport=HTTPTransport(proxy=…))"
            )
    return found


def _client_kinds() -> tuple[type[Any], ...]:
    loaded = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    return tuple(kind for library in loaded if library is not None for kind in (library.Client, library.AsyncClient))


class Unseen(Struct, frozen=True):
    """A library, by its import name, and how to guard its calls."""

    name: str
    hint: str


_CLIENT: Final = "use a client that takes an httpx one"


_BEDROCK: Final = (
    "Bedrock is metered where httpx calls it: anthropic's AnthropicBedrock, or an OpenAI client at its host"
)
_SOCKETS: Final = (
    "realtime and live APIs go over it, and are not metered; report what they use with session.record_usage"
)

_KNOWN: Final = (
    Unseen("requests", f"{_CLIENT}, or keep paid and metered calls out of it"),
    Unseen("aiohttp", _CLIENT),
    Unseen("boto3", _BEDROCK),
    Unseen("botocore", _BEDROCK),
    Unseen("websockets", _SOCKETS),
    Unseen("websocket", _SOCKETS),
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
    """Return the loaded (else the installed) libraries that send past our transports.

    Libraries that web3 loads itself (requests, aiohttp, websockets) are left out if web3 is loaded: it sends to nodes of a
    chain. So are those that OpenTelemetry's exporter loads.
    """
    if not loaded:
        return [library for library in _KNOWN if importlib.util.find_spec(library.name) is not None]
    ours: set[str] = {"requests", "aiohttp", "urllib3", "websockets"} if "web3" in sys.modules else set()
    if "opentelemetry.exporter.otlp.proto.http" in sys.modules:
        ours = {*ours, "requests", "urllib3"}  # it sends to a collector
    if {"openai", "anthropic"} & sys.modules.keys():
        ours = {*ours, "aiohttp"}  # they load it, but their clients are httpx2's, and seen
    # google-genai loads websockets for its live API, which its clients open only by name.
    for whole, part in (
        ("requests", "urllib3"), ("boto3", "botocore"), ("botocore", "urllib3"), ("google.genai", "websockets"),
    ):  # fmt: skip
        ours = {*ours, part} if whole in sys.modules else ours  # one name is enough
    found = [library for library in _KNOWN if library.name in sys.modules and library.name not in ours]
    if {"google.genai", "aiohttp"} <= sys.modules.keys():
        found.append(_GOOGLE)
    return found

"""A tripwire on aiohttp: what goes past the guard to a metered host is refused, and not lost without a word.

Some SDKs send by aiohttp where it is installed. It has no transports to guard; but it has one method that every request passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from x402guard.flow.drivers import run_async
from x402guard.flow.refusals import refused
from x402guard.http.exchange import GUARDED_SEND
from x402guard.http.guarded import Payer
from x402guard.ledger.authorize import Refusal
from x402guard.llm.meter import Meter, Unmetered, classify

_SEAM = "_request"
_PORTS = {"http": 80, "https": 443}


def lay_tripwire(payer: Payer, meter: Meter) -> Callable[[], None]:
    """Refuse every request of aiohttp's to a metered host, but those of clients that are guarded; return what undoes it.

    Nothing happens where aiohttp is not installed. What is refused raises ``PolicyDenied``, and is counted in the books.
    """
    try:
        from aiohttp import ClientSession
    except ImportError:
        return lambda: None
    original = getattr(ClientSession, _SEAM)

    async def request(session: Any, method: str, url: Any, **more: Any) -> Any:
        if not GUARDED_SEND.get():
            await _refuse_metered(payer, meter, method, str(session._build_url(url)))  # noqa: SLF001 - a base URL counts
        return await original(session, method, url, **more)

    setattr(ClientSession, _SEAM, request)
    return lambda: setattr(ClientSession, _SEAM, original)


async def _refuse_metered(payer: Payer, meter: Meter, method: str, url: str) -> None:
    parts = urlsplit(url)
    if not parts.hostname:
        return
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if parts.port not in (None, _PORTS.get(parts.scheme)):
        host = f"{host}:{parts.port}"
    if isinstance(classify(meter, method.upper(), host.lower(), url), Unmetered | None):
        return
    reason = (
        f"{method.upper()} {host}{parts.path} goes by aiohttp, which the guard does not see; give the SDK a client of httpx's or "
        "httpx2's (google-genai: http_options=HttpOptions(httpx_async_client=httpx2.AsyncClient()))"
    )
    terms = payer.conversation_terms()
    raise await run_async(refused(terms, Refusal("unseen", reason)), payer.shell)

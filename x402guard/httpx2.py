"""The two transports for httpx2, which newer vendor SDKs use.

::

    import anthropic, httpx2
    from x402guard.httpx2 import GuardedTransport

    client = anthropic.Anthropic(http_client=httpx2.Client(transport=GuardedTransport(session)))

They answer a refusal with a local 402 unless ``on_refusal`` is ``raise``: SDKs retry what a transport raises, and hide
it. ``x402guard.refusal_from(error)`` returns the typed refusal from the SDK's own exception.
"""

from __future__ import annotations

from typing import Any, Final, cast

import httpx2

from x402guard.http.families import Library
from x402guard.http.guarded import AwaitedGuard, BlockingGuard, FindsPayer, OnRefusal
from x402guard.http.streams import EXTENSION

__all__ = ["EXTENSION", "HTTPX2", "AsyncGuardedTransport", "GuardedTransport"]


def _same(theirs: type) -> Any:
    """Return an httpx2 class with the type of the httpx class of the same shape."""
    return cast("Any", theirs)


HTTPX2: Final = Library(
    name="httpx2",
    request=_same(httpx2.Request),
    response=_same(httpx2.Response),
    headers=_same(httpx2.Headers),
    bytes_stream=_same(httpx2.ByteStream),
    sync_stream=_same(httpx2.SyncByteStream),
    async_stream=_same(httpx2.AsyncByteStream),
    undecodable=httpx2.DecodingError,
    transport_error=httpx2.TransportError,
    unsent=(httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol),
    stock=(httpx2.HTTPTransport, httpx2.AsyncHTTPTransport),
    transports=(httpx2.BaseTransport, httpx2.AsyncBaseTransport),
)


class GuardedTransport(BlockingGuard, httpx2.BaseTransport):
    """``x402guard.GuardedTransport`` for ``httpx2.Client``; default: ``httpx2.HTTPTransport()``."""

    library = HTTPX2

    def __init__(
        self, session: FindsPayer, transport: httpx2.BaseTransport | None = None, on_refusal: OnRefusal = "respond"
    ) -> None:
        super().__init__(session, transport, on_refusal)


class AsyncGuardedTransport(AwaitedGuard, httpx2.AsyncBaseTransport):
    """``x402guard.AsyncGuardedTransport`` for ``httpx2.AsyncClient``; default: ``httpx2.AsyncHTTPTransport()``."""

    library = HTTPX2

    def __init__(
        self, session: FindsPayer, transport: httpx2.AsyncBaseTransport | None = None, on_refusal: OnRefusal = "respond"
    ) -> None:
        super().__init__(session, transport, on_refusal)

"""``GuardedTransport`` and ``AsyncGuardedTransport``: transports for httpx that run a flow per request.

A transport only moves bytes: it passes status and headers to the flow, adds a payment header to its own copy of the
request, and returns the last response unchanged.
"""

from __future__ import annotations

from typing import Final

import httpx

from x402guard.http.families import Library
from x402guard.http.guarded import AwaitedGuard, BlockingGuard, FindsPayer, OnRefusal

HTTPX: Final = Library(
    name="httpx",
    request=httpx.Request,
    response=httpx.Response,
    headers=httpx.Headers,
    bytes_stream=httpx.ByteStream,
    sync_stream=httpx.SyncByteStream,
    async_stream=httpx.AsyncByteStream,
    undecodable=httpx.DecodingError,
    transport_error=httpx.TransportError,
    unsent=(httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol),
    stock=(httpx.HTTPTransport, httpx.AsyncHTTPTransport),
    transports=(httpx.BaseTransport, httpx.AsyncBaseTransport),
)


class GuardedTransport(BlockingGuard, httpx.BaseTransport):
    """An httpx transport that pays 402s and meters LLM calls within a session's budget.

    Args:
        session: a ``Session``, or a ``Guard`` if sessions share the client: each request uses the session in context.
        transport: the inner transport that sends; default: ``httpx.HTTPTransport()``.
        on_refusal: ``"raise"`` raises the typed error; ``"respond"`` returns a local 402 with problem+json instead.
    """

    library = HTTPX

    def __init__(
        self, session: FindsPayer, transport: httpx.BaseTransport | None = None, on_refusal: OnRefusal = "raise"
    ) -> None:
        super().__init__(session, transport, on_refusal)


class AsyncGuardedTransport(AwaitedGuard, httpx.AsyncBaseTransport):
    """``GuardedTransport`` for ``httpx.AsyncClient``; default inner transport: ``httpx.AsyncHTTPTransport()``."""

    library = HTTPX

    def __init__(
        self, session: FindsPayer, transport: httpx.AsyncBaseTransport | None = None, on_refusal: OnRefusal = "raise"
    ) -> None:
        super().__init__(session, transport, on_refusal)

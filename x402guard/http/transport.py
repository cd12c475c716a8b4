"""``GuardedTransport`` and ``AsyncGuardedTransport``: httpx on the outside, a flow on the inside.

The transport moves bytes and nothing else: it shows the flow status and headers, adds a payment header to its own copy of the
request, and hands the last response over as it came.
"""

from __future__ import annotations

from typing import Final

import httpx

from x402guard.http.families import Library
from x402guard.http.guarded import AwaitedGuard, BlockingGuard, FindsPayer, OnRefusal

HTTPX: Final = Library(
    request=httpx.Request,
    response=httpx.Response,
    headers=httpx.Headers,
    bytes_stream=httpx.ByteStream,
    sync_stream=httpx.SyncByteStream,
    async_stream=httpx.AsyncByteStream,
    unsent=(httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol),
    stock=(httpx.HTTPTransport, httpx.AsyncHTTPTransport),
    transports=(httpx.BaseTransport, httpx.AsyncBaseTransport),
)


class GuardedTransport(BlockingGuard, httpx.BaseTransport):
    """An httpx transport that pays 402s and meters LLM calls out of a session's budget, and never past it.

    Args:
        session: a ``Session``, or a ``Guard`` for a client shared by many sessions: each request belongs to the session in
            context.
        transport: what really sends; ``httpx.HTTPTransport()`` when none is given.
        on_refusal: ``"raise"`` raises the typed error; ``"respond"`` answers a local 402 with problem+json instead.
    """

    library = HTTPX

    def __init__(
        self, session: FindsPayer, transport: httpx.BaseTransport | None = None, on_refusal: OnRefusal = "raise"
    ) -> None:
        super().__init__(session, transport, on_refusal)


class AsyncGuardedTransport(AwaitedGuard, httpx.AsyncBaseTransport):
    """``GuardedTransport`` for ``httpx.AsyncClient``; ``httpx.AsyncHTTPTransport()`` when none is given."""

    library = HTTPX

    def __init__(
        self, session: FindsPayer, transport: httpx.AsyncBaseTransport | None = None, on_refusal: OnRefusal = "raise"
    ) -> None:
        super().__init__(session, transport, on_refusal)

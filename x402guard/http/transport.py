"""``GuardedTransport`` and ``AsyncGuardedTransport``: httpx on the outside, a flow on the inside.

The transport moves bytes and nothing else: it shows the flow status and headers, adds a payment header to its own copy of the
request, and hands the last response over as it came.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

import httpx

from x402guard.errors import ConfigError
from x402guard.http.families import Library
from x402guard.http.guarded import Guarded, OnRefusal, Payer

HTTPX: Final = Library(
    request=httpx.Request,
    response=httpx.Response,
    headers=httpx.Headers,
    bytes_stream=httpx.ByteStream,
    sync_stream=httpx.SyncByteStream,
    async_stream=httpx.AsyncByteStream,
    unsent=(httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol),
    stock=(httpx.HTTPTransport, httpx.AsyncHTTPTransport),
)


class GuardedTransport(Guarded, httpx.BaseTransport):
    """An httpx transport that pays 402s and meters LLM calls out of a session's budget, and never past it.

    Args:
        session: a ``Session``, or a ``Guard`` for a client shared by many sessions: each request belongs to the session in
            context.
        transport: what really sends; ``httpx.HTTPTransport()`` when none is given.
        on_refusal: ``"raise"`` raises the typed error; ``"respond"`` answers a local 402 with problem+json instead.
    """

    library = HTTPX

    def __init__(
        self, session: Payer, transport: httpx.BaseTransport | None = None, on_refusal: OnRefusal = "raise"
    ) -> None:
        super().__init__(session, on_refusal)
        if transport is not None and not isinstance(transport, httpx.BaseTransport):
            raise ConfigError(
                f"transport: {transport!r} is no httpx.BaseTransport; for httpx.AsyncClient take AsyncGuardedTransport, "
                "for httpx2 the transports of x402guard.httpx2"
            )
        self._inner = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send *request*, paying for it where that is asked and allowed, metering it where it calls an LLM.

        Raises ``X402GuardError`` and its kin, and the inner transport's own errors where no payment was involved.
        """
        return self.exchange(self._inner, request)

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)

    def close(self) -> None:
        """Close the inner transport. The session and its ledger stay as they are."""
        self._inner.close()


class AsyncGuardedTransport(Guarded, httpx.AsyncBaseTransport):
    """The same as ``GuardedTransport``, for ``httpx.AsyncClient``; ``httpx.AsyncHTTPTransport()`` when none is given."""

    library = HTTPX

    def __init__(
        self, session: Payer, transport: httpx.AsyncBaseTransport | None = None, on_refusal: OnRefusal = "raise"
    ) -> None:
        super().__init__(session, on_refusal)
        if transport is not None and not isinstance(transport, httpx.AsyncBaseTransport):
            raise ConfigError(
                f"transport: {transport!r} is no httpx.AsyncBaseTransport; for httpx.Client take GuardedTransport, "
                "for httpx2 the transports of x402guard.httpx2"
            )
        self._inner = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See ``GuardedTransport.handle_request``."""
        return await self.exchange_async(self._inner, request)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)

    async def aclose(self) -> None:
        """Close the inner transport. The session and its ledger stay as they are."""
        await self._inner.aclose()

"""The same two transports for httpx2, on which the newer vendor SDKs are built: thin, over the same core.

::

    import anthropic, httpx2
    from x402guard.httpx2 import GuardedTransport

    client = anthropic.Anthropic(http_client=httpx2.Client(transport=GuardedTransport(session)))

They answer a refusal with a local 402 unless told to raise: SDKs retry what a transport raises, and hide it. What was refused is
given back, typed, by ``x402guard.http.refusal_from(error)`` from whatever exception the SDK makes of it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Self, cast

import httpx2

from x402guard.errors import ConfigError
from x402guard.http.families import Library
from x402guard.http.guarded import Guarded, OnRefusal, Payer
from x402guard.http.streams import EXTENSION

__all__ = ["EXTENSION", "HTTPX2", "AsyncGuardedTransport", "GuardedTransport"]


def _same(theirs: type) -> Any:
    """Return a class of httpx2's as the class of httpx's whose shape it has."""
    return cast("Any", theirs)


HTTPX2: Final = Library(
    request=_same(httpx2.Request),
    response=_same(httpx2.Response),
    headers=_same(httpx2.Headers),
    bytes_stream=_same(httpx2.ByteStream),
    sync_stream=_same(httpx2.SyncByteStream),
    async_stream=_same(httpx2.AsyncByteStream),
    unsent=(httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol),
    stock=(httpx2.HTTPTransport, httpx2.AsyncHTTPTransport),
)


class GuardedTransport(Guarded, httpx2.BaseTransport):
    """``x402guard.GuardedTransport`` for ``httpx2.Client``; ``httpx2.HTTPTransport()`` when none is given."""

    library = HTTPX2

    def __init__(
        self, session: Payer, transport: httpx2.BaseTransport | None = None, on_refusal: OnRefusal = "respond"
    ) -> None:
        super().__init__(session, on_refusal)
        if transport is not None and not isinstance(transport, httpx2.BaseTransport):
            raise ConfigError(f"transport: {transport!r} is no httpx2.BaseTransport")
        self._inner = httpx2.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """See ``x402guard.GuardedTransport.handle_request``."""
        return cast("httpx2.Response", self.exchange(cast("Any", self._inner), cast("Any", request)))

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


class AsyncGuardedTransport(Guarded, httpx2.AsyncBaseTransport):
    """The same, for ``httpx2.AsyncClient``; ``httpx2.AsyncHTTPTransport()`` when none is given."""

    library = HTTPX2

    def __init__(
        self, session: Payer, transport: httpx2.AsyncBaseTransport | None = None, on_refusal: OnRefusal = "respond"
    ) -> None:
        super().__init__(session, on_refusal)
        if transport is not None and not isinstance(transport, httpx2.AsyncBaseTransport):
            raise ConfigError(f"transport: {transport!r} is no httpx2.AsyncBaseTransport")
        self._inner = httpx2.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """See ``x402guard.GuardedTransport.handle_request``."""
        return cast("httpx2.Response", await self.exchange_async(cast("Any", self._inner), cast("Any", request)))

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

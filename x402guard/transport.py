"""``GuardedTransport`` and ``AsyncGuardedTransport``: httpx on the outside, a flow on the inside.

The transport moves bytes and nothing else: it shows the flow status and headers, adds a payment header to its own copy of the
request, and hands the last response over as it came.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Final, Literal, Protocol, Self, get_args

import anyio
import httpx

from x402guard.assets import AssetRegistry
from x402guard.drivers import Shell, run, run_async
from x402guard.effects import Flow, Reply, SendFailed
from x402guard.errors import ConfigError, PaymentRefused, X402GuardError
from x402guard.flow import paid_request
from x402guard.incoming import AsyncReplay, Replay, decoded_body, problem_response
from x402guard.outgoing import LogicalRequest, Outgoing, buffer_body, buffer_body_async, describe_request
from x402guard.purchase import Terms
from x402guard.settlement import Receipt

__all__ = ["EXTENSION", "AsyncGuardedTransport", "GuardedTransport", "OnRefusal", "Payer"]

EXTENSION: Final = "x402guard"
"""Where the receipt stands in ``response.extensions``."""

OnRefusal = Literal["raise", "respond"]


class Payer(Protocol):
    """What a transport needs of a session, or of a guard that finds the session in context."""

    def conversation_terms(self) -> Terms:
        """Return the terms of the innermost budget in context. Raises ``ConfigError`` where there is none of ours."""

    @property
    def shell(self) -> Shell:
        """The books, the key and the chains."""

    @property
    def registry(self) -> AssetRegistry:
        """The tokens we trust."""

    @property
    def max_body_bytes(self) -> int:
        """How much of a streaming request body is kept, so that a paid request can repeat it."""


class _Guarded:
    """What both transports do alike: facts in, receipt or refusal out."""

    def __init__(self, payer: Payer, *, on_refusal: OnRefusal) -> None:
        if isinstance(payer, type) or not hasattr(payer, "conversation_terms"):
            raise ConfigError(f"GuardedTransport(…): {payer!r} is neither a Session nor a Guard")
        if on_refusal not in get_args(OnRefusal):
            raise ConfigError(f"on_refusal: {on_refusal!r} is neither 'raise' nor 'respond'")
        self._payer = payer
        self._on_refusal = on_refusal

    def _begin(
        self, request: httpx.Request, logical: LogicalRequest, body: bytes | None, *, stock: bool
    ) -> tuple[Flow[Receipt | None], Outgoing]:
        facts = describe_request(request, logical, body)
        flow = paid_request(facts, self._payer.conversation_terms(), self._payer.registry)
        return flow, Outgoing(request, body, logical, stock=stock)

    def _finish(self, logical: LogicalRequest, response: httpx.Response, receipt: Receipt | None) -> httpx.Response:
        logical.receipt = receipt or logical.receipt
        if logical.receipt is not None:
            response.extensions[EXTENSION] = logical.receipt
        logical.answered(response)
        return response

    def _failed(self, error: X402GuardError, request: httpx.Request) -> httpx.Response:
        error.request = request
        if isinstance(error, PaymentRefused) and self._on_refusal == "respond":
            return problem_response(error, request)
        raise error


class GuardedTransport(_Guarded, httpx.BaseTransport):
    """An httpx transport that pays 402s out of a session's budget, and never past it.

    Args:
        session: a ``Session``, or a ``Guard`` for a client shared by many sessions: each request belongs to the session in
            context.
        transport: what really sends; ``httpx.HTTPTransport()`` when none is given.
        on_refusal: ``"raise"`` raises the typed error; ``"respond"`` answers a local 402 with problem+json instead.
    """

    def __init__(
        self, session: Payer, transport: httpx.BaseTransport | None = None, on_refusal: OnRefusal = "raise"
    ) -> None:
        super().__init__(session, on_refusal=on_refusal)
        if transport is not None and not isinstance(transport, httpx.BaseTransport):
            raise ConfigError(
                f"transport: {transport!r} is no httpx.BaseTransport; for httpx.AsyncClient take AsyncGuardedTransport"
            )
        self._inner = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send *request*, paying for it where that is asked and allowed.

        Raises ``X402GuardError`` and its kin, and the inner transport's own errors where no payment was involved.
        """
        body = buffer_body(request, self._payer.max_body_bytes)
        logical = LogicalRequest.of(request)
        exchange = _Exchange(self._inner)
        try:
            flow, exchange.outgoing = self._begin(
                request, logical, body, stock=type(self._inner) is httpx.HTTPTransport
            )
            receipt = run(flow, self._payer.shell, exchange)
        except X402GuardError as error:
            logical.end()
            exchange.discard()
            return self._failed(error, request)
        except BaseException:
            logical.end()
            exchange.discard()
            raise
        return self._finish(logical, exchange.response(), receipt)

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


class AsyncGuardedTransport(_Guarded, httpx.AsyncBaseTransport):
    """The same as ``GuardedTransport``, for ``httpx.AsyncClient``; ``httpx.AsyncHTTPTransport()`` when none is given."""

    def __init__(
        self, session: Payer, transport: httpx.AsyncBaseTransport | None = None, on_refusal: OnRefusal = "raise"
    ) -> None:
        super().__init__(session, on_refusal=on_refusal)
        if transport is not None and not isinstance(transport, httpx.AsyncBaseTransport):
            raise ConfigError(
                f"transport: {transport!r} is no httpx.AsyncBaseTransport; for httpx.Client take GuardedTransport"
            )
        self._inner = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See ``GuardedTransport.handle_request``."""
        body = await buffer_body_async(request, self._payer.max_body_bytes)
        logical = LogicalRequest.of(request)
        exchange = _AsyncExchange(self._inner)
        try:
            flow, exchange.outgoing = self._begin(
                request, logical, body, stock=type(self._inner) is httpx.AsyncHTTPTransport
            )
            receipt = await run_async(flow, self._payer.shell, exchange)
        except X402GuardError as error:
            logical.end()
            await exchange.discard()
            return self._failed(error, request)
        except GeneratorExit:
            logical.end()
            raise  # the coroutine is thrown away, its loop may be gone: nothing can be awaited
        except BaseException:
            logical.end()
            await exchange.discard()
            raise
        return self._finish(logical, exchange.response(), receipt)

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


class _Exchange:
    outgoing: Outgoing

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner
        self._response: httpx.Response | None = None

    def send(self, headers: tuple[tuple[str, str], ...], pays: str | None) -> Reply:
        try:
            self.close()
            self._response = self._inner.handle_request(self.outgoing.copy(headers, pays))
        except Exception as error:
            raise self.outgoing.failed(error) from error
        return Reply(self._response.status_code, tuple(self._response.headers.multi_items()))

    def peek(self, limit: int) -> bytes | None:
        response = self.response()
        if not isinstance(response.stream, httpx.SyncByteStream):
            raise TypeError("the inner transport answered with an asynchronous stream")
        replay = response.stream if isinstance(response.stream, Replay) else Replay(response.stream)
        response.stream = replay
        try:
            raw = replay.keep(limit)
        except Exception as error:
            raise SendFailed(error, before_connection=False) from error
        return None if raw is None else decoded_body(response, raw, limit)

    def response(self) -> httpx.Response:
        if self._response is None:
            raise TypeError("no request was sent yet")
        return self._response

    def close(self) -> None:
        if self._response is not None:
            response, self._response = self._response, None
            response.close()

    def discard(self) -> None:
        """Close an answer that nobody will read, on the way out of an error that matters more than how this ends."""
        with suppress(Exception):
            self.close()


class _AsyncExchange:
    outgoing: Outgoing

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self._response: httpx.Response | None = None

    async def send(self, headers: tuple[tuple[str, str], ...], pays: str | None) -> Reply:
        try:
            await self.aclose()
            self._response = await self._inner.handle_async_request(self.outgoing.copy(headers, pays))
        except Exception as error:
            raise self.outgoing.failed(error) from error
        return Reply(self._response.status_code, tuple(self._response.headers.multi_items()))

    async def peek(self, limit: int) -> bytes | None:
        response = self.response()
        if not isinstance(response.stream, httpx.AsyncByteStream):
            raise TypeError("the inner transport answered with a synchronous stream")
        replay = response.stream if isinstance(response.stream, AsyncReplay) else AsyncReplay(response.stream)
        response.stream = replay
        try:
            raw = await replay.keep(limit)
        except Exception as error:
            raise SendFailed(error, before_connection=False) from error
        return None if raw is None else decoded_body(response, raw, limit)

    def response(self) -> httpx.Response:
        if self._response is None:
            raise TypeError("no request was sent yet")
        return self._response

    async def aclose(self) -> None:
        if self._response is not None:
            response, self._response = self._response, None
            await response.aclose()

    async def discard(self) -> None:
        """See ``_Exchange.discard``; a cancelled task still gives its connection back."""
        with anyio.CancelScope(shield=True), suppress(Exception):
            await self.aclose()

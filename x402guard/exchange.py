"""One request's HTTP side, over the transport of either library: what the drivers send with, and what answered."""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import anyio

from x402guard.effects import Reply, SendFailed
from x402guard.incoming import AsyncReplay, Replay, decoded_body
from x402guard.library import Library
from x402guard.outgoing import Outgoing

if TYPE_CHECKING:
    import httpx

__all__ = ["GUARDED_SEND", "AsyncExchanged", "Exchanged"]

GUARDED_SEND: Final[ContextVar[bool]] = ContextVar("x402guard_guarded_send", default=False)
"""True while a transport of the caller's sends for us, by whatever library it may stand on."""


class Exchanged:
    """One request's exchange over a blocking transport; see ``drivers.Exchange``."""

    outgoing: Outgoing

    def __init__(self, library: Library, inner: httpx.BaseTransport) -> None:
        self._library, self._inner = library, inner
        self._response: httpx.Response | None = None

    def send(self, headers: tuple[tuple[str, str], ...], pays: str | None, body: bytes | None) -> Reply:
        """See ``drivers.Exchange.send``."""
        try:
            self.close()
            self._response = self._inner.handle_request(self.outgoing.copy(headers, pays, body))
        except Exception as error:
            raise self.outgoing.failed(error) from error
        return Reply(self._response.status_code, tuple(self._response.headers.multi_items()))

    def peek(self, limit: int) -> bytes | None:
        """See ``drivers.Exchange.peek``."""
        response = self.response()
        if not isinstance(response.stream, self._library.sync_stream):
            raise TypeError("the inner transport answered with an asynchronous stream")
        replay = response.stream if isinstance(response.stream, Replay) else self._library.replay(response.stream)
        response.stream = replay  # type: ignore[assignment]  # it is of the library's family, too
        try:
            raw = replay.keep(limit)
        except Exception as error:
            raise SendFailed(error, before_connection=False) from error
        return None if raw is None else decoded_body(response, raw, limit)

    def response(self) -> httpx.Response:
        """Return the last response that was received."""
        if self._response is None:
            raise TypeError("no request was sent yet")
        return self._response

    def close(self) -> None:
        """Close the response, where there is one."""
        if self._response is not None:
            response, self._response = self._response, None
            response.close()

    def discard(self) -> None:
        """Close an answer that nobody will read, on the way out of an error that matters more than how this ends."""
        with suppress(Exception):
            self.close()


class AsyncExchanged:
    """The same, over an asynchronous transport."""

    outgoing: Outgoing

    def __init__(self, library: Library, inner: httpx.AsyncBaseTransport) -> None:
        self._library, self._inner = library, inner
        self._response: httpx.Response | None = None

    async def send(self, headers: tuple[tuple[str, str], ...], pays: str | None, body: bytes | None) -> Reply:
        """See ``drivers.Exchange.send``."""
        try:
            await self.aclose()
            before = GUARDED_SEND.get()
            GUARDED_SEND.set(True)
            try:
                self._response = await self._inner.handle_async_request(self.outgoing.copy(headers, pays, body))
            finally:
                GUARDED_SEND.set(before)
        except Exception as error:
            raise self.outgoing.failed(error) from error
        return Reply(self._response.status_code, tuple(self._response.headers.multi_items()))

    async def peek(self, limit: int) -> bytes | None:
        """See ``drivers.Exchange.peek``."""
        response = self.response()
        if not isinstance(response.stream, self._library.async_stream):
            raise TypeError("the inner transport answered with a synchronous stream")
        replay = (
            response.stream if isinstance(response.stream, AsyncReplay) else self._library.async_replay(response.stream)
        )
        response.stream = replay  # type: ignore[assignment]  # it is of the library's family, too
        try:
            raw = await replay.keep(limit)
        except Exception as error:
            raise SendFailed(error, before_connection=False) from error
        return None if raw is None else decoded_body(response, raw, limit)

    def response(self) -> httpx.Response:
        """Return the last response that was received."""
        if self._response is None:
            raise TypeError("no request was sent yet")
        return self._response

    async def aclose(self) -> None:
        """Close the response, where there is one."""
        if self._response is not None:
            response, self._response = self._response, None
            await response.aclose()

    async def discard(self) -> None:
        """See ``Exchanged.discard``; a cancelled task still gives its connection back."""
        with anyio.CancelScope(shield=True), suppress(Exception):
            await self.aclose()

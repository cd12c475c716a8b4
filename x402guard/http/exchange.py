"""One request's HTTP side, over the transport of either library: what the drivers send with, and what answered."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import anyio

from x402guard.flow.detached import Aside, TooLate, within
from x402guard.flow.effects import PeekBody, Reply, Send, SendFailed
from x402guard.flow.ports import Slot
from x402guard.flow.sealed import forgetting
from x402guard.http.deadline import AsyncWatched, Watch, Watched
from x402guard.http.families import Library
from x402guard.http.request import OutgoingRequest
from x402guard.http.response import decoded_body
from x402guard.http.streams import AsyncReplay, Replay

if TYPE_CHECKING:
    import httpx

GUARDED_SEND: Final[ContextVar[bool]] = ContextVar("x402guard_guarded_send", default=False)
"""True while a transport of the caller's sends for us, by whatever library it may stand on."""


def _showing_no_payment(effect: Send) -> AbstractContextManager[None]:
    """The frames in which a payment could not be sent hold it in bytes and headers; what is not paid keeps its own."""
    return nullcontext() if effect.pays is None else forgetting()


class _ExchangeState:
    """What both kinds of exchange keep: the last response, the slot it takes and how long it may go on."""

    outgoing: OutgoingRequest

    def __init__(self, library: Library, inner: Any) -> None:
        self._library, self._inner = library, inner
        self._response: httpx.Response | None = None
        self._slot: Slot | None = None
        self._watch: Watch | None = None
        self.watched: Any = None
        self.is_stock = type(inner) in library.stock

    def keep(self, slot: Slot | None) -> None:
        """See ``drivers.Exchange.keep``."""
        if self._slot is not None:
            self._slot.leave()
        if self._watch is not None:
            self._watch.leave()  # the answer before is as good as read: nobody waits for a slot at a host while taking one
        self._slot = slot

    def response(self) -> httpx.Response:
        """Return the last response that was received."""
        if self._response is None:
            raise TypeError("no request was sent yet")
        return self._response

    def begin(self, call_s: int | None, chunk_s: int | None) -> Watch | None:
        """Watch what is sent now, where it has so many seconds or takes a slot."""
        if call_s is None and chunk_s is None and self._slot is None:
            self._watch = None
        else:
            self._watch = Watch(call_s, chunk_s)
        return self._watch

    def watch_body(self, response: httpx.Response, kind: type[Any]) -> None:
        """Let the time go on while the body of *response* is read."""
        self.watched = None
        if self._watch is None:
            return
        self._watch.take(self._slot)  # it is the body's now
        self._slot = None
        if response.is_closed:
            self._watch.end()  # it is in memory already
        else:
            self.watched = kind(response, self._watch)
            response.stream = self.watched

    def lift(self) -> None:
        """Nothing was paid or metered in the end: whoever reads the body has any time for it."""
        if self._watch is not None:
            self._watch.lift()

    def leave(self) -> None:
        """Leave the slot that no answer takes any more."""
        self.keep(None)


class Exchanged(_ExchangeState):
    """One request's exchange over a blocking transport; see ``drivers.Exchange``."""

    def send(self, effect: Send) -> Reply:
        """See ``drivers.Exchange.send``."""
        try:
            self.close()
            with _showing_no_payment(effect):
                request = self.outgoing.copy(effect.headers, effect.pays, effect.body)
                watch = self.begin(effect.call_s, effect.chunk_s)
                if watch is not None and watch.left_s is not None and self.outgoing.stock:
                    response = self._sent_aside(request, watch)
                else:
                    response = self._inner.handle_request(request)
        except Exception as error:
            raise self.outgoing.failed(error) from error
        self._response = self.outgoing.answered(response)
        if watch is not None:
            self.watch_body(response, self._library.of(Watched))
        return Reply(response.status_code, tuple(response.headers.multi_items()))

    def _sent_aside(self, request: httpx.Request, watch: Watch) -> httpx.Response:
        """Send in a thread of its own: a server that sends its headers byte by byte keeps every read from being late."""
        slot, self._slot = self._slot, None

        def call() -> httpx.Response:
            return self._inner.handle_request(request)  # type: ignore[no-any-return]  # a transport of the library's

        def late(response: httpx.Response | None) -> None:
            if slot is not None:
                slot.leave()  # until now it was taken: a host that hangs hangs on to no more than its places
            if response is not None:
                with suppress(Exception):  # nobody reads it
                    response.close()

        try:
            response = Aside(call, late).within(watch.left_s)
        except TooLate:
            raise watch.timeout() from None
        except Exception:
            self._slot = slot
            raise
        self._slot = slot
        return response

    def peek(self, effect: PeekBody) -> bytes | None:
        """See ``drivers.Exchange.peek``."""
        response = self.response()
        if not isinstance(response.stream, self._library.sync_stream):
            raise TypeError("the inner transport answered with an asynchronous stream")
        if self.watched is None and effect.call_s is not None:
            self._watch = Watch(effect.call_s, None)
            self.watch_body(response, self._library.of(Watched))
        replay = response.stream if isinstance(response.stream, Replay) else self._library.of(Replay)(response.stream)
        response.stream = replay
        try:
            raw = replay.keep(effect.limit)
        except Exception as error:
            raise SendFailed(error, before_connection=False) from error
        return None if raw is None else decoded_body(response, raw, effect.limit)

    def close(self) -> None:
        """Close the response, where there is one."""
        if self._response is not None:
            response, self._response = self._response, None
            response.close()

    def discard(self) -> None:
        """Close an answer that nobody will read, on the way out of an error that matters more than how this ends."""
        with suppress(Exception):
            self.close()
        self.leave()


class AsyncExchanged(_ExchangeState):
    """The same, over an asynchronous transport."""

    async def send(self, effect: Send) -> Reply:
        """See ``drivers.Exchange.send``."""
        try:
            await self.aclose()
            with _showing_no_payment(effect):
                request = self.outgoing.copy(effect.headers, effect.pays, effect.body)
                watch = self.begin(effect.call_s, effect.chunk_s)
                response = await self._sent(request, watch)
        except Exception as error:
            raise self.outgoing.failed(error) from error
        self._response = self.outgoing.answered(response)
        if watch is not None:
            self.watch_body(response, self._library.of(AsyncWatched))
        return Reply(response.status_code, tuple(response.headers.multi_items()))

    async def _sent(self, request: httpx.Request, watch: Watch | None) -> httpx.Response:
        before = GUARDED_SEND.get()
        GUARDED_SEND.set(True)
        try:
            left_s = None if watch is None else watch.left_s
            return await within(left_s, lambda: self._inner.handle_async_request(request))
        except TooLate:
            raise (watch or Watch(None, None)).timeout() from None
        finally:
            GUARDED_SEND.set(before)

    async def peek(self, effect: PeekBody) -> bytes | None:
        """See ``drivers.Exchange.peek``."""
        response = self.response()
        if not isinstance(response.stream, self._library.async_stream):
            raise TypeError("the inner transport answered with a synchronous stream")
        if self.watched is None and effect.call_s is not None:
            self._watch = Watch(effect.call_s, None)
            self.watch_body(response, self._library.of(AsyncWatched))
        replay = (
            response.stream
            if isinstance(response.stream, AsyncReplay)
            else self._library.of(AsyncReplay)(response.stream)
        )
        response.stream = replay
        try:
            raw = await replay.keep(effect.limit)
        except Exception as error:
            raise SendFailed(error, before_connection=False) from error
        return None if raw is None else decoded_body(response, raw, effect.limit)

    async def aclose(self) -> None:
        """Close the response, where there is one."""
        if self._response is not None:
            response, self._response = self._response, None
            await response.aclose()

    async def discard(self) -> None:
        """See ``Exchanged.discard``; a cancelled task still gives its connection back."""
        with anyio.CancelScope(shield=True), suppress(Exception):
            await self.aclose()
        self.leave()

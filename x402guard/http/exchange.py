"""The HTTP side of one request, over a transport of httpx or httpx2: the drivers send and read through it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import anyio

from x402guard.errors import CallTimeout
from x402guard.flow.bulkheads import around
from x402guard.flow.context import Context
from x402guard.flow.detached import Aside, TooLate, within
from x402guard.flow.effects import PeekBody, Reply, Send, SendFailed
from x402guard.flow.ports import Slot
from x402guard.flow.receipt import Receipt, timed_out
from x402guard.flow.sealed import forgetting
from x402guard.http.asked import MAY_BE_LESS, Asked
from x402guard.http.deadline import AsyncWatched, Watch, Watched
from x402guard.http.families import Library
from x402guard.http.frames import frames_of
from x402guard.http.request import OutgoingRequest, lines_of
from x402guard.http.response import decoded_body
from x402guard.http.streams import AsyncReplay, Replay
from x402guard.ledger.purchases import Presentation

if TYPE_CHECKING:
    import httpx

GUARDED_SEND: Final[ContextVar[bool]] = ContextVar("x402guard_guarded_send", default=False)
"""True while the inner transport sends for a guarded transport, whatever library it uses."""


_DISCARD_S: Final = 5
"""For how many seconds an unread answer is closed: a client that several loops share may never close it."""


def _showing_no_payment(effect: Send) -> AbstractContextManager[None]:
    """Clear the frames of an error if a payment was sent: their locals hold it in bytes and headers."""
    return nullcontext() if effect.pays is None else forgetting()


def _content(response: httpx.Response, limit: int) -> bytes | None:
    """Return a body that the inner transport has read, decoded; None if it is longer, or was closed unread."""
    try:
        content = response.content
    except RuntimeError:  # as the families say that it was not read
        return None
    return content if len(content) <= limit else None


class _ExchangeState:
    """The common state of both exchanges: the last response, its slot and its deadline."""

    outgoing: OutgoingRequest

    def __init__(self, library: Library, inner: Any) -> None:
        self._library, self._inner = library, inner
        self._response: httpx.Response | None = None
        self._slot: Slot | None = None
        self._watch: Watch | None = None
        self.watched: Any = None
        self.context: Context | None = None
        self._presents: Presentation = ("", 0)
        self.is_stock, self.is_less = type(inner) in library.stock, False

    def keep(self, slot: Slot | None) -> None:
        """Keep a slot for the next send, in place of the previous one (see ``drivers.Exchange``)."""
        if self._slot is not None:
            self._slot.leave()
        if self._watch is not None:
            self._watch.leave()  # release the previous slot first, so a flow never waits while it holds one
        self._slot = slot

    def response(self) -> httpx.Response:
        """Return the last response."""
        if self._response is None:
            raise TypeError("no request has been sent")
        return self._response

    def begin(self, effect: Send) -> Watch | None:
        """Return a watch for the next send if it pays, or has a deadline or a slot; else None."""
        if effect.pays is not None and self.context is not None:
            under_way = (each for each in self.context.in_flight.copy() if each[0] == effect.pays)
            self._presents = max(under_way, default=("", 0))  # a later call may present the same payment again
        plain = effect.pays is None and effect.call_s is None and effect.chunk_s is None and self._slot is None
        self._watch = (
            None
            if plain and not self.outgoing.brings
            else Watch(effect.call_s, effect.chunk_s, effect.limited_by, effect.head)
        )
        return self._watch

    def watch_body(self, response: httpx.Response, kind: type[Any], *, pays: bool = False) -> None:
        """Continue the watch while the body of *response*, of a request that *pays* or not, is read."""
        self.watched = None
        if self._watch is None:
            return
        self._watch.head_came()
        self._watch.take(self._slot)
        self._slot = None
        if response.is_closed:
            self._watch.end()  # the body is in memory
        else:
            self.watched = kind(response, self._watch)
            response.stream = self.watched
            if pays:
                self.watched.frames = frames_of(response.headers.get("content-encoding", ""), self._library.undecodable)

    def paid(self, receipt: Receipt) -> None:
        """Let a time-out of the body say what was paid for it, also one that has come already."""
        if self.watched is not None:
            self.watched.paid = receipt
        stream = self.response().stream
        if isinstance(stream, (Replay, AsyncReplay)) and isinstance(stream.broken, CallTimeout):
            stream.broken = timed_out(stream.broken, receipt)

    @property
    def broke(self) -> bool:
        """True if the body broke while it was read ahead."""
        stream = self.response().stream
        return isinstance(stream, (Replay, AsyncReplay)) and stream.broken is not None

    def lose(self) -> None:
        """Note, in memory alone, that an error comes between a paid answer and its caller: Ctrl-C, most likely.

        The next purchase writes it down before. What the flow has noted already is not under way any more.
        """
        if self.context is not None and self._presents in self.context.in_flight:
            self.context.cut_off.add(self._presents)
            self.context.in_flight.pop(self._presents, None)

    def lift(self) -> None:
        """Remove the deadline of a body that is neither paid nor metered."""
        if self._watch is not None:
            self._watch.lift()

    def leave(self) -> None:
        """Release the slot."""
        self.keep(None)


class Exchanged(_ExchangeState):
    """The exchange over a blocking transport (see ``drivers.Exchange``)."""

    def send(self, effect: Send) -> Reply:
        """Send the request and return status and headers; the body stays unread."""
        try:
            self.close()
            with _showing_no_payment(effect):
                request = self.outgoing.copy(effect)
                watch = self.begin(effect)
                if watch is not None and watch.left_s is not None and self.outgoing.stock:
                    response = self._sent_aside(request, watch)
                else:
                    response = self._inner.handle_request(request)
        except Exception as error:
            raise self.outgoing.failed(error) from error
        self._response = self.outgoing.answered(response)
        if watch is not None:
            self.watch_body(response, self._library.of(Watched), pays=effect.pays is not None or self.outgoing.brings)
        self.is_less = response.status_code in MAY_BE_LESS and Asked.by(self.outgoing.asked).gets_less(response)
        return Reply(response.status_code, lines_of(response.headers), is_less=self.is_less)

    def _sent_aside(self, request: httpx.Request, watch: Watch) -> httpx.Response:
        """Send in a separate thread: a server that sends its headers byte by byte never causes a read timeout."""
        slot, self._slot = self._slot, None

        def call() -> httpx.Response:
            return self._inner.handle_request(request)  # type: ignore[no-any-return]  # of either family

        def late(response: httpx.Response | None) -> None:
            if slot is not None:
                slot.leave()  # only now, so that a hanging host cannot use more than its slots
            if response is not None:
                with suppress(Exception):
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
        """Return the decoded body, or None if it is too long or not decodable; it stays readable for the caller."""
        response = self.response()
        if response.is_closed:
            return _content(response, effect.limit)
        if not isinstance(response.stream, self._library.sync_stream):
            raise TypeError("the inner transport answered with an asynchronous stream")
        if self.watched is None and effect.call_s is not None:
            self._watch = Watch(effect.call_s, None)
            self.watch_body(response, self._library.of(Watched))
        replay = response.stream if isinstance(response.stream, Replay) else self._library.of(Replay)(response.stream)
        response.stream = replay
        try:
            with around(None):  # read ahead here, and not by the caller
                raw = replay.keep(effect.limit)
        except Exception as error:
            raise SendFailed(error, before_connection=False) from error
        return None if raw is None else decoded_body(response, raw, effect.limit)

    def close(self) -> None:
        """Close the response, if there is one."""
        if self._response is not None:
            response, self._response = self._response, None
            response.close()

    def discard(self) -> None:
        """Close an unread answer and release the slot while another error propagates; ignores errors."""
        with suppress(Exception):
            self.close()
        self.leave()


class AsyncExchanged(_ExchangeState):
    """The exchange over an asynchronous transport (see ``drivers.Exchange``)."""

    async def send(self, effect: Send) -> Reply:
        """Send the request and return status and headers; the body stays unread."""
        try:
            await self.aclose()
            with _showing_no_payment(effect):
                request = self.outgoing.copy(effect)
                watch = self.begin(effect)
                response = await self._sent(request, watch)
        except Exception as error:
            raise self.outgoing.failed(error) from error
        self._response = self.outgoing.answered(response)
        if watch is not None:
            self.watch_body(
                response, self._library.of(AsyncWatched), pays=effect.pays is not None or self.outgoing.brings
            )
        self.is_less = response.status_code in MAY_BE_LESS and Asked.by(self.outgoing.asked).gets_less(response)
        return Reply(response.status_code, lines_of(response.headers), is_less=self.is_less)

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
        """Return the decoded body, or None if it is too long or not decodable; it stays readable for the caller."""
        response = self.response()
        if response.is_closed:
            return _content(response, effect.limit)
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
            with around(None):  # read ahead here, and not by the caller
                raw = await replay.keep(effect.limit)
        except Exception as error:
            raise SendFailed(error, before_connection=False) from error
        return None if raw is None else decoded_body(response, raw, effect.limit)

    async def aclose(self) -> None:
        """Close the response, if there is one."""
        if self._response is not None:
            response, self._response = self._response, None
            await response.aclose()

    async def discard(self) -> None:
        """Do as ``Exchanged.discard``, also in a cancelled task."""
        with anyio.move_on_after(_DISCARD_S, shield=True), suppress(Exception):
            await self.aclose()
        self.leave()

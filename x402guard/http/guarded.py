"""The common part of all guarded transports: runs the flow of a request and returns its response, or refuses it."""

from __future__ import annotations

import weakref
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn, Protocol, Self, get_args

import anyio
from typing_extensions import override

from x402guard.errors import ConfigError, PaymentRefused, ProtocolError, Unpriced, X402GuardError
from x402guard.flow.context import Context
from x402guard.flow.detached import refuse_late_patch
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Flow
from x402guard.flow.receipt import Receipt
from x402guard.flow.request import RequestFacts, host_refusal
from x402guard.flow.shell import Payer, Shell
from x402guard.frozen import replace
from x402guard.http.answer_end import AnswerEnding, note_answer, note_answer_async
from x402guard.http.exchange import AsyncExchanged, Exchanged
from x402guard.http.families import Library
from x402guard.http.foreign import after_foreign
from x402guard.http.leaving import CONNECT
from x402guard.http.logical import LogicalRequest, break_off
from x402guard.http.redaction import redact_logs
from x402guard.http.request import (
    Incoming,
    OutgoingRequest,
    buffer_body,
    buffer_body_async,
    describe_request,
    is_guarded,
    unknown_payments,
)
from x402guard.http.response import is_followed, problem_response
from x402guard.http.routed import Handed, metered_request, poll_request, refuse, unmetered_request, without_words
from x402guard.http.streams import EXTENSION, AsyncMetered, Metered
from x402guard.kernel.rows import Delivery
from x402guard.ledger.authorize import Refusal
from x402guard.llm.flow import InFlight, Upload
from x402guard.llm.meter import Meter, Polled, Unmetered, classify
from x402guard.policy.steps import DIRECT
from x402guard.x402.flow import paid_request
from x402guard.x402.settlement import succeeded

if TYPE_CHECKING:
    import httpx

OnRefusal = Literal["raise", "respond"]

_NOT_ASYNC: Final = (
    "transport: GuardedTransport is for blocking clients; use AsyncGuardedTransport for asynchronous ones"
)
_NOT_BLOCKING: Final = (
    "transport: AsyncGuardedTransport is for asynchronous clients; use GuardedTransport for blocking ones"
)


class MeteredPayer(Payer, Protocol):
    """A budget that pays for requests: payments and LLM calls."""

    def innermost(self) -> MeteredPayer:
        """Return the innermost budget in context (see ``Payer``)."""

    @property
    def meter(self) -> Meter:
        """The meter for LLM calls."""


class FindsPayer(Protocol):
    """A session, or a guard that finds the session in context."""

    def innermost(self) -> MeteredPayer:
        """Return the innermost budget in context. Raises ``ConfigError`` if there is none."""


class Guarded:
    """The common part of the transports for httpx and httpx2, blocking and asynchronous."""

    library: ClassVar[Library]
    _inner: Any

    def __init__(self, payer: FindsPayer, on_refusal: OnRefusal) -> None:
        if isinstance(payer, type) or not hasattr(payer, "innermost"):
            raise ConfigError(
                f"GuardedTransport(…): {payer!r:.60} is neither a Session nor a Guard; write GuardedTransport(session)"
            )
        if on_refusal not in get_args(OnRefusal):
            raise ConfigError(f"on_refusal: {on_refusal!r} is neither 'raise' nor 'respond'")
        redact_logs()
        self._payer = payer
        self._on_refusal = on_refusal

    def handle_request(self, request: Any) -> Any:  # noqa: ARG002 - of either family
        """Raise ``ConfigError`` with the right transport for a blocking client; ``BlockingGuard`` overrides it."""
        raise ConfigError(_NOT_BLOCKING)

    async def handle_async_request(self, request: Any) -> Any:  # noqa: ARG002 - of either family
        """Raise ``ConfigError`` with the right transport for an asynchronous client; ``AwaitedGuard`` overrides it."""
        raise ConfigError(_NOT_ASYNC)

    @classmethod
    def around(cls, payer: FindsPayer, inner: object, on_refusal: OnRefusal) -> Self:
        """Return a guard around a client's transport of any class."""
        guarded = cls.__new__(cls)
        Guarded.__init__(guarded, payer, on_refusal)
        guarded._inner = inner  # noqa: SLF001 - of this class
        return guarded

    def exchange(self, inner: httpx.BaseTransport, request: httpx.Request) -> httpx.Response:
        """Send *request* over *inner*, with payments and metering as the session allows.

        Raises ``X402GuardError`` and its subclasses, and the inner transport's errors.
        """
        if is_guarded(request):
            return inner.handle_request(request)
        exchange = Exchanged(self.library, inner)
        try:
            return self._exchange(exchange, request)
        except BaseException:
            exchange.lose()
            break_off(request)
            raise

    def _exchange(self, exchange: Exchanged, request: httpx.Request) -> httpx.Response:
        logical = LogicalRequest.of(request)
        try:
            payer = self._payer.innermost()
            context, shell = payer.context, payer.shell
            if logical.follows is not None:
                logical.follows.follow()
            body = buffer_body(self.library, request, context.max_body_bytes)
            flow = self._begin(Incoming.of(request, logical), body, payer=(context, payer.meter), exchange=exchange)
            handed = run(flow, shell, exchange)
        except X402GuardError as error:
            logical.end()
            exchange.discard()
            return self._failed(error, request)
        except BaseException:
            logical.end()
            exchange.discard()
            raise
        response, note_end = self._finish(logical, exchange, handed, (context, shell), metered=self.library.of(Metered))
        if note_end is not None:
            if exchange.watched is None:  # its body is in memory already
                try:
                    note_answer(note_end, "whole")
                except BaseException:  # the caller gets this error, so its answer is lost
                    note_answer(note_end, "cut")
                    raise
            else:
                exchange.watched.ended, exchange.watched.lose = partial(note_answer, note_end), note_end.lost
                weakref.finalize(exchange.watched, note_end.dropped)
        return response

    async def exchange_async(self, inner: httpx.AsyncBaseTransport, request: httpx.Request) -> httpx.Response:
        """``exchange`` for an asynchronous transport."""
        if is_guarded(request):
            return await inner.handle_async_request(request)
        exchange = AsyncExchanged(self.library, inner)
        try:
            return await self._exchange_async(exchange, request)
        except BaseException:
            exchange.lose()
            break_off(request)
            raise

    async def _exchange_async(self, exchange: AsyncExchanged, request: httpx.Request) -> httpx.Response:
        logical = LogicalRequest.of(request)
        try:
            payer = self._payer.innermost()
            context, shell = payer.context, payer.shell
            if logical.follows is not None:
                await logical.follows.afollow()
            body = await buffer_body_async(self.library, request, context.max_body_bytes)
            flow = self._begin(Incoming.of(request, logical), body, payer=(context, payer.meter), exchange=exchange)
            handed = await run_async(flow, shell, exchange)
        except X402GuardError as error:
            logical.end()
            await exchange.discard()
            return self._failed(error, request)
        except GeneratorExit:
            logical.end()
            raise  # the coroutine is closed and its loop may be gone, so nothing can be awaited
        except BaseException:
            logical.end()
            await exchange.discard()
            raise
        response, note_end = self._finish(
            logical, exchange, handed, (context, shell), metered=self.library.of(AsyncMetered)
        )
        if note_end is not None:
            if exchange.watched is None:
                with anyio.CancelScope(shield=True):  # a task of asyncio can be cancelled in spite of it
                    try:
                        await note_answer_async(note_end, "whole")
                    except BaseException:
                        await note_answer_async(note_end, "cut")
                        raise
            else:
                exchange.watched.ended, exchange.watched.lose = partial(note_answer_async, note_end), note_end.lost
                weakref.finalize(exchange.watched, note_end.dropped)
        return response

    def _begin(
        self,
        incoming: Incoming,
        body: bytes | None,
        *,
        payer: tuple[Context, Meter],
        exchange: Exchanged | AsyncExchanged,
    ) -> Flow[Handed]:
        """Return the flow of a request."""
        refuse_late_patch()
        context, meter = payer
        exchange.context = context
        request, payments = incoming.request, incoming.payments(body)
        facts = describe_request(incoming, body, pays_itself=bool(payments), named_by=context.named_by)
        if "target" in request.extensions:
            return refuse(context, _TARGET)
        if facts.method in (CONNECT, DIRECT):
            return refuse(context, _TUNNEL if facts.method == CONNECT else _NOT_HTTP)
        if not incoming.address.plain:
            return refuse(context, Refusal("host", _HOST, words=facts.host, advice="Write the host as it is."))
        exchange.outgoing = OutgoingRequest(
            self.library,
            incoming,
            body,
            stock=exchange.is_stock,
            judged=payments,
            awaits=isinstance(exchange, AsyncExchanged),
        )
        flow = self._flow_of(facts, incoming, body, context, meter)
        foreign = unknown_payments(request, payments)
        return after_foreign(context, foreign, facts, flow) if foreign else flow

    def _flow_of(
        self, facts: RequestFacts, incoming: Incoming, body: bytes | None, context: Context, meter: Meter
    ) -> Flow[Handed]:
        """Return the flow of a request by its route: metered, or free until a server asks for a payment."""
        route = classify(
            meter,
            facts.method,
            facts.host,
            facts.url,
            upgrades=incoming.header("upgrade") is not None,
            masked=incoming.header("x-goog-fieldmask") is not None,
            overrides=not _OVERRIDES.isdisjoint(dict(incoming.lines)),
        )
        if route is None:
            return paid_request(facts, context)
        if facts.host_header:
            return refuse(context, host_refusal(facts, Unpriced))
        if isinstance(route, Refusal):
            return refuse(context, without_words(facts, route))
        if isinstance(route, Polled):
            return poll_request(facts, route, context, meter)
        if isinstance(route, Unmetered):
            return unmetered_request(facts, route, context, body)
        incoming.logical.is_metered = True
        encoding = incoming.header("content-encoding")
        tier = next(filter(None, map(incoming.header, _TIER_HEADERS)), "")
        upload = Upload(body, encoding or "", tier, incoming.header("content-type") or "")
        return metered_request(facts, route, upload, context, meter)

    def _reading(self, response: httpx.Response, stream: Metered | AsyncMetered) -> httpx.Response:
        """Return the same answer with a metered body. A new response, because a body in memory would not be metered."""
        metered = self.library.response(
            response.status_code,
            headers=response.headers,
            stream=stream,  # type: ignore[arg-type]  # also of the library's family
            extensions=response.extensions,
        )
        stream.extensions = metered.extensions
        return metered

    def _finish(
        self,
        logical: LogicalRequest,
        exchange: Exchanged | AsyncExchanged,
        handed: Handed,
        payer: tuple[Context, Shell],
        *,
        metered: type[Metered | AsyncMetered],
    ) -> tuple[httpx.Response, AnswerEnding | None]:
        """Return the last response, its body watched or metered, with the receipt in its extensions.

        Also returns the flow that records how the body of a paid answer ends, if that makes a difference.
        """
        context, shell = payer
        response, note_end = exchange.response(), None
        if handed is None:
            exchange.lift()
        elif isinstance(handed, Receipt):
            exchange.paid(handed)
        if isinstance(handed, Receipt) and not handed.model:
            logical.receipt, logical.follows = handed, None  # a payment that went along is presented anew
            success = succeeded(response.status_code) and not exchange.is_less
            redirects = response.has_redirect_location
            at_once = replace(shell, late_writes=None) if redirects else shell  # a next hop may open it again
            note_end = AnswerEnding(context, handed, at_once, success=success, broke=exchange.broke)
            if redirects:
                paid = replace(handed, delivery=str(Delivery.OPEN))
                logical.follows = AnswerEnding(context, paid, shell, success=True, broke=False)
                logical.follows.redirect = note_end
                note_end.is_followed = partial(is_followed, weakref.ref(response), response.history)
                weakref.finalize(logical, note_end.forgotten)
        elif logical.follows is not None:
            note_end = logical.arrived(exchange.outgoing.asked, response)
        if isinstance(handed, InFlight):
            response = self._reading(response, metered(response.stream, handed, shell))  # type: ignore[arg-type]
        receipt = handed.receipt if isinstance(handed, InFlight) else handed or logical.receipt
        if receipt is not None:
            response.extensions[EXTENSION] = receipt
        logical.answered(response)
        exchange.outgoing.note_named(context.named_by, response)
        return response, note_end

    def _failed(self, error: X402GuardError, request: httpx.Request) -> httpx.Response:
        error.request = request
        if isinstance(error, PaymentRefused | ProtocolError) and self.answers(request):
            return problem_response(self.library, error, request)
        raise error

    def answers(self, request: httpx.Request) -> bool:  # noqa: ARG002 - overrides use it
        """True if a refusal is answered with a local 402 instead of raised."""
        return self._on_refusal == "respond"


class BlockingGuard(Guarded):
    """The blocking transport of either family."""

    def __init__(self, session: FindsPayer, transport: Any, on_refusal: OnRefusal) -> None:
        super().__init__(session, on_refusal)
        kind, stock = self.library.transports[0], self.library.stock[0]
        if transport is not None and not isinstance(transport, kind):
            family = self.library.name
            raise wrong_transport(transport, kind, family, f"for {family}.AsyncClient use AsyncGuardedTransport")
        self._inner = stock() if transport is None else transport

    def handle_request(self, request: Any) -> Any:
        """Send *request*: pay if the server asks for it and the policy allows it, and meter LLM calls.

        Raises ``X402GuardError`` and its subclasses, and the inner transport's errors if no payment was involved.
        """
        return self.exchange(self._inner, request)

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *left_by: object) -> None:
        self._inner.__exit__(*left_by)

    def close(self) -> None:
        """Close the inner transport; the session and its ledger stay open."""
        self._inner.close()

    async def __aenter__(self) -> NoReturn:
        """Raise ``ConfigError`` with the right transport for an asynchronous client."""
        raise ConfigError(_NOT_ASYNC)

    async def aclose(self) -> None:
        """Do as ``close``, for an asynchronous client that was given this transport by mistake."""
        self._inner.close()


class AwaitedGuard(Guarded):
    """The asynchronous transport of either family."""

    def __init__(self, session: FindsPayer, transport: Any, on_refusal: OnRefusal) -> None:
        super().__init__(session, on_refusal)
        kind, stock = self.library.transports[1], self.library.stock[1]
        if transport is not None and not isinstance(transport, kind):
            family = self.library.name
            raise wrong_transport(transport, kind, family, f"for {family}.Client use GuardedTransport")
        self._inner = stock() if transport is None else transport

    @override
    async def handle_async_request(self, request: Any) -> Any:
        return await self.exchange_async(self._inner, request)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *left_by: object) -> None:
        await self._inner.__aexit__(*left_by)

    async def aclose(self) -> None:
        """Close the inner transport; the session and its ledger stay open."""
        await self._inner.aclose()

    def __enter__(self) -> NoReturn:
        """Raise ``ConfigError`` with the right transport for a blocking client."""
        raise ConfigError(_NOT_BLOCKING)

    def close(self) -> None:
        """Do nothing: a blocking client that was given this transport by mistake has opened nothing."""


def wrong_transport(transport: object, kind: type, family: str, other: str) -> ConfigError:
    """Return the error for an inner transport of another family, or blocking in place of asynchronous."""
    elsewhere = "x402guard.httpx2" if family == "httpx" else "x402guard"
    return ConfigError(
        f"transport: {transport!r} is not a {family}.{kind.__name__}; {other}, for other libraries the transports of {elsewhere}"
    )


_NOT_HTTP: Final = Refusal(
    "method",
    f"{DIRECT} is no method of HTTP, and names a payment without a request here",
    advice="Send the request by GET or POST.",
)
_TARGET: Final = Refusal(
    "target",
    "extensions['target'] sends another path than the URL that was judged",
    advice="Write the path into the URL.",
)


_TUNNEL: Final = Refusal(
    "method",
    "a CONNECT opens a tunnel, through which requests pass the guard",
    advice="Name a proxy by the client's proxy argument, and send the request itself.",
)
_OVERRIDES: Final = frozenset(
    "".join(parts)
    for name in ("x-http-method-override", "x-http-method", "x-method-override")
    for parts in product(*(["-", "_"] if part == "-" else [part] for part in name))
)
"""The headers that name another method; gateways read ``_`` as ``-``."""
_TIER_HEADERS: Final = (
    "x-vertex-ai-llm-shared-request-type", "x-amzn-bedrock-service-tier", "x-amzn-bedrock-performanceconfig-latency",
)  # fmt: skip
_HOST: Final = "the URL's host has other characters than letters, digits, '-', '_' and '.', and is no IP address"


def has_guard(transport: object, depth: int = 4) -> bool:
    """True if a transport is guarded, or wraps one that is (as a retry or a cache does)."""
    if isinstance(transport, Guarded):
        return True
    parts = getattr(transport, "__dict__", {}).values() if depth else ()
    return any(
        has_guard(part, depth - 1)
        for part in parts
        if hasattr(part, "handle_request") or hasattr(part, "handle_async_request")
    )

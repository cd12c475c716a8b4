"""What every guarded transport does, whatever library it is for: facts in; a receipt, a metered body or a refusal out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, get_args

from x402guard.assets import AssetRegistry
from x402guard.errors import ConfigError, PaymentRefused, X402GuardError
from x402guard.flow.context import Context
from x402guard.flow.drivers import Shell, run, run_async
from x402guard.flow.effects import Flow, Transact
from x402guard.flow.receipt import Receipt
from x402guard.flow.refusals import refused
from x402guard.flow.request import RequestFacts, mindful_of_earlier_hops
from x402guard.http.exchange import AsyncExchanged, Exchanged
from x402guard.http.families import Library
from x402guard.http.redaction import redact_logs
from x402guard.http.request import (
    LogicalRequest,
    Outgoing,
    buffer_body,
    buffer_body_async,
    describe_request,
    is_guarded,
)
from x402guard.http.response import problem_response
from x402guard.http.streams import EXTENSION, AsyncMetered, Metered
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.model import HoldKind
from x402guard.llm.authorize import (
    note_unmetered,
)
from x402guard.llm.flow import InFlight, Upload, _called
from x402guard.llm.meter import FixedPrice, Unmetered, classify
from x402guard.llm.routes import Route
from x402guard.x402.flow import PAYMENT_REQUIRED_STATUS, paid_request
from x402guard.x402.settlement import note_late

if TYPE_CHECKING:
    import httpx

OnRefusal = Literal["raise", "respond"]

Handed = InFlight | Receipt | None
"""What a conversation ends with: a body to read along, a receipt, or nothing to account for."""


class Payer(Protocol):
    """What a transport needs of a session, or of a guard that finds the session in context."""

    def innermost_context(self) -> Context:
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


class Guarded:
    """The part of a transport that is the same for httpx and httpx2, blocking and not."""

    library: ClassVar[Library]

    def __init__(self, payer: Payer, on_refusal: OnRefusal) -> None:
        if isinstance(payer, type) or not hasattr(payer, "innermost_context"):
            raise ConfigError(f"GuardedTransport(…): {payer!r} is neither a Session nor a Guard")
        if on_refusal not in get_args(OnRefusal):
            raise ConfigError(f"on_refusal: {on_refusal!r} is neither 'raise' nor 'respond'")
        redact_logs()
        self._payer = payer
        self._on_refusal = on_refusal

    def handle_request(self, request: Any) -> Any:  # noqa: ARG002 - of either family
        """Say what a blocking client takes; overridden where this is one of those."""
        raise ConfigError("AsyncGuardedTransport is for asynchronous clients; a blocking one takes GuardedTransport")

    async def handle_async_request(self, request: Any) -> Any:  # noqa: ARG002 - of either family
        """Say what an asynchronous client takes; overridden where this is one of those."""
        raise ConfigError("GuardedTransport is for blocking clients; an asynchronous one takes AsyncGuardedTransport")

    @classmethod
    def around(cls, payer: Payer, inner: object, on_refusal: OnRefusal) -> Self:
        """Return a guard around whatever a client took for a transport, of its family's kin or not."""
        guarded = cls.__new__(cls)
        Guarded.__init__(guarded, payer, on_refusal)
        guarded._inner = inner  # type: ignore[attr-defined]  # every transport has one  # noqa: SLF001
        return guarded

    def exchange(self, inner: httpx.BaseTransport, request: httpx.Request) -> httpx.Response:
        """Send *request* over *inner*, paying and metering as the session's terms say.

        Raises ``X402GuardError`` and its kin, and the inner transport's own errors.
        """
        if is_guarded(request):
            return inner.handle_request(request)
        body = buffer_body(self.library, request, self._payer.max_body_bytes)
        logical = LogicalRequest.of(request)
        exchange = Exchanged(self.library, inner)
        try:
            context = self._payer.innermost_context()
            stock = type(inner) in self.library.stock
            flow, exchange.outgoing = self._begin(request, logical, body, context, stock=stock)
            handed = run(flow, self._payer.shell, exchange)
        except X402GuardError as error:
            logical.end()
            exchange.discard()
            return self._failed(error, request)
        except BaseException:
            logical.end()
            exchange.discard()
            raise
        response = exchange.response()
        if handed is None:
            exchange.lift()
        elif exchange.watched is not None and isinstance(handed, Receipt):
            late = note_lateness(context, handed, self._payer.shell)
            exchange.watched.hold_id = handed.hold_id
            exchange.watched.late = lambda: run(late(), self._payer.shell)
        if isinstance(handed, InFlight):
            stream = self.library.metered(response.stream, handed, self._payer.shell)  # type: ignore[arg-type]
            response = self._reading(response, stream)
        return self._finish(logical, response, handed)

    async def exchange_async(self, inner: httpx.AsyncBaseTransport, request: httpx.Request) -> httpx.Response:
        """See ``exchange``."""
        if is_guarded(request):
            return await inner.handle_async_request(request)
        body = await buffer_body_async(self.library, request, self._payer.max_body_bytes)
        logical = LogicalRequest.of(request)
        exchange = AsyncExchanged(self.library, inner)
        try:
            context = self._payer.innermost_context()
            stock = type(inner) in self.library.stock
            flow, exchange.outgoing = self._begin(request, logical, body, context, stock=stock)
            handed = await run_async(flow, self._payer.shell, exchange)
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
        response = exchange.response()
        if handed is None:
            exchange.lift()
        elif exchange.watched is not None and isinstance(handed, Receipt):
            late = note_lateness(context, handed, self._payer.shell)
            exchange.watched.hold_id = handed.hold_id
            exchange.watched.late = lambda: run_async(late(), self._payer.shell)
        if isinstance(handed, InFlight):
            stream = self.library.async_metered(response.stream, handed, self._payer.shell)  # type: ignore[arg-type]
            response = self._reading(response, stream)
        return self._finish(logical, response, handed)

    def _begin(
        self, request: httpx.Request, logical: LogicalRequest, body: bytes | None, context: Context, *, stock: bool
    ) -> tuple[Flow[Handed], Outgoing]:
        facts = describe_request(request, logical, body)
        outgoing = Outgoing(self.library, request, body, logical, stock=stock)
        route = None if context.meter is None else classify(context.meter, facts.method, facts.host, facts.url)
        if route is None:
            return paid_request(facts, context, self._payer.registry), outgoing
        if isinstance(route, Refusal):
            return _refuse(context, route), outgoing
        if isinstance(route, Unmetered):
            return unmetered_request(facts, route, context, self._payer.registry), outgoing
        upload = Upload(body, request.headers.get("content-encoding", ""))
        return metered_request(facts, route, upload, context, self._payer.registry), outgoing

    def _reading(self, response: httpx.Response, stream: Metered | AsyncMetered) -> httpx.Response:
        """Return the same answer with another body: one that was in memory already would not be read along."""
        metered = self.library.response(
            response.status_code,
            headers=response.headers,
            stream=stream,  # type: ignore[arg-type]  # it is of the library's family, too
            extensions=response.extensions,
        )
        stream.extensions = metered.extensions
        return metered

    def _finish(self, logical: LogicalRequest, response: httpx.Response, handed: Handed) -> httpx.Response:
        if isinstance(handed, Receipt) and not handed.model:
            logical.receipt = handed
        receipt = handed.receipt if isinstance(handed, InFlight) else handed or logical.receipt
        if receipt is not None:
            response.extensions[EXTENSION] = receipt
        logical.answered(response)
        return response

    def _failed(self, error: X402GuardError, request: httpx.Request) -> httpx.Response:
        error.request = request
        if isinstance(error, PaymentRefused) and self.answers(request):
            return problem_response(self.library, error, request)
        raise error

    def answers(self, request: httpx.Request) -> bool:  # noqa: ARG002 - for those who look at it
        """True where a refusal is answered, and not raised."""
        return self._on_refusal == "respond"


def note_lateness(context: Context, receipt: Receipt, shell: Shell) -> Callable[[], Flow[None]]:
    """Return the conversation that counts what a payment bought as late: a guard of its payee and host wants to know."""

    def late() -> Flow[None]:
        hold = shell.store.hold(receipt.hold_id)
        if hold is not None and hold.kind is HoldKind.PAYMENT:
            yield from note_late(context, hold)

    return late


def _refuse(context: Context, refusal: Refusal) -> Flow[Handed]:
    raise (yield from refused(context, refusal))


def metered_request(
    request: RequestFacts, route: Route | FixedPrice, upload: Upload, context: Context, registry: AssetRegistry
) -> Flow[InFlight | Receipt | None]:
    """Hold one call's conversation up to its answer's body.

    Returns an ``InFlight`` whose body is still to be read along, the receipt of a call that has ended, or None where it cost
    nothing. A 402 from a metered host is answered like any other. Raises ``PaymentRefused`` and its kin, ``LedgerUnavailable``,
    ``SendFailed``; with nothing sent and nothing held where it refuses.
    """
    handed, reply = yield from mindful_of_earlier_hops(request, _called(request, route, upload, context))
    if reply.status == PAYMENT_REQUIRED_STATUS:
        return (yield from paid_request(request, context, registry, reply))
    return handed


def unmetered_request(
    request: RequestFacts, route: Unmetered, context: Context, registry: AssetRegistry
) -> Flow[Receipt | None]:
    """Say in the books, once for each host, that what looks like an LLM call is not metered; then treat it as any request."""
    yield Transact(*note_unmetered(context, request, route))
    return (yield from paid_request(request, context, registry))

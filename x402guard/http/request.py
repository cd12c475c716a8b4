"""The request side of a transport: the facts of a request for the core, and the copies that are sent."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.flow.address import DEFAULT_PORTS, Address, address, door_of
from x402guard.flow.effects import Send, SendFailed
from x402guard.flow.request import POLLS, RequestFacts
from x402guard.flow.sealed import Sealed
from x402guard.flow.surroundings import here
from x402guard.http.leaving import CONNECT, TRACE, Leaving
from x402guard.http.logical import LogicalRequest
from x402guard.http.streams import AsyncRest, Buffered, Rest
from x402guard.policy.checks import check_dollars
from x402guard.policy.steps import short_route
from x402guard.x402.foreign import ForeignPayment, member_digest, payments_in
from x402guard.x402.wire import PAYMENT_HEADERS

if TYPE_CHECKING:
    import httpx

    from x402guard.http.families import Library

K = TypeVar("K")
V = TypeVar("V")

GUARDED: Final = "x402guard.guarded"
_LONGEST_CLASS: Final = 60


_MADE: Final[dict[bytes, None]] = {}
"""The digests of the last payments that guards of this process have made: transports below may rebuild a request."""

_MOST_MADE: Final = 10_000
_REMEMBERING: Final = threading.Lock()


def note_made(lines: Iterable[tuple[str, str]], member: Mapping[str, Any] | None = None) -> None:
    """Remember payments that this guard has made: in header lines, with lower names, and as a *member* of JSON-RPC."""
    for payment in payments_in(lines, None):
        _remember(_MADE, payment.digest, None, most=_MOST_MADE)
    if member is not None:
        _remember(_MADE, member_digest(member), None, most=_MOST_MADE)


def _remember(kept: dict[K, V], key: K, value: V, *, most: int) -> None:
    """Keep a value, and of all of them the newest *most*; in any thread."""
    with _REMEMBERING:
        kept[key] = value
        while len(kept) > most:
            del kept[next(iter(kept))]


class _Mark:
    """Says that one request object is guarded, once, and which payments of others in it were judged.

    httpx and the callers' transports copy ``extensions`` to other requests, for which the mark does not count.
    """

    def __init__(self, request: httpx.Request, judged: tuple[ForeignPayment, ...]) -> None:
        self.judged = frozenset([payment.digest for payment in judged])
        self._request: weakref.ref[httpx.Request] | None = weakref.ref(request)

    def use(self, request: httpx.Request) -> bool:
        """True once, for the request that it was made for."""
        meant, self._request = self._request, None
        return meant is not None and meant() is request


def is_guarded(request: httpx.Request) -> bool:
    """True for a request from an outer guarded transport: an inner one passes it on and holds nothing a second time."""
    mark = request.extensions.get(GUARDED)
    return isinstance(mark, _Mark) and mark.use(request)


def mark_guarded(request: httpx.Request) -> httpx.Request:
    """Return *request*, one of this library's own, marked so that no transport guards it."""
    request.extensions = {**request.extensions, GUARDED: _Mark(request, ())}
    return request


class Incoming(Struct, frozen=True):
    """A request of the caller, looked at once.

    Attributes:
        request: never changed.
        logical: the call that it belongs to.
        address: where it leads.
        lines: its header lines, with their names in lower case.
    """

    request: httpx.Request
    logical: LogicalRequest
    address: Address
    lines: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, request: httpx.Request, logical: LogicalRequest) -> Incoming:
        """Look at *request*, after its body was read: reading it may set headers."""
        return cls(request, logical, address_of(request.url), lines_of(request.headers))

    @property
    def crossed(self) -> bool:
        """True if a redirect led to another origin than that of the first hop."""
        return self.address.origin != self.logical.origin

    def header(self, wanted: str) -> str | None:
        """Return the value of a header, named in lower case; None without one. Several lines are joined, as in httpx."""
        values = [value for name, value in self.lines if name == wanted]
        return ", ".join(values) if values else None

    def payments(self, body: bytes | None) -> tuple[ForeignPayment, ...]:
        """Return the payments that it would take along: its headers for another origin stay behind."""
        crossed = self.crossed
        return payments_in([line for line in self.lines if not crossed or line[0] not in PAYMENT_HEADERS], body)


def _begun(incoming: Incoming, redirected_from: str | None) -> str:
    """Return the route of the first hop if *incoming* is another one; of one that is not known, the host alone."""
    if incoming.logical.first is None:
        return f"{incoming.request.method.upper()} {incoming.address.host}"
    method, url = incoming.logical.first
    if url is incoming.request.url:
        return "" if redirected_from is None else f"{method.upper()} {door_of(redirected_from)}"
    return short_route(method, address_of(url).host, url.raw_path.decode("ascii").partition("?")[0])


def lines_of(headers: httpx.Headers) -> tuple[tuple[str, str], ...]:
    """Return header lines with their names in lower case; the encoding is looked for once, not for each line."""
    encoding = headers.encoding
    return tuple([(name.lower().decode(encoding), value.decode(encoding)) for name, value in headers.raw])


def unknown_payments(request: httpx.Request, found: tuple[ForeignPayment, ...]) -> tuple[ForeignPayment, ...]:
    """Return those of the payments *found* in a request that no guard of this process has made, and none has judged."""
    if not found:
        return ()
    mark = request.extensions.get(GUARDED)
    judged = mark.judged if isinstance(mark, _Mark) else frozenset()
    return tuple(payment for payment in found if payment.digest not in judged and payment.digest not in _MADE)


def address_of(url: httpx.URL) -> Address:
    """Return where *url* leads."""
    return address(url.scheme, url.raw_host, url.port)


def request_facts(request: httpx.Request) -> RequestFacts:
    """Return the facts of a single request without a body."""
    return describe_request(Incoming.of(request, LogicalRequest.of(request)), b"")


_MOST_NAMED: Final = 1_000


def read_limit(extensions: Mapping[str, Any]) -> float | None:
    """Return the seconds that a client waits for a piece of an answer; None for no limit, 0.0 if it does not say."""
    limits = extensions.get("timeout")
    read_s = limits.get("read", 0.0) if isinstance(limits, Mapping) else 0.0
    return None if read_s is None else max(0.0, float(read_s))


def describe_request(
    incoming: Incoming,
    body: bytes | None,
    *,
    pays_itself: bool = False,
    named_by: Mapping[str, str] | None = None,
) -> RequestFacts:
    """Return the facts of a request for the core, with 32 new random bytes.

    *named_by* are the places that a 3xx answer named, with its origin.
    """
    request, logical, address = incoming.request, incoming.logical, incoming.address
    extensions: Mapping[str, Any] = request.extensions
    purchase, again = extensions.get("purchase"), extensions.get("pay_again", False)
    if purchase is not None and (not isinstance(purchase, str) or not purchase.strip()):
        raise ConfigError(f"extensions['purchase']: {purchase!r:.60} is no name; write text such as 'order 7'")
    price_class = extensions.get("price_class", "")
    if not isinstance(price_class, str) or len(price_class) > _LONGEST_CLASS or not price_class.isprintable():
        raise ConfigError(f"extensions['price_class']: {price_class!r:.60} is no name; write text such as 'hd video'")
    if not isinstance(again, bool):
        raise ConfigError(f"extensions['pay_again']: {again!r:.60} is neither True nor False")
    if sum(name.replace("_", "-") == "idempotency-key" for name, _ in incoming.lines) > 1:
        raise ConfigError("Idempotency-Key: the request has two; each names another purchase. Send one")
    if purchase is None:
        purchase = (incoming.header("idempotency-key") or "").strip() or None  # a blank one names nothing
    polls = extensions.get(POLLS, False) is True
    quoted = extensions.get("max_price")
    named = incoming.header("host") or ""
    redirected_from = logical.origin if incoming.crossed else None
    if redirected_from is None and named_by:
        redirected_from = named_by.get(place_of(request.url))
    is_first = redirected_from is None and logical.first is not None and logical.first[1] is request.url
    return RequestFacts(
        method=request.method.upper(),
        url=str(request.url).partition("#")[0],  # what is after it never leaves
        origin=address.origin,
        host=address.host,
        secure=address.origin.startswith("https:"),
        loopback=address.loopback,
        body_sha256=None if body is None else hashlib.sha256(body).hexdigest(),
        entropy=here().random_bytes(32),
        purchase=purchase,
        pay_again=again and not logical.is_resent,
        pays_itself=pays_itself,
        redirected_from=redirected_from,
        begun="" if is_first else _begun(incoming, redirected_from),
        paid_by=logical.paid_by,
        presented=0 if logical.receipt is None else logical.receipt.presented,
        carries=body is not None and logical.receipt is not None and logical.paid_at == address.origin,
        polls=polls,
        paid_until=0 if logical.receipt is None else logical.receipt.deadline,
        body=body,
        max_price=None if quoted is None else check_dollars("extensions['max_price']", quoted),
        price_class=price_class,
        host_header="" if named.strip().lower() in address.named else named,
        read_s=read_limit(extensions),
    )


def buffer_body(library: Library, request: httpx.Request, limit: int) -> bytes | None:
    """Return the request's body if it has at most *limit* bytes, so that a paid request can repeat it; else None.

    A larger body continues to stream, with the bytes already read in front.
    """
    stream = request.stream
    if isinstance(stream, library.bytes_stream):
        return b"".join(stream)  # in memory already, of any size
    if not isinstance(stream, library.sync_stream):
        raise _wrong_client(stream, "a blocking client with an asynchronous request body")
    kept, source = Buffered(), iter(stream)
    for chunk in source:
        if not kept.add(chunk, limit):
            request.stream = library.of(Rest)(stream, kept.chunks, source)
            return None
    body = b"".join(kept.chunks)
    request.stream = library.bytes_stream(body)
    return body


async def buffer_body_async(library: Library, request: httpx.Request, limit: int) -> bytes | None:
    """``buffer_body`` for an asynchronous body."""
    stream = request.stream
    if isinstance(stream, library.bytes_stream):
        return b"".join(stream)  # in memory already, of any size
    if not isinstance(stream, library.async_stream):
        raise _wrong_client(stream, "an asynchronous client with a blocking request body")
    kept, source = Buffered(), aiter(stream)
    async for chunk in source:
        if not kept.add(chunk, limit):
            request.stream = library.of(AsyncRest)(stream, kept.chunks, source)
            return None
    body = b"".join(kept.chunks)
    request.stream = library.bytes_stream(body)
    return body


def _wrong_client(stream: object, what: str) -> ConfigError:
    """Return the error for a request of another family than the transport's, or of the other kind."""
    families = {kind.__module__.partition(".")[0] for kind in type(stream).__mro__} & {"httpx", "httpx2"}
    if families:
        family = "x402guard.httpx2.GuardedTransport" if "httpx2" in families else "x402guard.GuardedTransport"
        return ConfigError(
            f"transport: for a client of {families.pop()} use {family}; this was {what}, or a client of another library"
        )
    return ConfigError(f"transport: this was {what}")


_MOST_LINKS: Final = 100


def _request_class(request: httpx.Request) -> type[Any]:
    """Return the library's own class of a request, also of one of a subclass."""
    return [kind for kind in type(request).__mro__ if kind is not object][-1]


def forget_payment(error: BaseException, own: httpx.Request) -> None:
    """Take the payment headers off every request that an error keeps: in itself, its causes, contexts, groups, args.

    The caller's *own* request, which has no payment of the guard's, stays as it is.
    """
    kind, pending, seen = _request_class(own), [error], set[int]()
    while pending and len(seen) < _MOST_LINKS:
        link = pending.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        answers = [*vars(link).values(), *link.args]
        for kept in (*answers, *(getattr(it, "_request", None) for it in (link, *answers))):
            if kept is not own and isinstance(kept, kind):
                for name in PAYMENT_HEADERS:
                    kept.headers.pop(name, None)
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        told = (link.__cause__, link.__context__, *members, *link.args)
        pending.extend(part for part in told if isinstance(part, BaseException))


class OutgoingRequest:
    """The requests sent for one request of the caller: copies, so that the caller's request never has a payment header.

    Args:
        incoming: the caller's request.
        body: its body, or None if it is too large to keep.
        stock: True if the inner transport is the library's own, whose events and errors tell whether anything was sent.
        judged: the payments in it, which the guard knows or has judged.
        awaits: that transport is asynchronous.

    Attributes:
        brings: the answer brings what an earlier hop has paid for, so that the end of its body is looked at.
    """

    def __init__(
        self,
        library: Library,
        incoming: Incoming,
        body: bytes | None,
        *,
        stock: bool,
        judged: tuple[ForeignPayment, ...],
        awaits: bool,
    ) -> None:
        self._library = library
        self._request = incoming.request
        self._body = body
        self._logical = incoming.logical
        self.brings = incoming.logical.follows is not None
        self._crossed = incoming.crossed
        self._judged, self._awaits = judged, awaits
        self._leaving: Leaving | None = None
        self.stock = stock

    @property
    def asked(self) -> httpx.Request:
        """The caller's own request."""
        return self._request

    def copy(self, effect: Send) -> httpx.Request:
        """Return the request to send: the headers of *effect* replace those of the same name, its body the request's own.

        With a payment, the client's own read timeout is no shorter than the time that the payment may take.
        """
        headers, pays, body = effect.headers, effect.pays, effect.body
        original = self._request
        whole = self._body if body is None else body
        stream = original.stream if whole is None else self._library.bytes_stream(whole)
        copy = self._library.request(
            original.method, original.url, headers=original.headers, stream=stream, extensions={**original.extensions}
        )
        lines = copy.headers
        if self._crossed:
            # The caller's own payment header is for the first origin only; httpx removes only Authorization.
            for name in PAYMENT_HEADERS:
                lines.pop(name, None)
        for name, value in headers:
            lines[name] = value.reveal() if isinstance(value, Sealed) else value
        if pays is not None:
            self._logical.pays(pays)
        if body is not None:
            lines.pop("transfer-encoding", None)
            lines["content-length"] = str(len(body))
        copy.extensions[GUARDED] = _Mark(copy, self._judged)
        if self.stock and (pays or self._logical.is_metered):
            self._leaving = Leaving(copy.extensions.get(TRACE), connects=copy.method.upper() == CONNECT)
            copy.extensions[TRACE] = self._leaving.atrace if self._awaits else self._leaving.trace
        if pays:
            limits, read_s = copy.extensions.get("timeout"), read_limit(copy.extensions)
            wait_s = effect.call_s if effect.head is None else effect.head[0]
            if isinstance(limits, Mapping) and read_s is not None and (wait_s is None or read_s < wait_s):
                copy.extensions["timeout"] = {**limits, "read": wait_s}
            note_made(lines_of(lines))
        return copy

    def answered(self, response: httpx.Response) -> httpx.Response:
        """Return *response*; if it refers to the sent copy, which may hold a payment, refer to the caller's request."""
        if isinstance(getattr(response, "_request", None), self._library.request):
            response.request = self._request
        return response

    def failed(self, error: Exception) -> SendFailed:
        """Return the signal for the flow. Only the stock transports prove that nothing was sent: by error and events."""
        forget_payment(error, self._request)
        if isinstance(getattr(error, "_request", None), self._library.request):
            error.request = self._request  # type: ignore[attr-defined]  # the sent copy had the payment in its headers
        unsent = self.stock and self._has_not_left(error)
        self._logical.is_metered = self._logical.is_metered and not unsent
        return SendFailed(error, before_connection=unsent)

    def _has_not_left(self, error: Exception) -> bool:
        """True if the pool tells that it has not begun to send, as where a proxy opens no tunnel; or the error says so."""
        told = self._leaving
        if told is not None and told.is_told:
            return not told.has_left and isinstance(error, self._library.transport_error)
        return isinstance(error, self._library.unsent)

    def note_named(self, named_by: dict[str, str], response: httpx.Response) -> None:
        """Remember the place that a 3xx answer names elsewhere: who follows it by hand follows a redirect."""
        if not 300 <= response.status_code < 400 or not (location := response.headers.get("location", "")):
            return
        try:
            url = self._request.url.join(location)
            place, origin, named = place_of(url), address_of(self._request.url).origin, address_of(url).origin
        except Exception:  # noqa: BLE001 - the libraries raise their own errors for a location that is no URL
            return  # which no client can follow
        first = named_by.get(place_of(self._request.url), origin)  # a place that was named itself leads on
        if door_of(named) != door_of(first):
            _remember(named_by, place, first, most=_MOST_NAMED)


def place_of(url: httpx.URL) -> str:
    """Return a URL's origin and path, as one of its spellings: no user, no query, no dot after the host."""
    host = address_of(url).name.rstrip(".")
    return f"{url.scheme}://{host}:{url.port or DEFAULT_PORTS.get(url.scheme, 0)}{url.path}"

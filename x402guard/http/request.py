"""The request side of a transport: what the core is told of a request, and what is sent in its place."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from x402guard.errors import ConfigError
from x402guard.flow.effects import HeaderLine, SendFailed
from x402guard.flow.receipt import Receipt
from x402guard.flow.request import RequestFacts
from x402guard.flow.sealed import Sealed
from x402guard.http.streams import AsyncRest, Buffered, Rest
from x402guard.x402.wire import PAYMENT_HEADERS

if TYPE_CHECKING:
    import httpx

    from x402guard.http.families import Library

LOGICAL: Final = "x402guard.logical_request"
GUARDED: Final = "x402guard.guarded"
_MARK: Final = object()  # an object of ours, so that no caller can say it by accident

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class LogicalRequest:
    """What one call of the caller's is, over all its redirect hops.

    httpx copies ``extensions`` to each hop, so this one shared object is the mark. It is over with the final answer: sending
    the same request object again is a new purchase.

    Attributes:
        origin: where the first hop went.
        paid_by: the hold whose signature has left, or None.
        receipt: of what was paid on an earlier hop, or None; the last answer carries it.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.paid_by: str | None = None
        self.receipt: Receipt | None = None
        self._done = False
        self._challenged = False
        self._hop: weakref.ref[httpx.Request] | None = None

    @classmethod
    def of(cls, request: httpx.Request) -> LogicalRequest:
        """Return the mark of *request*, making one where this is a first hop."""
        logical = request.extensions.get(LOGICAL)
        if not isinstance(logical, LogicalRequest) or logical.is_over(request):
            logical = cls(origin_of(request.url))
            request.extensions = {**request.extensions, LOGICAL: logical}
        logical._hop = weakref.ref(request)
        return logical

    def is_over(self, request: httpx.Request) -> bool:
        """True where *request* begins a new call: the last one has its answer, or the very same object is sent again.

        Not where the answer to a payment was a challenge for credentials: httpx's auth flow sends the same object again then,
        within the same call.
        """
        return self._done or (not self._challenged and self._hop is not None and self._hop() is request)

    def answered(self, response: httpx.Response) -> None:
        """Remember whether *response* ends the call or leads on."""
        self._challenged = self.paid_by is not None and response.status_code in (401, 407)
        self._done = not response.has_redirect_location and not self._challenged

    def end(self) -> None:
        """The call has failed; nothing leads on."""
        self._done = True


def is_guarded(request: httpx.Request) -> bool:
    """True for a request that a guarded transport has sent: a second one further in lets it pass, and holds nothing twice."""
    return request.extensions.get(GUARDED) is _MARK


def marked_guarded() -> dict[str, Any]:
    """Return the extensions of a request of our own, which is nobody's to guard."""
    return {GUARDED: _MARK}


def origin_of(url: httpx.URL) -> str:
    """Return ``scheme://host:port`` in lower case, the port always written."""
    host = url.raw_host.decode("ascii").lower()
    port = url.port or _DEFAULT_PORTS.get(url.scheme, 0)
    return f"{url.scheme}://[{host}]:{port}" if ":" in host else f"{url.scheme}://{host}:{port}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def request_facts(request: httpx.Request) -> RequestFacts:
    """Return the plain facts of a request that stands for itself, without a body."""
    return describe_request(request, LogicalRequest.of(request), b"")


def describe_request(request: httpx.Request, logical: LogicalRequest, body: bytes | None) -> RequestFacts:
    """Return the plain facts of *request* for the core, with 32 fresh random bytes."""
    extensions: Mapping[str, Any] = request.extensions
    purchase = extensions.get("purchase", request.headers.get("idempotency-key"))
    url = request.url
    name = url.raw_host.decode("ascii").lower()
    host = f"[{name}]" if ":" in name else name
    origin = origin_of(url)
    crossed = origin != logical.origin
    return RequestFacts(
        method=request.method.upper(),
        url=str(url),
        origin=origin,
        host=host if url.port is None else f"{host}:{url.port}",
        secure=url.scheme == "https",
        loopback=_is_loopback(name),
        body_sha256=None if body is None else hashlib.sha256(body).hexdigest(),
        entropy=secrets.token_bytes(32),
        purchase=None if purchase is None else str(purchase),
        pay_again=extensions.get("pay_again") is True,
        pays_itself=not crossed and not PAYMENT_HEADERS.isdisjoint(map(str.lower, request.headers)),
        redirected_from=logical.origin if crossed else None,
        paid_by=logical.paid_by,
        paid_until=0 if logical.receipt is None else logical.receipt.deadline,
        body=body,
    )


def buffer_body(library: Library, request: httpx.Request, limit: int) -> bytes | None:
    """Return the request's body where it has at most *limit* bytes, so that a paid request can repeat it; else None.

    A larger one streams on: what was read of it is put back in front. Nothing is lost either way.
    """
    stream = request.stream
    if isinstance(stream, library.bytes_stream):
        return b"".join(stream)  # in memory already, whatever its size
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
    """The same as ``buffer_body``, for an asynchronous body."""
    stream = request.stream
    if isinstance(stream, library.bytes_stream):
        return b"".join(stream)  # in memory already, whatever its size
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
    """Return the error for a request that is not of the family that the transport is for."""
    families = {kind.__module__.partition(".")[0] for kind in type(stream).__mro__} & {"httpx", "httpx2"}
    if families:
        family = "x402guard.httpx2.GuardedTransport" if "httpx2" in families else "x402guard.GuardedTransport"
        return ConfigError(
            f"transport: a client of {families.pop()}'s takes {family}; this one is for {what}, or another library"
        )
    return ConfigError(f"transport: this was {what}")


class OutgoingRequest:
    """The requests that go out for one request of the caller's: copies, so that a payment header never leaves ours.

    Args:
        request: the caller's; never changed.
        body: its body, or None where it could not be kept.
        logical: the mark of the call it belongs to.
        stock: the inner transport is the library's own, whose errors tell whether anything left the machine.
    """

    def __init__(
        self, library: Library, request: httpx.Request, body: bytes | None, logical: LogicalRequest, *, stock: bool
    ) -> None:
        self._library = library
        self._request = request
        self._body = body
        self._logical = logical
        self._crossed = origin_of(request.url) != logical.origin
        self.stock = stock

    def copy(self, headers: tuple[HeaderLine, ...], pays: str | None, body: bytes | None) -> httpx.Request:
        """Return the request to send, with *headers* in place of any of the same name; they pay the hold *pays*.

        *body* goes in place of the request's own, where it is not None.
        """
        original = self._request
        lines = self._library.headers(original.headers)
        if self._crossed:
            # A payment header of the caller's own was meant for the first origin; httpx strips Authorization alone.
            for name in PAYMENT_HEADERS:
                lines.pop(name, None)
        for name, value in headers:
            lines[name] = value.reveal() if isinstance(value, Sealed) else value
        self._logical.paid_by = pays or self._logical.paid_by
        if body is not None:
            lines.pop("transfer-encoding", None)
            lines["content-length"] = str(len(body))
        whole = self._body if body is None else body
        stream = original.stream if whole is None else self._library.bytes_stream(whole)
        return self._library.request(
            original.method,
            original.url,
            headers=lines,
            stream=stream,
            extensions={**original.extensions, GUARDED: _MARK},
        )

    def answered(self, response: httpx.Response) -> httpx.Response:
        """Return *response* as the answer to the caller's request, where the transport says what it answers: ours has a payment."""
        if isinstance(getattr(response, "_request", None), self._library.request):
            response.request = self._request
        return response

    def failed(self, error: Exception) -> SendFailed:
        """Return the signal for the flow; only the stock transports tell reliably that nothing left the machine."""
        if isinstance(getattr(error, "_request", None), self._library.request):
            error.request = self._request  # type: ignore[attr-defined]  # theirs has the payment in its headers
        return SendFailed(error, before_connection=self.stock and isinstance(error, self._library.unsent))

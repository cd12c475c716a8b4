"""Pays and meters for callers in any language: they name the URL in the path, and carry the token of a session.

A request goes through ``AsyncGuardedTransport``, so it gets what a Python client gets. Nothing of a caller is decrypted:
it speaks HTTP to this machine, and the proxy speaks to the seller.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import anyio
import anyio.lowlevel
import httpx
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from x402guard.errors import ConfigError, PolicyDenied, X402GuardError
from x402guard.flow.address import door_of
from x402guard.flow.drivers import run_async
from x402guard.flow.receipt import Receipt
from x402guard.flow.refusals import refused as counted
from x402guard.flow.shell import LOG
from x402guard.http.guarded import FindsPayer
from x402guard.http.logical import LOGICAL, LogicalRequest
from x402guard.http.request import address_of
from x402guard.http.streams import EXTENSION
from x402guard.http.transport import AsyncGuardedTransport
from x402guard.ledger.authorize import Refusal
from x402guard.policy.checks import check_dollars
from x402guard.web.access import Access
from x402guard.web.answers import ANSWERED, ended, problem_answer, said
from x402guard.web.connection import LOST
from x402guard.web.hops import PREFIX, Hop, Hops, place_of
from x402guard.web.places import Full, Places
from x402guard.web.reach import Reach, denied_by_address
from x402guard.web.upstream import CREDENTIALS, Keys, Target, Upstream, climbs, leads_back, plain_text, target, token_in
from x402guard.x402.wire import PAYMENT_HEADERS

SESSION: Final = "x402guard-session"
RECEIPT: Final = "x402guard-receipt"
MAX_PRICE: Final = "x402guard-max-price"
PAY_AGAIN: Final = "x402guard-pay-again"

_MOST_BYTES: Final = 67_108_864
_BODY_S: Final = 300.0
_UNREAD_S: Final = 60.0
_TIMEOUT: Final = {"connect": 10.0, "read": 600.0, "write": 60.0, "pool": 60.0}
_LIMITS: Final = httpx.Limits(max_connections=1_000, max_keepalive_connections=100)
_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_MEANT_FOR_ONE: Final = frozenset({*CREDENTIALS, "cookie", *PAYMENT_HEADERS})
"""What a client sends to one host alone, and here to the one that a redirect has led to as well."""

_OF_AN_ORIGIN: Final = frozenset(
    {
        "alt-svc", "clear-site-data", "link", "nel", "refresh", "report-to", "service-worker-allowed", "set-cookie",
        "strict-transport-security",
    }
)  # fmt: skip
"""What an answer says of its whole origin, or of the next request: all sellers have one origin here."""

_OURS: Final = frozenset({SESSION, MAX_PRICE, PAY_AGAIN, "host", "content-length", "expect"})


_REDIRECTED: Final = partial(LogicalRequest, "an earlier redirect")
"""The call of a hop of which nothing else is known."""


class _Refused(Exception):  # noqa: N818 - it becomes an answer
    """A request that goes nowhere: the status and the words of its answer."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class _Accepted(Struct, frozen=True):
    """What a request asks for, but for its body."""

    transport: AsyncGuardedTransport
    method: str
    url: httpx.URL
    headers: list[tuple[bytes, bytes]]
    extensions: dict[str, Any]
    upstream: Upstream | None
    hop: Hop | None
    beyond_key: str

    def request(self, body: bytes) -> httpx.Request:
        """Return the request that is sent, at once: the call of its hop may end while its body is on the way."""
        extensions = self.extensions
        if self.hop is not None:
            call = _REDIRECTED() if self.hop.call is None else self.hop.call.resumed()
            extensions = {**extensions, LOGICAL: call}
        return httpx.Request(self.method, self.url, headers=self.headers, content=body or None, extensions=extensions)

    @property
    def crosses(self) -> bool:
        """True for a hop of a call that a redirect has led to another host."""
        return self.hop is not None and self.hop.crosses


class Proxy:
    """An ASGI application.

    Args:
        sessions: token → the session that pays for its callers.
        upstreams: name → the API of an LLM provider.
        keys: the keys of those APIs, and where they go along.
        reach: which hosts its callers may reach.
        access: the names under which this machine alone reaches it.
        own: the host and port that it listens at.
    """

    def __init__(
        self,
        sessions: Mapping[str, FindsPayer],
        *,
        upstreams: Mapping[str, Upstream],
        keys: Keys,
        reach: Reach,
        access: Access,
        own: tuple[str, int],
    ) -> None:
        self._reach, self._inner = reach, reach.transport(_LIMITS)
        self._tokens = tuple(sessions)
        self._sessions = {_digest(token): session for token, session in sessions.items()}
        self._transports = {
            _digest(token): AsyncGuardedTransport(session, self._inner, on_refusal="raise")
            for token, session in sessions.items()
        }
        self._upstreams, self._keys, self._access, self._own = upstreams, keys, access, own
        self._hops, self._places = Hops(), Places(len(sessions))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. One whose caller goes away is cancelled; one that the server's end cuts is told so."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        request, outgoing, has_begun = Request(scope, receive), None, False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            accepted = self._accepted(request)
            refusal = self._refusal(accepted)
            if refusal is not None:
                await (await self._counted(refusal, request.headers, closes=True))(scope, receive, sending)
                return
            with self._places.take(accepted.transport) as grows:
                outgoing = accepted.request(await _body(request, grows))
                await self._carry(accepted, outgoing, (scope, receive, sending))
        except _Refused as refused:
            await said(refused.status, str(refused), closes=True)(scope, receive, send)
        except Full as full:
            await said(503, str(full), closes=True)(scope, receive, send)
        except ClientDisconnect:
            return
        except anyio.get_cancelled_exc_class():
            if not has_begun:
                with anyio.CancelScope(shield=True):
                    await ended(outgoing)(scope, receive, send)
        except Exception:  # noqa: BLE001 - logged, and told to the caller
            LOG.exception("proxy: a request failed")
            if not has_begun:
                await ended(outgoing)(scope, receive, send)

    async def _carry(self, accepted: _Accepted, outgoing: httpx.Request, caller: tuple[Scope, Receive, Send]) -> None:
        """Send a request, and its answer to the caller, for as long as the caller is there."""
        scope, receive, send = caller
        async with anyio.create_task_group() as group:

            async def until_gone() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(until_gone)
            found = await self._answer(accepted.transport, outgoing, Request(scope).headers)
            if isinstance(found, Response):
                await found(scope, receive, send)
            else:
                logical = outgoing.extensions.get(LOGICAL)
                waits = logical.follows if isinstance(logical, LogicalRequest) else None
                scope[LOST] = getattr(found.stream, "lose", None) if waits is None else waits.forgotten
                await _pass_on(found, self._head(accepted, outgoing, found), send)
            group.cancel_scope.cancel()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Close the connections to sellers and providers when the server ends, on its own event loop."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._inner.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    def _accepted(self, request: Request) -> _Accepted:
        """Return what a request asks for, before its body is read. Raises ``_Refused``."""
        headers = request.headers
        if not self._access.is_for_us(headers):
            raise _Refused(403, "the request is for another address: use the one that x402guard proxy has printed")
        path = request.scope["raw_path"].decode("ascii", "replace")
        if request.method.upper() in ("CONNECT", "TRACE") or not path.startswith("/"):
            raise _Refused(
                405,
                "this is no forward proxy, and it opens no TLS connection; write http://HOST:PORT/https://host/path",
            )
        if "websocket" in headers.get("upgrade", "").lower():
            raise _Refused(501, "upgrade: only plain HTTP goes through here, no WebSocket")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > _MOST_BYTES:
            raise _Refused(413, _TOO_LARGE)
        transport = self._caller(headers)
        hop, path = self._hops.find(transport, path)
        found = target(path, request.scope["query_string"].decode("ascii", "replace"), self._upstreams)
        if isinstance(found, str):
            raise _Refused(404, found)
        url = _url(found.url)
        if leads_back(url.raw_host.decode("ascii"), url.port, self._own):
            raise _Refused(508, "the request leads back to this proxy, and would go round for ever")
        hop = None if hop is None else hop.asked_at(str(url), door_of(address_of(url).origin))
        without = _MEANT_FOR_ONE if hop is not None and hop.crosses else frozenset()
        lines, adds_key = self._lines(headers.raw, found, str(url), without=without)
        method, base = request.method.upper(), "" if found.upstream is None else found.upstream.base
        beyond = "" if not adds_key or self._keys.go_along(method, url, found.name, base) else f"{method} {path}"
        extensions = {"timeout": dict(_TIMEOUT), **_wishes(headers)}
        return _Accepted(transport, request.method, url, lines, extensions, found.upstream, hop, beyond)

    def _refusal(self, accepted: _Accepted) -> Refusal | None:
        """Return why a call goes nowhere: its host is beyond the reach of callers, or its owner's key does not go along."""
        denied = self._reach.judge(accepted.url)
        if denied is not None:
            return _as_refusal(denied)
        if not accepted.beyond_key:
            return None
        reason = f"{accepted.beyond_key[:200]} is no priced call, so the key of its owner does not go along"
        advice = "Its owner can list it in proxy.paths; or send a key of your own beside the token of the session."
        return Refusal("proxy_paths", reason, advice=advice)

    async def _counted(self, refusal: Refusal, headers: Mapping[str, str], *, closes: bool = False) -> Response:
        """Return a refusal as an answer, and count it in the caller's session."""
        payer = self._payer(headers).innermost()
        error = await run_async(counted(payer.context, refusal), payer.shell)
        return problem_answer(error, closes=closes)

    def _payer(self, headers: Mapping[str, str]) -> FindsPayer:
        named = [_digest(headers.get(SESSION, ""))]
        named += [_digest(token_in(headers.get(name, ""))) for name in CREDENTIALS]
        return next(self._sessions[each] for each in named if each in self._sessions)

    def _caller(self, headers: Mapping[str, str]) -> AsyncGuardedTransport:
        """Return what pays for a caller. Raises ``_Refused``."""
        named = headers.get(SESSION)
        if named is not None:
            transport = self._transports.get(_digest(named))
            if transport is None:
                raise _Refused(401, f"{SESSION}: it is the token of no session here; x402guard proxy prints them")
            return transport
        for name in CREDENTIALS:
            transport = self._transports.get(_digest(token_in(headers.get(name, ""))))
            if transport is not None:
                return transport
        raise _Refused(
            401,
            f"no token of a session here: send it in the header {SESSION}, or as the key of the API; x402guard proxy prints it",
        )

    def _lines(
        self, raw: Iterable[tuple[bytes, bytes]], found: Target, url: str, *, without: frozenset[str]
    ) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Return the header lines to send: without a token, with the key of the API if its owner pays for it, and if so.

        Raises ``_Refused`` where a token would go along, and for a key that is not there.
        """
        lines = [
            (name, value)
            for name, value in _kept(raw, without=_OURS | without)
            if name.decode("latin-1") not in CREDENTIALS
            or _digest(token_in(value.decode("latin-1"))) not in self._transports
        ]
        for name, text in (("the URL", unquote(url)), *((n.decode("latin-1"), plain_text(v)) for n, v in lines)):
            if any(token in text for token in self._tokens):
                raise _Refused(
                    400, f"{name}: a token of a session stands there, and would be sent on; it belongs into {SESSION}"
                )
        upstream = found.upstream
        if upstream is None or not upstream.key or any(name.decode("latin-1") in CREDENTIALS for name, _ in lines):
            return lines, False
        key = self._keys.values.get(upstream.key, "").strip()
        if not key:
            raise _Refused(
                401,
                f"{upstream.key}: the proxy has no key for this API; set it where x402guard proxy starts, or send your own "
                f"beside the header {SESSION}",
            )
        value = f"Bearer {key}" if upstream.header == "authorization" else key
        return [*lines, (upstream.header.encode(), value.encode("utf-8"))], True

    async def _answer(
        self, transport: AsyncGuardedTransport, request: httpx.Request, headers: Mapping[str, str]
    ) -> httpx.Response | Response:
        """Return the answer of a seller, or one that says why there is none."""
        host = request.url.raw_host.decode("ascii")
        try:
            answer: httpx.Response = await transport.handle_async_request(request)
        except X402GuardError as error:
            return problem_answer(error)
        except httpx.TimeoutException as error:
            return said(504, f"{host}: no answer came in time ({type(error).__name__})")
        except (httpx.TransportError, ValueError) as error:
            denied = denied_by_address(error)
            if denied is not None:
                return await self._counted(_as_refusal(denied), headers)
            return said(502, f"{host}: no answer came ({type(error).__name__})")
        return answer

    def _head(self, accepted: _Accepted, request: httpx.Request, response: httpx.Response) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer. A redirect leads through the proxy again; cookies of all sites would mix."""
        # Of a metered stream the guard may keep a piece that it has asked for itself: its length is not that of the provider.
        streams = response.headers.get("content-type", "").startswith("text/event-stream")
        is_framed_anew = streams or "transfer-encoding" in response.headers
        left_out = {*_OF_AN_ORIGIN, "location", RECEIPT, ANSWERED, *(["content-length"] if is_framed_anew else [])}
        lines = _kept(response.headers.raw, without=frozenset(left_out))
        where, leads = response.headers.get("location"), False
        if where is not None:
            with suppress(httpx.InvalidURL, ValueError):  # one that leads nowhere is left out
                # Some clients read a backslash as a slash, and climb out of the name of the hop.
                named = httpx.URL(str(request.url.join(where)).replace("\\", "%5C"))
                leads = named.scheme in ("http", "https") and address_of(named).plain and not climbs(named.raw_path)
                if leads:
                    lines.append((b"location", self._led(accepted, request, response, named).encode("ascii")))
        if not leads:
            _follow(request, response, lambda: True)
        receipt = response.extensions.get(EXTENSION)
        if isinstance(receipt, Receipt) and not receipt.model:
            lines.append((RECEIPT.encode(), json.dumps(receipt.facts()).encode("ascii")))
        return lines

    def _led(self, accepted: _Accepted, request: httpx.Request, response: httpx.Response, named: httpx.URL) -> str:
        """Return the path here of what an answer names. A client follows a redirect as if it were a request of its own."""
        base, path = "" if accepted.upstream is None else f"{accepted.upstream.base}/", f"/{named}"
        if base and str(named).startswith(base):
            name = next(name for name, each in self._upstreams.items() if each is accepted.upstream)
            below = f"/{name}/{str(named).removeprefix(base)}"
            path = below if isinstance(target(below.partition("?")[0], "", self._upstreams), Target) else path
        if not 300 <= response.status_code < 400:
            return path
        logical = request.extensions.get(LOGICAL)
        call = logical if isinstance(logical, LogicalRequest) else None
        doors = door_of(address_of(request.url).origin), door_of(address_of(named).origin)
        in_the_clear = request.url.scheme == "https" and named.scheme == "http"
        hop = Hop(call, accepted.crosses or in_the_clear or doors[0] != doors[1], place_of(str(named)), doors[1])
        pays = call is not None and call.paid_by is not None
        if not (pays or hop.crosses):
            return path  # what follows is as good as a request of its own
        _follow(request, response, self._hops.until_followed())
        return f"{PREFIX}{self._hops.name(accepted.transport, hop)}{path}"


def _follow(request: httpx.Request, response: httpx.Response, is_over: Callable[[], bool]) -> None:
    """Note that a redirect is followed, as the client behind this address may: what was paid for has not come with it.

    *is_over* says that no next hop comes any more.
    """
    logical = request.extensions.get(LOGICAL)
    if isinstance(logical, LogicalRequest) and response.has_redirect_location:
        response.history = list(response.history)  # as a client does that follows it
        logical.waits(is_over)


def new_token() -> str:
    """Return a token of a session: 32 random bytes."""
    return f"x402_{secrets.token_urlsafe(32)}"


def _digest(token: str) -> bytes:
    """Return what a token is found by: comparing digests tells nothing about the token by its time."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _kept(raw: Iterable[tuple[bytes, bytes]], *, without: frozenset[str]) -> list[tuple[bytes, bytes]]:
    """Return header lines with those of one connection left out, and those named."""
    known = [(name.lower(), value) for name, value in raw]
    words = b",".join(value for name, value in known if name == b"connection").decode("latin-1").split(",")
    left_out = without | _HOP | {word.strip().lower() for word in words}
    return [(name, value) for name, value in known if name.decode("latin-1") not in left_out]


def _url(text: str) -> httpx.URL:
    """Return a URL of the web. Raises ``_Refused``."""
    try:
        url = httpx.URL(text)
        host = url.host  # an international name may be none that can be read
    except (httpx.InvalidURL, ValueError) as error:
        raise _Refused(400, f"{text[:200]!r} is no URL: {type(error).__name__}") from None
    if not host:
        raise _Refused(400, f"{text[:200]!r} is no URL: it names no host")
    return url


def _wishes(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return what a caller asks of the guard for this request. Raises ``_Refused``."""
    wishes: dict[str, Any] = {}
    if (most := headers.get(MAX_PRICE)) is not None:
        try:
            check_dollars(MAX_PRICE, most)
        except ConfigError as error:
            raise _Refused(400, str(error)) from None
        wishes["max_price"] = most
    if (again := headers.get(PAY_AGAIN)) is not None:
        if again != "true":
            raise _Refused(400, f"{PAY_AGAIN}: {again[:20]!r} is not true; leave the header out otherwise")
        wishes["pay_again"] = True
    return wishes


async def _body(request: Request, grows: Callable[[int], None]) -> bytes:
    """Return the body of a request. Raises ``_Refused`` for one that is too large, or takes too long."""
    parts, size = [], 0
    try:
        with anyio.fail_after(_BODY_S):
            async for part in request.stream():
                size += len(part)
                grows(len(part))
                if size > _MOST_BYTES:
                    raise _Refused(413, _TOO_LARGE)
                parts.append(part)
    except TimeoutError:
        raise _Refused(408, f"the body did not come within {_BODY_S:.0f} s") from None
    return b"".join(parts)


async def _pass_on(response: httpx.Response, head: list[tuple[bytes, bytes]], send: Send) -> None:
    """Send an answer on, each piece as it comes. One that breaks ends the connection: it is not whole.

    So does one whose caller takes nothing for ``_UNREAD_S``: it keeps a place at its host that others wait for.
    """

    async def timely(message: Message) -> None:
        with anyio.fail_after(_UNREAD_S):
            await send(message)

    status = response.status_code if 200 <= response.status_code < 600 else 502  # a server passes on no other one
    try:
        await timely({"type": "http.response.start", "status": status, "headers": head})
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        async for chunk in stream:
            await timely({"type": "http.response.body", "body": chunk, "more_body": True})
            await anyio.lowlevel.checkpoint()  # a caller that has gone meanwhile is felt before the end
        await timely({"type": "http.response.body", "body": b"", "more_body": False})
    except TimeoutError:
        with anyio.CancelScope(shield=True):
            await response.aclose()  # here, while the error is handled: an answer that is cut off was not handed over
    except (httpx.TransportError, X402GuardError):
        return
    finally:
        with anyio.CancelScope(shield=True):
            await response.aclose()


def _as_refusal(denied: PolicyDenied) -> Refusal:
    return Refusal("hosts", str(denied).removeprefix("hosts: "))


_TOO_LARGE: Final = f"the body has more than {_MOST_BYTES} bytes"

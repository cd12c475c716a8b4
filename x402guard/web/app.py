"""Serves the live page of a ledger: read-only, but for the owner's answers and stops."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Send

from x402guard.errors import ConfigError, X402GuardError
from x402guard.guard.owner import Owner
from x402guard.kernel.rows import WALLET
from x402guard.views.live_page import Choice, live_page, looked_for, sections
from x402guard.views.page import policy_of
from x402guard.views.words import printable
from x402guard.web.access import Access, Role
from x402guard.web.metrics import CONTENT_TYPE, metrics

if TYPE_CHECKING:
    from x402guard.views.live import LiveView, Totals

_EVERY_S: Final = 1.0
_BEAT_S: Final = 15.0
_LONGEST: Final = 4_096
_FORM_S: Final = 5.0
_UNREAD_S: Final = 10.0
_MOST_STREAMS: Final = 64


class Looks:
    """The live view, and what was looked for, read at most once a second however many browsers look.

    Args:
        owner: the ledger, open to be read.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner, self._lock = owner, threading.Lock()
        self._known: dict[str | None, tuple[float, Any]] = {}

    def forget(self) -> None:
        """Read the ledger anew at the next look."""
        with self._lock:
            self._known.clear()

    def view(self, find: str = "") -> LiveView:
        """Return the view, at most a second old, with what is looked for by *find*. Raises ``LedgerUnavailable``."""
        view: LiveView = self._recent(find, lambda: self._owner.live(find=find))
        return view

    def totals(self) -> Totals:
        """Return the figures, at most a second old. Raises ``LedgerUnavailable``."""
        totals: Totals = self._recent(None, self._owner.totals)
        return totals

    def _recent(self, key: str | None, read: Callable[[], Any]) -> Any:
        with self._lock:
            now_s = time.monotonic()
            self._known = {each: known for each, known in self._known.items() if now_s - known[0] < _EVERY_S * 0.9}
            if key not in self._known:
                self._known[key] = (time.monotonic(), read())
            return self._known[key][1]


class Live:
    """The routes of one ledger.

    Args:
        owner: the ledger, open to be read.
        acting: opens the ledger for an owner's command.
        access: who may look and act.
    """

    def __init__(self, owner: Owner, acting: Callable[[], Owner], access: Access) -> None:
        self._looks, self._acting, self._access = Looks(owner), acting, access
        self._streams = 0
        self._is_ending = False

    def end(self) -> None:
        """End the streams of open pages: the server ends."""
        self._is_ending = True

    def app(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/events", self._events),
                Route("/metrics", self._metrics),
                Route("/answer", self._answer, methods=["POST"]),
                Route("/stop", self._stop, methods=["POST"]),
            ]
        )

    async def _page(self, request: Request) -> Response:
        """Return the page. A visitor who may not look gets it without a figure, to sign in."""
        if not self._access.is_for_us(request.headers):
            return _plain("This page is for another address: open the one that x402guard serve has printed.", 403)
        role = self._access.role(request.headers)
        try:
            choice = _choice(request, role)
            view = await run_in_threadpool(self._looks.view, looked_for(choice)) if role >= Role.VIEWER else None
        except X402GuardError as error:
            return _plain(str(error), 503)
        text = live_page(view, choice)
        return _guarded(HTMLResponse(text), policy_of(text))

    async def _metrics(self, request: Request) -> Response:
        if self._access.role(request.headers) < Role.VIEWER:
            return _plain(_NO_TOKEN, 403)
        try:
            body = await run_in_threadpool(lambda: metrics(self._looks.totals()))
        except X402GuardError as error:
            return _plain(str(error), 503)
        return _guarded(Response(body, media_type=CONTENT_TYPE))

    async def _events(self, request: Request) -> Response:
        role = self._access.role(request.headers)
        if role < Role.VIEWER:
            return _plain(_NO_TOKEN, 403)
        if self._streams >= _MOST_STREAMS:
            return _plain(f"{_MOST_STREAMS} pages are open already.", 503)
        return _guarded(_Timely(self._stream(request, _choice(request, role)), media_type="text/event-stream"))

    async def _stream(self, request: Request, choice: Choice) -> AsyncIterator[str]:
        """Yield the sections that have changed, once a second, and a sign of life while nothing has."""
        self._streams += 1
        try:
            known: dict[str, str] = {}
            quiet_s = 0.0
            while not self._is_ending and not await request.is_disconnected():
                quiet_s += _EVERY_S
                try:
                    now_ms, made = await run_in_threadpool(self._made, choice)
                    changed = {name: html for name, html in made.items() if known.get(name) != html}
                    if changed or quiet_s >= _BEAT_S:
                        yield _event({"now_ms": now_ms, "is_owner": choice.is_owner, "sections": changed})
                        known, quiet_s = made, 0.0
                except X402GuardError as error:
                    yield _event({"error": printable(str(error))})
                await anyio.sleep(_EVERY_S)
        finally:
            self._streams -= 1

    def _made(self, choice: Choice) -> tuple[int, dict[str, str]]:
        view = self._looks.view(looked_for(choice))
        return view.now_ms, sections(view, choice)

    # -- the owner's ------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        def act(owner: Owner, given: dict[str, str]) -> str:
            if given.get("answer") not in ("allow", "deny"):
                raise ConfigError("answer: it is neither allow nor deny")
            (owner.allow if given["answer"] == "allow" else owner.deny)(given.get("ask", ""))
            return "answered"

        return await self._act(request, act)

    async def _stop(self, request: Request) -> Response:
        def act(owner: Owner, given: dict[str, str]) -> str:
            name = given.get("session", "")
            owner.trip(
                name if name == WALLET else f"id={name}", given.get("reason") or "by its owner, on the live page"
            )
            return "stopped"

        return await self._act(request, act)

    async def _act(self, request: Request, act: Callable[[Owner, dict[str, str]], str]) -> Response:
        """Run an owner's command. The token stands in a header, which no other site can send."""
        if self._access.role(request.headers) is not Role.OWNER:
            return _plain("Only the owner's token may do this.", 403)
        given = await _form(request)
        if given is None:
            return _plain("The form is too large or too slow.", 413)

        def run() -> str:
            with self._acting() as owner:
                said = act(owner, given)
            self._looks.forget()
            return said

        try:
            return _plain(await run_in_threadpool(run), 200)
        except X402GuardError as error:
            return _plain(str(error), 409)


class _Timely(StreamingResponse):
    """A stream that ends if its reader takes nothing for ten seconds: it would keep the place of another page."""

    async def stream_response(self, send: Send) -> None:
        async def timely(message: Message) -> None:
            with anyio.fail_after(_UNREAD_S):
                await send(message)

        with suppress(TimeoutError):
            await super().stream_response(timely)


_NO_TOKEN: Final = "This is not a token of this server: x402guard serve has printed it."  # noqa: S105 - words


def _choice(request: Request, role: Role) -> Choice:
    asked = {name: value[:200] for name, value in request.query_params.items()}
    return Choice(
        find=asked.get("find", ""),
        customer=asked.get("customer", ""),
        agent=asked.get("agent", ""),
        state=asked.get("state", ""),
        is_owner=role is Role.OWNER,
    )


async def _form(request: Request) -> dict[str, str] | None:
    """Return the fields of a form; None for one that is larger than 4 kB, or takes longer than 5 s to come."""
    body = b""
    try:
        with anyio.fail_after(_FORM_S):
            async for part in request.stream():
                body += part
                if len(body) > _LONGEST:
                    return None
    except TimeoutError:
        return None
    return {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _event(values: dict[str, object]) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"


def _plain(text: str, status: int) -> Response:
    return _guarded(PlainTextResponse(printable(text), status_code=status))


def _guarded(response: Response, policy: str = "default-src 'none'") -> Response:
    """Return a response that no other page may frame or read, and that no cache keeps."""
    response.headers.update(
        {
            "content-security-policy": f"{policy}; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-store",
        }
    )
    return response

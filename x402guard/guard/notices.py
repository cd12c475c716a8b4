"""Sends notices to the owner: a log record, a function, and a webhook. No payment waits for any of them."""

from __future__ import annotations

import atexit
import hashlib
import hmac
import inspect
import json
import secrets
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from contextvars import Context
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Final
from weakref import WeakSet

import anyio
import httpx

from x402guard.errors import ConfigError
from x402guard.flow.address import is_loopback
from x402guard.flow.background import Background
from x402guard.flow.detached import Aside
from x402guard.flow.shell import LOG, log_notice
from x402guard.frozen import replace
from x402guard.http.redaction import bare_url, hide_url
from x402guard.http.request import mark_guarded
from x402guard.ledger.view import Notice

_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0)
_WAIT_S: Final = 10.0
_CLOSING_S: Final = 5.0
_LEAST_SECRET: Final = 16

OnNotice = Callable[[Notice], object]
"""A function of a notice, plain or ``async``; it runs in a thread of its own."""


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """Where notices are posted to, as JSON.

    Args:
        url: https; or http on this machine.
        secret: at least 16 characters; it signs every delivery.

    A delivery has the headers ``x402guard-delivery`` (its id, the same if repeated) and ``x402guard-signature``:
    ``t=<unix seconds>,v1=<hex>``, HMAC-SHA256 of ``<unix seconds>.<body>``. Raises ``ConfigError`` naming the setting.
    """

    url: str = field(repr=False)
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
            self.url.encode("utf-8")
        except (httpx.InvalidURL, TypeError, ValueError, AttributeError) as error:
            raise ConfigError("webhook.url: not a URL; write https://…") from error
        if not url.host or url.scheme not in ("http", "https") or any(c.isspace() for c in self.url):
            raise ConfigError("webhook.url: not a URL; write https://…")
        if not all(0 < len(label) < 64 for label in url.host.rstrip(".").split(".")) or (url.port or 1) > 65_535:
            raise ConfigError(f"webhook.url: {url.host!r:.80} or its port cannot be reached; write https://…")
        if url.scheme == "http" and not is_loopback(url.host):
            raise ConfigError(
                f"webhook.url: {url.host} is another machine, and plain http can be read in transit; write https://…"
            )
        try:
            enough = isinstance(self.secret, str) and len(self.secret.encode("utf-8")) >= _LEAST_SECRET
        except UnicodeEncodeError:
            enough = False
        if not enough:
            raise ConfigError(f"webhook.secret: a secret of at least {_LEAST_SECRET} characters signs each delivery")

        hide_url(self.url)  # a chat service's URL holds its key in the path

    def __repr__(self) -> str:
        return f"Webhook(url={bare_url(self.url)!r})"

    def __reduce__(self) -> str:
        raise TypeError("a Webhook holds a secret and is not pickled")


def sign_delivery(secret: str, at_unix: int, body: bytes) -> str:
    """Return the value of ``x402guard-signature`` for a body. A receiver computes it the same way to compare."""
    digest = hmac.new(secret.encode(), f"{at_unix}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at_unix},v1={digest}"


class NoticeSender:
    """Sends each notice once. A function that fails and a webhook that hangs are felt by no payment."""

    def __init__(
        self,
        on_notice: OnNotice | None = None,
        webhook: Webhook | None = None,
        pauses_s: tuple[float, ...] = _PAUSES_S,
    ) -> None:
        if on_notice is not None and not callable(on_notice):
            raise ConfigError(f"on_notice: {on_notice!r} is not a function of a Notice")
        if webhook is not None and not isinstance(webhook, Webhook):
            raise ConfigError(f"webhook: a {type(webhook).__name__} is not a Webhook; write Webhook(url=…, secret=…)")
        self._webhook, self._pauses_s = webhook, pauses_s
        self._ending = threading.Event()
        self._on_notice = on_notice
        self._functions = None if on_notice is None else Background("on_notice", self._tell)
        self._posts = None if webhook is None else Background("webhook", self._deliver)
        _OPEN.add(self)

    def notify(self, notices: Iterable[Notice]) -> None:
        """Send notices in the order given. Never raises an ``Exception``."""
        for notice in notices:
            stamped = notice if notice.time else replace(notice, time=time.time())
            log_notice(stamped)
            if stamped.logged_only:
                continue
            if self._functions is not None:
                self._functions.put(stamped)
            if self._posts is not None:
                body = json.dumps(stamped.to_dict(), ensure_ascii=False, default=str)
                self._posts.put((secrets.token_hex(16), body.encode("utf-8", "replace")))

    def _tell(self, notice: Notice) -> None:
        if self._on_notice is not None:
            _call(self._on_notice, notice)

    def _deliver(self, delivery: tuple[str, bytes]) -> None:
        if self._webhook is None:
            return
        delivery_id, body = delivery
        problem = ""
        for pause_s in (0.0, *self._pauses_s):
            if pause_s and self._ending.wait(pause_s):
                break
            at_unix = int(time.time())
            headers = {
                "content-type": "application/json",
                "x402guard-delivery": delivery_id,
                "x402guard-signature": sign_delivery(self._webhook.secret, at_unix, body),
            }
            try:
                status = _post(self._webhook.url, body, headers)
            except Exception as error:  # noqa: BLE001 - after any error the next notice is sent
                problem = type(error).__name__
                continue
            if 200 <= status < 300:
                return
            problem = f"status {status}"
            if status < 500 and status not in (408, 425, 429):
                break
        LOG.error("webhook: a notice could not be delivered: %s", problem)

    def close(self, until_s: float | None = None) -> None:
        """Wait for deliveries under way, until *until_s* (monotonic); by default for five seconds."""
        _OPEN.discard(self)
        until_s = time.monotonic() + _CLOSING_S if until_s is None else until_s
        if self._functions is not None:
            self._functions.close(until_s)
        if self._posts is not None:
            self._posts.close(until_s, self._ending.set)


_OPEN: Final[WeakSet[NoticeSender]] = WeakSet()
_PROCESS_ENDS: Final = threading.Event()
"""Set while the process ends: Python 3.12 starts no thread then, and the process waits no longer than ``_CLOSING_S``."""


@atexit.register
def _close_all() -> None:
    """Wait for what a guard that was never closed has still to tell: its end may be the reason of a notice."""
    _PROCESS_ENDS.set()
    until_s = time.monotonic() + _CLOSING_S
    for sender in tuple(_OPEN):
        sender.close(until_s)


def _call(function: OnNotice, notice: Notice) -> None:
    """Call the owner's function, and run what it returns if that has to be awaited."""
    said = function(notice)
    if inspect.isawaitable(said):
        Context().run(anyio.run, _awaited, said)  # an empty context: this thread has no event loop


async def _awaited(said: Awaitable[object]) -> None:
    await said


@cache
def _tls() -> ssl.SSLContext:
    """Return the certificates that are trusted, read once: reading them takes longer than a delivery."""
    return httpx.create_ssl_context(trust_env=False)


def _post(url: str, body: bytes, headers: dict[str, str]) -> int:
    """Return the status of the answer. Raises what httpx raises, and ``TooLate`` for one that takes longer in all."""
    # What takes longer ends with its client, whose connection is closed.
    with httpx.Client(timeout=_WAIT_S, trust_env=False, verify=_tls()) as http:
        send = partial(_sent, http, url, body, headers)
        return send() if _PROCESS_ENDS.is_set() else Aside(send).within(_WAIT_S)


def _sent(http: httpx.Client, url: str, body: bytes, headers: dict[str, str]) -> int:
    # The body of the answer is not read: it may never end.
    request = mark_guarded(http.build_request("POST", url, content=body, headers=headers))
    with closing(http.send(request, stream=True)) as answer:
        return answer.status_code

"""Sends notices to the owner: a log record, a function, and a webhook. No payment waits for the webhook."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final

import httpx

from x402guard.errors import ConfigError
from x402guard.http.redaction import bare_url, hide_url
from x402guard.http.request import mark_guarded
from x402guard.ledger.view import Notice

_LOG: Final = logging.getLogger("x402guard")
_MOST_WAITING: Final = 1_000
_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0)
_WAIT_S: Final = 10.0
_CLOSING_S: Final = 5.0
_LEAST_SECRET: Final = 16

OnNotice = Callable[[Notice], object]


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
        if url.scheme == "http" and not _is_here(url.host):
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


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def sign_delivery(secret: str, at_unix: int, body: bytes) -> str:
    """Return the value of ``x402guard-signature`` for a body. A receiver computes it the same way to compare."""
    digest = hmac.new(secret.encode(), f"{at_unix}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at_unix},v1={digest}"


class NoticeSender:
    """Sends each notice once. A function that fails or a webhook that hangs does not affect payments."""

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
        self._on_notice, self._webhook, self._pauses_s = on_notice, webhook, pauses_s
        self._waiting: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MOST_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._ending = threading.Event()

    def notify(self, notices: Iterable[Notice]) -> None:
        """Send notices in the order given. Never raises an ``Exception``."""
        for notice in notices:
            if not notice.pressing:
                _LOG.info(notice.message)
                continue
            _LOG.warning(notice.message)
            if self._on_notice is not None:
                try:
                    self._on_notice(notice)
                except Exception:  # noqa: BLE001 - an error of the owner's function must not stop a payment
                    _LOG.exception("on_notice failed")
            if self._webhook is not None:
                self._enqueue(notice)

    def _enqueue(self, notice: Notice) -> None:
        body = json.dumps({"event": notice.name, "message": notice.message, **notice.facts}, ensure_ascii=False)
        try:
            self._waiting.put_nowait((secrets.token_hex(16), body.encode("utf-8", "replace")))
        except queue.Full:
            _LOG.error("webhook: %d notices wait already; this one is only in the log", _MOST_WAITING)
            return
        with self._lock:
            if self._thread is None or self._pid != os.getpid():  # threads do not survive a fork
                self._pid = os.getpid()
                self._thread = threading.Thread(target=self._deliver_all, name="x402guard-webhook", daemon=True)
                self._thread.start()

    def _deliver_all(self) -> None:
        with httpx.Client(timeout=_WAIT_S, trust_env=False) as http:
            while (delivery := self._waiting.get()) is not None:
                self._deliver(http, *delivery)

    def _deliver(self, http: httpx.Client, delivery_id: str, body: bytes) -> None:
        if self._webhook is None:
            return
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
                status = self._post(http, body, headers)
            except Exception as error:  # noqa: BLE001 - after any error the next notice is sent
                problem = type(error).__name__
                continue
            if 200 <= status < 300:
                return
            problem = f"status {status}"
            if status < 500 and status not in (408, 425, 429):
                break
        _LOG.error("webhook: a notice could not be delivered: %s", problem)

    def _post(self, http: httpx.Client, body: bytes, headers: dict[str, str]) -> int:
        url = "" if self._webhook is None else self._webhook.url
        # The body of the answer is not read: it may never end.
        request = mark_guarded(http.build_request("POST", url, content=body, headers=headers))
        with closing(http.send(request, stream=True)) as answer:
            return answer.status_code

    def close(self) -> None:
        """Wait a few seconds at most for deliveries under way."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        with suppress(queue.Full):  # a full queue is not waited for
            self._waiting.put_nowait(None)
        thread.join(_CLOSING_S / 2)
        self._ending.set()
        thread.join(_CLOSING_S / 2)

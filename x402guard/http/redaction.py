"""Keeps payments and keys out of the logs of the HTTP libraries, without changes to their levels or handlers.

At DEBUG, httpcore logs the headers of answers and hpack those of requests, also as compressed blocks (RFC 7541); httpx
logs query strings at INFO. The payment headers are defined in the x402 HTTP transport specification, section 2 (v2:
``PAYMENT-SIGNATURE``, ``PAYMENT-RESPONSE``; v1: ``X-PAYMENT``, ``X-PAYMENT-RESPONSE``).
"""

from __future__ import annotations

import logging
import re
import threading
import traceback
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from x402guard.x402.rails import RECEIPT_HEADERS, REQUEST_HEADERS

REDACTED: Final = "[redacted]"
_HTTPCORE: Final = ("", ".connection", ".http11", ".http2", ".proxy", ".socks")
_WEB3: Final = (
    "_utils.http_session_manager.HTTPSessionManager",
    "manager.RequestManager",
    "providers.AsyncHTTPProvider",
    "providers.AsyncIPCProvider",
    "providers.HTTPProvider",
    "providers.IPCProvider",
    "providers.PersistentConnectionProvider",
    "providers.WebSocketProvider",
    "providers.async_base.AsyncBaseProvider",
    "providers.async_base.AsyncJSONBaseProvider",
    "providers.base.BaseProvider",
    "providers.base.JSONBaseProvider",
    "providers.persistent.subscription_manager",
)
_URLLIB3: Final = ("connection", "connectionpool", "http2.connection", "poolmanager", "response", "util.retry")
_ROOTS: Final = (
    "h2",
    "hpack",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "hyperframe",
    "mcp",
    "urllib3",
    "web3",
    "websockets",
)

LOGGERS: Final = (
    "x402guard",
    "httpx",
    "httpx2",
    *(f"httpcore{part}" for part in _HTTPCORE),
    *(f"httpcore2{part}" for part in _HTTPCORE),
    "h2",
    "hpack",
    "hpack.hpack",
    "hpack.table",
    "hyperframe",
    "mcp.client.session",
    "mcp.client.sse",
    "mcp.client.stdio",
    "mcp.client.streamable_http",
    "urllib3",
    *(f"urllib3.{part}" for part in _URLLIB3),
    "urllib3.contrib.emscripten.response",
    "urllib3.contrib.pyopenssl",
    "web3",
    *(f"web3.{part}" for part in _WEB3),
    "websockets",
    "websockets.client",
    "websockets.protocol",
    "websockets.server",
)
"""The loggers that emit records: a filter on a logger does not apply to its children's records."""

_HEADERS: Final = (
    *sorted(RECEIPT_HEADERS | REQUEST_HEADERS, key=len, reverse=True),
    "x402guard-signature",  # of a webhook
    "authorization",  # also proxy-authorization: a name matches at the end of a longer one
    "cookie",
    "api[-_]?key",  # x-api-key, api-key, x-goog-api-key
)
_NAMES: Final = "|".join(_HEADERS)
# A whole value in (nested) Python or JSON quotes; else everything up to the end of the line, real or escaped as \r\n.
_QUOTED: Final = r"""b?(?P<quote>\\{0,8}["'])(?:(?!(?P=quote))(?:\\.|[^\\]))*(?P=quote)"""
# Atomic groups, not possessive quantifiers: before Python 3.11.5 those go back into a group that is repeated (gh-106052).
_TO_LINE_END: Final = r"""(?>(?:(?>[^\r\n\\]+)|(?>\\+)(?![rn]))*)"""
_HEADER: Final = re.compile(
    rf"""(?P<name>(?:{_NAMES})\\*["']?\s*[,:=]\s*(?:value\s*[:=]\s*)?)(?:{_QUOTED}|{_TO_LINE_END})""", re.IGNORECASE
)
_BASE64_JSON: Final = re.compile(
    r"""(?P<offer>payment-required[^\w]{1,8}b?["']?)?eyJ[A-Za-z0-9+/_=-]{60,}""", re.IGNORECASE
)
_LONG_HEX: Final = re.compile(r"(?:0x)?[0-9a-fA-F]{128,}")
# A quote belongs to a URL if the URL continues after it.
_URL_TEXT: Final = r"""(?:[^\s'"<>\\]|'(?![\s,)\]}>:;]|$)|\\(?![rn'"]))"""
_URL: Final = re.compile(rf"(?:https?|wss?)://{_URL_TEXT}+", re.IGNORECASE)
_TARGET: Final = re.compile(rf"""(?:(?<=[\s'"?])|\A)([^\s'"?/]*/[^\s'"?]*)\?{_URL_TEXT}+""")
_BLOCK: Final = re.compile(r"(Encoded header block to|Decoding) .*", re.DOTALL)
_RAW_BYTES: Final = re.compile(
    # No two of its ways match the same text, so that it never tries again; a record that was cut ends without a quote.
    r"""b(?P<quote>["'])(?>(?:\\[^x]|(?!(?P=quote))[^\\])*)\\x(?>(?:\\.|(?!(?P=quote))[^\\])*)(?:(?P=quote)|\\?\Z)""",
    re.DOTALL,
)
_MOST_CHARACTERS: Final = 65_536
_LEAST_TOKEN: Final = 12
"""The least length of a part of a hidden URL that is redacted everywhere; shorter parts may be ordinary words."""


def redacted(text: str, logger: str = "") -> str:
    """Return *text*, a record of *logger* (a name), without payments, credentials, query strings and hidden URLs.

    Of a longer text than 65,536 characters, only these are returned. It takes time in proportion to the text.
    """
    text = text[:_MOST_CHARACTERS]
    if logger.partition(".")[0] in ("hpack", "h2", "hyperframe"):
        text = _RAW_BYTES.sub(REDACTED, _BLOCK.sub(rf"\1 {REDACTED}", text))
    text = _HEADER.sub(rf"\g<name>{REDACTED}", text)
    text = _BASE64_JSON.sub(lambda found: found[0] if found["offer"] else REDACTED, text)
    text = _LONG_HEX.sub(REDACTED, text)
    every_url = logger.partition(".")[0] == "web3"  # its URLs are those of nodes, whose paths are access keys
    hidden = _HIDDEN
    text = _URL.sub(lambda found: hidden.shown(found[0], always=every_url), text)
    return hidden.parts.sub(REDACTED, _TARGET.sub(rf"\1?{REDACTED}", text))


def bare_url(url: str) -> str:
    """Return only the scheme, host and port of *url*; ``[redacted]`` if it is not a URL."""
    try:
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return REDACTED
    host = parts.hostname or ""
    return f"{parts.scheme.lower()}://{f'[{host}]' if ':' in host else host}{port}" if host else REDACTED


def hide_url(url: str) -> str:
    """Redact *url*, whose path or query is an access key, and its parts in all later logs. Return its scheme and host.

    Also calls ``redact_logs``. Never raises.
    """
    global _HIDDEN  # noqa: PLW0603 - replaced whole, so that a reader needs no lock
    redact_logs()
    bare = bare_url(url)
    with _LOCK:
        _HIDDEN = _HIDDEN.also(url, bare)
    return bare


class _HiddenUrls:
    """The secret URLs, and a pattern of their parts. Immutable."""

    def __init__(self, origins: frozenset[str] = frozenset(), texts: frozenset[str] = frozenset()) -> None:
        self._origins, self._texts = origins, texts
        longest_first = sorted(texts, key=len, reverse=True)
        self.parts = re.compile("|".join(map(_wherever, longest_first)) or r"(?!)")

    def also(self, url: str, bare: str) -> _HiddenUrls:
        """Return a copy with *url* added."""
        if bare == REDACTED:
            return _HiddenUrls(self._origins, self._texts | ({url} - {""}))
        parts = urlsplit(url)
        path = parts.path.rstrip("/")
        words = [*path.split("/"), parts.username or "", parts.password or "", parts.query]
        words += [value for _, value in parse_qsl(parts.query)]
        tokens = {form for word in words for form in (word, unquote(word)) if len(form) >= _LEAST_TOKEN}
        return _HiddenUrls(self._origins | {bare}, self._texts | tokens | ({path} - {""}))

    def shown(self, url: str, *, always: bool) -> str:
        """Return *url* without credentials and query, and without its path if it is hidden or *always* is set."""
        bare = bare_url(url)
        if always or bare in self._origins or bare == REDACTED:
            return bare
        rest = url.partition("://")[2]
        path = re.sub(r"^[^/?#]*", "", rest)
        before, query, _ = path.partition("?")
        return f"{bare}{before.partition('#')[0]}{query and '?' + REDACTED}"


def _wherever(text: str) -> str:
    """Return a pattern for *text*: a path matches only as a whole, other text matches anywhere."""
    return rf"(?<![\w/]){re.escape(text)}(?![\w/])" if text.startswith("/") else re.escape(text)


_HIDDEN = _HiddenUrls()
_LOCK: Final = threading.Lock()


class RedactingFilter(logging.Filter):
    """Redacts every record (see ``redacted``) and drops none. A record without secrets stays unchanged."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact *record* and return True. Replaces an unreadable record, because logging would print its arguments."""
        try:
            self._clean(record)
        except Exception as error:  # noqa: BLE001 - a log record must never make a payment fail
            record.msg, record.args = f"{REDACTED}: a record that could not be read ({type(error).__name__})", ()
            record.exc_info = record.exc_text = record.stack_info = None
        return True

    def _clean(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        shown = redacted(told, record.name)
        if shown != told:
            record.msg, record.args = shown, ()
        if record.exc_info and record.exc_info[0] is not None:
            told = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            shown = redacted(told, record.name)
            if shown != told:
                record.exc_text, record.exc_info = shown, None
        elif record.exc_text:
            record.exc_text = redacted(record.exc_text, record.name)


_FILTER: Final = RedactingFilter()


def redact_logs() -> None:
    """Add the filter to the loggers in ``LOGGERS`` and all other existing loggers of the same libraries. Idempotent.

    A logger is permanent for its name, so this also covers loggers that a library uses later. Levels, handlers and
    propagation do not change; a disabled logger has no cost.
    """
    with _LOCK:
        others = [name for name in list(logging.root.manager.loggerDict) if name.partition(".")[0] in _ROOTS]
        for name in {*LOGGERS, *others}:
            logging.getLogger(name).addFilter(_FILTER)

"""The response side of a transport: decodes the body of a 402, and builds refusals as responses."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from x402guard.errors import (
    CallTimeout,
    ConfigError,
    LedgerUnavailable,
    PaymentRefused,
    ProtocolError,
    X402GuardError,
)

if TYPE_CHECKING:
    import httpx

    from x402guard.http.families import Library

REFUSAL: Final = "x402guard.refusal"
"""The key of a local refusal's error in ``response.extensions``."""

_WINDOWS: Final = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}
"""zlib's window bits for each content encoding that is decoded; some servers send deflate without zlib's frame."""


def decoded_body(response: httpx.Response, raw: bytes, limit: int) -> bytes | None:
    """Return *raw* with its content encoding decoded, or None if it does not match its encoding.

    Decodes one layer of gzip or deflate. Raises ``ProtocolError`` for several layers and for more than *limit* decoded
    bytes, because a kilobyte can expand to a gigabyte.
    """
    encoding = response.headers.get("content-encoding", "").strip().lower() or "identity"
    if "," in encoding:
        raise ProtocolError("at most one encoding is accepted", field="content-encoding", words=encoding)
    if encoding == "identity":
        return raw
    for bits in _WINDOWS.get(encoding, ()):
        unpacker = zlib.decompressobj(bits)
        with suppress(zlib.error):
            body = unpacker.decompress(raw, limit + 1)
            if len(body) > limit:
                raise ProtocolError(f"the decoded body has more than {limit} bytes", field="content-encoding")
            return body if unpacker.eof else None
    return None


def is_followed(response: Callable[[], httpx.Response | None], history: list[httpx.Response]) -> bool:
    """True if a client that follows redirects has read a redirect: one that does not has its ``next_request`` by then.

    What is read without a client, or by a response hook, is the caller's as it is: only after the hooks does a client
    replace the *history* with which the transport has returned it. *response* is a weak reference to it.
    """
    answer = response()
    return answer is not None and answer.history is not history and answer.next_request is None


_STATUS: Final[tuple[tuple[type[X402GuardError], int], ...]] = (
    (PaymentRefused, 402),
    (ConfigError, 400),
    (CallTimeout, 504),
    (LedgerUnavailable, 503),
)


def status_of(error: X402GuardError) -> int:
    """Return the status of an error in an answer over HTTP; 502 for what a peer or a payment's doubt has caused."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 502)


def problem(error: X402GuardError) -> dict[str, Any]:
    """Return an error as the object of a problem+json body (RFC 9457), without any words of a peer."""
    refused = error if isinstance(error, PaymentRefused) else None
    wait_s = None if refused is None else refused.retry_after
    known = {"retry_after": wait_s, **{name: getattr(error, name, None) or None for name in ("hold_id", "deadline")}}
    rule = "" if refused is None else f":{refused.rule}"
    return {
        "type": f"urn:x402guard:{error.code}",
        "title": type(error).__name__,
        "status": status_of(error),
        "detail": str(error),
        "code": error.code,
        **({} if refused is None else {"rule": refused.rule}),
        "phase": error.phase,
        "retry": error.retry,
        "money_may_have_moved": error.money_may_have_moved,
        "advice": error.advice,
        **({} if refused is None else {"session": refused.session}),
        **({} if refused is None else refused.amounts()),
        **{name: value for name, value in known.items() if value is not None},
        # SDKs show this message.
        "error": {"message": f"{error} [urn:x402guard:{error.code}{rule}]", "type": "x402guard", "code": error.code},
    }


def problem_headers(error: X402GuardError) -> dict[str, str]:
    """Return the headers of a problem+json body. They tell SDKs not to retry."""
    wait_s = getattr(error, "retry_after", None)
    headers = {"content-type": "application/problem+json", "x-should-retry": "false"}
    return headers if wait_s is None else {**headers, "retry-after": str(wait_s)}


def problem_response(library: Library, error: PaymentRefused | ProtocolError, request: httpx.Request) -> httpx.Response:
    """Return a refusal as a local 402 with a problem+json body, for agents that handle answers better.

    It has no ``PAYMENT-REQUIRED`` header, so that no outer client reads it as an offer.
    """
    body = json.dumps(problem(error)).encode()
    return library.response(
        402, headers=problem_headers(error), content=body, request=request, extensions={REFUSAL: error}
    )

"""The response side of a transport: looking into a 402 without taking it from the caller, and refusals as answers."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Final

from x402guard.errors import PaymentRefused, ProtocolError

if TYPE_CHECKING:
    import httpx

    from x402guard.http.families import Library


REFUSAL: Final = "x402guard.refusal"
"""Where a local refusal's error stands in ``response.extensions``."""

_WINDOW: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's window bits for the one layer of encoding that we undo."""


def decoded_body(response: httpx.Response, raw: bytes, limit: int) -> bytes | None:
    """Return *raw* with the response's content encoding undone, or None where it is not what its encoding says.

    One layer of gzip or deflate and no more. Raises ``ProtocolError`` for stacked layers and for what unpacks to more than
    *limit* bytes: a kilobyte can be a gigabyte then, and whoever reads on would find out.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if "," in encoding:
        raise ProtocolError(f"{encoding[:60]!r}: one encoding at most is read", field="content-encoding")
    if encoding == "identity":
        return raw
    if encoding not in _WINDOW:
        return None
    unpacker = zlib.decompressobj(_WINDOW[encoding])
    try:
        body = unpacker.decompress(raw, limit + 1)
    except zlib.error:
        return None
    if len(body) > limit:
        raise ProtocolError(f"what unpacks to more than {limit} bytes is not read", field="content-encoding")
    return body if unpacker.eof else None


def problem_response(library: Library, error: PaymentRefused, request: httpx.Request) -> httpx.Response:
    """Return a refusal as a local 402 with a problem+json body (RFC 9457), for agents that read answers better.

    It carries no ``PAYMENT-REQUIRED``, so that no outer client takes it for an offer, and tells SDKs not to retry.
    """
    problem = {
        "type": f"urn:x402guard:{error.code}",
        "title": type(error).__name__,
        "status": 402,
        "detail": str(error),
        "code": error.code,
        "rule": error.rule,
        "phase": error.phase,
        "retry": error.retry,
        "money_may_have_moved": error.money_may_have_moved,
        "advice": error.advice,
        "session": error.session,
        **error.amounts(),
        **({} if error.retry_after is None else {"retry_after": error.retry_after}),
        # Where SDKs look for words to show.
        "error": {
            "message": f"{error} [urn:x402guard:{error.code}:{error.rule}]",
            "type": "x402guard",
            "code": error.code,
        },
    }
    headers = {"content-type": "application/problem+json", "x-should-retry": "false"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return library.response(
        402, headers=headers, content=json.dumps(problem).encode(), request=request, extensions={REFUSAL: error}
    )

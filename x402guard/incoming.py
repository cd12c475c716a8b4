"""The response side of a transport: looking into a 402 without taking it from the caller, and refusals as answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Final

import httpx

from x402guard.errors import PaymentRefused

__all__ = ["AsyncReplay", "Replay", "decoded_body", "problem_response"]

_PIECE: Final = 1024
"""Compressed bytes handed to a decoder at a time: a bomb unpacks at most a thousandfold, so a megabyte, before we look."""


class Replay(httpx.SyncByteStream):
    """A response stream that was read in part, and reads from its beginning all the same."""

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream
        self._source = iter(stream)
        self._kept: list[bytes] = []

    def keep(self, limit: int) -> bytes | None:
        """Return the whole raw stream, or None once it is longer than *limit* bytes; both leave it readable."""
        for chunk in self._source:
            self._kept.append(chunk)
            if sum(map(len, self._kept)) > limit:
                return None
        return b"".join(self._kept)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._kept
        yield from self._source

    def close(self) -> None:
        """Close the stream underneath."""
        self._stream.close()


class AsyncReplay(httpx.AsyncByteStream):
    """The same as ``Replay``, for an asynchronous stream."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream
        self._source = aiter(stream)
        self._kept: list[bytes] = []

    async def keep(self, limit: int) -> bytes | None:
        """See ``Replay.keep``."""
        async for chunk in self._source:
            self._kept.append(chunk)
            if sum(map(len, self._kept)) > limit:
                return None
        return b"".join(self._kept)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._kept:
            yield chunk
        async for chunk in self._source:
            yield chunk

    async def aclose(self) -> None:
        """Close the stream underneath."""
        await self._stream.aclose()


class _Pieces(httpx.SyncByteStream):
    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._raw), _PIECE):
            yield self._raw[start : start + _PIECE]


def decoded_body(response: httpx.Response, raw: bytes, limit: int) -> bytes | None:
    """Return *raw* with the response's content encoding undone, or None where that gives more than *limit* bytes.

    What does not decode is returned as it is: then it is no JSON, and nobody is asked to believe it.
    """
    copy = httpx.Response(response.status_code, headers=response.headers, stream=_Pieces(raw))
    body = bytearray()
    try:
        for chunk in copy.iter_bytes():
            body += chunk
            if len(body) > limit:
                return None
    except httpx.DecodingError:
        return raw
    return bytes(body)


def problem_response(error: PaymentRefused, request: httpx.Request) -> httpx.Response:
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
    }
    headers = {"content-type": "application/problem+json", "x-should-retry": "false"}
    return httpx.Response(402, headers=headers, content=json.dumps(problem).encode(), request=request)

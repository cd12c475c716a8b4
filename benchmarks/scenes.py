"""What the rows measure on: a seller, a provider of LLM calls, and guards, all in this process."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.merchant import KEY, accept, b64, offer_response, receipt, required
from x402guard import AsyncGuardedTransport, Guard, GuardedTransport, LocalSigner, Session

SOLD = "https://seller.example/item"
MODEL = "https://api.openai.com/v1/chat/completions"

_TERMS = required(accept(10), url=SOLD)
_USAGE = {"prompt_tokens": 210, "completion_tokens": 400, "total_tokens": 610}


def plain(_request: httpx.Request) -> httpx.Response:
    """Answer without asking for anything."""
    return httpx.Response(200, json={"ok": 1})


def seller(request: httpx.Request) -> httpx.Response:
    """Ask for a payment, and take it."""
    if "payment-signature" not in request.headers:
        return offer_response(_TERMS)
    settled = receipt(transaction=f"0x{time.perf_counter_ns():064x}")
    return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(settled)}, json={"ok": 1})


class NewOffers:
    """A seller whose every offer is one that was not seen before."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Ask for a payment, and take it."""
        if "payment-signature" in request.headers:
            return seller(request)
        self._count += 1
        return offer_response(required(accept(10, extra={"name": "USDC", "version": "2", "n": self._count}), url=SOLD))


def provider(_request: httpx.Request) -> httpx.Response:
    """Answer a chat completion of 400 tokens."""
    return httpx.Response(200, headers={"content-type": "application/json"}, content=_ANSWER)


def _answer(**more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion", "model": "gpt-4o-mini", **more}


_ANSWER = json.dumps(
    _answer(
        choices=[{"index": 0, "message": {"role": "assistant", "content": "word " * 400}, "finish_reason": "stop"}],
        usage=_USAGE,
    )
).encode()


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream of so many chunks of content, then its end and its usage."""

    def __init__(self, count: int) -> None:
        going = _answer(choices=[{"index": 0, "delta": {"content": "word "}, "finish_reason": None}])
        ended = _answer(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        told = [*[going] * count, ended, _answer(choices=[], usage=_USAGE)]
        self._chunks = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in told] + [b"data: [DONE]\n\n"]

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks

    async def __aiter__(self) -> Any:
        for chunk in self._chunks:
            yield chunk


def streaming(count: int) -> Callable[[httpx.Request], httpx.Response]:
    """Return a provider that answers with a stream of so many chunks."""
    chunks = Chunks(count)
    return lambda _request: httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=chunks)


def prompt(number: int, size: int, *, stream: bool = False) -> dict[str, Any]:
    """Return a request of about *size* bytes that differs from all others."""
    text = f"{number} " + "how are you today, friend? " * (size // 27)
    return {
        "model": "gpt-4o-mini",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": text}],
        **({"stream": True} if stream else {}),
    }


@contextmanager
def session(ledger: str = "memory://", **more: Any) -> Iterator[Session]:
    """Yield a session with money for everything. Defaults of the library, but no questions to chains."""
    with Guard(signer=LocalSigner.from_key(KEY), ledger=ledger, background_checks=False, **more) as guard:
        yield guard.session("bench", budget="$1000000")  # not as a block, because two of them are used at once


@contextmanager
def on_disk() -> Iterator[str]:
    """Yield the URL of a new ledger in a folder beside this file, on its disk, that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path(__file__).parent) as folder:
        yield f"sqlite:///{folder}/ledger.db"


def client(payer: Session, handler: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    """Return a guarded client of *handler*."""
    return httpx.Client(transport=GuardedTransport(payer, httpx.MockTransport(handler)))


def async_client(payer: Session, handler: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    """Return a guarded asynchronous client of *handler*."""
    return httpx.AsyncClient(transport=AsyncGuardedTransport(payer, httpx.MockTransport(handler)))


def unguarded(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    """Return a client of *handler* that no guard watches."""
    return httpx.Client(transport=httpx.MockTransport(handler))

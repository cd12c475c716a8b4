"""Builds the answers of a hostile server: correct 402s and receipts, and answers that break during transfer."""

import base64
import json
from collections.abc import AsyncIterator

import anyio
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from x402guard.testing.engine import JSON


def encoded(content: JSON) -> str:
    """JSON in base64, as in x402's headers."""
    return base64.b64encode(json.dumps(content).encode()).decode()


def terms_of(offers: list[JSON], *, url: str, version: int = 2, **changes: JSON) -> JSON:
    """The terms of a 402 (x402 specification, PaymentRequired), in the shape of version 2 or 1."""
    terms: dict[str, JSON] = {"x402Version": version, "error": "payment is required", "accepts": offers}
    if version == 2:
        terms["resource"] = {"url": url, "description": "", "mimeType": "application/json"}
    else:
        terms["accepts"] = [_as_v1(offer, url) for offer in offers]
    return terms | changes


def _as_v1(offer: JSON, url: str) -> JSON:
    entry = {name: value for name, value in offer.items() if name != "amount"}
    return entry | {
        "maxAmountRequired": offer["amount"], "resource": url, "description": "", "mimeType": "application/json",
    }  # fmt: skip


def demand(offers: list[JSON], *, url: str, version: int = 2, **changes: JSON) -> Response:
    """A 402: the terms in PAYMENT-REQUIRED (version 2) or in the body (version 1)."""
    terms = terms_of(offers, url=url, version=version, **changes)
    if version == 1:
        return JSONResponse(terms, 402)
    return JSONResponse({}, 402, {"PAYMENT-REQUIRED": encoded(terms)})


def receipt_header(receipt: JSON, version: int) -> dict[str, str]:
    """A receipt in the header of the protocol version (PAYMENT-RESPONSE, or X-PAYMENT-RESPONSE in version 1)."""
    return {"X-PAYMENT-RESPONSE" if version == 1 else "PAYMENT-RESPONSE": encoded(receipt)}


class Dropped(Response):
    """No answer: the connection is closed before the first byte."""

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Start an answer with an invalid header, so that uvicorn closes the connection."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-dropped", b"\r\n")]})


def dripped(body: bytes, *, seconds: float, headers: dict[str, str]) -> Response:
    """A body that is sent byte by byte over `seconds` seconds."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(len(body)):
            yield body[at : at + 1]
            await anyio.sleep(seconds / len(body))

    return StreamingResponse(pieces(), headers=headers, media_type="application/json")

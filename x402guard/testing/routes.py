"""Defines the routes of the test merchant, their prices, and the small documents that they return."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from x402guard.testing.contracts import TOKEN
from x402guard.testing.engine import JSON
from x402guard.testing.payments import V1_NETWORKS

Answer = JSON | Response
CENT = 10_000
"""One cent in atomic units of a six-decimal dollar token."""

_BASE_USDC = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One way to pay for a route: `price` in atomic units of `asset`.

    For `upto` the price is the ceiling, and the transfer is always by Permit2. `network` is in CAIP-2 form; by default
    it is the merchant's own chain. `eip712_name` and `eip712_version` belong to the asset's signing domain.
    """

    price: int
    scheme: str = "exact"
    transfer_method: Literal["eip3009", "permit2"] = "eip3009"
    network: str | None = None
    asset: str = TOKEN
    eip712_name: str = "USDC"
    eip712_version: str = "2"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One route of the merchant at `path` (a Starlette template). It is free without offers.

    `answer` gets the request and returns JSON or a Response, or an awaitable of one; a status of 400 or more is passed
    on and nothing is settled. `charge` is the amount settled for an `upto` payment, in atomic units (default: the
    ceiling). `max_timeout_s` is how long a payment is valid, in seconds. `version` is the protocol version, 1 or 2.
    """

    name: str
    path: str
    answer: Callable[[Request], Answer | Awaitable[Answer]]
    methods: tuple[str, ...] = ("GET",)
    offers: tuple[Offer, ...] = ()
    charge: int | None = None
    version: Literal[1, 2] = 2
    max_timeout_s: int = 300
    description: str = field(default="")


def requirements(route: Route, offer: Offer, *, url: str, chain_id: int, payee: str, facilitator: str) -> JSON:
    """One entry of a 402's `accepts`, in the shape of the route's protocol version.

    Raises ValueError for version 1 on a chain without a version 1 name.
    """
    extra = {"name": offer.eip712_name, "version": offer.eip712_version}
    terms = {"scheme": offer.scheme, "asset": offer.asset, "payTo": payee, "maxTimeoutSeconds": route.max_timeout_s}
    if route.version == 1:
        if chain_id not in V1_NETWORKS:
            raise ValueError(f"protocol version 1 has no name for chain {chain_id}")
        return terms | {
            "network": V1_NETWORKS[chain_id],
            "maxAmountRequired": str(offer.price),
            "resource": url,
            "description": route.description,
            "mimeType": "application/json",
            "outputSchema": None,
            "extra": extra,
        }
    if offer.scheme == "upto":
        extra |= {"assetTransferMethod": "permit2", "facilitatorAddress": facilitator}
    elif offer.transfer_method == "permit2":
        extra["assetTransferMethod"] = "permit2"
    return terms | {
        "network": offer.network or f"eip155:{chain_id}",
        "amount": str(offer.price),
        "extra": extra,
    }


async def answered(route: Route, request: Request) -> Response:
    """Run the route's handler and return its result as a Response."""
    answer = route.answer(request)
    if inspect.isawaitable(answer):
        answer = await answer
    return answer if isinstance(answer, Response) else JSONResponse(answer)


# ---- the documents ----

_COURTS = ("District of Nevada", "Northern District of California", "Southern District of New York")
_EVENTS = ("COMPLAINT", "MOTION to dismiss", "ORDER granting extension of time", "STATUS REPORT", "JUDGMENT")


def docket_entry(request: Request) -> JSON:
    """Return a small court record: the docket entry with the number `n` in the path."""
    number = str(request.path_params["n"])
    # The path may contain any text, and the same text always gets the same document.
    seed = sum(number.encode())
    return {
        "docket": f"2:26-cv-{seed % 10_000:05}",
        "court": _COURTS[seed % len(_COURTS)],
        "entry": number,
        "title": _EVENTS[seed % len(_EVENTS)],
        "pages": 1 + seed % 30,
        "sealed": False,
    }


async def summary(request: Request) -> JSON:
    """Return the posted body and its length in bytes, so that a test can check that the payment kept the body."""
    body = await request.body()
    return {"summary": f"{len(body)} bytes received", "received": body.decode("utf-8", "replace"), "bytes": len(body)}


async def completion(request: Request) -> JSON:
    """Answer like a language model that used only a part of the ceiling."""
    body = await request.body()
    return {
        "model": "court-clerk-1",
        "completion": "The motion was granted in part.",
        "usage": {"input_tokens": len(body) // 4, "output_tokens": 7},
    }


def notice(_request: Request) -> JSON:
    """Return a free document."""
    return {"notice": "The clerk's office is open.", "price": 0}


def default_routes() -> tuple[Route, ...]:
    """The default routes of a Merchant: every scheme, both protocol versions, and a free one."""
    dime, cent = Offer(price=10 * CENT), Offer(price=CENT)
    by_permit2 = Offer(price=10 * CENT, transfer_method="permit2")
    several = (
        Offer(price=CENT, scheme="subscription"),
        Offer(price=CENT, network="eip155:8453", asset=_BASE_USDC, eip712_name="USD Coin"),
        Offer(price=3 * CENT, transfer_method="permit2"),
        Offer(price=2 * CENT),
    )
    ceiling = Offer(price=5 * CENT, scheme="upto")
    return (
        Route(name="documents", path="/documents/{n}", answer=docket_entry, offers=(dime,)),
        Route(name="cents", path="/cents/{n}", answer=docket_entry, offers=(cent,)),
        Route(name="permit2", path="/permit2/{n}", answer=docket_entry, offers=(by_permit2,)),
        Route(name="llm", path="/llm", answer=completion, methods=("POST",), offers=(ceiling,), charge=12_345),
        Route(name="v1", path="/v1/documents/{n}", answer=docket_entry, offers=(dime,), version=1),
        Route(name="summaries", path="/summaries", answer=summary, methods=("POST",), offers=(dime,)),
        Route(name="multi", path="/multi", answer=notice, offers=several),
        Route(name="free", path="/free", answer=notice),
    )

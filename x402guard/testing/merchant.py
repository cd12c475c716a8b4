"""Serves routes that are paid over x402, as the official servers do.

A request without a payment gets a 402 with the terms. A request with a payment is verified, handled and settled in this
order; then the answer is sent with the receipt.
"""

import base64
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute

from x402guard.testing.contracts import CHAIN_ID
from x402guard.testing.engine import JSON
from x402guard.testing.routes import Route, answered, default_routes, requirements
from x402guard.testing.server import Hosted
from x402guard.testing.settlers import Settler, SettlerUnavailable

PAYMENT_REQUIRED = 402
PRECONDITION_FAILED = 412
BAD_GATEWAY = 502

_PAYMENT_HEADER = {1: "X-PAYMENT", 2: "PAYMENT-SIGNATURE"}
_RECEIPT_HEADER = {1: "X-PAYMENT-RESPONSE", 2: "PAYMENT-RESPONSE"}
_TERMS_HEADER = "PAYMENT-REQUIRED"
_AGREED = ("scheme", "network", "amount", "asset", "payTo")


class Merchant(Hosted):
    """Serves `routes`. `settler` settles the payments to `payee` on chain `chain_id`."""

    def __init__(
        self, *, settler: Settler, payee: str, routes: Iterable[Route] | None = None, chain_id: int = CHAIN_ID
    ) -> None:
        self.payee = payee
        self.settler = settler
        self._chain_id = chain_id
        selling = tuple(default_routes() if routes is None else routes)
        self.routes = {route.name: route.path for route in selling}
        """Path templates by route name."""
        self.app = Starlette(routes=[self._mounted(route) for route in selling], lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        yield
        await self.settler.aclose()

    def _mounted(self, route: Route) -> StarletteRoute:
        async def endpoint(request: Request) -> Response:
            return await self._serve(route, request)

        return StarletteRoute(route.path, endpoint, methods=list(route.methods), name=route.name)

    async def _serve(self, route: Route, request: Request) -> Response:
        if not route.offers:
            return await answered(route, request)
        header = _PAYMENT_HEADER[route.version]
        try:
            accepts = await self._accepts(route, request)
            if header not in request.headers:
                return _demand(route, request, accepts, f"{header} header is required")
            payment = _decoded(request.headers[header])
            chosen = _chosen(route, payment, accepts)
            if chosen is None:
                return _demand(route, request, accepts, "the payment fits none of the terms")
            verdict = await self.settler.verify(payment, chosen)
        except SettlerUnavailable as error:
            return JSONResponse({"error": str(error)}, status_code=BAD_GATEWAY)
        if not verdict["isValid"]:
            return _demand(route, request, accepts, verdict.get("invalidReason", "invalid_payload"))
        return await self._deliver(route, request, payment, chosen, accepts)

    async def _deliver(self, route: Route, request: Request, payment: JSON, chosen: JSON, accepts: JSON) -> Response:
        response = await answered(route, request)
        if response.status_code >= 400:
            return response
        charged = chosen
        if chosen["scheme"] == "upto" and route.charge is not None:
            charged = chosen | {"amount": str(route.charge)}
        try:
            receipt = await self.settler.settle(payment, charged, path=request.url.path)
        except SettlerUnavailable:
            # The settlement may have happened, so the buyer must learn that a payment was tried.
            failure = {"success": False, "errorReason": "unexpected_settle_error", "transaction": ""}
            receipt = failure | {"network": chosen["network"]}
        if not receipt["success"]:
            # Version 2 sends no new terms here: a payment has ended, and no other one is requested.
            content = _terms(route, request, accepts, receipt.get("errorReason", "")) if route.version == 1 else {}
            response = JSONResponse(content, status_code=PAYMENT_REQUIRED)
        response.headers[_RECEIPT_HEADER[route.version]] = _encoded(receipt)
        return response

    async def _accepts(self, route: Route, request: Request) -> list[JSON]:
        needs_facilitator = any(offer.scheme == "upto" for offer in route.offers)
        facilitator = await self.settler.facilitator_address() if needs_facilitator else ""
        return [
            requirements(
                route, offer, url=str(request.url), chain_id=self._chain_id, payee=self.payee, facilitator=facilitator
            )
            for offer in route.offers
        ]


def _terms(route: Route, request: Request, accepts: list[JSON], error: str) -> JSON:
    terms: dict[str, JSON] = {"x402Version": route.version, "error": error, "accepts": accepts}
    if route.version == 1:
        return terms
    resource = {"url": str(request.url), "description": route.description, "mimeType": "application/json"}
    return terms | {"resource": resource}


def _demand(route: Route, request: Request, accepts: list[JSON], error: str) -> Response:
    status = PRECONDITION_FAILED if error == "permit2_allowance_required" else PAYMENT_REQUIRED
    terms = _terms(route, request, accepts, error)
    if route.version == 1:
        return JSONResponse(terms, status_code=status)
    return JSONResponse({}, status_code=status, headers={_TERMS_HEADER: _encoded(terms)})


def _chosen(route: Route, payment: JSON, accepts: list[JSON]) -> JSON:
    """The terms that the payment claims to meet, or None. The settler checks the signed fields."""
    if not isinstance(payment, dict) or payment.get("x402Version") != route.version:
        return None
    named = payment if route.version == 1 else payment.get("accepted")
    if not isinstance(named, dict):
        return None
    compared = ("scheme", "network") if route.version == 1 else _AGREED
    for terms in accepts:
        method = (terms["extra"] or {}).get("assetTransferMethod")
        named_method = (named.get("extra") or {}).get("assetTransferMethod") if route.version != 1 else None
        if method == named_method and all(named.get(field) == terms[field] for field in compared):
            return terms
    return None


def _encoded(content: JSON) -> str:
    return base64.b64encode(json.dumps(content).encode()).decode()


def _decoded(header: str) -> JSON:
    """The JSON in a payment header, or None if it contains none: the buyer then gets the terms again."""
    try:
        return json.loads(base64.b64decode(header, validate=True))
    except ValueError:
        return None

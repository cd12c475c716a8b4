"""The official x402 SDK on our chain: its facilitator, its FastAPI server, and its client.

Each `*_app` is an ASGI application for `x402guard.testing.Server`.
"""

import asyncio
from contextlib import asynccontextmanager

import httpx
from eth_account import Account
from fastapi import FastAPI, Request, Response
from x402 import x402Client, x402FacilitatorSync, x402ResourceServer
from x402.http import FacilitatorConfig, HTTPFacilitatorClient, PaymentOption, RouteConfig
from x402.http.clients.httpx import x402AsyncTransport
from x402.http.middleware.fastapi import payment_middleware, set_settlement_overrides
from x402.mechanisms.evm import EthAccountSigner, FacilitatorWeb3Signer
from x402.mechanisms.evm.exact import ExactEvmServerScheme, register_exact_evm_client, register_exact_evm_facilitator
from x402.mechanisms.evm.upto import UptoEvmClientScheme, UptoEvmFacilitatorScheme, UptoEvmServerScheme
from x402.schemas import PaymentPayload, PaymentRequirements
from x402.schemas.v1 import PaymentPayloadV1, PaymentRequirementsV1

UPTO_CHARGE = 12_345


def facilitator_app(*, rpc_url, key, network):
    """The official facilitator, settling on the chain at `rpc_url` from the account of `key` (which needs coin)."""
    signer = FacilitatorWeb3Signer(private_key=key, rpc_url=rpc_url)
    facilitator = x402FacilitatorSync()
    register_exact_evm_facilitator(facilitator, signer, networks=network)
    facilitator.register([network], UptoEvmFacilitatorScheme(signer))

    @asynccontextmanager
    async def lifespan(_app):
        yield
        # web3 keeps a session for every thread and never closes them itself.
        for session in signer._w3.provider._request_session_manager.session_cache._data.values():
            session.close()

    app = FastAPI(lifespan=lifespan)

    def read(body):
        first = body["paymentPayload"]["x402Version"] == 1
        payload = (PaymentPayloadV1 if first else PaymentPayload).model_validate(body["paymentPayload"])
        requirements = PaymentRequirementsV1 if first else PaymentRequirements
        return payload, requirements.model_validate(body["paymentRequirements"])

    @app.get("/supported")
    def supported():
        return facilitator.get_supported().model_dump(by_alias=True, exclude_none=True)

    @app.post("/verify")
    def verify(body: dict):
        return facilitator.verify(*read(body)).model_dump(by_alias=True, exclude_none=True)

    @app.post("/settle")
    def settle(body: dict):
        return facilitator.settle(*read(body)).model_dump(by_alias=True, exclude_none=True)

    return app


def merchant_app(*, facilitator_url, network, payee, token):
    """The official FastAPI server, selling by every scheme, with the official client of the facilitator at the URL.

    GET /documents/{n} is exact by EIP-3009 for $0.10, GET /permit2/{n} exact by Permit2 for $0.10, POST /llm upto $0.05
    (charged UPTO_CHARGE) and POST /idle upto $0.05 (charged nothing). GET /free costs nothing.
    """
    facilitator = HTTPFacilitatorClient(FacilitatorConfig(url=facilitator_url))
    server = x402ResourceServer(facilitator)
    server.register(network, ExactEvmServerScheme())
    server.register(network, UptoEvmServerScheme())

    def sold(scheme, price):
        return RouteConfig(accepts=PaymentOption(scheme=scheme, pay_to=payee, price=price, network=network))

    by_permit2 = {
        "amount": "100000",
        "asset": token,
        "extra": {"name": "USDC", "version": "2", "assetTransferMethod": "permit2"},
    }
    routes = {
        "GET /documents/*": sold("exact", "$0.10"),
        "GET /permit2/*": sold("exact", by_permit2),
        "POST /llm": sold("upto", "$0.05"),
        "POST /idle": sold("upto", "$0.05"),
    }

    @asynccontextmanager
    async def lifespan(_app):
        yield
        await facilitator.aclose()

    app = FastAPI(lifespan=lifespan)
    app.middleware("http")(payment_middleware(routes, server))

    @app.get("/documents/{n}")
    @app.get("/permit2/{n}")
    def document(n: str):
        return {"entry": n}

    @app.post("/llm")
    async def llm(request: Request, response: Response):
        set_settlement_overrides(response, {"amount": str(UPTO_CHARGE)})
        return {"received": (await request.body()).decode()}

    @app.post("/idle")
    def idle(response: Response):
        set_settlement_overrides(response, {"amount": "0"})
        return {"used": 0}

    @app.get("/free")
    def free():
        return {"price": 0}

    return app


def client(key, network="eip155:84532"):
    """The official client with the account of `key`: exact (both versions) and upto, on one network."""
    signer = EthAccountSigner(Account.from_key(key))
    payer = x402Client()
    register_exact_evm_client(payer, signer, networks=network)
    payer.register(network, UptoEvmClientScheme(signer))
    return payer


class Recorder(httpx.AsyncBaseTransport):
    """A transport that keeps every request it sends, so that a test can send one of them again."""

    def __init__(self):
        self.requests = []
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request):
        self.requests.append(request)
        return await self._inner.handle_async_request(request)

    async def aclose(self):
        await self._inner.aclose()


async def pay_async(key, method, url, **options):
    """Send one request through the official client; return its response and the requests that went out."""
    recorder = Recorder()
    transport = x402AsyncTransport(client(key), transport=recorder)
    async with httpx.AsyncClient(transport=transport, timeout=30, trust_env=False) as http:
        response = await http.request(method, url, **options)
    return response, recorder.requests


def pay(key, method, url, **options):
    """The same for callers without an event loop."""
    return asyncio.run(pay_async(key, method, url, **options))

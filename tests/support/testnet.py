"""What the tests of the test network share: routes that misbehave, and looking at receipts and balances."""

import base64
import json

import httpx

from x402guard.testing import (
    Offer,
    Route,
)

BODY = b'{"question": "who filed it?"}'


def broken(_request):
    from starlette.responses import JSONResponse

    return JSONResponse({"error": "the archive is closed"}, status_code=503)


EXTRA_ROUTES = (
    Route(
        name="idle",
        path="/idle",
        answer=lambda _request: {"used": 0},
        methods=("POST",),
        offers=(Offer(price=50_000, scheme="upto"),),
        charge=0,
    ),
    Route(name="broken", path="/broken", answer=broken, offers=(Offer(price=10_000),)),
    Route(
        name="minute",
        path="/minute",
        answer=lambda _request: {},
        offers=(Offer(price=10_000), Offer(price=10_000, transfer_method="permit2")),
        max_timeout_s=60,
    ),
    Route(name="dear", path="/dear", answer=lambda _request: {}, offers=(Offer(price=900_000),)),
)


def decoded(header):
    return json.loads(base64.b64decode(header))


def receipt_of(response):
    return decoded(response.headers.get("PAYMENT-RESPONSE") or response.headers["X-PAYMENT-RESPONSE"])


def again(request, **changes):
    """Send a recorded request once more, payment and all."""
    headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"} | changes
    return httpx.request(request.method, str(request.url), headers=headers, content=request.content, trust_env=False)


def assert_settled(net, chain, response, *, amount, before):
    """The receipt is right, and the chain says the same to the atomic unit."""
    receipt = receipt_of(response)
    assert receipt["success"] is True
    assert receipt["payer"] == net.payer
    assert net.balance(net.payer) == before[0] - amount
    assert net.balance(net.payee) == before[1] + amount
    last = net.transfers()[-1]
    assert (last.transaction, last.payee, last.amount) == (receipt["transaction"], net.payee, amount)
    assert chain.rpc("eth_getTransactionReceipt", receipt["transaction"])["status"] == "0x1"
    return receipt


def balances(net):
    return net.balance(net.payer), net.balance(net.payee)

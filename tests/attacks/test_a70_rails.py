"""A70: a payment is seen on whichever rail it goes; MPP's own client and names are those of its package."""

import base64
import json

import anyio
import httpx
import mcp_types
import mpp
import pytest
from eth_account import Account
from mpp.client import PaymentTransport
from mpp.errors import PaymentOutcomeUnknownError
from mpp.extensions.mcp import constants as of_mpp_in_mcp
from mpp.methods.evm import client as evm_client
from mpp.methods.evm import server as evm_server
from mpp.methods.evm.assets import BASE_SEPOLIA_USDC
from mpp.server import Mpp, pay
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from x402.http import constants as of_x402
from x402.mcp import constants as of_x402_in_mcp

import x402guard
from tests.support.merchant import KEY, PAYEE, URL, make_guard
from tests.support.merchant import client as over
from x402guard import AsyncGuardedTransport, Policy, PolicyDenied, refusal_from
from x402guard.testing import Server, Testnet
from x402guard.x402.rails import CODES, MEMBERS, RECEIPT_HEADERS, REQUEST_HEADERS, SCHEMES


def test_a70_the_table_has_every_name_of_the_packages():
    asked = {of_x402.PAYMENT_SIGNATURE_HEADER, of_x402.X_PAYMENT_HEADER, mpp.PAYMENT_AUTHORIZATION_HEADER}
    of_l402 = {"macaroon", "grpc-metadata-macaroon"}  # as its servers in Go read it
    assert {name.lower() for name in asked} | of_l402 == REQUEST_HEADERS
    shown = {of_x402.PAYMENT_RESPONSE_HEADER, of_x402.X_PAYMENT_RESPONSE_HEADER, "Payment-Receipt"}
    assert {name.lower() for name in shown} == RECEIPT_HEADERS
    assert set(MEMBERS) == {of_x402_in_mcp.MCP_PAYMENT_META_KEY, of_mpp_in_mcp.META_CREDENTIAL}
    named = {of_mpp_in_mcp.CODE_PAYMENT_REQUIRED, of_mpp_in_mcp.CODE_PAYMENT_VERIFICATION_FAILED, 402}
    assert named == CODES
    assert mcp_types.URL_ELICITATION_REQUIRED in CODES
    assert {"payment", "l402", "lsat"} == SCHEMES
    constants = {
        name: value for name, value in vars(of_x402).items() if name.endswith("_HEADER") and isinstance(value, str)
    }
    known = REQUEST_HEADERS | RECEIPT_HEADERS | {"payment-required", "settlement-overrides"}
    assert {value.lower() for value in constants.values()} <= known


CHALLENGE = {
    "id": "c1", "realm": "courts.example", "method": "evm", "intent": "charge",
    "request": {"amount": "10000", "currency": BASE_SEPOLIA_USDC.address, "recipient": PAYEE, "methodDetails": {"chainId": 84532}},
}  # fmt: skip
CREDENTIAL = {
    "challenge": CHALLENGE,
    "payload": {
        "type": "authorization",
        "from": Account.from_key(KEY).address,
        "to": PAYEE,
        "value": "10000",
        "nonce": "0x1",
    },
}


def encoded(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def in_a_header(value):
    request = encoded(value["challenge"]["request"])
    return "Payment " + encoded({**value, "challenge": {**value["challenge"], "request": request}})


def in_a_member(name, value):
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "x", "_meta": {name: value}}}


CARRIED = {
    "Authorization": {"headers": {"authorization": in_a_header(CREDENTIAL)}},
    "Payment-Authorization": {"headers": {"payment-authorization": in_a_header(CREDENTIAL)}},
    "a scheme among others": {"headers": {"authorization": f"Bearer x, {in_a_header(CREDENTIAL)}"}},
    "L402": {"headers": {"authorization": "L402 AGIAJE==:1234abcd"}},
    "LSAT": {"headers": {"authorization": "LSAT AGIAJE==:1234abcd"}},
    "Macaroon": {"headers": {"macaroon": "0201"}},
    "L402 behind another word": {"headers": {"authorization": "Bearer L402 bWFj:" + "a" * 64}},
    "an escape in capitals": {
        "content": json.dumps(in_a_member("org.paymentauth/credential", CREDENTIAL)).replace(
            "paymentauth", "pay\\u006Dentauth"
        ),
        "headers": {"content-type": "application/json"},
    },
    "JSON-RPC": {"json": in_a_member("org.paymentauth/credential", CREDENTIAL)},
    "an escape": {
        "content": json.dumps(in_a_member("org.paymentauth/credential", CREDENTIAL)).replace(
            "paymentauth", "\\u0070aymentauth"
        ),
        "headers": {"content-type": "application/json"},
    },
}


def seller(seen):
    def answer(request):
        seen.append(request)
        return httpx.Response(200, headers={"payment-receipt": "eyJ9"})

    return answer


@pytest.mark.parametrize("name", CARRIED)
def test_a70_a_payment_of_another_rail_is_refused(name):
    seen = []
    with make_guard() as guard, guard.session("s", budget="$0.000001") as session, over(session, seller(seen)) as http:
        with pytest.raises(PolicyDenied) as caught:
            http.post(URL, **CARRIED[name])
    assert (caught.value.rule, seen) == ("foreign_payment", [])


@pytest.mark.parametrize("name", CARRIED)
def test_a70_it_is_refused_under_install_too(name):
    with make_guard() as guard:
        x402guard.install(budget="$0.000001", guard=guard)
        try:
            with httpx.Client(transport=httpx.MockTransport(seller([]))) as http, pytest.raises(PolicyDenied):
                http.post(URL, **CARRIED[name])
        finally:
            x402guard.uninstall()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CARRIED
        if name not in ("L402", "LSAT", "Macaroon", "L402 behind another word", "a scheme among others")
    ],
)
def test_a70_what_it_signs_is_booked_where_the_policy_says_so(name):
    with make_guard(policy=Policy(foreign_payments="book")) as guard, guard.session("s", budget="$1.00") as session:
        with over(session, seller([])) as http:
            assert http.post(URL, **CARRIED[name]).status_code == 200
        assert f"{session.spent:.2f}" == "0.01"


def test_a70_the_chain_that_a_challenge_names_is_not_signed():
    """The same payload, said to be of a token with eighteen decimals, would count a billionth of a billionth."""
    request = {
        "amount": "900000000",
        "currency": "0x118917a40FAF1CD7a13dB0Ef56C86De7973Ac503",
        "methodDetails": {"chainId": 31611},
    }
    said = {"challenge": {**CHALLENGE, "request": request}, "payload": {**CREDENTIAL["payload"], "value": "900000000"}}
    with make_guard(policy=Policy(foreign_payments="book")) as guard, guard.session("s", budget="$1.00") as session:
        with over(session, seller([])) as http, pytest.raises(PolicyDenied, match=r"900\.00"):
            http.get(URL, headers={"payment-authorization": in_a_header(said)})


WORSE = {
    "another kind": {**CREDENTIAL, "payload": {**CREDENTIAL["payload"], "type": "transaction"}},
    "no chain": {
        **CREDENTIAL,
        "challenge": {**CHALLENGE, "request": {"currency": BASE_SEPOLIA_USDC.address, "methodDetails": {}}},
    },
    "no amount": {**CREDENTIAL, "payload": {**CREDENTIAL["payload"], "value": 10_000}},
}


@pytest.mark.parametrize("name", WORSE)
def test_a70_what_cannot_be_read_is_not_booked(name):
    with make_guard(policy=Policy(foreign_payments="book")) as guard, guard.session("s", budget="$1.00") as session:
        with over(session, seller([])) as http, pytest.raises(PolicyDenied, match="cannot be read"):
            http.get(URL, headers={"payment-authorization": in_a_header(WORSE[name])})
        assert session.spent == 0


@pytest.mark.parametrize(
    "headers",
    [{"sign-in-with-x": "eyJhIjoxfQ"}, {"authorization": "Bearer payment x"}, {"authorization": "Payments x"}],
)
def test_a70_who_signs_in_pays_nothing(headers):
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, over(session, seller([])) as http:
        assert http.get(URL, headers=headers).status_code == 200


def mpp_seller(net, *, requires_auth):
    """A seller that MPP's own package makes, without the terms of x402 that it offers beside its own."""
    server = Mpp(
        methods=evm_server.charge(currency=BASE_SEPOLIA_USDC, recipient=PAYEE, facilitator=net.facilitator),
        realm="127.0.0.1", secret_key="k" * 32, requires_auth=requires_auth,
    )  # fmt: skip

    @pay(server.charge(amount="0.01"))
    async def sold(request, credential, receipt):
        return JSONResponse({"sold": True})

    app = Starlette(routes=[Route("/paid", sold)])

    async def without_x402(scope, receive, send):
        async def sent(message):
            if message["type"] == "http.response.start":
                message["headers"] = [line for line in message["headers"] if line[0].lower() != b"payment-required"]
            await send(message)

        await app(scope, receive, sent)

    return without_x402


async def bought_by_mpp(net, url, session):
    """The answer that MPP's own client gets over a guarded transport."""
    method = evm_client.charge(account=Account.from_key(net.payer_key), currency=BASE_SEPOLIA_USDC)
    inner = AsyncGuardedTransport(session)
    async with httpx.AsyncClient(transport=PaymentTransport(methods=[method], inner=inner), timeout=30) as http:
        return await http.get(f"{url}/paid")


@pytest.mark.chain
@pytest.mark.parametrize("requires_auth", [False, True])
def test_a70_mpps_own_client_moves_nothing_past_a_guard(requires_auth):
    with Testnet() as net, Server(mpp_seller(net, requires_auth=requires_auth)) as server:
        before = net.balance(net.payer)
        with make_guard() as guard, guard.session("s", budget="$0.000001") as session:
            with pytest.raises(PaymentOutcomeUnknownError) as caught:
                anyio.run(bought_by_mpp, net, server.url, session)
            assert refusal_from(caught.value).rule == "foreign_payment"
            assert (net.balance(net.payer), session.spent, session.held) == (before, 0, 0)
        booking = Policy(foreign_payments="book")
        with make_guard(policy=booking) as guard, guard.session("s", budget="$1.00") as session:
            assert anyio.run(bought_by_mpp, net, server.url, session).json() == {"sold": True}
            assert (before - net.balance(net.payer), f"{session.spent:.2f}") == (10_000, "0.01")

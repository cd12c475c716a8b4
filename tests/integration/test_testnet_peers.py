"""The official server and facilitator on our chain, and our merchant with other settlers."""

import base64
import json
import subprocess
import sys

import httpx
import pytest
from eth_account import Account

from tests.support import official_sdk
from tests.support.testnet import BODY, EXTRA_ROUTES, again, assert_settled, balances, decoded, receipt_of
from x402guard.testing import (
    FacilitatorClient,
    Merchant,
    Server,
    SignatureSettler,
    default_routes,
)
from x402guard.testing.contracts import PERMIT2

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("testnet_peers")]


@pytest.mark.parametrize("whose", ["our facilitator", "the official facilitator"])
def test_the_official_client_pays_the_official_server(net, chain, official_facilitator, whose):
    facilitator_url = net.facilitator if whose == "our facilitator" else official_facilitator
    app = official_sdk.merchant_app(
        facilitator_url=facilitator_url, network=net.network, payee=net.payee, token=net.token
    )
    with Server(app) as server:
        for method, path, amount in [
            ("GET", "/documents/1", 100_000),
            ("GET", "/permit2/1", 100_000),
            ("POST", "/llm", official_sdk.UPTO_CHARGE),
        ]:
            before = balances(net)
            body = {"content": BODY} if method == "POST" else {}
            response, requests = official_sdk.pay(net.payer_key, method, server.url + path, **body)
            assert response.status_code == 200, (path, response.headers)
            assert_settled(net, chain, response, amount=amount, before=before)
            assert again(requests[-1]).status_code == 402, path
            assert net.balance(net.payer) == before[0] - amount
        before = balances(net)
        response, _ = official_sdk.pay(net.payer_key, "POST", f"{server.url}/idle")
        assert (receipt_of(response)["transaction"], receipt_of(response)["amount"]) == ("", "0")
        assert balances(net) == before


def test_our_merchant_works_with_the_official_facilitator(net, chain, official_facilitator):
    with Merchant(settler=FacilitatorClient(official_facilitator), payee=net.payee) as merchant:
        for method, path, amount in [
            ("GET", "/documents/1", 100_000),
            ("GET", "/permit2/1", 100_000),
            ("GET", "/v1/documents/1", 100_000),
            ("POST", "/llm", 12_345),
        ]:
            before = balances(net)
            response, _ = official_sdk.pay(net.payer_key, method, merchant.url + path)
            assert response.status_code == 200, (path, response.headers)
            assert_settled(net, chain, response, amount=amount, before=before)


# ---- the merchant without a chain ----


def test_signatures_alone_are_enough_to_sell_without_a_chain():
    settler, payee, buyer = SignatureSettler(), Account.create().address, Account.create()
    routes = default_routes() + EXTRA_ROUTES
    with Merchant(settler=settler, payee=payee, routes=routes) as merchant:
        paid, requests = official_sdk.pay(buyer.key.hex(), "GET", f"{merchant.url}/documents/9")
        assert paid.status_code == 200
        replayed = again(requests[-1])
        assert replayed.status_code == 402
        assert official_sdk.pay(buyer.key.hex(), "POST", f"{merchant.url}/llm")[0].status_code == 200
        assert official_sdk.pay(buyer.key.hex(), "GET", f"{merchant.url}/v1/documents/9")[0].status_code == 200
        assert official_sdk.pay(buyer.key.hex(), "POST", f"{merchant.url}/idle")[0].status_code == 200
        forged = decoded(requests[-1].headers["PAYMENT-SIGNATURE"])
        forged["payload"]["authorization"]["nonce"] = "0x" + "cd" * 32
        header = base64.b64encode(json.dumps(forged).encode()).decode()
        assert again(requests[-1], **{"payment-signature": header}).status_code == 402
    assert [(each.payer, each.payee, each.amount, each.path) for each in settler.payments] == [
        (buyer.address, payee, 100_000, "/documents/9"),
        (buyer.address, payee, 12_345, "/llm"),
        (buyer.address, payee, 100_000, "/v1/documents/9"),
    ]
    assert len({each.nonce for each in settler.payments}) == 3


def test_a_merchant_without_its_facilitator_says_so():
    with Merchant(settler=FacilitatorClient("http://127.0.0.1:9"), payee=PERMIT2) as merchant:
        response, _ = official_sdk.pay(Account.create().key.hex(), "GET", f"{merchant.url}/documents/1")
        assert response.status_code == 502
        assert httpx.post(f"{merchant.url}/llm", trust_env=False).status_code == 502


def test_the_description_is_json_with_everything_a_client_needs(net):
    described = json.loads(json.dumps(net.describe()))
    assert list(described) == ["rpc", "chain_id", "token", "permit2", "facilitator", "merchant", "payer_key"]
    assert described["merchant"]["routes"]["documents"] == "/documents/{n}"
    assert Account.from_key(described["payer_key"]).address == net.payer


def test_importing_the_package_loads_nothing_heavy():
    code = """
import sys, x402guard
before = set(sys.modules)
import x402guard.testing as testing
heavy = {"eth", "eth_tester", "web3", "starlette", "uvicorn", "httpx", "eth_account"} & (set(sys.modules) - before)
assert not heavy, heavy
assert set(dir(testing)) == set(testing.__all__) and "Testnet" in dir(testing)
sys.modules["eth_tester"] = sys.modules["eth_tester.backends"] = None
try:
    testing.Testnet
except ImportError as error:
    assert 'pip install "x402guard[testnet]"' in str(error), error
else:
    raise AssertionError("no error without the extra")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""Our merchant and facilitator, bought from by the official client."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from eth_account import Account

from tests.support import official_sdk
from tests.support.testnet import BODY, again, assert_settled, balances, decoded, receipt_of
from x402guard.testing import (
    Facilitator,
    FacilitatorClient,
    Merchant,
    Offer,
    Route,
)
from x402guard.testing.contracts import PERMIT2, TOKEN

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("testnet_sales")]


@pytest.mark.parametrize(
    ("method", "path", "amount"),
    [
        ("GET", "/documents/7", 100_000),
        ("GET", "/cents/7", 10_000),
        ("GET", "/permit2/7", 100_000),
        ("GET", "/v1/documents/7", 100_000),
        ("POST", "/summaries", 100_000),
        ("POST", "/llm", 12_345),
        ("GET", "/multi", 30_000),
    ],
)
def test_the_official_client_pays_our_merchant(net, chain, method, path, amount):
    before = balances(net)
    body = {"content": BODY} if method == "POST" else {}
    response, requests = official_sdk.pay(net.payer_key, method, net.merchant.url + path, **body)
    assert response.status_code == 200, response.headers
    assert len(requests) == 2
    receipt = assert_settled(net, chain, response, amount=amount, before=before)
    assert ("amount" in receipt) == (path == "/llm")
    assert receipt.get("amount", str(amount)) == str(amount)
    assert receipt["network"] == ("base-sepolia" if path.startswith("/v1") else net.network)
    if path == "/summaries":
        assert response.json()["received"] == BODY.decode()


def test_a_402_has_its_terms_in_the_header_in_version_2_and_in_the_body_in_version_1(net):
    second = httpx.get(f"{net.merchant.url}/documents/1", trust_env=False)
    assert (second.status_code, second.json()) == (402, {})
    terms = decoded(second.headers["PAYMENT-REQUIRED"])
    assert terms["x402Version"] == 2
    assert terms["resource"]["url"] == f"{net.merchant.url}/documents/1"
    assert terms["accepts"] == [
        {
            "scheme": "exact",
            "network": "eip155:84532",
            "amount": "100000",
            "asset": TOKEN,
            "payTo": net.payee,
            "maxTimeoutSeconds": 300,
            "extra": {"name": "USDC", "version": "2"},
        }
    ]
    first = httpx.get(f"{net.merchant.url}/v1/documents/1", trust_env=False)
    assert "PAYMENT-REQUIRED" not in first.headers
    assert first.json()["x402Version"] == 1
    assert first.json()["accepts"][0]["maxAmountRequired"] == "100000"


def test_what_is_free_costs_nothing(net):
    before = balances(net)
    response, requests = official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/free")
    assert response.status_code == 200
    assert len(requests) == 1
    assert balances(net) == before


def test_upto_charged_nothing_sends_no_transaction(net):
    before, transfers = balances(net), net.transfers()
    response, _ = official_sdk.pay(net.payer_key, "POST", f"{net.merchant.url}/idle")
    assert response.status_code == 200
    receipt = receipt_of(response)
    assert receipt == {
        "success": True,
        "payer": net.payer,
        "transaction": "",
        "network": net.network,
        "amount": "0",
    }
    assert (balances(net), net.transfers()) == (before, transfers)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/documents/1", "invalid_exact_evm_nonce_already_used"),
        ("/permit2/1", "permit2_invalid_nonce"),
        ("/v1/documents/1", "invalid_exact_evm_nonce_already_used"),
    ],
)
def test_a_payment_is_taken_once(net, path, reason):
    paid, requests = official_sdk.pay(net.payer_key, "GET", net.merchant.url + path)
    assert paid.status_code == 200
    before = balances(net)
    replayed = again(requests[-1])
    assert replayed.status_code == 402
    terms = replayed.json() if path.startswith("/v1") else decoded(replayed.headers["PAYMENT-REQUIRED"])
    assert terms["error"] == reason
    assert balances(net) == before


def test_a_settlement_that_fails_is_a_402_with_a_receipt_and_without_terms(net):
    """As when two copies of one payment come at once: both pass verification, and the chain takes one."""
    _, requests = official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
    payment = decoded(requests[-1].headers["PAYMENT-SIGNATURE"])

    class Forgetful(FacilitatorClient):
        async def verify(self, payment, requirements):
            return {"isValid": True}

    assert httpx.post(
        f"{net.facilitator}/settle",
        json={"x402Version": 2, "paymentPayload": payment, "paymentRequirements": payment["accepted"]},
        trust_env=False,
    ).json()["success"]
    routes = [Route(name="broken", path="/broken", answer=lambda _request: {}, offers=(Offer(price=10_000),))]
    with Merchant(settler=Forgetful(net.facilitator), payee=net.payee, routes=routes) as merchant:
        response = httpx.get(f"{merchant.url}/broken", headers=dict(requests[-1].headers), trust_env=False)
    assert response.status_code == 402
    assert "PAYMENT-REQUIRED" not in response.headers
    assert response.json() == {}
    receipt = receipt_of(response)
    assert receipt["success"] is False
    assert receipt["errorReason"] == "invalid_exact_evm_nonce_already_used"


def test_a_handler_that_fails_settles_nothing(net):
    before = balances(net)
    response, _ = official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
    assert response.status_code == 503
    assert "PAYMENT-RESPONSE" not in response.headers
    assert balances(net) == before


def test_a_missing_permit2_allowance_is_a_412_with_terms(net):
    poor = Account.create()
    net.fund(poor.address, tokens=1_000_000)
    _, requests = official_sdk.pay(poor.key.hex(), "GET", f"{net.merchant.url}/permit2/1")
    response = again(requests[-1])
    assert response.status_code == 412
    assert decoded(response.headers["PAYMENT-REQUIRED"])["error"] == "permit2_allowance_required"


def test_a_payer_without_funds_is_refused(net):
    response, requests = official_sdk.pay(Account.create().key.hex(), "GET", f"{net.merchant.url}/dear")
    assert len(requests) == 2
    assert response.status_code == 402
    assert decoded(response.headers["PAYMENT-REQUIRED"])["error"] == "insufficient_funds"


CHANGES = {
    "another payee": (("payload", "authorization", "to"), PERMIT2),
    "a smaller amount": (("payload", "authorization", "value"), "99999"),
    "a later end": (("payload", "authorization", "validBefore"), "99999999999"),
    "another nonce": (("payload", "authorization", "nonce"), "0x" + "ab" * 32),
    "another payer": (("payload", "authorization", "from"), PERMIT2),
    "half a signature": (("payload", "signature"), "0x1234"),
    "no signature": (("payload", "signature"), None),
    "a number that is none": (("payload", "authorization", "value"), "much"),
    "another network": (("accepted", "network"), "eip155:8453"),
    "another scheme": (("accepted", "scheme"), "upto"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_payment_that_was_changed_after_signing_is_refused(net, change):
    """The facilitator is asked itself, so that the merchant's own comparison cannot hide a gap."""
    _, requests = official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
    payment = decoded(requests[-1].headers["PAYMENT-SIGNATURE"])
    requirements = dict(payment["accepted"])
    question = {"x402Version": 2, "paymentPayload": payment, "paymentRequirements": requirements}
    path, value = CHANGES[change]
    assert httpx.post(f"{net.facilitator}/verify", json=question, trust_env=False).json()["isValid"] is True
    place = payment
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    before = balances(net)
    verdict = httpx.post(f"{net.facilitator}/verify", json=question, trust_env=False).json()
    assert verdict["isValid"] is False
    assert verdict["invalidReason"]
    receipt = httpx.post(f"{net.facilitator}/settle", json=question, trust_env=False).json()
    assert (receipt["success"], receipt["transaction"]) == (False, "")
    assert receipt["errorReason"] == verdict["invalidReason"]
    assert balances(net) == before


OTHER_TERMS = {
    "payTo": (PERMIT2, "invalid_exact_evm_payload_recipient_mismatch"),
    "amount": ("10001", "invalid_exact_evm_payload_authorization_value_mismatch"),
    "asset": (PERMIT2, "invalid_exact_evm_payload_signature"),
    "network": ("eip155:8453", "invalid_network"),
    "scheme": ("upto", "unsupported_scheme"),
    "extra": ({"name": "Dollar", "version": "2"}, "invalid_exact_evm_payload_signature"),
}


@pytest.mark.parametrize("field", OTHER_TERMS)
def test_a_payment_meets_only_the_terms_it_was_made_for(net, field):
    """A merchant could show the facilitator other terms than the buyer saw."""
    _, requests = official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
    payment = decoded(requests[-1].headers["PAYMENT-SIGNATURE"])
    value, reason = OTHER_TERMS[field]
    question = {"paymentPayload": payment, "paymentRequirements": payment["accepted"] | {field: value}}
    verdict = httpx.post(f"{net.facilitator}/verify", json=question, trust_env=False).json()
    assert verdict.get("invalidReason") == reason
    receipt = httpx.post(f"{net.facilitator}/settle", json=question, trust_env=False).json()
    assert (receipt["success"], receipt.get("errorReason"), receipt["transaction"]) == (False, reason, "")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"paymentPayload": 1}', b"\xff"])
def test_the_facilitator_answers_400_to_what_is_no_question(net, content):
    for path in ("verify", "settle"):
        assert httpx.post(f"{net.facilitator}/{path}", content=content, trust_env=False).status_code == 400


@pytest.mark.parametrize("header", ["", "e30=", "bm9uc2Vuc2U=", "!", base64.b64encode(b'{"x402Version": 2}').decode()])
def test_a_payment_header_that_makes_no_sense_gets_the_terms_again(net, header):
    response = httpx.get(f"{net.merchant.url}/cents/1", headers={"PAYMENT-SIGNATURE": header}, trust_env=False)
    assert response.status_code == 402
    assert decoded(response.headers["PAYMENT-REQUIRED"])["accepts"][0]["amount"] == "10000"


@pytest.mark.parametrize(
    "change", [{"amount": "1"}, {"payTo": PERMIT2}, {"network": "eip155:8453"}, {"scheme": "upto"}]
)
def test_a_payment_for_terms_that_were_never_offered_is_refused(net, change):
    _, requests = official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
    payment = decoded(requests[-1].headers["PAYMENT-SIGNATURE"])
    payment["accepted"] |= change
    header = base64.b64encode(json.dumps(payment).encode()).decode()
    response = again(requests[-1], **{"payment-signature": header})
    assert response.status_code == 402
    assert decoded(response.headers["PAYMENT-REQUIRED"])["error"] == "the payment fits none of the terms"


def test_upto_cannot_be_settled_above_its_ceiling_or_by_another_facilitator(net, chain):
    _, requests = official_sdk.pay(net.payer_key, "POST", f"{net.merchant.url}/idle")
    payment = decoded(requests[-1].headers["PAYMENT-SIGNATURE"])
    before = balances(net)

    def settled(url, amount):
        terms = payment["accepted"] | {"amount": amount}
        question = {"x402Version": 2, "paymentPayload": payment, "paymentRequirements": terms}
        return httpx.post(f"{url}/settle", json=question, trust_env=False).json()

    assert settled(net.facilitator, "50001")["errorReason"] == "invalid_upto_evm_payload_settlement_exceeds_amount"
    stranger = Account.create()
    net.fund(stranger.address, wei=10**18)
    with Facilitator(rpc_url=net.rpc, chain_id=net.chain_id, key=stranger.key.hex()) as other:
        assert settled(other.url, "50000")["errorReason"] == "upto_facilitator_mismatch"
    assert balances(net) == before
    receipt = settled(net.facilitator, "50000")
    assert (receipt["success"], receipt["amount"]) == (True, "50000")
    assert balances(net) == (before[0] - 50_000, before[1] + 50_000)


def test_eight_threads_pay_at_once(net, chain):
    before, transfers = balances(net), len(net.transfers())

    def pay(number):
        path = ("/cents/{n}", "/permit2/{n}")[number % 2].format(n=number)
        return official_sdk.pay(net.payer_key, "GET", net.merchant.url + path)[0]

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(pay, range(24)))
    assert [response.status_code for response in responses] == [200] * 24
    hashes = {receipt_of(response)["transaction"] for response in responses}
    assert len(hashes) == 24
    assert {chain.rpc("eth_getTransactionReceipt", each)["status"] for each in hashes} == {"0x1"}
    spent = 12 * 10_000 + 12 * 100_000
    assert balances(net) == (before[0] - spent, before[1] + spent)
    assert {transfer.transaction for transfer in net.transfers()[transfers:]} == hashes


def test_supported_is_what_the_official_schema_says(net):
    from x402.schemas import SupportedResponse

    answer = httpx.get(f"{net.facilitator}/supported", trust_env=False).json()
    supported = SupportedResponse.model_validate(answer)
    assert {(kind.x402_version, kind.scheme, kind.network) for kind in supported.kinds} == {
        (2, "exact", "eip155:84532"),
        (2, "upto", "eip155:84532"),
        (1, "exact", "base-sepolia"),
    }
    upto = next(kind for kind in supported.kinds if kind.scheme == "upto")
    assert upto.extra == {"facilitatorAddress": net.facilitator_address}

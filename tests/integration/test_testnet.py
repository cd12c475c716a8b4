"""The test network, proven by the official SDK: its client, its server and its facilitator."""

import base64
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from eth_account import Account
from web3 import HTTPProvider, Web3
from web3.exceptions import ContractLogicError

from tests.integration import official
from x402guard import testing
from x402guard.testing import (
    EthTesterEngine,
    Facilitator,
    FacilitatorClient,
    Merchant,
    Offer,
    Route,
    RpcError,
    Server,
    SignatureSettler,
    Testnet,
    default_routes,
)
from x402guard.testing.chain_client import ChainClient, calldata
from x402guard.testing.contracts import PERMIT2, TOKEN, abi_at

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("test_testnet")]

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


@pytest.fixture(scope="module")
def net():
    with Testnet(routes=default_routes() + EXTRA_ROUTES) as running:
        yield running


@pytest.fixture(scope="module")
def chain(net):
    client = ChainClient(net.rpc, net.chain_id)
    yield client
    client.close()


@pytest.fixture(scope="module")
def w3(net):
    provider = HTTPProvider(net.rpc)
    yield Web3(provider)
    for session in provider._request_session_manager.session_cache._data.values():
        session.close()


@pytest.fixture(scope="module")
def official_facilitator(net):
    key = Account.create()
    net.fund(key.address, wei=10**19)
    with Server(official.facilitator_app(rpc_url=net.rpc, key=key.key.hex(), network=net.network)) as server:
        yield server.url


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


# ---- the merchant and the facilitator ----


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
    response, requests = official.pay(net.payer_key, method, net.merchant.url + path, **body)
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
    response, requests = official.pay(net.payer_key, "GET", f"{net.merchant.url}/free")
    assert response.status_code == 200
    assert len(requests) == 1
    assert balances(net) == before


def test_upto_charged_nothing_sends_no_transaction(net):
    before, transfers = balances(net), net.transfers()
    response, _ = official.pay(net.payer_key, "POST", f"{net.merchant.url}/idle")
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
    paid, requests = official.pay(net.payer_key, "GET", net.merchant.url + path)
    assert paid.status_code == 200
    before = balances(net)
    replayed = again(requests[-1])
    assert replayed.status_code == 402
    terms = replayed.json() if path.startswith("/v1") else decoded(replayed.headers["PAYMENT-REQUIRED"])
    assert terms["error"] == reason
    assert balances(net) == before


def test_a_settlement_that_fails_is_a_402_with_a_receipt_and_without_terms(net):
    """As when two copies of one payment come at once: both pass verification, and the chain takes one."""
    _, requests = official.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
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
    response, _ = official.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
    assert response.status_code == 503
    assert "PAYMENT-RESPONSE" not in response.headers
    assert balances(net) == before


def test_a_missing_permit2_allowance_is_a_412_with_terms(net):
    poor = Account.create()
    net.fund(poor.address, tokens=1_000_000)
    _, requests = official.pay(poor.key.hex(), "GET", f"{net.merchant.url}/permit2/1")
    response = again(requests[-1])
    assert response.status_code == 412
    assert decoded(response.headers["PAYMENT-REQUIRED"])["error"] == "permit2_allowance_required"


def test_a_payer_without_funds_is_refused(net):
    response, requests = official.pay(Account.create().key.hex(), "GET", f"{net.merchant.url}/dear")
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
    _, requests = official.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
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
    _, requests = official.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
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
    _, requests = official.pay(net.payer_key, "GET", f"{net.merchant.url}/broken")
    payment = decoded(requests[-1].headers["PAYMENT-SIGNATURE"])
    payment["accepted"] |= change
    header = base64.b64encode(json.dumps(payment).encode()).decode()
    response = again(requests[-1], **{"payment-signature": header})
    assert response.status_code == 402
    assert decoded(response.headers["PAYMENT-REQUIRED"])["error"] == "the payment fits none of the terms"


def test_upto_cannot_be_settled_above_its_ceiling_or_by_another_facilitator(net, chain):
    _, requests = official.pay(net.payer_key, "POST", f"{net.merchant.url}/idle")
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
        return official.pay(net.payer_key, "GET", net.merchant.url + path)[0]

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


# ---- the official server and facilitator ----


@pytest.mark.parametrize("whose", ["our facilitator", "the official facilitator"])
def test_the_official_client_pays_the_official_server(net, chain, official_facilitator, whose):
    facilitator_url = net.facilitator if whose == "our facilitator" else official_facilitator
    app = official.merchant_app(facilitator_url=facilitator_url, network=net.network, payee=net.payee, token=net.token)
    with Server(app) as server:
        for method, path, amount in [
            ("GET", "/documents/1", 100_000),
            ("GET", "/permit2/1", 100_000),
            ("POST", "/llm", official.UPTO_CHARGE),
        ]:
            before = balances(net)
            body = {"content": BODY} if method == "POST" else {}
            response, requests = official.pay(net.payer_key, method, server.url + path, **body)
            assert response.status_code == 200, (path, response.headers)
            assert_settled(net, chain, response, amount=amount, before=before)
            assert again(requests[-1]).status_code == 402, path
            assert net.balance(net.payer) == before[0] - amount
        before = balances(net)
        response, _ = official.pay(net.payer_key, "POST", f"{server.url}/idle")
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
            response, _ = official.pay(net.payer_key, method, merchant.url + path)
            assert response.status_code == 200, (path, response.headers)
            assert_settled(net, chain, response, amount=amount, before=before)


# ---- the merchant without a chain ----


def test_signatures_alone_are_enough_to_sell_without_a_chain():
    settler, payee, buyer = SignatureSettler(), Account.create().address, Account.create()
    routes = default_routes() + EXTRA_ROUTES
    with Merchant(settler=settler, payee=payee, routes=routes) as merchant:
        paid, requests = official.pay(buyer.key.hex(), "GET", f"{merchant.url}/documents/9")
        assert paid.status_code == 200
        replayed = again(requests[-1])
        assert replayed.status_code == 402
        assert official.pay(buyer.key.hex(), "POST", f"{merchant.url}/llm")[0].status_code == 200
        assert official.pay(buyer.key.hex(), "GET", f"{merchant.url}/v1/documents/9")[0].status_code == 200
        assert official.pay(buyer.key.hex(), "POST", f"{merchant.url}/idle")[0].status_code == 200
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
        response, _ = official.pay(Account.create().key.hex(), "GET", f"{merchant.url}/documents/1")
        assert response.status_code == 502
        assert httpx.post(f"{merchant.url}/llm", trust_env=False).status_code == 502


# ---- the chain ----


def test_contracts_and_clients_see_the_same_chain(net, w3):
    assert w3.eth.chain_id == net.chain_id == 84532
    assert w3.net.version == "84532"
    token = w3.eth.contract(address=TOKEN, abi=abi_at(TOKEN))
    separator = token.functions.DOMAIN_SEPARATOR().call()
    domain = Web3.solidity_keccak(
        ["bytes32", "bytes32", "bytes32", "bytes32", "bytes32"],
        [
            Web3.keccak(text="EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"),
            Web3.keccak(text="USDC"),
            Web3.keccak(text="2"),
            (84532).to_bytes(32, "big"),
            bytes(12) + bytes.fromhex(TOKEN[2:]),
        ],
    )
    assert separator == domain


def test_two_chains_in_one_process_keep_their_own_ids():
    one, other = EthTesterEngine(chain_id=84532), EthTesterEngine(chain_id=31337)
    try:
        call = [{"to": TOKEN, "data": calldata("DOMAIN_SEPARATOR()")}]
        assert one.rpc("eth_call", call) != other.rpc("eth_call", call)
        assert (one.rpc("eth_chainId", []), other.rpc("eth_chainId", [])) == (hex(84532), hex(31337))
    finally:
        one.close()
        other.close()


def signed(account, *, nonce, chain_id=84532, data="0x", to=TOKEN):
    transaction = {
        "to": to,
        "value": 0,
        "data": data,
        "gas": 200_000,
        "nonce": nonce,
        "maxFeePerGas": 10**10,
        "maxPriorityFeePerGas": 10**9,
        "chainId": chain_id,
    }
    return "0x" + account.sign_transaction(transaction).raw_transaction.hex()


def test_a_transaction_for_another_chain_is_refused(net, chain):
    for raw, complaint in [
        (signed(Account.from_key(net.payer_key), nonce=0, chain_id=1), "chain id"),
        (signed(Account.from_key(net.payer_key), nonce=0), "nonce too low"),
        ("0x02c0", "not a transaction"),
        ("0x", "not a transaction"),
    ]:
        with pytest.raises(RpcError, match=complaint):
            chain.rpc("eth_sendRawTransaction", raw)


def test_a_transaction_that_comes_too_early_waits_for_its_turn(net, chain):
    sender = Account.create()
    net.fund(sender.address, wei=10**18)
    approvals = [calldata("approve(address,uint256)", PERMIT2, amount) for amount in (1, 2, 3)]
    third, second, first = (
        chain.rpc("eth_sendRawTransaction", signed(sender, nonce=nonce, data=approvals[nonce])) for nonce in (2, 1, 0)
    )
    assert [chain.rpc("eth_getTransactionReceipt", each)["status"] for each in (first, second, third)] == ["0x1"] * 3
    blocks = [int(chain.rpc("eth_getTransactionByHash", each)["blockNumber"], 16) for each in (first, second, third)]
    assert blocks == sorted(blocks)
    assert chain.read_uint(TOKEN, "allowance(address,address)", sender.address, PERMIT2) == 3
    early = chain.rpc("eth_sendRawTransaction", signed(sender, nonce=9))
    assert chain.rpc("eth_getTransactionReceipt", early) is None
    assert chain.rpc("eth_getTransactionByHash", early)["blockHash"] is None


def test_state_can_be_read_at_a_block_by_its_hash(net, chain, w3):
    old = w3.eth.get_block("latest")
    fresh = Account.create().address
    net.fund(fresh, tokens=77)
    call = {"to": TOKEN, "data": calldata("balanceOf(address)", fresh)}

    def at(block):
        return int(w3.eth.call(call, block).hex(), 16)

    assert at({"blockHash": old["hash"].to_0x_hex(), "requireCanonical": True}) == 0
    assert at(old["number"]) == 0
    assert [at(tag) for tag in ("latest", "pending", "safe", "finalized")] == [77] * 4
    assert at({"blockHash": w3.eth.get_block("finalized")["hash"].to_0x_hex()}) == 77
    with pytest.raises(RpcError) as unknown:
        chain.rpc("eth_call", call, {"blockHash": "0x" + "00" * 32, "requireCanonical": True})
    assert unknown.value.code == -32001


def test_logs_can_be_asked_for_by_block_hash_range_and_topic(net, chain):
    fresh = Account.create().address
    net.fund(fresh, tokens=5)
    latest = chain.rpc("eth_getBlockByNumber", "latest", True)
    while not latest["transactions"]:
        latest = chain.rpc("eth_getBlockByHash", latest["parentHash"], True)
    (log,) = chain.rpc("eth_getLogs", {"blockHash": latest["hash"], "address": TOKEN.upper().replace("0X", "0x")})
    topic = "0x" + fresh[2:].lower().rjust(64, "0")
    assert log["topics"][2] == topic
    everywhere = {"fromBlock": "earliest", "toBlock": "latest"}
    assert chain.rpc("eth_getLogs", everywhere | {"topics": [None, None, [topic]]}) == [log]
    assert chain.rpc("eth_getLogs", everywhere | {"address": [PERMIT2]}) == []
    assert chain.rpc("eth_getLogs", {"fromBlock": latest["number"], "topics": [None, topic]}) == []


def test_a_reverted_call_is_error_3_with_its_data(chain, w3):
    data = calldata("transfer(address,uint256)", PERMIT2, 1)
    for method in ("eth_call", "eth_estimateGas"):
        with pytest.raises(RpcError, match="transfer amount exceeds balance") as reverted:
            chain.rpc(method, {"to": TOKEN, "data": data})
        assert reverted.value.code == 3
        assert reverted.value.data.startswith("0x08c379a0")
    token = w3.eth.contract(address=TOKEN, abi=abi_at(TOKEN))
    with pytest.raises(ContractLogicError, match="exceeds balance"):
        token.functions.transfer(PERMIT2, 1).call()


def test_a_revert_without_words_is_error_3_too(chain):
    with pytest.raises(RpcError) as reverted:
        chain.rpc("eth_call", {"to": None, "data": "0x60006000fd"}, "latest")
    assert (reverted.value.code, reverted.value.data) == (3, "0x")


def test_a_contract_can_be_deployed(net, chain):
    folder = Path(testing.__file__).parent / "artifacts"
    compiled = json.loads((folder / "DollarToken.json").read_text(encoding="utf-8"))
    sender = Account.create()
    net.fund(sender.address, wei=10**19)
    transaction = {
        "data": compiled["bytecode"],
        "gas": 3_000_000,
        "gasPrice": 10**10,
        "nonce": 0,
        "value": 0,
        "chainId": net.chain_id,
    }
    raw = "0x" + sender.sign_transaction(transaction).raw_transaction.hex()
    receipt = chain.receipt(chain.rpc("eth_sendRawTransaction", raw))
    assert receipt["status"] == "0x1"
    assert chain.rpc("eth_getCode", receipt["contractAddress"], "latest") == compiled["deployedBytecode"]
    assert chain.read_uint(receipt["contractAddress"], "decimals()") == 6
    assert chain.rpc("eth_getTransactionByHash", receipt["transactionHash"])["to"] is None


def test_gas_estimates_are_enough_and_a_reverted_transaction_has_status_0(net, chain):
    sender = Account.from_key(net.payer_key)
    data = calldata("approve(address,uint256)", PERMIT2, 2**256 - 1)
    estimate = int(chain.rpc("eth_estimateGas", {"from": net.payer, "to": TOKEN, "data": data}), 16)
    assert chain.receipt(chain.send(sender, TOKEN, data, gas=estimate))["status"] == "0x1"
    greedy = calldata("transfer(address,uint256)", PERMIT2, 10**30)
    receipt = chain.receipt(chain.send(sender, TOKEN, greedy, gas=200_000))
    assert (receipt["status"], receipt["logs"]) == ("0x0", [])


def test_web3_understands_blocks_transactions_and_receipts(net, w3):
    official.pay(net.payer_key, "GET", f"{net.merchant.url}/cents/3")
    name = net.transfers()[-1].transaction
    receipt, transaction = w3.eth.get_transaction_receipt(name), w3.eth.get_transaction(name)
    block = w3.eth.get_block(receipt["blockNumber"], full_transactions=True)
    assert receipt["blockHash"] == block["hash"] == transaction["blockHash"]
    assert block["transactions"][0]["hash"] == receipt["transactionHash"]
    assert transaction["from"] == net.facilitator_address
    assert w3.eth.get_block("latest")["baseFeePerGas"] > 0
    assert w3.eth.get_transaction_count(net.payer, "pending") == w3.eth.get_transaction_count(net.payer)
    assert w3.eth.get_balance(net.payer) > 0
    assert len(w3.eth.get_code(TOKEN)) > 1000


def test_rpc_answers_batches_and_survives_nonsense(net):
    def post(content):
        return httpx.post(net.rpc, content=content, trust_env=False)

    batch = [
        {"jsonrpc": "2.0", "id": 1, "method": "eth_chainId", "params": []},
        {"jsonrpc": "2.0", "id": "two", "method": "eth_nothing", "params": []},
        {"jsonrpc": "2.0", "method": "eth_chainId", "params": []},
        7,
    ]
    replies = post(json.dumps(batch)).json()
    assert [(each["id"], each.get("result"), each.get("error", {}).get("code")) for each in replies] == [
        (1, "0x14a34", None),
        ("two", None, -32601),
        (None, None, -32600),
    ]
    codes = {
        b"{": -32700,
        b"\xff\xfe": -32700,
        b"[]": -32600,
        b'"eth_chainId"': -32600,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": {}}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": []}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [{"to": "0x12"}, "latest"]}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_getBalance", "params": ["nobody", "latest"]}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [7, "latest"]}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_getLogs", "params": ["all"]}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [{"to": null, "data": "0xfe"}]}': -32000,
    }
    assert {content: post(content).json()["error"]["code"] for content in codes} == codes
    assert post(b'{"jsonrpc": "2.0", "method": "eth_chainId"}').status_code == 204
    assert post(b'{"jsonrpc": "2.0", "id": 1, "method": "eth_accounts"}').json()["result"] == []


def test_answers_do_not_wait_for_a_delayed_acknowledgement(net):
    """With Nagle's algorithm on, every call after the first on a connection would take 40 ms."""
    with httpx.Client(trust_env=False) as client:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            client.get(f"{net.merchant.url}/free")
            times.append(time.perf_counter() - start)
    assert min(times[1:]) < 0.03


# ---- time ----


def test_idle_blocks_keep_coming_and_the_clock_is_real():
    engine = EthTesterEngine(tick_s=0.02)
    try:
        start = int(engine.rpc("eth_blockNumber", []), 16)
        deadline = time.monotonic() + 5
        while int(engine.rpc("eth_blockNumber", []), 16) < start + 40:
            assert time.monotonic() < deadline, "no idle blocks"
            time.sleep(0.02)
        latest = engine.rpc("eth_getBlockByNumber", ["latest", False])
        assert abs(int(latest["timestamp"], 16) - time.time()) < 2, "forty blocks must not take forty seconds"
        with pytest.raises(ValueError, match="back"):
            engine.advance(-1)
        with pytest.raises(RpcError, match="back"):
            engine.rpc("evm_increaseTime", [-1])
        engine.rpc("evm_increaseTime", [100])
        engine.rpc("evm_mine", [])
        moved = engine.rpc("eth_getBlockByNumber", ["latest", False])
        assert 100 <= int(moved["timestamp"], 16) - int(latest["timestamp"], 16) < 105
    finally:
        engine.close()
    stopped = engine.rpc("eth_blockNumber", [])
    time.sleep(0.1)
    assert engine.rpc("eth_blockNumber", []) == stopped


def test_time_can_be_moved_on_until_a_payment_has_lapsed():
    routes = [
        *EXTRA_ROUTES,
        Route(name="held", path="/held", answer=broken, offers=(Offer(price=1),), max_timeout_s=60),
    ]
    with Testnet(routes=routes) as net:
        chain = ChainClient(net.rpc, net.chain_id)
        _, requests = official.pay(net.payer_key, "GET", f"{net.merchant.url}/held")
        before = int(chain.rpc("eth_getBlockByNumber", "latest", False)["timestamp"], 16)
        net.advance(61)
        after = int(chain.rpc("eth_getBlockByNumber", "latest", False)["timestamp"], 16)
        chain.close()
        assert 61 <= after - before <= 65
        late = again(requests[-1])
        assert late.status_code == 402
        error = decoded(late.headers["PAYMENT-REQUIRED"])["error"]
        assert error == "invalid_exact_evm_payload_authorization_valid_before"


# ---- the package ----


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

"""Answers of honest sellers, as bytes that others have written: what both official SDKs pay is paid, but for what stands below.

``tests/data/honest_402.json`` has a line for each answer to ``GET https://api.seller.example/v1/data``: $0.01 in USDC of Base
mainnet. Adding an answer is adding a line.
"""

import base64
import json
from decimal import Decimal
from pathlib import Path

import anyio
import httpx
import pytest
from eth_account import Account
from eth_account.messages import encode_typed_data
from x402 import x402Client
from x402.http.clients.httpx import x402AsyncTransport
from x402.mechanisms.evm import EthAccountSigner
from x402.mechanisms.evm.exact import register_exact_evm_client

from tests.support.merchant import KEY, TRANSFER, client, make_guard
from tests.support.proxy import needs_node, node
from x402guard import Policy, PolicyDenied, ProtocolError, X402GuardError

USDC_BASE = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
URL = "https://api.seller.example/v1/data"
CASES = {case["id"]: case for case in json.loads((Path(__file__).parents[1] / "data" / "honest_402.json").read_text())}
BOTH = [name for name, case in CASES.items() if case["python"] and case["typescript"]]

CONFLICT = (PolicyDenied, "header_body_conflict")
EXCEPTIONS = {
    "A27": (ProtocolError, "accepts[0].payTo"),  # a false checksum: one letter of the payee is another one
    "B41": (ProtocolError, "accepts[0].payTo"),
    "A31": (PolicyDenied, "lifetime"),  # five seconds: the signature would be over before it is taken
    "C15": CONFLICT,  # the body names another price, network or payee than the header
    "C17": CONFLICT,
    "C18": CONFLICT,
    "C20": CONFLICT,
}
"""What both SDKs pay and the guard does not, with why. Each stands in docs/explanation/honest-sellers.md."""

NO_NEED = {"A33", "B12", "B19", "B25", "B26", "B53", "C31", "C47"}
"""What neither SDK pays, and the guard does: each offer is judged alone, and what it does not need may be of any type."""


def answer(case):
    headers = [tuple(line) for line in case["headers"] if line[0].lower() != "content-length"]
    return httpx.Response(case["status"], headers=headers, content=base64.b64decode(case["body"]))


def paid(case):
    """Ask once; return whether a payment was sent, of how much, and the error."""
    sent = []

    def shop(request):
        header = request.headers.get("payment-signature") or request.headers.get("x-payment")
        if header is None:
            return answer(case)
        sent.append(json.loads(base64.b64decode(header)))
        return httpx.Response(200, json={})

    policy = Policy(networks={"base"})
    with make_guard(policy=policy, unsafe_no_chain=True) as guard, guard.session("s", budget="$5.00") as session:
        try:
            client(session, shop).get(URL)
            error = None
        except X402GuardError as refused:
            error = refused
        assert len(sent) <= 1
        counted = session.held + session.spent
    assert counted == sum(Decimal(amount_of(payment)) / 10**6 for payment in sent)
    return sent, error


def amount_of(payment):
    return payment["payload"]["authorization"]["value"]


@pytest.mark.parametrize("name", BOTH)
def test_what_both_official_sdks_pay_is_paid(name):
    sent, error = paid(CASES[name])
    if name in EXCEPTIONS:
        kind, said = EXCEPTIONS[name]
        assert (sent, type(error)) == ([], kind)
        assert said in (getattr(error, "field", "") or "", getattr(error, "rule", ""))
        return
    assert error is None or not isinstance(error, (PolicyDenied, ProtocolError)), error
    [payment] = sent
    assert amount_of(payment) == ("100000" if name == "B34" else "10000")  # of two tiers the cheaper one


@pytest.mark.parametrize("name", [name for name in CASES if name not in BOTH])
def test_what_one_sdk_pays_or_none_is_paid_for_its_price_or_refused_with_nothing_held(name):
    sent, error = paid(CASES[name])
    for payment in sent:
        assert amount_of(payment) == "10000"
    if not CASES[name]["python"] and not CASES[name]["typescript"]:
        assert bool(sent) is (name in NO_NEED), error


def test_the_table_of_exceptions_is_short_and_current():
    assert set(EXCEPTIONS) <= set(BOTH)
    assert len(BOTH) - len(EXCEPTIONS) == 50
    page = (Path(__file__).parents[2] / "docs/explanation/honest-sellers.md").read_text()
    assert all(f"`{name}`" in page for name in EXCEPTIONS)
    assert f"{len(BOTH) - len(EXCEPTIONS)} of {len(BOTH)}" in page


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_official_sdk_pays_what_the_corpus_says(name):
    """A new version of it that pays more, or less, is seen here."""
    sent, case = [], CASES[name]

    def shop(request):
        header = request.headers.get("payment-signature") or request.headers.get("x-payment")
        if header is None:
            return answer(case)
        sent.append(moves_usdc(json.loads(base64.b64decode(header))))
        return httpx.Response(200, json={})

    async def go():
        payer = x402Client()
        register_exact_evm_client(payer, EthAccountSigner(Account.from_key(KEY)), networks="eip155:8453")
        transport = x402AsyncTransport(payer, httpx.MockTransport(shop))
        async with httpx.AsyncClient(transport=transport) as http:
            try:
                await http.get(URL)
            except Exception as error:
                return error
        return None

    error = anyio.run(go)
    assert any(sent) is case["python"], error


@pytest.mark.long
@needs_node
def test_the_official_typescript_sdk_pays_what_the_corpus_says():
    given = [{name: case[name] for name in ("id", "status", "headers", "body")} for case in CASES.values()]
    [told] = node("honest.mjs", KEY, URL, told=json.dumps(given))
    # What it signs counts, also where USDC would not take it: it takes the name and version that the seller writes.
    found = {each["id"]: (bool(each["sent"]), each["error"]) for each in told}
    other = {name: found[name] for name, case in CASES.items() if found[name][0] is not case["typescript"]}
    assert other == {}, "a new version of it pays more, or less"


def moves_usdc(payment):
    """True for a signature that USDC of Base takes: by its own name and version, whatever the offer has said."""
    signed = payment["payload"]["authorization"]
    numbers = {name: int(signed[name]) for name in ("value", "validAfter", "validBefore")}
    message = {**signed, **numbers, "nonce": bytes.fromhex(signed["nonce"][2:])}
    domain = {"name": "USD Coin", "version": "2", "chainId": 8453, "verifyingContract": USDC_BASE}
    data = {"types": TRANSFER, "primaryType": "TransferWithAuthorization", "domain": domain, "message": message}
    signer = Account.recover_message(encode_typed_data(full_message=data), signature=payment["payload"]["signature"])
    return signer == Account.from_key(KEY).address

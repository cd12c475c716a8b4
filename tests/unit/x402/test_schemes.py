"""Our schemes against signatures made by an independent implementation."""

import base64
import json
from pathlib import Path

import coincurve
import pytest
from msgspec import to_builtins

from tests.support.merchant import URL, required
from x402guard.assets import Asset, AssetRegistry
from x402guard.evm import parse_address
from x402guard.kernel.evm import normalise_signature
from x402guard.kernel.typed_data import digest, domain_separator, struct_hash
from x402guard.stores.rows import intent_text, read_intent
from x402guard.x402.offer import Offer, normalise
from x402guard.x402.schemes import payment_header, scheme_for
from x402guard.x402.schemes.scheme import Proposal
from x402guard.x402.wire import decode_payment_required, decode_receipt, parse_payment_required

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "signing.json").read_text())["vectors"]
PAYMENTS = [(i, v) for i, v in enumerate(VECTORS) if v["kind"] != "eip2612-permit"]
IDS = [f"{i}-{v['kind']}" for i, v in PAYMENTS]


def registry_for(vector: dict) -> AssetRegistry:
    accept = vector["paymentRequired"]["accepts"][0]
    extra = accept["extra"]
    return AssetRegistry(
        [
            Asset(
                accept["network"],
                accept["asset"],
                "USD",
                extra.get("decimals", 6),
                extra["name"],
                extra["version"],
                unsafe_replace_builtin=True,
            )
        ]
    )


def propose(vector: dict):
    required = parse_payment_required(vector["paymentRequired"], field="vector")
    [offer] = normalise(required, registry_for(vector))
    assert isinstance(offer, Offer), offer
    nonce = vector["nonce"]
    proposal = Proposal(
        offer=offer,
        payer=parse_address(vector["address"]),
        now_unix=vector["now"],
        lifetime_s=offer.max_timeout_s,
        nonce=int(nonce, 16) if nonce.startswith("0x") else int(nonce),
        payment_id="pay_0000000000000000",
    )
    return scheme_for(offer.scheme, offer.method).propose(proposal)


def test_the_file_has_what_we_think_it_has():
    assert len(PAYMENTS) == 40
    assert {v["kind"] for _, v in PAYMENTS} == {"exact-eip3009", "exact-permit2", "upto", "exact-v1"}


@pytest.mark.parametrize(("index", "vector"), PAYMENTS, ids=IDS)
def test_digest_signature_and_payload_equal_the_vector(index, vector):
    intent = propose(vector)
    wanted = vector["typedData"]
    assert f"0x{domain_separator(intent).hex()}" == wanted["domainSeparator"]
    assert f"0x{struct_hash(intent).hex()}" == wanted["structHash"]
    assert f"0x{digest(intent).hex()}" == wanted["digest"]
    assert intent.digest == digest(intent).hex()
    key = coincurve.PrivateKey(bytes.fromhex(vector["privateKey"][2:]))
    signature = normalise_signature(key.sign_recoverable(digest(intent), hasher=None))
    assert f"0x{signature.hex()}" == wanted["signature"]
    name, value = payment_header(intent, signature)
    assert json.loads(base64.b64decode(value)) == vector["paymentPayload"]
    assert name == ("X-PAYMENT" if vector["kind"] == "exact-v1" else "PAYMENT-SIGNATURE")
    assert json.loads(base64.b64decode(vector[name])) == vector["paymentPayload"]


@pytest.mark.parametrize(("index", "vector"), PAYMENTS, ids=IDS)
def test_an_intent_survives_its_row(index, vector):
    intent = propose(vector)
    assert read_intent(intent_text(intent)) == intent


@pytest.mark.parametrize(
    ("index", "vector"), [(i, v) for i, v in PAYMENTS if "PAYMENT-REQUIRED" in v], ids=lambda v: str(v)[:3]
)
def test_headers_decode_to_what_the_vector_says(index, vector):
    required = decode_payment_required(vector["PAYMENT-REQUIRED"])
    _assert_says(required, vector["paymentRequired"])
    receipt = decode_receipt([("Payment-Response", vector["PAYMENT-RESPONSE"])])
    assert receipt is not None
    _assert_says(receipt, vector["settleResponse"])


def _assert_says(message, wanted):
    said = {name: value for name, value in to_builtins(message).items() if value not in (None, "")}
    said["accepts"] = list(said.get("accepts", ()))
    assert said == {"accepts": [], **{name: wanted[name] for name in wanted if name in said}}


def test_a_null_in_the_resource_is_not_echoed():
    """Official servers write none, and a strict facilitator refuses one."""
    terms = required(resource={"url": URL, "description": None, "mimeType": "text/plain"})
    [offer] = normalise(parse_payment_required(terms, field="body"), AssetRegistry())
    assert json.loads(offer.resource_json) == {"url": URL, "mimeType": "text/plain"}

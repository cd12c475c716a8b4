"""What is signed for each scheme, against an independent implementation, and that nothing else is."""

import pytest
from eth_account.messages import encode_typed_data
from hexbytes import HexBytes
from msgspec.structs import replace

from tests.kernel.rows import ONE, UPTO
from x402guard.errors import IllegalTransition
from x402guard.kernel.evm import MAX_UINT256, checksum_address, keccak
from x402guard.kernel.typed_data import (
    EXACT_PROXY,
    PERMIT2,
    UPTO_PROXY,
    cancellation_digest,
    digest,
    domain_separator,
    struct_hash,
)

EXACT = replace(ONE.intent, valid_after=7)
BY_PERMIT = replace(UPTO.intent, valid_after=7, facilitator="0x" + "ab" * 20)
PERMITTED = [("token", "address"), ("amount", "uint256")]
AFTER = ("validAfter", "uint256")


def of_eth_account(intent, domain, types, primary, message):
    """The digest by eth_account, which another team has written."""
    kinds = {name: [{"name": field, "type": kind} for field, kind in fields] for name, fields in types.items()}
    signable = encode_typed_data(
        full_message={
            "domain": {**domain, "chainId": intent.chain_id},
            "types": {
                "EIP712Domain": [{"name": name, "type": DOMAIN[name]} for name in in_order({**domain, "chainId": 0})],
                **kinds,
            },
            "primaryType": primary,
            "message": message,
        }
    )
    assert signable.header == domain_separator(intent)
    return keccak(b"\x19\x01" + signable.header + signable.body)


DOMAIN = {"name": "string", "version": "string", "chainId": "uint256", "verifyingContract": "address"}


def in_order(domain):
    return {name: domain[name] for name in DOMAIN if name in domain}


def of_token(intent):
    return {"name": intent.domain_name, "version": intent.domain_version, "verifyingContract": intent.token}


def by_permit(intent, spender, witness, message):
    types = {
        "PermitWitnessTransferFrom": [
            ("permitted", "TokenPermissions"), ("spender", "address"), ("nonce", "uint256"), ("deadline", "uint256"),
            ("witness", "Witness"),
        ],
        "TokenPermissions": PERMITTED,
        "Witness": [("to", "address"), *witness, AFTER],
    }  # fmt: skip
    whole = {
        "permitted": {"token": intent.token, "amount": intent.amount_atomic},
        "spender": spender,
        "nonce": intent.nonce,
        "deadline": intent.valid_until,
        "witness": {"to": intent.payee, "validAfter": intent.valid_after, **message},
    }
    domain = {"name": "Permit2", "verifyingContract": PERMIT2}
    return of_eth_account(intent, domain, types, "PermitWitnessTransferFrom", whole)


def test_a_transfer_is_signed_as_eip_3009_says():
    types = {
        "TransferWithAuthorization": [
            ("from", "address"), ("to", "address"), ("value", "uint256"), AFTER, ("validBefore", "uint256"),
            ("nonce", "bytes32"),
        ]
    }  # fmt: skip
    message = {
        "from": EXACT.payer, "to": EXACT.payee, "value": EXACT.amount_atomic, "validAfter": 7,
        "validBefore": EXACT.valid_until, "nonce": HexBytes(EXACT.nonce.to_bytes(32, "big")),
    }  # fmt: skip
    assert digest(EXACT) == of_eth_account(EXACT, of_token(EXACT), types, "TransferWithAuthorization", message)


def test_a_cancellation_is_signed_as_eip_3009_says():
    types = {"CancelAuthorization": [("authorizer", "address"), ("nonce", "bytes32")]}
    message = {"authorizer": EXACT.payer, "nonce": HexBytes(EXACT.nonce.to_bytes(32, "big"))}
    assert cancellation_digest(EXACT) == of_eth_account(EXACT, of_token(EXACT), types, "CancelAuthorization", message)


@pytest.mark.parametrize("spender", [None, "0x" + "99" * 20])
def test_the_permits_name_permit2_and_the_proxy_whatever_the_row_says(spender):
    exact = replace(EXACT, method="permit2", spender=spender)
    assert digest(exact) == by_permit(exact, EXACT_PROXY, [], {})
    upto, facilitator = replace(BY_PERMIT, spender=spender), BY_PERMIT.facilitator
    witness = [("facilitator", "address")]
    assert digest(upto) == by_permit(upto, UPTO_PROXY, witness, {"facilitator": facilitator})


@pytest.mark.parametrize(
    ("scheme", "method"), [("exact", "eip2612"), ("upto", "eip3009"), ("batch", "permit2"), ("", "")]
)
def test_another_scheme_or_method_is_not_signed(scheme, method):
    with pytest.raises(IllegalTransition, match=f"no scheme '{scheme}' by '{method}'"):
        digest(replace(EXACT, scheme=scheme, method=method))


def test_an_upto_names_who_may_settle_it():
    with pytest.raises(IllegalTransition, match="facilitator"):
        digest(replace(BY_PERMIT, facilitator=None))


def test_only_an_authorization_of_the_token_is_cancelled():
    with pytest.raises(ValueError, match="a signature cannot cancel a permit2 payment"):
        cancellation_digest(replace(EXACT, method="permit2"))


@pytest.mark.parametrize(
    "fields",
    [
        {"amount_atomic": -1},
        {"amount_atomic": MAX_UINT256 + 1},
        {"amount_atomic": 1.0},
        {"amount_atomic": True},
        {"payee": "0x" + "11" * 19},
        {"payee": "0x" + "11" * 21},
        {"payee": "0x" + "11" * 32},
        {"payee": b"\x11" * 20},
        {"payee": "merchant"},
    ],
)
def test_a_word_that_is_no_number_and_no_address_is_not_hashed(fields):
    with pytest.raises(ValueError):
        struct_hash(replace(EXACT, **fields))


def test_the_largest_number_is_one():
    assert len(struct_hash(replace(EXACT, amount_atomic=MAX_UINT256, valid_after=0))) == 32


@pytest.mark.parametrize("length", [0, 19, 21, 32])
def test_an_address_has_twenty_bytes(length):
    with pytest.raises(ValueError, match=f"an address is 20 bytes, not {length}"):
        checksum_address(b"\x11" * length)

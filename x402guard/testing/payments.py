"""Reads x402 payments from JSON, checks them against the terms, and rebuilds the typed data that was signed.

There are two forms: an EIP-3009 authorization, and a Permit2 transfer that only a proxy contract may use.
"""

from dataclasses import dataclass
from typing import Any

from eth_account import Account
from eth_account.messages import encode_typed_data
from eth_utils.address import to_checksum_address

from x402guard.frozen import replace
from x402guard.testing.contracts import EXACT_PROXY, PERMIT2, UPTO_PROXY
from x402guard.testing.engine import JSON

V1_NETWORKS = {8453: "base", 84532: "base-sepolia"}
"""The names that protocol version 1 has for the known chains."""

_NONCE_BYTES = 32


class Refused(Exception):  # noqa: N818 - it is an answer, not a failure
    """A payment that is refused; `reason` is an error code of the x402 specification or SDKs."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Terms:
    """A merchant's terms, in one form for both protocol versions; `amount` is in atomic units of `asset`."""

    version: int
    scheme: str
    network: str
    amount: int
    asset: str
    pay_to: str
    extra: dict[str, JSON]

    def with_amount(self, amount: int) -> "Terms":
        """The same terms for another amount, in atomic units."""
        return replace(self, amount=amount)


@dataclass(frozen=True)
class Eip3009Payment:
    """A signed `transferWithAuthorization`: `value` is in atomic units; valid between two unix times, both excluded."""

    payer: str
    payee: str
    value: int
    valid_after: int
    valid_before: int
    nonce: bytes
    signature: bytes


@dataclass(frozen=True)
class Permit2Payment:
    """A signed Permit2 transfer of at most `amount` atomic units: from the unix time `valid_after` to `deadline`.

    For `upto`, `facilitator` is the only address that may settle it; for `exact` it is None.
    """

    payer: str
    payee: str
    token: str
    amount: int
    spender: str
    nonce: int
    valid_after: int
    deadline: int
    facilitator: str | None
    signature: bytes


SignedPayment = Eip3009Payment | Permit2Payment


def read_terms(version: int, requirements: JSON) -> Terms:
    """Read payment requirements of protocol version 1 or 2; raise Refused if they are invalid."""
    try:
        return Terms(
            version=version,
            scheme=str(requirements["scheme"]),
            network=str(requirements["network"]),
            amount=int(requirements["maxAmountRequired" if version == 1 else "amount"]),
            asset=to_checksum_address(requirements["asset"]),
            pay_to=to_checksum_address(requirements["payTo"]),
            extra=dict(requirements.get("extra") or {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused("invalid_payment_requirements") from error


def read_payment(message: JSON) -> SignedPayment:
    """Read the signed part of a payment payload of either version; raise Refused if it is invalid."""
    try:
        payload = message["payload"]
        signature = bytes.fromhex(payload["signature"].removeprefix("0x"))
        if "permit2Authorization" in payload:
            return _read_permit2(payload["permit2Authorization"], signature)
        return _read_eip3009(payload["authorization"], signature)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused("invalid_payload") from error


def _read_eip3009(signed: JSON, signature: bytes) -> Eip3009Payment:
    nonce = bytes.fromhex(signed["nonce"].removeprefix("0x"))
    if len(nonce) != _NONCE_BYTES:
        raise ValueError("a nonce has 32 bytes")
    return Eip3009Payment(
        payer=to_checksum_address(signed["from"]),
        payee=to_checksum_address(signed["to"]),
        value=int(signed["value"]),
        valid_after=int(signed["validAfter"]),
        valid_before=int(signed["validBefore"]),
        nonce=nonce,
        signature=signature,
    )


def _read_permit2(signed: JSON, signature: bytes) -> Permit2Payment:
    witness = signed["witness"]
    nonce = str(signed["nonce"])
    return Permit2Payment(
        payer=to_checksum_address(signed["from"]),
        payee=to_checksum_address(witness["to"]),
        token=to_checksum_address(signed["permitted"]["token"]),
        amount=int(signed["permitted"]["amount"]),
        spender=to_checksum_address(signed["spender"]),
        nonce=int(nonce, 16) if nonce.startswith("0x") else int(nonce),
        valid_after=int(witness["validAfter"]),
        deadline=int(signed["deadline"]),
        facilitator=to_checksum_address(witness["facilitator"]) if "facilitator" in witness else None,
        signature=signature,
    )


def check_payment(payment: SignedPayment, terms: Terms, *, now: int, facilitator: str) -> None:
    """Raise Refused unless every signed field fits the terms, at the unix time `now`.

    `facilitator` is the address that settles; an `upto` payment must name it. The signature is not checked here.
    """
    if isinstance(payment, Eip3009Payment):
        _check_eip3009(payment, terms, now)
    else:
        _check_permit2(payment, terms, now, facilitator)


def _check_eip3009(payment: Eip3009Payment, terms: Terms, now: int) -> None:
    if terms.scheme != "exact" or terms.extra.get("assetTransferMethod", "eip3009") != "eip3009":
        raise Refused("unsupported_payload_type")
    if payment.payee != terms.pay_to:
        raise Refused("invalid_exact_evm_payload_recipient_mismatch")
    if payment.value != terms.amount:
        raise Refused("invalid_exact_evm_payload_authorization_value_mismatch")
    if payment.valid_before <= now:
        raise Refused("invalid_exact_evm_payload_authorization_valid_before")
    if payment.valid_after >= now:
        raise Refused("invalid_exact_evm_payload_authorization_valid_after")


def _check_permit2(payment: Permit2Payment, terms: Terms, now: int, facilitator: str) -> None:
    upto = terms.scheme == "upto"
    if terms.version == 1 or (not upto and terms.extra.get("assetTransferMethod") != "permit2"):
        raise Refused("unsupported_payload_type")
    if payment.spender != to_checksum_address(UPTO_PROXY if upto else EXACT_PROXY):
        raise Refused("invalid_permit2_spender")
    if payment.payee != terms.pay_to:
        raise Refused("invalid_permit2_recipient_mismatch")
    if payment.facilitator != (to_checksum_address(facilitator) if upto else None):
        raise Refused("upto_facilitator_mismatch")
    if payment.token != terms.asset:
        raise Refused("permit2_token_mismatch")
    if payment.amount != terms.amount:
        raise Refused("permit2_amount_mismatch")
    if payment.deadline < now:
        raise Refused("permit2_deadline_expired")
    if payment.valid_after > now:
        raise Refused("permit2_not_yet_valid")


def check_signature(payment: SignedPayment, terms: Terms, chain_id: int) -> None:
    """Raise Refused unless the payer signed exactly this payment for the terms' asset on chain `chain_id`."""
    eip3009 = isinstance(payment, Eip3009Payment)
    refusal = Refused("invalid_exact_evm_payload_signature" if eip3009 else "invalid_permit2_signature")
    try:
        message = encode_typed_data(full_message=typed_data(payment, terms, chain_id))
        signer = Account.recover_message(message, signature=payment.signature)
    except Exception as error:  # eth-account and eth-keys raise many errors for an invalid signature
        raise refusal from error
    if signer != payment.payer:
        raise refusal


def typed_data(payment: SignedPayment, terms: Terms, chain_id: int) -> dict[str, Any]:
    """The EIP-712 message that the payer has to sign for this payment."""
    if isinstance(payment, Eip3009Payment):
        return _eip3009_typed_data(payment, terms, chain_id)
    return _permit2_typed_data(payment, chain_id)


def _eip3009_typed_data(payment: Eip3009Payment, terms: Terms, chain_id: int) -> dict[str, Any]:
    return {
        "types": {
            "EIP712Domain": _fields("string name", "string version", "uint256 chainId", "address verifyingContract"),
            "TransferWithAuthorization": _fields(
                "address from",
                "address to",
                "uint256 value",
                "uint256 validAfter",
                "uint256 validBefore",
                "bytes32 nonce",
            ),
        },
        "primaryType": "TransferWithAuthorization",
        "domain": {
            "name": terms.extra.get("name", ""),
            "version": terms.extra.get("version", ""),
            "chainId": chain_id,
            "verifyingContract": terms.asset,
        },
        "message": {
            "from": payment.payer,
            "to": payment.payee,
            "value": payment.value,
            "validAfter": payment.valid_after,
            "validBefore": payment.valid_before,
            "nonce": payment.nonce,
        },
    }


def _permit2_typed_data(payment: Permit2Payment, chain_id: int) -> dict[str, Any]:
    witness: dict[str, JSON] = {"to": payment.payee, "validAfter": payment.valid_after}
    witness_fields = ["address to", "uint256 validAfter"]
    if payment.facilitator is not None:
        witness["facilitator"] = payment.facilitator
        witness_fields.insert(1, "address facilitator")
    return {
        "types": {
            "EIP712Domain": _fields("string name", "uint256 chainId", "address verifyingContract"),
            "PermitWitnessTransferFrom": _fields(
                "TokenPermissions permitted",
                "address spender",
                "uint256 nonce",
                "uint256 deadline",
                "Witness witness",
            ),
            "TokenPermissions": _fields("address token", "uint256 amount"),
            "Witness": _fields(*witness_fields),
        },
        "primaryType": "PermitWitnessTransferFrom",
        "domain": {"name": "Permit2", "chainId": chain_id, "verifyingContract": PERMIT2},
        "message": {
            "permitted": {"token": payment.token, "amount": payment.amount},
            "spender": payment.spender,
            "nonce": payment.nonce,
            "deadline": payment.deadline,
            "witness": witness,
        },
    }


def _fields(*declarations: str) -> list[dict[str, str]]:
    return [dict(zip(("type", "name"), declaration.split(" "), strict=True)) for declaration in declarations]

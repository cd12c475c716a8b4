"""Builds what is signed: the EIP-712 message of a payment, from the fields of its intent only.

Sources: EIP-3009 (TransferWithAuthorization, cancelAuthorization); Permit2's SignatureTransfer (PermitWitnessTransferFrom); x402
specification, ``schemes/exact`` and ``schemes/upto`` on EVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from x402guard.errors import IllegalTransition
from x402guard.kernel.eip712 import Domain, TypedData, Types
from x402guard.kernel.evm import Address
from x402guard.kernel.intent import Intent

PERMIT2: Final = Address("0x000000000022D473030F116dDEE9F6B43aC78BA3")
"""Permit2's canonical address, the same on every EVM chain."""

EXACT_PROXY: Final = Address("0x402085c248EeA27D92E8b30b2C58ed07f9E20001")
"""The x402 exact proxy, the same on every EVM chain; it sends only to ``witness.to``."""

UPTO_PROXY: Final = Address("0x4020A4f3b7b90ccA423B9fabCc0CE57C6C240002")
"""The x402 upto proxy, the same on every EVM chain; only ``witness.facilitator`` may call it."""

_TRANSFER: Final[Types] = {
    "TransferWithAuthorization": (
        ("from", "address"),
        ("to", "address"),
        ("value", "uint256"),
        ("validAfter", "uint256"),
        ("validBefore", "uint256"),
        ("nonce", "bytes32"),
    )
}


def _permit_types(witness: tuple[tuple[str, str], ...]) -> Types:
    return {
        "PermitWitnessTransferFrom": (
            ("permitted", "TokenPermissions"),
            ("spender", "address"),
            ("nonce", "uint256"),
            ("deadline", "uint256"),
            ("witness", "Witness"),
        ),
        "TokenPermissions": (("token", "address"), ("amount", "uint256")),
        "Witness": witness,
    }


_EXACT_PERMIT: Final = _permit_types((("to", "address"), ("validAfter", "uint256")))
_UPTO_PERMIT: Final = _permit_types((("to", "address"), ("facilitator", "address"), ("validAfter", "uint256")))


def _transfer(intent: Intent) -> TypedData:
    """Return EIP-3009's TransferWithAuthorization. Valid while validAfter < t < validBefore."""
    message = {
        "from": intent.payer,
        "to": intent.payee,
        "value": intent.amount_atomic,
        "validAfter": intent.valid_after,
        "validBefore": intent.valid_until,
        "nonce": f"0x{intent.nonce:064x}",
    }
    domain = Domain(intent.domain_name, intent.domain_version, intent.chain_id, intent.token)
    return TypedData(domain, _TRANSFER, "TransferWithAuthorization", message)


def _exact_permit(intent: Intent) -> TypedData:
    """Return PermitWitnessTransferFrom for the exact proxy, with the payee as witness."""
    witness = {"to": intent.payee, "validAfter": intent.valid_after}
    return _permit(intent, EXACT_PROXY, _EXACT_PERMIT, witness)


def _upto_permit(intent: Intent) -> TypedData:
    """Return PermitWitnessTransferFrom for the upto proxy, with payee and facilitator as witness."""
    if intent.facilitator is None:
        raise IllegalTransition("an upto payment has no facilitator")
    witness = {"to": intent.payee, "facilitator": intent.facilitator, "validAfter": intent.valid_after}
    return _permit(intent, UPTO_PROXY, _UPTO_PERMIT, witness)


def _permit(intent: Intent, spender: Address, types: Types, witness: Mapping[str, Any]) -> TypedData:
    """*spender* is a proxy of x402 and never the intent's word. Valid while validAfter ≤ t ≤ deadline."""
    message = {
        "permitted": {"token": intent.token, "amount": intent.amount_atomic},
        "spender": spender,
        "nonce": intent.nonce,
        "deadline": intent.valid_until,
        "witness": witness,
    }
    return TypedData(Domain("Permit2", None, intent.chain_id, PERMIT2), types, "PermitWitnessTransferFrom", message)


def typed_data(intent: Intent) -> TypedData:
    """Return the message to sign for *intent*. Raises ``IllegalTransition`` for another scheme or method."""
    match intent.scheme, intent.method:
        case "exact", "eip3009":
            return _transfer(intent)
        case "exact", "permit2":
            return _exact_permit(intent)
        case "upto", "permit2":
            return _upto_permit(intent)
    raise IllegalTransition(f"no scheme {intent.scheme!r} by {intent.method!r}")


_CANCELLATION: Final[Types] = {"CancelAuthorization": (("authorizer", "address"), ("nonce", "bytes32"))}


def cancellation_data(intent: Intent) -> TypedData:
    """Return the typed data that cancels *intent*, from its fields only. Raises ``ValueError`` if not EIP-3009."""
    if intent.method != "eip3009":
        raise ValueError(f"a signature cannot cancel a {intent.method} payment")
    domain = Domain(intent.domain_name, intent.domain_version, intent.chain_id, intent.token)
    message = {"authorizer": intent.payer, "nonce": f"0x{intent.nonce:064x}"}
    return TypedData(domain, _CANCELLATION, "CancelAuthorization", message)

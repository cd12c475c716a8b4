"""The common part of the two Permit2 schemes: the domain, the types around a witness, and the message.

Source: Permit2's SignatureTransfer (PermitWitnessTransferFrom); x402 specification, asset transfer method ``permit2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from x402guard.evm import Address
from x402guard.ledger.intent import Intent
from x402guard.x402.schemes.eip712 import Domain, TypedData, Types
from x402guard.x402.schemes.scheme import PERMIT2


def permit_types(witness: tuple[tuple[str, str], ...]) -> Types:
    """Return the struct types of PermitWitnessTransferFrom with the given witness fields."""
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


def permit_domain(intent: Intent) -> Domain:
    """Return Permit2's domain on the payment's chain; it has no version."""
    return Domain("Permit2", None, intent.chain_id, PERMIT2)


def permit_message(intent: Intent, spender: Address, witness: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the struct to sign; *spender* is the proxy and does not come from the intent."""
    return {
        "permitted": {"token": intent.token, "amount": intent.amount_atomic},
        "spender": spender,
        "nonce": intent.nonce,
        "deadline": intent.valid_until,
        "witness": witness,
    }


def permit_payload(intent: Intent, data: TypedData, signature: bytes) -> Mapping[str, Any]:
    """Return the ``payload`` object: the signed struct with numbers as strings, the payer and the signature."""
    permit = {"from": intent.payer, **_as_text(data.message)}
    return {"permit2Authorization": permit, "signature": f"0x{signature.hex()}"}


def _as_text(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _as_text(part) if isinstance(part, Mapping) else str(part) for key, part in value.items()}

"""``exact``: pays exactly the offered amount, by EIP-3009 or by Permit2 through the x402 exact proxy.

Sources: EIP-3009 (TransferWithAuthorization), Permit2's SignatureTransfer, x402 specification ``schemes/exact`` on EVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from x402guard.evm import Address
from x402guard.ledger.intent import Intent
from x402guard.x402.schemes.eip712 import Domain, TypedData, Types
from x402guard.x402.schemes.permit2 import permit_domain, permit_message, permit_payload, permit_types
from x402guard.x402.schemes.scheme import Proposal, draft

EXACT_PROXY: Final = Address("0x402085c248EeA27D92E8b30b2C58ed07f9E20001")
"""The x402 exact proxy, the same on every EVM chain; it sends only to ``witness.to``."""

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
_WITNESS: Final = (("to", "address"), ("validAfter", "uint256"))
_PERMIT: Final = permit_types(_WITNESS)


class Eip3009:
    """``exact`` by the token's ``transferWithAuthorization``. Valid while validAfter < t < validBefore."""

    def propose(self, proposal: Proposal) -> Intent:
        """Return the unsigned transfer in the token's domain."""
        asset = proposal.offer.asset
        return draft(self, proposal, spender=None, domain=(asset.name, asset.version))

    def typed_data(self, intent: Intent) -> TypedData:
        """Return EIP-3009's TransferWithAuthorization."""
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

    def payload(self, intent: Intent, signature: bytes) -> Mapping[str, Any]:
        """Return the authorization, with numbers as strings, and the signature."""
        message = self.typed_data(intent).message
        authorization = {key: str(value) for key, value in message.items()}
        return {"authorization": authorization, "signature": f"0x{signature.hex()}"}


class Permit2:
    """``exact`` by Permit2, with the exact proxy as spender. Valid while validAfter ≤ t ≤ deadline."""

    def propose(self, proposal: Proposal) -> Intent:
        """Return the unsigned permit for the exact proxy."""
        asset = proposal.offer.asset
        return draft(self, proposal, spender=EXACT_PROXY, domain=(asset.name, asset.version))

    def typed_data(self, intent: Intent) -> TypedData:
        """Return PermitWitnessTransferFrom with the payee as witness."""
        witness = {"to": intent.payee, "validAfter": intent.valid_after}
        message = permit_message(intent, EXACT_PROXY, witness)
        return TypedData(permit_domain(intent), _PERMIT, "PermitWitnessTransferFrom", message)

    def payload(self, intent: Intent, signature: bytes) -> Mapping[str, Any]:
        """Return the permit, with numbers as strings, and the signature."""
        return permit_payload(intent, self.typed_data(intent), signature)

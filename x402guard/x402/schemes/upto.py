"""``upto``: signs a ceiling and is charged for the use, by Permit2 through the x402 upto proxy.

Only the server decides the amount; the witness binds the payee and the one facilitator that may settle.
Sources: Permit2's SignatureTransfer, x402 specification ``schemes/upto`` on EVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from x402guard.errors import IllegalTransition
from x402guard.evm import Address
from x402guard.ledger.intent import Intent
from x402guard.x402.schemes.eip712 import TypedData
from x402guard.x402.schemes.permit2 import permit_domain, permit_message, permit_payload, permit_types
from x402guard.x402.schemes.scheme import Proposal, draft

UPTO_PROXY: Final = Address("0x4020A4f3b7b90ccA423B9fabCc0CE57C6C240002")
"""The x402 upto proxy, the same on every EVM chain; only ``witness.facilitator`` may call it."""

_PERMIT: Final = permit_types((("to", "address"), ("facilitator", "address"), ("validAfter", "uint256")))


class Permit2:
    """``upto`` by Permit2, with the upto proxy as spender. Valid while validAfter ≤ t ≤ deadline."""

    def propose(self, proposal: Proposal) -> Intent:
        """Return the unsigned permit for the upto proxy; its amount is the ceiling."""
        asset = proposal.offer.asset
        return draft(self, proposal, spender=UPTO_PROXY, domain=(asset.name, asset.version))

    def typed_data(self, intent: Intent) -> TypedData:
        """Return PermitWitnessTransferFrom with payee and facilitator as witness."""
        if intent.facilitator is None:
            raise IllegalTransition("an upto payment has no facilitator")
        witness = {"to": intent.payee, "facilitator": intent.facilitator, "validAfter": intent.valid_after}
        message = permit_message(intent, UPTO_PROXY, witness)
        return TypedData(permit_domain(intent), _PERMIT, "PermitWitnessTransferFrom", message)

    def payload(self, intent: Intent, signature: bytes) -> Mapping[str, Any]:
        """Return the permit, with numbers as strings, and the signature."""
        return permit_payload(intent, self.typed_data(intent), signature)

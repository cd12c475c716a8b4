"""``exact``: pays exactly the offered amount, by EIP-3009 or by Permit2 through the x402 exact proxy.

Sources: EIP-3009 (TransferWithAuthorization), Permit2's SignatureTransfer, x402 specification ``schemes/exact`` on EVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from x402guard.kernel.intent import Intent
from x402guard.kernel.typed_data import EXACT_PROXY
from x402guard.x402.schemes.permit2 import permit_payload
from x402guard.x402.schemes.scheme import Proposal, draft


class Eip3009:
    """``exact`` by the token's ``transferWithAuthorization``. Valid while validAfter < t < validBefore."""

    def propose(self, proposal: Proposal) -> Intent:
        """Return the unsigned transfer in the token's domain."""
        asset = proposal.offer.asset
        return draft(proposal, spender=None, domain=(asset.name, asset.version))

    def payload(self, intent: Intent, signature: bytes) -> Mapping[str, Any]:
        """Return the authorization, with numbers as strings, and the signature."""
        authorization = {
            "from": intent.payer,
            "to": intent.payee,
            "value": str(intent.amount_atomic),
            "validAfter": str(intent.valid_after),
            "validBefore": str(intent.valid_until),
            "nonce": f"0x{intent.nonce:064x}",
        }
        return {"authorization": authorization, "signature": f"0x{signature.hex()}"}


class Permit2:
    """``exact`` by Permit2, with the exact proxy as spender. Valid while validAfter ≤ t ≤ deadline."""

    def propose(self, proposal: Proposal) -> Intent:
        """Return the unsigned permit for the exact proxy."""
        asset = proposal.offer.asset
        return draft(proposal, spender=EXACT_PROXY, domain=(asset.name, asset.version))

    def payload(self, intent: Intent, signature: bytes) -> Mapping[str, Any]:
        """Return the permit, with numbers as strings, and the signature."""
        return permit_payload(intent, signature)

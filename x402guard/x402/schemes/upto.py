"""``upto``: signs a ceiling and is charged for the use, by Permit2 through the x402 upto proxy.

Only the server decides the amount; the witness binds the payee and the one facilitator that may settle.
Sources: Permit2's SignatureTransfer, x402 specification ``schemes/upto`` on EVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from x402guard.kernel.intent import Intent
from x402guard.kernel.typed_data import UPTO_PROXY
from x402guard.x402.schemes.permit2 import permit_payload
from x402guard.x402.schemes.scheme import Proposal, draft


class Permit2:
    """``upto`` by Permit2, with the upto proxy as spender. Valid while validAfter ≤ t ≤ deadline."""

    def propose(self, proposal: Proposal) -> Intent:
        """Return the unsigned permit for the upto proxy; its amount is the ceiling."""
        asset = proposal.offer.asset
        return draft(proposal, spender=UPTO_PROXY, domain=(asset.name, asset.version))

    def payload(self, intent: Intent, signature: bytes) -> Mapping[str, Any]:
        """Return the permit, with numbers as strings, and the signature."""
        return permit_payload(intent, signature)

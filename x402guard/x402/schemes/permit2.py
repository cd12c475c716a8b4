"""The common part of the payloads of the two Permit2 schemes.

Source: x402 specification, asset transfer method ``permit2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from x402guard.kernel.intent import Intent


def permit_payload(intent: Intent, signature: bytes) -> Mapping[str, Any]:
    """Return the ``payload`` object: the signed struct with numbers as strings, the payer and the signature."""
    witness = {"to": intent.payee, "facilitator": intent.facilitator, "validAfter": str(intent.valid_after)}
    permit = {
        "from": intent.payer,
        "permitted": {"token": intent.token, "amount": str(intent.amount_atomic)},
        "spender": intent.spender,
        "nonce": str(intent.nonce),
        "deadline": str(intent.valid_until),
        "witness": {name: value for name, value in witness.items() if value is not None},
    }
    return {"permit2Authorization": permit, "signature": f"0x{signature.hex()}"}

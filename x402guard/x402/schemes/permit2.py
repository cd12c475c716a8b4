"""The common part of the payloads of the two Permit2 schemes.

Source: x402 specification, asset transfer method ``permit2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from x402guard.kernel.eip712 import TypedData
from x402guard.kernel.intent import Intent


def permit_payload(intent: Intent, data: TypedData, signature: bytes) -> Mapping[str, Any]:
    """Return the ``payload`` object: the signed struct with numbers as strings, the payer and the signature."""
    permit = {"from": intent.payer, **_as_text(data.message)}
    return {"permit2Authorization": permit, "signature": f"0x{signature.hex()}"}


def _as_text(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _as_text(part) if isinstance(part, Mapping) else str(part) for key, part in value.items()}

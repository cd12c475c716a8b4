"""The payment message around a signed payload, v2 and v1, and its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from x402guard.kernel.intent import Intent
from x402guard.x402.wire import PAYMENT_SIGNATURE, X_PAYMENT, encode_header

_IDENTIFIER: Final = "payment-identifier"


def envelope(intent: Intent, payload: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and value of the header with *payload* for *intent*."""
    name = X_PAYMENT if intent.version == 1 else PAYMENT_SIGNATURE
    return name.upper(), encode_header(payment_message(intent, payload))


def payment_message(intent: Intent, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the payment message: v1 (specification v1, 5.2) or v2 (specification v2, 5.2), which echoes the offer."""
    if intent.version == 1:
        return {
            "x402Version": 1,
            "scheme": intent.scheme,
            "network": intent.network_as_offered,
            "payload": dict(payload),
        }
    message: dict[str, Any] = {
        "x402Version": 2,
        "payload": dict(payload),
        "accepted": json.loads(intent.accepted_json),
    }
    if intent.resource_json is not None:
        message["resource"] = json.loads(intent.resource_json)
    if intent.extensions_json is not None:
        message["extensions"] = _extensions(intent.extensions_json, intent.payment_id)
    return message


def _extensions(offered_json: str, payment_id: str | None) -> Any:
    # Specification v2, 5.1.2: echo at least the received extensions; append, never overwrite.
    extensions: Any = json.loads(offered_json)
    if not isinstance(extensions, dict):
        return extensions
    offered = extensions.get(_IDENTIFIER)
    if payment_id is not None and isinstance(offered, dict):
        info = offered.get("info")
        extensions[_IDENTIFIER] = {**offered, "info": {**(info if isinstance(info, dict) else {}), "id": payment_id}}
    return extensions

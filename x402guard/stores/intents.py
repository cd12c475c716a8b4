"""Writes the intent of a payment as JSON, and reads it again."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final

from msgspec.json import Decoder

from x402guard.kernel.intent import Intent

_DECODED: Final = Decoder().decode
_NAMES: Final = Intent.__struct_fields__
_ENCODED: Final = json.JSONEncoder(separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode


@lru_cache(maxsize=256)  # a row is written several times, always with the same intent
def intent_text(intent: Intent) -> str:
    """Return an intent as JSON. 256-bit numbers are written as text, because JSON readers lose their digits."""
    values: dict[str, Any] = {name: getattr(intent, name) for name in _NAMES}
    values["amount_atomic"] = str(intent.amount_atomic)
    values["nonce"] = f"0x{intent.nonce:064x}"
    return _ENCODED(values)


def read_intent(text: str) -> Intent:
    """Return the intent written by ``intent_text``. Raises ``ValueError`` or ``TypeError`` for anything else."""
    values = _DECODED(text)
    if set(values) != set(_NAMES):
        raise ValueError("the fields of the stored payment differ from those that this version of x402guard writes")
    values["amount_atomic"] = int(values["amount_atomic"])
    values["nonce"] = int(values["nonce"], 16)
    return Intent(**values)

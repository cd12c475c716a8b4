"""Cancels an EIP-3009 authorization before it is used. Source: EIP-3009, ``cancelAuthorization``."""

from __future__ import annotations

from typing import Final

from x402guard.kernel.eip712 import Domain, TypedData, Types
from x402guard.kernel.evm import MAX_UINT256
from x402guard.kernel.intent import Intent

_TYPES: Final[Types] = {"CancelAuthorization": (("authorizer", "address"), ("nonce", "bytes32"))}
_SELECTOR: Final = bytes.fromhex("5a049a70")  # cancelAuthorization(address,bytes32,uint8,bytes32,bytes32)


def cancellation_data(intent: Intent) -> TypedData:
    """Return the typed data that cancels *intent*, from its fields only. Raises ``ValueError`` if not EIP-3009."""
    if intent.method != "eip3009":
        raise ValueError(f"a signature cannot cancel a {intent.method} payment")
    domain = Domain(intent.domain_name, intent.domain_version, intent.chain_id, intent.token)
    message = {"authorizer": intent.payer, "nonce": f"0x{intent.nonce:064x}"}
    return TypedData(domain, _TYPES, "CancelAuthorization", message)


def cancellation_call(intent: Intent, signature: bytes) -> bytes:
    """Return the calldata that cancels *intent* with a 65-byte signature; any account may send it to the token."""
    if not 0 <= intent.nonce <= MAX_UINT256 or len(signature) != 65:
        raise ValueError("a nonce has 32 bytes and a signature 65")
    payer = bytes.fromhex(intent.payer.removeprefix("0x")).rjust(32, b"\0")
    r, s, v = signature[:32], signature[32:64], signature[64:]
    return _SELECTOR + payer + intent.nonce.to_bytes(32, "big") + v.rjust(32, b"\0") + r + s

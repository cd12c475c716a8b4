"""Hashes what is signed (EIP-712), from the fields of a payment's intent alone: three payments, and a cancellation.

The types stand as their sources write them: EIP-3009 (TransferWithAuthorization, cancelAuthorization); Permit2's SignatureTransfer
(PermitWitnessTransferFrom); x402 specification, ``schemes/exact`` and ``schemes/upto`` on EVM.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from x402guard.errors import IllegalTransition
from x402guard.kernel.evm import MAX_UINT256, Address, keccak
from x402guard.kernel.intent import Intent

PERMIT2: Final = Address("0x000000000022D473030F116dDEE9F6B43aC78BA3")
"""Permit2's canonical address, the same on every EVM chain."""

EXACT_PROXY: Final = Address("0x402085c248EeA27D92E8b30b2C58ed07f9E20001")
"""The x402 exact proxy, the same on every EVM chain; it sends only to ``witness.to``."""

UPTO_PROXY: Final = Address("0x4020A4f3b7b90ccA423B9fabCc0CE57C6C240002")
"""The x402 upto proxy, the same on every EVM chain; only ``witness.facilitator`` may call it."""

_DOMAIN: Final = "EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
_PERMIT2_DOMAIN: Final = "EIP712Domain(string name,uint256 chainId,address verifyingContract)"
_TRANSFER: Final = "TransferWithAuthorization(address from,address to,uint256 value,uint256 validAfter,uint256 validBefore,bytes32 nonce)"
_CANCEL: Final = "CancelAuthorization(address authorizer,bytes32 nonce)"
_PERMITTED: Final = "TokenPermissions(address token,uint256 amount)"
_EXACT_WITNESS: Final = "Witness(address to,uint256 validAfter)"
_UPTO_WITNESS: Final = "Witness(address to,address facilitator,uint256 validAfter)"
_PERMIT: Final = "PermitWitnessTransferFrom(TokenPermissions permitted,address spender,uint256 nonce,uint256 deadline,Witness witness)"

_known: Final = lru_cache(maxsize=256)(keccak)
"""Keccak-256. The last hashes are known: a signer encodes a payment again, from its row, and needs the same ones."""


def digest(intent: Intent) -> bytes:
    """Return the 32 bytes that are signed for a payment. Raises ``IllegalTransition`` for another scheme or method."""
    return _known(b"\x19\x01" + domain_separator(intent) + struct_hash(intent))


def cancellation_digest(intent: Intent) -> bytes:
    """Return the 32 bytes that are signed to cancel a payment. Raises ``ValueError`` if it is not by EIP-3009."""
    if intent.method != "eip3009":
        raise ValueError(f"a signature cannot cancel a {intent.method} payment")
    return _known(b"\x19\x01" + domain_separator(intent) + _hashed(_CANCEL, intent.payer, intent.nonce))


def domain_separator(intent: Intent) -> bytes:
    """Return ``hashStruct(eip712Domain)``, 32 bytes: the token's own domain, or Permit2's, which has no version."""
    if intent.method == "permit2":
        return _hashed(_PERMIT2_DOMAIN, _known(b"Permit2"), intent.chain_id, PERMIT2)
    return token_separator(intent.chain_id, intent.token, intent.domain_name, intent.domain_version)


def token_separator(chain_id: int, token: Address, name: str, version: str) -> bytes:
    """Return the domain separator of a token, 32 bytes: what its ``DOMAIN_SEPARATOR()`` has to say (EIP-2612)."""
    return _hashed(_DOMAIN, _known(name.encode()), _known(version.encode()), chain_id, token)


def struct_hash(intent: Intent) -> bytes:
    """Return ``hashStruct(message)``, 32 bytes. A permit's spender is a proxy of x402, and never the intent's word.

    A transfer is valid while validAfter < t < validBefore, a permit while validAfter ≤ t ≤ deadline.
    """
    payee, after, until, nonce = intent.payee, intent.valid_after, intent.valid_until, intent.nonce
    match intent.scheme, intent.method:
        case "exact", "eip3009":
            return _hashed(_TRANSFER, intent.payer, payee, intent.amount_atomic, after, until, nonce)
        case "exact", "permit2":
            spender, kind, witness = EXACT_PROXY, _EXACT_WITNESS, _hashed(_EXACT_WITNESS, payee, after)
        case "upto", "permit2":
            if intent.facilitator is None:
                raise IllegalTransition("an upto payment has no facilitator")
            witness = _hashed(_UPTO_WITNESS, payee, intent.facilitator, after)
            spender, kind = UPTO_PROXY, _UPTO_WITNESS
        case _:
            raise IllegalTransition(f"no scheme {intent.scheme!r} by {intent.method!r}")
    permitted = _hashed(_PERMITTED, intent.token, intent.amount_atomic)
    return _hashed(_PERMIT + _PERMITTED + kind, permitted, spender, nonce, until, witness)


def _hashed(kind: str, *fields: int | Address | bytes) -> bytes:
    """Return ``hashStruct``: of a type, with the types that it names after it, and of its fields in their order."""
    return _known(_known(kind.encode()) + b"".join(map(_word, fields)))


def _word(value: int | Address | bytes) -> bytes:
    """Return ``encodeData`` of a number, an address, or the hash of a text or struct. Raises ``ValueError`` for others."""
    if type(value) is int and 0 <= value <= MAX_UINT256:
        return value.to_bytes(32, "big")
    raw = bytes.fromhex(value.removeprefix("0x")) if isinstance(value, str) else value
    if type(raw) is bytes and len(raw) == (20 if isinstance(value, str) else 32):
        return raw.rjust(32, b"\0")
    raise ValueError(f"{value!r} is no number, address or hash")

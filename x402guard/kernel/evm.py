"""Provides the Ethereum parts that the core needs: checksummed addresses and normalised signatures."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NewType

Address = NewType("Address", str)
"""A 20-byte address as ``0x`` and forty hex digits in EIP-55 mixed case."""

MAX_UINT256: Final = 2**256 - 1


def keccak(data: bytes) -> bytes:
    """Return the Keccak-256 hash of *data*, 32 bytes. What computes it loads on first use."""
    return _keccak()(data)


@lru_cache(maxsize=1)
def _keccak() -> Callable[[bytes], bytes]:
    from eth_hash.auto import keccak as compute

    return compute


@lru_cache(maxsize=4096)
def checksum_address(raw: bytes) -> Address:
    """Return the EIP-55 form of a 20-byte address. Raises ``ValueError`` for any other length."""
    if len(raw) != 20:
        raise ValueError(f"an address is 20 bytes, not {len(raw)}")
    lower = raw.hex()
    nibbles = keccak(lower.encode()).hex()
    # EIP-55: a letter is upper case where the same nibble of the hash is 8 or more.
    mixed = (c.upper() if n >= "8" else c for c, n in zip(lower, nibbles, strict=False))
    return Address("0x" + "".join(mixed))


ORDER: Final = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


def normalise_signature(signature: bytes) -> bytes:
    """Return a recoverable signature in the form with low s, and v 27 or 28.

    (r, s) and (r, −s) are two encodings of one authorization; tokens accept only one of them. Raises ``ValueError`` for
    anything that is not a valid 65-byte signature; the signer that returned it may still have signed something.
    """
    if len(signature) != 65:
        raise ValueError(f"a signature has 65 bytes, not {len(signature)}")
    r, s, v = signature[:32], int.from_bytes(signature[32:64], "big"), signature[64]
    parity = v - 27 if v >= 27 else v
    if parity not in (0, 1) or not 0 < s < ORDER:
        raise ValueError("the signature is malformed")
    if s > ORDER // 2:
        s, parity = ORDER - s, 1 - parity
    return r + s.to_bytes(32, "big") + bytes([27 + parity])

"""Reads what Ethereum writes as text: addresses, with their checksum, and hashes of transactions."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from x402guard.kernel.evm import Address, checksum_address

ZERO_ADDRESS: Final = Address("0x" + "0" * 40)

_HEX_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII)
_HEX_HASH = re.compile(r"0x[0-9a-fA-F]{64}", re.ASCII)


def is_transaction(text: str) -> bool:
    """True for the hash of a transaction: a seller may write any text there."""
    return _HEX_HASH.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def parse_address(text: str) -> Address:
    """Return *text* as an ``Address``.

    All-lower and all-upper hex is accepted; mixed case must be the correct EIP-55 checksum, which detects mistyped and
    swapped letters. Raises ``ValueError`` otherwise.
    """
    if not isinstance(text, str) or not _HEX_ADDRESS.fullmatch(text):
        raise ValueError(f"{str(text)[:60]!r} is not an address: 0x and forty hex digits")
    address = checksum_address(bytes.fromhex(text[2:]))
    digits = text[2:]
    if address != text and digits not in (digits.lower(), digits.upper()):
        raise ValueError(f"{text} fails its EIP-55 checksum; the address with these digits is {address}")
    return address

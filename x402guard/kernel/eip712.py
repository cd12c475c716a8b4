"""EIP-712: hashes typed structured data. Supports the types of the schemes: address, uint256, bytes32, structs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from msgspec import Struct

from x402guard.kernel.evm import MAX_UINT256, Address, keccak

Types = Mapping[str, tuple[tuple[str, str], ...]]
"""Struct name → its (field, type) pairs, in order."""

_NAME: Final = ("name", "string")
_VERSION: Final = ("version", "string")
_PLACE: Final = (("chainId", "uint256"), ("verifyingContract", "address"))

_hash: Final = lru_cache(maxsize=256)(keccak)
"""Keccak-256. The last hashes are known: a signer encodes a payment again, from its row, and needs the same ones."""


class Domain(Struct, frozen=True):
    """The EIP-712 domain. ``version`` is None if the contract's domain has none (Permit2)."""

    name: str
    version: str | None
    chain_id: int
    contract: Address

    def separator(self) -> bytes:
        """Return ``hashStruct(eip712Domain)``, 32 bytes."""
        return _separator(self.name, self.version, self.chain_id, self.contract)


@lru_cache(maxsize=256)
def _separator(name: str, version: str | None, chain_id: int, contract: Address) -> bytes:
    fields = (_NAME, *_PLACE) if version is None else (_NAME, _VERSION, *_PLACE)
    encoded = keccak(_signature("EIP712Domain", fields).encode()) + keccak(name.encode())
    if version is not None:
        encoded += keccak(version.encode())
    return keccak(encoded + _word("uint256", chain_id) + _word("address", contract))


class TypedData(Struct, frozen=True):
    """A message to sign: domain, struct types, the struct's name and its values (addresses as str, numbers as int)."""

    domain: Domain
    types: Types
    primary: str
    message: Mapping[str, Any]

    def struct_hash(self) -> bytes:
        """Return ``hashStruct(message)``, 32 bytes."""
        return _hash_struct(self.types, self.primary, self.message)

    def digest(self) -> bytes:
        """Return the 32 bytes that are signed: ``keccak256(0x19 0x01 ‖ domain separator ‖ struct hash)``."""
        return _hash(b"\x19\x01" + self.domain.separator() + self.struct_hash())


def _signature(name: str, fields: Any) -> str:
    return f"{name}({','.join(f'{kind} {field}' for field, kind in fields)})"


@lru_cache(maxsize=64)
def _type_hash(structs: tuple[tuple[str, tuple[tuple[str, str], ...]], ...], name: str) -> bytes:
    """Return ``keccak256(encodeType)``: the struct first, then the structs it refers to, sorted by name."""
    types = dict(structs)
    inside = sorted(kind for _, kind in types[name] if kind in types)  # ours refer to structs that refer to none
    return keccak("".join(_signature(part, types[part]) for part in (name, *inside)).encode())


def _hash_struct(types: Types, name: str, values: Mapping[str, Any]) -> bytes:
    encoded = _type_hash(tuple(types.items()), name)
    for field, kind in types[name]:
        value = values[field]
        encoded += _hash_struct(types, kind, value) if kind in types else _word(kind, value)
    return _hash(encoded)


def _word(kind: str, value: Any) -> bytes:
    """Return ``encodeData`` of one atomic value, a 32-byte word. Raises ``ValueError`` for a value of another type."""
    if kind == "uint256" and type(value) is int and 0 <= value <= MAX_UINT256:
        return value.to_bytes(32, "big")
    if kind == "address" and isinstance(value, str):
        raw = bytes.fromhex(value.removeprefix("0x"))
        if len(raw) == 20:
            return raw.rjust(32, b"\0")
    if kind == "bytes32" and isinstance(value, str):
        raw = bytes.fromhex(value.removeprefix("0x"))
        if len(raw) == 32:
            return raw
    raise ValueError(f"{value!r} is not a {kind}")

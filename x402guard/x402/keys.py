"""Reads private keys, and keystores of version 3. What is wrong is returned as text, so that no traceback shows a key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import coincurve

from x402guard.kernel.evm import ORDER, Address, checksum_address, keccak
from x402guard.strict_json import NotReadable, read_object

KEY_BYTES: Final = 32
_EXPECTED: Final = "a private key has 32 bytes, as hex with or without 0x"
_HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2})+")
_PHRASES: Final = frozenset({12, 15, 18, 21, 24})  # BIP-39
_MOST_MEMORY: Final = 2**30
_MOST_WORK: Final = 2**25
"""For scrypt: n · r · p, sixteen times that of wallets."""

_MOST_BLOCKS: Final = 1_024
"""For scrypt: r · p, with which the time of one round grows by more than its square; wallets take 8."""
_MOST_ROUNDS: Final = 32 * 10_000_000
"""For PBKDF2: its rounds, for each of the bytes that they make."""

_KEYSTORE: Final = "LocalSigner.from_keystore(path, password=…)"


def parse_key(given: object) -> coincurve.PrivateKey | str:
    """Return the key of 32 bytes or 64 hex digits, or what is wrong with *given*, without showing it. Never raises."""
    raw = _bytes_of(given)
    if raw is None or len(raw) != KEY_BYTES:
        return f"{_what_it_is(given, raw)}; {_EXPECTED}"
    if not 0 < int.from_bytes(raw, "big") < ORDER:
        return "these 32 bytes are no key of secp256k1: they are zero, or too large"
    try:
        return coincurve.PrivateKey(raw)
    except ValueError:
        return f"these 32 bytes are no key; {_EXPECTED}"


def _bytes_of(given: object) -> bytes | None:
    if isinstance(given, bytes | bytearray):
        return bytes(given)
    digits = given.strip().removeprefix("0x").removeprefix("0X") if isinstance(given, str) else ""
    return bytes.fromhex(digits) if _HEX.fullmatch(digits) else None


def _what_it_is(given: object, raw: bytes | None) -> str:
    """Return what was given in place of a key, in words that show nothing of it."""
    if given is None:
        return "it is None: the variable or secret that it comes from is not set"
    if raw is not None:
        return _what_bytes_are(raw)
    if not isinstance(given, str):
        return f"it is of type {type(given).__name__}"
    text = given.strip()
    words = text.split()
    if not text:
        return "it is empty"
    if len(words) in _PHRASES and all(word.isalpha() for word in words):
        return (
            f"these are {len(words)} words, a recovery phrase; your wallet derives the key from it, and can export it"
        )
    if text.startswith("{"):
        return f"this is JSON; write a keystore to a file, and read it with {_KEYSTORE}"
    if "/" in text or text.endswith(".json"):
        return f"this is a path; a keystore is read with {_KEYSTORE}"
    return f"this is a text of {len(text)} characters that is not hex"


def _what_bytes_are(raw: bytes) -> str:
    if len(raw) == 20:
        return "these 20 bytes are an address, which is public"
    if (len(raw) == 33 and raw[0] in (2, 3)) or (len(raw) == 65 and raw[0] == 4):
        return f"these {len(raw)} bytes are a public key"
    if len(raw) in (16, 64):
        return f"these {len(raw)} bytes are a seed, from which a wallet derives keys"
    return f"these are {len(raw)} bytes"


def read_keystore(text: str, password: str) -> coincurve.PrivateKey | str:
    """Return the key of a keystore (the Web3 Secret Storage JSON, version 3), or what is wrong. Never raises.

    It takes one or two seconds: the password is made slow to guess.
    """
    from eth_account import Account  # takes a second to load

    store = _keystore(text)
    if isinstance(store, str):
        return store
    try:
        key = parse_key(bytes(Account.decrypt(dict(store), password)))
    except Exception as error:  # noqa: BLE001 - the file may hold anything, and no traceback may show the password
        if "MAC mismatch" in str(error):
            return "the password is wrong, or the keystore is damaged"
        return f"it cannot be decrypted ({type(error).__name__})"
    named = str(store.get("address", "")).lower().removeprefix("0x")
    if isinstance(key, str) or not named or named == address_of(key)[2:].lower():
        return key
    return (
        f"it names the address 0x{named[:40]}, but its key is that of {address_of(key)}: it is damaged, or was changed"
    )


def address_of(key: coincurve.PrivateKey) -> Address:
    """Return the account of a key."""
    return checksum_address(keccak(key.public_key.format(compressed=False)[1:])[12:])


def keystore_address(text: str) -> Address:
    """Return the address that a keystore names, with its checksum. Raises ``ValueError`` with what is wrong."""
    store = _keystore(text)
    address = "" if isinstance(store, str) else str(store.get("address", "")).removeprefix("0x")
    if isinstance(store, str) or not re.fullmatch(r"[0-9a-fA-F]{40}", address):
        raise ValueError(store if isinstance(store, str) else "it names no address")
    return checksum_address(bytes.fromhex(address))


def _keystore(text: str) -> Mapping[str, Any] | str:
    try:
        store: dict[str, Any] = _in_small_letters(read_object(text))
    except NotReadable as error:
        return f"it cannot be read: {error}"
    crypto = store.get("crypto")
    if not isinstance(crypto, dict):
        return "it is no keystore: it has no table crypto"
    if store.get("version") != 3:
        return f"its version is {str(store.get('version'))[:20]!r}; version 3 is read"
    if not _is_bounded(crypto):
        return (
            "its kdfparams ask for over 1 GiB of memory, or for minutes, or are no whole numbers: wallets ask for 256 MiB "
            "(n = 262144, r = 8)"
        )
    return store


def _in_small_letters(value: Any) -> Any:
    """Return a table with its names as they are decrypted by: in small letters. Raises ``NotReadable`` for two of one name."""
    if not isinstance(value, dict):
        return value
    found = {name.lower(): _in_small_letters(each) for name, each in value.items()}
    if len(found) != len(value):
        raise NotReadable("a name appears twice, in capitals and small letters")
    return found


def _is_bounded(crypto: Mapping[str, Any]) -> bool:
    """Return whether the password's hash takes bounded memory and time. A parameter that is missing is told later."""
    given = crypto.get("kdfparams")
    given = given if isinstance(given, dict) else {}
    n, r, p, rounds, length = (given.get(name, 1) for name in ("n", "r", "p", "c", "dklen"))
    if not all(type(each) is int and each > 0 for each in (n, r, p, rounds, length)):
        return False
    return bool(
        r * p <= _MOST_BLOCKS
        and 128 * n * r <= _MOST_MEMORY
        and n * r * p <= _MOST_WORK
        and rounds * length <= _MOST_ROUNDS
    )


def make_keystore(password: str, given: object = None) -> str:
    """Return a keystore (version 3, scrypt) as JSON: of a new key, or of the key *given*, as ``parse_key`` reads it.

    Raises ``ValueError`` with what is wrong with *given*, without showing it.
    """
    from eth_account import Account

    key = coincurve.PrivateKey() if given is None else parse_key(given)
    del given
    if isinstance(key, str):
        raise ValueError(key)  # noqa: TRY004 - the text says what is wrong with it
    if not password.isprintable():
        del password, key
        raise ValueError("the password has a character that cannot be typed")
    return json.dumps(Account.encrypt(key.secret, password), indent=2) + "\n"

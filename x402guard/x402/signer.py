"""Makes a signer of a key, a keystore file or an account of ``eth_account``. The key goes into the kernel's signer."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final, TypeGuard

import coincurve

from x402guard.errors import ConfigError
from x402guard.evm import parse_address
from x402guard.flow.ports import Signer
from x402guard.kernel.evm import Address
from x402guard.kernel.signer import KeySigner
from x402guard.x402.keys import keystore_address, parse_key, read_keystore

_MOST_BYTES: Final = 65_536


class LocalSigner(KeySigner):
    """Signs with a key in this process's memory. It exposes only its address: it cannot be pickled or copied.

    ``Guard`` binds a signer to one ledger. From then on it signs only holds that are live in that ledger.
    """

    __slots__ = ()

    def __init__(self, key: object) -> None:
        secret = key.secret if isinstance(key, coincurve.PrivateKey) else b""
        del key
        super().__init__(secret)

    @classmethod
    def from_key(cls, key: str | bytes) -> LocalSigner:
        """Return a signer for a private key of 32 bytes, or as hex with or without ``0x``.

        Raises ``ConfigError`` for anything else, which says what was given; the message never contains it.
        """
        parsed = parse_key(key)
        del key  # a traceback with local variables must not show even an invalid key
        if isinstance(parsed, str):
            raise ConfigError(f"private key: {parsed}")
        return cls(parsed)

    @classmethod
    def from_keystore(cls, path: Path | str, *, password: str) -> LocalSigner:
        """Return a signer for the key in a keystore file (Web3 Secret Storage, version 3). Takes one or two seconds.

        Raises ``ConfigError`` for a file that cannot be read, another format, and a wrong password.
        """
        try:
            text = _text_of(path)
        except ConfigError:
            del password
            raise
        if type(password) is not str:
            wrong = "the password is None: the variable or secret that it comes from is not set"
            if password is not None:
                wrong = f"the password is of type {type(password).__name__}, and has to be text"
            del password
            raise ConfigError(f"keystore: {wrong}")
        parsed = read_keystore(text, password)
        del password
        if isinstance(parsed, str):
            raise ConfigError(f"keystore: {path}: {parsed}")
        return cls(parsed)


def signer_of(given: object) -> Signer | None:
    """Return the signer of a guard: as given, or one for the key of an ``eth_account`` account.

    Raises ``ConfigError`` for anything else. The message never shows the value: it may be a key.
    """
    if given is None:
        return None
    if type(given).__module__.startswith("eth_account."):
        from eth_account.signers.local import LocalAccount  # loaded already, by who made it

        if isinstance(given, LocalAccount):
            return LocalSigner.from_key(bytes(given.key))
    if not isinstance(given, type) and _is_signer(given):
        if not hasattr(given, "inline"):
            raise ConfigError(
                f"signer: {type(given).__name__} has no attribute inline; set it to True if signing takes well under a "
                "millisecond, as with a key in memory, else to False"
            )
        return given
    what = f"the class {given.__name__}" if isinstance(given, type) else f"a value of type {type(given).__name__}"
    del given
    raise ConfigError(
        f"signer: {what} is not a signer; write LocalSigner.from_key(…), LocalSigner.from_keystore(path, password=…), an "
        "account of eth_account, or None to meter without ever signing"
    )


def payer_of(signer: Signer) -> Address:
    """Return the account that a signer pays from, with its checksum. Raises ``ConfigError`` if its address is none."""
    address: object = signer.address
    try:
        return parse_address(str(address))
    except ValueError:
        raise ConfigError(
            f"signer: the address of {type(signer).__name__} is no account: 0x and forty hex digits, in mixed case with "
            "a correct EIP-55 checksum"
        ) from None


def _is_signer(given: object) -> TypeGuard[Signer]:
    return hasattr(given, "sign") and hasattr(given, "bind") and hasattr(given, "address")


def refuse_key(path: Path | str) -> None:
    """Raise ``ConfigError`` for a private key in place of the path of a file: no error shows it."""
    if not isinstance(parse_key(str(path)), str):
        raise ConfigError(
            "keystore: this is a private key, not the path of a file; write it into a file with x402guard keys import"
        )


def address_in(keystore: Path | str) -> Address:
    """Return the address that a keystore file names. Raises ``ConfigError`` for a file that names none."""
    text = _text_of(keystore)
    try:
        return keystore_address(text)
    except ValueError as error:
        raise ConfigError(f"keystore: {keystore}: {error}") from None


def _text_of(keystore: Path | str) -> str:
    refuse_key(keystore)
    file = Path(keystore)
    try:
        file = file.expanduser()
        state = file.stat()
        if not stat.S_ISREG(state.st_mode):  # a pipe without a writer never ends
            raise ConfigError(f"keystore: {keystore} cannot be read: it is no regular file")
        if state.st_size > _MOST_BYTES:
            raise ConfigError(f"keystore: {keystore} is no keystore: it has more than {_MOST_BYTES:,} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text, or no path"
        raise ConfigError(f"keystore: {keystore} cannot be read: {why}") from None

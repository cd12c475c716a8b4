"""Signs reports with Ed25519, so that a report can be checked by who has neither the ledger nor the key."""

from __future__ import annotations

import json
import os
import time
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from x402guard.errors import ConfigError
from x402guard.strict_json import NotReadable, read_json
from x402guard.views.report import REPORT_SCHEMA, Report

if TYPE_CHECKING:
    from cryptography.fernet import Fernet
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_SCHEMA: Final = "x402guard.report_key.v1"
SIGNED_SCHEMA: Final = "x402guard.signed_report.v1"
_KEYS: Final = {"schema", "signed_at", "public_key", "signature", "report"}
_MOST_BYTES: Final = 200_000_000
_MOST_KEY_BYTES: Final = 10_000


class ReportKey:
    """An Ed25519 key (RFC 8032) that signs reports. It signs no payment, and is no key of a wallet.

    ``public`` is what others check with: 64 hex digits.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()

    @classmethod
    def new(cls) -> Self:
        """Return a new key."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_file(cls, path: Path | str, *, password: str) -> Self:
        """Return the key in a file that ``to_json`` has written. Raises ``ConfigError`` with what is wrong."""
        try:
            found = read_json(Path(path).read_bytes()[:_MOST_KEY_BYTES])
        except OSError as error:
            raise ConfigError(f"report key: {path} cannot be read: {error.strerror}") from None
        except NotReadable:
            found = None
        if not isinstance(found, dict) or found.get("schema") != KEY_SCHEMA:
            raise ConfigError(f"report key: {path} is no report key; `x402guard keys report FILE` makes one")
        key = _opened(found, password)
        del password
        if key is None:
            raise ConfigError(f"report key: {path}: the password is wrong, or the file is damaged")
        return cls(key)

    def to_json(self, password: str) -> str:
        """Return the key as JSON, encrypted with *password*: Fernet under scrypt, about a quarter of a second."""
        salt = os.urandom(16)
        sealed = _fernet(password, salt).encrypt(self._key.private_bytes_raw()).decode()
        del password
        values = {"schema": KEY_SCHEMA, "public_key": self.public, "salt": salt.hex(), "sealed": sealed}
        return json.dumps(values, indent=2) + "\n"

    def sign(self, report: Report, *, at_unix: int | None = None) -> str:
        """Return a report with its signature, as JSON. *at_unix* is the time in it, in unix seconds; now by default."""
        at = int(time.time()) if at_unix is None else at_unix
        values = report.to_dict()
        signed = {
            "schema": SIGNED_SCHEMA,
            "signed_at": at,
            "public_key": self.public,
            "signature": self._key.sign(_message(values, at)).hex(),
            "report": values,
        }
        return json.dumps(signed, indent=2, ensure_ascii=False)

    def __repr__(self) -> str:
        return f"ReportKey(public={self.public!r})"

    def __reduce__(self) -> Any:
        raise TypeError("a report key is not pickled; read its file where it is needed")


def _fernet(password: str, salt: bytes) -> Fernet:
    from cryptography.fernet import Fernet
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    derived = Scrypt(salt=salt, length=32, n=2**17, r=8, p=1).derive(password.encode())
    return Fernet(urlsafe_b64encode(derived))


def _opened(found: dict[str, Any], password: str) -> Ed25519PrivateKey | None:
    from cryptography.fernet import InvalidToken
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        return Ed25519PrivateKey.from_private_bytes(
            _fernet(password, bytes.fromhex(found["salt"])).decrypt(found["sealed"])
        )
    except (InvalidToken, KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class SignedReport:
    """A report whose signature holds. ``signed_at`` is in unix seconds, by the clock of who signed."""

    report: Report
    signed_at: int
    public_key: str


def verify_report(text: str | bytes, public_key: str) -> SignedReport:
    """Return a signed report if it is signed by *public_key* (64 hex digits) and unchanged.

    Raises ``ConfigError`` if it is not. The key has to come from who signed, not from the file.
    """
    if not isinstance(public_key, str) or len(public_key) != 64 or not _is_hex(public_key):
        raise ConfigError(
            f"public key: {public_key!r:.80} is not 64 hex digits, as `x402guard keys report` prints them"
        )
    found = _read(text)
    values, at = found["report"], found["signed_at"]
    if str(found["public_key"]).lower() != public_key.lower():
        raise ConfigError(
            f"signed report: it is signed by {str(found['public_key'])[:64]}, not by {public_key.lower()}"
        )
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(
            bytes.fromhex(found["signature"]), _message(values, at)
        )
    except (InvalidSignature, ValueError):
        raise ConfigError(
            "signed report: the signature does not fit: the report was changed after it was signed"
        ) from None
    return SignedReport(Report(values), at, public_key.lower())


def _read(text: str | bytes) -> dict[str, Any]:
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"signed report: it has more than {_MOST_BYTES:,} bytes")
    try:
        found = read_json(text)
    except NotReadable as error:
        raise ConfigError(f"signed report: it cannot be read: {error}") from None
    if isinstance(found, dict) and found.get("schema") == REPORT_SCHEMA:
        raise ConfigError("signed report: this is a report without a signature; sign it with `x402guard report --sign`")
    if not isinstance(found, dict) or found.get("schema") != SIGNED_SCHEMA or set(found) != _KEYS:
        raise ConfigError(f"signed report: it is no {SIGNED_SCHEMA}, which `x402guard report --sign` writes")
    report, signature, at = found["report"], found["signature"], found["signed_at"]
    if type(at) is not int or not isinstance(signature, str) or not _is_hex(signature):
        raise ConfigError("signed report: signed_at or signature is of the wrong type")
    if not isinstance(report, dict) or report.get("schema") != REPORT_SCHEMA:
        raise ConfigError(f"signed report: what it holds is no {REPORT_SCHEMA}, which this version reads")
    return found


def _is_hex(text: str) -> bool:
    return len(text) % 2 == 0 and all(digit in "0123456789abcdefABCDEF" for digit in text)


def _message(values: dict[str, Any], at: int) -> bytes:
    # Sorted and compact: the signature does not depend on how the file is laid out.
    body = json.dumps([at, values], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{SIGNED_SCHEMA}\n{body}".encode("ascii")

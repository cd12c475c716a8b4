"""Signs reports and anchors with Ed25519, so that they can be checked by who has not the key, and reports without the ledger."""

from __future__ import annotations

import json
import os
import time
from base64 import urlsafe_b64encode
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from x402guard.errors import ConfigError
from x402guard.ledger.verify import Head, merkle_root
from x402guard.policy.checks import check_kind
from x402guard.strict_json import NotReadable, read_json
from x402guard.views.report import Report
from x402guard.views.report_keys import REPORT_SCHEMA

if TYPE_CHECKING:
    from cryptography.fernet import Fernet
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_SCHEMA: Final = "x402guard.report_key.v1"
SIGNED_SCHEMA: Final = "x402guard.signed_report.v1"
ANCHOR_SCHEMA: Final = "x402guard.anchor.v1"
_P: Final = 2**255 - 19
_SIGNED: Final = frozenset({"schema", "signed_at", "public_key", "signature"})
_MOST_BYTES: Final = 200_000_000
_MOST_KEY_BYTES: Final = 10_000


class ReportKey:
    """An Ed25519 key (RFC 8032) that signs reports and anchors. It signs no payment, and is no key of a wallet.

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
        check_kind("report", report, Report, "session.report() returns one")
        values = report.to_dict()
        return json.dumps(
            self._signed(SIGNED_SCHEMA, values, at_unix) | {"report": values}, indent=2, ensure_ascii=False
        )

    def sign_anchor(self, heads: Sequence[Head], *, at_unix: int | None = None) -> str:
        """Return the anchor of a ledger with these heads (``Owner.heads``) and its signature, as JSON.

        *at_unix* is the time in it, in unix seconds; now by default.
        """
        root = merkle_root(heads)
        signed = self._signed(ANCHOR_SCHEMA, root, at_unix) | {"root": root}
        return json.dumps(signed | {"heads": [[head.node_id, head.seq, head.hash] for head in heads]}, indent=1)

    def _signed(self, schema: str, values: object, at_unix: int | None) -> dict[str, Any]:
        at = int(time.time()) if at_unix is None else at_unix
        signature = self._key.sign(_message(schema, values, at)).hex()
        return {"schema": schema, "signed_at": at, "public_key": self.public, "signature": signature}

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


@dataclass(frozen=True, slots=True)
class Anchor:
    """What a ledger held when it was anchored, and a signature that holds. ``signed_at`` is in unix seconds."""

    heads: tuple[Head, ...]
    root: str
    signed_at: int
    public_key: str


def verify_report(text: str | bytes, public_key: str) -> SignedReport:
    """Return a signed report if it is signed by *public_key* (64 hex digits) and unchanged.

    Raises ``ConfigError`` if it is not. The key has to come from who signed, not from the file.
    """
    _check_key(public_key)
    found = _Document("report", text)
    found.check(SIGNED_SCHEMA, {"report"}, written_by="x402guard report --sign")
    report = found.values["report"]
    if not isinstance(report, dict) or report.get("schema") != REPORT_SCHEMA:
        raise ConfigError(f"signed report: what it holds is no {REPORT_SCHEMA}, which this version reads")
    found.check_signature(public_key, report)
    return SignedReport(Report(report), found.values["signed_at"], public_key.lower())


def verify_anchor(text: str | bytes, public_key: str) -> Anchor:
    """Return an anchor if it is signed by *public_key* (64 hex digits) and unchanged; ``Owner.verify`` compares it.

    Raises ``ConfigError`` if it is not. The key has to come from who signed, not from the file.
    """
    _check_key(public_key)
    found = _Document("anchor", text)
    found.check(ANCHOR_SCHEMA, {"root", "heads"}, written_by="x402guard verify --anchor")
    rows = found.values["heads"]
    if not isinstance(rows, list) or not all(_is_head(row) for row in rows):
        raise ConfigError("signed anchor: its heads are no list of [id, number, hash]")
    anchor = tuple(Head(*row) for row in rows)
    root = merkle_root(anchor)
    if root != found.values["root"]:
        raise ConfigError(
            "signed anchor: its root is not that of its heads: the anchor was changed after it was signed"
        )
    found.check_signature(public_key, root)
    return Anchor(anchor, root, found.values["signed_at"], public_key.lower())


def _check_key(public_key: object) -> None:
    if not isinstance(public_key, str) or len(public_key) != 64 or not _is_hex(public_key):
        raise ConfigError(
            f"public key: {public_key!r:.80} is not 64 hex digits, as `x402guard keys report` prints them"
        )
    if _has_small_order(bytes.fromhex(public_key)):
        raise ConfigError(
            f"public key: {public_key} is of small order: it fits signatures that nobody made. Ask who signs for another key"
        )


def _has_small_order(key: bytes) -> bool:
    """True for a point of order 1, 2, 4 or 8 (RFC 8032, section 5.1), however its y is written.

    y is 1 and -1 for orders 1 and 2, and 0 for order 4. Twice a point of order 8 has y = 0, so there x² = -y², and the
    curve's -x² + y² = 1 + dx²y² becomes dy⁴ + 2y² - 1 = 0.
    """
    d = -121665 * pow(121666, -1, _P) % _P
    y = (int.from_bytes(key, "little") & (2**255 - 1)) % _P
    return y in (0, 1, _P - 1) or (d * y**4 + 2 * y**2 - 1) % _P == 0


class _Document:
    """A signed document that is read and checked. *what* it is stands in each error."""

    def __init__(self, what: str, text: str | bytes) -> None:
        self._what = what
        if len(text) > _MOST_BYTES:
            raise self._wrong(f"it has more than {_MOST_BYTES:,} bytes")
        try:
            found = read_json(text)
        except NotReadable as error:
            raise self._wrong(f"it cannot be read: {error}") from None
        self.values: dict[str, Any] = found if isinstance(found, dict) else {}

    def check(self, schema: str, holds: Collection[str], *, written_by: str) -> None:
        """Raise ``ConfigError`` unless it is a whole document of this schema."""
        found = self.values
        if found.get("schema") == REPORT_SCHEMA:
            raise self._wrong("this is a report without a signature; sign it with `x402guard report --sign`")
        if found.get("schema") != schema or set(found) != _SIGNED | set(holds):
            raise self._wrong(f"it is no {schema}, which `{written_by}` writes")
        signature = found["signature"]
        if type(found["signed_at"]) is not int or not isinstance(signature, str) or not _is_hex(signature):
            raise self._wrong("signed_at or signature is of the wrong type")

    def check_signature(self, public_key: str, values: object) -> None:
        """Raise ``ConfigError`` unless *public_key* has signed *values*."""
        found = self.values
        if str(found["public_key"]).lower() != public_key.lower():
            raise self._wrong(f"it is signed by {str(found['public_key'])[:64]}, not by {public_key.lower()}")
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        signature, message = bytes.fromhex(found["signature"]), _message(found["schema"], values, found["signed_at"])
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(signature, message)
        except (InvalidSignature, ValueError):
            raise self._wrong(f"the signature does not fit: the {self._what} was changed after it was signed") from None

    def _wrong(self, words: str) -> ConfigError:
        return ConfigError(f"signed {self._what}: {words}")


def _is_head(row: object) -> bool:
    return isinstance(row, list) and [type(value) for value in row] == [str, int, str]


def _is_hex(text: str) -> bool:
    return len(text) % 2 == 0 and all(digit in "0123456789abcdefABCDEF" for digit in text)


def _message(schema: str, values: object, at: int) -> bytes:
    # Sorted and compact: the signature does not depend on how the file is laid out.
    body = json.dumps([at, values], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{schema}\n{body}".encode("ascii")

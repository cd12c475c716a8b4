"""Tokens for a session of a ledger: signed (Ed25519, RFC 8032), with an end, and worth nothing at another ledger.

Each token has a key of its own, which signs it and is forgotten. The ledger keeps the public part, so that who can read
the ledger cannot make a token. The text has no secret but the signature, and is as good as the session: give it to the
worker alone.
"""

from __future__ import annotations

import binascii
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.flow.surroundings import here
from x402guard.strict_json import NotReadable, read_object

_PREFIX: Final = "x402g1."
_MOST_CHARS: Final = 20_000
_FIELDS: Final = {"ledger", "session", "until"}


class Token(Struct, frozen=True):
    """A token that was read, and not checked yet.

    Attributes:
        ledger: the id of the ledger that knows it.
        session: the id of the session that it opens.
        until_unix: when it ends, in unix seconds.
        signed: the bytes that are signed.
        signature: 64 bytes.
    """

    ledger: str
    session: str
    until_unix: int
    signed: bytes
    signature: bytes

    def __repr__(self) -> str:
        return f"Token(session={self.session!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("session", self.session)]

    def is_signed_by(self, keys: Iterable[str]) -> bool:
        """True if one of the public keys (hex) has signed it."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        for key in keys:
            try:
                Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(self.signature, self.signed)
            except (InvalidSignature, ValueError):
                continue
            return True
        return False


class TokenKey:
    """A key that signs one token. ``public`` (hex) is what the ledger keeps."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(here().random_bytes(32))
        self.public = self._key.public_key().public_bytes_raw().hex()

    def token(self, ledger: str, session: str, until_unix: int) -> str:
        """Return a token as text."""
        body = json.dumps({"ledger": ledger, "session": session, "until": until_unix}, separators=(",", ":")).encode()
        return f"{_PREFIX}{_encoded(body)}.{_encoded(self._key.sign(_PREFIX.encode() + body))}"

    def __repr__(self) -> str:
        return f"TokenKey(public={self.public!r})"


def read_token(text: object) -> Token:
    """Return a token that is written as ``TokenKey.token`` writes it. Raises ``ConfigError``, without the text."""
    if not isinstance(text, str) or not text.startswith(_PREFIX) or len(text) > _MOST_CHARS:
        raise ConfigError("token: it is no token of a delegation; give the whole text of `delegation.token`")
    body, _, signature = text.strip().removeprefix(_PREFIX).partition(".")
    try:
        found = read_object(_decoded(body))
        signed, signature_bytes = _PREFIX.encode() + _decoded(body), _decoded(signature)
    except (NotReadable, ValueError, binascii.Error):
        found, signed, signature_bytes = {}, b"", b""
    session, ledger, until = found.get("session"), found.get("ledger"), found.get("until")
    names = isinstance(session, str) and isinstance(ledger, str) and session.isascii() and session.isprintable()
    if set(found) != _FIELDS or not names or type(until) is not int:
        raise ConfigError("token: it is damaged; give the whole text of `delegation.token`")
    return Token(str(ledger), str(session), until, signed, signature_bytes)


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))

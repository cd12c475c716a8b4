"""The only code that sees a key."""

from __future__ import annotations

import hmac
import json
import threading
from dataclasses import replace
from typing import Any, Final, NoReturn

import coincurve
from eth_hash.auto import keccak

from x402guard.errors import ConfigError, LedgerUnavailable, SignerError
from x402guard.evm import _ORDER, Address, checksum_address, normalise_signature
from x402guard.flow.ports import HoldLookup
from x402guard.ledger.model import Hold, HoldState
from x402guard.x402.schemes import typed_data
from x402guard.x402.schemes.cancellation import cancellation_data

_KEY_BYTES: Final = 32


class LocalSigner:
    """Signs with a key in this process's memory. It shows its address and nothing else: no repr, pickle or copy of the key.

    A signer is bound to one ledger by ``Guard`` and from then on signs only holds that stand live in it.
    """

    __slots__ = ("_address", "_key", "_lock", "_lookup")

    inline: Final = True

    def __init__(self, key: object) -> None:
        if not isinstance(key, coincurve.PrivateKey):
            del key
            raise ConfigError("LocalSigner: write LocalSigner.from_key(…) for a key in bytes or hex")
        self._key = key
        self._address = checksum_address(keccak(key.public_key.format(compressed=False)[1:])[12:])
        self._lookup: HoldLookup | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_key(cls, key: str | bytes) -> LocalSigner:
        """Return a signer for a private key of 32 bytes, or as hex with or without ``0x``.

        Raises ``ConfigError`` for anything else; the message never repeats what was given.
        """
        parsed = _parse_key(key)
        del key  # a traceback with local variables must not show even a mistyped one
        if parsed is None:
            raise ConfigError("private key: 32 bytes are needed, as hex with or without 0x")
        return cls(parsed)

    @property
    def address(self) -> Address:
        """The account that pays."""
        return self._address

    def bind(self, lookup: HoldLookup) -> None:
        """Tie the signer to the ledger whose holds it may sign, for good."""
        with self._lock:
            if self._lookup is not None and self._lookup != lookup:
                raise SignerError("this signer is bound to another ledger already; give each Guard a signer of its own")
            self._lookup = lookup

    def sign(self, hold: Hold) -> bytes:
        """Return the signature of a committed, live hold. Raises ``SignerError`` for anything else, having signed nothing."""
        return self._signed(_checked_digest(self._live(hold), self._address))

    def sign_cancellation(self, hold: Hold) -> bytes:
        """Return the signature of the ``CancelAuthorization`` of a committed, live EIP-3009 hold (EIP-3009, cancelAuthorization).

        Raises ``SignerError`` for anything else, having signed nothing.
        """
        row = self._live(hold)
        _checked_digest(row, self._address)  # nothing is cancelled but what could be signed
        if row.payment().method != "eip3009":
            raise SignerError(f"hold {row.id} is paid by {row.payment().method}, which no signature cancels")
        return self._signed(cancellation_data(row.payment()).digest())

    def _live(self, hold: Hold) -> Hold:
        """Return the hold's row as committed, which has to be what was shown, and live."""
        if self._lookup is None:
            raise SignerError("this signer is bound to no ledger; it signs nothing that is not first in one")
        try:
            row = self._lookup(hold.id) if isinstance(hold, Hold) else None
        except LedgerUnavailable as error:
            raise SignerError(f"the ledger cannot be read, and nothing is signed that is not in it: {error}") from error
        if row is None or row.intent is None:
            raise SignerError("there is no such payment in the ledger; nothing is signed that is not first in it")
        if _as_authorized(row) != _as_authorized(hold) or row.state is not HoldState.HELD:
            raise SignerError(f"hold {row.id} is {row.state} in the ledger and not what was shown to the signer")
        return row

    def _signed(self, digest: bytes) -> bytes:
        return normalise_signature(self._key.sign_recoverable(digest, hasher=None))

    def __repr__(self) -> str:
        return f"LocalSigner({self._address})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signer is never pickled or copied: it holds a key")


def _parse_key(key: str | bytes) -> coincurve.PrivateKey | None:
    """Return the key, or None for what is none; never an exception, whose traceback would hold the text."""
    try:
        raw = bytes.fromhex(key.strip().removeprefix("0x").removeprefix("0X")) if isinstance(key, str) else key
        in_range = isinstance(raw, bytes) and len(raw) == _KEY_BYTES and 0 < int.from_bytes(raw, "big") < _ORDER
        return coincurve.PrivateKey(raw) if in_range else None
    except ValueError:
        return None


def _as_authorized(hold: Hold) -> Hold:
    """The hold without what may change while its request is out: a doubt, a claim, when the chain was asked, and whether it can be."""
    return replace(hold, checked_ms=0, doubt=None, claim=None, chain_evidence=False)


def _checked_digest(hold: Hold, address: Address) -> bytes:
    """Recompute the digest from the hold's row, and compare every term with what the server offered and we held."""
    intent = hold.payment()
    offered: dict[str, Any] = json.loads(intent.accepted_json)
    amount = offered.get("maxAmountRequired" if intent.version == 1 else "amount")
    compared = {
        "payer": (intent.payer, address),
        "payee": (intent.payee.lower(), str(offered.get("payTo")).lower()),
        "token": (intent.token.lower(), str(offered.get("asset")).lower()),
        "amount": (str(intent.amount_atomic), str(amount).lstrip("0")),
        "network": (intent.network_as_offered, offered.get("network")),
        "deadline": (intent.valid_until, hold.deadline_unix),
        "nonce": (f"{intent.nonce:064x}", hold.id),
    }
    for name, (ours, theirs) in compared.items():
        if ours != theirs:
            raise SignerError(f"hold {hold.id}: {name} is {ours} in the payment and {theirs} in the hold or its offer")
    digest = typed_data(intent).digest()
    if not hmac.compare_digest(digest.hex(), intent.digest):
        raise SignerError(f"hold {hold.id}: the recomputed digest is not the one that was authorized")
    return digest

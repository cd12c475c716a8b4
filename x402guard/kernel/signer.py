"""Signs what is committed. This is the only code with a private key, and it signs three things alone.

A payment whose hold is in the ledger, the cancellation of one, and the allowance of Permit2. No function takes a digest.
"""

from __future__ import annotations

import json
import threading
from operator import attrgetter
from typing import Any, Final, NoReturn, Protocol

import coincurve
from msgspec import Struct

from x402guard.errors import ConfigError, LedgerUnavailable, SignerError
from x402guard.kernel.evm import ORDER, Address, checksum_address, keccak, normalise_signature
from x402guard.kernel.intent import Intent, Terms
from x402guard.kernel.rows import HOLD_FIXED, Delivery, Hold, HoldState
from x402guard.kernel.typed_data import PERMIT2, cancellation_digest, digest


class Signable(Protocol):
    """What the kernel's signer is bound to: it reads committed rows, and keeps which payments were given out."""

    def __call__(self, hold_id: str) -> Hold | None:
        """Return a committed hold. Raises ``SignerError`` for a payment that may not be signed."""

    def give(self, row: Hold) -> bool:
        """Note that a payment is signed; True if it is new. Raises ``SignerError`` if it may not be signed here."""


class AllowanceTerms(Struct, frozen=True):
    """The terms of a transaction (EIP-1559) that sets Permit2's allowance of one token, in its atomic units.

    ``account_nonce`` is the wallet's next transaction number.
    """

    chain_id: int
    token: Address
    amount_atomic: int
    account_nonce: int
    gas: int
    max_fee_wei: int
    tip_wei: int

    def data(self) -> bytes:
        """Return the calldata: ERC-20 ``approve(Permit2, amount)``."""
        return _APPROVE + bytes.fromhex(PERMIT2[2:]).rjust(32, b"\0") + self.amount_atomic.to_bytes(32, "big")

    def fields(self) -> tuple[_Rlp, ...]:
        """Return the fields of the transaction (EIP-1559, in its order). It carries no value and no access list."""
        fees, token = (self.tip_wei, self.max_fee_wei, self.gas), bytes.fromhex(self.token[2:])
        return (self.chain_id, self.account_nonce, *fees, token, 0, self.data(), ())


_APPROVE: Final = bytes.fromhex("095ea7b3")  # approve(address,uint256)

_Rlp = int | bytes | tuple["_Rlp", ...]


class KeySigner:
    """Signs with a key in this process's memory. It exposes only its address: it cannot be pickled or copied.

    ``Guard`` binds a signer to one ledger. From then on it signs only holds that are live in that ledger.
    """

    __slots__ = ("_address", "_key", "_lock", "_lookup")

    inline: Final = True

    def __init__(self, secret: bytes) -> None:
        if type(secret) is not bytes or len(secret) != 32 or not 0 < int.from_bytes(secret, "big") < ORDER:
            del secret  # a traceback with local variables must not show even an invalid key
            raise ConfigError("LocalSigner: use LocalSigner.from_key(…) for a key in bytes or hex")
        self._key = coincurve.PrivateKey(secret)
        del secret
        self._address = checksum_address(keccak(self._key.public_key.format(compressed=False)[1:])[12:])
        self._lookup: Signable | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> Address:
        """The account that pays."""
        return self._address

    def bind(self, lookup: Signable) -> None:
        """Bind the signer permanently to the ledger whose holds it may sign."""
        with self._lock:
            if self._lookup is not None and self._lookup != lookup:
                raise SignerError("this signer is bound to another ledger; give each Guard its own signer")
            self._lookup = lookup

    def sign(self, hold: Hold) -> bytes:
        """Return the signature of a payment by ``committed``. Signs nothing else: raises ``SignerError``."""
        row = committed(self._lookup, hold, self._address)
        if self._lookup is not None:
            self._lookup.give(row)
        return self._signed(digest(row.payment()))

    def sign_cancellation(self, hold: Hold) -> bytes:
        """Return the signature of the ``CancelAuthorization`` (EIP-3009) of an EIP-3009 payment, by ``committed``.

        Signs nothing and raises ``SignerError`` for anything else.
        """
        row = committed(self._lookup, hold, self._address)  # the same checks as for the payment
        if row.payment().method != "eip3009":
            raise SignerError(f"hold {row.id} is paid by {row.payment().method}, which a signature cannot cancel")
        return self._signed(cancellation_digest(row.payment()))

    def sign_allowance(self, terms: AllowanceTerms) -> bytes:
        """Return a signed transaction (EIP-1559) that sets what Permit2 may move of one token. It can do nothing else."""
        fields = terms.fields()
        signature = self._key.sign_recoverable(keccak(_TYPE_2 + rlp(fields)), hasher=None)
        r, s, parity = int.from_bytes(signature[:32]), int.from_bytes(signature[32:64]), signature[64]
        return _TYPE_2 + rlp((*fields, parity, r, s))

    def _signed(self, digest: bytes) -> bytes:
        return normalise_signature(self._key.sign_recoverable(digest, hasher=None))

    def __repr__(self) -> str:
        return f"LocalSigner({self._address})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signer cannot be pickled or copied: it holds a key")


_TYPE_2: Final = b"\x02"  # EIP-2718


def rlp(value: _Rlp) -> bytes:
    """Return the RLP encoding of a whole number, bytes, or a list of them. Source: Ethereum yellow paper, appendix B."""
    if isinstance(value, tuple):
        return _with_length(b"".join(map(rlp, value)), 0xC0)
    raw = value.to_bytes(-(-value.bit_length() // 8), "big") if isinstance(value, int) else value
    return raw if len(raw) == 1 and raw[0] < 0x80 else _with_length(raw, 0x80)


def _with_length(raw: bytes, offset: int) -> bytes:
    if len(raw) < 56:
        return bytes([offset + len(raw)]) + raw
    length = len(raw).to_bytes(-(-len(raw).bit_length() // 8), "big")
    return bytes([offset + 55 + len(length)]) + length + raw


_DECODED: Final = json.loads  # it reads half an emoji, which a seller may have written, too
_as_authorized: Final = attrgetter("id", *HOLD_FIXED, "flying_since_ms", "instance", "presented")
"""What does not change of a hold while its request is in flight."""


def may_be_signed(row: Hold) -> bool:
    """True for a payment that is live, or captured and presented again: the same nonce can be taken only once."""
    again = row.state is HoldState.CAPTURED and row.presented > 0 and row.delivery in (Delivery.OPEN, Delivery.LOST)
    return row.state is HoldState.HELD or again


def committed(lookup: Signable | None, hold: Hold, address: Address) -> Hold:
    """Return the row of a payment that may be signed: committed, live or presented again, equal to *hold* and its offer.

    The digest is recomputed from the row. Raises ``SignerError`` for anything else.
    """
    if lookup is None:
        raise SignerError("this signer is not bound to a ledger; it signs only payments that are in one")
    try:
        row = lookup(hold.id) if isinstance(hold, Hold) else None
    except LedgerUnavailable as error:
        raise SignerError(f"the ledger cannot be read, and only payments in it are signed: {error}") from error
    if row is None or row.intent is None:
        raise SignerError("the payment is not in the ledger, and only payments in it are signed")
    if _as_authorized(row) != _as_authorized(hold) or not may_be_signed(row):
        raise SignerError(f"hold {row.id} is {row.state} in the ledger, or differs from the hold given to the signer")
    intent = row.intent
    compared = {
        "payer": (intent.payer.lower(), address.lower()),
        "terms": (intent.terms, offered_terms(intent)),
        "deadline": (intent.valid_until, row.deadline_unix),
        "nonce": (f"{intent.nonce:064x}", row.id),
        "digest": (intent.digest, digest(intent).hex()),
    }
    for name, (ours, theirs) in compared.items():
        if ours != theirs:
            raise SignerError(f"hold {row.id}: {name} is {ours} in the payment, but {theirs} in the hold or its offer")
    return row


def offered_terms(intent: Intent) -> Terms:
    """Return the terms of the offer that a payment echoes, read again; what an offer leaves to its token is the payment's.

    An offer names a network of its version, and addresses in any case. Raises ``SignerError`` for one without terms.
    """
    try:
        said: dict[str, Any] = _DECODED(intent.accepted_json)
        scheme, method = said["scheme"], (said.get("extra") or {}).get("assetTransferMethod") or intent.method
        network = {intent.network_as_offered: intent.network}[said["network"]]
        token, payee = (checksum_address(bytes.fromhex(said[name][2:])) for name in ("asset", "payTo"))
        amount = int(str(said["maxAmountRequired" if intent.version == 1 else "amount"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SignerError(f"hold {intent.nonce:064x}: its offer has another network, or no terms") from error
    return Terms(intent.version, scheme, method, network, token, amount, payee)

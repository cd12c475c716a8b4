"""Signs payments. This is the only code with access to a private key."""

from __future__ import annotations

import hmac
import stat
import threading
from pathlib import Path
from typing import Any, Final, NoReturn, TypeGuard

import coincurve
from msgspec import Struct
from msgspec.json import Decoder
from msgspec.structs import replace

from x402guard.errors import ConfigError, LedgerUnavailable, SignerError
from x402guard.evm import Address, normalise_signature, parse_address
from x402guard.flow.ports import HoldLookup, Signer
from x402guard.flow.sealed import forgetting
from x402guard.ledger.model import NOTHING, Delivery, Hold, HoldState
from x402guard.x402.keys import address_of, keystore_address, parse_key, read_keystore
from x402guard.x402.schemes import typed_data
from x402guard.x402.schemes.cancellation import cancellation_data
from x402guard.x402.schemes.scheme import PERMIT2

_MOST_BYTES: Final = 65_536


class AllowanceTerms(Struct, frozen=True):
    """The terms of a transaction that sets Permit2's allowance of one token.

    Attributes:
        chain_id: of the network.
        token: the token's contract.
        amount_atomic: the allowance, in the token's atomic units.
        account_nonce: the wallet's next transaction number.
        gas, max_fee_wei, tip_wei: as in EIP-1559.
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


_APPROVE: Final = bytes.fromhex("095ea7b3")  # approve(address,uint256)


class LocalSigner:
    """Signs with a key in this process's memory. It exposes only its address: it cannot be pickled or copied.

    ``Guard`` binds a signer to one ledger. From then on it signs only holds that are live in that ledger.
    """

    __slots__ = ("_address", "_key", "_lock", "_lookup")

    inline: Final = True

    def __init__(self, key: object) -> None:
        if not isinstance(key, coincurve.PrivateKey):
            del key
            raise ConfigError("LocalSigner: use LocalSigner.from_key(…) for a key in bytes or hex")
        self._key = key
        self._address = address_of(key)
        self._lookup: HoldLookup | None = None
        self._lock = threading.Lock()

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

    @property
    def address(self) -> Address:
        """The account that pays."""
        return self._address

    def bind(self, lookup: HoldLookup) -> None:
        """Bind the signer permanently to the ledger whose holds it may sign."""
        with self._lock:
            if self._lookup is not None and self._lookup != lookup:
                raise SignerError("this signer is bound to another ledger; give each Guard its own signer")
            self._lookup = lookup

    def sign(self, hold: Hold) -> bytes:
        """Return the signature of a committed, live hold. Signs nothing else: raises ``SignerError``."""
        return self._signed(_checked_digest(self._live(hold), self._address))

    def sign_cancellation(self, hold: Hold) -> bytes:
        """Return the signature of the ``CancelAuthorization`` (EIP-3009) of a committed, live EIP-3009 hold.

        Signs nothing and raises ``SignerError`` for anything else.
        """
        row = self._live(hold)
        _checked_digest(row, self._address)  # the same checks as for the payment
        if row.payment().method != "eip3009":
            raise SignerError(f"hold {row.id} is paid by {row.payment().method}, which a signature cannot cancel")
        return self._signed(cancellation_data(row.payment()).digest())

    def sign_allowance(self, terms: AllowanceTerms) -> bytes:
        """Return a signed transaction (EIP-1559) that sets what Permit2 may move of one token. It can do nothing else."""
        from eth_account import Account  # takes a second to load

        fields = {
            "type": 2,
            "chainId": terms.chain_id,
            "nonce": terms.account_nonce,
            "to": terms.token,
            "value": 0,
            "data": terms.data(),
            "gas": terms.gas,
            "maxFeePerGas": terms.max_fee_wei,
            "maxPriorityFeePerGas": terms.tip_wei,
        }
        with forgetting():
            return bytes(Account.sign_transaction(fields, self._key.secret).raw_transaction)

    def _live(self, hold: Hold) -> Hold:
        """Return the hold's committed row. Raises ``SignerError`` unless it is live and equal to *hold*."""
        if self._lookup is None:
            raise SignerError("this signer is not bound to a ledger; it signs only payments that are in one")
        try:
            row = self._lookup(hold.id) if isinstance(hold, Hold) else None
        except LedgerUnavailable as error:
            raise SignerError(f"the ledger cannot be read, and only payments in it are signed: {error}") from error
        if row is None or row.intent is None:
            raise SignerError("the payment is not in the ledger, and only payments in it are signed")
        # A captured payment is signed again only while it is presented again: the same nonce can be taken only once.
        again = row.state is HoldState.CAPTURED and row.presented > 0 and row.delivery in (Delivery.OPEN, Delivery.LOST)
        if _as_authorized(row) != _as_authorized(hold) or not (row.state is HoldState.HELD or again):
            raise SignerError(
                f"hold {row.id} is {row.state} in the ledger, or differs from the hold given to the signer"
            )
        return row

    def _signed(self, digest: bytes) -> bytes:
        return normalise_signature(self._key.sign_recoverable(digest, hasher=None))

    def __repr__(self) -> str:
        return f"LocalSigner({self._address})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signer cannot be pickled or copied: it holds a key")


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


_DECODED: Final = Decoder().decode


def _as_authorized(hold: Hold) -> Hold:
    """Return the hold without the fields that may change while its request is in flight."""
    return replace(
        hold,
        checked_ms=0,
        doubt=None,
        claim=None,
        chain_evidence=False,
        state=HoldState.HELD,
        captured=NOTHING,
        evidence=None,
        proof=None,
        ended_by=None,
        closed_ms=0,
        delivery=Delivery.OPEN,
    )


def _checked_digest(hold: Hold, address: Address) -> bytes:
    """Recompute the digest from the hold's row, and compare every term with the server's offer and the hold."""
    intent = hold.payment()
    offered: dict[str, Any] = _DECODED(intent.accepted_json)
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
            raise SignerError(f"hold {hold.id}: {name} is {ours} in the payment, but {theirs} in the hold or its offer")
    digest = typed_data(intent).digest()
    if not hmac.compare_digest(digest.hex(), intent.digest):
        raise SignerError(f"hold {hold.id}: the recomputed digest is not the one that was authorized")
    return digest

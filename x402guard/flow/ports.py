"""What the core asks of the world: the protocols that the shell implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from x402guard.evm import Address
from x402guard.ledger.evidence import Finding, Unreadable
from x402guard.ledger.model import Hold

HoldLookup = Callable[[str], Hold | None]
"""Reads one hold, as committed, by its id."""


class Slot(Protocol):
    """A slot of a bulkhead: one call under way at a host or tool."""

    def leave(self) -> None:
        """Release it to the next call that waits. Leaving twice is fine."""


class Signer(Protocol):
    """The key. It signs nothing but a committed hold, and is shown no bare message."""

    @property
    def address(self) -> Address:
        """The account that pays."""

    @property
    def inline(self) -> bool:
        """True where signing takes well under a millisecond and asks nobody."""

    def bind(self, lookup: HoldLookup) -> None:
        """Tie the signer to the ledger whose holds it may sign. Raises ``SignerError`` where it is tied to another."""

    def sign_cancellation(self, hold: Hold) -> bytes:
        """Return the 65-byte signature of the ``CancelAuthorization`` of a live EIP-3009 hold, read and checked as in ``sign``.

        Raises ``SignerError`` for any other hold.
        """

    def sign(self, hold: Hold) -> bytes:
        """Return the 65-byte signature of a hold's payment.

        The signer reads the hold's row itself, recomputes everything it is about to sign, and compares. Raises
        ``SignerError`` for a definite no. Any other exception means that a signature may exist somewhere.
        """


@dataclass(frozen=True, slots=True)
class Funds:
    """What an account could pay with: balance, and allowance for Permit2, both in the token's atomic units."""

    balance: int
    permit2_allowance: int


class ChainReader(Protocol):
    """Reads what happened to a payment. Never raises for a chain that is out of reach: that is an answer."""

    @property
    def networks(self) -> frozenset[str]:
        """The networks (CAIP-2) that can be read."""

    def read(self, hold: Hold) -> Finding:
        """Return what the chain shows of a payment hold; ``Unreadable`` where it cannot be read."""

    def funds(self, network: str, token: Address, owner: Address) -> Funds | None:
        """Return what *owner* could pay with, possibly some seconds old, or None where it cannot be read.

        Raises ``ConfigError`` where what is configured for the network serves another one.
        """

    def close(self) -> None:
        """Release connections. Closing twice is fine."""


@dataclass(frozen=True, slots=True)
class OutgoingTransfer:
    """A Transfer that left the wallet, in a block that cannot be undone.

    Attributes:
        transaction, log_index: where.
        payee: whom it went to.
        amount_atomic: in the token's atomic units.
    """

    transaction: str
    log_index: int
    payee: Address
    amount_atomic: int


@dataclass(frozen=True, slots=True)
class Transfers:
    """The Transfers of one token that left the wallet, up to a block.

    Attributes:
        upto: the number of the last block that was looked at.
        outgoing: in order.
        complete: True where that is the last final block; False where there was too much to look at.
    """

    upto: int
    outgoing: tuple[OutgoingTransfer, ...]
    complete: bool


@runtime_checkable
class WalletReader(Protocol):
    """A ``ChainReader`` that can also say what left the wallet, so that the books can be compared with it."""

    def transfers(
        self, network: str, token: Address, payer: Address, *, after: int | None, since_unix: int
    ) -> Transfers | Unreadable:
        """Return what left *payer* after the block *after*, or since *since_unix* (unix seconds) where that is None."""

    def nonce_behind(
        self, network: str, token: Address, payer: Address, transfer: OutgoingTransfer
    ) -> int | Unreadable | None:
        """Return the nonce of the authorization that moved *transfer*, or None where the chain does not show one."""


@dataclass(frozen=True, slots=True)
class HoldStatus:
    """What does the chain show of a payment hold? Answered by a ``Finding``."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class AccountFunds:
    """What could an account pay with? Answered by ``Funds``, or None where it is unknown."""

    network: str
    token: Address
    account: Address


@dataclass(frozen=True, slots=True)
class WalletTransfers:
    """What left the wallet? See ``WalletReader.transfers``. Answered by ``Transfers`` or ``Unreadable``."""

    network: str
    token: Address
    payer: Address
    after: int | None
    since_unix: int


@dataclass(frozen=True, slots=True)
class TransferNonce:
    """Which nonce moved a Transfer? See ``WalletReader.nonce_behind``. Answered by it, None or ``Unreadable``."""

    network: str
    token: Address
    payer: Address
    transfer: OutgoingTransfer


ChainQuestion = HoldStatus | AccountFunds | WalletTransfers | TransferNonce


Usage = Mapping[str, int]
"""What a call used: unit → count, none negative. The units are those of the price book: ``input_tokens`` (all of them, cached
ones too), ``output_tokens`` (all, reasoning too), and parts of these: ``cache_read_tokens``, ``cache_write_tokens``,
``input_audio_tokens``, ``output_reasoning_tokens``, ``web_searches`` …"""

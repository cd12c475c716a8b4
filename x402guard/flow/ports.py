"""The protocols that the core needs from outside; the adapters implement them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from msgspec import Struct

from x402guard.kernel.evm import Address
from x402guard.kernel.ledger import Signs
from x402guard.kernel.rows import Hold
from x402guard.kernel.signer import Signable
from x402guard.ledger.findings import Finding, Unreadable


class Slot(Protocol):
    """A slot of a bulkhead: one call under way at a host or tool. ``waited_s``: how long its call waited for it."""

    waited_s: float

    def leave(self) -> None:
        """Release it to the next call that waits. May be called twice."""

    def follow(self, is_lost: Callable[[], bool], most_s: float) -> None:
        """Let a call that waits take it as soon as *is_lost* says so, or after *most_s* seconds."""


class Signer(Signs, Protocol):
    """The key. It signs only a committed hold, and never sees a bare message.

    Its ``sign`` reads the hold's row itself, recomputes everything that it signs, and compares. It raises ``SignerError``
    for a definite no. Any other exception means that a signature may exist somewhere.
    """

    @property
    def inline(self) -> bool:
        """True if signing takes well under a millisecond and needs no other process or device."""

    def bind(self, lookup: Signable) -> None:
        """Tie the signer to the ledger whose holds it may sign. Raises ``SignerError`` if it is tied to another."""

    def sign_cancellation(self, hold: Hold) -> bytes:
        """Return the 65-byte signature of the ``CancelAuthorization`` of a live EIP-3009 hold, checked as in ``sign``.

        Raises ``SignerError`` for any other hold.
        """


class Funds(Struct, frozen=True):
    """What an account can pay with: its balance and its Permit2 allowance, in the token's atomic units."""

    balance: int
    permit2_allowance: int


class TokenSays(Struct, frozen=True):
    """What the contract of a token says: its decimals, and its EIP-712 domain separator, 32 bytes.

    The separator is None if it has none, or was not asked for one.
    """

    decimals: int
    separator: bytes | None


class ChainReader(Protocol):
    """Reads what happened to a payment. An unreachable chain is an answer, never an exception."""

    @property
    def networks(self) -> frozenset[str]:
        """The networks (CAIP-2) that can be read."""

    def read(self, hold: Hold) -> Finding:
        """Return what the chain shows of a payment hold; ``Unreadable`` if it cannot be read."""

    def funds(self, network: str, token: Address, owner: Address) -> Funds | None:
        """Return what *owner* can pay with, possibly some seconds old, or None if it cannot be read.

        Raises ``ConfigError`` if the endpoint of the network serves another network.
        """

    def close(self) -> None:
        """Release connections. May be called twice."""


class OutgoingTransfer(Struct, frozen=True):
    """A Transfer that left the wallet, in a final block.

    Attributes:
        transaction, log_index: where it is.
        payee: the address that received it.
        amount_atomic: in the token's atomic units.
        block: its number; 0 if the reader does not say.
    """

    transaction: str
    log_index: int
    payee: Address
    amount_atomic: int
    block: int = 0


class Transfers(Struct, frozen=True):
    """The Transfers of one token that left the wallet, up to a block.

    Attributes:
        upto: the number of the last block that was read.
        outgoing: in order.
        complete: True if that is the last final block; False if there was too much to read.
        upto_unix: the time of the last final block in unix seconds, if it is complete; 0 if that is not known.
    """

    upto: int
    outgoing: tuple[OutgoingTransfer, ...]
    complete: bool
    upto_unix: int = 0


@runtime_checkable
class WalletReader(Protocol):
    """A ``ChainReader`` that also reads what left the wallet, so that the ledger can be compared with it."""

    def transfers(
        self, network: str, token: Address, payer: Address, *, after: int | None, since_unix: int
    ) -> Transfers | Unreadable:
        """Return what left *payer* after the block *after* or, if that is None, since *since_unix* (unix seconds)."""

    def nonce_behind(
        self, network: str, token: Address, payer: Address, transfer: OutgoingTransfer
    ) -> int | Unreadable | None:
        """Return the nonce of the authorization that moved *transfer*, or None if the chain does not show one."""


@runtime_checkable
class TokenReader(Protocol):
    """A ``ChainReader`` that also asks a token's contract what it is. One that does not cannot prove an added token."""

    def token(self, network: str, contract: Address, *, signs: bool) -> TokenSays | None:
        """Return what the contract of a token says, or None if it cannot be read. *signs*: with its domain separator."""


@runtime_checkable
class HeadReader(Protocol):
    """A ``ChainReader`` that also reads the time of the latest block."""

    @property
    def networks(self) -> frozenset[str]:
        """The networks (CAIP-2) that can be read."""

    def head_unix(self, network: str) -> int | None:
        """Return the time of a network's latest block in unix seconds, or None if it cannot be read."""


class HoldStatus(Struct, frozen=True):
    """What does the chain show of a payment hold? Answered by a ``Finding``."""

    hold: Hold


class AccountFunds(Struct, frozen=True):
    """What can an account pay with? Answered by ``Funds``, or None if unknown."""

    network: str
    token: Address
    account: Address


class TokenFacts(Struct, frozen=True):
    """What does the contract of a token say? Answered by ``TokenSays``, or None if it cannot be read.

    *signs*: a signature moves the token itself, so it has a domain separator.
    """

    network: str
    token: Address
    signs: bool


class HeadTime(Struct, frozen=True):
    """When was the newest block of a network made? Answered in unix seconds, or by None if it cannot be read."""

    network: str


class WalletTransfers(Struct, frozen=True):
    """What left the wallet? See ``WalletReader.transfers``. Answered by ``Transfers`` or ``Unreadable``."""

    network: str
    token: Address
    payer: Address
    after: int | None
    since_unix: int


class TransferNonce(Struct, frozen=True):
    """Which nonce moved a Transfer? See ``WalletReader.nonce_behind``. Answered by it, None or ``Unreadable``."""

    network: str
    token: Address
    payer: Address
    transfer: OutgoingTransfer


ChainQuestion = HoldStatus | AccountFunds | TokenFacts | HeadTime | WalletTransfers | TransferNonce


Usage = Mapping[str, int]
"""What a call used: unit → count, none negative. Units as in the price book: ``input_tokens`` (all, cached too),
``output_tokens`` (all, reasoning too), and parts of these: ``cache_read_tokens``, ``cache_write_tokens``,
``input_audio_tokens``, ``output_reasoning_tokens``, ``web_searches`` …"""

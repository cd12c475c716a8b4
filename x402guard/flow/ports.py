"""What the core asks of the world: the protocols that the shell implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol, TypeVar, runtime_checkable

from x402guard.evm import Address
from x402guard.ledger.evidence import Finding, Unreadable
from x402guard.ledger.model import Entry, Hold, Node
from x402guard.ledger.view import Change, Scope

R = TypeVar("R")

HoldLookup = Callable[[str], Hold | None]
"""Reads one hold, as committed, by its id."""


class LedgerStore(Protocol):
    """Where the books are. All judgement is in the changes it runs, so that no two stores can disagree.

    Every method raises ``LedgerUnavailable`` where the books cannot be read or written.
    """

    @property
    def inline(self) -> bool:
        """True where every call is over in microseconds, so that an event loop may run it without a thread."""

    def transact(self, scope: Scope, change: Change[R]) -> R:
        """Run *change* on the rows of *scope* in one transaction and return its result, durably written.

        The rows are locked and loaded, the store's clock is read, the change runs (again, perhaps, on a fresh view), its
        rows and entries are written, and only then does this return. An exception from the change writes nothing. Raises
        ``IllegalTransition`` for a change that restrains under a scope that is not durable.
        """

    def entries(self, node_id: str) -> Sequence[Entry]:
        """Return the journals of a node and of all below it, each in its order."""

    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """Return every budget node, oldest first; or a node, all below it and all above it."""

    def hold(self, hold_id: str) -> Hold | None:
        """Return one hold as committed, or None."""

    def outstanding(self) -> Sequence[Hold]:
        """Return every hold that is HELD, oldest first."""

    def unsettled(self, now_unix: int) -> Sequence[str]:
        """Return the ids of all payments that a chain may still say something new about, oldest first.

        Those are held ones, captured ones that no final block proves, and proven ones whose signature is good beyond *now_unix*
        (unix seconds): a block may be undone.
        """

    def marks(self, kind: str, prefix: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the small rows of a kind whose key starts with *prefix*, by key."""

    def now_ms(self) -> int:
        """Return the store's clock in unix milliseconds."""

    def close(self) -> None:
        """Release files and connections. Closing twice is fine."""


class Place(Protocol):
    """One of so many places at a host or tool."""

    def leave(self) -> None:
        """Give it to whoever waits. Leaving twice is fine."""


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
class Outgoing:
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
    outgoing: tuple[Outgoing, ...]
    complete: bool


@runtime_checkable
class WalletReader(Protocol):
    """A ``ChainReader`` that can also say what left the wallet, so that the books can be compared with it."""

    def transfers(
        self, network: str, token: Address, payer: Address, *, after: int | None, since_unix: int
    ) -> Transfers | Unreadable:
        """Return what left *payer* after the block *after*, or since *since_unix* (unix seconds) where that is None."""

    def nonce_behind(self, network: str, token: Address, payer: Address, transfer: Outgoing) -> int | Unreadable | None:
        """Return the nonce of the authorization that moved *transfer*, or None where the chain does not show one."""


Usage = Mapping[str, int]
"""What a call used: unit → count, none negative. The units are those of the price book: ``input_tokens`` (all of them, cached
ones too), ``output_tokens`` (all, reasoning too), and parts of these: ``cache_read_tokens``, ``cache_write_tokens``,
``input_audio_tokens``, ``output_reasoning_tokens``, ``web_searches`` …"""


@dataclass(frozen=True, slots=True)
class PricedModel:
    """One model's prices as they stood at one moment: what a price book finds, and is shown again to work out a cost.

    Attributes:
        provider: the provider's id in the book.
        model: the model's id in the book.
        at_unix: the moment, in unix seconds; prices change by date, and some by the hour.
        source, version: where the prices are from, for the ledger.
        context_window: tokens that the model can take, or None where the book does not say.
        units: the units that have a price of their own.
        contexts: the (key, value) pairs that the model has other prices for, such as ``("service_tier", "flex")``.
    """

    provider: str
    model: str
    at_unix: int
    source: str
    version: str
    context_window: int | None
    units: frozenset[str]
    contexts: frozenset[tuple[str, str]] = frozenset()


class PriceBook(Protocol):
    """What models cost, and how providers say what was used. Fetches nothing from a network."""

    def find(self, provider: str, model: str, at_unix: int) -> PricedModel | None:
        """Return the prices of a model at a moment (unix seconds), or None for one that the book does not know.

        Exact names alone: the rules about dated names are not the book's.
        """

    def suggest(self, provider: str, model: str) -> str | None:
        """Return a sentence on what an unknown name may have been meant for, or None."""

    def cost(self, priced: PricedModel, usage: Usage, context: Mapping[str, str]) -> Decimal:
        """Return what *usage* costs in dollars, exact and not rounded.

        *context* chooses other prices out of ``priced.contexts``. Raises ``ValueError`` for counts that contradict each other.
        """

    def extract(self, provider: str, flavour: str, answer: Mapping[str, Any]) -> Usage:
        """Return the usage that a provider's answer states. Raises ``ValueError`` where it states none that can be read."""


class TokenCounter(Protocol):
    """Counts tokens before a call, so that its worst case can be held. Used from several threads at once."""

    def count(self, text: str, *, provider: str, model: str) -> int:
        """Return how many tokens *text* is for a provider's *model*.

        Raises ``LookupError`` for a model whose vocabulary it does not have. Whatever it raises, bytes are counted instead.
        """

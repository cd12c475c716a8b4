"""What the core asks of the world: the protocols that the shell implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from x402guard.evm import Address
from x402guard.ledger.evidence import Finding
from x402guard.ledger.model import Entry, Hold, Node
from x402guard.ledger.view import Change, Scope

__all__ = ["ChainReader", "Funds", "HoldLookup", "LedgerStore", "Signer"]

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

    def marks(self, kind: str, prefix: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the small rows of a kind whose key starts with *prefix*, by key."""

    def now_ms(self) -> int:
        """Return the store's clock in unix milliseconds."""

    def close(self) -> None:
        """Release files and connections. Closing twice is fine."""


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
        """Return what *owner* could pay with, possibly some seconds old, or None where it cannot be read."""

    def close(self) -> None:
        """Release connections. Closing twice is fine."""

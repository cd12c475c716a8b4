"""The port of the ledger's store: four ways to read, one way to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from x402guard.ledger.model import Entry, Hold, Node
from x402guard.ledger.view import Change, Scope

R = TypeVar("R")


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

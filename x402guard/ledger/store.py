"""Defines the port of a ledger store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from x402guard.kernel.change_set import Opened
from x402guard.kernel.ledger import Signs
from x402guard.kernel.rows import Entry, Hold, Node
from x402guard.kernel.signer import Signable
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.view import Change, Scope

R = TypeVar("R")

Outcome = tuple[Any, Exception | None]
"""What a change has returned, and None; or None, and what it has raised: then nothing of it is written."""

GRANTS: Final = ("grant", "return")
"""The entries that only move budget between a node and its parent."""

STEPS: Final = ("authorize", "void")
"""The events of a journal that say which steps were held for, and which of them were never paid."""


class Life(Protocol):
    """What shows that a process lives, until it is closed or the process ends."""

    def close(self, *, ends: bool = False) -> None:
        """Show it no more; *ends*: the process has written that it ends."""


class LedgerReads(Protocol):
    """What can be read of a ledger. Every method raises ``LedgerUnavailable`` if it cannot be read."""

    def entries(self, node_id: str, *, grants: bool = True) -> Sequence[Entry]:
        """Return the journals of a node and its descendants, each in its order.

        Without *grants*, what only moves budget between a node and its parent is left out: it is half of a journal.
        What was moved to files is read there; ``LedgerUnavailable`` names a file that is missing.
        """

    def tail(self, node_id: str, after: int) -> Sequence[Entry]:
        """Return the entries of one node whose number is greater than *after*, in order, but for those in files."""

    def hold(self, hold_id: str) -> Hold | None:
        """Return one hold as committed, or None."""

    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """Return every node, oldest first; with *under*, that node, its descendants and its ancestors.

        Each has drawn exactly what it uses, also where nodes keep idle budget.
        """

    def current(self, newest: int) -> Sequence[Node]:
        """Return every budget that has not ended, the *newest* ones of all, and all above them, oldest first.

        Here and in the next three, those that count tokens are left out.
        """

    def newest(self, most: int, skip: int = 0) -> Sequence[Node]:
        """Return the last *most* budgets, oldest first, after the *skip* newest ones."""

    def named(self, word: str, most: int) -> Sequence[Node]:
        """Return the last *most* budgets whose name or id is *word*, oldest first."""

    def fitting(self, text: str, most: int) -> Sequence[Node]:
        """Return the last *most* budgets whose name or id, or whose parent's name, has *text* in it, and all above them.

        The case of A to Z does not count. More than those may be found where a text is not ASCII.
        """

    def path(self, node_id: str) -> Sequence[Node]:
        """Return a node and its ancestors, the node first; nothing if there is no such node.

        Each has drawn exactly what it uses. It reads no other node, but those that keep idle budget.
        """

    def outstanding(self) -> Sequence[Hold]:
        """Return every hold that is HELD, oldest first."""

    def forgotten(self) -> Mapping[str, tuple[int, int]]:
        """Return how many sessions that have ended a ledger in memory has forgotten below each budget, and what they captured.

        By the id of the budget right above them; in nano-dollars. Other ledgers forget none.
        """

    def tally(self) -> tuple[int, int]:
        """Return how many sessions there have been that are below no other one, and how many holds are live now.

        Neither counts tokens.
        """

    def marks(self, kind: str, prefix: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the marks of a kind whose key starts with *prefix*, by key."""

    def now_ms(self) -> int:
        """Return the store's clock in unix milliseconds."""


@runtime_checkable
class Audited(Protocol):
    """A store that outlives its process, and can be verified."""

    def audit(self, *, archives: bool = True) -> Sequence[str]:
        """Return the inconsistencies of the whole ledger, one sentence each.

        Without *archives*, what was moved to files is not read, but only what the ledger keeps of it.
        """

    def hashes(self, wanted: Collection[tuple[str, int]], *, archives: bool) -> Mapping[tuple[str, int], str]:
        """Return the hashes of entries, by node and number, as far as they are there. *archives*: also of those in files."""

    def steps(self, *, archives: bool) -> Sequence[Entry]:
        """Return the entries with the events ``STEPS`` of all journals, in any order.

        *archives*: also of those in files.
        """

    def size(self) -> tuple[int, int]:
        """Return the number of journal entries, those in files as well, and the number of nodes."""


class KeepsEnds(Protocol):
    """A place beside a ledger for what cannot be written to it. Its methods never raise."""

    @property
    def ends(self) -> Sequence[LateEnd]:
        """The ends of answers that it keeps, in their order."""

    def keep(self, end: LateEnd) -> bool:
        """Keep the end of an answer, so that another process on this machine enters it if this one ends before.

        Returns True if it is on the disk. It may be called again, until it is.
        """

    def written(self, end: LateEnd) -> None:
        """Forget an end, if it is kept: the ledger has it, or can never take it."""


@runtime_checkable
class CheckedInParts(Protocol):
    """A store whose opening checks a part of what it has, if that is much."""

    def check_on(self) -> bool:
        """Check some more, which takes about ten milliseconds. Returns True once nothing is left for now.

        Raises ``LedgerUnavailable`` if the ledger is inconsistent, as an opening does: nothing more is written then.
        """


@runtime_checkable
class SharesCommits(Protocol):
    """A store that can write the changes of several callers in one transaction."""

    def transact_all(self, changes: Sequence[tuple[Scope, Change[Any]]]) -> Sequence[Outcome]:
        """Run changes of several callers, all for this thread, in as few transactions as the ledger allows."""


@runtime_checkable
class ForgetsSessions(Protocol):
    """A store that forgets sessions which have ended."""

    def ask_chains(self, *, asks: bool) -> None:
        """Note whether a guard on it asks a chain about payments. Where none does, none stays for what a chain could say."""


@runtime_checkable
class MayBeAway(Protocol):
    """A store on another machine."""

    @property
    def outbox(self) -> KeepsEnds:
        """What cannot be written while it is away."""

    def here_ms(self) -> int:
        """Return this machine's own time in unix milliseconds; that of the ledger is its server's."""


class LedgerStore(LedgerReads, Protocol):
    """A place that keeps the ledger. All decisions are in the changes it runs, so that two stores cannot disagree.

    Every method raises ``LedgerUnavailable`` if the ledger cannot be read or written.
    """

    @property
    def inline(self) -> bool:
        """True if every call takes microseconds, so that an event loop may run it without a thread."""

    @property
    def schema(self) -> int:
        """The newest version of such a ledger that this library knows; 0 for one that no other process opens."""

    @property
    def is_shared(self) -> bool:
        """True if processes of other machines use it, which cannot see whether a process of this one lives."""

    @property
    def may_lose_commits(self) -> bool:
        """True if what was committed can be lost, because another server takes over that did not have it yet."""

    def as_of_ms(self) -> int | None:
        """Return when what is read here was written, in unix milliseconds, if it may be behind; None if it is not."""

    def transact(self, scope: Scope, change: Change[R]) -> R:
        """Run *change* on the rows of *scope* in one transaction, and return its result once it is durably written.

        The store locks and loads the rows, reads its clock, runs the change (possibly again, on a new view), and writes
        the changed rows and entries. If the change raises, nothing is written. Raises ``IllegalTransition`` for a change
        that restrains in a scope that is not durable.
        """

    def open_later(self, node_id: str, scope: Scope, change: Change[R], decide: Change[R]) -> R:
        """Decide the opening of a new session, and write it with the first change or read of it.

        *change* opens it. *decide* is the same as it is run now: its result is returned, and nothing is written. Raises
        what it raises.
        """

    def lives(self, name: str) -> bool | None:
        """Return whether the process that holds the life *name* lives; None if that cannot be known here."""

    def hold_life(self, name: str) -> Life | None:
        """Show under a *name* (hexadecimal digits) that this process lives; None where the ledger has no place for that."""

    def write_openings(self, node_id: str | None = None, *, below: bool = False, older_s: float = 0.0) -> None:
        """Write the sessions that are decided and not written. Raises ``LedgerUnavailable``.

        *node_id*: that session alone, if it is one of them, and then also ``ConfigError`` if it cannot be opened any more;
        *below*: or all that may be below that budget; *older_s*: those alone that were decided so many seconds ago.
        """

    def forget_opening(self, node_id: str) -> None:
        """Forget a session that is decided and not written: nothing can use it any more."""

    def open_kernel(self, opened: Opened) -> None:
        """See ``kernel.ledger.Ledger.open_kernel``."""

    @property
    def signable(self) -> Signable:
        """See ``kernel.ledger.Ledger.signable``."""

    def sign(self, signer: Signs, hold: Hold, *, within: str) -> bytes:
        """See ``kernel.ledger.Ledger.sign``."""

    def at_one_moment(self, node_id: str | None = None) -> AbstractContextManager[LedgerReads]:
        """Give the ledger as it stands at one moment: all that is read of it agrees, while others go on writing.

        *node_id*: only that budget and what is below it are asked for.
        """

    def unsettled(self, now_unix: int) -> Sequence[str]:
        """Return the ids of all payments whose chain state can still change, oldest first.

        These are live payments, captured ones that no final block proves, and proven ones whose signature is valid at
        *now_unix* (unix seconds) or later, because a block may be undone.
        """

    def steady_ms(self) -> int:
        """Return milliseconds of a clock that cannot be set, from any start."""

    def close(self) -> None:
        """Release files and connections. Idempotent."""

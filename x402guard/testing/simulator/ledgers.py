"""The store that a simulated process sees: the real one, with lost commits and a full disk, and each commit watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from x402guard.errors import LedgerUnavailable
from x402guard.kernel.change_set import Opened
from x402guard.kernel.ledger import Signs
from x402guard.kernel.rows import Entry, Hold, Node
from x402guard.kernel.signer import Signable
from x402guard.ledger.store import LedgerReads, LedgerStore, Life
from x402guard.ledger.view import Change, LedgerView, Scope

R = TypeVar("R")

Watch = Callable[[LedgerView, object], None]


class WatchedStore:
    """A ``LedgerStore`` over another.

    Args:
        inner: the real store.
        watch: is shown every commit: its view, and the result of its change.
        is_full: returns whether the disk is full now, so that nothing can be written.

    Attributes:
        fails: how the next change fails: ``before`` or ``after`` its commit; "" if it does not.
    """

    def __init__(self, inner: LedgerStore, watch: Watch, is_full: Callable[[], bool]) -> None:
        self.inner, self._watch, self._is_full = inner, watch, is_full
        self.fails = ""

    @property
    def inline(self) -> bool:
        """See ``LedgerStore.inline``."""
        return True

    @property
    def schema(self) -> int:
        """See ``LedgerStore.schema``."""
        return self.inner.schema

    def hold_life(self, name: str) -> Life | None:
        """See ``LedgerStore.hold_life``: a simulated process ends without its file's lock, so its machine says who lives."""
        del name
        return None

    def lives(self, name: str) -> bool | None:
        """See ``LedgerStore.lives``."""
        return self.inner.lives(name)

    @property
    def is_shared(self) -> bool:
        """See ``LedgerStore.is_shared``."""
        return self.inner.is_shared

    @property
    def may_lose_commits(self) -> bool:
        """See ``LedgerStore.may_lose_commits``."""
        return False

    def transact(self, scope: Scope, change: Change[R]) -> R:
        """See ``LedgerStore.transact``."""
        fails, self.fails = self.fails, ""
        if fails == "before" or self._is_full():
            raise LedgerUnavailable("the simulated disk is full, or away")
        views: list[LedgerView] = []

        def seen(view: LedgerView) -> R:
            views[:] = [view]
            return change(view)

        result = self.inner.transact(scope, seen)
        self._watch(views[0], result)
        if fails:
            raise LedgerUnavailable("the commit's answer was lost")
        return result

    def open_later(self, node_id: str, scope: Scope, change: Change[R], decide: Change[R]) -> R:
        """See ``LedgerStore.open_later``: it is written at once, so that each step of a simulation can be compared."""
        del node_id, decide
        return self.transact(scope, change)

    def write_openings(self, node_id: str | None = None, *, below: bool = False, older_s: float = 0.0) -> None:
        """See ``LedgerStore.write_openings``: all are written."""

    def forget_opening(self, node_id: str) -> None:
        """See ``LedgerStore.forget_opening``: all are written."""

    def open_kernel(self, opened: Opened) -> None:
        """See ``LedgerStore.open_kernel``."""
        self.inner.open_kernel(opened)

    @property
    def signable(self) -> Signable:
        """See ``LedgerStore.signable``."""
        return self.inner.signable

    def sign(self, signer: Signs, hold: Hold, *, within: str) -> bytes:
        """See ``LedgerStore.sign``."""
        return self.inner.sign(signer, hold, within=within)

    def at_one_moment(self, node_id: str | None = None) -> AbstractContextManager[LedgerReads]:
        """See ``LedgerStore.at_one_moment``."""
        return self.inner.at_one_moment(node_id)

    def entries(self, node_id: str, *, grants: bool = True) -> Sequence[Entry]:
        """See ``LedgerStore.entries``."""
        return self.inner.entries(node_id, grants=grants)

    def tail(self, node_id: str, after: int) -> Sequence[Entry]:
        """See ``LedgerReads.tail``."""
        return self.inner.tail(node_id, after)

    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """See ``LedgerStore.nodes``."""
        return self.inner.nodes(under)

    def current(self, newest: int) -> Sequence[Node]:
        """See ``LedgerReads.current``."""
        return self.inner.current(newest)

    def newest(self, most: int, skip: int = 0) -> Sequence[Node]:
        """See ``LedgerReads.newest``."""
        return self.inner.newest(most, skip)

    def named(self, word: str, most: int) -> Sequence[Node]:
        """See ``LedgerReads.named``."""
        return self.inner.named(word, most)

    def fitting(self, text: str, most: int) -> Sequence[Node]:
        """See ``LedgerReads.fitting``."""
        return self.inner.fitting(text, most)

    def forgotten(self) -> Mapping[str, tuple[int, int]]:
        """See ``LedgerReads.forgotten``."""
        return self.inner.forgotten()

    def tally(self) -> tuple[int, int]:
        """See ``LedgerReads.tally``."""
        return self.inner.tally()

    def path(self, node_id: str) -> Sequence[Node]:
        """See ``LedgerStore.path``."""
        return self.inner.path(node_id)

    def hold(self, hold_id: str) -> Hold | None:
        """See ``LedgerStore.hold``."""
        return self.inner.hold(hold_id)

    def outstanding(self) -> Sequence[Hold]:
        """See ``LedgerStore.outstanding``."""
        return self.inner.outstanding()

    def unsettled(self, now_unix: int) -> Sequence[str]:
        """See ``LedgerStore.unsettled``."""
        return self.inner.unsettled(now_unix)

    def marks(self, kind: str, prefix: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``LedgerStore.marks``."""
        return self.inner.marks(kind, prefix)

    def as_of_ms(self) -> int | None:
        """See ``LedgerStore.as_of_ms``."""
        return self.inner.as_of_ms()

    def steady_ms(self) -> int:
        """See ``LedgerStore.steady_ms``."""
        return self.inner.steady_ms()

    def now_ms(self) -> int:
        """See ``LedgerStore.now_ms``."""
        return self.inner.now_ms()

    def close(self) -> None:
        """See ``LedgerStore.close``."""
        self.inner.close()

"""Stores the ledger in this process's memory, for tests and for runs whose ledger need not outlive the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

from typing_extensions import override

from x402guard.errors import LedgerUnavailable
from x402guard.kernel.change_set import ChangeSet
from x402guard.kernel.ledger import Work
from x402guard.kernel.rows import Entry, Hold, Node
from x402guard.ledger.evidence import is_unsettled
from x402guard.ledger.store import GRANTS
from x402guard.ledger.tree import below, path, without_idle
from x402guard.ledger.view import Scope
from x402guard.stores.memory_rows import MemoryRows
from x402guard.stores.transacts import StoreClock, Transacts

_FORKED: Final = "a memory:// ledger belongs to one process; after a fork each process would have a separate budget"


class _Rows(MemoryRows):
    """The rows of a whole ledger, and its journal: node → number → entry."""

    def __init__(self, *, keeps_idle: bool) -> None:
        super().__init__(keeps_idle=keeps_idle)
        self.journal: dict[str, dict[int, Entry]] = {}

    @override
    def add(self, change_set: ChangeSet) -> None:
        try:
            self._add(change_set)
        except BaseException:
            self._add(change_set)  # after a Ctrl-C in between, writing the same rows again completes them
            raise

    def _add(self, change_set: ChangeSet) -> None:
        super().add(change_set)
        for entry in change_set.entries:
            self.journal.setdefault(entry.node_id, {})[entry.seq] = entry


class MemoryStore(Transacts):
    """A ``LedgerStore`` in memory, with one lock. Every transaction takes microseconds.

    Args:
        clock_ms: returns unix milliseconds; this machine's clock by default.
        steady_ms: returns milliseconds of a clock that cannot be set; see ``StoreClock``.
        keeps_idle: let sessions keep idle budget, as in a store for many machines; see ``ledger.budgets``.
    """

    inline: Final = True
    is_shared: Final = False
    may_lose_commits: Final = False

    def __init__(
        self,
        *,
        clock_ms: Callable[[], int] | None = None,
        steady_ms: Callable[[], int] | None = None,
        keeps_idle: bool = False,
    ) -> None:
        self._clock = StoreClock(clock_ms, steady_ms)
        self._lock = threading.RLock()
        self._rows = _Rows(keeps_idle=keeps_idle)
        self._pid = os.getpid()
        self._closed = False

    @override
    def _in_transaction(self, scope: Scope, work: Work) -> None:
        self._check_usable()
        with self._lock:
            work(self._rows)

    def _check_readable(self) -> None:
        """A closed ledger can still be read: reports are asked for after the end."""
        if self._pid != os.getpid():
            raise LedgerUnavailable(_FORKED)

    def _check_usable(self) -> None:
        # No context manager of our own wraps the lock: Ctrl-C could suspend it with the lock held.
        if self._pid != os.getpid():
            raise LedgerUnavailable(_FORKED)
        if self._closed:
            raise LedgerUnavailable(
                "this ledger has been closed, with its guard: the block of `with Guard(…)` is over, or close() was called",
                advice="Nothing was paid. Use sessions and clients inside the block, or open a new Guard.",
            )

    def entries(self, node_id: str, *, grants: bool = True) -> Sequence[Entry]:
        """See ``LedgerStore.entries``."""
        self._check_readable()
        with self._lock:
            inside = below(self._rows.nodes, node_id)
            found = (entry for node in inside for entry in self._rows.journal.get(node.id, {}).values())
            return [entry for entry in found if grants or entry.event not in GRANTS]

    def tail(self, node_id: str, after: int) -> Sequence[Entry]:
        """See ``LedgerReads.tail``."""
        self._check_readable()
        with self._lock:
            return [entry for entry in self._rows.journal.get(node_id, {}).values() if entry.seq > after]

    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """See ``LedgerStore.nodes``."""
        self._check_readable()
        with self._lock:
            found = list(self._rows.nodes.values())
            if under is not None:
                related = (*below(self._rows.nodes, under), *self._rows.get_nodes((under,)))
                wanted = {node.id for node in related}
                found = [node for node in found if node.id in wanted]
            find_busy = self._rows.find_busy
            return found if find_busy is None else without_idle(found, {node.id: node for node in find_busy()})

    def path(self, node_id: str) -> Sequence[Node]:
        """See ``LedgerStore.path``."""
        self._check_readable()
        with self._lock:
            found = path(self._rows.nodes, node_id) if node_id in self._rows.nodes else []
            find_busy = self._rows.find_busy
            return found if find_busy is None else without_idle(found, {node.id: node for node in find_busy()})

    @contextmanager
    def at_one_moment(self) -> Iterator[Self]:
        """See ``LedgerStore.at_one_moment``. Others wait meanwhile."""
        with self._lock:
            yield self

    def hold(self, hold_id: str) -> Hold | None:
        """See ``LedgerStore.hold``. Signers ask it, so a closed ledger does not answer."""
        self._check_usable()
        with self._lock:
            return self._rows.holds.get(hold_id)

    def outstanding(self) -> Sequence[Hold]:
        """See ``LedgerStore.outstanding``."""
        self._check_readable()
        with self._lock:
            return sorted(self._rows.live.values(), key=lambda h: h.created_ms)

    def unsettled(self, now_unix: int) -> Sequence[str]:
        """See ``LedgerStore.unsettled``."""
        self._check_readable()
        with self._lock:
            found = [hold for hold in self._rows.holds.values() if is_unsettled(hold, now_unix)]
        return [hold.id for hold in sorted(found, key=lambda h: h.created_ms)]

    def marks(self, kind: str, prefix: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``LedgerStore.marks``."""
        self._check_readable()
        with self._lock:
            return {
                key: value for (of, key), value in self._rows.marks.items() if of == kind and key.startswith(prefix)
            }

    def as_of_ms(self) -> None:
        """See ``LedgerStore.as_of_ms``."""

    def steady_ms(self) -> int:
        """See ``LedgerStore.steady_ms``."""
        return self._clock.steady_ms()

    def now_ms(self) -> int:
        """See ``LedgerStore.now_ms``."""
        return self._clock()

    def close(self) -> None:
        """See ``LedgerStore.close``."""
        self._closed = True

"""Stores the ledger in this process's memory, for tests and for runs whose ledger need not outlive the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush, nsmallest
from typing import Any, Final, Self, TypeVar

from x402guard.errors import LedgerUnavailable
from x402guard.ledger.evidence import is_unsettled
from x402guard.ledger.model import Delivery, Entry, Evidence, Hold, HoldState, Node
from x402guard.ledger.store import GRANTS
from x402guard.ledger.view import Change, LedgerView, MarkKey, Scope
from x402guard.stores.views import StoreClock, check_change, lapses, least_checked, load_view

R = TypeVar("R")


_FORKED: Final = "a memory:// ledger belongs to one process; after a fork each process would have a separate budget"


class MemoryStore:
    """A ``LedgerStore`` in memory, with one lock. Every transaction takes microseconds."""

    inline: Final = True

    def __init__(
        self, *, clock_ms: Callable[[], int] | None = None, steady_ms: Callable[[], int] | None = None
    ) -> None:
        self._clock = StoreClock(clock_ms, steady_ms)
        self._lock = threading.RLock()
        self._nodes: dict[str, Node] = {}
        self._holds: dict[str, Hold] = {}
        self._live: dict[str, Hold] = {}
        # A heap. The deadline of a hold that has ended is removed when it is due.
        self._deadlines: list[tuple[int, str]] = []
        self._unproven: dict[str, Hold] = {}
        self._bought: dict[str, Hold] = {}
        self._purchases: dict[str, dict[str, Hold]] = {}
        self._marks: dict[MarkKey, Mapping[str, Any]] = {}
        self._entries: dict[str, dict[int, Entry]] = {}
        self._pid = os.getpid()
        self._closed = False

    def transact(self, scope: Scope, change: Change[R]) -> R:
        """See ``LedgerStore.transact``."""
        self._check_usable()
        with self._lock:
            view = load_view(self, scope, self._clock)
            result = change(view)
            check_change(view, scope)
            try:
                self._write(view)
            except BaseException:
                self._write(view)  # after a Ctrl-C in between, writing the same rows again completes them
                raise
            return result

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

    def _write(self, view: LedgerView) -> None:
        for node in view.node_rows():
            self._nodes[node.id] = node
        for hold in view.hold_rows():
            self._holds[hold.id] = hold
            before = self._live.get(hold.id)
            if lapses(hold) and (before is None or not lapses(before)):
                heappush(self._deadlines, (hold.deadline_unix, hold.id))
            _index(self._live, hold, inside=hold.state is HoldState.HELD)
            self._write_purchase(hold)
            proves = hold.chain_evidence and hold.intent is not None
            _index(self._unproven, hold, inside=proves and _unproven(hold))
        self._marks.update(view.mark_rows())
        for entry in view.entries:
            self._entries.setdefault(entry.node_id, {})[entry.seq] = entry

    def _write_purchase(self, hold: Hold) -> None:
        if hold.purchase_key is None:
            return
        same = self._purchases.setdefault(hold.purchase_key, {})
        ended = hold.state not in (HoldState.HELD, HoldState.CAPTURED)
        _index(same, hold, inside=not ended and hold.delivery in (Delivery.OPEN, Delivery.LOST))
        if not same:
            del self._purchases[hold.purchase_key]
        last = self._bought.get(hold.purchase_key)
        if hold.delivery is Delivery.DONE and not ended and (last is None or last.created_ms <= hold.created_ms):
            self._bought[hold.purchase_key] = hold
        elif last is not None and last.id == hold.id:
            del self._bought[hold.purchase_key]

    def get_nodes(self, node_ids: Iterable[str]) -> Iterable[Node]:
        """See ``Rows``."""
        found: dict[str, Node] = {}
        for first in node_ids:
            node = self._nodes.get(first)
            while node is not None and node.id not in found:
                found[node.id] = node
                node = None if node.parent_id is None else self._nodes.get(node.parent_id)
        return found.values()

    def get_holds(self, hold_ids: Iterable[str]) -> Iterable[Hold]:
        """See ``Rows``."""
        return [self._holds[hold_id] for hold_id in hold_ids if hold_id in self._holds]

    def open_purchases(self, key: str) -> Iterable[Hold]:
        """See ``Rows``."""
        return sorted(self._purchases.get(key, {}).values(), key=lambda h: h.created_ms)

    def live_payments(self, network: str, token: str) -> int:
        """See ``Rows``."""
        payments = (hold for hold in self._live.values() if hold.intent is not None and hold.claim is None)
        return sum(
            hold.amount for hold in payments if (hold.payment().network, hold.payment().token) == (network, token)
        )

    def last_bought(self, key: str) -> Iterable[Hold]:
        """See ``Rows``."""
        return [self._bought[key]] if key in self._bought else []

    def due(self, now_unix: int, most: int) -> Iterable[Hold]:
        """See ``Rows``."""
        due: dict[str, Hold] = {}
        while self._deadlines and self._deadlines[0][0] < now_unix and len(due) < most:
            deadline_unix, hold_id = heappop(self._deadlines)
            hold = self._live.get(hold_id)
            if hold is not None and lapses(hold) and hold.deadline_unix == deadline_unix:
                due[hold_id] = hold
        for hold in due.values():  # they are due until a change has ended them
            heappush(self._deadlines, (hold.deadline_unix, hold.id))
        return list(due.values())

    def sweepable(self, most: int, flown_before_ms: int) -> tuple[Iterable[Hold], Iterable[Hold]]:
        """See ``Rows``."""
        found = [hold for hold in self._unproven.values() if _may_be_asked_about(hold, flown_before_ms)]
        live, captured = (
            nsmallest(most, (hold for hold in found if (hold.state is HoldState.HELD) is held), key=least_checked)
            for held in (True, False)
        )
        return live, captured

    def get_marks(self, keys: Iterable[MarkKey]) -> Mapping[MarkKey, Mapping[str, Any]]:
        """See ``Rows``."""
        return {key: self._marks[key] for key in keys if key in self._marks}

    def entries(self, node_id: str, *, grants: bool = True) -> Sequence[Entry]:
        """See ``LedgerStore.entries``."""
        self._check_readable()
        with self._lock:
            found = (entry for node in self._below(node_id) for entry in self._entries.get(node, {}).values())
            return [entry for entry in found if grants or entry.event not in GRANTS]

    def tail(self, node_id: str, after: int) -> Sequence[Entry]:
        """See ``LedgerReads.tail``."""
        self._check_readable()
        with self._lock:
            return [entry for entry in self._entries.get(node_id, {}).values() if entry.seq > after]

    def _below(self, node_id: str) -> list[str]:
        below = [node_id]
        for parent in below:
            below.extend(node.id for node in self._nodes.values() if node.parent_id == parent)
        return below

    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """See ``LedgerStore.nodes``."""
        self._check_readable()
        with self._lock:
            if under is None:
                return list(self._nodes.values())
            wanted = {*self._below(under), *(node.id for node in self.get_nodes((under,)))}
            return [node for node in self._nodes.values() if node.id in wanted]

    @contextmanager
    def at_one_moment(self) -> Iterator[Self]:
        """See ``LedgerStore.at_one_moment``. Others wait meanwhile."""
        with self._lock:
            yield self

    def hold(self, hold_id: str) -> Hold | None:
        """See ``LedgerStore.hold``. Signers ask it, so a closed ledger does not answer."""
        self._check_usable()
        with self._lock:
            return self._holds.get(hold_id)

    def outstanding(self) -> Sequence[Hold]:
        """See ``LedgerStore.outstanding``."""
        self._check_readable()
        with self._lock:
            return sorted(self._live.values(), key=lambda h: h.created_ms)

    def unsettled(self, now_unix: int) -> Sequence[str]:
        """See ``LedgerStore.unsettled``."""
        self._check_readable()
        with self._lock:
            found = [hold for hold in self._holds.values() if is_unsettled(hold, now_unix)]
        return [hold.id for hold in sorted(found, key=lambda h: h.created_ms)]

    def marks(self, kind: str, prefix: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``LedgerStore.marks``."""
        self._check_readable()
        with self._lock:
            return {key: value for (of, key), value in self._marks.items() if of == kind and key.startswith(prefix)}

    def steady_ms(self) -> int:
        """See ``LedgerStore.steady_ms``."""
        return self._clock.steady_ms()

    def now_ms(self) -> int:
        """See ``LedgerStore.now_ms``."""
        return self._clock()

    def close(self) -> None:
        """See ``LedgerStore.close``."""
        self._closed = True


def _index(holds: dict[str, Hold], hold: Hold, *, inside: bool) -> None:
    if inside:
        holds[hold.id] = hold
    else:
        holds.pop(hold.id, None)


def _unproven(hold: Hold) -> bool:
    on_word = hold.state is HoldState.CAPTURED and hold.evidence in (Evidence.CLAIMED, Evidence.CHAIN_HEAD)
    return hold.state is HoldState.HELD or on_word


def _may_be_asked_about(hold: Hold, flown_before_ms: int) -> bool:
    noted = hold.doubt is not None or hold.claim is not None or hold.state is HoldState.CAPTURED
    return noted or hold.flying_since_ms < flown_before_ms

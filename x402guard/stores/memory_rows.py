"""Keeps the rows of a ledger in memory, with the indexes that a change asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

from x402guard.kernel.change_set import ChangeSet, MarkKey
from x402guard.kernel.ledger import Clock
from x402guard.kernel.rows import Delivery, Evidence, Hold, HoldState, Node
from x402guard.ledger.view import Loaded, Scope
from x402guard.stores.transacts import lapses, least_checked, load

_HELD, _CAPTURED = HoldState.HELD, HoldState.CAPTURED


class MemoryRows:
    """The nodes, holds and marks that changes read and write (see ``Rows``): of a whole ledger, or of what was loaded."""

    def __init__(self, *, keeps_idle: bool = False) -> None:
        self._keeps_idle = keeps_idle
        self.nodes: dict[str, Node] = {}
        self.holds: dict[str, Hold] = {}
        self.live: dict[str, Hold] = {}
        # A heap. The deadline of a hold that has ended is removed when it is due.
        self._deadlines: list[tuple[int, str]] = []
        self._unproven: dict[str, Hold] = {}
        self._bought: dict[str, Hold] = {}
        self._purchases: dict[str, dict[str, Hold]] = {}
        self.marks: dict[MarkKey, Mapping[str, Any]] = {}

    def busy(self) -> Iterable[Node]:
        """See ``Rows``."""
        return () if self.find_busy is None else self.find_busy()

    def load(self, scope: Scope, clock: Clock) -> Loaded:
        """See ``Rows``."""
        return load(self, scope, clock)

    def add(self, change_set: ChangeSet) -> None:
        """See ``Rows``."""
        for node in change_set.nodes:
            self.nodes[node.id] = node
        for hold in change_set.holds:
            self.put_hold(hold)
        self.marks.update(change_set.marks)

    def remove_hold(self, hold_id: str) -> None:
        """Remove a hold: what wrote it is lost."""
        hold = self.holds.pop(hold_id)
        for index in (self.live, self._unproven):
            index.pop(hold_id, None)
        if hold.purchase_key is not None:
            self._purchases.get(hold.purchase_key, {}).pop(hold_id, None)
            bought = self._bought.get(hold.purchase_key)
            if bought is not None and bought.id == hold_id:
                del self._bought[hold.purchase_key]

    def put_hold(self, hold: Hold) -> None:
        """Write a hold, and what the indexes say of it."""
        self.holds[hold.id] = hold
        before = self.live.get(hold.id)
        if lapses(hold) and (before is None or not lapses(before)):
            heappush(self._deadlines, (hold.deadline_unix, hold.id))
        _index(self.live, hold, inside=hold.state is _HELD)
        self._put_purchase(hold)
        proves = hold.chain_evidence and hold.intent is not None
        _index(self._unproven, hold, inside=proves and _unproven(hold))

    def _put_purchase(self, hold: Hold) -> None:
        if hold.purchase_key is None:
            return
        same = self._purchases.setdefault(hold.purchase_key, {})
        ended = hold.state not in (_HELD, _CAPTURED)
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
            node = self.nodes.get(first)
            while node is not None and node.id not in found:
                found[node.id] = node
                node = None if node.parent_id is None else self.nodes.get(node.parent_id)
        return found.values()

    def get_holds(self, hold_ids: Iterable[str]) -> Iterable[Hold]:
        """See ``Rows``."""
        return [self.holds[hold_id] for hold_id in hold_ids if hold_id in self.holds]

    def open_purchases(self, key: str) -> Iterable[Hold]:
        """See ``Rows``."""
        return sorted(self._purchases.get(key, {}).values(), key=lambda h: h.created_ms)

    def live_payments(self, network: str, token: str) -> int:
        """See ``Rows``."""
        payments = (hold for hold in self.live.values() if hold.intent is not None and hold.claim is None)
        return sum(
            hold.amount for hold in payments if (hold.payment().network, hold.payment().token) == (network, token)
        )

    def last_bought(self, key: str) -> Iterable[Hold]:
        """See ``Rows``."""
        return [self._bought[key]] if key in self._bought else []

    def due(self, now_unix: int, most: int) -> Iterable[Hold]:
        """See ``Rows``."""
        if not self._deadlines or self._deadlines[0][0] >= now_unix:
            return ()
        due: dict[str, Hold] = {}
        while self._deadlines and self._deadlines[0][0] < now_unix and len(due) < most:
            deadline_unix, hold_id = heappop(self._deadlines)
            hold = self.live.get(hold_id)
            if hold is not None and lapses(hold) and hold.deadline_unix == deadline_unix:
                due[hold_id] = hold
        for hold in due.values():  # they are due until a change has ended them
            heappush(self._deadlines, (hold.deadline_unix, hold.id))
        return list(due.values())

    def sweepable(self, most: int, flown_before_ms: int) -> tuple[Iterable[Hold], Iterable[Hold]]:
        """See ``Rows``."""
        found = [hold for hold in self._unproven.values() if _may_be_asked_about(hold, flown_before_ms)]
        found.sort(key=least_checked)
        live = [hold for hold in found if hold.state is _HELD]
        return live[:most], [hold for hold in found if hold.state is not _HELD][:most]

    @property
    def find_busy(self) -> Callable[[], Iterable[Node]] | None:
        """See ``Rows``."""
        return self._find_busy if self._keeps_idle else None

    def _find_busy(self) -> Iterable[Node]:
        return self.get_nodes(node.id for node in self.nodes.values() if node.idle or node.live)

    def get_marks(self, keys: Iterable[MarkKey]) -> Mapping[MarkKey, Mapping[str, Any]]:
        """See ``Rows``."""
        find = self.marks.get
        return {key: row for key in keys if (row := find(key)) is not None}


def _index(holds: dict[str, Hold], hold: Hold, *, inside: bool) -> None:
    if inside:
        holds[hold.id] = hold
    else:
        holds.pop(hold.id, None)


def _unproven(hold: Hold) -> bool:
    on_word = hold.state is _CAPTURED and hold.evidence in (Evidence.CLAIMED, Evidence.CHAIN_HEAD)
    return hold.state is _HELD or on_word


def _may_be_asked_about(hold: Hold, flown_before_ms: int) -> bool:
    noted = hold.doubt is not None or hold.claim is not None or hold.state is _CAPTURED
    return noted or hold.flying_since_ms < flown_before_ms

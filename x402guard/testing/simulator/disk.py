"""The disk under a ledger in memory: what a power cut takes back, and what a process can do while it is full.

SQLite writes a commit that restrains to the disk before it returns (``Scope.durable``), and the others with the next
one. So a power cut takes back some of the commits since the last durable one, the newest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from typing_extensions import override

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Hold, Node
from x402guard.ledger.view import Change, LedgerView, Scope
from x402guard.stores.memory import MemoryStore

R = TypeVar("R")

_SHARED: Final = ("_rows",)


@dataclass(frozen=True, slots=True)
class _Before:
    """The rows that one commit has replaced; None for a row that it has added."""

    nodes: Mapping[str, Node | None]
    holds: Mapping[str, Hold | None]
    marks: Mapping[MarkKey, Mapping[str, Any] | None]
    entries: tuple[tuple[str, int], ...]


class SimMemory(MemoryStore):
    """A ledger in memory that several processes share, each with its own clock, on one disk.

    Args:
        beside: the store of another process, whose rows this one shares; None for a new ledger.
        clock_ms, steady_ms: the clocks of this process's machine, in milliseconds.
        keeps_idle: sessions keep idle budget.
    """

    def __init__(
        self,
        beside: SimMemory | None,
        *,
        clock_ms: Callable[[], int],
        steady_ms: Callable[[], int],
        keeps_idle: bool = False,
    ) -> None:
        super().__init__(clock_ms=clock_ms, steady_ms=steady_ms, keeps_idle=keeps_idle)
        self._volatile: list[_Before] = [] if beside is None else beside._volatile  # noqa: SLF001 - of this class
        for name in _SHARED if beside is not None else ():
            setattr(self, name, getattr(beside, name))

    @override
    def transact(self, scope: Scope, change: Change[R]) -> R:
        def seen(view: LedgerView) -> R:
            result = change(view)
            kept[:] = [] if scope.durable else [self._replaced(view)]
            return result

        kept: list[_Before] = []
        result = super().transact(scope, seen)
        if scope.durable:
            self._volatile.clear()  # what is durable is never taken back, nor is what was written before it
        self._volatile += kept
        return result

    def _replaced(self, view: LedgerView) -> _Before:
        return _Before(
            {node_id: self._rows.nodes.get(node_id) for node_id in view.changed_nodes},
            {hold_id: self._rows.holds.get(hold_id) for hold_id in view.changed_holds},
            {key: self._rows.marks.get(key) for key in view.changed_marks},
            tuple((entry.node_id, entry.seq) for entry in view.entries),
        )

    def all_holds(self) -> list[Hold]:
        """Return every hold."""
        return list(self._rows.holds.values())

    def all_nodes(self) -> list[Node]:
        """Return every node as its row says."""
        return list(self._rows.nodes.values())

    @property
    def volatile(self) -> int:
        """How many commits a power cut could take back now."""
        return len(self._volatile)

    def lose_power(self, lost: int) -> None:
        """Take back the last *lost* commits. The next process finds the ledger without them."""
        for _ in range(min(lost, len(self._volatile))):
            before = self._volatile.pop()
            _put_back(self._rows.nodes, before.nodes)
            _put_back(self._rows.marks, before.marks)
            for node_id, seq in before.entries:
                del self._rows.journal[node_id][seq]
            for hold_id, hold in before.holds.items():
                self._rows.remove_hold(hold_id)
                if hold is not None:
                    self._rows.put_hold(hold)


def _put_back(rows: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    for key, row in before.items():
        if row is None:
            del rows[key]
        else:
            rows[key] = row

"""Reads and writes the rows of one change in an SQLite file, within one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import inf
from typing import Any, Final, TypeVar

from x402guard.kernel.change_set import ChangeSet, MarkKey
from x402guard.kernel.ledger import Clock
from x402guard.kernel.rows import HOLD_FIXED, Entry, Hold, HoldState, Node
from x402guard.ledger.view import Loaded, Scope
from x402guard.stores.rows import (
    ENTRY_COLUMNS,
    HOLD_COLUMNS,
    NODE_COLUMNS,
    Packed,
    hold_record,
    mark_text,
    node_record,
    packed_record,
    to_hold,
    to_mark,
    to_node,
)
from x402guard.stores.sql_reads import HOLDS, NODES, SqlReads, above, places
from x402guard.stores.transacts import StoreClock, lapses, load

R = TypeVar("R")

_ROWS_AT_ONCE: Final = 32


class _Insert:
    """An INSERT for any number of rows. With *key*, a row with the same key is changed, all but its columns *fixed*."""

    def __init__(
        self, table: str, columns: Sequence[str], key: Sequence[str] = (), fixed: Collection[str] = ()
    ) -> None:
        # SQLite writes each index again of which a column is set, also to the value that it has.
        rest = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in {*key, *fixed})
        self._head = f"INSERT INTO {table} ({', '.join(columns)}) VALUES "
        self._row = f"({places(len(columns))})"
        self._tail = f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {rest}" if key else ""
        self._known: dict[int, str] = {}

    def sql(self, rows: int) -> str:
        """Return the statement for that many rows."""
        if rows not in self._known:
            self._known[rows] = self._head + ", ".join([self._row] * rows) + self._tail
        return self._known[rows]


_NODE_FIXED: Final = ("parent_id", "kind", "name", "created_ms")
_PUT_NODE: Final = _Insert("nodes", NODE_COLUMNS, ("id",), (*_NODE_FIXED, "closed_ms"))
_END_NODE: Final = _Insert("nodes", NODE_COLUMNS, ("id",), _NODE_FIXED)
"""The same where ``closed_ms`` is another one, or may be: an index has it."""
_PUT_HOLD: Final = _Insert("holds", HOLD_COLUMNS, ("id",), HOLD_FIXED)
_PUT_MARK: Final = _Insert("marks", ("kind", "key", "value"), ("kind", "key"))
_ADD_ENTRY: Final = _Insert("entries", ENTRY_COLUMNS)
_MOST_KNOWN: Final = 10_000

_OPEN_PURCHASES: Final = (
    f"{HOLDS} WHERE purchase_key = ? AND delivery IN ('open', 'lost') AND state IN ('held', 'captured') "
    "ORDER BY created_ms"
)
_LAST_BOUGHT: Final = (
    f"{HOLDS} WHERE purchase_key = ? AND delivery = 'done' AND state IN ('held', 'captured') "
    "ORDER BY created_ms DESC LIMIT 1"
)
_LIVE_PAYMENTS: Final = (
    "SELECT coalesce(sum(amount), 0) FROM holds WHERE state = 'held' AND intent IS NOT NULL AND claim IS NULL "
    "AND json_extract(intent, '$.network') = ? AND json_extract(intent, '$.token') = ?"
)
_DUE: Final = (
    f"{HOLDS} WHERE state = 'held' AND chain_evidence = 0 AND deadline_unix < ? ORDER BY deadline_unix LIMIT ?"
)
_NEXT_DUE: Final = "SELECT min(deadline_unix) FROM holds WHERE state = 'held' AND chain_evidence = 0"


class SqliteRows:
    """The rows that changes read and write (see ``Rows``), over the connection that has the turn to write.

    Nodes and marks that were read or written by this connection, and live holds that it has written, are known until
    another connection has written: SQLite's ``data_version`` says so. What the changes of one transaction write is kept
    until ``flush``, so that each sees what those before it have changed, and all together take a few statements.
    """

    def __init__(self, writer: sqlite3.Connection) -> None:
        self._writer = writer
        self._version = -1
        self._nodes: dict[str, Node] = {}
        self._holds: dict[str, Hold] = {}
        self._marks: dict[MarkKey, Mapping[str, Any] | None] = {}
        self._new_nodes: dict[str, Node] = {}
        self._ending: set[str] = set()
        self._new_holds: dict[str, Hold] = {}
        self._new_marks: dict[MarkKey, Mapping[str, Any]] = {}
        self._new_entries: list[Entry] = []
        self._next_due: float | None = None  # no live hold ends earlier at its own deadline; None if that is unknown
        self._committed = False

    find_busy: Final = None

    def begin(self) -> None:
        """Forget the known rows if another connection has written since, or the last transaction did not commit."""
        [version] = self._writer.execute("PRAGMA data_version").fetchone()
        known = len(self._nodes) + len(self._holds) + len(self._marks)
        if not self._committed or version != self._version or known > _MOST_KNOWN:
            self.forget()
            self._version = version
        self._committed = False

    def committed(self) -> None:
        """Note that the transaction was committed: what it has read and written stays known."""
        self._committed = True

    def forget(self) -> None:
        """Forget all known rows, and what is not flushed: it is rolled back."""
        for known in (self._nodes, self._holds, self._marks):
            known.clear()
        self._forget_new()
        self._next_due = None

    def _forget_new(self) -> None:
        for rows in (self._new_nodes, self._new_holds, self._new_marks, self._new_entries, self._ending):
            rows.clear()

    def busy(self) -> Iterable[Node]:
        """See ``Rows``."""
        return () if self.find_busy is None else self.find_busy()

    def load(self, scope: Scope, clock: Clock) -> Loaded:
        """See ``Rows``."""
        return load(self, scope, clock)

    def add(self, change_set: ChangeSet) -> None:
        """See ``Rows``. They are kept for the changes behind this one and for the commit."""
        nodes, marks = {node.id: node for node in change_set.nodes}, dict(change_set.marks)
        for node in change_set.nodes:
            before = self._nodes.get(node.id)
            if before is None or before.closed_ms != node.closed_ms:
                self._ending.add(node.id)
        self._nodes.update(nodes)
        self._marks.update(marks)
        self._new_nodes.update(nodes)
        self._new_marks.update(marks)
        for hold in change_set.holds:
            self._new_holds[hold.id] = hold
            if hold.state is HoldState.HELD:
                self._holds[hold.id] = hold
            else:
                self._holds.pop(hold.id, None)
            if self._next_due is not None and lapses(hold):
                self._next_due = min(self._next_due, hold.deadline_unix)
        self._new_entries += change_set.entries

    def flush(self) -> None:
        """Write what was kept."""
        for statement, ending in ((_END_NODE, True), (_PUT_NODE, False)) if self._ending else ((_PUT_NODE, False),):
            some = [node for node in self._new_nodes.values() if (node.id in self._ending) is ending]
            self._put(statement, map(node_record, some))
        self._put(_PUT_HOLD, map(hold_record, self._new_holds.values()))
        self._put(_ADD_ENTRY, map(packed_record, self._new_entries))
        self._put(_PUT_MARK, ((*key, mark_text(value)) for key, value in self._new_marks.items()))
        self._forget_new()

    def _put(self, statement: _Insert, records: Iterable[Packed]) -> None:
        """Write several records per statement: each statement releases the interpreter lock and may wait for it."""
        rows = list(records)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            self._writer.execute(statement.sql(len(some)), [*chain.from_iterable(some)])

    def get_nodes(self, node_ids: Iterable[str]) -> Iterable[Node]:
        """See ``Rows``."""
        ids = tuple(node_ids)
        found: dict[str, Node] = {}
        for first in ids:
            node = self._nodes.get(first)
            while node is not None and node.id not in found:
                found[node.id] = node
                node = None if node.parent_id is None else self._nodes.get(node.parent_id)
        if all(_is_whole(found, node_id) for node_id in ids):
            return found.values()
        if self._new_nodes:
            self.flush()  # what is read replaces what is known, and children that are new have to be found
        sql = f"WITH RECURSIVE {above(len(ids))} {NODES} WHERE id IN (SELECT id FROM above)"
        read = [to_node(row) for row in self._writer.execute(sql, ids)]
        self._nodes.update((node.id, node) for node in read)
        return read

    def get_holds(self, hold_ids: Iterable[str]) -> Iterable[Hold]:
        """See ``Rows``."""
        ids = tuple(hold_ids)
        both = ((self._new_holds.get(hold_id) or self._holds.get(hold_id)) for hold_id in ids)
        kept = [hold for hold in both if hold is not None]
        if len(kept) == len(ids):
            return kept
        known = {hold.id for hold in kept}
        rest = [hold_id for hold_id in ids if hold_id not in known]
        rows = self._writer.execute(f"{HOLDS} WHERE id IN ({places(len(rest))})", rest)
        return [*kept, *map(to_hold, rows)]

    def open_purchases(self, key: str) -> Iterable[Hold]:
        """See ``Rows``."""
        self._flush_purchase(key)
        return [to_hold(row) for row in self._writer.execute(_OPEN_PURCHASES, (key,))]

    def live_payments(self, network: str, token: str) -> int:
        """See ``Rows``."""
        self.flush()
        return int(self._writer.execute(_LIVE_PAYMENTS, (network, token)).fetchone()[0])

    def last_bought(self, key: str) -> Iterable[Hold]:
        """See ``Rows``."""
        self._flush_purchase(key)
        return [to_hold(row) for row in self._writer.execute(_LAST_BOUGHT, (key,))]

    def _flush_purchase(self, key: str) -> None:
        if any(hold.purchase_key == key for hold in self._new_holds.values()):
            self.flush()

    def due(self, now_unix: int, most: int) -> Iterable[Hold]:
        """See ``Rows``."""
        if self._next_due is None:
            self.flush()
            [first] = self._writer.execute(_NEXT_DUE).fetchone()
            self._next_due = inf if first is None else first
        if self._next_due >= now_unix:
            return ()
        self.flush()  # so that the limit counts none that a change before this one has ended
        self._next_due = None
        return [to_hold(row) for row in self._writer.execute(_DUE, (now_unix, most))]

    def sweepable(self, most: int, flown_before_ms: int) -> tuple[Iterable[Hold], Iterable[Hold]]:
        """See ``Rows``."""
        self.flush()
        where = (
            "WHERE chain_evidence = 1 AND (state = 'held' OR evidence IN ('claimed', 'chain_head')) "
            "AND (state = 'captured') = ? AND intent IS NOT NULL "
            "AND (state = 'captured' OR doubt IS NOT NULL OR claim IS NOT NULL OR flying_since_ms < ?) "
            "ORDER BY checked_ms, created_ms LIMIT ?"
        )
        live, captured = (
            [to_hold(row) for row in self._writer.execute(f"{HOLDS} {where}", (ended, flown_before_ms, most))]
            for ended in (0, 1)
        )
        return live, captured

    def get_marks(self, keys: Iterable[MarkKey]) -> Mapping[MarkKey, Mapping[str, Any]]:
        """See ``Rows``."""
        asked = tuple(keys)
        wanted = [key for key in asked if key not in self._marks]
        if wanted:
            rows = self._writer.execute(_marks_sql(len(wanted)), [part for key in wanted for part in key])
            self._marks.update(dict.fromkeys(wanted))
            self._marks.update(map(to_mark, rows))
        known = ((key, self._marks[key]) for key in asked)
        return {key: value for key, value in known if value is not None}


def _is_whole(found: Mapping[str, Node], node_id: str | None) -> bool:
    """True if a node and all its ancestors are *found*."""
    while node_id is not None:
        if node_id not in found:
            return False
        node_id = found[node_id].parent_id
    return True


@lru_cache(maxsize=256)
def _marks_sql(count: int) -> str:
    pairs = ", ".join("(?, ?)" for _ in range(count))
    # A join, because IN with several pairs would read the whole table.
    return (
        f"WITH wanted (kind, key) AS (VALUES {pairs}) SELECT marks.kind, marks.key, marks.value FROM wanted "
        "CROSS JOIN marks ON marks.kind = wanted.kind AND marks.key = wanted.key"
    )


class SqliteMoment(SqlReads):
    """One moment of a ledger's file: all reads see the same commit, while others go on writing."""

    def __init__(self, connection: sqlite3.Connection, clock: StoreClock) -> None:
        connection.execute("BEGIN")
        self._connection, self._clock = connection, clock

    def _read(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int] = ()) -> list[R]:
        return [convert(row) for row in self._connection.execute(sql, values)]

"""Reads a ledger's file: what a store of it and one moment of it have in common."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from x402guard.ledger.model import Entry, Hold, Node
from x402guard.ledger.store import GRANTS
from x402guard.stores.rows import to_entry, to_hold, to_mark, to_node
from x402guard.stores.sqlite_rows import BELOW, ENTRIES, HOLDS, NODES, above
from x402guard.stores.views import StoreClock

R = TypeVar("R")


class SqliteReads(ABC):
    """The reads of ``LedgerReads``, each one query by ``_read``."""

    _clock: StoreClock

    @abstractmethod
    def _read(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int] = ()) -> list[R]:
        """Run one query, and return its rows converted."""

    def entries(self, node_id: str, *, grants: bool = True) -> Sequence[Entry]:
        """See ``LedgerReads.entries``."""
        only = "" if grants else f"WHERE event NOT IN {GRANTS}"
        sql = f"WITH RECURSIVE {BELOW} {ENTRIES} JOIN below ON entries.node_id = below.id {only} ORDER BY node_id, seq"
        return self._read(to_entry, sql, (node_id,))

    def tail(self, node_id: str, after: int) -> Sequence[Entry]:
        """See ``LedgerReads.tail``."""
        return self._read(to_entry, f"{ENTRIES} WHERE node_id = ? AND seq > ? ORDER BY seq", (node_id, after))

    def hold(self, hold_id: str) -> Hold | None:
        """See ``LedgerReads.hold``."""
        found = self._read(to_hold, f"{HOLDS} WHERE id = ?", (hold_id,))
        return found[0] if found else None

    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """See ``LedgerReads.nodes``."""
        if under is None:
            return self._read(to_node, f"{NODES} ORDER BY created_ms, rowid")
        related = "id IN (SELECT id FROM below UNION SELECT id FROM above)"
        sql = f"WITH RECURSIVE {BELOW}, {above(1)} {NODES} WHERE {related} ORDER BY created_ms, rowid"
        return self._read(to_node, sql, (under, under))

    def outstanding(self) -> Sequence[Hold]:
        """See ``LedgerReads.outstanding``."""
        return self._read(to_hold, f"{HOLDS} WHERE state = 'held' ORDER BY created_ms")

    def marks(self, kind: str, prefix: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``LedgerReads.marks``."""
        # A range, which the index of the keys has; U+10FFFF is behind every other character.
        sql = "SELECT kind, key, value FROM marks WHERE kind = ? AND key >= ? AND key < ? || char(1114111)"
        return {key: value for (_, key), value in self._read(to_mark, sql, (kind, prefix, prefix))}

    def now_ms(self) -> int:
        """See ``LedgerReads.now_ms``."""
        return self._clock()


class SqliteMoment(SqliteReads):
    """One moment of a ledger's file: all reads see the same commit, while others go on writing."""

    def __init__(self, connection: sqlite3.Connection, clock: StoreClock) -> None:
        connection.execute("BEGIN")
        self._connection, self._clock = connection, clock

    def _read(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int] = ()) -> list[R]:
        return [convert(row) for row in self._connection.execute(sql, values).fetchall()]

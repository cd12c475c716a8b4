"""Reads a ledger's tables: what a store in SQLite or PostgreSQL and one moment of it have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, TypeVar

from x402guard.kernel.rows import Entry, Hold, Node
from x402guard.ledger.evidence import UNSHOWN_S
from x402guard.ledger.store import GRANTS, STEPS
from x402guard.ledger.tree import path
from x402guard.stores.archive_file import ARCHIVED, read_archived, to_archived
from x402guard.stores.rows import (
    ENTRY_COLUMNS,
    HOLD_COLUMNS,
    NODE_COLUMNS,
    to_entry,
    to_hold,
    to_mark,
    to_node,
    unpacked,
)
from x402guard.stores.transacts import OPENED, StoreClock

R = TypeVar("R")


def names(columns: Sequence[str], of: str = "") -> str:
    """Return the names of columns, quoted and with the prefix *of*."""
    return ", ".join(f'{of}"{name}"' for name in columns)  # quoted, because `window` is a word of PostgreSQL's


NODES: Final = f"SELECT {names(NODE_COLUMNS)} FROM nodes"
HOLDS: Final = f"SELECT {names(HOLD_COLUMNS)} FROM holds"
ENTRIES: Final = f"SELECT {names(ENTRY_COLUMNS, 'entries.')} FROM entries"

BELOW: Final = "below (id) AS (SELECT id FROM nodes WHERE id = ? UNION ALL SELECT nodes.id FROM nodes JOIN below ON nodes.parent_id = below.id)"


@lru_cache(maxsize=256)
def places(count: int) -> str:
    """Return the places of *count* values."""
    return ", ".join("?" for _ in range(count))


@lru_cache(maxsize=256)
def above(count: int) -> str:
    """Return the SQL of a table with *count* nodes and all their ancestors."""
    first = f"SELECT id FROM nodes WHERE id IN ({places(count)})"
    return f"above (id) AS ({first} UNION SELECT nodes.parent_id FROM nodes JOIN above ON nodes.id = above.id)"


CURRENT: Final = "closed_ms IS NULL AND kind <> 'tokens'"
"""The condition of the index of what has not ended."""

_LAST: Final = "SELECT id FROM (SELECT id FROM nodes WHERE kind <> 'tokens' AND {} ORDER BY rowid DESC LIMIT ?) AS last"
_NEWEST: Final = (
    "SELECT id FROM (SELECT id FROM nodes WHERE kind <> 'tokens' ORDER BY rowid DESC LIMIT ? OFFSET ?) AS newest"
)
_ESCAPE: Final = "ESCAPE '!'"
_BUDGETS_LIKE: Final = f"SELECT id FROM nodes WHERE kind = 'budget' AND lower(name) LIKE ? {_ESCAPE}"

OUTERMOST: Final = (
    "FROM nodes JOIN nodes AS above ON above.id = nodes.parent_id "
    "WHERE nodes.rowid > ? AND nodes.kind = 'session' AND above.kind NOT IN ('session', 'scope')"
)
"""Sessions below no other one, after a row."""

LIVE_HOLDS: Final = "SELECT count(*) FROM holds WHERE state = 'held' AND kind <> 'tokens'"


def _as_pattern(text: str) -> str:
    """Return a pattern of LIKE for a text in lower case. What is not ASCII fits anything: who asks compares it again."""
    return "".join(f"!{char}" if char in "!%_" else char if char.isascii() else "%" for char in text.lower())


_LIVE: Final = "SELECT rowid AS at, id, created_ms FROM holds WHERE state = 'held' AND intent IS NOT NULL"
_ON_WORD: Final = (
    "SELECT rowid, id, created_ms FROM holds WHERE intent IS NOT NULL AND state = 'captured' AND evidence <> 'chain'"
)
_RECENT: Final = (
    "SELECT rowid, id, created_ms FROM holds WHERE intent IS NOT NULL AND deadline_unix >= ? AND "
    "((deadline_unix >= ? AND (state = 'captured' OR evidence = 'chain')) "
    "OR (state = 'captured' AND captured > 0 AND proof IS NULL))"
)
UNSETTLED: Final = f"SELECT id FROM ({_LIVE} UNION {_ON_WORD} UNION {_RECENT}) AS found ORDER BY created_ms, at"
"""The query of ``unsettled``: three that have an index each, and no OR of them."""


class SqlReads(ABC):
    """The reads of ``LedgerReads``, each one query by ``_read``."""

    _clock: StoreClock

    @abstractmethod
    def _read(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int] = ()) -> list[R]:
        """Run one query, and return its rows converted."""

    def write_openings(self, node_id: str | None = None, *, below: bool = False, older_s: float = 0.0) -> None:
        """See ``LedgerStore.write_openings``. A look at one moment has none."""
        del node_id, below, older_s

    def _look(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int]) -> list[R]:
        """Do the same for a few rows, which a signer or a payment waits for."""
        return self._read(convert, sql, values)

    def entries(self, node_id: str, *, grants: bool = True) -> Sequence[Entry]:
        """See ``LedgerReads.entries``."""
        self.write_openings(node_id, below=True)
        only = "" if grants else f"AND event NOT IN {GRANTS}"
        inside = "node_id IN (SELECT id FROM below)"  # not a join: SQLite would read the whole journal for it
        sql = f"WITH RECURSIVE {BELOW} {ENTRIES} WHERE {inside} {only} ORDER BY node_id, seq"
        here = self._read(to_entry, sql, (node_id,))
        sql = f"WITH RECURSIVE {BELOW} {ARCHIVED} WHERE {inside}"
        away = self._read(to_archived, sql, (node_id,))  # after the entries: what is moved meanwhile is then in both
        if not away:
            return here
        moved = (each for each in read_archived(away) if isinstance(each, Entry))
        both = chain(moved, here)
        found = {(entry.node_id, entry.seq): entry for entry in both if grants or entry.event not in GRANTS}
        return [found[key] for key in sorted(found)]

    def hashes(self, wanted: Collection[tuple[str, int]], *, archives: bool) -> Mapping[tuple[str, int], str]:
        """See ``Audited.hashes``."""
        sql = "SELECT hash FROM entries WHERE node_id = ? AND seq = ?"
        found = {key: row for key in wanted for row in self._read(lambda row: str(unpacked(row[0])), sql, key)}
        away = self._read(to_archived, ARCHIVED)
        found |= {(row.node_id, row.seq): row.said.head for row in away if (row.node_id, row.seq) in wanted}
        left = set(wanted) - found.keys()
        if left and archives:
            ids = {node_id for node_id, _ in left}
            for each in read_archived([row for row in away if row.node_id in ids]):
                if isinstance(each, Entry) and (each.node_id, each.seq) in left:
                    found[each.node_id, each.seq] = each.hash
        return found

    def steps(self, *, archives: bool) -> Sequence[Entry]:
        """See ``Audited.steps``."""
        found = self._read(to_entry, f"{ENTRIES} WHERE event IN ({places(len(STEPS))})", STEPS)
        away = self._read(to_archived, ARCHIVED) if archives else []  # after the entries, as above
        moved = [each for each in read_archived(away) if isinstance(each, Entry) and each.event in STEPS]
        both = {(entry.node_id, entry.seq): entry for entry in (*moved, *found)}
        return list(both.values())

    def tail(self, node_id: str, after: int) -> Sequence[Entry]:
        """See ``LedgerReads.tail``."""
        self.write_openings(node_id)
        return self._read(to_entry, f"{ENTRIES} WHERE node_id = ? AND seq > ? ORDER BY seq", (node_id, after))

    def hold(self, hold_id: str) -> Hold | None:
        """See ``LedgerReads.hold``."""
        found = self._look(to_hold, f"{HOLDS} WHERE id = ?", (hold_id,))
        return found[0] if found else None

    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """See ``LedgerReads.nodes``."""
        self.write_openings(under, below=True)
        if under is None:
            return self._read(to_node, f"{NODES} ORDER BY created_ms, rowid")
        related = "id IN (SELECT id FROM below UNION SELECT id FROM above)"
        sql = f"WITH RECURSIVE {BELOW}, {above(1)} {NODES} WHERE {related} ORDER BY created_ms, rowid"
        return self._look(to_node, sql, (under, under))

    def current(self, newest: int) -> Sequence[Node]:
        """See ``LedgerReads.current``."""
        self.write_openings()
        return self._nodes_of(f"SELECT id FROM nodes WHERE {CURRENT} UNION {_NEWEST}", (newest, 0))

    def newest(self, most: int, skip: int = 0) -> Sequence[Node]:
        """See ``LedgerReads.newest``."""
        self.write_openings()
        return self._nodes_of(_NEWEST, (most, skip), with_above=False)

    def named(self, word: str, most: int) -> Sequence[Node]:
        """See ``LedgerReads.named``."""
        self.write_openings()
        sql = f"{_LAST.format('name = ?')} UNION SELECT id FROM nodes WHERE id = ? AND kind <> 'tokens'"
        return self._nodes_of(sql, (word, most, word), with_above=False)[-most:]

    def fitting(self, text: str, most: int) -> Sequence[Node]:
        """See ``LedgerReads.fitting``."""
        self.write_openings()
        like = f"%{_as_pattern(text)}%"
        fits = f"(lower(id) LIKE ? {_ESCAPE} OR lower(name) LIKE ? {_ESCAPE} OR parent_id IN ({_BUDGETS_LIKE}))"
        return self._nodes_of(_LAST.format(fits), (like, like, like, most))

    def _nodes_of(self, ids: str, values: Sequence[str | int], *, with_above: bool = True) -> Sequence[Node]:
        """Return the nodes whose ids a query finds, oldest first, and all above them."""
        both = f"{ids} UNION SELECT nodes.parent_id FROM nodes JOIN here ON nodes.id = here.id" if with_above else ids
        sql = (
            f"WITH RECURSIVE here (id) AS ({both}) {NODES} WHERE id IN (SELECT id FROM here) ORDER BY created_ms, rowid"
        )
        return self._read(to_node, sql, values)

    def forgotten(self) -> Mapping[str, tuple[int, int]]:
        """See ``LedgerReads.forgotten``."""
        return {}

    def tally(self) -> tuple[int, int]:
        """See ``LedgerReads.tally``."""
        self.write_openings()
        [sessions] = self._read(lambda row: int(row[0]), f"SELECT count(*) {OUTERMOST}", (0,))
        [live] = self._read(lambda row: int(row[0]), LIVE_HOLDS)
        return sessions, live

    def path(self, node_id: str) -> Sequence[Node]:
        """See ``LedgerReads.path``."""
        self.write_openings(node_id)
        sql = f"WITH RECURSIVE {above(1)} {NODES} WHERE id IN (SELECT id FROM above)"
        found = {node.id: node for node in self._look(to_node, sql, (node_id,))}
        return path(found, node_id) if found else []

    def outstanding(self) -> Sequence[Hold]:
        """See ``LedgerReads.outstanding``."""
        return self._read(to_hold, f"{HOLDS} WHERE state = 'held' ORDER BY created_ms")

    def marks(self, kind: str, prefix: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``LedgerReads.marks``."""
        if kind == OPENED:
            self.write_openings()
        # A range, which the index of the keys has; U+10FFFF is behind every other character.
        sql = "SELECT kind, key, value FROM marks WHERE kind = ? AND key >= ? AND key < ?"
        return {key: value for (_, key), value in self._look(to_mark, sql, (kind, prefix, f"{prefix}\U0010ffff"))}

    def unsettled(self, now_unix: int) -> Sequence[str]:
        """See ``LedgerStore.unsettled``."""
        return self._read(lambda row: str(row[0]), UNSETTLED, (now_unix - UNSHOWN_S, now_unix))

    def size(self) -> tuple[int, int]:
        """See ``Audited.size``."""
        away = "SELECT coalesce(sum(n), 0) FROM (SELECT max(seq) AS n FROM archived GROUP BY node_id) AS a"
        [found] = self._read(tuple, f"SELECT (SELECT count(*) FROM entries) + ({away}), (SELECT count(*) FROM nodes)")
        return int(found[0]), int(found[1])

    def as_of_ms(self) -> int | None:
        """See ``LedgerStore.as_of_ms``."""
        return None

    def now_ms(self) -> int:
        """See ``LedgerReads.now_ms``."""
        return self._clock()

"""The reads of a ledger in PostgreSQL, in which nodes keep idle budget, and what is asked of a server about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from threading import Lock
from typing import Any, Final, TypeVar

from typing_extensions import override

from x402guard.kernel.rows import Node
from x402guard.ledger.tree import path, without_idle
from x402guard.stores.postgres_schema import BUSY, LOOKS_BY_INDEX, SCHEMA, VERSION
from x402guard.stores.postgres_server import BROKEN, STATEMENT_MS, Known, Server, is_there, unavailable
from x402guard.stores.rows import NODE_COLUMNS, to_node
from x402guard.stores.sql_reads import BELOW, SqlReads, above, names
from x402guard.stores.transacts import StoreClock

R = TypeVar("R")

READING: Final = "cannot read the ledger"
REPORT_MS: Final = 600_000
"""How long the server may work on a report, in milliseconds."""


_Read = Callable[[Callable[[Sequence[Any]], tuple[Node, bool]], str, Sequence[str | int]], list[tuple[Node, bool]]]


class PostgresReads(SqlReads):
    """The reads of a ledger in which nodes keep idle budget."""

    @override
    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """See ``LedgerReads.nodes``."""
        self.write_openings(under, below=True)
        columns, order = names(NODE_COLUMNS), "ORDER BY created_ms, rowid"
        sql, values = f"SELECT {columns}, true FROM nodes {order}", tuple[str, ...]()
        if under is not None:
            related = "SELECT id FROM below UNION SELECT id FROM above"
            sql = (
                f"WITH RECURSIVE {BELOW}, {above(1)}, {BUSY} SELECT {columns}, id IN ({related}) FROM nodes "
                f"WHERE id IN ({related} UNION SELECT id FROM busy) {order}"
            )
            values = (under, under)
        return self._without_idle(self._read if under is None else self._look, sql, values)

    @override
    def _nodes_of(self, ids: str, values: Sequence[str | int], *, with_above: bool = True) -> Sequence[Node]:
        above = "SELECT id FROM first UNION SELECT nodes.parent_id FROM nodes JOIN here ON nodes.id = here.id"
        sql = (
            f"WITH RECURSIVE first (id) AS ({ids}), here (id) AS ({above if with_above else 'SELECT id FROM first'}), {BUSY} "
            f"SELECT {names(NODE_COLUMNS)}, id IN (SELECT id FROM here) FROM nodes "
            "WHERE id IN (SELECT id FROM here UNION SELECT id FROM busy) ORDER BY created_ms, rowid"
        )
        return self._without_idle(self._read, sql, values)

    @override
    def path(self, node_id: str) -> Sequence[Node]:
        """See ``LedgerReads.path``."""
        self.write_openings(node_id)
        sql = (
            f"WITH RECURSIVE {above(1)}, {BUSY} SELECT {names(NODE_COLUMNS)}, id IN (SELECT id FROM above) FROM nodes "
            "WHERE id IN (SELECT id FROM above UNION SELECT id FROM busy)"
        )
        found = {node.id: node for node in self._without_idle(self._look, sql, (node_id,))}
        return path(found, node_id) if found else []

    def _without_idle(self, read: _Read, sql: str, values: Sequence[str | int]) -> list[Node]:
        """Run a query whose last column says which nodes are wanted; the others are busy."""
        found = read(lambda row: (to_node(row[: len(NODE_COLUMNS)]), row[len(NODE_COLUMNS)]), sql, values)
        return without_idle((node for node, wanted in found if wanted), {node.id: node for node, _ in found})


class ServerReads(PostgresReads):
    """The reads of a store over a connection of its own."""

    _url: str
    _pid: int
    _closed: bool
    _known: Known
    _reader: Server
    _read_lock: Lock
    _check_usable: Callable[[], None]
    _trouble: Callable[[str], AbstractContextManager[None]]

    @property
    def schema(self) -> int:
        """See ``LedgerStore.schema``."""
        return VERSION

    def _read(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int] = ()) -> list[R]:
        return self._rows(convert, sql, values, statement_ms=REPORT_MS)

    @override
    def _look(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int]) -> list[R]:
        return self._rows(convert, LOOKS_BY_INDEX + sql, values, statement_ms=STATEMENT_MS)

    def _rows(
        self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int], *, statement_ms: int
    ) -> list[R]:
        if self._closed and self._pid == os.getpid():
            with self._trouble(READING), closing(Server(self._url, self._known.check)) as server:
                return [convert(row) for row in server.run(sql, values, statement_ms=statement_ms)]
        self._check_usable()
        with self._trouble(READING), self._read_lock:
            self._check_usable()
            was_connected = self._reader.is_connected
            try:
                rows = self._reader.run(sql, values, statement_ms=statement_ms)
            except BROKEN:
                if self._reader.is_connected or not was_connected:
                    raise
                rows = self._reader.run(sql, values, statement_ms=statement_ms)
            return [convert(row) for row in rows]

    @override
    def as_of_ms(self) -> int | None:
        """See ``LedgerStore.as_of_ms``: a replica is behind its primary server."""
        replayed = "(extract(epoch FROM pg_last_xact_replay_timestamp()) * 1000)::bigint"
        [found] = self._read(
            tuple, f"SELECT pg_is_in_recovery(), coalesce({replayed}, (SELECT max(last_ms) FROM nodes), 0)"
        )
        return int(found[1]) if found[0] else None


class PostgresMoment(PostgresReads):
    """One moment of a ledger in PostgreSQL: all reads see the same commit, while others go on writing."""

    def __init__(self, server: Server, clock: StoreClock) -> None:
        self._server, self._clock = server, clock

    def _read(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int] = ()) -> list[R]:
        return [convert(row) for row in self._server.say(sql, values, statement_ms=REPORT_MS)]


_LACKING: Final = f"""
SELECT w.place FROM unnest(?::text[], ?::bigint[], ?::text[]) WITH ORDINALITY AS w (node_id, seq, hash, place)
WHERE NOT EXISTS (SELECT FROM {SCHEMA}.entries AS e WHERE e.node_id = w.node_id AND e.seq = w.seq AND e.hash = w.hash)
    AND NOT EXISTS (SELECT FROM {SCHEMA}.archived AS a WHERE a.node_id = w.node_id AND a.seq >= w.seq)
ORDER BY w.place LIMIT 1"""


def lacking(server: Server, entries: Sequence[Mapping[str, str | int]]) -> Mapping[str, str | int] | None:
    """Return the first of these entries that is neither in the journal, by its node, number and hash, nor archived; or None."""
    columns = [[entry[name] for entry in entries] for name in ("node_id", "seq", "hash")]
    found = server.run(_LACKING, columns) if entries else []
    return entries[found[0][0] - 1] if found else None


def may_change(server: Server) -> bool:
    """Return whether this is no replica, and the role may change the ledger."""
    sql = f"SELECT NOT pg_is_in_recovery() AND has_table_privilege('{SCHEMA}.nodes', 'UPDATE')"
    return bool(server.run(sql)[0][0])


def has_ledger(url: str) -> bool:
    """Return whether the database has a ledger. Raises ``LedgerUnavailable`` if it cannot be asked."""
    with unavailable("cannot open the ledger", url), closing(Server(url, lambda _server: None)) as server:
        return is_there(server, url)

"""The reads of a ledger in PostgreSQL, in which nodes keep idle budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from typing_extensions import override

from x402guard.ledger.model import Node
from x402guard.ledger.tree import without_idle
from x402guard.stores.postgres_schema import BUSY
from x402guard.stores.postgres_server import Server
from x402guard.stores.rows import NODE_COLUMNS, to_node
from x402guard.stores.sql_reads import BELOW, SqlReads, above, names
from x402guard.stores.views import StoreClock

R = TypeVar("R")

REPORT_MS: Final = 600_000
"""How long the server may work on a report, in milliseconds."""


class PostgresReads(SqlReads):
    """The reads of a ledger in which nodes keep idle budget."""

    @override
    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """See ``LedgerReads.nodes``."""
        columns, order = names(NODE_COLUMNS), "ORDER BY created_ms, rowid"
        sql, values = f"SELECT {columns}, true FROM nodes {order}", tuple[str, ...]()
        if under is not None:
            related = "SELECT id FROM below UNION SELECT id FROM above"
            sql = (
                f"WITH RECURSIVE {BELOW}, {above(1)}, {BUSY} SELECT {columns}, id IN ({related}) FROM nodes "
                f"WHERE id IN ({related} UNION SELECT id FROM busy) {order}"
            )
            values = (under, under)
        found = self._read(lambda row: (to_node(row[: len(NODE_COLUMNS)]), row[len(NODE_COLUMNS)]), sql, values)
        return without_idle((node for node, wanted in found if wanted), {node.id: node for node, _ in found})


class PostgresMoment(PostgresReads):
    """One moment of a ledger in PostgreSQL: all reads see the same commit, while others go on writing."""

    def __init__(self, server: Server, clock: StoreClock) -> None:
        self._server, self._clock = server, clock

    def _read(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int] = ()) -> list[R]:
        return [convert(row) for row in self._server.say(sql, values, statement_ms=REPORT_MS)]

"""Verifies an SQLite ledger in one snapshot."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from x402guard.ledger.verify import Balances, HoldRow, verify_balances, verify_journal
from x402guard.stores.rows import ENTRY_COLUMNS, NODE_COLUMNS, to_entry, to_node

MOST_AT_OPENING: Final = 10_000
"""Opening a ledger reads its whole journal up to this many entries; of a longer one only the sums."""

_SUMS: Final = "SELECT node_id, sum(captured), sum(held), sum(granted_in), sum(granted_out), max(seq) FROM entries GROUP BY node_id"
_HELD: Final = "SELECT node_id, sum(amount) FROM holds WHERE state = 'held' GROUP BY node_id"


def audit(connection: sqlite3.Connection, *, most: int | None = MOST_AT_OPENING) -> Sequence[str]:
    """Return the inconsistencies, one sentence each. Of a journal of more than *most* entries, checks only the sums."""
    connection.execute("BEGIN")
    try:
        nodes = [to_node(row) for row in connection.execute(f"SELECT {', '.join(NODE_COLUMNS)} FROM nodes")]
        sums = {node_id: Balances(*rest) for node_id, *rest in connection.execute(_SUMS)}
        problems = verify_balances(nodes, sums, dict(connection.execute(_HELD)))
        if problems or (most is not None and sum(balances.seq for balances in sums.values()) > most):
            return problems
        columns = ", ".join(ENTRY_COLUMNS)
        entries = map(to_entry, connection.execute(f"SELECT {columns} FROM entries ORDER BY node_id, seq"))
        holds = [HoldRow(*row) for row in connection.execute("SELECT id, node_id, state, amount, captured FROM holds")]
        return verify_journal(nodes, entries, holds)
    finally:
        connection.execute("ROLLBACK")

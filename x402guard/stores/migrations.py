"""Defines the SQLite schema as numbered migrations. Never change a released migration; add the next one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Final

from x402guard.errors import LedgerUnavailable
from x402guard.stores.rows import ENTRY_COLUMNS, Value, packed

APPLICATION_ID: Final = 0x78343032  # "x402"

_FIRST: Final = """
CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    parent_id TEXT REFERENCES nodes (id),
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    max_nanos INTEGER,
    created_ms INTEGER NOT NULL,
    last_ms INTEGER NOT NULL,
    captured INTEGER NOT NULL CHECK (captured >= 0),
    held INTEGER NOT NULL CHECK (held >= 0),
    granted_out INTEGER NOT NULL CHECK (granted_out >= 0),
    granted_in INTEGER NOT NULL CHECK (granted_in >= 0),
    state TEXT NOT NULL,
    terminated_by TEXT,
    starved INTEGER NOT NULL,
    openers TEXT NOT NULL,
    closed_ms INTEGER,
    seq INTEGER NOT NULL,
    head TEXT NOT NULL
) STRICT;
CREATE INDEX nodes_by_parent ON nodes (parent_id);

CREATE TABLE holds (
    id TEXT PRIMARY KEY,
    node_id TEXT NOT NULL REFERENCES nodes (id),
    kind TEXT NOT NULL,
    amount INTEGER NOT NULL CHECK (amount > 0),
    created_ms INTEGER NOT NULL,
    deadline_unix INTEGER NOT NULL,
    flying_since_ms INTEGER NOT NULL,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    chain_evidence INTEGER NOT NULL,
    purchase_key TEXT,
    intent TEXT,
    state TEXT NOT NULL,
    captured INTEGER NOT NULL CHECK (captured >= 0),
    evidence TEXT,
    doubt TEXT,
    claim TEXT,
    proof TEXT,
    ended_by TEXT,
    checked_ms INTEGER NOT NULL,
    presented INTEGER NOT NULL
) STRICT;
CREATE INDEX live_by_purchase ON holds (purchase_key, created_ms) WHERE state = 'held';
CREATE INDEX live_by_node ON holds (node_id, deadline_unix) WHERE state = 'held';
CREATE INDEX unproven ON holds (state = 'captured', checked_ms, created_ms)
    WHERE chain_evidence = 1 AND (state = 'held' OR evidence IN ('claimed', 'chain_head'));

CREATE TABLE entries (
    node_id TEXT NOT NULL REFERENCES nodes (id),
    seq INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    event TEXT NOT NULL,
    hold_id TEXT,
    captured INTEGER NOT NULL,
    held INTEGER NOT NULL,
    granted_in INTEGER NOT NULL,
    granted_out INTEGER NOT NULL,
    data TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (node_id, seq)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries
BEGIN SELECT RAISE (ABORT, 'the journal is append-only'); END;
CREATE TRIGGER entries_are_never_removed BEFORE DELETE ON entries
BEGIN SELECT RAISE (ABORT, 'the journal is append-only'); END;

CREATE TABLE marks (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID;
"""

_WINDOWS: Final = """
ALTER TABLE nodes ADD COLUMN live INTEGER NOT NULL DEFAULT 0 CHECK (live >= 0);
ALTER TABLE nodes ADD COLUMN window TEXT;
ALTER TABLE nodes ADD COLUMN since_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN past INTEGER NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN reserve INTEGER NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN finalized INTEGER NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN soft TEXT NOT NULL DEFAULT '[]';
ALTER TABLE nodes ADD COLUMN warned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE holds ADD COLUMN closed_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN trip_reason TEXT;
ALTER TABLE nodes ADD COLUMN wrote INTEGER NOT NULL DEFAULT 0;
UPDATE nodes SET wrote = seq;
CREATE TRIGGER nodes_are_written_by_those_who_know_them BEFORE UPDATE ON nodes WHEN NEW.seq <> OLD.seq AND NEW.wrote <> NEW.seq
BEGIN SELECT RAISE (ABORT, 'a newer x402guard has opened this ledger; update this one, and start it again'); END;
UPDATE nodes SET live = (
    WITH RECURSIVE inside (id) AS (
        SELECT nodes.id UNION ALL SELECT child.id FROM nodes AS child JOIN inside ON child.parent_id = inside.id
    )
    SELECT sum(held) FROM nodes AS one WHERE one.id IN (SELECT id FROM inside)
);
"""

_DELIVERY: Final = """
ALTER TABLE holds ADD COLUMN delivery TEXT NOT NULL DEFAULT 'done';
UPDATE holds SET delivery = iif(doubt IS NULL, 'open', 'lost')
    WHERE state = 'held' AND intent IS NOT NULL AND (claim IS NULL OR doubt IS NOT NULL);
DROP INDEX live_by_purchase;
DROP INDEX live_by_node;
CREATE INDEX live_by_deadline ON holds (chain_evidence, deadline_unix) WHERE state = 'held';
CREATE INDEX by_purchase ON holds (purchase_key, delivery, created_ms) WHERE purchase_key IS NOT NULL;
"""

_GENERATION: Final = """
CREATE TABLE generation (n INTEGER NOT NULL, spent INTEGER NOT NULL) STRICT;
INSERT INTO generation
    SELECT 0, coalesce(sum(captured + held + granted_out - live), 0) FROM nodes WHERE id = 'wallet';
CREATE TRIGGER what_the_wallet_has_spent_never_falls AFTER UPDATE ON nodes WHEN NEW.id = 'wallet'
BEGIN UPDATE generation SET spent = spent + max(0,
    NEW.captured + NEW.held + NEW.granted_out - NEW.live - OLD.captured - OLD.held - OLD.granted_out + OLD.live);
END;
"""

_UNSETTLED: Final = """
CREATE INDEX payments_by_deadline ON holds (deadline_unix) WHERE intent IS NOT NULL;
CREATE INDEX payments_on_word ON holds (created_ms) WHERE intent IS NOT NULL AND state = 'captured' AND evidence <> 'chain';
"""

_DEADLINES: Final = """
ALTER TABLE nodes ADD COLUMN until_ms INTEGER;
"""

_ARCHIVED: Final = """
CREATE TABLE archived (
    node_id TEXT NOT NULL REFERENCES nodes (id),
    seq INTEGER NOT NULL,
    file TEXT NOT NULL,
    digest TEXT NOT NULL,
    said TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    PRIMARY KEY (node_id, seq)
) STRICT, WITHOUT ROWID;
DROP TRIGGER entries_are_never_removed;
CREATE TRIGGER entries_are_never_removed BEFORE DELETE ON entries
WHEN NOT EXISTS (SELECT 1 FROM archived WHERE node_id = OLD.node_id AND seq >= OLD.seq)
BEGIN SELECT RAISE (ABORT, 'the journal is append-only'); END;
"""

_JOURNAL: Final = """
ALTER TABLE entries RENAME TO x402guard_entries_of_version_7;
CREATE TABLE entries (
    node_id TEXT NOT NULL REFERENCES nodes (id),
    seq INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    event TEXT NOT NULL,
    hold_id ANY,
    captured INTEGER NOT NULL,
    held INTEGER NOT NULL,
    granted_in INTEGER NOT NULL,
    granted_out INTEGER NOT NULL,
    data TEXT NOT NULL,
    previous ANY NOT NULL,
    hash ANY NOT NULL,
    PRIMARY KEY (node_id, seq)
) STRICT, WITHOUT ROWID;
"""
_JOURNAL_IS_COPIED: Final = (
    "DROP TABLE x402guard_entries_of_version_7",
    """CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries
BEGIN SELECT RAISE (ABORT, 'the journal is append-only'); END""",
    """CREATE TRIGGER entries_are_never_removed BEFORE DELETE ON entries
WHEN NOT EXISTS (SELECT 1 FROM archived WHERE node_id = OLD.node_id AND seq >= OLD.seq)
BEGIN SELECT RAISE (ABORT, 'the journal is append-only'); END""",
)
"""What follows once the entries are copied, with hashes as bytes."""

COUNTED_FROM: Final = 4
"""The first version that counts its durable commits, in table ``generation``."""

MOVED: Final = 1_000_000
"""The version of a ledger that was moved to another place, which table ``moved`` names. Every library refuses it."""

MIGRATIONS: Final[tuple[str, ...]] = (
    _FIRST,
    _WINDOWS,
    _DELIVERY,
    _GENERATION,
    _UNSETTLED,
    _DEADLINES,
    _ARCHIVED,
    _JOURNAL,
)
"""Migration N takes a ledger from version N to N + 1, by ``migrate``. The version is SQLite's ``user_version``."""


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Take a ledger from *version* to the newest one, step by step; each step is made whole or not at all.

    A new ledger, of version 0, is made in one step, so that a full disk leaves none that has begun.

    Triggers, views and indexes that an owner has added stay. What is wrong in rows is left to the audit. Raises
    ``LedgerUnavailable`` for a column that an owner has added to the journal.
    """
    wipes = connection.execute("PRAGMA secure_delete").fetchone()[0]
    # What is copied is not written over with zeros first: that would double the journal file.
    for setting in ("foreign_keys = OFF", "legacy_alter_table = ON", "secure_delete = OFF"):
        connection.execute(f"PRAGMA {setting}")
    try:
        if version == 0:
            copied = "".join(f"{statement};" for statement in _JOURNAL_IS_COPIED)
            steps = "".join(f"{step}{copied}" if step is _JOURNAL else step for step in MIGRATIONS)
            connection.executescript(f"BEGIN IMMEDIATE; {steps}")
            _commit(connection, len(MIGRATIONS))
        for number in range(version or len(MIGRATIONS), len(MIGRATIONS)):
            step = MIGRATIONS[number]
            added = _added(connection) if step is _JOURNAL else []
            connection.executescript(f"BEGIN IMMEDIATE; {step}")
            if step is _JOURNAL:
                connection.executemany(_COPY, _packed_entries(connection))
                for [statement] in (*zip(_JOURNAL_IS_COPIED), *added):
                    connection.execute(statement)
            _commit(connection, number + 1)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.text_factory = str
        for setting in (f"secure_delete = {wipes}", "legacy_alter_table = OFF", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {setting}")


def _commit(connection: sqlite3.Connection, version: int) -> None:
    connection.execute(f"PRAGMA user_version = {version}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("COMMIT")


_ADDED: Final = (
    "SELECT sql FROM sqlite_master WHERE lower(tbl_name) = 'entries' AND type IN ('trigger', 'index') AND sql IS NOT NULL "
    "AND lower(name) NOT IN ('entries_are_never_changed', 'entries_are_never_removed')"
)
_TEXTS: Final = ("node_id", "event", "data")
_COPY: Final = (
    f"INSERT INTO entries VALUES ({', '.join('CAST(? AS TEXT)' if name in _TEXTS else '?' for name in ENTRY_COLUMNS)})"
)
_READ: Final = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM x402guard_entries_of_version_7 ORDER BY node_id, seq"
_PACKED: Final = tuple(name in ("hold_id", "previous", "hash") for name in ENTRY_COLUMNS)


def _added(connection: sqlite3.Connection) -> list[tuple[str]]:
    """Return the statements of what an owner has added to the journal."""
    names = [str(row[1]) for row in connection.execute("PRAGMA table_xinfo(entries)")]
    for name in names:
        if name not in ENTRY_COLUMNS:
            raise LedgerUnavailable(
                f"the table entries has a column {name!r} that x402guard has not made, and its next version would lose it",
                advice=(
                    f"Nothing was paid. Copy what the column has, drop what uses it, run ALTER TABLE entries DROP COLUMN "
                    f"{name!r} in sqlite3, and repeat the call."
                ),
                retry="after_change",
            )
    return connection.execute(_ADDED).fetchall()


def _packed_entries(connection: sqlite3.Connection) -> Iterator[list[Value | bytes | bytearray]]:
    """Yield the entries as they are stored from version 8 on. No function of SQL: SQLite takes Ctrl-C in one for an error.

    Texts are read as bytes, because one that is not UTF-8 is for the audit to name.
    """
    connection.text_factory = bytes
    for row in connection.execute(_READ):
        yield [
            value if value is None or not short else _packed(value) for value, short in zip(row, _PACKED, strict=True)
        ]


def _packed(value: bytes) -> str | bytes | bytearray:
    try:
        return packed(value.decode())
    except UnicodeDecodeError:
        return value

"""Defines the schema of a ledger's file, by which number a file is one, and how it gets to a next version."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from x402guard.errors import LedgerUnavailable
from x402guard.stores.file_errors import foreign, moved, newer, put_back, unreleased

APPLICATION_ID: Final = 0x78346C67
"""The letters "x4lg" in a file's header. Ledgers of the commits before have "x402", and versions 1 to 8 of their own.

With another number here, none of those versions is taken for one of these.
"""

_UNRELEASED_ID: Final = 0x78343032
_UNRELEASED_TABLES: Final = frozenset({"nodes", "holds", "entries", "marks"})

SCHEMA: Final = """
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
    head TEXT NOT NULL,
    live INTEGER NOT NULL CHECK (live >= 0),
    window TEXT,
    since_ms INTEGER NOT NULL,
    past INTEGER NOT NULL,
    reserve INTEGER NOT NULL,
    finalized INTEGER NOT NULL,
    soft TEXT NOT NULL,
    warned INTEGER NOT NULL,
    trip_reason TEXT,
    until_ms INTEGER
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
    presented INTEGER NOT NULL,
    closed_ms INTEGER NOT NULL,
    delivery TEXT NOT NULL
) STRICT;
CREATE INDEX live_by_deadline ON holds (chain_evidence, deadline_unix) WHERE state = 'held';
CREATE INDEX by_purchase ON holds (purchase_key, delivery, created_ms) WHERE purchase_key IS NOT NULL;
CREATE INDEX unproven ON holds (state = 'captured', checked_ms, created_ms)
    WHERE chain_evidence = 1 AND (state = 'held' OR evidence IN ('claimed', 'chain_head'));
CREATE INDEX payments_by_deadline ON holds (deadline_unix) WHERE intent IS NOT NULL;
CREATE INDEX payments_on_word ON holds (created_ms) WHERE intent IS NOT NULL AND state = 'captured' AND evidence <> 'chain';

CREATE TABLE archived (
    node_id TEXT NOT NULL REFERENCES nodes (id),
    seq INTEGER NOT NULL,
    file TEXT NOT NULL,
    digest TEXT NOT NULL,
    said TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    PRIMARY KEY (node_id, seq)
) STRICT, WITHOUT ROWID;

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
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries
BEGIN SELECT RAISE (ABORT, 'the journal is append-only'); END;
CREATE TRIGGER entries_are_never_removed BEFORE DELETE ON entries
WHEN NOT EXISTS (SELECT 1 FROM archived WHERE node_id = OLD.node_id AND seq >= OLD.seq)
BEGIN SELECT RAISE (ABORT, 'the journal is append-only'); END;

CREATE TABLE marks (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE generation (n INTEGER NOT NULL, spent INTEGER NOT NULL) STRICT;
INSERT INTO generation VALUES (0, 0);
CREATE TRIGGER what_the_wallet_has_spent_never_falls AFTER UPDATE ON nodes WHEN NEW.id = 'wallet'
BEGIN UPDATE generation SET spent = spent + max(0,
    NEW.captured + NEW.held + NEW.granted_out - NEW.live - OLD.captured - OLD.held - OLD.granted_out + OLD.live);
END;
"""
"""Version 1. It stays as it is once it is released: what changes then is a step of ``MIGRATIONS``."""

MIGRATIONS: Final[tuple[str, ...]] = (
    # What is looked at each second: what has not ended, and the sessions of a name.
    """
CREATE INDEX nodes_current ON nodes (id) WHERE closed_ms IS NULL AND kind <> 'tokens';
CREATE INDEX nodes_by_name ON nodes (name) WHERE kind <> 'tokens';
""",
)
"""Step N takes a ledger from version N + 1 to N + 2, in SQL. The version is SQLite's ``user_version``."""

MOVED: Final = 1_000_000
"""The version of a ledger that was moved to another place, which table ``moved`` names. Every library refuses it."""


OLDEST: Final = 1
"""The oldest version that this library reads and writes as it is: its parts are tables that have not changed since."""


def newest() -> int:
    """Return the version that this library makes, and takes a ledger to when its owner says so."""
    return 1 + len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Take a ledger from *version* to the newest one, wholly or not at all; a file of version 0 is to become one."""
    steps = "".join((SCHEMA, *MIGRATIONS)[version:])
    stamps = f"PRAGMA user_version = {newest()}; PRAGMA application_id = {APPLICATION_ID};"
    try:
        connection.executescript(f"BEGIN IMMEDIATE; {steps} {stamps} COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@lru_cache(maxsize=4)
def _ours(version: int) -> frozenset[tuple[str, str, str]]:
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript("".join((SCHEMA, *MIGRATIONS)[:version]))
        return frozenset(made.execute(_PARTS))


_PARTS: Final = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"


def strange_parts(query: Callable[[str, Sequence[Any]], Iterable[Any]]) -> list[str]:
    """Return what a ledger's file does beside the schema, or not as it says, one sentence each.

    A trigger or a view changes what is written or read without a word in the journal. An index of its owner's may stay,
    and so may a table of another name.
    """
    found = {(str(kind), str(name), str(sql)) for kind, name, sql in query(_PARTS, ())}
    [[version]] = query("PRAGMA user_version", ())
    ours = _ours(version if version <= newest() else OLDEST)  # a ledger that was moved may have been of any version
    others = [part for part in found - ours if not part[2].upper().startswith(_STAYS.get(part[0], ("\0",)))]
    added = [f"it has a {kind} {name!r}, which is not the ledger's" for kind, name, _ in others]
    gone = [f"its {kind} {name!r} is gone, or another one" for kind, name, _ in ours - found]
    return sorted({*added, *gone})


_STAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "table": ("CREATE TABLE",),
    "index": ("CREATE INDEX", "CREATE UNIQUE INDEX"),
}
"""What its owner may add: anything else acts. The type is compared as it is written; SQLite reads it in any case."""


def not_a_ledger(connection: sqlite3.Connection, path: Path, application_id: int) -> LedgerUnavailable:
    """Return the error for a file with another *application_id*: another program's, or one from before the first release."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    is_unreleased = application_id == _UNRELEASED_ID or (application_id == 0 and tables >= _UNRELEASED_TABLES)
    return unreleased(path) if is_unreleased else foreign(path)


def refuse_moved(connection: sqlite3.Connection, version: int, path: Path) -> None:
    """Raise ``LedgerUnavailable`` for a ledger that was moved."""
    if version == MOVED:
        raise moved(path, moved_to(connection))


def refuse_another_version(connection: sqlite3.Connection, path: Path, known: int) -> None:
    """Raise ``LedgerUnavailable`` for a ledger of an earlier version than the one *known*, or of a later one than this library's.

    What was moved can still be looked at here.
    """
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if known <= version <= newest() or version == MOVED:
        return
    if version < known:
        raise put_back(path, version)
    raise newer(path, "changed", version)


def moved_to(connection: sqlite3.Connection) -> str:
    """Return where the ledger of a file was moved to."""
    return str(connection.execute("SELECT url FROM moved").fetchone()[0])

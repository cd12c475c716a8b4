"""Moves a ledger from an SQLite file to PostgreSQL: the file is closed for good first, so that there is never a second budget."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg

from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.stores.audit import audit
from x402guard.stores.file_errors import foreign, gone, moved, unavailable, unsound
from x402guard.stores.file_lock import FileTurn, Generation
from x402guard.stores.migrations import MIGRATIONS, MOVED
from x402guard.stores.postgres import PostgresStore
from x402guard.stores.postgres_schema import SCHEMA
from x402guard.stores.postgres_server import WholeNumber, with_places
from x402guard.stores.postgres_server import unavailable as server_unavailable
from x402guard.stores.rows import ENTRY_COLUMNS, HOLD_COLUMNS, NODE_COLUMNS
from x402guard.stores.sql_reads import names
from x402guard.stores.sqlite import APPLICATION_ID, moved_to, one_moment

_BUSY_S: Final = 30.0
_TABLES: Final[tuple[tuple[str, Sequence[str], str], ...]] = (
    ("nodes", NODE_COLUMNS, "ORDER BY rowid"),  # parents first
    ("holds", HOLD_COLUMNS, "ORDER BY rowid"),
    ("entries", ENTRY_COLUMNS, "ORDER BY node_id, seq"),
    ("marks", ("kind", "key", "value"), "WHERE kind <> 'checked'"),  # how far the file was checked says nothing there
)


def move_to_postgres(path: Path, url: str) -> tuple[int, int]:
    """Move the ledger in a file to an empty database, and return the number of its entries and nodes.

    The file is closed for good, which every process that has it open notices at its next change; then its rows are
    copied and verified in one transaction. Repeat it if it was interrupted. If the server cannot be written, the file
    is opened again.

    Args:
        path: the file of the ledger.
        url: a database without a ledger, or with an empty one.

    Raises ``ConfigError`` if the database has another ledger, ``LedgerUnavailable`` if one of the two cannot be used.
    """
    if not path.exists():
        raise gone(path)
    with closing(PostgresStore(url)) as target, _connected(path) as source:
        held = target.size()[1]
        [version] = source.execute("PRAGMA user_version").fetchone()
        if version == MOVED and moved_to(source) != url:
            raise moved(path, moved_to(source))
        if held and version != MOVED:
            raise _full(url)
        if version != MOVED:
            _close_for_good(source, path, url)
        if not held:
            _copy(source, path, url)
        return target.size()


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    with (
        unavailable("cannot read the ledger", path),
        closing(sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)) as source,
    ):
        [owner] = source.execute("PRAGMA application_id").fetchone()
        if owner != APPLICATION_ID:
            raise foreign(path)
        yield source


def _close_for_good(source: sqlite3.Connection, path: Path, url: str) -> None:
    [version] = source.execute("PRAGMA user_version").fetchone()
    if version != len(MIGRATIONS):
        raise LedgerUnavailable(
            f"{path} has ledger version {version}; open it once with this installation, as x402guard verify does"
        )
    with _turn(path) as turn:
        source.execute("PRAGMA synchronous = FULL")
        source.execute("BEGIN IMMEDIATE")
        problems = audit(source.execute)
        if problems:
            source.execute("ROLLBACK")
            raise unsound(path, problems[0])
        source.execute("CREATE TABLE IF NOT EXISTS moved (url TEXT NOT NULL) STRICT")
        source.execute("DELETE FROM moved")
        source.execute("INSERT INTO moved VALUES (?)", (url,))
        # Counted, so that a copy of the file from before is older than the lock file knows.
        [row] = source.execute("UPDATE generation SET n = n + 1 RETURNING n, spent").fetchall()
        source.execute(f"PRAGMA user_version = {MOVED}")
        source.execute("COMMIT")
        turn.note(Generation(*row))


def _open_again(source: sqlite3.Connection, path: Path) -> None:
    with _turn(path):
        source.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


@contextmanager
def _turn(path: Path) -> Iterator[FileTurn]:
    turn = FileTurn(path)
    try:
        if not turn.take(_BUSY_S):
            raise LedgerUnavailable(f"another process has been writing {path} for {_BUSY_S:.0f} s")
        yield turn
    finally:
        turn.give()
        turn.close()


def _copy(source: sqlite3.Connection, path: Path, url: str) -> None:
    """Copy all rows in one transaction, and verify them there. Before its commit, an error opens the file again."""
    with (
        server_unavailable("cannot write the ledger", url),
        closing(psycopg.connect(url, autocommit=False)) as connection,
    ):
        try:
            _write(source, connection, url)
        except BaseException:
            connection.rollback()
            _open_again(source, path)
            raise
        connection.commit()


def _write(source: sqlite3.Connection, connection: psycopg.Connection[tuple[Any, ...]], url: str) -> None:
    connection.adapters.register_loader("numeric", WholeNumber)
    connection.execute(f"SET LOCAL search_path = {SCHEMA}, pg_temp")
    connection.execute("LOCK TABLE nodes IN EXCLUSIVE MODE")
    if connection.execute("SELECT FROM nodes").fetchall():
        raise _full(url)
    with one_moment(source) as read:
        for table, columns, order in _TABLES:
            into = f"COPY {table} ({names(columns)}) FROM STDIN"
            with connection.cursor() as cursor, cursor.copy(into) as copy:
                for row in read(f"SELECT {names(columns)} FROM {table} {order}", ()):
                    copy.write_row(row)
    problems = audit(lambda sql, values: connection.execute(with_places(sql), values).fetchall())
    if problems:
        raise LedgerUnavailable(f"the copy in {url} is inconsistent: {problems[0]}")


def _full(url: str) -> ConfigError:
    return ConfigError(f"ledger: {url} has a ledger already; name a database without one")

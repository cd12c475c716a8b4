"""Moves a ledger from an SQLite file to PostgreSQL, so that at every moment at most one of the two can be used."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import psycopg

from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.kernel.change_set import MONEY_MARKS
from x402guard.kernel.leaving import check_moved
from x402guard.kernel.rows import WALLET
from x402guard.ledger.tree import lends
from x402guard.stores.archive_file import Archived
from x402guard.stores.audit import audit
from x402guard.stores.file_errors import copied, gone, moved, of_another_version, older, unavailable, unsound
from x402guard.stores.file_lock import FILE_MARK, FileTurn, Generation, place_of
from x402guard.stores.postgres import PostgresStore
from x402guard.stores.postgres_schema import ABOUT, SCHEMA
from x402guard.stores.postgres_server import CONNECT_S, Server, WholeNumber, migrate, with_places
from x402guard.stores.postgres_server import unavailable as server_unavailable
from x402guard.stores.rows import ENTRY_COLUMNS, HOLD_COLUMNS, NODE_COLUMNS, to_hold, to_mark, to_node, unpacked
from x402guard.stores.sql_reads import HOLDS, NODES, names
from x402guard.stores.sqlite_schema import APPLICATION_ID, MOVED, OLDEST, moved_to, newest, not_a_ledger, strange_parts

Target = psycopg.Connection[tuple[Any, ...]]

_BUSY_S: Final = 30.0
_TABLES: Final[tuple[tuple[str, Sequence[str], str], ...]] = (
    ("nodes", NODE_COLUMNS, "ORDER BY rowid"),  # parents first
    ("holds", HOLD_COLUMNS, "ORDER BY rowid"),
    ("entries", ENTRY_COLUMNS, "ORDER BY node_id, seq"),
    # How far the file was checked says nothing there.
    ("marks", ("kind", "key", "value"), "WHERE kind NOT IN ('checked', 'file', 'part', 'quiet')"),
    ("archived", Archived.__struct_fields__, ""),
)


def move_to_postgres(path: Path, url: str) -> tuple[int, int]:
    """Move the ledger in a file to an empty database, and return the number of its entries and nodes.

    The rows are copied and verified in one transaction of the database, which refuses every guard meanwhile. The file
    is closed before that transaction commits, and is never opened again. If it is interrupted in between, neither can
    be used until it is repeated.

    Args:
        path: the file of the ledger.
        url: a database without a ledger, or with an empty one.

    Raises ``ConfigError`` if the database has another ledger or the file has none, ``LedgerUnavailable`` if one of the
    two cannot be used.
    """
    path = path.resolve()  # agents lock the file that a link leads to
    if not path.exists():
        raise gone(path)
    with ExitStack() as opened:
        turn = opened.enter_context(_turn(path))  # no agent writes the file meanwhile, and no other move begins
        source = opened.enter_context(_source(path, turn))
        is_closed = _check_source(source, path, url)
        PostgresStore(url, while_moving=True).close()
        opened.enter_context(server_unavailable("cannot write the ledger", url))
        target = opened.enter_context(closing(psycopg.connect(url, connect_timeout=CONNECT_S, client_encoding="UTF8")))
        target.adapters.register_loader("numeric", WholeNumber)
        if not _is_copied(source, target, url):
            _announce(target)
            _copy(source, target, url)
            if not is_closed:
                _close(source, turn, url)
            turn.note_moved(url)
            target.commit()
        source.execute("UPDATE moved SET is_copied = 1")
        [found] = target.execute(
            f"SELECT (SELECT sum(seq) FROM {SCHEMA}.nodes), (SELECT count(*) FROM {SCHEMA}.nodes)"
        ).fetchall()
        return int(found[0]), int(found[1])


def upgrade_postgres(url: str) -> None:
    """Take a ledger in PostgreSQL to this library's version. Raises ``LedgerUnavailable``."""
    server = Server(url, lambda _: None)
    with server_unavailable("cannot upgrade the ledger", url), closing(server):
        migrate(server)


def instances_of(url: str) -> tuple[int, dict[str, dict[str, Any]], int]:
    """Return the version of a ledger in PostgreSQL, its processes by name, and its clock in unix milliseconds.

    Also of one of an earlier version, which no store opens. Raises ``LedgerUnavailable``.
    """
    server = Server(url, lambda _: None)
    with server_unavailable("cannot read the ledger", url), closing(server):
        [(version, now_ms)] = server.run(
            f"SELECT version, (extract(epoch FROM clock_timestamp()) * 1000)::bigint FROM {ABOUT}"
        )
        rows = server.run(f"SELECT key, value::text FROM {SCHEMA}.marks WHERE kind = 'instance'")
    return int(version), {key: dict(to_mark(("instance", key, value))[1]) for key, value in rows}, int(now_ms)


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


@contextmanager
def _source(path: Path, turn: FileTurn) -> Iterator[sqlite3.Connection]:
    with (
        unavailable("cannot read the ledger", path),
        closing(sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)) as source,
    ):
        [owner] = source.execute("PRAGMA application_id").fetchone()
        if owner != APPLICATION_ID:
            turn.remove_fresh()
            raise not_a_ledger(source, path, owner)
        [version] = source.execute("PRAGMA user_version").fetchone()
        if version != MOVED and turn.moved_to:
            raise moved(path, turn.moved_to)  # this is an older copy
        [generation] = source.execute("SELECT n FROM generation").fetchone()
        behind = turn.generation().n - generation
        if behind > 0:
            raise older(path, behind)
        source.execute("PRAGMA synchronous = FULL")
        yield source


def _check_source(source: sqlite3.Connection, path: Path, url: str) -> bool:
    """Return whether the file was closed by a move that did not end."""
    [version] = source.execute("PRAGMA user_version").fetchone()
    if version == MOVED:
        if moved_to(source) != url:
            raise moved(path, moved_to(source))
        return True
    noted = source.execute("SELECT value FROM marks WHERE kind = ? AND key = ?", FILE_MARK).fetchone()
    if noted is not None and to_mark((*FILE_MARK, noted[0]))[1] != place_of(path):
        raise copied(path)
    if not OLDEST <= version <= newest():
        raise of_another_version(path, version, newest())
    if not source.execute("SELECT 1 FROM nodes WHERE id = ?", (WALLET,)).fetchall():
        raise ConfigError(f"ledger: no guard has used {path} yet; there is nothing to move")
    problems = strange_parts(source.execute) or audit(source.execute, archives=False)
    if problems:
        raise unsound(path, problems[0])
    source.execute("CREATE TABLE IF NOT EXISTS moved (url TEXT NOT NULL, is_copied INTEGER NOT NULL) STRICT")
    source.execute("DELETE FROM moved")
    return False


def _is_copied(source: sqlite3.Connection, target: Target, url: str) -> bool:
    """Return whether the database has this ledger already: an answer to a commit was lost, or the command is repeated."""
    target.execute(f"LOCK TABLE {SCHEMA}.nodes IN EXCLUSIVE MODE")
    is_empty = not target.execute(f"SELECT FROM {SCHEMA}.nodes LIMIT 1").fetchall()
    if is_empty:
        if source.execute("SELECT 1 FROM moved WHERE is_copied").fetchall():
            raise LedgerUnavailable(
                f"{url} has lost the ledger that was moved there; restore a backup of that database"
            )
        return False
    [head] = source.execute("SELECT seq, head FROM nodes WHERE id = ?", (WALLET,)).fetchall()
    same = f"SELECT FROM {SCHEMA}.entries WHERE node_id = %s AND seq = %s AND hash = %s"
    if not target.execute(same, (WALLET, *head)).fetchall():
        raise ConfigError(f"ledger: {url} has a ledger already; name a database without one")
    return True


def _announce(target: Target) -> None:
    """Let the database refuse every guard until the copy is whole: an empty ledger would be a new budget."""
    target.execute(f"UPDATE {ABOUT} SET is_moving = true")
    target.commit()


def _copy(source: sqlite3.Connection, target: Target, url: str) -> None:
    """Copy all rows, and verify them, in a transaction that is still to be committed."""
    target.execute(f"SET LOCAL search_path = {SCHEMA}, pg_temp; SET LOCAL synchronous_commit = on")
    target.execute("LOCK TABLE nodes IN EXCLUSIVE MODE")
    for table, columns, order in _TABLES:
        into = f"COPY {table} ({names(columns)}) FROM STDIN"
        with target.cursor() as cursor, cursor.copy(into) as copy:
            for row in source.execute(f"SELECT {names(columns)} FROM {table} {order}"):
                copy.write_row([unpacked(value) for value in row])
    # A file says for every node what is live below it. Here those say it of themselves alone that lend; see ledger.tree.
    check_moved(_rows(source.execute), _rows(target.execute))
    nodes = {node.id: node for node in map(to_node, target.execute(NODES))}
    lenders = [node_id for node_id in nodes if lends(nodes, node_id)]
    target.execute("UPDATE nodes SET live = held WHERE id = ANY (%s)", (lenders,))
    problems = audit(
        lambda sql, values: target.execute(with_places(sql), values).fetchall(), keeps_idle=True, archives=False
    )
    if problems:
        raise LedgerUnavailable(f"the copy in {url} is inconsistent: {problems[0]}")
    target.execute("UPDATE about SET is_moving = false")


def _rows(execute: Callable[[str], Iterable[Any]]) -> Iterator[Any]:
    """Yield all budgets, holds and marks that decide about money of one of the two ledgers, by their ids."""
    yield from sorted(map(to_node, execute(NODES)), key=attrgetter("id"))
    yield from sorted(map(to_hold, execute(HOLDS)), key=attrgetter("id"))
    kinds = ", ".join(f"'{kind}'" for kind in sorted(MONEY_MARKS))
    yield from sorted(map(tuple, execute(f"SELECT kind, key, value FROM marks WHERE kind IN ({kinds})")))


def _close(source: sqlite3.Connection, turn: FileTurn, url: str) -> None:
    """Close the file for good. This is counted, so that a copy of it from before is older than the lock file knows."""
    source.execute("BEGIN IMMEDIATE")
    source.execute("INSERT INTO moved VALUES (?, 0)", (url,))
    live = "(SELECT live FROM nodes WHERE id = 'wallet')"
    [row] = source.execute(f"UPDATE generation SET n = n + 1 RETURNING n, spent + {live}").fetchall()
    source.execute(f"PRAGMA user_version = {MOVED}")
    source.execute("COMMIT")
    turn.note(Generation(*row))

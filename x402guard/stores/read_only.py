"""Reads a ledger's file that this user may not write, or shall not."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from typing_extensions import override

from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.ledger.view import Scope
from x402guard.stores.checking import check_since
from x402guard.stores.file_errors import (
    emptied,
    moved,
    of_another_version,
    older,
    unavailable,
    unfinished,
    unsound,
)
from x402guard.stores.file_lock import FileTurn, Generation, noted_generation, noted_move, was_used
from x402guard.stores.sqlite import SqliteStore, one_moment
from x402guard.stores.sqlite_rows import SqliteRows
from x402guard.stores.sqlite_schema import (
    APPLICATION_ID,
    OLDEST,
    newest,
    not_a_ledger,
    refuse_another_version,
    refuse_moved,
    strange_parts,
)
from x402guard.stores.transacts import Proposal, StoreClock

R = TypeVar("R")

_BUSY_S: Final = 5.0


class ReadOnlyStore(SqliteStore):
    """A ledger's file, opened to be read. It takes no lock and writes nothing; ``transact`` raises.

    Raises ``LedgerUnavailable`` if the file is missing, is not a ledger, has another version than this library's, is older
    than the one that was here, or, if it is to be *verified*, is inconsistent.
    """

    def __init__(self, path: Path, *, verified: bool = True) -> None:
        self._path = path.resolve()
        self._clock = StoreClock(None, None)
        self._closed, self._pid = False, os.getpid()
        self._openings = {}
        self._is_known = False
        existed = was_used(self._path)  # before the file is read: it may be made in between
        with self._connected() as connection:
            self._refuse_other_version(connection, existed=existed)
        self._is_known = True
        if verified:
            self._refuse_unless_sound()

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Connect for one look: whether the file is being written can be another answer at the next one."""
        self._check_usable()
        # First of all: what is noted is in the file, or in the -wal, which is looked for after it.
        wal, noted = Path(f"{self._path}-wal"), noted_generation(self._path)
        with unavailable("cannot read the ledger", self._path):
            # Without a -wal nothing is open for writing, and the file is whole; SQLite would make files beside it.
            whole = not _size_of(wal)
            uri = f"{self._path.as_uri()}?mode=ro" + ("&immutable=1" if whole else "")
            stamp = self._stamp()
            try:
                with closing(sqlite3.connect(uri, timeout=_BUSY_S, uri=True)) as connection:
                    if self._is_known:
                        refuse_another_version(connection, self._path, self._version)
                        self._refuse_older(connection, noted.n)
                    yield connection
            except (sqlite3.Error, LedgerUnavailable):  # what is not there yet may be on its way
                if whole and self._stamp() != stamp:
                    raise self._moved() from None
                raise
            if whole and self._stamp() != stamp:
                raise self._moved()

    def _stamp(self) -> tuple[int, int, int, bool]:
        """Return what changes if the file is written: SQLite takes no lock on one that it takes for immutable."""
        known = self._path.stat()
        return known.st_ino, known.st_size, known.st_mtime_ns, Path(f"{self._path}-wal").exists()

    def _moved(self) -> LedgerUnavailable:
        return LedgerUnavailable(
            f"{self._path} was opened for writing while it was read; look again",
            advice="Nothing was paid. Repeat the command.",
        )

    def _refuse_older(self, connection: sqlite3.Connection, noted: int) -> None:
        [here] = connection.execute("SELECT n FROM generation").fetchone()
        if here < noted:
            raise older(self._path, noted - here)

    def _refuse_other_version(self, connection: sqlite3.Connection, *, existed: bool) -> None:
        connection.execute("BEGIN")  # its owner and its tables are read as of one moment: it may be made meanwhile
        [owner] = connection.execute("PRAGMA application_id").fetchone()
        if owner != APPLICATION_ID:
            [tables] = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if owner or tables:
                raise not_a_ledger(connection, self._path, owner)
            raise emptied(self._path) if existed else unfinished(self._path)
        [version] = connection.execute("PRAGMA user_version").fetchone()
        refuse_moved(connection, version, self._path)
        if moved_to := noted_move(self._path):
            raise moved(self._path, moved_to)
        self._version = version
        if not OLDEST <= version <= newest():
            raise of_another_version(self._path, version, newest())
        connection.execute("ROLLBACK")

    @property
    def version(self) -> int:
        """The version of the ledger."""
        return self._version

    @override
    def _check_ready(self) -> None:
        raise LedgerUnavailable(f"{self._path} is open to be read only, so nothing can be changed in it")

    @override
    def _decide(self, scope: Scope, proposal: Proposal[Any]) -> None:
        with self._connected() as connection, one_moment(connection):
            proposal(SqliteRows(connection).load(scope, self._clock.read))

    @override
    def _refuse_unless_sound(self) -> None:
        with self._connected() as connection, one_moment(connection) as query:
            problems = strange_parts(query) or check_since(query, turn=self.now_ms()).problems
        if problems:
            raise unsound(self._path, problems[0])

    @override
    def _read(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int] = ()) -> list[R]:
        with self._connected() as connection:
            return [convert(row) for row in connection.execute(sql, values).fetchall()]

    def copy_to(self, target: Path) -> None:
        """Copy the ledger as one commit has left it into a new file, with the counters of its lock file, and verify that.

        Raises ``ConfigError`` if a ledger is or was there, ``LedgerUnavailable`` if one of both cannot be read or written.
        """
        target = target.resolve()
        if target.exists() or was_used(target):
            raise ConfigError(f"FILE: {target} is there already, or was a ledger; name a new file")
        with unavailable("cannot write the copy", target):
            os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with unavailable("cannot write the copy", target):
                with self._connected() as source, closing(sqlite3.connect(target)) as copy:
                    source.backup(copy)
                    copy.execute("PRAGMA synchronous = FULL")
                    reached = Generation(*copy.execute(_REACHED).fetchone())
                with closing(FileTurn(target)) as turn:
                    turn.note(reached)
            _refuse_unsound(target)
        except BaseException:
            for name in ("", "-wal", "-shm", "-lock", "-queue"):
                Path(f"{target}{name}").unlink(missing_ok=True)
            raise

    @override
    def close(self) -> None:
        self._closed = True


def _refuse_unsound(copy: Path) -> None:
    for problem in ReadOnlyStore(copy).audit():
        raise unsound(copy, problem)


_REACHED: Final = "SELECT n, spent + coalesce((SELECT live FROM nodes WHERE id = 'wallet'), 0) FROM generation"  # as a commit notes it


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

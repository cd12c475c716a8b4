"""Stores the ledger in an SQLite file that several processes can share.

It uses WAL, ``BEGIN IMMEDIATE``, and ``synchronous=FULL`` for changes that restrain: if a power cut lost a hold, its
signature would not be counted. Threads and processes take turns to write, first come first served, because SQLite's own
busy handler sleeps up to 100 ms and lets one process starve the others.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from msgspec import to_builtins
from typing_extensions import override

from x402guard.errors import LedgerUnavailable
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Hold
from x402guard.ledger.verify import Checked
from x402guard.ledger.view import LedgerView, Scope
from x402guard.stores.audit import Query, audit
from x402guard.stores.checking import Checks, Found, Part, check_since, checked_mark, part_mark
from x402guard.stores.file_errors import (
    LOST,
    as_unavailable,
    changed,
    copied,
    emptied,
    moved,
    newer,
    of_another_version,
    older,
    refuse_second_path,
    refuse_unless_kept,
    refuse_unless_writable,
    unavailable,
    unsound,
)
from x402guard.stores.file_lock import FILE_MARK, FileTurn, Generation, ShowsLife, identities, place_of
from x402guard.stores.group_commit import WRITING, GroupCommit, Request
from x402guard.stores.sql_reads import LIVE_HOLDS, OUTERMOST, SqlReads
from x402guard.stores.sqlite_rows import SqliteMoment, SqliteRows
from x402guard.stores.sqlite_schema import (
    APPLICATION_ID,
    OLDEST,
    migrate,
    newest,
    not_a_ledger,
    refuse_another_version,
    refuse_moved,
    strange_parts,
)
from x402guard.stores.transacts import Proposal, StoreClock, Transacts

R = TypeVar("R")

_CREATING: Final = threading.Lock()
_MARKS_AT_ONCE: Final = 500
_CLOSE_S: Final = 2.0  # seconds that a close waits for another process, or for a reader


class SqliteStore(ShowsLife, SqlReads, GroupCommit):
    """A ``LedgerStore`` in a file. A missing file is created with mode 0600.

    Args:
        path: the database file; files with the suffixes ``-wal``, ``-shm``, ``-lock`` and ``-queue`` are beside it.
        clock_ms: returns unix milliseconds; the system's clock by default.
        steady_ms: returns milliseconds of a clock that cannot be set; see ``StoreClock``.
        verified: refuse an inconsistent ledger; see ``audit``.
        accept_older: open a ledger that is older than the one that was here, until ``restored`` is called.
        accept_file: take this file as the one that the ledger notes, though it is a copy.

    Raises ``LedgerUnavailable`` if the file cannot be opened, is not a ledger, is inconsistent, or is older than the one
    that was here.
    """

    inline: Final = False
    is_shared: Final = False
    may_lose_commits: Final = False
    write_openings = Transacts.write_openings
    row_lock = ""  # one process writes at a time
    _tallied = (0, 0)
    _unsound = ""
    _disk_errors = sqlite3.Error

    def __init__(
        self,
        path: Path,
        *,
        clock_ms: Callable[[], int] | None = None,
        steady_ms: Callable[[], int] | None = None,
        verified: bool = True,
        accept_older: bool = False,
        accept_file: bool = False,
    ) -> None:
        # A later chdir must not change which file it is; and SQLite keeps its files beside a link's target.
        self._path = path.resolve()
        self._clock = StoreClock(clock_ms, steady_ms)
        super().__init__()
        self._read_lock = threading.Lock()
        self._accepts_older = accept_older
        self._synchronous = ""
        self._checks = Checks(is_whole=True)
        with unavailable("cannot open the ledger", self._path):
            self._open()
        if verified:
            self._refuse_unless_sound()
        if accept_file or self._is_first(accepts=accept_older):
            self.note_file()

    def _is_first(self, *, accepts: bool) -> bool:
        """True if no file is noted yet. Refuses a copy, unless it *accepts* it: each file would be spent."""
        noted = self.marks(*FILE_MARK).get(FILE_MARK[1])
        if noted is not None and noted != place_of(self._path) and not accepts:
            self.close()
            raise copied(self._path)
        return noted is None

    def note_file(self) -> None:
        """Note that the ledger is in this file: a copy of it can only be looked at."""
        with suppress(LedgerUnavailable):  # the next opening notes it
            self.transact(Scope(marks=(FILE_MARK,)), partial(_put_all, {FILE_MARK: place_of(self._path)}))

    def _open(self) -> None:
        with _CREATING, suppress(FileExistsError):
            refuse_unless_kept(self._path)
            # Created here with its mode, so that no other user can read it at any moment. An existing file is opened by
            # SQLite only: closing another descriptor would release every lock that this process has on the file, and
            # another process could write at the same time.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        refuse_unless_writable(self._path)
        refuse_second_path(self._path)
        with ExitStack() as undo:
            self._turn = FileTurn(self._path)
            undo.callback(self._turn.close)
            self._writer = self._connect()
            undo.callback(self._writer.close)
            self._rows = SqliteRows(self._writer)
            self._files: tuple[tuple[int, int] | None, ...] | None = None
            self._in_turn(self._prepare)  # several processes may open a new ledger at the same time
            self._reader = self._connect()
            self._reader.execute("SELECT n FROM generation").fetchone()
            self._files = identities(self._path)  # the connections keep -wal and -shm from now on
            undo.pop_all()

    def _refuse_unless_sound(self) -> None:
        """Check what has come since the ledger was last checked, and note up to where it is checked now."""
        try:
            with unavailable("cannot read the ledger", self._path), one_moment(self._reader) as query:
                strange = strange_parts(query)
                found = check_since(query, turn=self.now_ms())
            for problem in (*strange, *found.problems):
                raise unsound(self._path, problem)
        except LedgerUnavailable:
            self.close()
            raise
        self._checks = Checks(is_whole=found.is_compared)
        self._note_checked(found)

    def check_on(self) -> bool:
        """Check some of what the opening has left, which takes about ten milliseconds. Returns True once nothing is left for now.

        Raises ``LedgerUnavailable`` if the ledger is inconsistent: nothing more is written then.
        """
        with self.one_moment() as query:
            found = self._checks.go_on(query)
        if found.problems:
            self._unsound = found.problems[0]
            raise unsound(self._path, found.problems[0])
        return not self._note_checked(found) or found.is_over

    def _note_checked(self, found: Found) -> bool:
        """Note what was checked. Returns False if it cannot be written: then the next piece would be the same."""
        if not found.is_worth_noting:
            return True
        notes: list[tuple[MarkKey, Checked | Part]] = [
            (checked_mark(each), found.journals[each]) for each in found.journals
        ]
        notes += [(part_mark(part.first), part) for part in found.parts]
        with suppress(LedgerUnavailable):  # without a note, the next opening reads the same again
            for start in range(0, len(notes), _MARKS_AT_ONCE):
                some = {key: to_builtins(said) for key, said in notes[start : start + _MARKS_AT_ONCE]}
                self.transact(Scope(marks=tuple(some)), partial(_put_all, some))
            return True
        return False

    def audit(self, *, archives: bool = True) -> Sequence[str]:
        """See ``Audited.audit``."""
        with self.one_moment() as query:
            return strange_parts(query) or audit(query, archives=archives)

    @contextmanager
    def one_moment(self) -> Iterator[Query]:
        """See ``Archivable.one_moment``."""
        with self._connected() as connection, one_moment(connection) as query:
            yield query

    def one_write(self, work: Callable[[Query], R]) -> R:
        """See ``Archivable.one_write``."""

        def write() -> R:
            self._roll_back()
            self._synchronous = ""
            self._writer.execute("PRAGMA synchronous = FULL")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                self._check_version()
                result = work(self._writer.execute)
                self._writer.execute("COMMIT")
            finally:
                self._roll_back()
            return result

        self._check_ready()
        return cast("R", self._in_turn(write))

    def _prepare(self) -> None:
        self._check_owner()  # before anything is changed: it may be another program's database
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._migrate()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=self._busy_s, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _check_owner(self) -> None:
        [owner] = self._writer.execute("PRAGMA application_id").fetchone()
        [tables] = self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if owner != APPLICATION_ID and tables:
            self._turn.remove_fresh()
            raise not_a_ledger(self._writer, self._path, owner)

    def _migrate(self) -> None:
        [version] = self._writer.execute("PRAGMA user_version").fetchone()
        if version == 0 and self._turn.was_used and not self._accepts_older:
            raise emptied(self._path)
        refuse_moved(self._writer, version, self._path)
        if self._turn.moved_to:
            raise moved(self._path, self._turn.moved_to)  # an older copy was put back
        if version > newest():
            raise newer(self._path, "written", version)
        if version:
            self._refuse_if_older()  # before it is changed: it may be a backup that was put back by mistake
        if 0 < version < OLDEST:
            raise of_another_version(self._path, version, newest())
        if version == 0:
            migrate(self._writer, version)
        self._version = version or newest()
        self._turn.note_used()

    def upgrade(self) -> None:
        """Take the ledger to the newest version, wholly or not at all. Raises ``LedgerUnavailable``."""
        with unavailable("cannot upgrade the ledger", self._path):
            self._in_turn(self._upgrade)

    def _upgrade(self) -> None:
        self._check_file()
        self._check_version()  # it may have been moved or upgraded meanwhile
        if self._version < newest():
            migrate(self._writer, self._version)

    def _refuse_if_older(self) -> None:
        behind = self._turn.generation().n - self._generation().n
        if behind > 0 and not self._accepts_older:
            raise older(self._path, behind)

    def _generation(self) -> Generation:
        return Generation(*self._writer.execute("SELECT n, spent FROM generation").fetchone())

    def _check_file(self) -> None:
        """Refuse files that were deleted or replaced while open: beside them, a new file would be a second budget."""
        if self._files is not None and identities(self._path) != self._files:
            raise changed(self._path)

    @property
    @override
    def schema(self) -> int:
        """See ``LedgerStore.schema``."""
        return newest()

    @override
    def _check_place(self) -> None:
        if self._unsound:
            raise unsound(self._path, self._unsound)

    @override
    def _trouble(self, what: str) -> AbstractContextManager[None]:
        return unavailable(what, self._path)

    @override
    def _told(self, error: Exception) -> Exception:
        return as_unavailable(WRITING, self._path, error) if isinstance(error, LOST) else error

    @override
    def _take_turn(self, timeout_s: float) -> bool:
        return self._turn.take(timeout_s)

    @override
    def _give_turn(self) -> None:
        self._turn.give()

    @override
    def _commit(self, batch: list[Request]) -> None:
        """Run and commit the changes of *batch*, and note for each that it is over."""
        if self._writer.in_transaction:
            self._roll_back()  # Ctrl-C may have left one open, which would lock out every process
        # The pragma cannot change inside a transaction, so the scopes say in advance whether a change restrains.
        durable = True in [each.scope.durable for each in batch]
        level = "FULL" if durable else "NORMAL"
        if level != self._synchronous:
            self._synchronous = ""  # unknown if an interrupt comes here
            self._writer.execute(f"PRAGMA synchronous = {level}")
            self._synchronous = level
        ends = False
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            self._check_version()
            self._rows.begin()
            for each in batch:
                self._run_one(self._rows, each)
            self._rows.flush()
            written = False in [each.failed for each in batch]
            generation = self._next_generation() if durable and written else None
            ends = True
            self._writer.execute("COMMIT" if written else "ROLLBACK")
            self._note_run(batch)
        except BaseException as error:
            if ends and not self._writer.in_transaction and not isinstance(error, sqlite3.Error):
                self._note_run(batch)  # a signal came just after the commit: nothing of it may run again
                raise
            self._roll_back()
            if isinstance(error, Exception):
                self._check_file()  # it may be no ledger any more that could not be written
            if len(batch) == 1 or not isinstance(error, Exception) or isinstance(error, sqlite3.OperationalError):
                raise
            self._commit_apart(batch)  # it may be the fault of one of them
            return
        self._check_file()  # a commit into a file that others do not see is none; once a batch: it takes four looks
        if generation is not None:
            self._turn.note(generation)
        for each in batch:
            each.over = True

    def _note_run(self, batch: list[Request]) -> None:
        for each in batch:
            each.ran = True
        self._rows.committed()

    def _next_generation(self) -> Generation:
        """Count this commit. A database that is behind the lock file was replaced by an older one while it was open."""
        live = "coalesce((SELECT live FROM nodes WHERE id = 'wallet'), 0)"
        [row] = self._writer.execute(f"UPDATE generation SET n = n + 1 RETURNING n, spent + {live}").fetchall()
        reached, noted = Generation(*row), self._turn.generation()
        if reached.n > noted.n:
            return reached
        if not self._accepts_older:
            raise older(self._path, noted.n - reached.n + 1)
        return noted

    def behind(self) -> tuple[int, int]:
        """Return how much of the ledger that was here is missing: durable commits, and nano-dollars spent or live then.

        A live hold of the older ledger may have ended since, so it is not taken off: that counts too much, never too little.
        """

        def work() -> tuple[int, int]:
            noted, here = self._turn.generation(), self._generation()
            return max(0, noted.n - here.n), max(0, noted.used - here.used)

        self._check_ready()
        return self._in_turn(work) or (0, 0)

    def restored(self) -> None:
        """Make an older ledger the one that counts, once what may be out is in it."""

        def work() -> None:
            n = max(self._turn.generation().n, self._generation().n)
            self._writer.execute("UPDATE generation SET n = ?", (n,))
            self._turn.note(self._generation())
            self._accepts_older = False

        self._check_ready()
        self._in_turn(work)

    def _check_version(self) -> None:
        [version] = self._writer.execute("PRAGMA user_version").fetchone()
        if version != self._version:
            refuse_moved(self._writer, version, self._path)
            refuse_another_version(self._writer, self._path, self._version)
            self._version = version  # its owner has upgraded it

    def _roll_back(self) -> None:
        self._rows.forget()
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")

    def _read(self, convert: Callable[[Sequence[Any]], R], sql: str, values: Sequence[str | int] = ()) -> list[R]:
        if self._closed and self._pid == os.getpid():
            with self._connected() as connection:
                return [convert(row) for row in connection.execute(sql, values).fetchall()]
        self._check_usable()
        with unavailable("cannot read the ledger", self._path), self._read_lock:
            self._check_usable()
            refuse_another_version(self._reader, self._path, self._version)
            return [convert(row) for row in self._reader.execute(sql, values).fetchall()]

    @override
    def _decide(self, scope: Scope, proposal: Proposal[Any]) -> None:
        """See ``Transacts``. By a connection of its own, which no signal can leave open, and which waits for no turn."""
        self._check_ready()
        self._check_place()
        self._check_file()
        with self._connected() as connection, one_moment(connection):
            loaded = SqliteRows(connection).load(scope, self._clock.read)
            self.sound.look(loaded.before, keeps_idle=False)
            proposal(loaded)

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Connect for one look, which cannot write; also after the end, for a report."""
        if not self._closed or self._pid != os.getpid():
            self._check_usable()
        uri = f"{self._path.resolve().as_uri()}?mode=ro"
        with (
            unavailable("cannot read the ledger", self._path),
            closing(sqlite3.connect(uri, timeout=self._busy_s, uri=True)) as connection,
        ):
            refuse_another_version(connection, self._path, self._version)
            yield connection

    @contextmanager
    def at_one_moment(self, node_id: str | None = None) -> Iterator[SqliteMoment]:
        """See ``LedgerStore.at_one_moment``."""
        self.write_openings(node_id, below=True)
        with self._connected() as connection:
            yield SqliteMoment(connection, self._clock)

    @override
    def hold(self, hold_id: str) -> Hold | None:
        """See ``LedgerReads.hold``. Signers ask it, so a closed ledger does not answer."""
        self._check_usable()
        return super().hold(hold_id)

    @override
    def tally(self) -> tuple[int, int]:
        """See ``LedgerReads.tally``. Only what is newer than at the last time is counted: no row is ever removed."""
        self.write_openings()
        sql = f"SELECT count(*), max(nodes.rowid) {OUTERMOST}"
        count, last = self._tallied
        [(newer, newest)] = self._read(tuple, sql, (last,))
        self._tallied = (count + newer, newest or last)
        return count + newer, self._read(tuple, LIVE_HOLDS)[0][0]

    def steady_ms(self) -> int:
        """See ``LedgerStore.steady_ms``."""
        return self._clock.steady_ms()

    def close(self) -> None:
        """See ``LedgerStore.close``."""
        if self._closed or self._pid != os.getpid():
            return
        self._line.check_without_me()
        self._write_last_openings()
        with ExitStack() as undo:
            undo.callback(self._line.leave)
            joined = self._line.join(self._busy_s)
            undo.enter_context(self._read_lock)
            self._closed = True
            if not joined:
                return  # a thread is still writing and needs its connection
            for each in (self._turn, self._reader, self._writer):
                undo.callback(each.close)
            # SQLite keeps one list of locks for a process, and a fork copies it: what a child opens itself is not locked
            # against this connection. So the turn is taken, lest the journal is removed while such a child commits.
            if self._turn.take(_CLOSE_S):
                with suppress(sqlite3.Error):  # everything is committed already; a failed checkpoint loses nothing
                    self._writer.execute(f"PRAGMA busy_timeout = {round(_CLOSE_S * 1000)}")
                    self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@contextmanager
def one_moment(connection: sqlite3.Connection) -> Iterator[Query]:
    """Read with *connection* what one commit has left, while others go on writing."""
    connection.execute("BEGIN")
    try:
        yield connection.execute
    finally:
        connection.execute("ROLLBACK")


def _put_all(marks: Mapping[MarkKey, Mapping[str, Any]], view: LedgerView) -> None:
    for key, value in marks.items():
        view.put_mark(key, value)

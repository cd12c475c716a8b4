"""Stores the ledger in PostgreSQL, for processes on several machines.

No transaction stays open while Python decides. A batch of changes takes two round trips: the first loads rows with their
versions, the second writes, if no row has another version now, and commits. Where a row has changed, all of it runs again.
What this process has read or written last it does not load again: the write compares it all the same.
After a conflict a process waits for its turn for that row first. The turn only saves vain attempts: a process that stops
in it loses it, and correctness is in the versions alone.

Sessions keep idle budget (``ledger.budgets``), so most payments write no row that two sessions share. A change that has to
know what is idle elsewhere runs again with that loaded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors as refused
from typing_extensions import override

from x402guard.errors import LedgerUnavailable, X402GuardError
from x402guard.kernel.rows import WALLET, Hold
from x402guard.ledger.lost import ROLLED_BACK_MARK, count_again, enter_ends, trip_rolled_back
from x402guard.ledger.view import Change, LedgerView, Notice, Scope
from x402guard.stores.audit import Query, audit
from x402guard.stores.group_commit import WRITING, GroupCommit, Request, failed_together
from x402guard.stores.outbox import Last, Outbox, left_behind, outbox_folder
from x402guard.stores.postgres_reads import READING, REPORT_MS, PostgresMoment, ServerReads, lacking, may_change
from x402guard.stores.postgres_rows import Asked, KnownRows, LoadedRows, MoreNeeded, Proof, as_text, to_versioned
from x402guard.stores.postgres_schema import LOOKS_BY_INDEX, ROLLED_BACK, SCHEMA, TAKE_TURNS, VERSION
from x402guard.stores.postgres_server import (
    BROKEN,
    ISOLATION,
    LOST,
    OUT_OF_TURN,
    STRANGE,
    Known,
    Server,
    ServerClock,
    as_unavailable,
    locked_by_another,
    prepare,
    rolled_back,
    settings,
    strange_parts,
    unavailable,
    unsure,
)
from x402guard.stores.transacts import Proposal, StoreClock, Transacts, system_steady_ms

R = TypeVar("R")

_LOG: Final = logging.getLogger("x402guard")
_MOST_ATTEMPTS: Final = 12
_TURNS_S: Final = 1.0  # after a conflict, processes take turns for so long
_SHARED_S: Final = 10.0  # so long after a conflict the rows that it was about are read before each change
_IN_TURN_MS: Final = 40  # a process that is stopped in its turn loses it
_NODES_A_MS: Final = 10  # nodes that a change looks through in a millisecond
_ASKED_AGAIN_S: Final = (0.0, 0.2, 0.5, 1.0)
_CONFLICTS: Final = (refused.SerializationFailure, refused.DeadlockDetected, refused.UniqueViolation)
_MOST_LOCKED: Final = 5
_LOST: Final = (
    "the ledger's server has lost the newest entries of a process: another server took over, or a backup is back"
)


class PostgresStore(ServerReads, GroupCommit):
    """A ``LedgerStore`` in a PostgreSQL database, in a schema of its own, which is made if it is missing.

    Args:
        url: ``postgresql://user@host/database``, without a password.
        clock_ms: returns unix milliseconds; the server's clock by default.
        steady_ms: returns milliseconds of a clock that cannot be set; see ``StoreClock``.
        read_only: change nothing: ``transact`` raises, and a missing ledger is not made.
        while_moving: open a database to which a ledger is being moved; only the move itself does.

    Attributes:
        may_lose_commits: True if the server has replicas and none of them is synchronous, as asked at opening.

    Raises ``LedgerUnavailable`` if the server cannot be reached or used, or its schema is not this version's.
    """

    inline: Final = False
    is_shared: Final = True
    write_openings = Transacts.write_openings
    row_lock = " FOR NO KEY UPDATE"
    _disk_errors = psycopg.Error

    def __init__(
        self,
        url: str,
        *,
        clock_ms: Callable[[], int] | None = None,
        steady_ms: Callable[[], int] | None = None,
        read_only: bool = False,
        while_moving: bool = False,
    ) -> None:
        super().__init__()
        self._url = url
        self._known = Known(url)
        self._read_lock = threading.Lock()
        self._writer, self._reader = Server(url, self._known.check), Server(url, self._known.check)
        self._read_only = read_only
        self._hot: dict[str, float] = {}  # row → until when processes take turns for it
        self._known_rows, self._connected = KnownRows(), 0
        self._here = StoreClock(clock_ms)  # this machine's own time
        self.outbox: Final = Outbox(self._here.read)
        self._missing: Last | None = None  # the newest entry that the server has lost
        self._entered: Last | None = None
        self._is_latched = self._is_entering = False
        self._own_clock = clock_ms
        # A store that is not closed closes its connections with itself.
        weakref.finalize(self, _close, os.getpid(), self._writer, self._reader, self.outbox)
        with unavailable("cannot open the ledger", url), ExitStack() as undo:
            undo.callback(self._writer.close)
            undo.callback(self.outbox.discard)
            found = prepare(self._writer, url, read_only=read_only, while_moving=while_moving)
            self._known.id, self.may_lose_commits = found.ledger, found.may_lose_commits
            self._server_clock = ServerClock(found.now_ms, steady_ms or system_steady_ms)
            steady = steady_ms or (system_steady_ms if clock_ms is None else None)
            self._clock = StoreClock(clock_ms or self._server_clock, steady)
            if not read_only and not while_moving:
                self._take_over(outbox_folder(str(self._known.id)))
            undo.pop_all()

    def _take_over(self, folder: Path | None) -> None:
        """Compare the ledger with what ended processes of this machine wrote last, and enter again what it has lost."""
        if folder is None:
            _LOG.warning("what this process writes is not kept beside the ledger: this user has no home folder")
            return
        self.outbox.keep_in(folder, synced=self.may_lose_commits)
        with left_behind(folder, self._oldest_ms()) as ended:
            if not ended or not may_change(self._writer):
                return
            for left in ended:
                self.outbox.add(left)
                if lacking(self._writer, left.lasts) is not None:
                    if not self._latch():
                        raise rolled_back(self._url)
                    left.is_entered = True
            self._missing, self._is_latched = None, False  # this process has lost nothing
            self._enter_ends()
            self.outbox.take_over(ended)

    def here_ms(self) -> int:
        """See ``MayBeAway.here_ms``."""
        return self._here()

    def _oldest_ms(self) -> int:
        """Return the time by which what is kept is old: a server that takes over may have a clock that is hours ahead."""
        return min(self._here(), self._server_clock())

    def _enter_ends(self) -> None:
        """Write the ends of answers that are kept beside the ledger. Raises ``LedgerUnavailable``."""

        def now(scope: Scope, change: Change[bool]) -> bool:
            try:
                return self._change_now(scope, change)
            except psycopg.DataError as error:
                raise self._told(error) from error

        for left_out in enter_ends(self.outbox.ends, self.outbox.written, now):
            _LOG.error("%s", left_out)

    @override
    def _trouble(self, what: str) -> AbstractContextManager[None]:
        return unavailable(what, self._url)

    @override
    def _told(self, error: Exception) -> Exception:
        return as_unavailable(WRITING, self._url, error) if isinstance(error, LOST) else error

    @override
    def _check_ready(self) -> None:
        super()._check_ready()
        if self._read_only:
            raise LedgerUnavailable(f"{self._url} is open to be read only, so nothing can be changed in it")

    @override
    def _commit(self, batch: list[Request]) -> None:
        self._writer.roll_back()  # Ctrl-C may have left a transaction open
        asked = Asked([each.scope for each in batch])
        turns = self._hot_of(asked)
        attempts = locked = 0
        while attempts < _MOST_ATTEMPTS:
            try:
                self._try(batch, asked, turns)
            except MoreNeeded:
                asked.busy = True  # at most once
                continue
            except OUT_OF_TURN as error:
                locked += isinstance(error, refused.LockNotAvailable)
                if locked == _MOST_LOCKED:
                    raise locked_by_another() from error
                turns = ()  # it took too long for a turn, or the one before it does
            except _CONFLICTS as error:
                turns = tuple({*turns, *self._note_hot(error)})
            except BROKEN:
                if not turns:
                    raise
                turns = ()  # nothing is written; most likely the server has ended the connection out of turn
            except LedgerUnavailable:
                raise
            except Exception as error:
                if isinstance(error, psycopg.Error) and error.sqlstate == ROLLED_BACK:
                    self._latch()
                    raise
                if len(batch) == 1:
                    raise
                self._commit_apart(batch)  # it may be the fault of one of them
                return
            else:
                for each in batch:
                    each.over = True
                return
            finally:
                self._writer.roll_back()
            attempts += 1
        raise LedgerUnavailable(f"other processes changed the same budgets {_MOST_ATTEMPTS} times meanwhile")

    def _latch(self) -> bool:
        """Trip the wallet for all processes, once, and enter again what the server has lost of the newest holds.

        Returns False if that cannot be entered now.
        """
        self._missing = self._missing or self.outbox.last
        if self._is_latched and lacking(self._writer, self.outbox.lasts) is None:
            return True
        self._is_entering, self._entered = True, None
        try:
            scope = Scope(nodes=(WALLET,), marks=(ROLLED_BACK_MARK,), durable=True)
            self._change_now(scope, partial(trip_rolled_back, reason=_LOST))
            for some in self.outbox.parts(self._oldest_ms()):
                nodes = {WALLET, *(node_id for each in some for node_id in each.path)}
                ids = tuple(each.hold.id for each in some)
                scope = Scope(nodes=tuple(nodes), holds=ids, durable=True)
                self._change_now(scope, partial(count_again, lost=some), frozenset(ids))
            there = [last for last in self.outbox.lasts if lacking(self._writer, [last]) is None]
            self._enter_ends()  # also those of this process, which is refused from now on
            self.outbox.look_for(there if self._entered is None else [self._entered])
            self._is_latched = True
        except (psycopg.Error, X402GuardError) as error:
            _LOG.error("%s; that cannot be entered: %s", _LOST, error)
            # The next change asks anew: that may be of another server than this one, which is behind.
            self._missing = None
            return False
        finally:
            self._is_entering = False
        return True

    def _change_now(self, scope: Scope, change: Change[R], lost: frozenset[str] = frozenset()) -> R:
        """Run one change in the turn that this thread has, and log its notices."""
        notices: list[Notice] = []

        def run(view: LedgerView) -> R:
            result = change(view)
            notices[:] = view.notices
            return result

        proposal = Proposal(scope, run)
        request = Request(scope, self._work(scope, proposal, lost))
        self._commit([request])
        request.raise_error()
        for notice in notices:
            _LOG.log(logging.ERROR if notice.severity == "critical" else logging.INFO, "%s", notice.message)
        return proposal.outcome()

    @property
    def _needed(self) -> Last | None:
        """The entry that has to be in the ledger for a change to run; None for none."""
        return None if self._is_entering else self._missing or self.outbox.last

    def _note_hot(self, error: psycopg.Error) -> Sequence[str]:
        """Return the rows to take the turn for, after a conflict.

        For a while, this process takes turns from the beginning for those that the conflict was about.
        """
        if not isinstance(error, refused.SerializationFailure):
            return ()
        rows = (error.diag.message_detail or "").splitlines()
        self._hot |= dict.fromkeys(rows, time.monotonic() + _TURNS_S)
        return [*rows, *(error.diag.message_hint or "").splitlines()]

    def _hot_of(self, asked: Asked) -> tuple[str, ...]:
        if not self._hot:
            return ()
        now_s = time.monotonic()
        self._hot = {row: until_s for row, until_s in self._hot.items() if until_s > now_s}
        return tuple(row for row in asked.rows if row in self._hot)

    def _try(self, batch: list[Request], asked: Asked, turns: Sequence[str]) -> None:
        """Load, run and write once. Raises one of ``_CONFLICTS`` if a row has changed meanwhile: nothing is written."""
        self._look_for_all()
        if not turns and self._try_known(batch, asked):
            return
        rows = self._load(asked, turns)
        for each in batch:
            self._run_one(rows, each)
        if rows.is_changed:
            self._write(batch, rows, turns)
        else:
            self._known_rows.keep(rows)
            if turns:
                self._writer.say("COMMIT")
        for each in batch:
            each.ran = True

    def _try_known(self, batch: list[Request], asked: Asked) -> bool:
        """Run and write on the rows that this process knows already, in one round trip. False: nothing is written."""
        if self._is_entering or self._connected != self._writer.connected:
            self._connected = self._writer.connected
            self._known_rows.clear()  # it may be another server, or one that has lost the newest commits
        if self._server_clock.is_old:
            return False  # the server is asked for its time
        found = self._known_rows.find(asked, self._clock(), time.monotonic())
        if found is None:
            return False
        rows = LoadedRows(asked, found, self._needed)
        try:
            for each in batch:
                before = len(rows.entries)
                self._run_one(rows, each)
                if len(rows.entries) == before:
                    return False  # what writes nothing is compared with nothing above it
            if rows.are_shared(self._known_rows.shared):
                return False
            self._write(batch, rows, ())
        except refused.SerializationFailure as error:
            changed = (error.diag.message_detail or "").splitlines()
            self._known_rows.share(changed, time.monotonic() + _SHARED_S)
            return False
        except BROKEN as error:
            if isinstance(error, OUT_OF_TURN):
                raise
            return False  # it is sure that nothing is written, and the server may be there again
        return True

    def _look_for_all(self) -> None:
        """Look for each entry of ended processes as well, until one of this process is there beside them all."""
        if len(self.outbox.lasts) < 2 or self._needed is not self.outbox.last:
            return
        self._missing = self._writer.asked(lambda: lacking(self._writer, self.outbox.lasts))
        if self._missing is None:
            self.outbox.all_there()

    def _load(self, asked: Asked, turns: Sequence[str]) -> LoadedRows:
        before = ISOLATION + settings()
        values: tuple[Any, ...] = ()
        if turns:
            # The way there and back is not the time that Python takes, and many rows take longer.
            limit_ms = _IN_TURN_MS + round(2_000 * self._writer.round_trip_s) + asked.loaded // _NODES_A_MS
            idle = f"SET LOCAL idle_in_transaction_session_timeout = {limit_ms}; "
            before, values = f"BEGIN; {before}{idle}{TAKE_TURNS}; ", (as_text(turns),)
        now_ms = None if self._own_clock is None else self._clock()
        values += (self._known.id, asked.to_json(now_ms, self._needed))
        sql = f"{before}SELECT {SCHEMA}.load_{VERSION}(?, ?)"
        [(answer,)] = self._writer.asked(lambda: self._writer.say(sql, values))
        found = to_versioned(answer)
        asked.loaded = len(found.nodes)
        self._server_clock.see(found.now_ms)
        return LoadedRows(asked, found)

    def _write(self, batch: list[Request], rows: LoadedRows, turns: Sequence[str]) -> None:
        durable = any(each.scope.durable for each in batch)
        before, after = ("", "COMMIT") if turns else (ISOLATION + settings(), "")
        values, proof = (self._known.id, durable, rows.to_json(turns)), rows.proof()
        written = False
        try:
            self._writer.say(f"{before}SELECT {SCHEMA}.write_{VERSION}(?, ?, ?); {after}", values)
            written = True
        except BaseException as error:
            self._known_rows.forget(rows)
            written = self._was_written(error, batch, proof)
            if not written or not isinstance(error, Exception):  # a signal came while the answer was waited for
                raise
        else:
            self._known_rows.keep(rows)
        finally:
            if written:
                for each in batch:
                    each.ran = True
                # What is not durable may be gone after a crash of the server. While lost holds are entered again, the
                # missing entry stays the last one, so that the next process goes on where this one ends.
                newest = proof.entries[-1] if proof is not None and durable else None
                self._entered = newest or self._entered
                self.outbox.note(rows, None if self._is_entering else newest)

    def _was_written(self, error: BaseException, batch: list[Request], proof: Proof | None) -> bool:
        """Return whether a write was made that ended in *error*. After False, it never will be.

        Raises ``LedgerUnavailable`` if that cannot be found out.
        """
        if isinstance(error, psycopg.Error):
            has_answer = error.sqlstate is not None and self._writer.is_connected  # a pooler answers for a lost server
            if has_answer or isinstance(error, OUT_OF_TURN) or not isinstance(error, BROKEN):
                return False
        found = None
        try:
            found = None if proof is None else self._is_written(proof)
        finally:
            if found is None:
                failed_together(batch[1:], unsure(self._url))  # they must not run again
        if found is None and isinstance(error, Exception):
            raise unsure(self._url) from error
        return bool(found)

    def _is_written(self, proof: Proof) -> bool | None:
        """Return whether the entries of a write are in the journal; None if the server does not answer."""
        for pause_s in _ASKED_AGAIN_S:
            time.sleep(pause_s)
            try:
                [(found,)] = self._writer.run(f"SELECT {SCHEMA}.is_written_{VERSION}(?, ?)", proof.to_values())
            except psycopg.Error:  # also one that a replica refuses, before it takes over
                continue
            return bool(found) if found or proof.fence is not None else None
        return None

    @override
    def hold(self, hold_id: str) -> Hold | None:
        """See ``LedgerReads.hold``. Signers ask it, so a closed ledger does not answer."""
        self._check_usable()
        return super().hold(hold_id)

    @contextmanager
    def _one_moment(self) -> Iterator[Server]:
        if not self._closed or self._pid != os.getpid():
            self._check_usable()
        with self._trouble(READING), closing(Server(self._url, self._known.check)) as server:
            server.say("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; " + settings(REPORT_MS))
            yield server

    @contextmanager
    def at_one_moment(self, node_id: str | None = None) -> Iterator[PostgresMoment]:
        """See ``LedgerStore.at_one_moment``."""
        self.write_openings(node_id, below=True)
        with self._one_moment() as server:
            server.say(LOOKS_BY_INDEX)
            yield PostgresMoment(server, self._clock)

    def audit(self, *, archives: bool = True) -> Sequence[str]:
        """See ``Audited.audit``."""
        with self.one_moment() as query:
            return strange_parts(query(STRANGE, ())) or audit(query, keeps_idle=True, archives=archives)

    @contextmanager
    def one_moment(self) -> Iterator[Query]:
        """See ``Archivable.one_moment``."""
        self._check_usable()
        with self._one_moment() as server:
            yield partial(server.say, statement_ms=REPORT_MS)

    def one_write(self, work: Callable[[Query], R]) -> R:
        """See ``Archivable.one_write``."""

        def write() -> R:
            with closing(Server(self._url, self._known.check)) as server:  # the answer of its commit may be lost
                server.say("BEGIN; " + ISOLATION + settings(REPORT_MS))
                result = work(partial(server.say, statement_ms=REPORT_MS))
                server.say("COMMIT")
                return result

        self._check_ready()
        with self._trouble(WRITING):
            return write()

    def steady_ms(self) -> int:
        """See ``LedgerStore.steady_ms``."""
        return self._clock.steady_ms()

    def close(self) -> None:
        """See ``LedgerStore.close``."""
        if self._closed or self._pid != os.getpid():
            return
        self._line.check_without_me()
        self._write_last_openings()
        try:
            joined = self._line.join(self._busy_s)
            with self._read_lock:
                self._closed = True
                self._reader.close()
            if joined:  # else a thread is still writing and needs its connection
                self._writer.close()
                self.outbox.close()
        finally:
            self._line.leave()


def _close(pid: int, *parts: Server | Outbox) -> None:
    if pid == os.getpid():
        for part in parts:
            part.close()

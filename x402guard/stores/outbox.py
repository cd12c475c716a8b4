"""What a process has held and spent in the last hours: in its memory, and in a file on its machine.

A server can lose what it has committed: a replica without it takes over, or a backup is restored. The process that wrote it
enters it again. If that process has ended, the next one on the same machine takes its file over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final
from weakref import WeakSet

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import Decoder, Encoder

from x402guard.errors import LedgerUnavailable
from x402guard.ledger.model import Hold, HoldKind, HoldState, Node
from x402guard.ledger.owner import Written
from x402guard.ledger.tree import path
from x402guard.stores.postgres_rows import LoadedRows
from x402guard.stores.rows import UnreadableRecord, hold_record, to_hold

_LOG: Final = logging.getLogger("x402guard")

_MOST_KEPT: Final = 5_000
_KEPT_MS: Final = 21_600_000  # less than the age of what can be archived, which is in the ledger and is no hold
_AT_ONCE: Final = 100
_MOST_LINE: Final = 10_000_000
_LONG: Final = 4_000_000
_AGAIN_MS: Final = 60_000
_ENDING: Final = ".jsonl"

Last = Mapping[str, str | int]
"""An entry of the journal: its node, its number, its hash."""

_Holds = list[tuple[list[str | int | None], dict[str, Any], list[str]]]


class _Line(Struct, omit_defaults=True):
    """One line of a file: what has changed.

    Attributes:
        at_ms: the server's time, in unix milliseconds.
        last: the newest durable entry from then on; None for none.
        holds: for each hold its row, the facts of its first entry, and the budgets above it.
        gone: the holds that count no more.
    """

    at_ms: int
    last: dict[str, str | int] | UnsetType | None = UNSET
    holds: _Holds = []
    gone: list[str] = []


_TEXT: Final = Encoder().encode
_READ: Final = Decoder(_Line).decode


def outbox_folder(ledger: str) -> Path | None:
    """Return where this user keeps the files of a ledger, by its id; None without a home folder.

    See the XDG Base Directory Specification, ``XDG_STATE_HOME``.
    """
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        state = named if named.is_absolute() else Path.home() / ".local/state"
    except RuntimeError:
        return None
    return state / "x402guard" / "outbox" / ledger


class Kept:
    """Holds as they were written last, of the last six hours, five thousand at most; and the newest durable entry.

    Attributes:
        last: that entry; None for none.
        last_ms: when it was written, in unix milliseconds.
    """

    def __init__(self) -> None:
        self.last: Last | None = None
        self.last_ms = 0
        self._holds: dict[str, tuple[int, Written]] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def put(self, at_ms: int, written: Written) -> None:
        """Keep a hold as it is now."""
        self._holds.pop(written.hold.id, None)
        self._holds[written.hold.id] = at_ms, written

    def drop(self, hold_ids: Iterable[str]) -> None:
        """Forget holds that count no more."""
        for hold_id in hold_ids:
            self._holds.pop(hold_id, None)

    def known(self, hold_id: str) -> Written | None:
        """Return a hold as it was kept; None if it is not."""
        return self._holds.get(hold_id, (0, None))[1]

    def forget_old(self, now_ms: int) -> None:
        """Forget holds older than six hours at a time in unix milliseconds, and the oldest of too many."""
        while self._holds:
            oldest = next(iter(self._holds))
            if len(self._holds) <= _MOST_KEPT and self._holds[oldest][0] > now_ms - _KEPT_MS:
                break
            del self._holds[oldest]

    def read(self, line: _Line) -> None:
        """Take over what a line of a file says. Raises ``UnreadableRecord``."""
        for record, facts, above in line.holds:
            self.put(line.at_ms, Written(to_hold(record), facts, tuple(above)))
        self.drop(line.gone)
        if line.last is not UNSET:
            self.last, self.last_ms = line.last, line.at_ms

    def add(self, other: Kept) -> None:
        """Take over what another process has kept."""
        self._holds = dict(sorted((self._holds | other._holds).items(), key=lambda item: item[1][0]))
        if other.last_ms > self.last_ms:
            self.last, self.last_ms = other.last, other.last_ms

    def lines(self) -> Iterator[_Line]:
        """Yield lines that say all of it."""
        yield _Line(self.last_ms, last=None if self.last is None else dict(self.last))
        for at_ms, written in self._holds.values():
            yield _Line(at_ms, holds=[_as_row(written)])

    def parts(self, now_ms: int) -> list[list[Written]]:
        """Return the holds as of a time (unix milliseconds), in parts for a transaction each."""
        self.forget_old(now_ms)
        kept = [written for _, written in self._holds.values()]
        return [kept[start : start + _AT_ONCE] for start in range(0, len(kept), _AT_ONCE)]


class Outbox(Kept):
    """What this process has kept: in memory alone until it is told where its file lies."""

    def __init__(self) -> None:
        super().__init__()
        self._folder: Path | None = None
        self._is_synced = False
        self._file: _File | None = None
        self._again_ms = 0  # after an error: when it is tried again

    def keep_in(self, folder: Path | None, *, synced: bool) -> None:
        """Keep a file in *folder* from the first write on. If *synced*, a power cut does not take what is durable."""
        self._folder, self._is_synced = folder, synced

    def note(self, rows: LoadedRows, last: Last | None) -> None:
        """Keep what the changes of one transaction have written, with its *last* entry if the transaction is durable."""
        first = {entry.hold_id: entry for entry in rows.entries if entry.event == "authorize"}
        holds, gone, now_ms = list[Written](), list[str](), rows.now_ms
        for hold in rows.written_holds():
            before = self.known(hold.id)
            if hold.kind is HoldKind.TOKENS or hold.state in (HoldState.VOIDED, HoldState.EXPIRED):
                if before is not None:
                    gone.append(hold.id)
                continue
            entry = first.get(hold.id)
            taken_over = {"kind": hold.kind, "amount": hold.amount, "deadline": hold.deadline_unix}
            facts = entry.facts() if entry is not None else taken_over if before is None else before.facts
            holds.append(Written(hold, facts, _above(rows.nodes, hold, before)))
        for each in holds:
            self.put(now_ms, each)
        self.drop(gone)
        if last is not None:
            self.last, self.last_ms = last, now_ms
        self.forget_old(now_ms)
        if holds or gone or last is not None:
            changed = UNSET if last is None else dict(last)
            self._say(_Line(now_ms, last=changed, holds=list(map(_as_row, holds)), gone=gone), durable=last is not None)

    def forget(self, entered: Sequence[Written], now_ms: int) -> None:
        """Forget what the ledger has again."""
        ids = [each.hold.id for each in entered]
        self.drop(ids)
        self._say(_Line(now_ms, gone=ids), durable=True)

    def forget_last(self, now_ms: int) -> None:
        """Let no later process look for the last entry: all that the ledger had lost is entered again."""
        self.last, self.last_ms = None, now_ms
        self._say(_Line(now_ms, last=None), durable=True)

    def replace(self, ended: Sequence[Left]) -> None:
        """Write what was added of *ended* processes to the file of this one, and remove theirs."""
        try:
            self._make()
        except OSError as error:
            self._log(error)  # theirs stay
            return
        for left in ended:
            left.remove()

    def _say(self, line: _Line, *, durable: bool) -> None:
        """Write a line. After an error, write all of it anew, once a minute until that succeeds."""
        if self._folder is None or line.at_ms < self._again_ms:
            return
        try:
            if self._file is None or self._again_ms or self._file.is_long:
                self._make()
            else:
                self._file.append(_TEXT(line), sync=durable and self._is_synced)
            self._again_ms = 0
        except OSError as error:
            self._again_ms = line.at_ms + _AGAIN_MS
            self._log(error)

    def _make(self) -> None:
        """Write all of it to a new file in place of the one before. Raises ``OSError``; then that one stays."""
        if self._folder is None:
            return
        before = self._file
        self._file = _File(self._folder, before, map(_TEXT, self.lines()))
        if before is not None:
            before.close()

    def _log(self, error: OSError) -> None:
        _LOG.error(
            "%s: what this process writes cannot be kept beside the ledger: %s; if the ledger's server loses it after this "
            "process has ended, it is not entered again",
            self._folder,
            error.strerror,
        )

    def close(self) -> None:
        """Close the file; the next process takes it over. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def discard(self) -> None:
        """Close the file and remove it: the ledger cannot be opened, and the files of ended processes stay. Idempotent."""
        file = self._file
        self.close()
        if file is not None:
            file.path.unlink(missing_ok=True)


class _File:
    """The file of a living process: locked, so that no other one takes it over. It is closed in a fork.

    Args:
        folder: where it is made, with the rights of this user alone.
        before: the file that it takes the place of.
        lines: what it says first.

    Raises ``OSError`` if it cannot be written.
    """

    path: Path

    def __init__(self, folder: Path, before: _File | None, lines: Iterable[bytes]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".")
        self._descriptor = descriptor
        made = Path(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = _write(descriptor, b"".join([line + b"\n" for line in lines]))
            os.fsync(descriptor)
            self.path = folder / f"{made.name.strip('.')}{_ENDING}" if before is None else before.path
            made.replace(self.path)
            _sync(folder)
        except BaseException:
            made.unlink(missing_ok=True)
            self.close()
            raise
        self._first_size = self._size
        _OPEN.add(self)

    def append(self, line: bytes, *, sync: bool) -> None:
        """Write a line to the end. Raises ``OSError``."""
        self._size += _write(self._descriptor, b"\n" + line + b"\n")  # Ctrl-C may have cut the line before
        if sync:
            os.fsync(self._descriptor)

    @property
    def is_long(self) -> bool:
        """True if most of it is likely to say what a later line has changed."""
        return self._size > _LONG + 4 * self._first_size

    def close(self) -> None:
        """Close it. Idempotent."""
        descriptor, self._descriptor = self._descriptor, _NONE
        if descriptor != _NONE:
            os.close(descriptor)


class Left(Kept):
    """What a process that has ended kept in its file, as of a time in unix milliseconds."""

    def __init__(self, file: Path, lines: BinaryIO, now_ms: int) -> None:
        super().__init__()
        self._file = file
        for number, line in enumerate(iter(lambda: lines.readline(_MOST_LINE), b""), 1):
            try:
                if line != b"\n":
                    self.read(_READ(line))
            except (ValueError, RecursionError, UnreadableRecord) as error:
                # The process has ended while it wrote this one.
                _LOG.error("%s: line %d cannot be read and is left out: %.200s", file, number, error)
        self.forget_old(now_ms)
        if self.last_ms <= now_ms - _KEPT_MS:
            self.last = None

    def remove(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)


@contextmanager
def left_behind(folder: Path | None, now_ms: int) -> Iterator[Sequence[Left]]:
    """Yield what the ended processes of this machine have kept of a ledger; no other process has it at the same time.

    Raises ``LedgerUnavailable`` for a file that cannot be read.
    """
    found = list[Left]()
    with ExitStack() as opened:
        for file in sorted(folder.iterdir()) if folder is not None and folder.is_dir() else ():
            try:
                lines = opened.enter_context(file.open("rb"))
                if not _is_free(file, lines.fileno()):
                    continue
                if file.suffix == _ENDING:
                    found.append(Left(file, lines, now_ms))
                else:
                    file.unlink()  # it was never finished
            except FileNotFoundError:
                continue
            except OSError as error:
                raise LedgerUnavailable(
                    f"{file} has what an agent on this machine wrote last, and cannot be read: {error.strerror}",
                    advice="Nothing was paid. Let this user read it; remove it only if the ledger's server has lost nothing.",
                ) from error
        yield found


def _is_free(file: Path, descriptor: int) -> bool:
    """Lock a file, and return True if it is still there and no process had it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with suppress(FileNotFoundError):
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    return False


def _above(nodes: Mapping[str, Node], hold: Hold, before: Written | None) -> tuple[str, ...]:
    """Return the budgets that a hold is paid out of, from its own up, as far as they are known."""
    if hold.node_id in nodes:
        return tuple(node.id for node in path(nodes, hold.node_id))
    return (hold.node_id,) if before is None else before.path


def _as_row(written: Written) -> tuple[list[str | int | None], dict[str, Any], list[str]]:
    return list(hold_record(written.hold)), dict(written.facts), list(written.path)


def _write(descriptor: int, data: bytes) -> int:
    """Write all of it, and return how many bytes that are."""
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    return written


def _sync(folder: Path) -> None:
    """Sync the names in a folder, so that a power cut does not take a new one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_NONE: Final = -1
_OPEN: Final[WeakSet[_File]] = WeakSet()


def _leave_to_the_parent() -> None:
    """Close the files in a fork: it would keep the lock of a parent that has ended."""
    for file in list(_OPEN):
        file.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)

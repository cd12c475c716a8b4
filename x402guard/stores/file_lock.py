"""Shares the turn to write fairly among processes, with two lock files beside the database.

SQLite's own busy handler sleeps up to 100 ms and lets one process block the others for seconds. Here one waiter, the
first in the queue, polls all the time, the others more often the longer they wait; and a process that had the turn
pauses before it takes it again if others wait. A lock that blocks would need no polling, but it has no time limit.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from x402guard.kernel.change_set import MarkKey

SHORTEST_PAUSE_S: Final = 0.0002
LONGEST_PAUSE_S: Final = 0.003
PATIENCE_S: Final = 0.05
"""After this many seconds every waiter polls as often as it can."""
OWED_PAUSE_S: Final = 0.0003
"""How long a process that gave its turn to others pauses before it asks for the next one."""

_NAMES: Final = ("lock", "queue")
_RECORD: Final = re.compile(rb"x402guard ([0-9]{20}) ([0-9]{20})\n")
_RECORD_BYTES: Final = 52
_MOST_URL_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True, order=True)
class Generation:
    """How far a ledger has come: *n* counts its durable commits, *used* is all that its wallet has ever spent.

    In nano-dollars; in the lock file with what was live then.
    """

    n: int = 0
    used: int = 0


def noted_generation(path: Path) -> Generation:
    """Return the generation of a ledger that its lock file has; the first one without a file that this user may read."""
    try:
        with Path(f"{path}-lock").open("rb") as file:
            return _generation(file.read(_RECORD_BYTES))
    except OSError:
        return Generation()


def noted_move(path: Path) -> str:
    """Return where the ledger of a file was moved to; "" if it was not, or for a lock file that this user may not read."""
    try:
        with Path(f"{path}-lock").open("rb") as file:
            file.seek(_RECORD_BYTES)
            return file.read(_MOST_URL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def was_used(path: Path) -> bool:
    """Return whether a ledger was once completely made at a path."""
    try:
        return Path(f"{path}-lock").stat().st_size > 0
    except OSError:
        return False


def _generation(record: bytes) -> Generation:
    found = _RECORD.fullmatch(record)
    return Generation() if found is None else Generation(int(found[1]), int(found[2]))


FILE_MARK: Final[MarkKey] = ("file", "noted")
"""The key of the mark that says which file the ledger is in, so that a copy knows that it is one."""


def place_of(path: Path) -> dict[str, Any]:
    """Return what tells a file from its copies: the id of its file system, and its inode.

    Not the device's number, which a container and a network's disk have anew after each start.
    """
    return {"system": f"{os.statvfs(path).f_fsid & 0xFFFFFFFFFFFFFFFF:x}", "inode": str(path.stat().st_ino)}


def identities(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """Return device and inode of the database and of the files beside it; None for a missing one."""
    found: list[tuple[int, int] | None] = []
    for name in ("", "-wal", "-shm", "-lock"):
        try:
            stat = os.stat(f"{path}{name}")  # noqa: PTH116 - three times as fast
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_dev, stat.st_ino))
    return tuple(found)


class FileTurn:
    """The turn of one process, for one thread at a time.

    A fork cannot use it, because the lock belongs to the open file, which a fork shares.

    Args:
        path: the database file. The suffixes ``-lock`` and ``-queue`` are added to its name; both files stay.
    """

    def __init__(self, path: Path) -> None:
        self._paths = tuple(Path(f"{path}-{name}") for name in _NAMES)
        self._fresh = [each for each in self._paths if not each.exists()]
        self._owes = False
        with ExitStack() as undo:
            opened = []
            for each in self._paths:
                opened.append(os.open(each, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
                undo.callback(os.close, opened[-1])
            self._turn, self._queue = opened
            undo.pop_all()
        _OPEN.add(self)

    def take(self, most_s: float) -> bool:
        """Wait for the turn. Returns True once it is taken.

        Returns False after *most_s* seconds, so a stopped process cannot block the others forever.
        """
        if self._owes:
            self._owes = False
            time.sleep(OWED_PAUSE_S)
        if locks(self._turn):
            return True
        began = time.monotonic()
        is_first = False
        try:
            while not locks(self._turn):
                # The one that has the queue may be stopped: never block on it.
                is_first = is_first or locks(self._queue)
                waited_s = time.monotonic() - began
                if waited_s > most_s:
                    return False
                longest_s = SHORTEST_PAUSE_S if is_first else LONGEST_PAUSE_S
                time.sleep(max(SHORTEST_PAUSE_S, longest_s * (1 - waited_s / PATIENCE_S)))
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)
        return True

    def give(self) -> None:
        """Give the turn back. Idempotent; it may be called without the turn."""
        if self._turn == _NONE:
            return
        fcntl.flock(self._turn, fcntl.LOCK_UN)
        self._owes = True  # another process may be waiting
        try:
            if locks(self._queue):
                self._owes = False
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)  # Ctrl-C may have come after it was locked

    @property
    def was_used(self) -> bool:
        """True if a ledger was once completely created beside these files."""
        return os.fstat(self._turn).st_size > 0

    def note_used(self) -> None:
        """Remember that a ledger was completely created beside these files."""
        if not self.was_used:
            self.note(Generation())

    def generation(self) -> Generation:
        """Return the last generation that was noted here; the first one for a file that says none."""
        return _generation(os.pread(self._turn, _RECORD_BYTES, 0))

    def note(self, generation: Generation) -> None:
        """Note a generation of the ledger, after its commit. Only with the turn."""
        os.pwrite(self._turn, f"x402guard {generation.n:020d} {generation.used:020d}\n".encode(), 0)

    def note_moved(self, url: str) -> None:
        """Note where the ledger was moved to, so that an older copy of its file knows it too. Only with the turn."""
        os.pwrite(self._turn, url.encode(), _RECORD_BYTES)

    @property
    def moved_to(self) -> str:
        """Where the ledger that was here was moved to, or ""."""
        return os.pread(self._turn, _MOST_URL_BYTES, _RECORD_BYTES).decode(errors="replace")

    def remove_fresh(self) -> None:
        """Remove the lock files that this instance created: the database belongs to another program."""
        for path in self._fresh:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files. Idempotent."""
        turn, queue, self._turn, self._queue = self._turn, self._queue, _NONE, _NONE
        if turn != _NONE:
            os.close(turn)
            os.close(queue)


class LifeLock:
    """A lock that a process holds as long as it lives, so that others see its end: also in another container.

    A file of its own, because any close of a locked file would give up the locks of its process (fcntl's byte ranges), and
    because a fork must not hold it on: it closes its descriptor.
    """

    def __init__(self, path: Path, name: str) -> None:
        """*path* is the ledger's file, *name* what stands in the row of the process. Raises ``OSError``."""
        self._path = _life_of(path, name)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        locks(self._descriptor)
        _OPEN.add(self)

    def close(self, *, ends: bool = False) -> None:
        """Close it; with *ends*, the process has written that it ends, and the file goes. Idempotent."""
        descriptor, self._descriptor = self._descriptor, _NONE
        if descriptor != _NONE:
            if ends:
                self._path.unlink(missing_ok=True)
            os.close(descriptor)


def lives(path: Path, name: str) -> bool | None:
    """Return whether the process with this life lock at a ledger's file lives; None if that cannot be known here."""
    try:
        descriptor = os.open(_life_of(path, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None  # also where there is no file: it is removed after the end is written, or was removed by hand
    try:
        return not locks(descriptor)
    finally:
        os.close(descriptor)


class ShowsLife:
    """A store in a file, beside which each process holds a lock for its life."""

    _path: Path

    def hold_life(self, name: str) -> LifeLock | None:
        """See ``LedgerStore.hold_life``."""
        with suppress(OSError):
            return LifeLock(self._path, name)
        return None

    def lives(self, name: str) -> bool | None:
        """See ``LedgerStore.lives``."""
        return lives(self._path, name)


_LIFE: Final = re.compile(r"[0-9a-f]{8,64}")


def _life_of(path: Path, name: str) -> Path:
    if not _LIFE.fullmatch(name):  # a row's word makes no path
        raise OSError(f"{name!r:.80} is no name of a lock")
    return Path(f"{path}-live-{name}")


def locks(descriptor: int) -> bool:
    """Lock an open file at once. Returns False if another one has it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_NONE: Final = -1
_OPEN: Final[WeakSet[FileTurn | LifeLock]] = WeakSet()


def _leave_to_the_parent() -> None:
    """Close the files in a fork: it could keep the turn of a killed parent, or release that of a live parent."""
    for turn in list(_OPEN):
        turn.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)

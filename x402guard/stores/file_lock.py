"""The turn to write, among processes: two lock files beside the database, and nobody starves.

SQLite's own busy handler sleeps up to 100 ms and lets one process keep the others waiting for seconds. Here a waiter looks more often
the longer it waits, and who had the turn while others wait steps back before he takes it again.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from weakref import WeakSet

SHORTEST_PAUSE_S: Final = 0.0001
LONGEST_PAUSE_S: Final = 0.001
PATIENCE_S: Final = 0.05
"""After so many seconds a waiter looks as often as it can."""

_NAMES: Final = ("lock", "queue")


class FileTurn:
    """The turn of one process, for one thread at a time. It is none of a fork's: a lock belongs to the open file, which a fork shares.

    Args:
        path: the database's; ``-lock`` and ``-queue`` are added to its name, and both files stay.
    """

    def __init__(self, path: Path) -> None:
        self._paths = tuple(Path(f"{path}-{name}") for name in _NAMES)
        self._fresh = [each for each in self._paths if not each.exists()]
        self._owes = False
        with ExitStack() as undo:
            opened = []
            for each in self._paths:
                opened.append(os.open(each, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                undo.callback(os.close, opened[-1])
            self._turn, self._queue = opened
            undo.pop_all()
        _OPEN.add(self)

    def take(self, most_s: float) -> bool:
        """Wait for the turn, at most so many seconds; True once it is ours. One stopped with the turn must not stop us all."""
        if self._owes:
            self._owes = False
            time.sleep(LONGEST_PAUSE_S)
        if _locks(self._turn):
            return True
        began = time.monotonic()
        is_queued = False
        try:
            while not _locks(self._turn):
                # Who gives the turn back holds the queue for a moment, and might be stopped in it: nobody may wait for him.
                is_queued = is_queued or _locks(self._queue, fcntl.LOCK_SH)
                waited_s = time.monotonic() - began
                if waited_s > most_s:
                    return False
                time.sleep(max(SHORTEST_PAUSE_S, LONGEST_PAUSE_S * (1 - waited_s / PATIENCE_S)))
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)
        return True

    def give(self) -> None:
        """Give it back. Giving back what is not ours is fine."""
        if self._turn == _NONE:
            return
        fcntl.flock(self._turn, fcntl.LOCK_UN)
        self._owes = True  # somebody waits in another process, for all that we know
        try:
            if _locks(self._queue):
                self._owes = False
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)  # Ctrl-C may have come once it was ours

    @property
    def was_used(self) -> bool:
        """True where a ledger was finished beside these files once."""
        return os.fstat(self._turn).st_size > 0

    def note_used(self) -> None:
        """Remember that a ledger was finished beside these files."""
        if not self.was_used:
            os.write(self._turn, b"x402guard\n")

    def remove_fresh(self) -> None:
        """Take away the files that were not there before: the database is another's."""
        for path in self._fresh:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the files. Closing twice is fine."""
        turn, queue, self._turn, self._queue = self._turn, self._queue, _NONE, _NONE
        if turn != _NONE:
            os.close(turn)
            os.close(queue)


def _locks(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_NONE: Final = -1
_OPEN: Final[WeakSet[FileTurn]] = WeakSet()


def _leave_to_the_parent() -> None:
    """In a fork: it would keep the turn of a parent that was killed with it, and give away that of one that lives."""
    for turn in list(_OPEN):
        turn.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)

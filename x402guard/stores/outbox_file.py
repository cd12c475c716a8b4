"""The files in which processes keep what a ledger's server may lose: locked while their process lives."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final
from weakref import WeakSet

from x402guard.errors import LedgerUnavailable
from x402guard.stores.archive_file import sync_folder
from x402guard.stores.file_lock import locks

_LOG: Final = logging.getLogger("x402guard")

ENDING: Final = ".jsonl"
_LONG: Final = 4_000_000
_TRIES: Final = 5
_WAIT_S: Final = 10.0
_LOOK_S: Final = 0.02


class OutboxFile:
    """The file of a living process: locked, so that no other one takes it over. It is closed in a fork.

    Args:
        folder: where it is made, with the rights of this user alone.
        lines: what it says first.

    Raises ``OSError`` if it cannot be written.
    """

    def __init__(self, folder: Path, lines: Iterable[bytes]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor, self._path = _new_file(folder)
        _OPEN.add(self)
        try:
            self._size = self._first_size = _write(self._descriptor, b"".join([line + b"\n" for line in lines]))
            os.fsync(self._descriptor)
            sync_folder(folder)
        except BaseException:
            self.close(remove=True)
            raise

    def append(self, lines: bytes, *, sync: bool) -> None:
        """Write lines to the end. Raises ``OSError``."""
        self._size += _write(self._descriptor, b"\n" + lines + b"\n")  # Ctrl-C may have cut the line before
        if sync:
            os.fsync(self._descriptor)

    @property
    def is_long(self) -> bool:
        """True if most of it is likely to say what a later line has changed."""
        return self._size > _LONG + 4 * self._first_size

    @property
    def is_gone(self) -> bool:
        """True if another program has removed it."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self, *, remove: bool = False) -> None:
        """Close it. Idempotent."""
        descriptor, self._descriptor = self._descriptor, _NONE
        if descriptor != _NONE:
            if remove:
                remove_file(self._path)
            os.close(descriptor)


def open_file(file: Path) -> BinaryIO:
    """Open a file to be read, and to be locked if its disk can be written. Raises ``OSError``."""
    try:
        return file.open("r+b")  # for its lock on a network's disk
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return file.open("rb")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time look through a folder, so that none goes on before what was lost is entered."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise
        yield
        return
    try:
        until_s = time.monotonic() + _WAIT_S
        while not locks(descriptor):
            if time.monotonic() > until_s:
                raise LedgerUnavailable(
                    f"another process on this machine has been entering what the ledger does not have of ended processes for {_WAIT_S:.0f} s",
                    advice=f"Nothing was paid. Open the ledger again; if it stays so, end the process that has {folder}/lock open.",
                )
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork may have it open
    finally:
        os.close(descriptor)


def _new_file(folder: Path) -> tuple[int, Path]:
    """Return a new file, locked by this process. Raises ``OSError``.

    Who looks through the folder has it locked for a moment, and leaves it alone while it is empty.
    """
    for _ in range(_TRIES):
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=ENDING)
        if locks(descriptor):
            return descriptor, Path(name)
        os.close(descriptor)
        remove_file(Path(name))
    raise BlockingIOError(errno.EWOULDBLOCK, "another process has each new file locked")


def is_free(file: Path, descriptor: int) -> bool:
    """Lock a file, and return True if it has anything in it, is still there, and no process had it locked."""
    if not locks(descriptor):
        return False
    found = os.fstat(descriptor)
    if found.st_size == 0:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False
    with suppress(FileNotFoundError):
        return os.path.samestat(file.stat(), found)
    return False


def remove_file(file: Path) -> None:
    """Remove a file. It never fails: one that stays is entered again, which changes nothing."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        _LOG.error("%s: it is of no use now, and cannot be removed: %s", file, error.strerror)


def _write(descriptor: int, data: bytes) -> int:
    """Write all of it, and return how many bytes that are."""
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    return written


_NONE: Final = -1
_OPEN: Final[WeakSet[OutboxFile]] = WeakSet()


def _leave_to_the_parent() -> None:
    """Close the files in a fork: it would keep the lock of a parent that has ended."""
    for file in list(_OPEN):
        file.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)

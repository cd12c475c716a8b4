"""Maps SQLite and file-system errors to ``LedgerUnavailable`` with advice."""

from __future__ import annotations

import os
import re
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from x402guard.errors import InconsistentLedger, LedgerUnavailable, Retry
from x402guard.stores.rows import UnreadableRecord

_BESIDE: Final = ("", "-wal", "-shm", "-lock", "-queue")
_ANOTHER: Final = "Nothing was paid. Choose another file, or restore a copy of the ledger that you trust."

_ADVICE: Final[dict[int, tuple[str, Retry]]] = {
    sqlite3.SQLITE_NOTADB: (_ANOTHER, "after_change"),
    sqlite3.SQLITE_CORRUPT: (_ANOTHER, "after_change"),
    sqlite3.SQLITE_FULL: ("Nothing was paid. The disk is full: make room, then repeat the call.", "later"),
    sqlite3.SQLITE_BUSY: (
        "Nothing was paid. Another program has locked the ledger; end it, then repeat the call.",
        "later",
    ),
}
"""SQLite's primary result code → the advice, and when to retry."""


@contextmanager
def unavailable(what: str, path: Path) -> Iterator[None]:
    """Raise ``LedgerUnavailable`` for an error from SQLite, the file system or an unreadable row in the block."""
    try:
        yield
    except LOST as error:
        raise as_unavailable(what, path, error) from error


LOST: Final = (sqlite3.Error, OSError, OverflowError, UnreadableRecord)
"""The errors that mean that the ledger cannot be read or written."""


def as_unavailable(what: str, path: Path, error: Exception) -> LedgerUnavailable:
    """Return the error to raise for one of ``LOST``."""
    code = getattr(error, "sqlite_errorcode", None)
    advice, retry = _ADVICE.get(-1 if code is None else code & 0xFF, (None, LedgerUnavailable.retry))
    wrapped = LedgerUnavailable(f"{what} {path}: {error}", advice=advice, retry=retry)
    wrapped.__cause__ = error
    return wrapped


def foreign(path: Path) -> LedgerUnavailable:
    """Return the error for a database that is not a ledger."""
    return LedgerUnavailable(
        f"{path} is a database of another program; choose another file",
        advice=_ANOTHER,
        retry="after_change",
    )


def unreleased(place: Path | str) -> LedgerUnavailable:
    """Return the error for a ledger of a commit before the first release: its file, or the URL of its database."""
    kept = "file" if isinstance(place, Path) else "database"
    return LedgerUnavailable(
        f"{place} has the ledger of an earlier x402guard, which was never released; this one does not read it",
        advice=(
            f"Nothing was paid. Keep that {kept}, and read it with the version that made it. Name another {kept} for a new "
            "ledger: what was paid or is held in the earlier one does not count there."
        ),
        retry="after_change",
    )


def unfinished(path: Path) -> InconsistentLedger:
    """Return the error for a file in which a ledger was begun, and in which there is none: the disk was full."""
    return InconsistentLedger(
        f"the ledger {path} has nothing in it: it was begun and not made, or it is a copy without its -wal file",
        advice=(
            "Nothing was paid. A copy is made whole by `x402guard ledger copy FILE`. A new ledger is made by `x402guard budget "
            "set wallet AMOUNT --new`, once there is room on its disk."
        ),
    )


def emptied(path: Path) -> InconsistentLedger:
    """Return the error for a file without a ledger in it, where one was."""
    return InconsistentLedger(
        f"the ledger {path} has nothing in it, and one was here: it looks like a copy without its -wal file",
        advice=(
            "Nothing was paid. Put the whole ledger back. If it is lost, the owner runs `x402guard ledger restore --accept-older`, "
            "which counts what was used and stops everything."
        ),
    )


def unsound(path: Path, problem: str) -> InconsistentLedger:
    """Return the error for an inconsistent ledger."""
    return InconsistentLedger(f"the ledger {path} is inconsistent: {problem}")


def changed(path: Path) -> LedgerUnavailable:
    """Return the error for a ledger one of whose files was removed or replaced while it was open."""
    return LedgerUnavailable(
        f"{path}, or its -wal, -shm or -lock file, was removed or replaced while it was open; restore it, or open the ledger again",
        advice="Nothing was paid. Put the file back, or start this process again.",
        retry="after_change",
    )


def moved(path: Path, url: str) -> LedgerUnavailable:
    """Return the error for a ledger that was moved to another place: here it would be a second budget."""
    return LedgerUnavailable(
        f"the ledger {path} was moved to {url}",
        advice=f"Nothing was paid. Use that one: X402GUARD_LEDGER={url}",
        retry="after_change",
    )


def older(path: Path, commits: int) -> LedgerUnavailable:
    """Return the error for a ledger that is older than the one that was here: payments since then are not in it."""
    return LedgerUnavailable(
        f"the ledger {path} is older than the one that was here: {commits} durable commits are not in it",
        advice=(
            "Nothing was paid. Put the newer file back, with its -wal file. If it is lost, the owner runs `x402guard ledger "
            "restore --accept-older`, which counts what may be out and trips every session."
        ),
        retry="after_change",
    )


def copied(path: Path) -> LedgerUnavailable:
    """Return the error for a ledger's file that is a copy of another one: both would be spent."""
    return LedgerUnavailable(
        f"the ledger {path} is in another file than the one that it notes: it is a copy, and the first one may be in use",
        advice=(
            "Nothing was paid. It can be looked at. Where it was moved here, and nothing uses the first file any more, its owner "
            f"runs `x402guard ledger file --accept --ledger {shlex.quote(str(path))}`."
        ),
        retry="after_change",
    )


def newer(path: Path | str, done: str, version: int) -> LedgerUnavailable:
    """Return the error for a ledger of a later version than this library's: it was *done* (written, changed) by another."""
    return LedgerUnavailable(
        f"{path} was {done} by a newer x402guard (ledger version {version}); update this installation",
        advice="Nothing was paid. Update x402guard here, then start this process again.",
        retry="after_change",
    )


def put_back(path: Path, version: int) -> LedgerUnavailable:
    """Return the error for a ledger of an earlier *version* that was put in place of an open one."""
    return LedgerUnavailable(
        f"{path} has ledger version {version} now, an earlier one than when it was opened",
        advice="Nothing was paid. Put the newer file back, with its -wal file, then start this process again.",
        retry="after_change",
    )


def of_another_version(path: Path, version: int, known: int) -> LedgerUnavailable:
    """Return the error for a ledger of another *version* than the one *known*, where it is not brought to that one."""
    if version > known:
        return newer(path, "written", version)
    return LedgerUnavailable(
        f"{path} has ledger version {version}, and this installation reads version {known}; its owner upgrades it, and older "
        "installations are refused from then on",
        advice=(
            "Nothing was paid. End the processes of older installations, run `x402guard ledger upgrade --ledger "
            f"{shlex.quote(str(path))}`, then repeat the call."
        ),
        retry="after_change",
    )


def refuse_unless_kept(path: Path) -> None:
    """Raise ``LedgerUnavailable`` for a deleted ledger. Creating a new one would let a deletion restore the budget."""
    if Path(f"{path}-lock").exists() and not path.exists():
        raise gone(path)


def gone(path: Path) -> LedgerUnavailable:
    """Return the error for a deleted ledger."""
    return LedgerUnavailable(
        f"the ledger {path} existed here and is missing",
        advice=f"Nothing was paid. Restore it. If you want a new budget, remove {path.name}-lock too.",
        retry="after_change",
    )


_MOUNTS: Final = Path("/proc/self/mountinfo")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


def refuse_second_path(path: Path) -> None:
    """Raise ``LedgerUnavailable`` for a file that has other files beside it on another path, and so another budget there.

    That is one with a second hard link, and one that a container mounts alone, without its folder.
    """
    why = ""
    if path.stat().st_nlink > 1:
        why = "has a second name (a hard link)"
    elif _is_mounted(path):
        why = "is mounted without its folder"
    if why:
        raise LedgerUnavailable(
            f"the ledger {path} {why}, and its -wal and -lock files are beside one path alone: another process would "
            "not see what is held",
            advice="Nothing was paid. Give all processes the same path: mount the folder of the file, and remove links to it.",
            retry="after_change",
        )


def _is_mounted(path: Path) -> bool:
    if path.stat().st_dev != path.parent.stat().st_dev:
        return True
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return False
    points = (line.split(" ")[4] for line in mounts if line.count(" ") > 4)
    return any(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), point) == str(path) for point in points)


def refuse_unless_writable(path: Path) -> None:
    """Raise ``LedgerUnavailable`` that names a read-only file, before SQLite creates more read-only files beside it."""
    for name in _BESIDE:
        each = Path(f"{path}{name}")
        if each.exists() and not os.access(each, os.W_OK):
            raise LedgerUnavailable(f"{each} is read-only for this user, but the ledger has to write it")

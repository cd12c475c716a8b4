"""What may be wrong with a ledger's file, said such that its owner knows what to do."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from x402guard.errors import LedgerUnavailable, Retry
from x402guard.stores.rows import UnreadableRecord

_BESIDE: Final = ("", "-wal", "-shm", "-lock", "-queue")
_ANOTHER: Final = "Nothing was paid. Choose another file, or put back a copy of the ledger that you trust."

_ADVICE: Final[dict[int, tuple[str, Retry]]] = {
    sqlite3.SQLITE_NOTADB: (_ANOTHER, "after_change"),
    sqlite3.SQLITE_CORRUPT: (_ANOTHER, "after_change"),
    sqlite3.SQLITE_FULL: ("Nothing was paid. The disk is full: make room, then repeat the call.", "later"),
    sqlite3.SQLITE_BUSY: (
        "Nothing was paid. Another program has locked the ledger; end it, then repeat the call.",
        "later",
    ),
}
"""SQLite's primary result code → what to do, and when to ask again."""


@contextmanager
def unavailable(what: str, path: Path) -> Iterator[None]:
    """Raise ``LedgerUnavailable`` for whatever SQLite, the disk or a row that cannot be read raises inside."""
    try:
        yield
    except (sqlite3.Error, OSError, OverflowError, UnreadableRecord) as error:
        code = getattr(error, "sqlite_errorcode", None)
        advice, retry = _ADVICE.get(-1 if code is None else code & 0xFF, (None, LedgerUnavailable.retry))
        wrapped = LedgerUnavailable(f"{what} {path}: {error}", advice=advice)
        wrapped.retry = retry
        raise wrapped from error


def foreign(path: Path) -> LedgerUnavailable:
    """Return the error for a database that is no ledger."""
    error = LedgerUnavailable(f"{path} is a database of something else; choose another file", advice=_ANOTHER)
    error.retry = "after_change"
    return error


def unsound(path: Path, problem: str) -> LedgerUnavailable:
    """Return the error for books that do not add up."""
    return LedgerUnavailable(
        f"the ledger {path} does not add up: {problem}",
        advice="Nothing was paid. `x402guard verify` shows what is wrong; put back a copy of the ledger that you trust.",
    )


def refuse_unless_kept(path: Path) -> None:
    """A ledger that was here and is gone is no new one: whoever deletes it would have a new budget."""
    if Path(f"{path}-lock").exists() and not path.exists():
        raise gone(path)


def gone(path: Path) -> LedgerUnavailable:
    """Return the error for a ledger that was here."""
    return LedgerUnavailable(
        f"the ledger {path} was here and is gone",
        advice=f"Nothing was paid. Put it back; where a new budget is meant, remove {path.name}-lock as well.",
    )


def refuse_unless_writable(path: Path) -> None:
    """Name the file that is read-only, before SQLite makes others beside it that are so, too."""
    for name in _BESIDE:
        each = Path(f"{path}{name}")
        if each.exists() and not os.access(each, os.W_OK):
            raise LedgerUnavailable(f"{each} is read-only for this user, and the ledger needs to write it")

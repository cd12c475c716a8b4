"""The files of ended sessions: their budgets, journals and holds, as compressed lines of JSON; and the ledger's rows of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from x402guard.errors import LedgerUnavailable
from x402guard.frozen import read_struct
from x402guard.kernel.rows import Entry, Hold, Node
from x402guard.ledger.verify import UNREAD, Checked
from x402guard.stores.rows import Record, UnreadableRecord, entry_record, hold_record, node_record, to_entry, to_hold

SCHEMA: Final = "x402guard.archive.v1"

Kind = Literal["node", "entry", "hold", "end"]

_LINE: Final = msgspec.json.Decoder(tuple[str, list[str | int | None] | str | int]).decode
"""What a line may hold: a deeper nesting than that would end the process."""

_MOST_SAID: Final = 10_000
_MOST_LINE: Final = 10_000_000
"""Bytes of one line, so that a file which is none of ours takes bounded memory."""


class Journal(Struct, frozen=True):
    """What a file keeps of one budget: its row, its entries in their order, and its holds."""

    node: Node
    entries: Sequence[Entry]
    holds: Sequence[Hold]


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder, so that a new one is there after a power cut. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_archive(path: Path, journals: Iterable[Journal]) -> int:
    """Write a new file, durably, readable by this user alone; return its size in bytes.

    Raises ``FileExistsError`` if there is one of that name, ``OSError`` if it cannot be written.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                for line in _lines(journals):
                    packed.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)
    return path.stat().st_size


def _lines(journals: Iterable[Journal]) -> Iterator[Sequence[Any]]:
    yield ("schema", SCHEMA)
    count = 0
    for journal in journals:
        records: list[tuple[Kind, Record]] = [("node", node_record(journal.node))]
        records += [("entry", entry_record(entry)) for entry in journal.entries]
        records += [("hold", hold_record(hold)) for hold in journal.holds]
        yield from records
        count += len(records)
    yield ("end", count)


def read_archive(path: Path, digest: str) -> Iterator[Entry | Hold]:
    """Yield the entries and the holds in a file, budget by budget, as they were written.

    Raises ``LedgerUnavailable`` for a file that is missing, or has another *digest* than when it was written.
    """
    try:
        if path.exists() and not path.is_file():
            raise lost(path, "it is no file")
        if digest_of(path) != digest:
            raise lost(path, "it is not the file that was written; bring that one back")
        yield from _read(path)
    except FileNotFoundError:
        raise lost(path, "it is missing; bring it back") from None
    except (OSError, EOFError, ValueError, TypeError, zlib.error, UnreadableRecord) as error:
        raise lost(path, f"it cannot be read: {error or type(error).__name__}") from error


def _read(path: Path) -> Iterator[Entry | Hold]:
    count, ended = -1, False
    with gzip.open(path, "rb") as packed:
        while line := packed.readline(_MOST_LINE):
            kind, values = _LINE(line)
            if count < 0 and (kind, values) != ("schema", SCHEMA):
                raise ValueError(f"it is no {SCHEMA}")
            if ended or (kind == "end" and values != count):
                raise ValueError("it is not whole")
            ended = kind == "end"
            count += 1
            if kind == "entry":
                yield to_entry(_listed(values))
            elif kind == "hold":
                yield to_hold(_listed(values))
    if not ended:
        raise ValueError("it is not whole")


def _listed(values: Sequence[Any] | int) -> Sequence[Any]:
    if not isinstance(values, list) or not values:
        raise ValueError("a line of it holds no row")
    return values


def lost(path: Path, why: str) -> LedgerUnavailable:
    """Return the error for a file of ended sessions that cannot be used."""
    return LedgerUnavailable(
        f"archive {path}: {why}",
        advice="Only what has ended is in it: agents pay without it. A report or `verify` that needs it is refused.",
    )


class Archived(Struct, frozen=True):
    """A part of a journal that is in a file.

    Attributes:
        node_id: whose journal it is.
        seq: the number of its last entry in the file.
        file: the path of the file.
        digest: SHA-256 of the whole file, in hex.
        said: what the journal said up to there, from its beginning.
        at_ms: when it was moved, in unix milliseconds; later for a later part of the same journal.
    """

    node_id: str
    seq: int
    file: str
    digest: str
    said: Checked
    at_ms: int


ARCHIVED: Final = f"SELECT {', '.join(f'archived.{name}' for name in Archived.__struct_fields__)} FROM archived"


def to_archived(record: Sequence[Any]) -> Archived:
    """Return what a row of the table ``archived`` says. Raises ``LedgerUnavailable`` for one that cannot be read."""
    node_id, seq, file, digest, said, at_ms = record
    try:
        found = read_struct(msgspec.json.decode(said[:_MOST_SAID]), Checked)
        return Archived(node_id, seq, file, digest, found, at_ms)
    except (ValueError, RecursionError) as error:  # of msgspec as well
        raise LedgerUnavailable(
            f"the ledger is inconsistent: what it says of the archived journal of {node_id!r} cannot be read"
        ) from error


def newest(rows: Iterable[Archived]) -> dict[str, Checked]:
    """Return what each journal says up to where it was moved to files."""
    found: dict[str, Checked] = {}
    for row in rows:
        if row.seq > found.get(row.node_id, UNREAD).seq:
            found[row.node_id] = row.said
    return found


def missing_files(rows: Iterable[Archived]) -> list[str]:
    """Return a sentence for each file that is not where the ledger says."""
    return [f"archive {file}: it is missing" for file in sorted({row.file for row in rows}) if not Path(file).exists()]


def read_archived(rows: Collection[Archived]) -> Iterator[Entry | Hold]:
    """Yield the entries and holds of these rows, the entries of each journal in their order.

    Raises ``LedgerUnavailable`` for a file that is missing or is not the one that was written.
    """
    files: dict[tuple[str, str], set[str]] = {}
    for row in sorted(rows, key=lambda row: row.at_ms):
        files.setdefault((row.file, row.digest), set()).add(row.node_id)
    for (file, digest), wanted in files.items():
        yield from (each for each in read_archive(Path(file), digest) if each.node_id in wanted)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises ``OSError``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

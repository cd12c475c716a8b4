"""Moves ended sessions out of a ledger into files. What a journal said stays: its sums, and the hash of its last entry.

A file is written, read again and compared with the ledger, before one transaction removes what is in it. If the command
is interrupted in between, the ledger is whole, and no row names the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from msgspec import Struct, to_builtins

from x402guard.errors import LedgerUnavailable
from x402guard.ledger.model import Entry, Hold, Node, NodeKind
from x402guard.ledger.queries import has_ended
from x402guard.ledger.token_budget import tokens_node
from x402guard.ledger.tree import path as path_of
from x402guard.ledger.verify import UNREAD, Checked, HoldRow, verify_journal
from x402guard.stores.archive_file import ARCHIVED, Journal, newest, read_archive, to_archived, write_archive
from x402guard.stores.audit import Query
from x402guard.stores.rows import mark_text, to_entry, to_hold, to_node
from x402guard.stores.sql_reads import ENTRIES, HOLDS, NODES, places

R = TypeVar("R")

_NODES_A_FILE: Final = 500
_IDS_AT_ONCE: Final = 500
_BUSY: Final = (
    "SELECT DISTINCT node_id FROM holds WHERE state = 'held' "
    "OR (intent IS NOT NULL AND state = 'captured' AND evidence <> 'chain')"
)
"""The budgets whose holds may still change: live ones, and payments that no final block proves."""


class Moved(Struct, frozen=True):
    """What one command has moved: sessions and their budgets, entries, holds; and the files, with their bytes."""

    sessions: int = 0
    entries: int = 0
    holds: int = 0
    files: tuple[str, ...] = ()
    size: int = 0


@runtime_checkable
class Archivable(Protocol):
    """A store whose ended sessions can be moved to files."""

    row_lock: str
    """What a query ends with that keeps its rows as they are until the transaction ends."""

    def one_moment(self) -> AbstractContextManager[Query]:
        """Read with queries what one commit has left, while others go on writing."""

    def one_write(self, work: Callable[[Query], R]) -> R:
        """Run queries in one transaction that writes. Raises ``LedgerUnavailable``; then nothing is written."""


def archive(store: Archivable, before_ms: int, folder: Path, *, gone: Collection[str]) -> Moved:
    """Move the sessions that ended before a time (unix milliseconds) to files in *folder*, and return what was moved.

    A session goes with all below it, and only if nothing of it can change any more: no hold is live, and a final block
    proves what its payments took. *gone* are instances known to have ended. Rows of processes that ended before that time
    go as well. Raises ``LedgerUnavailable`` if the ledger
    or a file cannot be written, or if the ledger is inconsistent.
    """
    with store.one_moment() as query:
        nodes = {node.id: node for node in map(to_node, query(NODES, ()))}
        known = newest(map(to_archived, query(ARCHIVED, ())))
        busy = {row[0] for row in query(_BUSY, ())}
    trees = [tree for tree in _ended(nodes, before_ms, gone, busy) if any(_is_new(node, known) for node in tree)]
    moved = Moved()
    for together in _in_files(trees):
        moved = _add(moved, _move(store, together, known, folder))
    store.one_write(lambda query: _forget_instances(query, before_ms))
    return moved


def _forget_instances(query: Query, before_ms: int) -> None:
    """Remove the rows of processes that ended before a time, and that no budget and no live hold names."""
    named = {row[0] for row in query("SELECT DISTINCT owner FROM holds WHERE state = 'held'", ())}
    for (openers,) in query("SELECT openers FROM nodes WHERE openers <> '[]'", ()):
        named |= {opener.rpartition("#")[0] for opener in json.loads(openers)}
    for key, value in list(query("SELECT key, value FROM marks WHERE kind = 'instance'", ())):
        row = json.loads(value)
        silent = "beat_s" in row  # it would have written its row since
        if (row["ended"] or silent) and row["since_ms"] < before_ms and key not in named:
            _run(query, "DELETE FROM marks WHERE kind = 'instance' AND key = ? AND value = ?", (key, value))


def _is_new(node: Node, known: Mapping[str, Checked]) -> bool:
    return node.seq > known.get(node.id, UNREAD).seq


def _ended(
    nodes: Mapping[str, Node], before_ms: int, gone: Collection[str], busy: Collection[str]
) -> Iterator[list[Node]]:
    """Yield each session that is over, with all budgets below it."""

    def is_over(node: Node) -> bool:
        ended = node.kind is NodeKind.TOKENS or has_ended(node, gone)
        return ended and node.last_ms < before_ms and node.id not in busy

    trees: dict[str, list[Node]] = {}
    for node in nodes.values():
        owner = node.id.removesuffix(tokens_node("")) if node.kind is NodeKind.TOKENS else node.id
        sessions = [each.id for each in path_of(nodes, owner) if each.kind is NodeKind.SESSION]
        if sessions:
            trees.setdefault(sessions[-1], []).append(node)
    yield from (tree for tree in trees.values() if all(map(is_over, tree)))


def _in_files(trees: Iterable[list[Node]]) -> Iterator[list[list[Node]]]:
    """Yield the trees that go into one file."""
    together: list[list[Node]] = []
    for tree in trees:
        if together and sum(map(len, together)) + len(tree) > _NODES_A_FILE:
            yield together
            together = []
        together.append(tree)
    if together:
        yield together


class _Read(Struct, frozen=True):
    """What was read of a new file: its entries and holds, and what its journals say then. ``new``: those that it goes on with."""

    entries: list[Entry]
    holds: list[Hold]
    said: dict[str, Checked]
    new: set[str]


def _read_again(path: Path, nodes: Sequence[Node], known: Mapping[str, Checked]) -> _Read:
    """Read a new file, and compare it with the rows of its budgets. Raises ``LedgerUnavailable``."""
    entries, holds = list[Entry](), list[Hold]()
    for each in read_archive(path):
        if isinstance(each, Entry):
            entries.append(each)
        else:
            holds.append(each)
    rows = [HoldRow(hold.id, hold.node_id, hold.state, hold.amount, hold.captured) for hold in holds]
    before = {node.id: known.get(node.id, UNREAD) for node in nodes}
    problems, said = verify_journal(nodes, entries, rows, before)
    problems += [f"budget {n.id!r}: its journal is shorter than its row says" for n in nodes if said[n.id].seq != n.seq]
    if problems:
        raise LedgerUnavailable(f"the ledger is inconsistent, so nothing is archived: {problems[0]}")
    return _Read(entries, holds, said, {entry.node_id for entry in entries})


def _move(store: Archivable, trees: Sequence[list[Node]], known: Mapping[str, Checked], folder: Path) -> Moved:
    """Write one file and read it again; then remove what is in it from the ledger, but for what has changed since."""
    nodes = [node for tree in trees for node in tree]
    path, size = _write(store, nodes, known, folder)
    gone = set[str]()
    try:
        read = _read_again(path, nodes, known)
        now_ms = round(datetime.now(UTC).timestamp() * 1000)
        gone = store.one_write(lambda query: _remove(query, store.row_lock, trees, read, (str(path), now_ms)))
    except LedgerUnavailable as error:
        error.add_note(f"{path} was written; delete it if the ledger does not name it (x402guard verify)")
        raise
    if not gone:
        path.unlink()
        return Moved()
    return Moved(
        sum(node.kind is NodeKind.SESSION for node in nodes if node.id in gone),
        sum(entry.node_id in gone for entry in read.entries),
        sum(hold.node_id in gone for hold in read.holds),
        (str(path),),
        size,
    )


def _write(store: Archivable, nodes: Sequence[Node], known: Mapping[str, Checked], folder: Path) -> tuple[Path, int]:
    with store.one_moment() as query:  # nothing is written in it: whoever closes an SQLite ledger waits for its end
        journals = [_journal(query, node, known.get(node.id, UNREAD).seq) for node in nodes]
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    for number in count(1):
        path = folder / f"x402guard-{stamp}-{number}.jsonl.gz"
        try:
            return path, write_archive(path, journals)
        except FileExistsError:
            continue
        except OSError as error:
            raise LedgerUnavailable(f"cannot write into the folder {folder}: {error.strerror}") from error
    raise AssertionError("count() does not end")


def _journal(query: Query, node: Node, after: int) -> Journal:
    sql = f"{ENTRIES} WHERE node_id = ? AND seq > ? AND seq <= ? ORDER BY seq"
    entries = list(map(to_entry, query(sql, (node.id, after, node.seq))))
    ids = sorted({entry.hold_id for entry in entries if entry.hold_id is not None})
    holds = [
        to_hold(row) for some in _batched(ids) for row in query(f"{HOLDS} WHERE id IN ({places(len(some))})", some)
    ]
    return Journal(node, entries, [hold for hold in holds if hold.node_id == node.id])


def _remove(query: Query, row_lock: str, trees: Sequence[list[Node]], read: _Read, file: tuple[str, int]) -> set[str]:
    """Remove the trees that are as the file has them; return the budgets that were removed."""
    ids, said = sorted(node.id for tree in trees for node in tree), read.said
    found = query(f"SELECT id, seq, head FROM nodes WHERE id IN ({places(len(ids))}) ORDER BY id{row_lock}", ids)
    now = {node_id: (seq, head) for node_id, seq, head in found}
    same = [tree for tree in trees if all(now[node.id] == (said[node.id].seq, said[node.id].head) for node in tree)]
    gone = {node.id for tree in same for node in tree}
    for node_id in sorted(gone & read.new):
        journal = said[node_id]
        values = (node_id, journal.seq, file[0], mark_text(to_builtins(journal)), file[1])
        _run(query, "INSERT INTO archived (node_id, seq, file, said, at_ms) VALUES (?, ?, ?, ?, ?)", values)
        _run(query, "DELETE FROM entries WHERE node_id = ? AND seq <= ?", (node_id, journal.seq))
        _run(query, "DELETE FROM marks WHERE kind = 'checked' AND key = ?", (node_id,))
    for some in _batched(sorted(hold.id for hold in read.holds if hold.node_id in gone)):
        _run(query, f"DELETE FROM holds WHERE id IN ({places(len(some))})", some)
    return gone


def _batched(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield ids in parts that one query takes."""
    for start in range(0, len(ids), _IDS_AT_ONCE):
        yield ids[start : start + _IDS_AT_ONCE]


def _run(query: Query, sql: str, values: Sequence[Any]) -> None:
    for _ in query(sql, values):
        pass


def _add(one: Moved, other: Moved) -> Moved:
    return Moved(
        one.sessions + other.sessions,
        one.entries + other.entries,
        one.holds + other.holds,
        one.files + other.files,
        one.size + other.size,
    )

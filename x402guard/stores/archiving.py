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
from x402guard.kernel.leaving import Leaving, leave
from x402guard.kernel.rows import Entry, Hold, Node, NodeKind
from x402guard.ledger.queries import has_ended
from x402guard.ledger.token_budget import tokens_node
from x402guard.ledger.tree import path as path_of
from x402guard.ledger.verify import UNREAD, Checked, HoldRow, verify_journal
from x402guard.stores.archive_file import (
    ARCHIVED,
    Archived,
    Journal,
    digest_of,
    newest,
    read_archive,
    to_archived,
    write_archive,
)
from x402guard.stores.audit import Query
from x402guard.stores.rows import mark_text, to_entry, to_hold, to_node
from x402guard.stores.sql_reads import ENTRIES, HOLDS, NODES, places

R = TypeVar("R")

_NODES_A_FILE: Final = 500
_ENTRIES_A_FILE: Final = 20_000
_IDS_AT_ONCE: Final = 500
_BUSY: Final = (
    "(state = 'held' OR (intent IS NOT NULL AND state = 'captured' AND (evidence <> 'chain' "
    "OR (captured > 0 AND (proof IS NULL OR delivery IN ('open', 'lost'))))) OR flying_since_ms >= ? OR closed_ms >= ?)"
)
"""The holds that keep their budget: live, with a payment that no final block shows, of an open purchase, or too young."""


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
    shows what its payments took. *gone* are instances known to have ended. Rows of processes that ended before that time
    go as well. Raises ``LedgerUnavailable`` if the ledger or a file cannot be written, or if the ledger is inconsistent.
    """
    _check_folder(folder)
    with store.one_moment() as query:
        nodes = {node.id: node for node in map(to_node, query(NODES, ()))}
        known = newest(map(to_archived, query(ARCHIVED, ())))
        busy = {row[0] for row in query(f"SELECT DISTINCT node_id FROM holds WHERE {_BUSY}", (before_ms, before_ms))}
    trees = [tree for tree in _ended(nodes, before_ms, gone, busy) if any(_is_new(node, known) for node in tree)]
    moved = Moved()
    for together in _in_files(trees, known):
        moved = _add(moved, _move(store, together, known, (folder, before_ms)))
    store.one_write(lambda query: _forget_instances(query, before_ms))
    return moved


def _check_folder(folder: Path) -> None:
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise LedgerUnavailable(
            f"the folder {str(folder)!r} has a name that no ledger can keep; choose another"
        ) from None


def unnamed_files(store: Archivable, folder: Path) -> list[str]:
    """Return the archives in *folder* that the ledger does not name: of another ledger, or of a command that was killed."""
    with store.one_moment() as query:
        named = {row[0] for row in query("SELECT DISTINCT file FROM archived", ())}
    return [str(path) for path in sorted(folder.glob("x402guard-*.jsonl.gz")) if str(path) not in named]


def _forget_instances(query: Query, before_ms: int) -> None:
    """Remove the rows of processes that ended before a time, and that no budget and no live hold names."""
    named = {row[0] for row in query("SELECT DISTINCT owner FROM holds WHERE state = 'held'", ())}
    for (openers,) in query("SELECT openers FROM nodes WHERE openers <> '[]'", ()):
        named |= {opener.rpartition("#")[0] for opener in json.loads(openers)}
    for key, value in list(query("SELECT key, value FROM marks WHERE kind = 'instance'", ())):
        row = json.loads(value)
        shown_ms = row.get("seen_ms", row["since_ms"] if row["ended"] else before_ms)
        if shown_ms < before_ms and key not in named:
            _run(query, "DELETE FROM marks WHERE kind = 'instance' AND key = ? AND value = ?", (key, value))


def _is_new(node: Node, known: Mapping[str, Checked]) -> bool:
    return node.seq > known.get(node.id, UNREAD).seq


def _ended(
    nodes: Mapping[str, Node], before_ms: int, gone: Collection[str], busy: Collection[str]
) -> Iterator[list[Node]]:
    """Yield each session that is over, with all budgets below it."""

    def is_over(node: Node) -> bool:
        ended = node.kind is NodeKind.TOKENS or has_ended(node, gone, before_ms)
        return ended and node.last_ms < before_ms and node.id not in busy

    trees: dict[str, list[Node]] = {}
    for node in nodes.values():
        owner = node.id.removesuffix(tokens_node("")) if node.kind is NodeKind.TOKENS else node.id
        sessions = [each.id for each in path_of(nodes, owner) if each.kind is NodeKind.SESSION]
        if sessions:
            trees.setdefault(sessions[-1], []).append(node)
    yield from (tree for tree in trees.values() if all(map(is_over, tree)))


def _in_files(trees: Iterable[list[Node]], known: Mapping[str, Checked]) -> Iterator[list[list[Node]]]:
    """Yield the trees that go into one file."""
    together, budgets, entries = list[list[Node]](), 0, 0
    for tree in trees:
        new = sum(node.seq - known.get(node.id, UNREAD).seq for node in tree)
        if together and (budgets + len(tree) > _NODES_A_FILE or entries + new > _ENTRIES_A_FILE):
            yield together
            together, budgets, entries = [], 0, 0
        together.append(tree)
        budgets, entries = budgets + len(tree), entries + new
    if together:
        yield together


class _Read(Struct, frozen=True):
    """What was read of a new file: its entries and holds, and what its journals say then."""

    path: Path
    digest: str
    entries: list[Entry]
    holds: list[Hold]
    said: dict[str, Checked]


def _read_again(path: Path, nodes: Sequence[Node], known: Mapping[str, Checked]) -> _Read:
    """Read a new file, and compare it with the rows of its budgets. Raises ``LedgerUnavailable``."""
    entries, holds, digest = list[Entry](), list[Hold](), digest_of(path)
    for each in read_archive(path, digest):
        if isinstance(each, Entry):
            entries.append(each)
        else:
            holds.append(each)
    rows = [HoldRow.of(hold) for hold in holds]
    before = {node.id: known.get(node.id, UNREAD) for node in nodes}
    problems, said = verify_journal(nodes, entries, rows, before)
    problems += [f"budget {n.id!r}: its journal is shorter than its row says" for n in nodes if said[n.id].seq != n.seq]
    if problems:
        raise LedgerUnavailable(f"the ledger is inconsistent, so nothing is archived: {problems[0]}")
    return _Read(path, digest, entries, holds, said)


def _move(store: Archivable, trees: Sequence[list[Node]], known: Mapping[str, Checked], to: tuple[Path, int]) -> Moved:
    """Write one file and read it again; then remove what is in it from the ledger, but for what has changed since."""
    folder, before_ms = to
    journals = _journals(store, trees, known)
    if not journals:
        return Moved()
    path = _write(folder, journals)
    written = {journal.node.id for journal in journals}
    try:
        nodes = [node for tree in trees for node in tree if node.id in written]
        read = _read_again(path, nodes, known)
        mine = [tree for tree in trees if tree[0].id in written]
        left = leave(
            store.one_write,
            lambda query: _choose(query, store.row_lock, mine, read, before_ms),
            lambda query, what: _remove(query, read, what),
        )
    except LedgerUnavailable as error:
        error.add_note(f"{path} was written; `x402guard ledger archive` tells whether the ledger names it")
        raise
    gone = {node.id for node in left.nodes}
    if not gone:
        path.unlink()
        return Moved()
    return Moved(
        sum(node.kind is NodeKind.SESSION for node in nodes if node.id in gone),
        sum(entry.node_id in gone for entry in read.entries),
        sum(hold.node_id in gone for hold in read.holds),
        (str(path),),
        path.stat().st_size,
    )


def _journals(store: Archivable, trees: Sequence[list[Node]], known: Mapping[str, Checked]) -> list[Journal]:
    """Return what goes into a file, as of one moment: no tree that another archive has taken meanwhile."""
    with store.one_moment() as query:  # no file is written in it: the end of an SQLite ledger waits for readers
        now = newest(map(to_archived, query(ARCHIVED, ())))
        mine = [tree for tree in trees if all(now.get(node.id) == known.get(node.id) for node in tree)]
        return [_journal(query, node, known.get(node.id, UNREAD).seq) for tree in mine for node in tree]


def _write(folder: Path, journals: Sequence[Journal]) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    for number in count(1):
        path = folder / f"x402guard-{stamp}-{number}.jsonl.gz"
        try:
            write_archive(path, journals)
        except FileExistsError:
            continue
        except OSError as error:
            raise LedgerUnavailable(f"cannot write into the folder {folder}: {error.strerror}") from error
        return path
    raise AssertionError("count() does not end")


def _journal(query: Query, node: Node, after: int) -> Journal:
    sql = f"{ENTRIES} WHERE node_id = ? AND seq > ? AND seq <= ? ORDER BY seq"
    entries = list(map(to_entry, query(sql, (node.id, after, node.seq))))
    ids = sorted({entry.hold_id for entry in entries if entry.hold_id is not None})
    holds = [
        to_hold(row) for some in _batched(ids) for row in query(f"{HOLDS} WHERE id IN ({places(len(some))})", some)
    ]
    return Journal(node, entries, [hold for hold in holds if hold.node_id == node.id])


def _choose(query: Query, row_lock: str, trees: Sequence[list[Node]], read: _Read, before_ms: int) -> Leaving:
    """Return what leaves: the trees that are as the file has them."""
    ids, filed = sorted(node.id for tree in trees for node in tree), {hold.id: hold for hold in read.holds}
    now, holds = dict[str, Node](), list[Hold]()
    busy, away = set[str](), dict[str, int]()
    for some in _batched(ids):
        at = f"IN ({places(len(some))})"
        now |= {node.id: node for node in map(to_node, query(f"{NODES} WHERE id {at} ORDER BY id{row_lock}", some))}
        sql = f"SELECT node_id, max(seq) FROM archived WHERE node_id {at} GROUP BY node_id"
        for node_id, seq in query(sql, some):
            away[node_id] = seq
    for some in _batched(sorted(filed)):
        holds += map(to_hold, query(f"{HOLDS} WHERE id IN ({places(len(some))})", some))
        sql = f"SELECT node_id FROM holds WHERE id IN ({places(len(some))}) AND {_BUSY}"
        busy |= {row[0] for row in query(sql, (*some, before_ms, before_ms))}
    busy |= {hold.node_id for hold in holds if hold != filed[hold.id]}
    new = {entry.node_id for entry in read.entries}

    def stays(node: Node) -> bool:
        said = read.said[node.id]
        is_away = node.id in new and away.get(node.id, 0) >= said.seq
        return node.id in busy or is_away or (now[node.id].seq, now[node.id].head) != (said.seq, said.head)

    leave = {node.id: now[node.id] for tree in trees if not any(map(stays, tree)) for node in tree}
    return Leaving(tuple(leave.values()), tuple(hold for hold in holds if hold.node_id in leave), read.said, filed)


def _remove(query: Query, read: _Read, leaving: Leaving) -> None:
    """Remove what leaves, and name the file that has it."""
    new, said = {entry.node_id for entry in read.entries}, read.said
    [[newest_ms]] = query("SELECT coalesce(max(at_ms), 0) FROM archived", ())
    at_ms = max(round(datetime.now(UTC).timestamp() * 1000), newest_ms + 1)
    sql = f"INSERT INTO archived ({', '.join(Archived.__struct_fields__)}) VALUES (?, ?, ?, ?, ?, ?)"
    for node_id in sorted({node.id for node in leaving.nodes} & new):
        text = mark_text(to_builtins(said[node_id]))
        _run(query, sql, (node_id, said[node_id].seq, str(read.path), read.digest, text, at_ms))
        _run(query, "DELETE FROM entries WHERE node_id = ? AND seq <= ?", (node_id, said[node_id].seq))
        _run(query, "DELETE FROM marks WHERE kind = 'checked' AND key = ?", (node_id,))
    for some in _batched(sorted(hold.id for hold in leaving.holds)):
        _run(query, f"DELETE FROM holds WHERE id IN ({places(len(some))})", some)


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

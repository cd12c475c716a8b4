"""Verifies a ledger in SQL tables at one moment: as a whole, or what has come since it was last checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Final

from msgspec import ValidationError

from x402guard.errors import LedgerUnavailable
from x402guard.frozen import read_struct
from x402guard.ledger.model import Entry, Node
from x402guard.ledger.verify import MOST_PROBLEMS, UNREAD, Balances, Checked, HoldRow, verify_balances, verify_journal
from x402guard.ledger.view import MarkKey
from x402guard.stores.archive_file import (
    ARCHIVED,
    Archived,
    missing_files,
    newest,
    read_archived,
    to_archived,
)
from x402guard.stores.rows import to_entry, to_mark, to_node
from x402guard.stores.sql_reads import ENTRIES, NODES

Query = Callable[[str, Sequence[Any]], Iterable[Sequence[Any]]]
"""Runs one query with its values and returns its rows, all of one moment of the ledger."""

MOST_AT_OPENING: Final = 10_000
"""Opening a ledger reads at most this many entries that were not checked before; of the rest only the sums."""

_HOLDS: Final = "SELECT id, node_id, state, amount, captured FROM holds"
_SUM: Final = "sum(captured), sum(held), sum(granted_in), sum(granted_out), max(seq)"
_EVERY_SUM: Final = f"SELECT node_id, {_SUM} FROM entries GROUP BY node_id"
_HELD: Final = "SELECT node_id, sum(amount) FROM holds WHERE state = 'held' GROUP BY node_id"
_IDS_AT_ONCE: Final = 500


def audit(query: Query, *, keeps_idle: bool = False, archives: bool = True) -> Sequence[str]:
    """Return the inconsistencies of the whole ledger, one sentence each. *keeps_idle*: see ``verify_balances``.

    What was moved to files is read there; without *archives* only what the ledger keeps of it: sums and last hashes.
    """
    nodes = [to_node(row) for row in query(NODES, ())]
    away = [to_archived(row) for row in query(ARCHIVED, ())]
    known = newest(away)
    problems = missing_files(away) if archives else []
    if not problems:
        sums = _sums(query, _EVERY_SUM)
        for node_id, said in known.items():
            sums[node_id] = _plus(said, sums.get(node_id, Balances(seq=said.seq)))
        problems = verify_balances(nodes, sums, _held(query), keeps_idle=keeps_idle)
    if problems:
        return problems
    rows = [HoldRow(*row) for row in query(_HOLDS, ())]
    here = map(to_entry, query(f"{ENTRIES} ORDER BY node_id, seq", ()))
    if not archives:
        return verify_journal(nodes, here, rows, known, keeps_idle=keeps_idle)[0]
    differing: list[str] = []
    try:
        entries = chain(_entries_of(away, rows, differing), here)
        return [*verify_journal(nodes, entries, rows, keeps_idle=keeps_idle)[0], *differing][:MOST_PROBLEMS]
    except LedgerUnavailable as error:
        return [str(error)]


def _entries_of(away: Sequence[Archived], rows: list[HoldRow], differing: list[str]) -> Iterator[Entry]:
    """Yield the entries that were moved to files.

    The holds there are added to *rows*, and journals of which the ledger says something else to *differing*. Both are
    read after the entries.
    """
    said = {(row.node_id, row.seq): row.said for row in away}
    journals: dict[str, Checked] = {}
    for each in read_archived(away):
        if isinstance(each, Entry):
            journal = journals[each.node_id] = journals.get(each.node_id, UNREAD).then(each)
            if said.pop((each.node_id, each.seq), journal) != journal:
                differing.append(f"budget {each.node_id!r}: the ledger says something else of its archived journal")
            yield each
        else:
            rows.append(HoldRow(each.id, each.node_id, each.state, each.amount, each.captured))
    differing += [f"budget {node_id!r}: entry {seq} is in no archive" for node_id, seq in said]


def audit_since(query: Query, *, most: int = MOST_AT_OPENING) -> tuple[Sequence[str], Mapping[str, Checked], int]:
    """Return the inconsistencies since the ledger was last checked, what changed journals say now, and the entries read.

    Reads at most *most* entries, and of more the sums. The marks are believed, as all is that no journal covers: they
    save a read, and ``audit`` does without them.
    """
    nodes = [to_node(row) for row in query(NODES, ())]
    marks = query("SELECT kind, key, value FROM marks WHERE kind = ?", (checked_mark("")[0],))
    known = newest(map(to_archived, query(ARCHIVED, ())))
    for node_id, said in _readable(map(to_mark, marks)):
        if said.seq > known.get(node_id, UNREAD).seq:
            known[node_id] = said
    grown = [node for node in nodes if node.seq > known.get(node.id, UNREAD).seq]
    problems = verify_balances(nodes, _all_sums(query, grown, known), _held(query))
    if problems:
        return problems, {}, 0
    read = list(islice(_later(query, grown, known), most))
    rows: list[HoldRow] | None = None
    if len(read) < most and not known:
        rows = [HoldRow(*row) for row in query(_HOLDS, ())]
    elif len(read) < most:
        began = {entry.hold_id or "" for entry in read if entry.event == "authorize"}
        began |= {hold_id for said in known.values() for hold_id in said.live}
        live = [HoldRow(*row) for row in query(f"{_HOLDS} WHERE state = 'held'", ())]
        rows = [*live, *_rows(query, sorted(began - {row.id for row in live}))]
    problems, journals = verify_journal(nodes, read, rows, known)
    return problems, {node.id: journals[node.id] for node in grown if node.id in journals}, len(read)


def _held(query: Query) -> Mapping[str, int]:
    return {row[0]: row[1] for row in query(_HELD, ())}


def checked_mark(node_id: str) -> MarkKey:
    """Return the key of the mark that says up to where a journal was checked."""
    return "checked", node_id


def _readable(marks: Iterable[tuple[MarkKey, Mapping[str, Any]]]) -> Iterator[tuple[str, Checked]]:
    """Yield what is known of each journal. A mark that cannot be read is none: its journal is read from the beginning."""
    for (_, node_id), value in marks:
        with suppress(ValidationError):
            yield node_id, read_struct(value, Checked)


def _sums(query: Query, sql: str, values: Sequence[Any] = ()) -> dict[str, Balances]:
    return {node_id: Balances(*rest) for node_id, *rest in query(sql, values) if node_id is not None}


def _all_sums(query: Query, grown: Sequence[Node], known: Mapping[str, Checked]) -> dict[str, Balances]:
    """Return the sums of every journal: what is known of it, and its entries since then."""
    if not known:
        return _sums(query, _EVERY_SUM)
    sums = {}
    for node_id, said in known.items():
        sums[node_id] = Balances(said.captured, said.held, said.granted_in, said.granted_out, said.seq)
    for node in grown:
        before = sums.get(node.id, Balances())
        since = _sums(
            query, f"SELECT node_id, {_SUM} FROM entries WHERE node_id = ? AND seq > ?", (node.id, before.seq)
        ).get(node.id, Balances(seq=before.seq))
        sums[node.id] = _plus(before, since)
    return sums


def _plus(before: Balances | Checked, since: Balances) -> Balances:
    return Balances(
        before.captured + since.captured,
        before.held + since.held,
        before.granted_in + since.granted_in,
        before.granted_out + since.granted_out,
        since.seq,
    )


def _later(query: Query, grown: Sequence[Node], known: Mapping[str, Checked]) -> Iterator[Entry]:
    for node in grown:
        since = known.get(node.id, UNREAD).seq
        sql = f"{ENTRIES} WHERE node_id = ? AND seq > ? ORDER BY seq"
        yield from map(to_entry, query(sql, (node.id, since)))


def _rows(query: Query, hold_ids: Sequence[str]) -> Iterator[HoldRow]:
    for start in range(0, len(hold_ids), _IDS_AT_ONCE):
        some = hold_ids[start : start + _IDS_AT_ONCE]
        places = ", ".join("?" for _ in some)
        yield from (HoldRow(*row) for row in query(f"{_HOLDS} WHERE id IN ({places})", some))

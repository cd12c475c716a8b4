"""Verifies a ledger in SQL tables at one moment: as a whole. ``stores.checking`` does it in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from x402guard.errors import LedgerUnavailable
from x402guard.kernel.rows import Entry
from x402guard.ledger.verify import (
    MOST_PROBLEMS,
    UNREAD,
    Balances,
    Checked,
    HoldRow,
    verify_balances,
    verify_journal,
)
from x402guard.stores.archive_file import (
    ARCHIVED,
    Archived,
    missing_files,
    newest,
    read_archived,
    to_archived,
)
from x402guard.stores.rows import to_entry, to_node
from x402guard.stores.sql_reads import ENTRIES, NODES

Query = Callable[[str, Sequence[Any]], Iterable[Sequence[Any]]]
"""Runs one query with its values and returns its rows, all of one moment of the ledger."""

HOLD_ROWS: Final = "SELECT id, node_id, state, amount, captured, kind, deadline_unix, delivery FROM holds"
SUM: Final = "sum(captured), sum(held), sum(granted_in), sum(granted_out), max(seq)"
EVERY_SUM: Final = f"SELECT node_id, {SUM} FROM entries GROUP BY node_id"
_HELD: Final = "SELECT node_id, sum(amount) FROM holds WHERE state = 'held' GROUP BY node_id"


def audit(query: Query, *, keeps_idle: bool = False, archives: bool = True) -> Sequence[str]:
    """Return the inconsistencies of the whole ledger, one sentence each. *keeps_idle*: see ``verify_balances``.

    What was moved to files is read there; without *archives* only what the ledger keeps of it: sums and last hashes.
    """
    nodes = [to_node(row) for row in query(NODES, ())]
    away = [to_archived(row) for row in query(ARCHIVED, ())]
    known = newest(away)
    problems = missing_files(away) if archives else []
    if not problems:
        sums = sums_of(query, EVERY_SUM)
        for node_id, said in known.items():
            sums[node_id] = plus(said, sums.get(node_id, Balances(seq=said.seq)))
        problems = verify_balances(nodes, sums, held_by_node(query), keeps_idle=keeps_idle)
    if problems:
        return problems
    rows = [HoldRow(*row) for row in query(HOLD_ROWS, ())]
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
            rows.append(HoldRow.of(each))
    differing += [f"budget {node_id!r}: entry {seq} is in no archive" for node_id, seq in said]


def held_by_node(query: Query) -> Mapping[str, int]:
    """Return what is held by the rows of holds, in nano-dollars or tokens, by node."""
    return {row[0]: row[1] for row in query(_HELD, ())}


def sums_of(query: Query, sql: str, values: Sequence[Any] = ()) -> dict[str, Balances]:
    """Return the sums of journals by node, as a query with ``SUM`` finds them."""
    return {node_id: Balances(*rest) for node_id, *rest in query(sql, values) if node_id is not None}


def plus(before: Balances | Checked, since: Balances) -> Balances:
    """Return the sums of a journal up to some entry with those of the entries since."""
    return Balances(
        before.captured + since.captured,
        before.held + since.held,
        before.granted_in + since.granted_in,
        before.granted_out + since.granted_out,
        since.seq,
    )

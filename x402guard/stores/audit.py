"""Verifies a ledger in SQL tables at one moment: as a whole, or what has come since it was last checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta, Struct, ValidationError
from msgspec.json import Encoder
from msgspec.structs import replace

from x402guard.errors import LedgerUnavailable
from x402guard.frozen import read_struct, readable
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Entry, Node, NodeState
from x402guard.ledger.token_budget import tokens_node
from x402guard.ledger.tree import path
from x402guard.ledger.verify import (
    MOST_PROBLEMS,
    UNREAD,
    Balances,
    Checked,
    HoldRow,
    verify_balances,
    verify_journal,
    verify_opened,
)
from x402guard.stores.archive_file import (
    ARCHIVED,
    Archived,
    missing_files,
    newest,
    read_archived,
    to_archived,
)
from x402guard.stores.rows import UnreadableRecord, to_entry, to_mark, to_node
from x402guard.stores.sql_reads import ENTRIES, NODES

Query = Callable[[str, Sequence[Any]], Iterable[Sequence[Any]]]
"""Runs one query with its values and returns its rows, all of one moment of the ledger."""

MOST_AT_OPENING: Final = 10_000
"""Opening a ledger reads at most this many entries that were not checked before; of the rest only the sums."""

_HOLDS: Final = "SELECT id, node_id, state, amount, captured, kind, deadline_unix, delivery FROM holds"
_SUM: Final = "sum(captured), sum(held), sum(granted_in), sum(granted_out), max(seq)"
_EVERY_SUM: Final = f"SELECT node_id, {_SUM} FROM entries GROUP BY node_id"
_HELD: Final = "SELECT node_id, sum(amount) FROM holds WHERE state = 'held' GROUP BY node_id"
WORTH_NOTING: Final = 1_000
"""Entries; fewer are read again sooner than a commit is made."""
_IDS_AT_ONCE: Final = 500
_LISTED: Final = "(SELECT value FROM json_each(?))"
_SEPARATOR: Final = "\x1f"
_SAID: Final = (  # separated by what no id has; with the length, because %s ends at a NUL
    "SELECT group_concat(said, char(10)), max(at) FROM (SELECT rowid AS at, "
    f"printf('{_SEPARATOR.join(['%s'] * 6 + ['%d'] * 8)}', id, parent_id, kind, state, head, max_nanos, seq, "
    "captured, held, granted_in, granted_out, live, past, "
    "length(CAST(id || ifnull(parent_id, char(0)) || kind || state || head AS BLOB))) AS said FROM nodes "
    f"WHERE rowid > ? AND rowid <= ? AND id NOT IN {_LISTED} ORDER BY rowid LIMIT 10000)"
)
_COUNTS: Final = "SELECT (SELECT count(*) FROM nodes WHERE rowid > ?), (SELECT count(*) FROM nodes)"
_STRAYS: Final = (
    "SELECT 1 FROM marks WHERE kind = 'checked' AND NOT EXISTS (SELECT 1 FROM nodes WHERE id = key) UNION ALL "
    "SELECT 1 FROM archived WHERE NOT EXISTS (SELECT 1 FROM nodes WHERE id = node_id) LIMIT 1"
)
_ENCODED: Final = Encoder().encode
_FEWEST_QUIET: Final = 500
_MOST_NEWER: Final = 2_000
"""With more budgets that are newer than what was noted, all are read once more, and noted."""

QUIET_MARK: Final[MarkKey] = ("quiet", "")
"""The key of the mark that keeps the quiet budgets."""


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
            rows.append(HoldRow.of(each))
    differing += [f"budget {node_id!r}: entry {seq} is in no archive" for node_id, seq in said]


class Since(NamedTuple):
    """What has come since a ledger was last checked.

    Attributes:
        problems: the inconsistencies, one sentence each.
        journals: what each journal that has grown says now.
        read: how many entries were read.
        quiet: the budgets that need not be read one by one again, if that is to be noted anew.
    """

    problems: Sequence[str]
    journals: Mapping[str, Checked]
    read: int
    quiet: Quiet | None = None

    @property
    def is_worth_noting(self) -> bool:
        """True if reading it again at the next opening would take longer than a commit."""
        return self.read >= WORTH_NOTING or self.quiet is not None


def audit_since(query: Query, *, most: int = MOST_AT_OPENING) -> Since:
    """Return what has come since the ledger was last checked, and the inconsistencies in it.

    Reads at most *most* entries, and of more the sums. The marks are believed, as all is that no journal covers: they
    save a read, and ``audit`` does without them.
    """
    held = _held(query)
    quiet = _noted(query)
    nodes = None if quiet is None else _beside(query, quiet, held)
    if nodes is not None:
        found = _since(query, nodes, held, quiet=quiet, most=most)
        if not found.problems:
            return found
    return _since(query, [to_node(row) for row in query(NODES, ())], held, quiet=None, most=most)


def _since(query: Query, nodes: Sequence[Node], held: Mapping[str, int], *, quiet: Quiet | None, most: int) -> Since:
    """Do that for all nodes, or for all but the *quiet* ones."""
    known = _known(query, None if quiet is None else [node.id for node in nodes])
    grown = [node for node in nodes if node.seq > known.get(node.id, UNREAD).seq]
    is_first = quiet is None and not known
    sums = _sums(query, _EVERY_SUM) if is_first else _all_sums(query, grown, known)
    problems = verify_balances(nodes, sums, held, drawn=None if quiet is None else quiet.others)
    problems = problems or list(_opened_otherwise(query, nodes))
    if problems:
        return Since(problems, {}, 0)
    read = list(islice(_later(query, grown, known), most))
    rows: list[HoldRow] | None = None
    if len(read) < most and is_first:
        rows = [HoldRow(*row) for row in query(_HOLDS, ())]
    elif len(read) < most:
        began = {entry.hold_id or "" for entry in read if entry.event == "authorize"}
        began |= {hold_id for said in known.values() for hold_id in said.live}
        live = [HoldRow(*row) for row in query(f"{_HOLDS} WHERE state = 'held'", ())]
        rows = [*live, *_rows(query, sorted(began - {row.id for row in live}))]
    problems, journals = verify_journal(nodes, read, rows, known)
    if problems:
        return Since(problems, {}, len(read))
    said = {node.id: journals[node.id] for node in grown if node.id in journals}
    went_on = {node.id for node in grown} & known.keys()
    new = _now_quiet(query, nodes, {*held, *went_on}) if quiet is None and len(read) < most else None
    return Since((), said, len(read), new)


def _opened_otherwise(query: Query, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield the differences between budgets and the first entries of their journals, where these are here."""
    by_id = {node.id: node for node in nodes}
    for record in query(f"{ENTRIES} WHERE seq = 1 AND node_id IN {_LISTED}", (json.dumps([*by_id]),)):
        entry = to_entry(record)
        try:
            yield from verify_opened(by_id[entry.node_id], entry.facts())
        except ValueError as error:
            yield f"budget {entry.node_id!r}: entry {entry.seq} cannot be read: {error}"


def _known(query: Query, node_ids: Sequence[str] | None) -> dict[str, Checked]:
    """Return what was checked of these journals before; of all journals for None."""
    only, values = ("", ()) if node_ids is None else (f"AND key IN {_LISTED}", (json.dumps(node_ids),))
    marks = query(f"SELECT kind, key, value FROM marks WHERE kind = ? {only}", (checked_mark("")[0], *values))
    only = "" if node_ids is None else f"WHERE node_id IN {_LISTED}"
    known = newest(map(to_archived, query(f"{ARCHIVED} {only}", values)))
    for node_id, said in _readable(map(to_mark, marks)):
        if said.seq > known.get(node_id, UNREAD).seq:
            known[node_id] = said
    return known


@readable
class Quiet(Struct, frozen=True):
    """The budgets that were checked to their end and seldom change: all up to a row, but for some.

    Attributes:
        last: the ``rowid`` of that row.
        digest: SHA-256 in hex over what their rows say, each of which was found to agree with its journal.
        others: id → what the quiet budgets right below it have drawn from it, in nano-dollars, for each of the others.
    """

    last: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    digest: str
    others: dict[str, int]


def _noted(query: Query) -> Quiet | None:
    """Return the quiet budgets that were noted. A note that cannot be read is none."""
    for row in query("SELECT kind, key, value FROM marks WHERE kind = ? AND key = ?", QUIET_MARK):
        with suppress(ValidationError, UnreadableRecord):
            return read_struct(to_mark(row)[1], Quiet)
    return None


def _beside(query: Query, quiet: Quiet, held: Mapping[str, int]) -> list[Node] | None:
    """Return all nodes but the quiet ones; None if one of these has changed, so that all have to be compared."""
    [(newer, count)] = query(_COUNTS, (quiet.last,))
    if newer > _MOST_NEWER or len(quiet.others) > count or list(query(_STRAYS, ())):
        return None
    if _digest(query, quiet) != quiet.digest:
        return None
    others = (quiet.last, json.dumps([*quiet.others]))
    nodes = [to_node(row) for row in query(f"{NODES} WHERE rowid > ? OR id IN {_LISTED}", others)]
    ids = {node.id for node in nodes}
    needed = {node.parent_id for node in nodes} - {None} | quiet.others.keys() | held.keys()
    return nodes if ids >= needed else None


def _now_quiet(query: Query, nodes: Iterable[Node], busy: Collection[str]) -> Quiet | None:
    """Return the quiet ones of all *nodes*, which were checked to their end; None if that saves nothing.

    The others are those that are open or *busy*: they hold something, or went on after they were checked; and all above
    them. The tokens of a session go with it.
    """
    by_id = {node.id: node for node in nodes}
    others: dict[str, int] = {}
    for node in by_id.values():
        owner = by_id.get(node.id.removesuffix(tokens_node("")), node)
        if node.id in busy or owner.id in busy or node.live or owner.state is not NodeState.CLOSED:
            others.update(dict.fromkeys((each.id for each in path(by_id, node.id)), 0))
    if len(by_id) - len(others) < _FEWEST_QUIET:
        return None
    for node in by_id.values():
        if node.id not in others and node.parent_id in others:
            others[node.parent_id] += node.granted_in
    [(last,)] = query("SELECT max(rowid) FROM nodes", ())
    quiet = Quiet(last, "", others)
    return replace(quiet, digest=_digest(query, quiet))


def _digest(query: Query, quiet: Quiet) -> str:
    """Return the digest over the rows of the quiet budgets, what is archived, and the rest of the note."""
    others = json.dumps([*quiet.others])
    digest = hashlib.sha256(json.dumps([quiet.last, quiet.others]).encode())
    after: int | None = -(2**63)
    while after is not None:
        [(some, after)] = query(_SAID, (after, quiet.last, others))
        digest.update(f"{some}\n".encode(errors="surrogatepass"))
    for row in query(f"{ARCHIVED} ORDER BY node_id, seq", ()):
        digest.update(_ENCODED(row))
    return digest.hexdigest()


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

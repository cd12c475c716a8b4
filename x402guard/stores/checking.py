"""Checks a ledger's file in parts: what has come, at each opening; the rest in the background, part after part.

A part is a thousand budgets. Once the quiet ones of it are checked to their end, the ledger notes a digest over their rows
and what they have drawn, so that an opening need not read them. The notes are believed, as all is that no journal covers:
they save a read, and ``audit`` does without them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta, Struct, ValidationError
from msgspec.json import Encoder

from x402guard.frozen import read_struct, readable
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Entry, Node
from x402guard.ledger.token_budget import tokens_node
from x402guard.ledger.verify import (
    UNREAD,
    Balances,
    Checked,
    HoldRow,
    verify_balances,
    verify_journal,
    verify_opened,
)
from x402guard.stores.archive_file import ARCHIVED, newest, to_archived
from x402guard.stores.audit import EVERY_SUM, HOLD_ROWS, SUM, Query, held_by_node, plus, sums_of
from x402guard.stores.rows import NODE_COLUMNS, UnreadableRecord, to_entry, to_mark, to_node
from x402guard.stores.sql_reads import CURRENT, ENTRIES, NODES, names

PART: Final = 1_000
"""Budgets that are noted together."""

WORTH_NOTING: Final = 1_000
"""Entries; fewer are read again sooner than a commit is made."""


_Rows = Sequence[tuple[int, Node]]
"""Budgets with their ``rowid``, in its order."""


class Most(NamedTuple):
    """What one check may read at most.

    Attributes:
        entries: entries that were not checked before, each with its hash.
        summed: entries of which the sums are compared; with more, the balances are not.
        budgets: budgets that are in no part, or not quiet.
        parts: parts whose digests are compared with their rows.
    """

    entries: int
    summed: int
    budgets: int
    parts: int


AT_OPENING: Final = Most(entries=2_000, summed=50_000, budgets=3_000, parts=4)
EVERYTHING: Final = Most(*[10**9] * 4)

_IDS_AT_ONCE: Final = 500
_LISTED: Final = "(SELECT value FROM json_each(?))"
_SEPARATOR: Final = "\x1f"
_SAID: Final = (  # separated by what no id has; with the length, because %s ends at a NUL
    "SELECT group_concat(said, char(10)) FROM (SELECT "
    f"printf('{_SEPARATOR.join(['%s'] * 6 + ['%d'] * 8)}', id, parent_id, kind, state, head, max_nanos, seq, "
    "captured, held, granted_in, granted_out, live, past, "
    "length(CAST(id || ifnull(parent_id, char(0)) || kind || state || head AS BLOB))) AS said FROM nodes "
    f"WHERE rowid > ? AND rowid <= ? AND id NOT IN {_LISTED} ORDER BY rowid)"
)
_STRAYS: Final = (
    "SELECT key FROM marks WHERE kind = ? AND NOT EXISTS (SELECT 1 FROM nodes WHERE id = key) UNION "
    "SELECT node_id FROM archived WHERE NOT EXISTS (SELECT 1 FROM nodes WHERE id = node_id)"
)
_AWAY: Final = (
    f"{ARCHIVED} WHERE node_id IN (SELECT id FROM nodes WHERE rowid > ? AND rowid <= ?) ORDER BY node_id, seq"
)
_ENCODED: Final = Encoder().encode


def checked_mark(node_id: str) -> MarkKey:
    """Return the key of the mark that says up to where a journal was checked."""
    return "checked", node_id


def part_mark(first: int) -> MarkKey:
    """Return the key of the mark that keeps a part: the budgets after a row."""
    return "part", f"{first:020d}"


@readable
class Part(Struct, frozen=True):
    """The quiet budgets of some rows: those that have ended, and were checked to their end.

    Attributes:
        first, last: they are after the ``rowid`` *first*, and up to *last*.
        digest: SHA-256 in hex over what their rows say, each of which was found to agree with its journal.
        others: the ids of the other budgets of these rows.
        drawn: id → what the quiet ones have drawn from that budget, in nano-dollars.
    """

    first: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    last: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    digest: str
    others: tuple[str, ...]
    drawn: dict[str, int]


_FIRST: Final = -(2**63)
"""Before every row."""


class Found(NamedTuple):
    """What a check has found.

    Attributes:
        problems: the inconsistencies, one sentence each.
        journals: what each journal that has grown says now, as far as it was read.
        read: how many entries were read.
        parts: the parts that are to be noted.
        is_over: True if nothing is left that was not checked.
        is_compared: True if the balances of all budgets that are not quiet were compared.
    """

    problems: Sequence[str] = ()
    journals: Mapping[str, Checked] = {}
    read: int = 0
    parts: Sequence[Part] = ()
    is_over: bool = True
    is_compared: bool = False

    @property
    def is_worth_noting(self) -> bool:
        """True if reading it again would take longer than a commit, or the next piece begins after it."""
        return self.read >= WORTH_NOTING or bool(self.parts) or (bool(self.journals) and not self.is_over)


def check_since(query: Query, most: Most = AT_OPENING, *, turn: int = 0) -> Found:
    """Return what has come since the ledger was last checked, and the inconsistencies in it.

    What is more than *most* is left to ``check_on``. *turn*: any number; by it the parts take turns to be compared.
    """
    held, parts = held_by_node(query), _parts(query)
    by_turns = [parts[(turn + number) % len(parts)] for number in range(min(len(parts), most.parts))]
    changed = {part.first for part in by_turns if not _is_as_noted(query, part)}
    found = _beside(query, [part for part in parts if part.first not in changed], held, most)
    if found.problems and parts:  # a budget of a part may have gone on
        changed = {part.first for part in parts if not _is_as_noted(query, part)}
        found = _beside(query, [part for part in parts if part.first not in changed], held, EVERYTHING)
    return found


def _beside(query: Query, parts: Sequence[Part], held: Mapping[str, int], most: Most) -> Found:
    """Check all budgets but the quiet ones of *parts*."""
    read = _others(query, parts, held, most.budgets)
    if read is None:
        return check_on(query, most.entries)
    rows, parts = read
    nodes = [node for _, node in rows]
    known = _known(query, [node.id for node in nodes] if parts else None)
    grown = [node for node in nodes if node.seq > known.get(node.id, UNREAD).seq]
    if sum(node.seq - known.get(node.id, UNREAD).seq for node in grown) > most.summed:
        return check_on(query, most.entries)
    is_first = not parts and not known
    sums = sums_of(query, EVERY_SUM) if is_first else _all_sums(query, grown, known)
    problems = _gone(query, nodes, parts, most) or verify_balances(nodes, sums, held, drawn=_drawn(nodes, parts))
    problems = problems or list(_opened_otherwise(query, nodes))
    if problems:
        return Found(problems)
    found = _walked(query, nodes, grown, known, most.entries)
    found = found._replace(is_compared=not found.problems)
    if found.problems or not found.is_over:
        return found
    others = _not_quiet(query, {node.id: node for node in nodes}, held)
    return found._replace(parts=_noted(query, rows, others, {part.first for part in parts}))


def _drawn(nodes: Sequence[Node], parts: Sequence[Part]) -> dict[str, int]:
    """Return what the quiet budgets of parts have drawn from these ones, by id."""
    drawn = dict.fromkeys((node.id for node in nodes), 0)
    for part in parts:
        for node_id in part.drawn.keys() & drawn.keys():
            drawn[node_id] += part.drawn[node_id]
    return drawn


def _gone(query: Query, nodes: Sequence[Node], parts: Sequence[Part], most: Most) -> list[str]:
    """Return the budgets that were noted and have no row; with the *most* there is, also those whose journal was noted."""
    gone = {node_id for part in parts for node_id in part.others} - {node.id for node in nodes}
    if most.budgets == EVERYTHING.budgets:
        gone |= {str(row[0]) for row in query(_STRAYS, (checked_mark("")[0],))}
    return [f"budget {node_id!r}: it has journal entries but no row" for node_id in sorted(gone)]


def _others(
    query: Query, parts: Sequence[Part], held: Mapping[str, int], most: int
) -> tuple[list[tuple[int, Node]], Sequence[Part]] | None:
    """Return the budgets that are in no part or not quiet, by row, and the parts that are believed; None for more than *most*.

    A part is not believed of which a budget goes on: it holds something, is open again, or one below it is.
    """
    believed = {part.first: part for part in parts}
    while True:
        columns, ranges = names(NODE_COLUMNS), _ranges(believed.values())
        listed = json.dumps([node_id for part in believed.values() for node_id in part.others])
        where = " OR ".join(["(rowid > ? AND rowid <= ?)"] * (len(ranges) // 2))
        sql = f"SELECT rowid, {columns} FROM nodes WHERE {where} OR id IN {_LISTED} ORDER BY rowid LIMIT {most + 1}"
        rows = [(int(row[0]), to_node(row[1:])) for row in query(sql, (*ranges, listed))]
        if len(rows) > most:
            return None
        ids = {node.id for _, node in rows}
        going_on = {str(row[0]) for row in query(f"SELECT id FROM nodes WHERE {CURRENT}", ())} | held.keys()
        needed = (going_on | {node.parent_id or "" for _, node in rows}) - ids - {""}
        places = [
            int(row[0]) for row in query(f"SELECT rowid FROM nodes WHERE id IN {_LISTED}", (json.dumps([*needed]),))
        ]
        gone_on = [part.first for part in believed.values() if any(part.first < at <= part.last for at in places)]
        if not gone_on:
            return rows, list(believed.values())
        for first in gone_on:
            del believed[first]


def _ranges(parts: Iterable[Part]) -> list[int]:
    """Return the rows that are in no part, as (after, up to) pairs in one list."""
    found, after = [], _FIRST
    for part in sorted(parts, key=lambda part: part.first):
        if part.first > after:
            found += [after, part.first]
        after = max(after, part.last)
    return [*found, after, 2**63 - 1]


def check_on(query: Query, most: int) -> Found:
    """Read at most about *most* entries that were not checked yet: of the first thousand budgets in no part, or of the rest."""
    parts = _parts(query)
    after = max((part.last for part in parts), default=_FIRST)
    sql = f"SELECT rowid, {names(NODE_COLUMNS)} FROM nodes WHERE rowid > ? ORDER BY rowid LIMIT {PART}"
    rows = [(int(row[0]), to_node(row[1:])) for row in query(sql, (after,))]
    if len(rows) == PART:
        return _next_part(query, rows, (after, rows[-1][0]), most)
    nodes = [node for _, node in rows]
    listed = json.dumps([node_id for part in parts for node_id in part.others])
    nodes += [to_node(row) for row in query(f"{NODES} WHERE id IN {_LISTED}", (listed,))]
    known = _known(query, [node.id for node in nodes])
    grown = [node for node in nodes if node.seq > known.get(node.id, UNREAD).seq]
    return _walked(query, nodes, grown, known, most)


def _next_part(query: Query, rows: _Rows, span: tuple[int, int], most: int) -> Found:
    """Check the quiet budgets among the rows of a *span* to their end, or as far as *most* goes, and make a part of them."""
    nodes = {node.id: node for _, node in rows}
    held = held_by_node(query)
    others = _not_quiet(query, nodes, held)
    quiet = [node for node in nodes.values() if node.id not in others]
    known = _known(query, [node.id for node in quiet])
    grown = [node for node in quiet if node.seq > known.get(node.id, UNREAD).seq]
    found = _walked(query, quiet, grown, known, most)
    if found.problems or not found.is_over:
        return found._replace(is_over=False)
    sql = (
        "SELECT parent_id, sum(granted_in) FROM nodes WHERE NOT (rowid > ? AND rowid <= ?) "
        f"AND parent_id IN {_LISTED} GROUP BY parent_id"
    )
    listed = json.dumps([node.id for node in quiet if node.granted_out])
    below = {str(row[0]): int(row[1]) for row in query(sql, (*span, listed))}
    sums = _all_sums(query, grown, known)
    problems = verify_balances(quiet, sums, held, drawn=below) or list(_opened_otherwise(query, quiet))
    if problems:
        return Found(problems)
    return Found((), {}, found.read, [_part(query, rows, span, others)], is_over=False)


def check_part(query: Query, part: Part) -> Found:
    """Compare a part with its rows; where they differ, check them again by their journals, and note the part anew."""
    if _is_as_noted(query, part):
        return Found()
    sql = f"SELECT rowid, {names(NODE_COLUMNS)} FROM nodes WHERE rowid > ? AND rowid <= ? ORDER BY rowid"
    rows = [(int(row[0]), to_node(row[1:])) for row in query(sql, (part.first, part.last))]
    if not rows:
        return Found([f"the budgets of the rows {part.first + 1} to {part.last} are gone"])
    return _next_part(query, rows, (part.first, part.last), EVERYTHING.entries)


class Checks:
    """What of a ledger is still to be checked while it is open, part after part.

    Args:
        is_whole: the opening has compared all balances.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._has_read = False
        self._compared: set[int] = set()

    def go_on(self, query: Query) -> Found:
        """Check some of it, which takes about ten milliseconds. ``is_over`` says that nothing is left until more is written."""
        try:
            return self._go_on(query)
        except UnreadableRecord as error:
            return Found([str(error)])

    def _go_on(self, query: Query) -> Found:
        if not self._has_read:
            found = check_on(query, WORTH_NOTING)
            self._has_read = found.is_over
            return found._replace(is_over=False)
        for part in _parts(query):
            if part.first not in self._compared:
                self._compared.add(part.first)
                return check_part(query, part)._replace(is_over=False)
        self._has_read, was_whole, self._is_whole = False, self._is_whole, True
        return Found() if was_whole else check_since(query, EVERYTHING._replace(parts=0))


def _walked(
    query: Query, nodes: Sequence[Node], grown: Sequence[Node], known: Mapping[str, Checked], most: int
) -> Found:
    """Follow the journals that have *grown*: whole ones, up to *most* entries, or a piece of the first one."""
    whole: list[Node] = []
    left = most
    for node in grown:
        missing = node.seq - known.get(node.id, UNREAD).seq
        if missing > left:
            break
        whole.append(node)
        left -= missing
    is_over = len(whole) == len(grown)
    some, limit = (whole, most) if whole or not grown else (grown[:1], most)
    read = list(_later(query, some, known, limit))
    if len(read) < min(limit, sum(node.seq - known.get(node.id, UNREAD).seq for node in some)):
        return Found([f"budget {some[0].id!r}: its row, or that of one after it, names more entries than there are"])
    rows: list[HoldRow] | None = None
    if whole or not grown:  # no end of a hold of theirs is missing
        ids = [node.id for node in (nodes if is_over else whole)]
        began = {entry.hold_id or "" for entry in read if entry.event == "authorize"}
        began |= {hold_id for node_id in ids for hold_id in known.get(node_id, UNREAD).live}
        sql = f"{HOLD_ROWS} WHERE state = 'held' AND node_id IN {_LISTED}"
        live = [HoldRow(*row) for row in query(sql, (json.dumps(ids),))]
        rows = [*live, *_rows(query, sorted(began - {row.id for row in live}))]
    looked_at = nodes if is_over else some
    mine = {node.id: known[node.id] for node in looked_at if node.id in known}
    problems, journals = verify_journal(looked_at, read, rows, mine)
    if problems:
        return Found(problems, {}, len(read))
    said = {node.id: journals[node.id] for node in some if node.id in journals}
    return Found((), said, len(read), (), is_over)


def _not_quiet(query: Query, nodes: Mapping[str, Node], held: Mapping[str, int]) -> set[str]:
    """Return which of some budgets are not quiet: they have not ended or hold something, or one below them has not.

    The tokens of a session go with it.
    """
    current = {str(row[0]) for row in query(f"SELECT id FROM nodes WHERE {CURRENT}", ())}
    above = (
        "WITH RECURSIVE here (id) AS (SELECT value FROM json_each(?) "
        "UNION SELECT nodes.parent_id FROM nodes JOIN here ON nodes.id = here.id) SELECT id FROM here"
    )
    going_on = {str(row[0]) for row in query(above, (json.dumps([*current, *held]),))}
    others = set()
    for node in nodes.values():
        owner = node.id.removesuffix(tokens_node(""))
        if node.live or owner in going_on or (owner == node.id and node.closed_ms is None) or node.id in going_on:
            others.add(node.id)
    return others


def _noted(query: Query, rows: _Rows, others: Collection[str], believed: Collection[int]) -> list[Part]:
    """Return the parts that rows make which were checked to their end: each thousand in no part, and those not *believed*."""
    parts = _parts(query)
    made = [
        _part(query, [row for row in rows if part.first < row[0] <= part.last], (part.first, part.last), others)
        for part in parts
        if part.first not in believed
    ]
    after = max((part.last for part in parts), default=_FIRST)
    new = [row for row in rows if row[0] > after]
    for at in range(0, len(new) - PART + 1, PART):
        some = new[at : at + PART]
        made.append(_part(query, some, (after, some[-1][0]), others))
        after = some[-1][0]
    return made


def _part(query: Query, rows: _Rows, span: tuple[int, int], others: Collection[str]) -> Part:
    drawn: dict[str, int] = {}
    for _, node in rows:
        if node.id not in others and node.parent_id is not None:
            drawn[node.parent_id] = drawn.get(node.parent_id, 0) + node.granted_in
    mine = tuple(node.id for _, node in rows if node.id in others)
    return Part(*span, _digest(query, *span, mine, drawn), mine, drawn)


def _is_as_noted(query: Query, part: Part) -> bool:
    return _digest(query, part.first, part.last, part.others, part.drawn) == part.digest


def _digest(query: Query, first: int, last: int, others: Sequence[str], drawn: Mapping[str, int]) -> str:
    """Return the digest over the rows of quiet budgets, what is archived of them, and the rest of their part."""
    listed = json.dumps(list(others))
    digest = hashlib.sha256(json.dumps([first, last, listed, drawn], sort_keys=True).encode())
    [(some,)] = query(_SAID, (first, last, listed))
    digest.update(f"{some}\n".encode(errors="surrogatepass"))
    for row in query(_AWAY, (first, last)):
        digest.update(_ENCODED(row))
    return digest.hexdigest()


def _parts(query: Query) -> list[Part]:
    """Return the parts that were noted, in their order. A note that cannot be read is none, nor is one that overlaps."""
    found: list[Part] = []
    for row in query("SELECT kind, key, value FROM marks WHERE kind = ? ORDER BY key", (part_mark(0)[0],)):
        with suppress(ValidationError, UnreadableRecord):
            part = read_struct(to_mark(row)[1], Part)
            if part.last > part.first >= (found[-1].last if found else _FIRST):
                found.append(part)
    return found


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


def _readable(marks: Iterable[tuple[MarkKey, Mapping[str, Any]]]) -> Iterator[tuple[str, Checked]]:
    """Yield what is known of each journal. A mark that cannot be read is none: its journal is read from the beginning."""
    for (_, node_id), value in marks:
        with suppress(ValidationError):
            yield node_id, read_struct(value, Checked)


def _opened_otherwise(query: Query, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield the differences between budgets and the first entries of their journals, where these are here."""
    by_id = {node.id: node for node in nodes}
    for record in query(f"{ENTRIES} WHERE seq = 1 AND node_id IN {_LISTED}", (json.dumps([*by_id]),)):
        entry = to_entry(record)
        try:
            yield from verify_opened(by_id[entry.node_id], entry.facts())
        except ValueError as error:
            yield f"budget {entry.node_id!r}: entry {entry.seq} cannot be read: {error}"


def _all_sums(query: Query, grown: Sequence[Node], known: Mapping[str, Checked]) -> dict[str, Balances]:
    """Return the sums of every journal: what is known of it, and its entries since then."""
    sums = {}
    for node_id, said in known.items():
        sums[node_id] = Balances(said.captured, said.held, said.granted_in, said.granted_out, said.seq)
    for node in grown:
        before = sums.get(node.id, Balances())
        since = sums_of(
            query, f"SELECT node_id, {SUM} FROM entries WHERE node_id = ? AND seq > ?", (node.id, before.seq)
        ).get(node.id, Balances(seq=before.seq))
        sums[node.id] = plus(before, since)
    return sums


def _later(query: Query, grown: Sequence[Node], known: Mapping[str, Checked], most: int) -> Iterator[Entry]:
    for node in grown:
        since = known.get(node.id, UNREAD).seq
        sql = f"{ENTRIES} WHERE node_id = ? AND seq > ? ORDER BY seq LIMIT ?"
        yield from map(to_entry, query(sql, (node.id, since, most)))


def _rows(query: Query, hold_ids: Sequence[str]) -> Iterator[HoldRow]:
    for start in range(0, len(hold_ids), _IDS_AT_ONCE):
        some = hold_ids[start : start + _IDS_AT_ONCE]
        places = ", ".join("?" for _ in some)
        yield from (HoldRow(*row) for row in query(f"{HOLD_ROWS} WHERE id IN ({places})", some))

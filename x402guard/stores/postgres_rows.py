"""The rows of one PostgreSQL transaction: loaded in one answer, run through changes in memory, and written in one question."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from msgspec import Struct
from msgspec.json import Decoder, Encoder
from msgspec.structs import replace
from typing_extensions import override

from x402guard.kernel.change_set import MONEY_MARKS, ChangeSet, MarkKey
from x402guard.kernel.rows import Entry, Hold, HoldState, Node
from x402guard.ledger.view import Scope
from x402guard.stores.memory_rows import MemoryRows
from x402guard.stores.rows import (
    BALANCES,
    ENTRY_COLUMNS,
    HOLD_COLUMNS,
    NODE_COLUMNS,
    Record,
    entry_record,
    hold_record,
    mark_text,
    node_record,
    to_hold,
    to_mark,
    to_node,
)
from x402guard.stores.transacts import DUE_AT_ONCE, lapses

_TEXT: Final = Encoder().encode
_VALUE: Final = Decoder(dict[str, Any]).decode

OutKey = tuple[str, str]
"""(network, token) of payments that are out."""


class Proof(Struct, frozen=True):
    """What shows whether a write was made whose answer was lost.

    Attributes:
        fence: a node that the write has read, so that another version of it keeps the write from being made later.
        entries: (node, number, hash) of every entry of the write; another one cannot have all of them.
    """

    fence: str | None
    entries: tuple[Mapping[str, str | int], ...]

    def to_values(self) -> tuple[str | None, str]:
        """Return the values that the server is asked with."""
        return self.fence, _TEXT(self.entries).decode()


class Asked:
    """What the scopes of some changes ask for, together.

    Attributes:
        busy: True if the nodes are asked for too that keep idle budget or hold something.
        loaded: how many nodes the last answer had.
    """

    def __init__(self, scopes: Sequence[Scope]) -> None:
        self.nodes = sorted({node_id for scope in scopes for node_id in scope.nodes})
        self.holds = sorted({hold_id for scope in scopes for hold_id in scope.holds})
        self.marks = sorted({key for scope in scopes for key in scope.marks})
        self.out = sorted({key for scope in scopes for key in scope.out})
        self._purchases = sorted({scope.purchase for scope in scopes if scope.purchase})
        self._named = sorted({scope.purchase for scope in scopes if scope.purchase and scope.named})
        self.busy, self.loaded = False, 0
        self._sweep = max(scope.sweep for scope in scopes)
        self._flight_ms = min((scope.flight_ms for scope in scopes if scope.sweep), default=0)

    @property
    def is_by_id(self) -> bool:
        """True if all that is asked for is rows by their ids, and none that decides about money beside a budget or a hold."""
        more = self.busy or self._purchases or self.out or self._sweep
        return not more and not any(kind in MONEY_MARKS for kind, _ in self.marks)

    @property
    def rows(self) -> set[str]:
        """The names of the nodes, holds and marks that are asked for, as conflicts name them."""
        return {*self.nodes, *self.holds, *(f"{kind} {key}" for kind, key in self.marks)}

    def to_json(self, now_ms: int | None, last: Mapping[str, str | int] | None) -> str:
        """Return the question as JSON.

        Args:
            now_ms: as of when, in unix milliseconds; None is the server's own clock.
            last: the newest durable entry of this process, which has to be there.
        """
        return _TEXT(
            {
                "last": last,
                "now_ms": now_ms,
                "nodes": self.nodes,
                "busy": self.busy,
                "holds": self.holds,
                "purchases": self._purchases,
                "named": self._named,
                "marks": self.marks,
                "out": self.out,
                "sweep": self._sweep,
                "flight_ms": self._flight_ms,
                "due": DUE_AT_ONCE,
            }
        ).decode()


def as_text(values: Sequence[str]) -> str:
    """Return text values as a JSON array."""
    return _TEXT(values).decode()


class MoreNeeded(BaseException):  # no change may catch it: all of them run again
    """A change has to see which nodes keep idle budget, and they were not loaded."""


def _rules(node: Node) -> Node:
    """Return a node without its balances: what a payment below it depends on, if it changes nothing there."""
    return replace(node, **dict.fromkeys(BALANCES, 0))


class Versioned(Struct, frozen=True):
    """Rows with the versions that they have in the ledger.

    Attributes:
        nodes: id → row, its version, and the version of its rules. *above*: those that are asked for, and all above them.
        holds, marks: id or key → row, version.
        out: the sums that were asked for. *now_ms*: the time that they are of, in unix milliseconds.
        is_known: True if the server was not asked for them.
    """

    nodes: dict[str, tuple[Node, int, int]]
    holds: dict[str, tuple[Hold, int]]
    marks: dict[MarkKey, tuple[Mapping[str, Any], int]]
    out: tuple[int, ...]
    above: frozenset[str]
    now_ms: int
    is_known: bool = False


def to_versioned(answer: str) -> Versioned:
    """Return the rows of the server's answer, which is JSON."""
    found = _VALUE(answer)
    rows = [
        (to_node([row[name] for name in NODE_COLUMNS]), row)
        for row in (*(found["busy"] or ()), *(found["nodes"] or ()))
    ]
    holds = [(to_hold([row[name] for name in HOLD_COLUMNS]), row["version"]) for row in found["holds"] or ()]
    marks = [(*to_mark((row["kind"], row["key"], row["value"])), row["version"]) for row in found["marks"] or ()]
    return Versioned(
        {node.id: (node, row["version"], row["rules"]) for node, row in rows},
        {hold.id: (hold, version) for hold, version in holds},
        {key: (value, version) for key, value, version in marks},
        tuple(map(int, found["out"] or ())),
        frozenset([node["id"] for node in found["nodes"] or ()]),
        int(found["now_ms"]),
    )


class LoadedRows(MemoryRows):
    """The rows that changes run on, as the server has answered or as they were known, and what the changes have written since.

    Args:
        asked: the question.
        found: its answer.
        last: the newest durable entry of this process, if the server was not asked for it yet; see ``Asked.to_json``.

    Attributes:
        now_ms: the time that the rows are of, in unix milliseconds.
        entries: the entries that the changes have added.
        is_known: True if the server was not asked for the rows.
    """

    def __init__(self, asked: Asked, found: Versioned, last: Mapping[str, str | int] | None = None) -> None:
        super().__init__(keeps_idle=True)
        self.entries: list[Entry] = []
        self.now_ms, self.is_known = found.now_ms, found.is_known
        self._asked, self._last = asked, last
        self._changed_nodes: set[str] = set()
        self._changed_holds: set[str] = set()
        self._changed_marks: set[MarkKey] = set()
        self._before = found.nodes
        self.nodes = {node_id: row for node_id, (row, _, _) in found.nodes.items()}
        self._node_versions = {node_id: version for node_id, (_, version, _) in found.nodes.items()}
        self._above = found.above
        for row, _ in found.holds.values():
            self.put_hold(row)
        self._hold_versions = {hold_id: version for hold_id, (_, version) in found.holds.items()}
        self._instances: set[MarkKey] = {("instance", row.instance) for row, _ in found.holds.values()}
        self.marks.update((key, value) for key, (value, _) in found.marks.items())
        self._mark_versions = {key: version for key, (_, version) in found.marks.items()}
        self._out: dict[OutKey, int] = dict(zip(asked.out, found.out, strict=True))

    @override
    def add(self, change_set: ChangeSet) -> None:
        for hold in change_set.holds:
            self._note_out(hold)
        super().add(change_set)
        self._changed_nodes.update(node.id for node in change_set.nodes)
        self._changed_holds.update(hold.id for hold in change_set.holds)
        self._changed_marks.update(key for key, _ in change_set.marks)
        self.entries += change_set.entries

    def _note_out(self, hold: Hold) -> None:
        for each, sign in ((self.holds.get(hold.id), -1), (hold, 1)):
            if each is not None and each.intent is not None and each.state is HoldState.HELD and each.claim is None:
                key = (each.intent.network, each.intent.token)
                if key in self._out:
                    self._out[key] += sign * each.amount

    @override
    def _find_busy(self) -> Iterable[Node]:
        if not self._asked.busy:
            raise MoreNeeded
        return super()._find_busy()

    @override
    def live_payments(self, network: str, token: str) -> int:
        return self._out[network, token]  # of all holds, and not of the loaded ones

    def are_shared(self, shared: Collection[str]) -> bool:
        """True if a node that the changes have written is one of these."""
        return not self._changed_nodes.isdisjoint(shared)

    @property
    def looked_for(self) -> Iterable[MarkKey]:
        """The marks that were looked for, whether or not there were any."""
        return (*self._asked.marks, *self._instances)

    def now_known(self) -> Versioned:
        """Return the rows as they are once they are written, with the versions that the server gives them then."""
        nodes, ruled = {}, set(self._ruled())
        for node_id, node in self.nodes.items():
            _, version, rules = self._before.get(node_id, (None, 0, 1))
            changed, more = node_id in self._changed_nodes, node_id in ruled
            nodes[node_id] = node, version + changed, rules + more
        holds = {
            hold_id: (hold, self._hold_versions.get(hold_id, 0) + (hold_id in self._changed_holds))
            for hold_id, hold in self.holds.items()
        }
        marks = {}
        asked = set(self._asked.marks)
        for key, value in self.marks.items():
            if key in self._mark_versions or key in asked:  # else the version that it replaces is unknown
                changed = key in self._changed_marks
                read = to_mark((*key, mark_text(value)))[1] if changed else value
                marks[key] = read, self._mark_versions.get(key, 0) + changed
        return Versioned(nodes, holds, marks, (), self._above, self.now_ms)

    def written_holds(self) -> Iterable[Hold]:
        """Return the holds that the changes have written, as they are now."""
        return (self.holds[hold_id] for hold_id in self._changed_holds)

    @property
    def is_changed(self) -> bool:
        """True if the changes have written anything."""
        return bool(self._changed_nodes or self._changed_holds or self._changed_marks or self.entries)

    def proof(self) -> Proof | None:
        """Return what shows whether the write was made; None if it adds no entry."""
        if not self.entries:
            return None
        return Proof(next(iter(self._read_whole()), None), tuple(map(_identity, self.entries)))

    def _read_whole(self) -> list[str]:
        """Return the nodes whose balances the changes depend on: those that a scope names, and those that changed.

        Of the others above them only the rules matter, because a change that depends on what is left in a budget takes
        it from there.
        """
        named = (node_id for node_id in self._asked.nodes if node_id in self._node_versions)
        return sorted({*named, *(node_id for node_id in self._changed_nodes if node_id in self._node_versions)})

    def _believed(self) -> list[Mapping[str, Any]]:
        """Return the nodes as the changes have found them."""
        return [dict(zip(NODE_COLUMNS, node_record(node), strict=True)) for node, _, _ in self._before.values()]

    def _ruled(self) -> list[str]:
        """Return the nodes whose rules change."""
        return [i for i in self._read_whole() if _rules(self.nodes[i]) != _rules(self._before[i][0])]

    def _written(self) -> list[str]:
        """Return what is written and was there before, and each mark: for these, processes take turns."""
        nodes = sorted(node_id for node_id in self._changed_nodes if node_id in self._node_versions)
        holds = sorted(hold_id for hold_id in self._changed_holds if hold_id in self._hold_versions)
        return [*nodes, *holds, *sorted(f"{kind} {key}" for kind, key in self._changed_marks)]

    def to_json(self, turns: Sequence[str]) -> str:
        """Return what was written as JSON, with the versions of all that was read.

        Who has *turns* waits for no other's, because others may wait for it: it has to run again with all it needs.
        """
        nodes = (self.nodes[node_id] for node_id in sorted(self._changed_nodes))
        holds = (self.holds[hold_id] for hold_id in sorted(self._changed_holds))
        new_nodes, changed_nodes = _apart(nodes, self._node_versions, node_record, NODE_COLUMNS)
        new_holds, changed_holds = _apart(holds, self._hold_versions, hold_record, HOLD_COLUMNS)
        asked = set(self._asked.marks)
        new_marks, changed_marks = list[Mapping[str, str]](), list[Mapping[str, str]]()
        for kind, key in sorted(self._changed_marks):
            # A mark outside the scopes is written blindly, as in every store: it was not read.
            is_new = (kind, key) in asked and (kind, key) not in self._mark_versions
            row = {"kind": kind, "key": key, "value": mark_text(self.marks[kind, key])}
            (new_marks if is_new else changed_marks).append(row)
        whole = self._read_whole()
        ruled = {node_id: self._before[node_id][2] for node_id in sorted(self._above.difference(whole))}
        return _TEXT(
            {
                "mine": turns,
                "turns": self._written(),
                "rules": self._ruled(),
                "last": self._last,
                "believed": self._believed() if self.is_known else [],
                "whole": whole,
                "read": {
                    "nodes": _versions({node_id: self._node_versions[node_id] for node_id in whole}),
                    "rules": _versions(ruled),
                    "holds": _versions(self._hold_versions),
                    "marks": [{"kind": k, "key": key, "version": v} for (k, key), v in self._mark_versions.items()],
                },
                "absent": {
                    "nodes": [node_id for node_id in self._asked.nodes if node_id not in self._node_versions],
                    "holds": [hold_id for hold_id in self._asked.holds if hold_id not in self._hold_versions],
                    "marks": [
                        {"kind": k, "key": key}
                        for k, key in (self.looked_for if self.is_known else self._asked.marks)
                        if (k, key) not in self._mark_versions
                    ],
                },
                "new": {"nodes": new_nodes, "holds": new_holds, "marks": new_marks},
                "changed": {"nodes": changed_nodes, "holds": changed_holds, "marks": changed_marks},
                "entries": [dict(zip(ENTRY_COLUMNS, entry_record(entry), strict=True)) for entry in self.entries],
            }
        ).decode()


def _identity(entry: Entry) -> Mapping[str, str | int]:
    return {"node_id": entry.node_id, "seq": entry.seq, "hash": entry.hash}


def _versions(versions: Mapping[str, int]) -> list[Mapping[str, str | int]]:
    return [{"id": row_id, "version": version} for row_id, version in versions.items()]


def _apart(
    rows: Iterable[Any], known: Mapping[str, int], record: Any, columns: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the new rows and the changed ones, by the names of their columns."""
    new, changed = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in rows:
        values: Record = record(row)
        (changed if row.id in known else new).append(dict(zip(columns, values, strict=True)))
    return new, changed


_MOST_KNOWN: Final = 20_000


class KnownRows:
    """The rows that this process has read or written last: to decide on before the server is asked for them.

    No decision rests on them. The write that follows is made only if each row has this version now, and each budget this
    last entry; a change that writes nothing is not believed, and runs again on rows that the server has answered.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[Node, int, int]] = {}
        self._holds: dict[str, tuple[Hold, int]] = {}
        self._marks: dict[MarkKey, tuple[Mapping[str, Any], int] | None] = {}  # None: there was none
        self._due: list[tuple[int, str]] = []  # a heap: deadline, hold
        self._shared: dict[str, float] = {}

    def find(self, asked: Asked, now_ms: int, now_s: float) -> Versioned | None:
        """Return the rows that are asked for; None if one is not known, is written by others too, or is due.

        A hold or a mark that was never seen is taken for a new one: the write is made only if there is none.
        """
        if self._shared:
            self._shared = {row: until_s for row, until_s in self._shared.items() if until_s > now_s}
        if (
            not asked.is_by_id
            or self._is_due(now_ms // 1000)
            or (self._shared and not asked.rows.isdisjoint(self._shared))
        ):
            return None
        holds = {hold_id: self._holds[hold_id] for hold_id in asked.holds if hold_id in self._holds}
        nodes: dict[str, tuple[Node, int, int]] = {}
        wanted: list[str | None] = [*asked.nodes, *(hold.node_id for hold, _ in holds.values())]
        for node_id in wanted:
            if node_id is not None and node_id not in nodes:
                known = self._nodes.get(node_id)
                if known is None:
                    return None
                nodes[node_id] = known
                wanted.append(known[0].parent_id)
        instances: list[MarkKey] = [("instance", hold.instance) for hold, _ in holds.values()]
        if any(key not in self._marks for key in instances):
            return None
        marks = {key: row for key in (*asked.marks, *instances) if (row := self._marks.get(key)) is not None}
        return Versioned(nodes, holds, marks, (), frozenset(nodes), now_ms, is_known=True)

    def _is_due(self, now_unix: int) -> bool:
        while self._due and self._due[0][0] < now_unix:
            known = self._holds.get(self._due[0][1])
            if known is not None and lapses(known[0]) and known[0].deadline_unix == self._due[0][0]:
                return True
            heappop(self._due)
        return False

    def keep(self, rows: LoadedRows) -> None:
        """Remember the rows as they are once they are written."""
        if len(self._marks) + len(self._holds) + len(self._nodes) > _MOST_KNOWN:
            self.clear()
        found = rows.now_known()
        for hold, _ in found.holds.values():
            known = self._holds.get(hold.id)
            if lapses(hold) and (known is None or not lapses(known[0])):
                heappush(self._due, (hold.deadline_unix, hold.id))
        self._nodes.update(found.nodes)
        self._holds.update(found.holds)
        for key in rows.marks.keys() - found.marks.keys():
            self._marks.pop(key, None)
        self._marks.update(dict.fromkeys(rows.looked_for) | found.marks)

    def forget(self, rows: LoadedRows) -> None:
        """Forget the rows of a write of which it is not sure what has become."""
        for known, gone in ((self._nodes, rows.nodes), (self._holds, rows.holds)):
            for row_id in gone:
                known.pop(row_id, None)
        for key in (*rows.looked_for, *rows.marks):
            self._marks.pop(key, None)

    def clear(self) -> None:
        """Forget all rows: another server may have taken over, without the newest ones."""
        for each in (self._nodes, self._holds, self._marks, self._due):
            each.clear()

    def share(self, names: Iterable[str], until_s: float) -> None:
        """Note rows that other processes change too, as conflicts name them: until then they are read before each change."""
        self._shared |= dict.fromkeys(names, until_s)

    @property
    def shared(self) -> Collection[str]:
        """The rows that other processes have changed lately, as conflicts name them."""
        return self._shared

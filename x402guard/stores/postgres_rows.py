"""The rows of one PostgreSQL transaction: loaded in one answer, run through changes in memory, and written in one question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.json import Decoder, Encoder
from msgspec.structs import replace
from typing_extensions import override

from x402guard.kernel.change_set import ChangeSet, MarkKey
from x402guard.kernel.rows import Entry, Hold, HoldState, Node
from x402guard.ledger.view import Scope
from x402guard.stores.memory_rows import MemoryRows
from x402guard.stores.rows import (
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
from x402guard.stores.transacts import DUE_AT_ONCE

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


_BALANCES: Final = (
    "captured",
    "held",
    "granted_in",
    "granted_out",
    "seq",
    "head",
    "last_ms",
    "live",
    "since_ms",
    "past",
)


def _rules(node: Node) -> Node:
    """Return a node without its balances: what a payment below it depends on, if it changes nothing there."""
    return replace(node, **dict.fromkeys(_BALANCES, 0), starved=0, warned=0)


class LoadedRows(MemoryRows):
    """The rows that one answer of the server has, and what changes have written since; see ``BatchRows``.

    Args:
        asked: the question.
        answer: the server's answer, as JSON.

    Attributes:
        now_ms: the time the answer is of, in unix milliseconds.
        entries: the entries that the changes have added.
    """

    def __init__(self, asked: Asked, answer: str) -> None:
        super().__init__(keeps_idle=True)
        found = _VALUE(answer)
        self.now_ms = int(found["now_ms"])
        self.entries: list[Entry] = []
        self._asked = asked
        self._node_versions: dict[str, int] = {}
        self._before: dict[str, tuple[Node, int]] = {}  # with the version of its rules
        self._hold_versions: dict[str, int] = {}
        self._mark_versions: dict[MarkKey, int] = {}
        self._changed_nodes: set[str] = set()
        self._changed_holds: set[str] = set()
        self._changed_marks: set[MarkKey] = set()
        for row in (*(found["busy"] or ()), *(found["nodes"] or ())):
            node = to_node([row[name] for name in NODE_COLUMNS])
            self.nodes[node.id], self._node_versions[node.id] = node, row["version"]
            self._before[node.id] = node, row["rules"]
        self._above = {node["id"] for node in found["nodes"] or ()}
        for row in found["holds"] or ():
            hold = to_hold([row[name] for name in HOLD_COLUMNS])
            self.put_hold(hold)
            self._hold_versions[hold.id] = row["version"]
        for row in found["marks"] or ():
            key, value = to_mark((row["kind"], row["key"], row["value"]))
            self.marks[key], self._mark_versions[key] = value, row["version"]
        self._out: dict[OutKey, int] = dict(zip(asked.out, map(int, found["out"] or ()), strict=True))

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
        ruled = {node_id: self._before[node_id][1] for node_id in sorted(self._above.difference(whole))}
        return _TEXT(
            {
                "mine": turns,
                "turns": self._written(),
                "rules": [i for i in whole if _rules(self.nodes[i]) != _rules(self._before[i][0])],
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
                        {"kind": k, "key": key} for k, key in self._asked.marks if (k, key) not in self._mark_versions
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

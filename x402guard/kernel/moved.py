"""Sums by how much each node is moved: by its holds, by its entries, and by what its children draw."""

from __future__ import annotations

from types import NoneType
from typing import Final

from msgspec.structs import astuple

from x402guard.kernel.change_set import MONEY_MARKS, mark_name
from x402guard.kernel.changes import Changes, refuse
from x402guard.kernel.rows import Delivery, Evidence, Hold, HoldKind, HoldState, Node, NodeKind, NodeState, entry_hash


class Moved:
    """By how much one node is moved: by its holds, by its entries, and by what its children draw."""

    __slots__ = (
        "captured", "drawn", "granted_in", "granted_out", "head", "held", "holds_captured", "holds_held", "live", "seq", "usage",
    )  # fmt: skip

    def __init__(self) -> None:
        self.captured = self.held = self.granted_in = self.granted_out = self.usage = 0
        self.holds_captured = self.holds_held = self.live = self.drawn = self.seq = 0
        self.head = ""


STILL: Final = Moved()  # of a node that nothing moves
ZERO: Final = Node("", None, NodeKind.SESSION, "", None, 0, 0)  # the balances of a node before it is made


def _check_types(place: str, row: Hold | Node) -> None:
    """A text in place of a state, or a float in place of an amount, would pass by a comparison."""
    if isinstance(row, Node):
        exact = type(row.kind) is NodeKind and type(row.state) is NodeState
    else:
        exact = type(row.kind) is HoldKind and type(row.state) is HoldState and type(row.delivery) is Delivery
        exact = exact and type(row.evidence) in (Evidence, NoneType)
    if not exact or float in map(type, astuple(row)):
        refuse("books", place, "a kind or state is text, or an amount is a float")


def check_loaded(changes: Changes) -> None:
    """Check that each row is written once, with exact types, and was loaded or looked for."""
    change_set, loaded = changes.change_set, changes.before
    rows: tuple[Node | Hold, ...] = (*change_set.nodes, *change_set.holds)
    seen: set[str] = set()
    for row in rows:
        place, known = (f"node {row.id}", loaded.nodes) if isinstance(row, Node) else (f"hold {row.id}", loaded.holds)
        if row.id not in known or place in seen:
            refuse("books", place, "it is written twice, or was neither loaded nor looked for")
        seen.add(place)
        _check_types(place, row)
    names = [mark_name(key) for key, _ in change_set.marks if key[0] in MONEY_MARKS]
    for name in names:
        if name not in loaded.marks or names.count(name) > 1:
            refuse("books", f"mark {name}", "it is written twice, or was neither loaded nor looked for")


def moved(changes: Changes) -> dict[str, Moved]:
    """Return by how much each node is moved.

    Raises ``IllegalTransition`` for an entry that does not follow the one before it, or whose seal is not its own.
    """
    found: dict[str, Moved] = {}
    for move in changes.moves:
        node_id, held = move.after.node_id, move.held()
        by = found[node_id] = found.get(node_id) or Moved()
        by.holds_captured += move.captured()
        by.holds_held += held
        if held:
            by.live += held
            for node in changes.path(node_id)[1:]:
                if changes.opened.keeps_idle and changes.lends(node.id):
                    break
                above = found[node.id] = found.get(node.id) or Moved()
                above.live += held
    clock_ms, now_ms = changes.now.clock_ms, changes.now.now_ms
    for entry in changes.change_set.entries:
        by = found[entry.node_id] = found.get(entry.node_id) or Moved()
        if not by.seq:
            row = changes.before.nodes.get(entry.node_id)
            by.seq, by.head = (0, "") if row is None else (row.seq, row.head)
        if entry.seq != by.seq + 1 or entry.previous != by.head or entry.hash != entry_hash(astuple(entry)[:-1]):
            refuse("books", f"node {entry.node_id}", f"entry {entry.seq} does not follow {by.seq}, or is not sealed")
        if not clock_ms <= entry.at_ms <= now_ms:
            refuse("books", f"node {entry.node_id}", f"entry {entry.seq} is dated {entry.at_ms}, and now is {now_ms}")
        by.seq, by.head = entry.seq, entry.hash
        by.captured += entry.captured
        by.held += entry.held
        by.granted_out += entry.granted_out
        if entry.hold_id is None and entry.captured > 0:
            by.usage += entry.captured
        if entry.granted_in:
            by.granted_in += entry.granted_in
            parent_id = changes.node(entry.node_id).parent_id or ""
            above = found[parent_id] = found.get(parent_id) or Moved()
            above.drawn += entry.granted_in
    return found

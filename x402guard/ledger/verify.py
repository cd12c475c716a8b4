"""Verifies the ledger: the journal's hash chain, and every balance, hold, limit and trip against the journal.

It finds accidents and edits. It cannot find a complete forgery, because a process that can write the ledger's file can
also write a new journal. The chain cannot be forged: ``reconcile`` compares the ledger with what left the wallet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from x402guard.ledger.model import Entry, HoldState, Node, NodeState

MOST_PROBLEMS = 100


class HoldRow(Struct, frozen=True):
    """The parts of a hold's row to verify. ``amount`` (the ceiling) and ``captured`` are in nano-dollars or tokens."""

    id: str
    node_id: str
    state: str
    amount: int
    captured: int

    @property
    def held(self) -> int:
        """The amount held now."""
        return self.amount if self.state == HoldState.HELD else 0


@dataclass(slots=True)
class Balances:
    """The sums of one node's entries, and the number of its last entry."""

    captured: int = 0
    held: int = 0
    granted_in: int = 0
    granted_out: int = 0
    seq: int = 0


def verify_balances(nodes: Iterable[Node], sums: Mapping[str, Balances], held: Mapping[str, int]) -> list[str]:
    """Return the differences between nodes, the sums of their journals, and the amounts held by their hold rows.

    *held* maps node ids to the amounts held. Returns at most ``MOST_PROBLEMS`` sentences.
    """
    by_id = {node.id: node for node in nodes}
    problems = [f"budget {stray!r}: it has journal entries but no row" for stray in sums.keys() - by_id.keys()]
    live = dict.fromkeys(by_id, 0)
    for node in by_id.values():
        total = sums.get(node.id, Balances())
        for name in ("captured", "held", "granted_in", "granted_out", "seq"):
            said, counted = getattr(node, name), getattr(total, name)
            if said != counted:
                problems.append(f"budget {node.id!r}: its row has {name} = {said}, but its journal sums to {counted}")
        if node.held != held.get(node.id, 0):
            problems.append(
                f"budget {node.id!r}: its row has held = {node.held}, but its holds sum to {held.get(node.id, 0)}"
            )
        above: Node | None = node
        while above is not None:
            live[above.id] += node.held
            above = by_id.get(above.parent_id or "")
    problems += [
        f"budget {node.id!r}: its row has live = {node.live}, but the amounts held below it sum to {live[node.id]}"
        for node in by_id.values()
        if node.live != live[node.id]
    ]
    return problems[:MOST_PROBLEMS]


def verify_journal(nodes: Iterable[Node], entries: Iterable[Entry], holds: Iterable[HoldRow]) -> list[str]:
    """Return the faults in the journals (*entries*, in order within each node), and the rows that contradict them.

    Returns at most ``MOST_PROBLEMS`` sentences.
    """
    by_id = {node.id: node for node in nodes}
    found = _Found({}, {}, {}, set())
    problems = _walk(entries, found)
    for node in by_id.values():
        seq, head = found.heads.get(node.id, (0, ""))
        if (node.seq, node.head) != (seq, head):
            problems.append(
                f"budget {node.id!r}: its row ends with entry {node.seq}, but its journal ends with entry {seq} or another hash"
            )
        limit = found.limits.get(node.id, node.limit)
        if node.limit != limit:
            problems.append(f"budget {node.id!r}: its row has limit = {node.limit}, but its journal says {limit}")
        if (node.state is NodeState.TRIPPED) != (node.id in found.tripped):
            problems.append(f"budget {node.id!r}: its row has state = {node.state}, but its journal says otherwise")
    rows = {row.id: row for row in holds}
    for hold_id, (node_id, held, captured) in found.holds.items():
        row = rows.pop(hold_id, None)
        if row is None:
            problems.append(f"hold {hold_id}: it has journal entries but no row")
        elif (row.node_id, row.held, row.captured) != (node_id, held, captured):
            problems.append(
                f"hold {hold_id}: its row is {row.state} with {row.captured} captured, but the journal says otherwise"
            )
    problems += [f"hold {hold_id}: it has a row but no journal entry" for hold_id in rows]
    return problems[:MOST_PROBLEMS]


@dataclass(slots=True)
class _Found:
    """State folded from the journals: their last entries, limits, hold id → (node, held, captured), tripped nodes."""

    heads: dict[str, tuple[int, str]]
    limits: dict[str, int | None]
    holds: dict[str, tuple[str, int, int]]
    tripped: set[str]


def _walk(entries: Iterable[Entry], found: _Found) -> list[str]:
    problems: list[str] = []
    for entry in entries:
        seq, head = found.heads.get(entry.node_id, (0, ""))
        if entry.seq != seq + 1 or entry.previous != head:
            problems.append(f"budget {entry.node_id!r}: entry {entry.seq} does not follow entry {seq}")
        if entry.sealed().hash != entry.hash:
            problems.append(f"budget {entry.node_id!r}: entry {entry.seq} was changed after it was written")
        found.heads[entry.node_id] = (entry.seq, entry.hash)
        if entry.event == "open":
            found.limits[entry.node_id] = entry.facts().get("limit")
        elif entry.event == "limit":
            found.limits[entry.node_id] = entry.facts().get("to")
        elif entry.event == "trip":
            found.tripped.add(entry.node_id)
        elif entry.event == "reset":
            found.tripped.discard(entry.node_id)
        if entry.hold_id is not None and (entry.held or entry.captured or entry.event == "authorize"):
            node_id, held, captured = found.holds.get(entry.hold_id, (entry.node_id, 0, 0))
            found.holds[entry.hold_id] = (node_id, held + entry.held, captured + entry.captured)
        if len(problems) >= MOST_PROBLEMS:
            break
    return problems

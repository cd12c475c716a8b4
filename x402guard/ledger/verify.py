"""Do the books add up? The journal against itself, and every balance, hold, limit and latch against the journal.

Whoever can write the ledger's file can also write a whole new journal: this finds accidents and edits, not a forger with time. What
he cannot forge is the chain: ``reconcile`` compares what left the wallet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from x402guard.ledger.model import Entry, HoldState, Node, NodeState

MOST_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class HoldRow:
    """What a hold's row says: its node, its state, and in nano-dollars (or tokens) its ceiling and what was captured."""

    id: str
    node_id: str
    state: str
    amount: int
    captured: int

    @property
    def held(self) -> int:
        """What it holds now."""
        return self.amount if self.state == HoldState.HELD else 0


@dataclass(slots=True)
class Balances:
    """The sums of one node's entries, and the number of the last."""

    captured: int = 0
    held: int = 0
    granted_in: int = 0
    granted_out: int = 0
    seq: int = 0


def verify_balances(nodes: Iterable[Node], sums: Mapping[str, Balances], held: Mapping[str, int]) -> list[str]:
    """Return what does not add up between nodes, the sums of their journals, and what their hold rows hold (*held*, by node)."""
    by_id = {node.id: node for node in nodes}
    problems = [f"entries of a budget {stray!r} that there is not" for stray in sums.keys() - by_id.keys()]
    live = dict.fromkeys(by_id, 0)
    for node in by_id.values():
        total = sums.get(node.id, Balances())
        for name in ("captured", "held", "granted_in", "granted_out", "seq"):
            said, counted = getattr(node, name), getattr(total, name)
            if said != counted:
                problems.append(f"budget {node.id!r}: {name} is {said}, and its journal comes to {counted}")
        if node.held != held.get(node.id, 0):
            problems.append(f"budget {node.id!r}: {node.held} is held, and its holds come to {held.get(node.id, 0)}")
        above: Node | None = node
        while above is not None:
            live[above.id] += node.held
            above = by_id.get(above.parent_id or "")
    problems += [
        f"budget {node.id!r}: {node.live} is live below it, and what is held there comes to {live[node.id]}"
        for node in by_id.values()
        if node.live != live[node.id]
    ]
    return problems[:MOST_PROBLEMS]


def verify_journal(nodes: Iterable[Node], entries: Iterable[Entry], holds: Iterable[HoldRow]) -> list[str]:
    """Return what is wrong with the journals (*entries*, in order within each node), and what rows say otherwise than they do."""
    by_id = {node.id: node for node in nodes}
    found = _Found({}, {}, {}, set())
    problems = _walk(entries, found)
    for node in by_id.values():
        seq, head = found.heads.get(node.id, (0, ""))
        if (node.seq, node.head) != (seq, head):
            problems.append(
                f"budget {node.id!r}: its row knows {node.seq} entries, the journal ends with {seq}, or another one"
            )
        limit = found.limits.get(node.id, node.limit)
        if node.limit != limit:
            problems.append(f"budget {node.id!r}: its limit is {node.limit}, and the journal says {limit}")
        if (node.state is NodeState.TRIPPED) != (node.id in found.tripped):
            problems.append(f"budget {node.id!r}: it is {node.state}, and the journal says otherwise")
    rows = {row.id: row for row in holds}
    for hold_id, (node_id, held, captured) in found.holds.items():
        row = rows.pop(hold_id, None)
        if row is None:
            problems.append(f"hold {hold_id}: it stands in the journal, and its row is gone")
        elif (row.node_id, row.held, row.captured) != (node_id, held, captured):
            problems.append(
                f"hold {hold_id}: its row is {row.state} with {row.captured} captured, and the journal says otherwise"
            )
    problems += [f"hold {hold_id}: its row stands in no journal" for hold_id in rows]
    return problems[:MOST_PROBLEMS]


@dataclass(slots=True)
class _Found:
    """What the journals say: the end of each, limits, hold id → (node, held, captured), and what is latched."""

    heads: dict[str, tuple[int, str]]
    limits: dict[str, int | None]
    holds: dict[str, tuple[str, int, int]]
    tripped: set[str]


def _walk(entries: Iterable[Entry], found: _Found) -> list[str]:
    problems: list[str] = []
    for entry in entries:
        seq, head = found.heads.get(entry.node_id, (0, ""))
        if entry.seq != seq + 1 or entry.previous != head:
            problems.append(f"budget {entry.node_id!r}: entry {entry.seq} does not follow on entry {seq}")
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

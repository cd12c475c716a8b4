"""Budgets nest by grants: a child's dollar is its parent's dollar at every instant.

Each node keeps captured + held + granted out ≤ limit, and a node below the root has drawn from its parent exactly what it
uses. What a hold needs is drawn level by level in the transaction that makes it; what a void, an expiry or a smaller capture
frees goes straight back. So siblings cannot spend one dollar twice, and no budget is ever read stale.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

from x402guard.ledger.model import Hold, Node, NodeKind, NodeState
from x402guard.ledger.view import LedgerView, Notice
from x402guard.money import Nanos, format_dollars

PARTS: Final = 1_000_000
"""Parts of a limit are written in millionths."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The first node on a path, from the leaf up, that an amount does not fit into.

    Attributes:
        node: that node.
        available: what it has left, in nano-dollars, never below zero.
    """

    node: Node
    available: Nanos


def find_shortfall(
    view: LedgerView, node_id: str, amount: int, finalizing: frozenset[str] = frozenset()
) -> Shortfall | None:
    """Return where *amount* (nano-dollars) does not fit, or None where every budget on the path can take it.

    The reserves of the nodes *finalizing* are part of what may be taken.
    """
    for node in view.path(node_id):
        room = _room(node, finalizing)
        if room is not None and amount > room:
            return Shortfall(node, Nanos(max(room, 0)))
        if node.parent_id is not None:
            amount = max(0, node.used + amount - node.granted_in)
    return None


def _room(node: Node, finalizing: frozenset[str]) -> int | None:
    return node.room if node.id in finalizing else node.plain_room


def room_on_path(view: LedgerView, node_id: str, finalizing: frozenset[str] = frozenset()) -> Nanos | None:
    """Return the largest amount in nano-dollars that fits a node and every budget above it; None where none has a limit."""
    rooms = [room for node in view.path(node_id) if (room := _room(node, finalizing)) is not None]
    return Nanos(max(0, min(rooms))) if rooms else None


def settle_grants(view: LedgerView, node_id: str) -> None:
    """Draw what the path is short of, or give back what it no longer uses, level by level up to the root.

    Draws past a limit where the amount is owed already (a correction, a bill), and trips every node that this exceeds.
    """
    for node in view.path(node_id):
        current = view.node(node.id)
        if current.parent_id is None:
            break
        delta = current.used - current.granted_in
        if delta == 0:
            break
        verb = "grant" if delta > 0 else "return"
        facts = {"child": current.id, "amount": abs(delta)}
        view.record(current.id, verb, granted_in=delta, facts=facts)
        view.record(current.parent_id, verb, granted_out=delta, facts=facts)


def correct_past(view: LedgerView, hold: Hold, amount: int) -> None:
    """Let a correction of what was captured in a window that is over count there.

    What comes back is no room in the window that runs now; what is taken again, after it came back, is no new cost of that one
    either, up to what was captured at first. More than that is owed now.
    """
    less = hold.captured - amount
    if less < 0:
        end = json.loads(hold.ended_by or "{}")
        first = hold.amount if end.get("event") == "lapse" else end.get("amount", hold.captured)
        less = min(hold.captured, first) - min(amount, first)
    for node in view.path(hold.node_id):
        if node.window is not None and hold.closed_ms < node.since_ms:
            view.put_node(dataclasses.replace(node, past=max(0, node.past - less)))


def note_soft_limits(view: LedgerView, node_id: str) -> None:
    """Tell of every part of a limit that was reached on a path, each once; a window that begins anew tells anew."""
    for node in view.path(node_id):
        if not node.soft or node.limit is None:
            continue
        for part in _reached(node):
            if part > node.warned:
                view.put_node(dataclasses.replace(view.node(node.id), warned=part))
                _tell_soft(view, view.node(node.id), part)


def _reached(node: Node) -> list[int]:
    limit, spent = node.limit, node.spent
    return [part for part in node.soft if limit and spent * PARTS >= limit * part]


def forget_soft_limits(view: LedgerView, node_id: str) -> None:
    """A limit has changed: what of the new one is not reached yet is told of when it is."""
    node = view.node(node_id)
    view.put_node(dataclasses.replace(node, warned=max(_reached(node), default=0)))


def _tell_soft(view: LedgerView, node: Node, reached: int) -> None:
    limit, spent = node.limit or 0, node.spent
    percent = reached / (PARTS // 100)
    told: dict[str, str | int]
    if node.kind is NodeKind.TOKENS:
        name, told = "tokens_soft_limit", {"used_tokens": spent, "soft_tokens": -(-limit * reached // PARTS)}
        message = f"tokens: {spent:,} of {limit:,} are used in {node.name!r}, over {percent:g} %"
    else:
        name, told = "soft_limit", {"spent": format_dollars(spent), "budget": format_dollars(limit)}
        message = f"{node.kind} {node.name!r} has spent ${format_dollars(spent)} of ${format_dollars(limit)}, over {percent:g} %"
    session = node.id.removesuffix("/tokens")
    where = session if view.has_node(session) else node.id
    view.record(where, "event", facts={"name": name, "percent": percent, **told})
    view.notices.append(Notice(name, message, {"id": session, "name": node.name, "percent": percent, **told}))


def trip_exceeded(view: LedgerView, node_id: str) -> None:
    """Trip every open node on the path that stands past its limit. A budget of tokens latches nothing."""
    for node in view.path(node_id):
        if node.room is not None and node.room < 0 and node.kind is not NodeKind.TOKENS:
            trip(
                view,
                node.id,
                "overshoot",
                f"${format_dollars(node.counted)} used of ${format_dollars(node.limit or 0)}",
            )


def trip(view: LedgerView, node_id: str, word: str, reason: str) -> None:
    """Latch a node until its owner resets it. *word* is one of ``TERMINATIONS``; a tripped node keeps its first."""
    node = view.node(node_id)
    if node.state is NodeState.TRIPPED:
        return
    view.restrains = True
    view.record(node_id, "trip", facts={"word": word, "reason": reason})
    tripped = dataclasses.replace(view.node(node_id), state=NodeState.TRIPPED, terminated_by=word, trip_reason=reason)
    view.put_node(tripped)

"""Budgets nest by grants: a child's dollar is its parent's dollar at every instant.

Each node keeps captured + held + granted out ≤ limit, and a node below the root has drawn from its parent exactly what it
uses. What a hold needs is drawn level by level in the transaction that makes it; what a void, an expiry or a smaller capture
frees goes straight back. So siblings cannot spend one dollar twice, and no budget is ever read stale.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from x402guard.ledger.model import Node, NodeKind, NodeState
from x402guard.ledger.view import LedgerView
from x402guard.money import Nanos

__all__ = ["Shortfall", "find_shortfall", "room_on_path", "settle_grants", "trip", "trip_exceeded"]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The first node on a path, from the leaf up, that an amount does not fit into.

    Attributes:
        node: that node.
        available: what it has left, in nano-dollars, never below zero.
    """

    node: Node
    available: Nanos


def find_shortfall(view: LedgerView, node_id: str, amount: int) -> Shortfall | None:
    """Return where *amount* (nano-dollars) does not fit, or None where every budget on the path can take it."""
    for node in view.path(node_id):
        if node.room is not None and amount > node.room:
            return Shortfall(node, Nanos(max(node.room, 0)))
        if node.parent_id is not None:
            amount = max(0, node.used + amount - node.granted_in)
    return None


def room_on_path(view: LedgerView, node_id: str) -> Nanos | None:
    """Return the largest amount in nano-dollars that fits a node and every budget above it; None where none has a limit."""
    rooms = [node.room for node in view.path(node_id) if node.room is not None]
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


def trip_exceeded(view: LedgerView, node_id: str) -> None:
    """Trip every open node on the path that stands past its limit. A budget of tokens latches nothing."""
    for node in view.path(node_id):
        if node.room is not None and node.room < 0 and node.kind is not NodeKind.TOKENS:
            trip(view, node.id, "overshoot", f"{node.used} nano-dollars used of {node.limit}")


def trip(view: LedgerView, node_id: str, word: str, reason: str) -> None:
    """Latch a node until its owner resets it. *word* is one of ``TERMINATIONS``; a tripped node keeps its first."""
    node = view.node(node_id)
    if node.state is NodeState.TRIPPED:
        return
    view.restrains = True
    view.record(node_id, "trip", facts={"word": word, "reason": reason})
    tripped = dataclasses.replace(view.node(node_id), state=NodeState.TRIPPED, terminated_by=word)
    view.put_node(tripped)

"""What only the owner does to a budget: latch it, reset it, set its limit, upwards too. The journal says who and why."""

from __future__ import annotations

import dataclasses
from typing import Final

from x402guard.errors import ConfigError
from x402guard.ledger.budgets import forget_soft_limits, trip, trip_exceeded
from x402guard.ledger.model import Node, NodeKind, NodeState
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.money import Nanos, format_dollars

KILL_SWITCH: Final = "kill_switch"
_NEVER_OVER: Final = frozenset({NodeKind.WALLET, NodeKind.BUDGET})


def owner_mark(node_id: str) -> MarkKey:
    """Return the key of the small row that remembers which limit the owner has set, and which stood before."""
    return "owner_limit", node_id


def trip_node(view: LedgerView, node_id: str, reason: str) -> Node:
    """Latch a session or the wallet: nothing is authorized in it or below it until its owner resets it.

    What is signed already stays out, and counts. Tripped again, it keeps its first reason. Raises ``ConfigError`` where there
    is no such budget.
    """
    known_budget(view, node_id)
    trip(view, node_id, KILL_SWITCH, reason)
    return view.node(node_id)


def reset_node(view: LedgerView, node_id: str, by: str) -> Node:
    """Open a tripped budget again. Raises ``ConfigError`` for one that is not tripped, or stands past its limit still."""
    node = known_budget(view, node_id)
    if node.state is not NodeState.TRIPPED:
        raise ConfigError(f"session: {node_id!r} is {node.state}, and has nothing to be reset")
    if node.room is not None and node.room < 0:
        raise ConfigError(
            f"session: {node_id!r} has used ${format_dollars(node.counted)} of ${format_dollars(node.limit or 0)}; raise its "
            f"limit first: x402guard budget set {node_id} ${format_dollars(node.counted)}"
        )
    view.restrains = True  # whatever an owner does has to survive a power cut
    view.record(node_id, "reset", facts={"by": by, "word": node.terminated_by})
    state = NodeState.OPEN if node.openers or node.kind in _NEVER_OVER else NodeState.CLOSED
    opened = dataclasses.replace(view.node(node_id), state=state, terminated_by=None, trip_reason=None)
    view.put_node(opened)
    return opened


def set_limit(view: LedgerView, node_id: str, limit: Nanos, by: str) -> Node:
    """Set the limit of a budget, upwards too; what stands past a lower one is tripped. Raises ``ConfigError`` as above."""
    node = known_budget(view, node_id)
    if node.limit == limit:
        return node
    view.restrains = True
    view.record(node_id, "limit", facts={"from": node.limit, "to": limit, "by": by})
    before = view.mark(owner_mark(node_id))
    opened_with = node.limit if before is None else before["was"]  # what its process goes on asking for
    view.put_mark(owner_mark(node_id), {"was": opened_with, "is": limit})
    view.put_node(dataclasses.replace(view.node(node_id), limit=limit))
    forget_soft_limits(view, node_id)
    trip_exceeded(view, node_id)
    return view.node(node_id)


def known_budget(view: LedgerView, node_id: str) -> Node:
    """Return a budget in view. Raises ``ConfigError`` where there is none of that id, or where it counts tokens."""
    if not view.has_node(node_id) or view.node(node_id).kind is NodeKind.TOKENS:
        raise ConfigError(f"session: there is no session {node_id!r} in this ledger")
    return view.node(node_id)

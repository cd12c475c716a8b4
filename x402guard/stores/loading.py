"""What every store does alike: gather the rows of a scope into a view, and check a change before it is written."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from x402guard.errors import IllegalTransition
from x402guard.ledger.doubt import instance_mark
from x402guard.ledger.model import Hold, Node
from x402guard.ledger.view import LedgerView, MarkKey, Scope

__all__ = ["DUE_AT_ONCE", "Rows", "check_change", "load_view", "system_clock_ms"]

DUE_AT_ONCE = 100
"""How many holds past their deadline one transaction ends on the way, at most."""


class Rows(Protocol):
    """Single-row reads, all within one transaction."""

    def get_node(self, node_id: str) -> Node | None:
        """Return a node."""

    def get_hold(self, hold_id: str) -> Hold | None:
        """Return a hold."""

    def live_by_purchase(self, key: str) -> Iterable[Hold]:
        """Return the HELD holds of a purchase key, oldest first."""

    def due(self, node_ids: Iterable[str], now_unix: int, most: int) -> Iterable[Hold]:
        """Return HELD holds of the nodes that no chain can tell about, with a deadline before *now_unix*."""

    def sweepable(self, most: int) -> Iterable[Hold]:
        """Return HELD payment holds that a chain can settle, longest unchecked first."""

    def get_mark(self, key: MarkKey) -> Mapping[str, Any] | None:
        """Return a small row."""


def system_clock_ms() -> int:
    """Return this machine's clock in unix milliseconds."""
    return time.time_ns() // 1_000_000


def load_view(rows: Rows, scope: Scope, now_ms: int) -> LedgerView:
    """Return the view of a scope: the rows it names, every ancestor, and what hangs on them."""
    nodes: dict[str, Node] = {}
    for node_id in scope.nodes:
        _load_path(rows, node_id, nodes)
    holds = {hold.id: hold for hold in map(rows.get_hold, scope.holds) if hold is not None}
    purchase = list(rows.live_by_purchase(scope.purchase)) if scope.purchase else []
    sweep = list(rows.sweepable(scope.sweep)) if scope.sweep else []
    due = list(rows.due(tuple(nodes), now_ms // 1000, DUE_AT_ONCE))
    for hold in (*purchase, *sweep, *due):
        holds[hold.id] = hold
    for hold in holds.values():
        _load_path(rows, hold.node_id, nodes)
    keys = {*scope.marks, *(instance_mark(hold.owner) for hold in holds.values())}
    found = {key: rows.get_mark(key) for key in keys}
    return LedgerView(
        now_ms=now_ms,
        nodes=nodes.values(),
        holds=holds.values(),
        marks={key: value for key, value in found.items() if value is not None},
        purchase=(hold.id for hold in purchase),
        due=(hold.id for hold in due),
        sweep=(hold.id for hold in sweep),
    )


def _load_path(rows: Rows, node_id: str | None, nodes: dict[str, Node]) -> None:
    while node_id is not None and node_id not in nodes:
        node = rows.get_node(node_id)
        if node is None:
            return
        nodes[node_id] = node
        node_id = node.parent_id


def check_change(view: LedgerView, scope: Scope) -> None:
    """Check what a change did before it is written; whatever fails here is a bug of ours, and nothing is written."""
    if view.restrains and not scope.durable:
        raise IllegalTransition("a change that restrains ran under a scope that would not survive a power cut")
    for node in view.node_rows():
        if node.parent_id is not None and node.granted_in != node.used:
            raise IllegalTransition(f"node {node.id} uses {node.used} and has drawn {node.granted_in} from its parent")
        if node.room is not None and node.room < 0 and node.state == "open":
            raise IllegalTransition(f"node {node.id} would stand {-node.room} nano-dollars past its limit, untripped")

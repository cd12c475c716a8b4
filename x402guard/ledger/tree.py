"""Walks the tree of nodes: the path above one, all below one, what fits on a path, and what is idle below one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from x402guard.errors import LedgerUnavailable
from x402guard.kernel.rows import Nanos, Node, NodeKind, NodeState
from x402guard.kernel.rows import lends as path_lends


def plain_room(node: Node) -> int | None:
    """Return ``node.room`` without the reserve for last LLM calls, in nano-dollars; None without a limit."""
    return None if node.room is None else node.room - node.reserve


def left_of(node: Node) -> int | None:
    """Return what a node alone lets be spent now, in nano-dollars: ``node.room``, and 0 where it is stopped."""
    return 0 if node.state is NodeState.TRIPPED else node.room


def lends(nodes: Mapping[str, Node], node_id: str) -> bool:
    """True if the children of a node may keep idle budget, in a store that keeps it. See ``kernel.rows.lends``."""
    return path_lends(path(nodes, node_id))


def borrows(nodes: Mapping[str, Node], node: Node) -> bool:
    """True if a node may keep idle what it has drawn from its parent."""
    return node.parent_id is not None and node.parent_id in nodes and lends(nodes, node.parent_id)


def without_idle(nodes: Iterable[Node], busy: Mapping[str, Node]) -> list[Node]:
    """Return nodes as if each had drawn what it uses: with exact grants, and with ``live`` of all that is below.

    *busy* are at least all nodes of the ledger that keep idle budget or hold something, and all nodes above them.
    """
    found = {node.id: node for node in nodes}
    idle, live = dict.fromkeys(found, 0), dict.fromkeys(found, 0)  # below each
    for node in busy.values():
        if not (node.idle or node.live) or not borrows(busy, node):
            continue
        for above in path(busy, node.id)[1:]:
            if above.id in found:
                idle[above.id] += node.idle
                live[above.id] += node.live
    return [
        replace(
            node,
            granted_in=0 if node.parent_id is None else node.granted_in - node.idle - idle[node.id],
            granted_out=node.granted_out - idle[node.id],
            live=node.live + live[node.id],
        )
        if node.idle or idle[node.id] or live[node.id]
        else node
        for node in found.values()
    ]


def path(nodes: Mapping[str, Node], node_id: str) -> list[Node]:
    """Return a node and its ancestors, leaf first, out of *nodes* by id. Raises ``LedgerUnavailable`` for a row that is false."""
    climbed = [nodes[node_id]]
    while (parent := climbed[-1].parent_id) is not None and parent in nodes:
        if len(climbed) >= len(nodes):
            raise LedgerUnavailable(f"the ledger is inconsistent: node {node_id} is below itself")
        climbed.append(nodes[parent])
    return climbed


def remaining(nodes: Mapping[str, Node], node_id: str) -> Nanos | None:
    """Return the most that may be spent now, in nano-dollars: what fits every budget on a node's path; None without a limit.

    It is 0 where one of them is stopped.
    """
    above = path(nodes, node_id)
    if any(node.state is NodeState.TRIPPED for node in above):
        return Nanos(0)
    rooms = [room for node in above if (room := plain_room(node)) is not None]
    return Nanos(max(0, min(rooms))) if rooms else None


def is_outermost(nodes: Mapping[str, Node], node: Node) -> bool:
    """True for a node below no session and no part of one."""
    above = nodes.get(node.parent_id or "")
    return above is None or above.kind not in (NodeKind.SESSION, NodeKind.SCOPE)


def below(nodes: Mapping[str, Node], node_id: str) -> list[Node]:
    """Return a node and all its descendants, out of *nodes* by id, in their order."""
    children: dict[str | None, list[str]] = {}
    for node in nodes.values():
        children.setdefault(node.parent_id, []).append(node.id)
    inside = {node_id} & nodes.keys()
    waiting = list(inside)
    for parent in waiting:
        new = [child for child in children.get(parent, ()) if child not in inside]
        inside.update(new)
        waiting += new
    return [node for node in nodes.values() if node.id in inside]

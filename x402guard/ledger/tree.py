"""Walks the tree of nodes: the path above one, all below one, and what fits on a path."""

from __future__ import annotations

from collections.abc import Mapping

from x402guard.ledger.model import Node
from x402guard.money import Nanos


def path(nodes: Mapping[str, Node], node_id: str) -> list[Node]:
    """Return a node and its ancestors, leaf first, out of *nodes* by id."""
    climbed = [nodes[node_id]]
    while (parent := climbed[-1].parent_id) is not None and parent in nodes:
        climbed.append(nodes[parent])
    return climbed


def remaining(nodes: Mapping[str, Node], node_id: str) -> Nanos | None:
    """Return the largest amount (nano-dollars) that fits every budget on a node's path; None if none has a limit."""
    rooms = [node.plain_room for node in path(nodes, node_id) if node.plain_room is not None]
    return Nanos(max(0, min(rooms))) if rooms else None


def below(nodes: Mapping[str, Node], node_id: str) -> list[Node]:
    """Return a node and all its descendants, out of *nodes* by id, in their order."""
    inside: dict[str | None, bool] = {node_id: True, None: False}

    def is_inside(node: Node) -> bool:
        climbed = []
        current: Node | None = node
        while current is not None and current.id not in inside:
            climbed.append(current.id)
            current = nodes.get(current.parent_id) if current.parent_id is not None else None
        found = current is not None and inside[current.id]
        inside.update(dict.fromkeys(climbed, found))
        return found

    return [node for node in nodes.values() if is_inside(node)]

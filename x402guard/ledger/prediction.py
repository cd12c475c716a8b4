"""What sessions of a name have cost so far. It is shown to people and loosens nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from x402guard.ledger.model import Node, NodeKind
from x402guard.money import nanos_to_decimal

LEAST_SESSIONS: Final = 5
"""Fewer past sessions than this predict nothing."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a session of a name may be expected to cost.

    Attributes:
        name: whose past it is.
        sessions: how many of that name have ended.
        p50: dollars that half of them cost at most, exact: the cost of one of them, none worked out between two; None for no data.
        p95: dollars that 95 of 100 cost at most, in the same way.
    """

    name: str
    sessions: int
    p50: Decimal | None = None
    p95: Decimal | None = None

    def __str__(self) -> str:
        if self.p50 is None:
            return f"{self.name}: no data ({self.sessions} past sessions, {LEAST_SESSIONS} are needed)"
        return f"{self.name}: p50 ${self.p50}, p95 ${self.p95}, of {self.sessions} past sessions"


def predict(nodes: Iterable[Node], name: str, *, gone: Collection[str] = (), but: str | None = None) -> Prediction:
    """Return what the sessions of *name* among *nodes* cost that have ended, all but the one of the id *but*.

    What a live hold of theirs may still take is counted in. *gone* are instances known to have ended: a session that nobody else
    has open ended with them.
    """
    costs = sorted(
        node.used
        for node in nodes
        if node.kind is NodeKind.SESSION and node.name == name and node.id != but and _has_ended(node, gone)
    )
    if len(costs) < LEAST_SESSIONS:
        return Prediction(name, len(costs))
    return Prediction(name, len(costs), *(nanos_to_decimal(_nearest_rank(costs, percent)) for percent in (50, 95)))


def _has_ended(node: Node, gone: Collection[str]) -> bool:
    return node.closed_ms is not None or all(opener.rpartition("#")[0] in gone for opener in node.openers)


def _nearest_rank(ordered: list[int], percent: int) -> int:
    return ordered[-(-len(ordered) * percent // 100) - 1]

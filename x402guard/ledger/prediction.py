"""Predicts the cost of a session from past sessions of its name. It is shown only; it changes no limit."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from x402guard.ledger.model import Node, NodeKind
from x402guard.money import nanos_to_decimal

LEAST_SESSIONS: Final = 5
"""The minimum number of past sessions for a prediction."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected cost of a session of a name.

    Attributes:
        name: the session name.
        sessions: the number of ended sessions of that name.
        p50: the median cost in dollars: the exact cost of one session (nearest rank, no interpolation); None for no
        data. p95: the 95th percentile in dollars, computed in the same way.
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
    """Return the prediction from the ended sessions of *name* among *nodes*, without the session of id *but*.

    Costs include the ceilings of live holds. *gone* are instances known to have ended: a session that no other instance
    has open counts as ended.
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

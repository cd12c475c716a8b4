"""What every store does alike: gather the rows of a scope into a view, and check a change before it is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, Protocol

from x402guard.errors import IllegalTransition
from x402guard.ledger.in_doubt import instance_mark
from x402guard.ledger.model import Hold, Node, NodeKind
from x402guard.ledger.view import LedgerView, MarkKey, Scope

_ID: Final = attrgetter("id")

DUE_AT_ONCE: Final = 100
"""How many holds past their deadline one transaction ends on the way, at most."""


class Rows(Protocol):
    """Reads within one transaction. Few calls rather than fine ones: each is a trip to the database."""

    def get_nodes(self, node_ids: Iterable[str]) -> Iterable[Node]:
        """Return those of the nodes that exist, and all their ancestors."""

    def get_holds(self, hold_ids: Iterable[str]) -> Iterable[Hold]:
        """Return those of the holds that exist."""

    def live_by_purchase(self, key: str) -> Iterable[Hold]:
        """Return the HELD holds of a purchase key, oldest first."""

    def due(self, node_ids: Iterable[str], now_unix: int, most: int) -> Iterable[Hold]:
        """Return HELD holds of the nodes that no chain can tell about, with a deadline before *now_unix*."""

    def sweepable(self, most: int, flown_before_ms: int) -> Iterable[Hold]:
        """Return payment holds whose end a chain may prove, longest unchecked first; see ``Scope.sweep``."""

    def get_marks(self, keys: Iterable[MarkKey]) -> Mapping[MarkKey, Mapping[str, Any]]:
        """Return those of the small rows that exist."""


class StoreClock:
    """A store's clock, and how far that has run ahead of time passing since the store was opened.

    Args:
        wall: returns unix milliseconds; this machine's clock when none is given.
        steady: returns milliseconds from anywhere, and is set by nobody; the machine's own, asleep or not. Beside a *wall* of the
            caller's, one that goes with it.
    """

    def __init__(self, wall: Callable[[], int] | None = None, steady: Callable[[], int] | None = None) -> None:
        self._wall = wall or _system_clock_ms
        self._steady = steady or (_steady_clock_ms if wall is None else wall)
        self._began = (self._wall(), self._steady())

    def __call__(self) -> int:
        """Return the time in unix milliseconds; that which is believed, where the clock has jumped ahead."""
        now_ms, _ = self.read()
        return now_ms

    def read(self) -> tuple[int, int]:
        """Return (the time that is believed, in unix milliseconds; how far the clock is ahead of it)."""
        clock_ms, (wall_ms, steady_ms) = self._wall(), self._began
        ahead_ms = max(0, clock_ms - wall_ms - (self._steady() - steady_ms))
        return (clock_ms, 0) if ahead_ms <= _SLACK_MS else (clock_ms - ahead_ms, ahead_ms)


def _system_clock_ms() -> int:
    return time.time_ns() // 1_000_000


_SLACK_MS: Final = 1_000
_STEADY: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""It goes on while the machine sleeps: Linux has one of its own for that, macOS's does."""


def _steady_clock_ms() -> int:
    return time.clock_gettime_ns(_STEADY) // 1_000_000


def load_view(rows: Rows, scope: Scope, clock: StoreClock) -> LedgerView:
    """Return the view of a scope: the rows it names, every ancestor, and what hangs on them."""
    now_ms, ahead_ms = clock.read()
    nodes = {node.id: node for node in rows.get_nodes(scope.nodes)}
    named = list(rows.get_holds(scope.holds)) if scope.holds else []
    purchase = list(rows.live_by_purchase(scope.purchase)) if scope.purchase else []
    sweep = list(rows.sweepable(scope.sweep, now_ms - scope.flight_ms)) if scope.sweep else []
    due = list(rows.due(tuple(nodes), now_ms // 1000, DUE_AT_ONCE)) if nodes else []
    holds = {hold.id: hold for hold in (*named, *purchase, *sweep, *due)}
    elsewhere = {hold.node_id for hold in holds.values()} - set(nodes)
    if elsewhere:
        nodes.update((node.id, node) for node in rows.get_nodes(elsewhere))
    keys = {*scope.marks, *map(instance_mark, map(attrgetter("owner"), holds.values()))}
    return LedgerView(
        now_ms=now_ms,
        ahead_ms=ahead_ms,
        nodes=nodes.values(),
        holds=holds.values(),
        marks=rows.get_marks(keys) if keys else {},
        purchase=map(_ID, purchase),
        due=map(_ID, due),
        sweep=map(_ID, sweep),
    )


def check_change(view: LedgerView, scope: Scope) -> None:
    """Check what a change did before it is written; whatever fails here is a bug of ours, and nothing is written."""
    if view.restrains and not scope.durable:
        raise IllegalTransition("a change that restrains ran under a scope that would not survive a power cut")
    for node in view.changed():
        if node.parent_id is not None and node.granted_in != node.used:
            raise IllegalTransition(f"node {node.id} uses {node.used} and has drawn {node.granted_in} from its parent")
        restrained = node.kind is not NodeKind.TOKENS
        if restrained and node.room is not None and node.room < 0 and node.state == "open":
            raise IllegalTransition(f"node {node.id} would stand {-node.room} nano-dollars past its limit, untripped")

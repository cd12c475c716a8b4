"""Loads the rows of a scope into a view, and checks a change before it is written. All stores use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, Protocol

from x402guard.errors import IllegalTransition
from x402guard.kernel.change_set import MarkKey, Scope
from x402guard.kernel.rows import Hold, HoldState, Node, NodeKind
from x402guard.ledger.purchases import instance_mark
from x402guard.ledger.view import LedgerView

_LAST_MS: Final = attrgetter("last_ms")
_ID: Final = attrgetter("id")

DUE_AT_ONCE: Final = 100
"""The maximum number of holds past their deadline that one transaction lapses."""


class Rows(Protocol):
    """Reads within one transaction. Each call is a database query, so few large calls are better than many."""

    def get_nodes(self, node_ids: Iterable[str]) -> Iterable[Node]:
        """Return the nodes that exist, and all their ancestors."""

    def get_holds(self, hold_ids: Iterable[str]) -> Iterable[Hold]:
        """Return the holds that exist."""

    def open_purchases(self, key: str) -> Iterable[Hold]:
        """Return the HELD and CAPTURED holds of a purchase key whose answer was not handed over, oldest first."""

    def live_payments(self, network: str, token: str) -> int:
        """Return the nano-dollars of the HELD payments of a token that no server has claimed."""

    def last_bought(self, key: str) -> Iterable[Hold]:
        """Return the last HELD or CAPTURED hold of a purchase key whose answer was handed over, if there is one."""

    def due(self, now_unix: int, most: int) -> Iterable[Hold]:
        """Return at most *most* HELD holds without chain evidence whose deadline is before *now_unix*."""

    def sweepable(self, most: int, flown_before_ms: int) -> tuple[Iterable[Hold], Iterable[Hold]]:
        """Return at most *most* live and *most* captured payment holds whose outcome a chain may prove.

        Those with the oldest check come first; see ``Scope.sweep``.
        """

    @property
    def find_busy(self) -> Callable[[], Iterable[Node]] | None:
        """See ``LedgerView``."""

    def get_marks(self, keys: Iterable[MarkKey]) -> Mapping[MarkKey, Mapping[str, Any]]:
        """Return the marks that exist."""


class StoreClock:
    """A store's clock. It detects how far the wall clock has jumped ahead since the store was opened.

    Args:
        wall: returns unix milliseconds; default: this machine's clock.
        steady: returns milliseconds from any start, of a clock that cannot be set and also counts while the machine
            sleeps. Default: this machine's steady clock, or *wall* if that is given.
    """

    def __init__(self, wall: Callable[[], int] | None = None, steady: Callable[[], int] | None = None) -> None:
        self._wall = wall or _system_clock_ms
        self._steady = steady or (system_steady_ms if wall is None else wall)
        self._began = (self._wall(), self._steady())

    def __call__(self) -> int:
        """Return the believed time in unix milliseconds: without a jump ahead of the wall clock."""
        now_ms, _ = self.read()
        return now_ms

    def steady_ms(self) -> int:
        """Return milliseconds of the steady clock."""
        return self._steady()

    def read(self) -> tuple[int, int]:
        """Return (the believed time in unix milliseconds, how far the wall clock is ahead of it in milliseconds)."""
        clock_ms, (wall_ms, steady_ms) = self._wall(), self._began
        ahead_ms = max(0, clock_ms - wall_ms - (self._steady() - steady_ms))
        return (clock_ms, 0) if ahead_ms <= _SLACK_MS else (clock_ms - ahead_ms, ahead_ms)


def _system_clock_ms() -> int:
    return time.time_ns() // 1_000_000


_SLACK_MS: Final = 1_000
_STEADY: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The clock that also counts while the machine sleeps: CLOCK_BOOTTIME on Linux, CLOCK_MONOTONIC on macOS."""


def system_steady_ms() -> int:
    """Return milliseconds of this machine's clock that cannot be set."""
    return time.clock_gettime_ns(_STEADY) // 1_000_000


def load_view(rows: Rows, scope: Scope, clock: StoreClock) -> LedgerView:
    """Return the view of a scope: its rows, their ancestors, due holds, and the marks of the holds' instances."""
    now_ms, ahead_ms = clock.read()
    nodes = {node.id: node for node in rows.get_nodes(scope.nodes)}
    named = list(rows.get_holds(scope.holds)) if scope.holds else []
    purchase = list(rows.open_purchases(scope.purchase)) if scope.purchase else []
    bought = list(rows.last_bought(scope.purchase)) if scope.purchase and scope.named else []
    sweep = _swept(rows, scope, now_ms) if scope.sweep else []
    due = list(rows.due(now_ms // 1000, DUE_AT_ONCE)) if nodes else []
    holds: dict[str, Hold] = {}
    instances: list[MarkKey] = []
    for hold in (*named, *purchase, *bought, *sweep, *due):
        holds[hold.id] = hold
        instances.append(instance_mark(hold.instance))
        if hold.node_id not in nodes:
            nodes.update((node.id, node) for node in rows.get_nodes((hold.node_id,)))
    if ahead_ms:
        # Another process has written a later time: as far as that goes, it confirms the jump of this machine's clock.
        confirmed_ms = min(ahead_ms, max(0, max(map(_LAST_MS, nodes.values()), default=0) - now_ms))
        now_ms, ahead_ms = now_ms + confirmed_ms, ahead_ms - confirmed_ms
    keys = {*scope.marks, *instances} if instances else scope.marks
    return LedgerView(
        now_ms=now_ms,
        ahead_ms=ahead_ms,
        nodes=nodes.values(),
        holds=holds.values(),
        marks=rows.get_marks(keys) if keys else {},
        purchase=map(_ID, purchase),
        bought=bought[0].id if bought else None,
        due=map(_ID, due),
        sweep=map(_ID, sweep),
        out={key: rows.live_payments(*key) for key in scope.out},
        find_busy=rows.find_busy,
    )


def _swept(rows: Rows, scope: Scope, now_ms: int) -> list[Hold]:
    live, captured = rows.sweepable(scope.sweep, now_ms - scope.flight_ms)
    found = [*live, *captured]
    return (found if scope.live_first else sorted(found, key=least_checked))[: scope.sweep]


def least_checked(hold: Hold) -> tuple[int, int]:
    """Return the key that sorts holds by their last check, oldest first."""
    return hold.checked_ms, hold.created_ms


def lapses(hold: Hold) -> bool:
    """True for a live hold that ends at its own deadline, because no chain can prove its outcome."""
    return not hold.chain_evidence and hold.state is HoldState.HELD


def check_change(view: LedgerView, scope: Scope) -> None:
    """Check the result of a change before it is written. A failure is a bug in x402guard, and nothing is written.

    Raises ``IllegalTransition`` if the change restrains under a scope that is not durable, if a node has not drawn from
    its parent exactly what it uses, or if an open node is past its limit.
    """
    if view.restrains and not scope.durable:
        raise IllegalTransition("a change that restrains ran under a scope that would not survive a power cut")
    for node in view.changed():
        keeps = node.parent_id is not None and view.lends(node.parent_id) and node.state == "open"
        if node.parent_id is not None and node.granted_in != node.used and not (node.idle and keeps):
            raise IllegalTransition(f"node {node.id} uses {node.used} but has drawn {node.granted_in} from its parent")
        room = node.room if node.limit is not None and node.kind is not NodeKind.TOKENS else None
        if room is not None and room < 0 and node.state == "open":
            raise IllegalTransition(f"node {node.id} would be {-room} nano-dollars past its limit, but not tripped")

"""Loads the rows that one decision may see, as they are stored, and reads the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, Protocol

from x402guard.kernel.change_set import Before, ChangeSet, MarkKey, Scope
from x402guard.kernel.proofs import Unsigned
from x402guard.kernel.rows import Hold, HoldState, Node

_LAST_MS: Final = attrgetter("last_ms")

DUE_AT_ONCE: Final = 100
"""The maximum number of holds past their deadline that one transaction lapses."""


class Rows(Protocol):
    """A store's rows within one transaction. Each read is a query, so few large calls are better than many."""

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
        """What returns every node that keeps idle budget or holds something, and all above them; None where none may."""

    def get_marks(self, keys: Iterable[MarkKey]) -> Mapping[MarkKey, Mapping[str, Any]]:
        """Return the marks that exist."""

    def add(self, change_set: ChangeSet) -> None:
        """Take the rows of a change set that was checked. The kernel alone calls it."""


class Clock(Protocol):
    """The clock of a store: the kernel's own, which no room can set."""

    def read(self) -> tuple[int, int]:
        """Return (the believed time in unix milliseconds, how far the machine's clock is ahead of it in milliseconds)."""


class Loaded:
    """The rows of a scope, and what a room may ask of them.

    Attributes:
        before: the rows, for the check.
        clock_ms: the store's clock, in unix milliseconds. *ahead_ms*: how far the machine's clock is ahead of it.
        now_ms: the store's clock, and never below the last time of a node that was loaded.
        purchase, bought, due, sweep: ids of the holds that the scope asks for; see ``Scope``.
        out: (network, token) → nano-dollars of its live payments that no server has claimed.
        keeps_idle: True if sessions keep idle budget in this store.
        forget: hold → ``Unsigned``, or None: see ``kernel.released``.
    """

    def __init__(self, before: Before, clock_ms: int, ahead_ms: int = 0) -> None:
        self.before = before
        self.clock_ms, self.ahead_ms = clock_ms, ahead_ms
        self.now_ms = max([clock_ms, *(node.last_ms for node in before.nodes.values() if node is not None)])
        self.purchase: tuple[str, ...] = ()
        self.bought: str | None = None
        self.due: tuple[str, ...] = ()
        self.sweep: tuple[str, ...] = ()
        self.out: dict[tuple[str, str], int] = {}
        self._busy: Callable[[], Iterable[Node]] | None = None
        self.forget: Callable[[str], Unsigned | None] = _forgets_nothing

    @property
    def keeps_idle(self) -> bool:
        """True if sessions keep idle budget in this store."""
        return self._busy is not None

    def busy(self) -> list[Node]:
        """Load every node that keeps idle budget or holds something, and all above them. Returns those that are new."""
        if self._busy is None:
            return []
        found = [node for node in self._busy() if node.id not in self.before.nodes]
        for node in found:
            self.before.nodes[node.id] = node
            self.now_ms = max(self.now_ms, node.last_ms)
        return found

    def look_for_busy(self, find: Callable[[], Iterable[Node]] | None) -> None:
        """Let ``busy`` load by *find*."""
        self._busy = find


def _forgets_nothing(hold_id: str) -> None:
    del hold_id


def load(rows: Rows, scope: Scope, clock: Clock) -> Loaded:
    """Return the rows of a scope, their ancestors, due holds, and the marks of the holds' instances."""
    now_ms, ahead_ms = clock.read()
    found = {node.id: node for node in rows.get_nodes(scope.nodes)}
    nodes: dict[str, Node | None] = {**dict.fromkeys(scope.nodes), **found}
    named = list(rows.get_holds(scope.holds)) if scope.holds else []
    purchase = list(rows.open_purchases(scope.purchase)) if scope.purchase else []
    bought = list(rows.last_bought(scope.purchase)) if scope.purchase and scope.named else []
    sweep = _swept(rows, scope, now_ms) if scope.sweep else []
    due = list(rows.due(now_ms // 1000, DUE_AT_ONCE)) if found else []
    holds: dict[str, Hold | None] = dict.fromkeys(scope.holds)
    keys: dict[MarkKey, None] = dict.fromkeys(scope.marks)
    for hold in (*named, *purchase, *bought, *sweep, *due):
        holds[hold.id] = hold
        keys["instance", hold.instance] = None
        if nodes.get(hold.node_id) is None:
            nodes.update((node.id, node) for node in rows.get_nodes((hold.node_id,)))
    if ahead_ms:
        # Another process has written a later time: as far as that goes, it confirms the jump of this machine's clock.
        last_ms = max((node.last_ms for node in nodes.values() if node is not None), default=0)
        confirmed_ms = min(ahead_ms, max(0, last_ms - now_ms))
        now_ms, ahead_ms = now_ms + confirmed_ms, ahead_ms - confirmed_ms
    marks: dict[MarkKey, Mapping[str, Any] | None] = dict(keys)
    if keys:
        marks.update(rows.get_marks(keys))
    loaded = Loaded(Before(nodes, holds, marks, scope.purchase, scope.named), now_ms, ahead_ms)
    loaded.purchase = tuple(hold.id for hold in purchase)
    loaded.bought = bought[0].id if bought else None
    loaded.due = tuple(hold.id for hold in due)
    loaded.sweep = tuple(hold.id for hold in sweep)
    loaded.out = {key: rows.live_payments(*key) for key in scope.out}
    loaded.look_for_busy(rows.find_busy)
    return loaded


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

"""Runs a change of the ledger as what the kernel takes: a decision over loaded rows that proposes a change set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, cast

from msgspec.structs import replace
from typing_extensions import override

from x402guard.assets import TEST_NETWORKS, Asset, built_in
from x402guard.errors import ConfigError, X402GuardError
from x402guard.kernel.change_set import MONEY_MARKS, Before, ChangeSet, MarkKey, Opened, Token, mark_name
from x402guard.kernel.ledger import Clock, Ledger
from x402guard.kernel.rows import WALLET, Hold, HoldState, Node
from x402guard.ledger.store import Life
from x402guard.ledger.view import Change, LedgerView, Loaded, Scope
from x402guard.money import dollars_to_nanos

R = TypeVar("R")


class Proposal(Generic[R]):
    """One change, run on a view of the rows that the kernel has loaded."""

    def __init__(self, scope: Scope, change: Change[R]) -> None:
        self._scope, self._change = scope, change
        self._result: R | None = None

    def __call__(self, loaded: Loaded) -> ChangeSet:
        """Return what the change proposes. Raises what it raises."""
        view = LedgerView(loaded)
        self._result = self._change(view)
        return view.change_set(durable=self._scope.durable)

    def outcome(self) -> R:
        """Return what the last run of the change has returned."""
        return cast("R", self._result)


OPENED: Final = "named"
"""The kind of the marks that the opening of a session writes."""

_OPENED_AT_ONCE: Final = 50


class Opening(NamedTuple):
    """A new session that is not written yet: what its opening reads and does, and when it was decided."""

    scope: Scope
    change: Change[object]
    since_s: float


class _Decided(Exception):  # noqa: N818 - a signal: the change is decided, and is not to be written
    pass


class Transacts(Ledger):
    """A ledger that runs changes: see ``LedgerStore.transact``."""

    _clock: StoreClock
    _openings: dict[str, Opening]
    _closed: bool

    @override
    def clock(self) -> Clock:
        return self._clock.read

    @property
    def schema(self) -> int:
        """See ``LedgerStore.schema``."""
        return 0

    def hold_life(self, name: str) -> Life | None:  # noqa: ARG002 - a store with files uses it
        """See ``LedgerStore.hold_life``."""
        return None

    def lives(self, name: str) -> bool | None:  # noqa: ARG002
        """See ``LedgerReads.lives``."""
        return None

    def transact(self, scope: Scope, change: Change[R]) -> R:
        """See ``LedgerStore.transact``."""
        ids = self._unwritten(scope) if self._openings else ()
        if ids:
            scope, change = self._with_openings(ids, scope, change)
        proposal = Proposal(scope, change)
        self.commit(scope, proposal)
        for node_id in ids:
            self._openings.pop(node_id, None)
        return proposal.outcome()

    def rehearse(self, scope: Scope, change: Change[R]) -> R:
        """Return what a change would return now, and write nothing. Raises what it raises."""
        proposal = Proposal(scope, change)
        self._decide(scope, proposal)
        return proposal.outcome()

    def open_later(self, node_id: str, scope: Scope, change: Change[R], decide: Change[R]) -> R:
        """See ``LedgerStore.open_later``."""
        decided = self.rehearse(scope, decide)
        self._openings[node_id] = Opening(scope, change, time.monotonic())
        return decided

    def forget_opening(self, node_id: str) -> None:
        """Forget a session that is not written: nothing can use it any more."""
        self._openings.pop(node_id, None)

    def _decide(self, scope: Scope, proposal: Proposal[Any]) -> None:
        """Run a decision on the rows of a scope, and write nothing."""

        def decided(loaded: Loaded) -> ChangeSet:
            proposal(loaded)
            raise _Decided

        with suppress(_Decided):
            self.commit(scope, decided)

    def _unwritten(self, scope: Scope) -> tuple[str, ...]:
        """Return the sessions that are not written yet, of a scope's nodes, or whose names it asks for."""
        roots = {node_id.partition("/")[0] for node_id in scope.nodes}
        found = {root for root in roots if root in self._openings}
        if names := {mark for mark in scope.marks if mark[0] == OPENED}:
            others = list(self._openings.items())
            found.update(each for each, opening in others if names.intersection(opening.scope.marks))
        return tuple(sorted(found))

    def _with_openings(self, ids: tuple[str, ...], scope: Scope, change: Change[R]) -> tuple[Scope, Change[R]]:
        """Return a scope and a change that open sessions first."""
        openings = [(node_id, self._openings[node_id]) for node_id in ids if node_id in self._openings]
        nodes = dict.fromkeys(scope.nodes) | dict.fromkeys(chain(*(each.scope.nodes for _, each in openings)))
        marks = dict.fromkeys(scope.marks) | dict.fromkeys(chain(*(each.scope.marks for _, each in openings)))

        def both(view: LedgerView) -> R:
            for node_id, opening in openings:
                if not view.has_node(node_id):  # another thread may have written it
                    opening.change(view)
            return change(view)

        return replace(scope, nodes=tuple(nodes), marks=tuple(marks), durable=True), both

    def write_openings(self, node_id: str | None = None, *, below: bool = False, older_s: float = 0.0) -> None:
        """See ``LedgerStore.write_openings``."""
        if not self._openings or self._closed:
            return
        root = "" if node_id is None else node_id.partition("/")[0]
        if root in self._openings:
            self._write_some((root,))
        elif node_id is None or (below and (root == WALLET or root.startswith("budget:"))):
            until_s = time.monotonic() - older_s
            ids = [each for each, opening in list(self._openings.items()) if opening.since_s <= until_s]
            for start in range(0, len(ids), _OPENED_AT_ONCE):
                some = tuple(ids[start : start + _OPENED_AT_ONCE])
                try:
                    self._write_some(some)
                except ConfigError:
                    for each in some:
                        with suppress(ConfigError):  # its own first hold says so; the others are written
                            self._write_some((each,))

    def _write_some(self, ids: tuple[str, ...]) -> None:
        self.transact(Scope(nodes=ids, durable=True), lambda _: None)

    def _write_last_openings(self) -> None:
        """Write the sessions that are left, before the ledger is closed. What cannot be written has spent nothing."""
        with suppress(X402GuardError):
            self.write_openings()
        self._openings.clear()

    @override
    def _built_in(self) -> Opened:
        return _opened()


@cache
def _opened() -> Opened:
    return Opened(tokens=tokens_of(built_in()), test_networks=TEST_NETWORKS)


def tokens_of(assets: tuple[Asset, ...]) -> dict[str, Token]:
    """Return assets as the kernel's table: what may be signed for, and what it is worth."""
    return {f"{each.network}/{each.contract}": Token(each.decimals, dollars_to_nanos(each.usd)) for each in assets}


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


_ID: Final = attrgetter("id")

DUE_AT_ONCE: Final = 100
"""The maximum number of holds past their deadline that one transaction lapses."""


class Reads(Protocol):
    """What ``load`` asks a store within one transaction. Each call is a query, so few large calls are better than many."""

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


def load(rows: Reads, scope: Scope, clock: Clock) -> Loaded:
    """Return the rows of a scope, their ancestors, due holds, and the marks of the holds' instances."""
    now_ms, ahead_ms = clock()
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
    marks = rows.get_marks(keys) if keys else {}
    money: dict[str, dict[str, Any] | None] = {}
    for key in keys:
        if key[0] in MONEY_MARKS:
            money[mark_name(key)] = _copied(marks.get(key))
            marks = {**marks, key: dict(marks[key])} if key in marks else marks  # a room may change what it is handed
    loaded = Loaded(Before(nodes, holds, money, scope.purchase, scope.named), now_ms, ahead_ms)
    loaded.marks = marks
    loaded.purchase, loaded.due, loaded.sweep = tuple(map(_ID, purchase)), tuple(map(_ID, due)), tuple(map(_ID, sweep))
    loaded.bought = bought[0].id if bought else None
    if scope.out:
        loaded.out = {key: rows.live_payments(*key) for key in scope.out}
    loaded.look_for_busy(rows.find_busy)
    return loaded


def _copied(mark: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if mark is None else dict(mark)


def _swept(rows: Reads, scope: Scope, now_ms: int) -> list[Hold]:
    live, captured = rows.sweepable(scope.sweep, now_ms - scope.flight_ms)
    found = [*live, *captured]
    return (found if scope.live_first else sorted(found, key=least_checked))[: scope.sweep]


def least_checked(hold: Hold) -> tuple[int, int]:
    """Return the key that sorts holds by their last check, oldest first."""
    return hold.checked_ms, hold.created_ms


def lapses(hold: Hold) -> bool:
    """True for a live hold that ends at its own deadline, because no chain can prove its outcome."""
    return not hold.chain_evidence and hold.state is HoldState.HELD

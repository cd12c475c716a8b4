"""Reads nodes and outstanding holds from a ledger store, and predicts what a session costs from past ones."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from x402guard.errors import ConfigError
from x402guard.kernel.rows import WALLET, Hold, HoldKind, Node, NodeKind, NodeState
from x402guard.kernel.windows import rolled
from x402guard.ledger.budgets import OVER
from x402guard.ledger.lost import Compared
from x402guard.ledger.purchases import silent_instances
from x402guard.ledger.sessions import PAYER_MARK
from x402guard.ledger.store import LedgerReads, LedgerStore
from x402guard.ledger.tree import below
from x402guard.money import nanos_to_decimal

LEAST_SESSIONS: Final = 5
"""The minimum number of past sessions for a prediction."""

MOST_SESSIONS: Final = 1_000
"""The maximum number of past sessions for a prediction: the last ones."""

_AT_ONCE: Final = 200
_NAMED: Final = (NodeKind.WALLET, NodeKind.BUDGET, NodeKind.SESSION)
_BY_ID: Final = "id="
_MOST_COMPARED: Final = 1_000

ALLOWANCE: Final = "allowance"
"""The kind of the marks that keep how much of a token Permit2 may move."""


def nodes_of(store: LedgerReads, node_id: str | None = None) -> dict[str, Node]:
    """Return a node, its descendants and its ancestors, or every node, by id, with windows moved to the present time."""
    now_ms = store.now_ms()
    return {node.id: rolled(node, now_ms) for node in store.nodes(node_id)}


def path_of(store: LedgerReads, node_id: str) -> dict[str, Node]:
    """Return a node and its ancestors by id, with windows moved to the present time; empty if there is no such node."""
    now_ms = store.now_ms()
    return {node.id: rolled(node, now_ms) for node in store.path(node_id)}


def find_budget(store: LedgerReads, word: str | None, *, latest: bool = False) -> str:
    """Return the id of a budget. *word* is ``wallet``, an id or its beginning, ``id=ID``, or a session's or budget's name.

    None is the last session. Children do not count if a run has the name, because an agent names them. Raises
    ``ConfigError`` if there is none, and, unless the *latest* is meant, if several have the word as name or id.
    """
    if word is not None and not isinstance(word, str):
        raise ConfigError(f"session: {word!r:.60} is no name or id; write text, such as 'wallet'")
    if word == WALLET:
        if not store.path(WALLET):
            raise ConfigError(
                "ledger: it has no wallet yet; an agent makes it, or: x402guard budget set wallet AMOUNT --new"
            )
        return word
    if word is None:
        found = _last_run(store)
    else:
        said = word.removeprefix(_BY_ID)
        known = [node for node in store.named(said, _MOST_COMPARED) if node.kind in _NAMED and node.id != WALLET]
        found = [node for node in known if said in (node.id, word)]
        if not found and len(said) >= _LEAST_OF_AN_ID:
            some = store.fitting(said, _MOST_COMPARED)
            found = [node for node in some if node.kind in _NAMED and node.id.startswith(said)]
            latest = latest and len(found) == 1  # the beginning of two ids means none of them
    runs = [node for node in found if "/" not in node.id] or found
    if not runs:
        if word is None:
            raise ConfigError("session: no session has run in this ledger yet; the wallet itself is: wallet")
        from difflib import get_close_matches  # only for a mistake

        last = [node for node in store.newest(_MOST_COMPARED) if node.kind in _NAMED and node.id != WALLET]
        names = [*dict.fromkeys(node.name for node in last)]
        near = get_close_matches(word, [WALLET, *names], 1)
        hint = f"did you mean {near[0]!r}?" if near else f"latest: {', '.join(names[-5:]) or 'none'}"
        raise ConfigError(f"session: there is no session {word!r:.60} in this ledger; {hint}")
    # Of sessions with one name the last is meant; another one's id, or a customer's name, is never theirs to take.
    if len(runs) > 1 and not (latest and all(node.kind is NodeKind.SESSION and node.id != word for node in runs)):
        listed = "; ".join(f"{node.kind} {node.name!r} by {shlex.quote(_BY_ID + node.id)}" for node in runs[-5:])
        raise ConfigError(f"session: {word!r} may mean {len(runs)} of them; name one: {listed}")
    return runs[-1].id


_LEAST_OF_AN_ID: Final = 4


def _last_run(store: LedgerReads) -> list[Node]:
    """Return the last session that is below no other one, or the last one at all; nothing if there is none."""
    last: list[Node] = []
    for some in _from_the_last(store):
        sessions = [node for node in some if node.kind is NodeKind.SESSION]
        runs = [node for node in sessions if "/" not in node.id]
        if runs:
            return runs[-1:]
        last = last or sessions[-1:]
    return last


def _from_the_last(store: LedgerReads) -> Iterator[Sequence[Node]]:
    """Yield all budgets in parts, the newest part first, each oldest first."""
    skip = 0
    while some := store.newest(_AT_ONCE, skip):
        yield some
        skip += len(some)


def last_nodes(
    store: LedgerReads, fits: Callable[[Node], bool], most: int | None, above: str | None
) -> list[tuple[Node, dict[str, Node]]]:
    """Return the last *most* budgets that fit (None: all), oldest first, and the path of each; only those below *above*."""
    now_ms = store.now_ms()
    if most is None:
        nodes = nodes_of(store) if above is None else nodes_of(store, above)
        inside = nodes if above is None else {node.id for node in below(nodes, above)}
        return [(node, nodes) for node in nodes.values() if node.id in inside and node.kind in _NAMED and fits(node)]
    found: list[tuple[Node, dict[str, Node]]] = []
    for some in _from_the_last(store) if most else ():
        for node in reversed(some):
            if node.kind not in _NAMED or not fits(rolled(node, now_ms)):
                continue
            path = path_of(store, node.id)
            if (above is None or above in path) and node.id in path:
                found.append((path[node.id], path))
            if len(found) == most:
                return found[::-1]
    return found[::-1]


def outstanding_of(store: LedgerStore, node_id: str) -> list[Hold]:
    """Return the live holds of a node and its descendants, without token reservations, oldest first."""
    inside = {node.id for node in below(nodes_of(store, node_id), node_id)}
    return [hold for hold in store.outstanding() if hold.kind is not HoldKind.TOKENS and hold.node_id in inside]


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
        if node.kind is NodeKind.SESSION and node.name == name and node.id != but and has_ended(node, gone)
    )
    if len(costs) < LEAST_SESSIONS:
        return Prediction(name, len(costs))
    return Prediction(name, len(costs), *(nanos_to_decimal(_nearest_rank(costs, percent)) for percent in (50, 95)))


def has_ended(node: Node, gone: Collection[str], before_ms: int = OVER) -> bool:
    """True for a session that was closed, or that only instances have open which are *gone*.

    And for a task that nothing has open, if its time was over *before_ms* (unix milliseconds).
    """
    is_left = all(opener.rpartition("#")[0] in gone for opener in node.openers)
    over = bool(node.openers) or (node.until_ms is not None and node.until_ms <= before_ms)
    return node.closed_ms is not None or (is_left and over)


ABANDONED: Final = "abandoned"
"""The standing of an open session whose processes have all ended without closing it. Its id opens it again."""

STANDINGS: Final = (*map(str, NodeState), ABANDONED)


def standing(node: Node, gone: Collection[str]) -> str:
    """Return the state of a node as it is shown: one of ``STANDINGS``. *gone* are instances known to have ended."""
    return ABANDONED if node.state is NodeState.OPEN and has_ended(node, gone) else str(node.state)


Gone = Callable[[LedgerReads], Collection[str]]
"""Returns the instances that are known to have ended."""


def _nearest_rank(ordered: list[int], percent: int) -> int:
    return ordered[-(-len(ordered) * percent // 100) - 1]


def prediction_of(store: LedgerStore, name: str, *, but: str | None = None) -> Prediction:
    """Return the prediction from the last ``MOST_SESSIONS`` sessions of *name*, without the session of id *but*."""
    return predict(store.named(name, MOST_SESSIONS), name, gone=ended_instances(store), but=but)


def ended_instances(store: LedgerReads) -> set[str]:
    """Return the instances whose row says that they have ended, or that are silent."""
    rows = store.marks("instance", "")
    return {key for key, row in rows.items() if row["ended"]} | silent_instances(rows, store.now_ms())


_USUAL_LIFETIME_S: Final = 300
"""How long a signature lives at most by default, where no process that is known says more."""


def compared_of(ledger: LedgerReads) -> Compared:
    """Return what is known of lost signatures."""
    lives = [int(row.get("lifetime_s", 0)) for row in ledger.marks("instance", "").values()]
    finals: dict[str, int] = {}
    for key, row in ledger.marks("scan", "").items():
        # Its own time as well: the clock of a server that has taken over may be behind the chain's.
        network, unix = key.partition("/")[0], min(int(row.get("unix", 0)), int(row["at_ms"]) // 1000)
        finals[network] = min(unix, finals.get(network, unix))
    kind, name = PAYER_MARK
    return Compared(max([_USUAL_LIFETIME_S, *lives]), finals, signs=name in ledger.marks(kind, name))

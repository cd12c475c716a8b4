"""Defines the view: the rows that one change may read, and the changes it made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from typing import Any, Final, Literal, NoReturn, TypeVar

from msgspec import Struct, to_builtins
from msgspec.json import Encoder
from msgspec.structs import replace

from x402guard.errors import IllegalTransition
from x402guard.kernel.change_set import Before, ChangeSet, Mark, MarkKey, Step
from x402guard.kernel.proofs import ByOwner, Proof, Unsigned
from x402guard.kernel.rows import Entry, Hold, HoldState, Nanos, Node, entry_hash, lends
from x402guard.kernel.windows import rolled
from x402guard.money import nanos_to_decimal

R = TypeVar("R")

Covered = tuple[str, int, int, str, str | None, int, int, int, int, str, str]
"""The fields of an entry that its hash covers, in their order: all but the hash."""

_ENCODED: Final = Encoder(order="sorted").encode


def _as_text(facts: Mapping[str, Any]) -> str:
    """Return facts as compact JSON. Lone surrogates are replaced: no file can store them, and an entry must be written."""
    try:
        return _ENCODED(facts).decode()
    except UnicodeEncodeError:
        text = json.dumps(to_builtins(facts), separators=(",", ":"), sort_keys=True, ensure_ascii=False)
        return text.encode("utf-8", "replace").decode()


class Scope(Struct, frozen=True):
    """The rows that a change may read. The store locks and loads these, and no others.

    Attributes:
        nodes: node ids; all their ancestors are included.
        holds: hold ids; the node of each and its ancestors are included.
        purchase: a purchase key; the holds of that key are included that are live or captured, and whose answer was not
            handed over.
        named: True if the purchase has a name of the caller's: the last hold of that key is included whose answer was
            handed over.
        marks: keys of marks.
        out: (network, token): the sum of their payments is included that are live, and that no server has claimed.
        sweep: the maximum number of payment holds to include whose outcome a chain may prove, longest unchecked first:
            HELD ones that are noted or older than ``flight_ms`` (milliseconds), and ones captured on a claim or on a
            block that is not final yet.
        live_first: see ``sweep``; HELD ones first, because they take budget.
        flight_ms: see ``sweep``.
        durable: True if the change restrains (authorize, trip, a lower limit, an upward correction) and therefore must
            survive a power cut; False if it only frees or notes.
    """

    nodes: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    purchase: str | None = None
    named: bool = False
    marks: tuple[MarkKey, ...] = ()
    out: tuple[tuple[str, str], ...] = ()
    sweep: int = 0
    live_first: bool = False
    flight_ms: int = 0
    durable: bool = False


class Loaded:
    """The rows of a scope, and what a room may ask of them.

    Attributes:
        before: the rows, for the check. *marks*: all marks that were asked for, and exist.
        clock_ms: the store's clock, in unix milliseconds. *ahead_ms*: how far the machine's clock is ahead of it.
        now_ms: the store's clock, and never below the last time of a node that was loaded.
        purchase, bought, due, sweep: ids of the holds that the scope asks for; see ``Scope``.
        out: (network, token) → nano-dollars of its live payments that no server has claimed.
        keeps_idle: True if sessions keep idle budget in this store.
        forget: hold → ``Unsigned``, or None: see ``kernel.released``.
    """

    def __init__(self, before: Before, clock_ms: int, ahead_ms: int = 0) -> None:
        self.before = before
        self.marks: Mapping[MarkKey, Mark] = {}
        self.clock_ms, self.ahead_ms = clock_ms, ahead_ms
        self.now_ms = clock_ms
        for node in before.nodes.values():
            if node is not None and node.last_ms > self.now_ms:
                self.now_ms = node.last_ms
        self.purchase: tuple[str, ...] = ()
        self.bought: str | None = None
        self.due: tuple[str, ...] = ()
        self.sweep: tuple[str, ...] = ()
        self.out: dict[tuple[str, str], int] = {}
        self._busy: Callable[[], Iterable[Node]] | None = None
        self.keeps_idle = False
        self.forget: Callable[[str], Unsigned | None] = _forgets_nothing

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
        self._busy, self.keeps_idle = find, find is not None


def _forgets_nothing(hold_id: str) -> None:
    del hold_id


Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to the owner, sent once, after the change is in the ledger.

    Attributes:
        kind: the stable name of the event; ``docs/reference/notices.md`` lists them.
        severity: ``info``, ``warning``, or ``critical`` if an agent is stopped or money may be lost.
        message: one sentence.
        session: the id of the session or budget that it is about, or "".
        amount: dollars, or None.
        limit: dollars that *amount* is compared with, or None.
        rule: the rule or reason, as in a refusal or a report, or "".
        time: unix seconds.
        facts: more facts as plain values; amounts in decimal dollars.
        logged_only: True if it is a log record alone, and no function and no webhook gets it.
    """

    kind: str
    severity: Severity
    message: str
    session: str = ""
    amount: Decimal | None = None
    limit: Decimal | None = None
    rule: str = ""
    time: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    logged_only: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the notice as plain values for JSON; amounts are decimal strings in dollars."""
        told = {name: getattr(self, name) for name in _TOLD} | {"facts": dict(self.facts)}
        return {name: str(value) if isinstance(value, Decimal) else value for name, value in told.items()}


_TOLD: Final = ("kind", "severity", "message", "session", "amount", "limit", "rule", "time")

BY_WINDOW: Final = "the end of its window"
"""What a journal names in place of an owner, where a trip by an overshoot ends with the window."""


class _Nodes(dict[str, Node]):
    def __missing__(self, node_id: str) -> NoReturn:
        raise IllegalTransition(f"node {node_id!r} is not in the scope of this change")


class LedgerView:
    """A snapshot of the rows in a ``Scope``, and the changes made to it.

    A view serves one run of one change: a store may discard it and run the change again on a new view. The attribute
    ``now_ms`` is the store's clock in unix milliseconds, and never below the last timestamp of a node in view.

    Attributes:
        node: id → a node in view; raises ``IllegalTransition`` for one outside the scope.
        hold: id → a hold in view, or None.
        mark: key → a mark of the scope, or None if it does not exist.
        unsigned: hold → the kernel's proof that it was never given to the signer and never will be, or None.
        clock_ms, ahead_ms: the store's clock, and how far the machine's clock is ahead of it; 0 if it is believed.
        purchase, bought, due, sweep, out: see ``kernel.load.Loaded``.
        killed_by: the path of the existing kill file, or ""; set by the driver that runs the change.
        shadow: True if the owner's rules refuse and trip nothing; set by the driver that runs the change.
        is_logged: False if no log and no observer takes notices of ``info`` for it alone; set by the driver that runs the change.
        excused: (rule, reason) of what the rules would have refused in this change.
        recheck: True if the chain has to be asked soon, in the background, about what this change has written.
    """

    killed_by = ""
    shadow = False
    is_logged = True
    recheck = False

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.clock_ms, self.ahead_ms, self.now_ms = loaded.clock_ms, loaded.ahead_ms, loaded.now_ms
        self._paths: dict[str, tuple[str, ...]] = {}
        self._known_paths: dict[str, tuple[Node, ...]] = {}  # until a node changes
        self._nodes = _Nodes()
        self._holds = {hold.id: hold for hold in loaded.before.holds.values() if hold is not None}
        self._marks = dict(loaded.marks)
        self.node: Callable[[str], Node] = self._nodes.__getitem__
        self.hold: Callable[[str], Hold | None] = self._holds.get
        self.mark: Callable[[MarkKey], Mapping[str, Any] | None] = self._marks.get
        self.unsigned = loaded.forget
        self.purchase, self.bought, self.due, self.sweep = loaded.purchase, loaded.bought, loaded.due, loaded.sweep
        self.out = loaded.out
        self.entries: list[Entry] = []
        self.notices: list[Notice] = []
        self.steps: list[Step] = []
        self.owner: list[ByOwner] = []
        self.changed_nodes: set[str] = set()
        self.changed_holds: set[str] = set()
        self.changed_marks: set[MarkKey] = set()
        self.excused: list[tuple[str, str]] = []
        for node in loaded.before.nodes.values():
            if node is not None:
                self._nodes[node.id] = node
                if node.window is not None:
                    self._roll(node)

    def _roll(self, node: Node) -> None:
        # Windows follow the clock and not the last timestamp, which may come from a clock that once ran ahead.
        now = self._nodes[node.id] = rolled(node, self.clock_ms)
        if now.state is not node.state:
            self.record(node.id, "reset", facts={"by": BY_WINDOW, "word": node.terminated_by})

    @classmethod
    def of_marks(cls, now_ms: int, marks: Mapping[MarkKey, Mapping[str, Any]], *, ahead_ms: int = 0) -> LedgerView:
        """Return a view of some marks alone, at a time in unix milliseconds: for what only looks."""
        loaded = Loaded(Before({}, {}, {}), now_ms, ahead_ms)
        loaded.marks = marks
        return cls(loaded)

    def change_set(self, *, durable: bool) -> ChangeSet:
        """Return what the change proposes. *durable*: the scope that it ran in survives a power cut."""
        return ChangeSet(
            nodes=tuple(self.node_rows()),
            holds=tuple(map(self._holds.__getitem__, sorted(self.changed_holds))),
            marks=tuple([(key, self._marks[key]) for key in sorted(self.changed_marks)]),
            entries=tuple(self.entries),
            steps=tuple(self.steps),
            owner=tuple(self.owner),
            durable=durable,
        )

    @property
    def now_unix(self) -> int:
        """The store's clock in whole unix seconds."""
        return self.now_ms // 1000

    @property
    def behind_ms(self) -> int:
        """How far the clock is behind the last timestamp in view, in milliseconds: it ran ahead or was set back."""
        return self.now_ms - self.clock_ms

    def has_node(self, node_id: str) -> bool:
        """True if the node exists and is in view."""
        return node_id in self._nodes

    def nodes(self) -> tuple[Node, ...]:
        """Return every node in view, with its changes."""
        return tuple(self._nodes.values())

    def path(self, node_id: str) -> tuple[Node, ...]:
        """Return the node and its ancestors, root last. Raises ``IllegalTransition`` for a node outside the scope."""
        known = self._known_paths.get(node_id)
        if known is None:
            nodes = self._nodes
            known = self._known_paths[node_id] = tuple([nodes[each] for each in self._ids(node_id)])
        return known

    def _ids(self, node_id: str) -> tuple[str, ...]:
        ids = self._paths.get(node_id)
        if ids is None:
            found: list[str] = []
            wanted: str | None = node_id
            while wanted is not None:
                found.append(wanted)
                wanted = self._nodes[wanted].parent_id
            ids = self._paths[node_id] = tuple(found)  # no node changes its parent
        return ids

    def lends(self, node_id: str) -> bool:
        """True if the children of a node keep idle budget in this store."""
        return self._loaded.keeps_idle and lends(self.path(node_id))

    def busy_below(self, node_id: str) -> list[Node]:
        """Return the nodes below a lending one that keep idle budget of it or hold something, in the order of ids."""
        for node in self._loaded.busy():
            self._roll(node)
        self._known_paths.clear()
        self.now_ms = max(self.now_ms, self._loaded.now_ms)
        busy = [n for n in self._nodes.values() if n.id != node_id and (n.idle or n.live) and self._borrows(n)]
        return sorted((n for n in busy if node_id in (a.id for a in self.path(n.id))), key=lambda n: n.id)

    def _borrows(self, node: Node) -> bool:
        return node.parent_id is not None and node.parent_id in self._nodes and self.lends(node.parent_id)

    def known_hold(self, hold_id: str) -> Hold:
        """Return a hold in view. Raises ``IllegalTransition`` for one outside the scope."""
        hold = self._holds.get(hold_id)
        if hold is None:
            raise IllegalTransition(f"hold {hold_id} is not in the scope of this change")
        return hold

    def put_mark(self, key: MarkKey, value: Mapping[str, Any]) -> None:
        """Write a mark. Writing an equal value is no change."""
        if self._marks.get(key) != value:
            self._marks[key] = value
            self.changed_marks.add(key)

    def put_hold(self, hold: Hold) -> None:
        """Write a hold. Its state and its amounts change by ``take_step`` alone."""
        self._holds[hold.id] = hold
        self.changed_holds.add(hold.id)

    def take_step(self, name: str, hold: Hold, proof: Proof | None = None) -> None:
        """Write a hold as it is after a step of the kernel's table, with the proof that the step needs, if any."""
        self.steps.append(Step(hold.id, name, hold.state, hold.captured, hold.closed_ms, proof))
        self.put_hold(hold)

    def prove(self, command: ByOwner) -> None:
        """Add the owner's command that this change carries out."""
        self.owner.append(command)

    def put_node(self, node: Node) -> None:
        """Write a node's own fields. Only ``record`` changes balances."""
        self._nodes[node.id] = node
        self._known_paths.clear()
        self.changed_nodes.add(node.id)

    def record(
        self,
        node_id: str,
        event: str,
        *,
        hold_id: str | None = None,
        captured: int = 0,
        held: int = 0,
        granted_in: int = 0,
        granted_out: int = 0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Append an entry to a node's journal and add its amounts (nano-dollars) to the node's balances.

        Raises ``IllegalTransition`` if a balance would become negative, or for a node outside the scope.
        """
        node = self._nodes[node_id]
        data = _as_text(facts) if facts else "{}"
        seq, at_ms = node.seq + 1, self.now_ms
        head = self._add(
            (node_id, seq, at_ms, event, hold_id, captured, held, granted_in, granted_out, data, node.head)
        )
        after = replace(
            node,
            captured=node.captured + captured,
            held=node.held + held,
            granted_in=node.granted_in + granted_in,
            granted_out=node.granted_out + granted_out,
            seq=seq,
            head=head,
            last_ms=at_ms,
            live=node.live + held,
        )
        if min(after.captured, after.held, after.granted_in, after.granted_out) < 0:
            self.entries.pop()
            raise IllegalTransition(f"{event} would leave node {node_id} with a negative balance")
        self._nodes[node_id] = after
        self.changed_nodes.add(node_id)
        above = node.parent_id if held else None
        while above is not None and not (self._loaded.keeps_idle and self.lends(above)):
            each = self._nodes[above]
            self._nodes[above] = replace(each, live=each.live + held)
            self.changed_nodes.add(above)
            above = each.parent_id
        self._known_paths.clear()

    def draw(self, hold: Hold, facts: Mapping[str, Any], used: Mapping[str, Any] | None = None) -> None:
        """Write the entry of a new hold, and of what each node of its path draws for it, as ``record`` would one by one.

        For a path on which each node has drawn what it uses. All of it grows, so no balance becomes negative. Given the
        facts of its capture, *used*, the hold is captured in full at once, as ``take`` would.
        """
        path, amount, at_ms = self.path(hold.node_id), hold.amount, self.now_ms
        leaf, live = path[0], amount if used is None else 0
        seq = leaf.seq + 1
        head = self._add((leaf.id, seq, at_ms, "authorize", hold.id, 0, amount, 0, 0, _as_text(facts), leaf.head))
        last = []
        for node, above in pairwise(path):
            data = _as_text({"child": node.id, "amount": amount})
            seq += 1
            last.append((seq, self._add((node.id, seq, at_ms, "grant", None, 0, 0, amount, 0, data, head))))
            seq = above.seq + 1
            head = self._add((above.id, seq, at_ms, "grant", None, 0, 0, 0, amount, data, above.head))
        last.append((seq, head))
        if used is not None:
            seq, head = last[0][0] + 1, last[0][1]
            covered = (leaf.id, seq, at_ms, "capture", hold.id, amount, -amount, 0, 0, _as_text(used), head)
            last[0] = seq, self._add(covered)
        for node, (seq, head) in zip(path, last, strict=True):
            own, out = (amount, 0) if node is leaf else (0, amount)
            self._nodes[node.id] = replace(
                node, captured=node.captured + (0 if live else own), held=node.held + (own if live else 0),
                granted_out=node.granted_out + out, granted_in=node.granted_in + (amount if node.parent_id else 0),
                seq=seq, head=head, last_ms=at_ms, live=node.live + live,
            )  # fmt: skip
            self.changed_nodes.add(node.id)
        self._known_paths.clear()

    def take(self, hold: Hold, captured: int, facts: Mapping[str, Any]) -> None:
        """Write the entry of a live hold of which no more than it holds is captured (nano-dollars), as ``record`` would.

        What was drawn for it is used, and each node of its path gives the rest back. For a path as in ``draw``.
        """
        path, amount, at_ms = self.path(hold.node_id), hold.amount, self.now_ms
        leaf, rest = path[0], amount - captured
        seq, data = leaf.seq + 1, _as_text(facts)
        head = self._add((leaf.id, seq, at_ms, "capture", hold.id, captured, -amount, 0, 0, data, leaf.head))
        last = {leaf.id: (seq, head)}
        for node, above in pairwise(path) if rest else ():
            data = _as_text({"child": node.id, "amount": rest})
            head = self._add((node.id, seq + 1, at_ms, "return", None, 0, 0, -rest, 0, data, head))
            last[node.id], seq = (seq + 1, head), above.seq + 1
            head = self._add((above.id, seq, at_ms, "return", None, 0, 0, 0, -rest, data, above.head))
            last[above.id] = seq, head
        for node in path:
            seq, head = last.get(node.id, (node.seq, node.head))
            last_ms = at_ms if node.id in last else node.last_ms
            own, used, out = (amount, captured, 0) if node is leaf else (0, 0, rest)
            self._nodes[node.id] = replace(
                node, captured=node.captured + used, held=node.held - own, granted_out=node.granted_out - out,
                granted_in=node.granted_in - (rest if node.parent_id else 0),
                seq=seq, head=head, last_ms=last_ms, live=node.live - amount,
            )  # fmt: skip
            self.changed_nodes.add(node.id)
        self._known_paths.clear()

    def _add(self, covered: Covered) -> str:
        """Append an entry with all that its hash covers, and return that."""
        head = entry_hash(covered)
        self.entries.append(Entry(*covered, head))
        return head

    @property
    def keeps_idle(self) -> bool:
        """True in a store where nodes keep idle budget."""
        return self._loaded.keeps_idle

    def tell(
        self,
        kind: str,
        severity: Severity,
        message: str,
        *,
        session: str = "",
        amount: int | None = None,
        limit: int | None = None,
        rule: str = "",
        facts: Mapping[str, Any] | None = None,
        logged_only: bool = False,
    ) -> None:
        """Add a notice to those that are sent after this change is in the ledger. Amounts are in nano-dollars."""
        if logged_only and severity == "info" and not self.is_logged:
            return
        self.notices.append(
            Notice(
                kind=kind,
                severity=severity,
                message=message,
                session=session,
                amount=None if amount is None else nanos_to_decimal(Nanos(amount)),
                limit=None if limit is None else nanos_to_decimal(Nanos(limit)),
                rule=rule,
                time=self.now_ms / 1000,
                facts=facts or {},
                logged_only=logged_only,
            )
        )

    def live(self, hold_ids: Iterable[str]) -> tuple[Hold, ...]:
        """Return the holds with these ids that are in view and still HELD."""
        found = []
        for hold_id in hold_ids:
            hold = self._holds.get(hold_id)
            if hold is not None and hold.state is HoldState.HELD:
                found.append(hold)
        return tuple(found)

    def node_rows(self) -> list[Node]:
        """Return the nodes that changed, parents before children."""
        if len(self.changed_nodes) < 2:
            return [self._nodes[node_id] for node_id in self.changed_nodes]
        rows = [(len(self._ids(node_id)), node_id) for node_id in self.changed_nodes]
        return [self._nodes[node_id] for _, node_id in sorted(rows)]


Change = Callable[[LedgerView], R]
"""A pure function of a view, with all decisions in it. It reads and writes the view and returns the caller's result."""

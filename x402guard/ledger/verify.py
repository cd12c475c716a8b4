"""Verifies the ledger: the journal's hash chain, and every balance, hold, limit and trip against the journal.

It finds accidents and edits. It cannot find a complete forgery, because a process that can write the ledger's file can
also write a new journal. An earlier anchor finds one: the root of a Merkle tree over the last entry of every journal
(RFC 6962, section 2.1: the tree and its prefixes). And the chain cannot be forged: ``reconcile`` compares the ledger with
what left the wallet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from x402guard.errors import LedgerUnavailable
from x402guard.frozen import readable
from x402guard.kernel.leaving import Said
from x402guard.kernel.rows import (
    WALLET,
    Delivery,
    Entry,
    Hold,
    HoldKind,
    HoldState,
    Node,
    NodeKind,
    NodeState,
    entry_hash,
)
from x402guard.kernel.windows import rolled
from x402guard.ledger.lines import HoldLine, fold_holds
from x402guard.ledger.owner import CLOCK_MARK, MOST_AHEAD_MS
from x402guard.ledger.purchases import ANSWER
from x402guard.ledger.store import Audited, LedgerReads, LedgerStore
from x402guard.ledger.tree import borrows, lends, path

MOST_PROBLEMS = 100
_LEAF: Final = b"\x00"
_BRANCH: Final = b"\x01"


class HoldRow(Struct, frozen=True):
    """The parts of a hold's row to verify. ``amount`` (the ceiling) and ``captured`` are in nano-dollars or tokens."""

    id: str
    node_id: str
    state: str
    amount: int
    captured: int
    kind: str
    deadline_unix: int
    delivery: str

    @classmethod
    def of(cls, hold: Hold) -> HoldRow:
        """Return them of a hold."""
        return cls(
            hold.id, hold.node_id, hold.state, hold.amount, hold.captured, hold.kind, hold.deadline_unix, hold.delivery
        )

    @property
    def held(self) -> int:
        """The amount held now."""
        return self.amount if self.state == HoldState.HELD else 0


@dataclass(slots=True)
class Balances:
    """The sums of one node's entries, and the number of its last entry."""

    captured: int = 0
    held: int = 0
    granted_in: int = 0
    granted_out: int = 0
    seq: int = 0


def verify_balances(
    nodes: Iterable[Node],
    sums: Mapping[str, Balances],
    held: Mapping[str, int],
    *,
    keeps_idle: bool = False,
    drawn: Mapping[str, int] | None = None,
) -> list[str]:
    """Return the differences between nodes, the sums of their journals, and the amounts held by their hold rows.

    *held* maps node ids to the amounts held. *keeps_idle*: nodes keep idle budget in this store. *drawn* maps node ids to
    what budgets below them that are not among *nodes* have drawn, and those hold nothing. Returns at most
    ``MOST_PROBLEMS`` sentences.
    """
    by_id = {node.id: node for node in nodes}
    problems = [f"budget {stray!r}: it has journal entries but no row" for stray in sums.keys() - by_id.keys()]
    live, granted = dict.fromkeys(by_id, 0), dict.fromkeys(by_id, 0) | dict(drawn or {})
    for node in by_id.values():
        total = sums.get(node.id, Balances())
        for name in ("captured", "held", "granted_in", "granted_out", "seq"):
            said, counted = getattr(node, name), getattr(total, name)
            if said != counted:
                problems.append(f"budget {node.id!r}: its row has {name} = {said}, but its journal sums to {counted}")
        problems += _misplaced(by_id, node)
        if node.window is None and node.past:  # what is past does not count against the limit
            problems.append(f"budget {node.id!r}: its row has past = {node.past}, but it has no window")
        if node.held != held.get(node.id, 0):
            problems.append(
                f"budget {node.id!r}: its row has held = {node.held}, but its holds sum to {held.get(node.id, 0)}"
            )
        try:
            climbed = path(by_id, node.id)
        except LedgerUnavailable:
            problems.append(f"budget {node.id!r}: it is below itself")
            continue
        for above in climbed:
            if above is not node and keeps_idle and lends(by_id, above.id):
                break
            live[above.id] += node.held
        if node.parent_id in granted:
            granted[node.parent_id] += node.granted_in
        idle = node.granted_in - node.used
        if node.parent_id is not None and idle and not (idle > 0 and keeps_idle and _may_keep(by_id, node)):
            problems.append(
                f"budget {node.id!r}: it uses {node.used}, but it has drawn {node.granted_in} from its parent"
            )
    problems += [
        f"budget {node.id!r}: its row has granted_out = {node.granted_out}, but the nodes below it have drawn {granted[node.id]}"
        for node in by_id.values()
        if node.granted_out != granted[node.id]
    ]
    problems += [
        f"budget {node.id!r}: its row has live = {node.live}, but the amounts held below it sum to {live[node.id]}"
        for node in by_id.values()
        if node.live != live[node.id]
    ]
    return problems[:MOST_PROBLEMS]


def _misplaced(nodes: Mapping[str, Node], node: Node) -> Iterator[str]:
    """Yield that a budget is not the wallet's, that no entry has opened it, and that it keeps less than nothing."""
    above = nodes.get(node.parent_id or "")
    if (node.kind is NodeKind.WALLET) != (node.id == WALLET):
        yield f"budget {node.id!r}: its row has kind = {node.kind}, and the wallet is {WALLET!r}"
    elif node.parent_id is None and node.kind not in (NodeKind.WALLET, NodeKind.TOKENS):
        yield f"budget {node.id!r}: it is below no budget"
    if above is not None and above.kind is NodeKind.TOKENS:
        yield f"budget {node.id!r}: it is below {above.id!r}, which counts tokens"
    if not node.seq:
        yield f"budget {node.id!r}: it has a row but no journal entry"
    if node.reserve < 0:
        yield f"budget {node.id!r}: its row has reserve = {node.reserve}"


def _may_keep(nodes: Mapping[str, Node], node: Node) -> bool:
    return node.state is NodeState.OPEN and borrows(nodes, node)


@readable
class Checked(Said, frozen=True):
    """What a node's journal says up to an entry that was checked. A later check begins there.

    Attributes:
        states_limit, limit: whether the journal has stated a limit, and which, in nano-dollars; None for none.
        tripped: the journal ends with a trip that was not reset.
        live: hold id → what it holds then.
    """

    states_limit: bool = False
    limit: int | None = None
    tripped: bool = False
    live: dict[str, int] = field(default_factory=dict)

    def then(self, entry: Entry) -> Checked:
        """Return what the journal says with one more entry."""
        limited = {"open": "limit", "limit": "to"}.get(entry.event)
        trips = {"trip": True, "reset": False}.get(entry.event, self.tripped)
        return Checked(
            entry.seq,
            entry.hash,
            self.captured + entry.captured,
            self.held + entry.held,
            self.granted_in + entry.granted_in,
            self.granted_out + entry.granted_out,
            self.states_limit or limited is not None,
            self.limit if limited is None else entry.facts().get(limited),
            trips,
            self.live,
        )


UNREAD: Final = Checked()


def verify_journal(
    nodes: Iterable[Node],
    entries: Iterable[Entry],
    holds: Iterable[HoldRow] | None,
    known: Mapping[str, Checked] | None = None,
    *,
    keeps_idle: bool = False,
) -> tuple[list[str], dict[str, Checked]]:
    """Return the faults in the journals, at most ``MOST_PROBLEMS`` sentences, and what each journal says then.

    The faults are in *entries* (in order within each node), or in rows of nodes and *holds* that contradict them.
    *known* is what was checked before: *entries* go on from there, and *holds* are those that were live then, that they
    authorize or that are live now; None if an end of theirs may be missing. The row of a node is compared if its entries
    are there to the end. *keeps_idle*: nodes keep idle budget, so that a lender's grants name entries of the others.
    """
    by_id = {node.id: node for node in nodes}
    journals = dict(known or {})
    amounts = {hold_id: (node_id, held, 0) for node_id, said in journals.items() for hold_id, held in said.live.items()}
    bindings = _Bindings() if keeps_idle else None
    stated = _Stated()
    problems = _walk(entries, journals, amounts, bindings, stated)
    problems += [] if bindings is None else bindings.broken(known or {})
    for node in by_id.values():
        said = journals.get(node.id, UNREAD)
        if known is not None and said.seq < node.seq:
            continue
        if (node.seq, node.head) != (said.seq, said.head):
            problems.append(
                f"budget {node.id!r}: its row ends with entry {node.seq}, but its journal ends with entry {said.seq} or another hash"
            )
        if said.states_limit and node.limit != said.limit:
            problems.append(f"budget {node.id!r}: its row has limit = {node.limit}, but its journal says {said.limit}")
        if (node.state is NodeState.TRIPPED) != said.tripped:
            problems.append(f"budget {node.id!r}: its row has state = {node.state}, but its journal says otherwise")
    rows = {row.id: row for row in holds or ()}
    problems += [*stated.differing_budgets(by_id), *stated.differing_holds(rows)]
    for hold_id, (node_id, held, captured) in amounts.items() if holds is not None else ():
        row = rows.pop(hold_id, None)
        if row is None:
            problems.append(f"hold {hold_id}: it has journal entries but no row")
        elif (row.node_id, row.held, row.captured) != (node_id, held, captured):
            problems.append(
                f"hold {hold_id}: its row is {row.state} with {row.captured} captured, but the journal says otherwise"
            )
    problems += [f"hold {hold_id}: it has a row but no journal entry" for hold_id in rows]
    live: dict[str, dict[str, int]] = {node_id: {} for node_id in journals}
    for hold_id, (node_id, held, _) in amounts.items():
        if held:
            live[node_id][hold_id] = held
    return problems[:MOST_PROBLEMS], {node_id: replace(said, live=live[node_id]) for node_id, said in journals.items()}


def verify_windows(store: LedgerStore) -> list[str]:
    """Return the budgets whose window is not the one of their journal, or counts less than it, a sentence each.

    What a window counts is not compared where the times of captures may be wrong: in one that begins within a day and
    two hours from now, and up to the last time that a clock had gone ahead to when the owner accepted the right one.
    Raises ``LedgerUnavailable`` if a file of archived sessions is missing.
    """
    with store.at_one_moment() as ledger:
        now_ms, faults = ledger.now_ms(), []
        for node in ledger.nodes():
            try:
                fault = "" if node.window is None else _window_fault(ledger, rolled(node, now_ms), now_ms)
            except (ValueError, KeyError, TypeError, AttributeError) as error:  # facts of another shape
                fault = f"has a window, and an entry that it depends on cannot be read: {error}"
            faults += [f"budget {node.id!r}: its row {fault}"] if fault else []
        return faults


def _wrong_until_ms(ledger: LedgerReads) -> int:
    """Return the last time in the journal, in unix milliseconds, when the owner accepted a clock that was behind it; 0."""
    if not ledger.marks(*CLOCK_MARK):
        return 0
    accepted = [entry for entry in ledger.tail(WALLET, 0) if entry.facts().get("name") == "clock_accepted"]
    return max((entry.at_ms for entry in accepted if entry.facts()["ahead_ms"] < 0), default=0)


def _window_fault(ledger: LedgerReads, node: Node, now_ms: int) -> str:
    entries = ledger.entries(node.id, grants=False)
    said = None if node.window is None else (node.window.per, node.window.tz)
    named: tuple[Any, Any] = (None, None)
    set_ms = 0
    for entry in entries:
        if entry.node_id == node.id and entry.event in ("open", "limit") and "per" in (facts := entry.facts()):
            named, set_ms = (facts["per"], facts.get("tz")), entry.at_ms if entry.event == "limit" else 0
    if said != named:
        return f"has the window {said}, but its journal says {named}"
    if node.since_ms > now_ms + MOST_AHEAD_MS:
        return f"has a window that begins in {(node.since_ms - now_ms) // 3_600_000} hours"
    if node.since_ms > now_ms or node.since_ms <= _wrong_until_ms(ledger):
        return ""
    lines = fold_holds(entries).values()
    since_ms = max(node.since_ms, set_ms)  # what was captured before a window was set counts in none
    counted = sum(_in_window(line, since_ms) for line in lines)
    if node.counted < counted:  # an entry has the time of the latest one before it, and its hold that of the clock
        counted = sum(_in_window(line, since_ms) for line in lines if not _closed_before(ledger, line, since_ms))
    return "" if node.counted >= counted else f"counts {node.counted} in its window, but its journal says {counted}"


def _in_window(line: HoldLine, since_ms: int) -> int:
    """Return what one hold counts in a window, at least.

    One of an earlier window that was raised, and then lowered, in this one counts what the rows say: they give back what
    was raised first, as far as the window knows it.
    """
    if line.kind == HoldKind.TOKENS:
        return 0
    if line.closed_ms < since_ms and any(amount < 0 and at_ms >= since_ms for at_ms, amount, _ in line.changes):
        return line.held
    inside = sum(amount for at_ms, amount, _ in line.counted if at_ms >= since_ms)
    return line.held + min(inside, line.captured)


def _closed_before(ledger: LedgerReads, line: HoldLine, since_ms: int) -> bool:
    hold = ledger.hold(line.hold_id)
    return hold is not None and 0 < hold.closed_ms < since_ms <= hold.closed_ms + MOST_AHEAD_MS


class _Bindings:
    """The entries that lenders name in their grants, by node and number, and what these entries are."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, int], str] = {}
        self._found: dict[tuple[str, int], str] = {}

    def see(self, entry: Entry) -> None:
        """Note a grant or a return; a pair that agrees is forgotten."""
        mine, others = self._found, self._named
        key, value = (entry.node_id, entry.seq), entry.hash
        if entry.granted_out:
            facts = entry.facts()
            if "head" not in facts:
                return  # written where nothing is kept idle
            mine, others = others, mine
            key, value = (facts["child"], facts["seq"]), facts["head"]
        if others.get(key) == value:
            del others[key]
        else:
            mine[key] = value

    def broken(self, known: Mapping[str, Checked]) -> list[str]:
        """Return the named entries that are other ones or gone, a sentence each; those that were not read are not."""
        return [
            f"budget {node_id!r}: entry {seq} is another one than the one that a grant was made for"
            for node_id, seq in self._named
            if seq > known.get(node_id, UNREAD).seq
        ]


def verify_opened(node: Node, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a budget's row says otherwise than the *facts* of its journal's first entry.

    A session with another parent would spend what is not the wallet's.
    """
    for name, value in (("kind", str(node.kind)), ("parent", node.parent_id)):
        if value != facts.get(name):
            yield f"budget {node.id!r}: its row has {name} = {value}, but its journal says {facts.get(name)}"


class _Stated:
    """What the entries said of budgets as they were opened, and of holds as they were authorized: it never changes."""

    def __init__(self) -> None:
        self._budgets: dict[str, Mapping[str, Any]] = {}
        self._holds: dict[str, tuple[Any, Any]] = {}
        self._answers: dict[str, Any] = {}

    def see(self, entry: Entry) -> None:
        """Note what an entry says. Raises ``ValueError`` for one whose facts cannot be read."""
        facts = entry.facts()
        if entry.event == "open":
            said = {"kind": facts.get("kind"), "parent": facts.get("parent")}
            self._budgets.setdefault(entry.node_id, said)  # a second one is not the library's
        elif entry.event == "authorize" and entry.hold_id is not None:
            kind = facts.get("kind", _UNSTATED)
            self._holds.setdefault(entry.hold_id, (_KINDS.get(kind, kind), facts.get("deadline", _UNSTATED)))
            if "answer" in facts:  # an earlier version has not written it
                self._answers[entry.hold_id] = _DELIVERIES.get(facts["answer"])
        elif entry.hold_id in self._answers and entry.event in _OF_ANSWERS:
            self._answers[entry.hold_id] = _DELIVERIES.get(facts.get("is", Delivery.OPEN))

    def differing_budgets(self, nodes: Mapping[str, Node]) -> Iterator[str]:
        """Yield the budgets whose rows say something else."""
        for node_id, facts in self._budgets.items():
            if node_id in nodes:
                yield from verify_opened(nodes[node_id], facts)

    def differing_holds(self, rows: Mapping[str, HoldRow]) -> Iterator[str]:
        """Yield the holds whose rows say something else: one with an earlier deadline is freed while it can be taken."""
        for hold_id, (kind, deadline) in self._holds.items():
            row = rows.get(hold_id)
            if row is None:
                continue
            for name, value, said in (("kind", row.kind, kind), ("deadline", row.deadline_unix, deadline)):
                if said is not _UNSTATED and value != said:
                    yield f"hold {hold_id}: its row has {name} = {value}, but its journal says {said}"
        for hold_id, said in self._answers.items():
            row = rows.get(hold_id)
            if row is not None and row.delivery != said:
                yield f"hold {hold_id}: its row says that its answer is {row.delivery}, but its journal says {said}"


_UNSTATED: Final = object()
_DELIVERIES: Final[Mapping[Any, str]] = {str(each): str(each) for each in Delivery}
_OF_ANSWERS: Final = frozenset({"represent", ANSWER})
"""A payment that is presented again has no answer yet."""
_KINDS: Final[Mapping[Any, str]] = {str(kind): str(kind) for kind in HoldKind}
"""One text for all holds of a kind: a ledger has millions of them."""


def _walk(
    entries: Iterable[Entry],
    journals: dict[str, Checked],
    amounts: dict[str, tuple[str, int, int]],
    bindings: _Bindings | None,
    stated: _Stated,
) -> list[str]:
    """Fold the entries into what the journals say, and into hold id → (node, held, captured). Return their faults."""
    problems: list[str] = []
    began = {node_id for node_id, said in journals.items() if said.seq}
    for entry in entries:
        said = journals.get(entry.node_id, UNREAD)
        if entry.seq != said.seq + 1 or entry.previous != said.head:
            problems.append(f"budget {entry.node_id!r}: entry {entry.seq} does not follow entry {said.seq}")
        if entry_hash(astuple(entry)[:-1]) != entry.hash:
            problems.append(f"budget {entry.node_id!r}: entry {entry.seq} was changed after it was written")
        try:
            journals[entry.node_id] = said.then(entry)
            stated.see(entry)
            if bindings is not None and (entry.granted_in or entry.granted_out):
                bindings.see(entry)
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"budget {entry.node_id!r}: entry {entry.seq} cannot be read: {error}")
        earlier = entry.node_id in began and entry.hold_id not in amounts and entry.event != "authorize"
        if entry.hold_id is not None and not earlier and (entry.held or entry.captured or entry.event == "authorize"):
            node_id, held, captured = amounts.get(entry.hold_id, (entry.node_id, 0, 0))
            amounts[entry.hold_id] = (node_id, held + entry.held, captured + entry.captured)
        if len(problems) >= MOST_PROBLEMS:
            break
    return problems


class Head(Struct, frozen=True):
    """The last entry of a budget's journal: the id of the budget, and the entry's number and hash (SHA-256 in hex)."""

    node_id: str
    seq: int
    hash: str


def heads_of(nodes: Iterable[Node]) -> tuple[Head, ...]:
    """Return the heads of all journals, in the order of their ids."""
    return tuple(sorted((Head(node.id, node.seq, node.head) for node in nodes), key=lambda head: head.node_id))


def merkle_root(heads: Sequence[Head]) -> str:
    """Return the root over heads in the order of their ids, as 64 hex digits."""
    level = [_digest(_LEAF, json.dumps([h.node_id, h.seq, h.hash]).encode("ascii")) for h in heads]
    if not level:
        return hashlib.sha256(b"").hexdigest()
    while len(level) > 1:  # an odd one goes up as it is, so the tree is that of the RFC
        pairs = [_digest(_BRANCH, level[i] + level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0].hex()


def _digest(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha256(kind + content).digest()


def differences(anchored: Iterable[Head], heads: Iterable[Head], ledger: Audited, *, archives: bool) -> list[str]:
    """Return what of an anchored ledger is not in the ledger of now, a sentence each.

    *heads* are those of now. Without *archives*, what only the files of archived sessions have is not compared.
    """
    now = {head.node_id: head for head in heads}
    anchored = list(anchored)
    grown = {(each.node_id, each.seq) for each in anchored if each.node_id in now and now[each.node_id].seq > each.seq}
    hashes = ledger.hashes(grown, archives=archives)
    found = []
    for head in anchored:
        later, place = now.get(head.node_id), (head.node_id, head.seq)
        if not archives and place in grown - hashes.keys():
            continue
        if later is None:
            found.append(f"{head.node_id}: its {head.seq} anchored entries are gone")
        elif later.seq < head.seq:
            found.append(f"{head.node_id}: it has {later.seq} entries, and {head.seq} were anchored: an older copy")
        elif (later.hash if later.seq == head.seq else hashes.get(place)) != head.hash:
            found.append(f"{head.node_id}: entry {head.seq} is another one than the one that was anchored")
        if len(found) == MOST_PROBLEMS:
            break
    return found

"""Stores the ledger in this process's memory, for tests and for runs whose ledger need not outlive the process.

Of the sessions that have ended it keeps the last ones. What the others captured stays counted above them.
"""

from __future__ import annotations

import hashlib
import os
import threading
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, Self

from typing_extensions import override

from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.kernel.change_set import ChangeSet, MarkKey
from x402guard.kernel.commit import NAMED
from x402guard.kernel.leaving import Leaving, Said, is_final, leave
from x402guard.kernel.ledger import Clock, Work
from x402guard.kernel.rows import WALLET, Delivery, Entry, Evidence, Hold, HoldKind, HoldState, Node, NodeKind
from x402guard.ledger.evidence import is_unsettled
from x402guard.ledger.store import GRANTS
from x402guard.ledger.token_budget import tokens_node
from x402guard.ledger.tree import below, is_outermost, path, without_idle
from x402guard.ledger.view import Loaded, Scope
from x402guard.stores.memory_rows import MemoryRows
from x402guard.stores.transacts import OPENED, StoreClock, Transacts

_FORKED: Final = "a memory:// ledger belongs to one process; after a fork each process would have a separate budget"


MOST_ENDED: Final = 1_000
"""The default of ``memory_sessions``: how many sessions that have ended a ledger in memory keeps."""

_SESSION, _WALLET, _BUDGET = NodeKind.SESSION, NodeKind.WALLET, NodeKind.BUDGET
_PARTS: Final = (NodeKind.SESSION, NodeKind.SCOPE)
_AT_ONCE: Final = 20
_GRANTS_KEPT: Final = 1_000
_STAY: Final = frozenset({"delegation", "input", "inputs", "wait", "action", "actions"})
"""Marks of what may still be waited for: a session with one of them stays."""
_OF_RUN: Final = _STAY | {
    "agent_steps", "bought", "breaker", "calls", "cycle", "doubted", "llm_estimated", "loop", "loop_refused", "loop_reset",
    "new_payees", "once", "owner_limit", "paid_to", "refusal", "refusals", "refused_what", "spike", "spike_tokens", "state",
    "step", "steps", "streak", "tokens_soft", "unapproved", "velocity",
}  # fmt: skip
"""Marks whose keys begin with the id of a session, or of a part of it."""
_SHOWN: Final = frozenset({"proof", "receipt"})
"""Marks that say which payment a transaction was shown for: of a forgotten one they say that it is another one's."""
_GONE: Final[Mapping[str, Any]] = {"hold": "forgotten"}


class Forgotten:
    """Texts that were forgotten, eight bytes of the hash of each: two with the same are refused alike."""

    def __init__(self) -> None:
        self._known = array("Q")

    def __contains__(self, text: str) -> bool:
        if not self._known:
            return False
        number = _number(text)
        at = bisect_left(self._known, number)
        return at < len(self._known) and self._known[at] == number

    def add(self, text: str) -> None:
        """Note a text, once."""
        if text not in self:
            number = _number(text)
            self._known.insert(bisect_left(self._known, number), number)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


class EndedSessions:
    """Which sessions of some rows have ended, oldest first, and what belongs to each.

    Args:
        rows: the rows of the whole ledger. *journal*: node → number → entry.
        most: how many of them stay, and all whose holds may still change.
        ended_payments: is told which holds are gone.
    """

    def __init__(
        self,
        rows: MemoryRows,
        journal: dict[str, dict[int, Entry]],
        most: int,
        ended_payments: Callable[[Iterable[str]], None],
    ) -> None:
        self._rows, self._journal, self._most, self._ended_payments = rows, journal, most, ended_payments
        self._ended: dict[str, None] = {}
        self._kept: dict[str, None] = {}
        self._marks: defaultdict[str, list[MarkKey]] = defaultdict(list)
        self._remove_at: dict[str, int] = {}
        self._below: defaultdict[str, list[str]] = defaultdict(list)
        self._shown: defaultdict[str, list[MarkKey]] = defaultdict(list)
        self.forgotten, self.shown = Forgotten(), Forgotten()
        self.sums: dict[str, tuple[int, int]] = {}
        self.are_too_many = False
        self.asks_chains: bool | None = None

    def refuse(self, node_ids: Iterable[str]) -> None:
        """Raise ``ConfigError`` for a session that was forgotten: it is never opened afresh."""
        for node_id in node_ids:
            if node_id not in self._rows.nodes and node_id.partition("/")[0] in self.forgotten:
                raise ConfigError(
                    f"session: {node_id!r:.120} has ended and is forgotten: a ledger in memory keeps the last {self._most:,} "
                    "sessions that have ended; choose another id, ask for a report earlier, set memory_sessions higher, or "
                    "keep the ledger in a file"
                )

    def see(self, change_set: ChangeSet) -> None:
        """Note what ends, or goes on, with a change that is written next, and which session its new marks belong to.

        Their keys begin with its id.
        """
        known, nodes = self._rows.marks, self._rows.nodes
        for key, row in change_set.marks:
            if key not in known:
                kind = key[0]
                if kind in _OF_RUN:
                    self._marks[key[1].partition(" ")[0].partition("/")[0]].append(key)
                elif kind in _SHOWN:
                    self._shown[row["hold"]].append(key)
                elif kind == OPENED:
                    self._marks[row["id"]].append(key)
                elif kind == "approval":
                    self._marks[row["session"].partition("/")[0]].append(key)
        for node in change_set.nodes:
            if node.kind in _PARTS and node.id not in nodes and "/" in node.id:
                self._below[node.parent_id or ""].append(node.id)
            if node.kind is _SESSION:
                if node.closed_ms is not None and is_outermost(nodes, node):
                    self._ended[node.id] = None
                    self.are_too_many = self._rows.find_busy is None and len(self._ended) >= self._most + _AT_ONCE
                else:  # it goes on
                    self._ended.pop(node.id, None)
                    self._kept.pop(node.id, None)
            elif node.seq >= self._remove_at.get(node.id, _GRANTS_KEPT) and node.kind in (_WALLET, _BUDGET):
                self._remove_grants(node)

    def forget_oldest(self, now_ms: int, memory_ms: int) -> None:
        """Forget the oldest sessions above the number. A purchase stays for *memory_ms*, and with it its session."""
        oldest = [*islice(self._ended, len(self._ended) - self._most)]
        for session in [*islice(self._kept, _AT_ONCE), *oldest]:
            if session not in self._rows.nodes:
                self._ended.pop(session, None)
                self._kept.pop(session, None)
                continue
            tree = list(self._tree(session))
            holds = list({hold.id: hold for node in tree for hold in self._holds(node.id)}.values())
            if self._may_go(session, tree, holds, now_ms - memory_ms):
                self._forget(session, tree, holds)
                self._kept.pop(session, None)
            else:
                self._kept.pop(session, None)
                self._kept[session] = None  # behind the others that stay, until it is looked at again
            self._ended.pop(session, None)
        self.are_too_many = False

    def _tree(self, session: str) -> Iterator[Node]:
        """Yield a session, all below it, and the nodes that count their tokens."""
        nodes, waiting = self._rows.nodes, [session]
        for node_id in waiting:
            yield nodes[node_id]
            waiting += self._below.get(node_id, ())
            tokens = nodes.get(tokens_node(node_id))
            if tokens is not None:
                yield tokens

    def _holds(self, node_id: str) -> Iterator[Hold]:
        for entry in self._journal.get(node_id, {}).values():
            hold = self._rows.holds.get(entry.hold_id or "")
            if hold is not None and hold.node_id == node_id:
                yield hold

    def _may_go(self, session: str, tree: list[Node], holds: list[Hold], bought_before_ms: int) -> bool:
        if any(
            node.held or node.live or (node.closed_ms is None and node.kind is not NodeKind.TOKENS) for node in tree
        ):
            return False
        for mark in self._marks.get(session, ()):
            row = self._rows.marks.get(mark, {})
            if mark[0] in _STAY or (mark[0] == "approval" and not row.get("taken")):
                return False
        return all(self._is_over(hold, bought_before_ms) for hold in holds)

    def _is_over(self, hold: Hold, bought_before_ms: int) -> bool:
        """True for a hold that is not asked for any more: it is final, or nothing can show more than what it counts.

        A late end of one that has lapsed corrects it.
        """
        is_remembered = hold.purchase_key is not None and hold.purchase_key.startswith(NAMED)
        has_lapsed = hold.evidence is Evidence.ASSUMED and hold.closed_ms >= hold.deadline_unix * 1000
        if (is_remembered or has_lapsed) and hold.closed_ms >= bought_before_ms:
            return False
        return is_final(hold) or (self.asks_chains is False and _counts_all(hold))

    def _forget(self, session: str, tree: list[Node], holds: list[Hold]) -> None:
        said = {node.id: Said(*(getattr(node, name) for name in Said.__struct_fields__)) for node in tree}
        final = {hold.id: hold for hold in holds if is_final(hold)}
        leaving = Leaving(tuple(tree), tuple(final.values()), said, final)
        leave(lambda work: work(None), lambda _: leaving, lambda _, left: self._remove(session, left, holds))

    def _remove(self, session: str, left: Leaving, holds: list[Hold]) -> None:
        # Ctrl-C may come between any two lines: it is done again then, and the session's own row goes last.
        rows = self._rows
        self.forgotten.add(session)
        for hold in holds:
            self._remove_hold(hold.id)
        self._ended_payments(hold.id for hold in holds)
        for mark in self._marks.pop(session, ()):
            rows.marks.pop(mark, None)
        for node in reversed(left.nodes):
            self._journal.pop(node.id, None)
            rows.nodes.pop(node.id, None)
            self._below.pop(node.id, None)
        gone = left.nodes[0]
        count, nanos = self.sums.get(gone.parent_id or WALLET, (0, 0))
        self.sums[gone.parent_id or WALLET] = (count + 1, nanos + gone.spent)

    def _remove_hold(self, hold_id: str) -> None:
        for mark in self._shown.pop(hold_id, ()):
            self.shown.add(" ".join(mark))
            self._rows.marks.pop(mark, None)
        if hold_id in self._rows.holds:
            self._rows.remove_hold(hold_id)

    def _remove_grants(self, node: Node) -> None:
        """Remove the older grants of a budget: its journal would grow with everything below it, and no report reads them."""
        journal = self._journal.get(node.id, {})
        oldest = node.seq - _GRANTS_KEPT
        for seq in [seq for seq, entry in journal.items() if seq <= oldest and entry.event in GRANTS]:
            del journal[seq]
        self._remove_at[node.id] = node.seq + _GRANTS_KEPT


def _counts_all(hold: Hold) -> bool:
    """True for a payment that counts its whole ceiling on its server's word, and whose answer was handed over."""
    is_whole = hold.state is HoldState.CAPTURED and hold.captured >= hold.amount
    return is_whole and hold.delivery in (Delivery.DONE, Delivery.FORGIVEN)


class _Rows(MemoryRows):
    """The rows of a whole ledger, and its journal: node → number → entry."""

    def __init__(self, *, keeps_idle: bool, most_ended: int, ended_payments: Callable[[Iterable[str]], None]) -> None:
        super().__init__(keeps_idle=keeps_idle)
        self.journal: dict[str, dict[int, Entry]] = {}
        self.ended = EndedSessions(self, self.journal, most_ended, ended_payments)

    @override
    def load(self, scope: Scope, clock: Clock) -> Loaded:
        for node_id in scope.nodes:
            if node_id not in self.nodes:
                self.ended.refuse((node_id,))
        return super().load(scope, clock)

    @override
    def get_marks(self, keys: Iterable[MarkKey]) -> Mapping[MarkKey, Mapping[str, Any]]:
        found, shown = super().get_marks(keys), self.ended.shown
        gone = [key for key in keys if key[0] in _SHOWN and key not in found and " ".join(key) in shown]
        return {**found, **dict.fromkeys(gone, _GONE)} if gone else found

    @override
    def add(self, change_set: ChangeSet) -> None:
        try:
            self._add(change_set)
        except BaseException:
            self._add(change_set)  # after a Ctrl-C in between, writing the same rows again completes them
            raise

    def _add(self, change_set: ChangeSet) -> None:
        self.ended.see(change_set)
        super().add(change_set)
        for entry in change_set.entries:
            self.journal.setdefault(entry.node_id, {})[entry.seq] = entry


class MemoryStore(Transacts):
    """A ``LedgerStore`` in memory, with one lock. Every transaction takes microseconds.

    Args:
        clock_ms: returns unix milliseconds; this machine's clock by default.
        steady_ms: returns milliseconds of a clock that cannot be set; see ``StoreClock``.
        keeps_idle: let sessions keep idle budget, as in a store for many machines; see ``ledger.budgets``. None is
            forgotten then.
        most_ended: how many sessions that have ended it keeps; see ``Guard``'s ``memory_sessions``.
    """

    inline: Final = True
    is_shared: Final = False
    may_lose_commits: Final = False

    def __init__(
        self,
        *,
        clock_ms: Callable[[], int] | None = None,
        steady_ms: Callable[[], int] | None = None,
        keeps_idle: bool = False,
        most_ended: int = MOST_ENDED,
    ) -> None:
        self._clock = StoreClock(clock_ms, steady_ms)
        self._lock = threading.RLock()
        self._rows = _Rows(keeps_idle=keeps_idle, most_ended=most_ended, ended_payments=self.released.ended)
        self._pid = os.getpid()
        self._closed = False
        self._openings = {}

    @override
    def _in_transaction(self, scope: Scope, work: Work) -> None:
        self._check_usable()
        with self._lock:
            work(self._rows)
            if self._rows.ended.are_too_many:
                self._rows.ended.forget_oldest(self._clock(), self.opened.memory_ms)

    def _check_readable(self) -> None:
        """A closed ledger can still be read: reports are asked for after the end."""
        if self._pid != os.getpid():
            raise LedgerUnavailable(_FORKED)

    def _check_usable(self) -> None:
        # No context manager of our own wraps the lock: Ctrl-C could suspend it with the lock held.
        if self._pid != os.getpid():
            raise LedgerUnavailable(_FORKED)
        if self._closed:
            raise LedgerUnavailable(
                "this ledger has been closed, with its guard: the block of `with Guard(…)` is over, or close() was called",
                advice="Nothing was paid. Use sessions and clients inside the block, or open a new Guard.",
            )

    def entries(self, node_id: str, *, grants: bool = True) -> Sequence[Entry]:
        """See ``LedgerStore.entries``."""
        self.write_openings(node_id, below=True)
        self._check_readable()
        with self._lock:
            self._rows.ended.refuse((node_id,))
            inside = below(self._rows.nodes, node_id)
            found = (entry for node in inside for entry in self._rows.journal.get(node.id, {}).values())
            return [entry for entry in found if grants or entry.event not in GRANTS]

    def tail(self, node_id: str, after: int) -> Sequence[Entry]:
        """See ``LedgerReads.tail``."""
        self.write_openings(node_id)
        self._check_readable()
        with self._lock:
            return [entry for entry in self._rows.journal.get(node_id, {}).values() if entry.seq > after]

    def nodes(self, under: str | None = None) -> Sequence[Node]:
        """See ``LedgerStore.nodes``."""
        self.write_openings(under, below=True)
        self._check_readable()
        with self._lock:
            found = list(self._rows.nodes.values())
            if under is not None:
                self._rows.ended.refuse((under,))
                related = (*below(self._rows.nodes, under), *self._rows.get_nodes((under,)))
                wanted = {node.id for node in related}
                found = [node for node in found if node.id in wanted]
            find_busy = self._rows.find_busy
            return found if find_busy is None else without_idle(found, {node.id: node for node in find_busy()})

    def current(self, newest: int) -> Sequence[Node]:
        """See ``LedgerReads.current``."""
        last = {node.id for node in self.newest(newest)}
        return self._with_above(lambda node: node.closed_ms is None or node.id in last)

    def newest(self, most: int, skip: int = 0) -> Sequence[Node]:
        """See ``LedgerReads.newest``."""
        found = self._budgets()
        return found[max(0, len(found) - skip - most) : len(found) - skip]

    def named(self, word: str, most: int) -> Sequence[Node]:
        """See ``LedgerReads.named``."""
        return [node for node in self._budgets() if word in (node.name, node.id)][-most:]

    def fitting(self, text: str, most: int) -> Sequence[Node]:
        """See ``LedgerReads.fitting``."""
        part, found = text.lower(), self._budgets()
        budgets = {node.id for node in found if node.kind is NodeKind.BUDGET and part in node.name.lower()}
        fits = [
            node.id
            for node in found
            if node.parent_id in budgets or part in node.id.lower() or part in node.name.lower()
        ][-most:]
        return self._with_above(lambda node: node.id in fits)

    def _budgets(self) -> list[Node]:
        return [node for node in self.nodes() if node.kind is not NodeKind.TOKENS]

    def _with_above(self, wanted: Callable[[Node], bool]) -> list[Node]:
        nodes = {node.id: node for node in self._budgets()}
        ids = {above.id for node in nodes.values() if wanted(node) for above in path(nodes, node.id)}
        return [node for node in nodes.values() if node.id in ids]

    def ask_chains(self, *, asks: bool) -> None:
        """See ``ForgetsSessions.ask_chains``."""
        self._rows.ended.asks_chains = bool(self._rows.ended.asks_chains) or asks

    def forgotten(self) -> Mapping[str, tuple[int, int]]:
        """See ``LedgerReads.forgotten``."""
        return dict(self._rows.ended.sums)

    def tally(self) -> tuple[int, int]:
        """See ``LedgerReads.tally``."""
        self.write_openings()
        nodes = {node.id: node for node in self._budgets()}
        sessions = [node for node in nodes.values() if node.kind is NodeKind.SESSION and is_outermost(nodes, node)]
        ever = len(sessions) + sum(count for count, _ in self._rows.ended.sums.values())
        return ever, sum(hold.kind is not HoldKind.TOKENS for hold in self.outstanding())

    def path(self, node_id: str) -> Sequence[Node]:
        """See ``LedgerStore.path``."""
        self.write_openings(node_id)
        self._check_readable()
        with self._lock:
            self._rows.ended.refuse((node_id,))
            found = path(self._rows.nodes, node_id) if node_id in self._rows.nodes else []
            find_busy = self._rows.find_busy
            return found if find_busy is None else without_idle(found, {node.id: node for node in find_busy()})

    @contextmanager
    def at_one_moment(self, node_id: str | None = None) -> Iterator[Self]:
        """See ``LedgerStore.at_one_moment``. Others wait meanwhile."""
        self.write_openings(node_id, below=True)
        with self._lock:
            yield self

    def hold(self, hold_id: str) -> Hold | None:
        """See ``LedgerStore.hold``. Signers ask it, so a closed ledger does not answer."""
        self._check_usable()
        with self._lock:
            return self._rows.holds.get(hold_id)

    def outstanding(self) -> Sequence[Hold]:
        """See ``LedgerStore.outstanding``."""
        self._check_readable()
        with self._lock:
            return sorted(self._rows.live.values(), key=lambda h: h.created_ms)

    def unsettled(self, now_unix: int) -> Sequence[str]:
        """See ``LedgerStore.unsettled``."""
        self._check_readable()
        with self._lock:
            found = [hold for hold in self._rows.holds.values() if is_unsettled(hold, now_unix)]
        return [hold.id for hold in sorted(found, key=lambda h: h.created_ms)]

    def marks(self, kind: str, prefix: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``LedgerStore.marks``."""
        self._check_readable()
        if kind == OPENED:
            self.write_openings()
        with self._lock:
            found = {
                key: value for (of, key), value in self._rows.marks.items() if of == kind and key.startswith(prefix)
            }
            is_gone = kind in _SHOWN and f"{kind} {prefix}" in self._rows.ended.shown
            return found | {prefix: _GONE} if is_gone and prefix not in found else found

    def as_of_ms(self) -> None:
        """See ``LedgerStore.as_of_ms``."""

    def steady_ms(self) -> int:
        """See ``LedgerStore.steady_ms``."""
        return self._clock.steady_ms()

    def now_ms(self) -> int:
        """See ``LedgerStore.now_ms``."""
        return self._clock()

    def close(self) -> None:
        """See ``LedgerStore.close``."""
        if not self._closed and self._pid == os.getpid():
            self._write_last_openings()
        self._closed = True

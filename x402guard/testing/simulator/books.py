"""What has to be true after every step: each commit, and each block, is compared with what the simulation knows.

A mirror of the committed rows makes that cheap: a commit is checked by the rows that it changes, and what it does not
change was checked before. ``check_all`` compares everything, and so also the mirror with the ledger.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec.json import Encoder

from x402guard.flow.context import Context
from x402guard.kernel.rows import Delivery, Entry, Evidence, Hold, HoldKind, HoldState, Node, NodeKind, NodeState
from x402guard.kernel.windows import rolled
from x402guard.ledger.authorize import BUDGET, Refusal
from x402guard.ledger.purchases import is_in_flight_elsewhere, presentation_of
from x402guard.ledger.view import LedgerView
from x402guard.testing.simulator.machine import SimProcess
from x402guard.testing.simulator.market import SELLERS_WORDS, Signed, Want
from x402guard.testing.simulator.world import Violation, World

_SIGNATURE: Final = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{130}(?![0-9a-fA-F])")
_SHORTEST: Final = 130
_HELD, _CAPTURED = HoldState.HELD, HoldState.CAPTURED
_HAS_WORDS: Final = '"words"'
_AS_JSON: Final = Encoder().encode
_KINDS_WITH_ROOM: Final = frozenset({"payment", "llm", "tool"})
_NOT_HANDED_OVER: Final = frozenset({Delivery.OPEN, Delivery.LOST})


@dataclass(eq=False, slots=True)
class Actor:
    """Who commits: the kind of its flow, and what it works for."""

    kind: str
    process: SimProcess | None = None
    context: Context | None = None
    want: Want | None = None
    generation: int = 0
    """Of the want, when it was asked for."""


_NO_ACTOR: Final = Actor("opening")


class Books:
    """The rows as committed, and what the simulation knows about them. Amounts in nano-dollars.

    Args:
        world: what they are of.
        keeps_idle: sessions keep idle budget in this ledger.

    Attributes:
        actor: who runs now.
        signed: the payments that were signed, by their holds.
        billed: LLM calls and tools → what their provider bills, at most their ceiling.
        owed: the same, of bills that have waited for the ledger: all of it, which counts at last.
        claimed: the payments that are captured on a claim alone, and that a reader of the chain may ask about.
        told: what the owner was told of transfers that no payment explains.
    """

    def __init__(self, world: World, *, keeps_idle: bool) -> None:
        self._world, self._keeps_idle = world, keeps_idle
        self.actor = _NO_ACTOR
        self.nodes: dict[str, Node] = {}
        self.holds: dict[str, Hold] = {}
        self.signed: dict[str, Signed] = {}
        self.billed: dict[str, int] = {}
        self.owed: dict[str, int] = {}
        self.told = 0
        self.claimed: dict[str, Hold] = {}
        self._at_node: dict[str, dict[str, Hold]] = defaultdict(dict)
        self._children: dict[str, list[str]] = defaultdict(list)
        self._own: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._used_below: dict[str, int] = defaultdict(int)
        self._last_actor: dict[str, str] = {}
        self._unit = world.asset.value_nanos(1)
        self._short: dict[str, int] = {}
        self._late: dict[str, list[tuple[int, int]]] = {}
        policies = [process.settings["policy"] for process in world.processes]
        self.exposure = max(policy.most_exposed for policy in policies)

    # -- commits ------------------------------------------------------------------------------------------------------

    def committed(self, view: LedgerView, result: object) -> None:
        """Check one commit, and take it into the mirror."""
        change_set = view.change_set(durable=True)
        for entry in view.entries:
            if _HAS_WORDS in entry.data:
                self._check_words(entry.facts())
            else:
                self.check_shown("a row", entry.data)
            if entry.hold_id is not None:
                self._note_event(view, entry)
            else:
                self.told += _told(entry)
        for _, mark in change_set.marks:
            self._check_words(mark)
        before = {hold_id: self.holds.get(hold_id) for hold_id in view.changed_holds}
        for node in change_set.nodes:
            self._take_node(node)
        for hold in change_set.holds:
            self._note_late(hold, view.now_ms)
            self._take(hold)
        for hold_id in before:
            self._check_hold(self.holds[hold_id])
        for node in change_set.nodes:
            self._check_node(node.id)
        for entry in view.entries:
            if entry.event == "authorize" and entry.hold_id is not None:
                self._check_authorized(view, view.known_hold(entry.hold_id), before)
        if isinstance(result, Refusal) and result.rule == BUDGET and self.actor.kind in _KINDS_WITH_ROOM:
            self._check_refusal(result)

    def _note_late(self, hold: Hold, now_ms: int) -> None:
        """Note what a corrected capture takes beyond its first amount: it counts in the window of the correction."""
        before = self.holds.get(hold.id)
        if hold.state is not _CAPTURED or before is None or before.state is not _CAPTURED:
            self._late.pop(hold.id, None)
        elif hold.captured > before.captured:
            more = hold.captured - max(before.captured, hold.first_captured)
            self._late.setdefault(hold.id, []).append((now_ms, max(0, more)))

    def _take(self, hold: Hold) -> None:
        before, own = self.holds.get(hold.id), self._own[hold.node_id]
        self.holds[hold.id] = self._at_node[hold.node_id][hold.id] = hold
        if hold.state is _CAPTURED and hold.evidence is Evidence.CLAIMED and hold.chain_evidence:
            self.claimed[hold.id] = hold
        else:
            self.claimed.pop(hold.id, None)
        more = counted_of(hold) - (0 if before is None else counted_of(before))
        above = self.nodes[hold.node_id].parent_id
        while above is not None:
            self._used_below[above] += more
            above = self.nodes[above].parent_id
        for row, sign in ((before, -1), (hold, 1)):
            if row is not None:
                own[0] += sign * (row.captured if row.state is _CAPTURED else 0)
                own[1] += sign * (row.amount if row.state is _HELD else 0)
        actor = self.actor.kind
        last = self._last_actor.get(hold.id)
        if last is not None and last != actor:
            self._world.coverage.pairs[last, actor] += 1
        self._last_actor[hold.id] = actor

    def _take_node(self, node: Node) -> None:
        before = self.nodes.get(node.id)
        self.nodes[node.id] = node
        if node.parent_id is not None and before is None:
            self._children[node.parent_id].append(node.id)

    def note_chain(self, nonce: int) -> None:
        """Note that the chain has changed the fate of a payment, and check its hold."""
        hold_id = f"{nonce:064x}"
        if hold_id not in self.holds:
            return
        last = self._last_actor.get(hold_id)
        if last is not None and last != "chain":
            self._world.coverage.pairs[last, "chain"] += 1
        self._last_actor[hold_id] = "chain"
        self._check_hold(self.holds[hold_id])

    def _note_event(self, view: LedgerView, entry: Entry) -> None:
        hold = view.known_hold(entry.hold_id or "")
        before = self.holds.get(hold.id)
        event = f"event:{entry.facts().get('name', '?')}" if entry.event == "event" else entry.event
        state = "-"
        if before is not None:
            state = str(before.state)
            if before.state is _HELD:
                state += "+doubt" if before.doubt else "+claim" if before.claim else ""
            elif before.state is _CAPTURED:
                state += f"/{before.evidence}"
        self._world.coverage.events[str(hold.kind), state, event] += 1

    def check_hold(self, hold_id: str) -> None:
        """Check one hold again, after what is known about it has changed."""
        if hold_id in self.holds:
            self._check_hold(self.holds[hold_id])

    # -- one row ------------------------------------------------------------------------------------------------------

    def _check_hold(self, hold: Hold) -> None:
        counted = counted_of(hold)
        signed = self.signed.get(hold.id)
        if signed is not None and signed.sent:
            takeable = self._world.chain.takeable(signed.intent) * self._unit
            if counted >= takeable:
                self._short.pop(hold.id, None)  # another block may have taken more than the one that was undone
            elif not self._is_exposed(hold, takeable - counted):
                raise Violation("undercounted", f"{counted} of {takeable} that the chain has taken or may take: {hold}")
        if signed is not None and signed.handed_over == hold.presented and hold.delivery in _NOT_HANDED_OVER:
            raise Violation("lost-though-delivered", f"{signed.want} has been handed over: {hold}")
        billed = self.billed.get(hold.id)
        if billed is not None and counted < billed:
            raise Violation("below-the-bill", f"{counted} counted of {billed} billed: {hold}")

    def _is_exposed(self, hold: Hold, short: int) -> bool:
        """True for a remainder that the owner's policy lets be used before its block is final (``reorg_exposure``)."""
        if hold.state is not _CAPTURED or hold.evidence is not Evidence.CHAIN_HEAD or not self.exposure:
            return False
        self._short[hold.id] = short
        heads = {key: self.holds[key] for key in self._short if self.holds[key].evidence is Evidence.CHAIN_HEAD}
        self._short = {key: self._short[key] for key in heads}
        return sum(self._short.values()) <= int(self.exposure)

    def _check_node(self, node_id: str) -> None:
        node = self.nodes[node_id]
        if node.kind is NodeKind.TOKENS:
            return  # it counts also what was never held
        captured, held = self._own[node_id]
        if (node.captured, node.held) != (captured, held):
            raise Violation("node-sum", f"{node_id}: {node.captured} + {node.held}, its holds {captured} + {held}")
        idle = self._idle_below(node_id)
        if node.granted_out != self._used_below[node_id] + idle:
            used = self._used_below[node_id]
            raise Violation("granted", f"{node_id}: granted {node.granted_out}, used below {used}, idle there {idle}")
        if node.limit is not None and node.counted > node.limit and node.state is NodeState.OPEN:
            raise Violation("over-limit", f"{node_id}: {node.counted} of {node.limit}, and open")
        if node.state is NodeState.TRIPPED and not (node.terminated_by and node.trip_reason):
            raise Violation("tripped-without-reason", node_id)

    def _idle_below(self, node_id: str) -> int:
        if not self._keeps_idle:
            return 0
        children = (self.nodes[child] for child in self._children[node_id])
        return sum(child.granted_in - child.used + self._idle_below(child.id) for child in children)

    def _check_words(self, row: Mapping[str, Any]) -> None:
        """Check an entry or a mark: a seller's words stand in its ``words`` alone."""
        shown = {key: value for key, value in row.items() if key != "words"} if "words" in row else row
        try:
            text = _AS_JSON(shown).decode()
        except (TypeError, ValueError) as error:
            raise Violation("not-json", f"{error}: {row!r}"[:300]) from error
        self.check_shown("a row", text)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _check_authorized(self, view: LedgerView, hold: Hold, before: Mapping[str, Hold | None]) -> None:
        context = self.actor.context
        cap = None if context is None or hold.kind is not HoldKind.PAYMENT else context.policy.cap_nanos
        if cap is not None and hold.amount > cap:
            raise Violation("per-payment-cap", f"authorized {hold.amount}, the cap is {cap}")
        if hold.state is _HELD and hold.kind is not HoldKind.TOKENS:
            for node in view.path(hold.node_id):
                if node.state is not NodeState.OPEN:
                    raise Violation("not-open", f"authorized {hold.amount} in {node.id}, which is {node.state}")
                kept = node.reserve if hold.kind is HoldKind.PAYMENT else 0
                if node.limit is not None and node.counted > node.limit - kept:
                    raise Violation("limit", f"authorized {hold.amount}: {node.id} at {node.counted} of {node.limit}")
        want = self.actor.want
        if want is not None and hold.kind is HoldKind.PAYMENT:
            for old in want.signed:
                if old.generation == self.actor.generation and old.hold_id != hold.id:
                    self._check_second(old, before.get(old.hold_id) or self.holds[old.hold_id], hold)

    def _check_second(self, old: Signed, row: Hold, new: Hold) -> None:
        """A new payment is written. Another one for the same thing may have been taken, or still be taken."""
        want = old.want
        if old.generation in want.excuses or not old.sent or self._world.chain.takeable(old.intent) == 0:
            return
        excuse = self._excuse(row, old)
        if excuse:
            want.excuses[old.generation] = excuse
            self._world.coverage.notes[f"second payment: {excuse}"] += 1
            return
        raise Violation(
            "second-payment", f"{want}: {new.id} is written by {new.instance} at {new.created_ms} beside {row}"
        )

    def _excuse(self, row: Hold, old: Signed) -> str:
        """Return why a second payment for the same thing is right, as documented; "" if it is not."""
        context, process = self.actor.context, self.actor.process
        if context is None or process is None:
            return ""
        under_way = presentation_of(row) in context.in_flight and not is_in_flight_elsewhere(
            row, instance=context.instance
        )
        had = bool(old.read_by) or self.actor.generation < old.want.generation
        if (under_way or had) and not old.want.named:
            return "asked for twice at the same time"
        if row.delivery is Delivery.FORGIVEN and "pay_again" in old.want.excuses.values():
            return "closed by an earlier call's pay_again"
        since_ms = min(old.at_ms, row.created_ms)  # a machine may sleep for a day between the hold and its signature
        if self._world.time.ms - since_ms > context.memory_ms - 600_000:
            return "forgotten after purchase_memory_s"
        return "another process could not write that it was lost" if self._loss_waits(old, process) else ""

    def _loss_waits(self, old: Signed, asking: SimProcess) -> bool:
        """True if another process than the one *asking*, or an ended one, has not written yet that an answer was lost."""
        if old.cut_in is not None and old.cut_in is not asking.guard:
            return True
        others = [each.outbox for each in self._world.processes if each is not asking]
        left = [outbox for machine in self._world.machines for outbox in machine.left]
        ends = (end for outbox in (*others, *left) if outbox is not None for end in outbox.ends)
        return any(end.hold_id == old.hold_id and end.delivery is Delivery.LOST for end in ends)

    def _check_refusal(self, refusal: Refusal) -> None:
        context = self.actor.context
        if context is None or refusal.requested is None:
            return
        guard = None if self.actor.process is None else self.actor.process.guard
        now_ms = 0 if guard is None else guard.shell.store.now_ms()
        rooms = self.rooms_at(context.node_id, now_ms, context.finalizing)
        if not rooms or refusal.requested <= min(rooms.values()):
            raise Violation(
                "refused-though-it-fits", f"{self.actor.kind} {refusal.requested}, rooms {rooms}: {refusal.reason}"
            )

    def rooms_at(self, node_id: str, now_ms: int, finalizing: frozenset[str] = frozenset()) -> dict[str, int]:
        """Return node → what is left in it, for each budget on a path that has a limit, by the rows of its holds.

        *now_ms* is the ledger's clock in unix milliseconds; the nodes *finalizing* may use their reserves.
        """
        rooms: dict[str, int] = {}
        at: str | None = node_id
        while at is not None:
            node = self.nodes[at]
            if node.limit is not None:
                rooms[at] = node.limit - self.counted(node, now_ms) - (0 if node.id in finalizing else node.reserve)
            at = node.parent_id
        return rooms

    def counted(self, node: Node, now_ms: int) -> int:
        """Return what counts in a budget by the rows of the holds in it and below it."""
        if node.window is None:
            captured, held = self._own[node.id]
            return captured + held + self._used_below[node.id]
        since_ms = rolled(node, now_ms).since_ms
        total, below = 0, [node.id]
        for each in below:
            below.extend(self._children[each])
            for hold in self._at_node[each].values():
                if hold.state is _CAPTURED and hold.closed_ms < since_ms:
                    total += sum(more for at_ms, more in self._late.get(hold.id, ()) if at_ms >= since_ms)
                else:
                    total += counted_of(hold)
        return total

    # -- what others read ---------------------------------------------------------------------------------------------

    def check_shown(self, what: str, text: str) -> None:
        """Check a text that a model, an owner or a log reads: no signature, and none of a seller's words."""
        if SELLERS_WORDS in text:
            raise Violation("sellers-words", f"in {what}: {text[:300]}")
        # No quotes stand in a signature. To split a row at them takes half as long as to search it.
        if len(text) >= _SHORTEST and len(max(text.split('"'), key=len)) >= _SHORTEST and _SIGNATURE.search(text):
            raise Violation("signature-shown", f"in {what}: {text[:300]}")

    # -- everything ---------------------------------------------------------------------------------------------------

    def check_all(self, nodes: Iterable[Node], holds: Iterable[Hold] | None) -> None:
        """Compare the mirror with the ledger's rows, and check every row."""
        for node in nodes:
            mine = self.nodes.get(node.id)
            if mine is None or (mine.seq, mine.captured, mine.held) != (node.seq, node.captured, node.held):
                raise Violation("commit-unseen", f"{node} is not {mine}")
        if holds is not None:
            rows = {hold.id: hold for hold in holds}
            if rows != self.holds:
                raise Violation("commit-unseen", f"{len(rows)} holds, {len(self.holds)} seen")
        for hold in list(self.holds.values()):
            self._check_hold(hold)
        for node_id in list(self.nodes):
            self._check_node(node_id)
        for signed in self.signed.values():
            if signed.sent and signed.hold_id not in self.holds:
                raise Violation("row-lost", f"{signed.hold_id} was sent, and is in no ledger")

    def read_again(self, nodes: Iterable[Node], holds: Iterable[Hold], journal: Iterable[Entry]) -> None:
        """Read the rows anew, after a power cut. What was told by a commit that is lost is told again."""
        self.told = sum(map(_told, journal))
        for index in (self.nodes, self.holds, self.claimed, self._at_node, self._children, self._own, self._used_below):
            cleared: dict[Any, Any] = index
            cleared.clear()
        for node in nodes:
            self._take_node(node)
        for hold in holds:
            self._take(hold)
            if hold.id in self.signed and hold.delivery in _NOT_HANDED_OVER:
                self.signed[hold.id].handed_over = None  # that note need not be durable


def _told(entry: Entry) -> int:
    return int(entry.facts()["amount"]) if entry.event == "event" and '"unexplained_transfer"' in entry.data else 0


def counted_of(hold: Hold) -> int:
    """Return what a hold counts, in its unit."""
    return hold.amount if hold.state is _HELD else hold.captured if hold.state is _CAPTURED else 0

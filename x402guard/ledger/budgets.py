"""Nests budgets by grants: every dollar that a child uses is drawn from its parent at the same time, or before.

Each node keeps captured + held + granted out ≤ limit. So siblings cannot spend one dollar twice, and no decision uses an
outdated budget. In most stores a node has drawn from its parent exactly what it uses: the transaction that writes a hold
draws its amount level by level, and a void, an expiry or a smaller capture gives back at once what it frees.

In a store for many machines, a node that draws from a wallet or a named budget may keep more than it uses. A payment out of
what is idle changes no row above it, so agents do not wait for each other. Idle budget belongs to its lender: it is
recalled before anything is refused for a lack of budget there, before the lender is tripped, and when its node ends. No
process has a claim on it, so after a crash there is nothing to do.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from x402guard.kernel.rows import Hold, HoldKind, HoldState, Nanos, Node, NodeKind, NodeState
from x402guard.kernel.windows import Taken, past_after, window_end_ms, zone
from x402guard.ledger.tree import plain_room
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars

OVER: Final = 0
"""The end of a task's time that is past by any clock, in unix milliseconds."""

UNEXPLAINED: Final = "unexplained_transfer"
"""The event of a Transfer out of the wallet that no payment explains, and the word of a trip by one."""

ACKNOWLEDGED: Final = "transfer_acknowledged"
"""The event of such a Transfer that its owner knows of."""

TERMINATIONS: Final = (
    "budget_exhausted", "completed", "disputed_usage", "error", "kill_switch", "loop_detected", "not_verified", "overshoot",
    "rolled_back", "session_timeout", "spend_spike", UNEXPLAINED, "watchdog",
)  # fmt: skip
"""Every value of ``terminated_by`` except null."""

STARVED: Final = {HoldKind.PAYMENT: 1, HoldKind.LLM: 2, HoldKind.TOOL: 4}
"""The bit of each kind in ``Node.starved``: set as one is refused for lack of budget, cleared as one is granted."""

TASK_STARVED: Final = 8
"""The bit of a refused delegation: a session that does the work itself, by whatever kind of call, is not short of it."""

ALL_STARVED: Final = sum(STARVED.values()) | TASK_STARVED
"""What a granted payment clears: there is room again."""

KILL_SWITCH: Final = "kill_switch"
OVERSHOOT: Final = "overshoot"
ROLLED_BACK: Final = "rolled_back"

WOULD_TRIP: Final = "would_trip"
"""The event of a rule that would have tripped a budget if the guard were not in shadow mode."""

_SHARES: Final = 4  # what a node draws where its parent lends, and what it keeps idle, in amounts of a payment
_PART: Final = 16  # of what a parent has free, one node draws at most a sixteenth beyond its need

PARTS: Final = 1_000_000
"""The denominator of soft limits: they are stored in millionths of a limit."""

_OVERSHOT: Final = PARTS + 1
"""Added to the soft limit that was told, in ``Node.warned``: an overshoot has tripped the node in its present window."""


class Shortfall(Struct, frozen=True):
    """The first node on a path, from the leaf up, that an amount does not fit into.

    Attributes:
        node: that node.
        available: the amount left in it, in nano-dollars, never below zero.
        needs: what has to be left in it, its reserve included.
    """

    node: Node
    available: Nanos
    needs: Nanos


def find_shortfall(
    view: LedgerView, node_id: str, amount: int, finalizing: frozenset[str] = frozenset()
) -> Shortfall | None:
    """Return where *amount* (nano-dollars) does not fit, or None if every budget on the path has room for it.

    The nodes *finalizing* may use their reserves.
    """
    asked = amount
    for above in view.path(node_id):
        node, room = above, _room(above, finalizing)
        if room is not None and amount > room and view.lends(above.id):
            node, amount = unlent(view, above.id), asked
            room = _room(node, finalizing)
        if room is not None and amount > room:
            return Shortfall(node, Nanos(max(room, 0)), Nanos(amount + (node.room or 0) - room))
        if node.parent_id is not None:
            amount = max(0, node.used + amount - node.granted_in)
    return None


def _room(node: Node, finalizing: frozenset[str]) -> int | None:
    return node.room if node.id in finalizing else plain_room(node)


def room_on_path(
    view: LedgerView, node_id: str, finalizing: frozenset[str] = frozenset(), *, enough: int | None = None
) -> Nanos | None:
    """Return the largest amount (nano-dollars) that fits a node and every budget above it; None if none has a limit.

    Given *enough*, the result is exact only if it is less than that, which saves a look at what is idle.
    """
    rooms: list[int] = []
    idle = 0
    for node in view.path(node_id):
        room = _room(node, finalizing)
        if room is not None and view.lends(node.id):
            room += idle
            if enough is None or room < enough:
                room = _room(unlent(view, node.id), finalizing)
        if room is not None:
            rooms.append(room)
        idle += node.idle
    return Nanos(max(0, min(rooms))) if rooms else None


class Part(NamedTuple):
    """What one call may take of a budget: *most* and *left* in nano-dollars; *shared*: others hold something of it now."""

    node: Node
    most: int
    left: int
    shared: bool


def tightest_part(view: LedgerView, node_id: str, share: int, finalizing: frozenset[str] = frozenset()) -> Part | None:
    """Return the least that a call may take of a node and of each budget above it: all that is left, or 1/*share* of it.

    It is all of it where nothing else is held. None if none of them has a limit.
    """
    parts = []
    for each in view.path(node_id):
        if (node := unlent(view, each.id)).limit is not None:
            left = max(0, _room(node, finalizing) or 0)
            parts.append(Part(node, left // share if node.live else left, left, node.live > 0))
    return min(parts, key=lambda part: part.most, default=None)


def unlent(view: LedgerView, node_id: str) -> Node:
    """Return a node as it would be if the nodes below it kept nothing idle."""
    node = view.node(node_id)
    if not view.lends(node_id):
        return node
    busy = view.busy_below(node_id)
    idle, live = sum(each.idle for each in busy), sum(each.live for each in busy)
    return replace(node, granted_out=node.granted_out - idle, live=node.live + live)


def balance_grants(view: LedgerView, node_id: str, last: int | None = 0) -> None:
    """Draw what each node on the path is short of, or give back what it no longer uses, level by level up to the root.

    It checks no limit: an amount that is owed already (a correction, a bill) is drawn past the limit. Below a node that
    lends, an open node draws more than it needs, and keeps up to four times the *last* amount (nano-dollars) idle; given
    None, all of it.
    """
    if (own := view.node(node_id).room) is not None and own < 0:
        _take_back(view, node_id, -own)  # something is held in a lender itself
    current = view.node(node_id)
    while (parent_id := current.parent_id) is not None:
        delta, room = current.used - current.granted_in, view.node(parent_id).room
        if room is not None and delta > max(0, room):
            recall(view, parent_id, delta - room)  # also from below this node, which then needs less
            current = view.node(current.id)
            delta = current.used - current.granted_in
        if view.lends(parent_id):
            delta = delta + _spare(view, current, delta) if delta > 0 else -max(0, -delta - _kept(current, last))
        if delta == 0:
            break
        _move(view, current.id, delta)
        current = view.node(parent_id)


def _move(view: LedgerView, node_id: str, amount: int) -> None:
    """Move *amount* (nano-dollars) from the parent of a node to it; a negative one back."""
    verb = "grant" if amount > 0 else "return"
    facts: dict[str, str | int] = {"child": node_id, "amount": abs(amount)}
    view.record(node_id, verb, granted_in=amount, facts=facts)
    node = view.node(node_id)
    parent_id = node.parent_id or ""
    if view.lends(parent_id):
        # The parent's hash covers the child's, so that two histories of the child are two histories of the parent.
        facts |= {"seq": node.seq, "head": node.head}
    view.record(parent_id, verb, granted_out=amount, facts=facts)


def _kept(node: Node, last: int | None) -> int:
    if node.state is not NodeState.OPEN:
        return 0
    return node.idle if last is None else _SHARES * last


def _spare(view: LedgerView, node: Node, need: int) -> int:
    """Return what a node draws beyond its need: little of what its parent has free, and no more than it can use itself."""
    if node.state is not NodeState.OPEN:
        return 0
    free = _free(view, node.parent_id or "")
    spare = (_SHARES - 1) * need
    if free is not None:
        spare = min(spare, max(0, free - need) // _PART)
    return spare if node.room is None else min(spare, max(0, node.room))


def _free(view: LedgerView, node_id: str) -> int | None:
    """Return what a node can grant without a recall, in nano-dollars; None without a limit."""
    free: int | None = None
    for node in reversed(view.path(node_id)):
        if free is not None:
            free += node.idle
        room = plain_room(node)
        if room is not None:
            free = room if free is None else min(free, room)
    return free


def recall(view: LedgerView, node_id: str, missing: int | None = None) -> None:
    """Give back to a node what the nodes below it keep idle, the most first, until *missing* (nano-dollars) is there.

    None for all of it. A node that has ended gives it back itself.
    """
    _take_back(view, node_id, missing)
    node = view.node(node_id)
    if node.idle and node.state is not NodeState.OPEN:
        balance_grants(view, node_id)


def _take_back(view: LedgerView, node_id: str, missing: int | None) -> None:
    if not view.lends(node_id):
        return
    found = 0
    for lent in sorted(view.busy_below(node_id), key=lambda node: (-node.idle, node.id)):
        idle = lent.idle
        if not idle or (missing is not None and found >= missing):
            return  # few rows are written, so that few others conflict
        for each in view.path(lent.id):
            if each.id == node_id:
                break
            _move(view, each.id, -idle)
        found += idle


def is_past_limit(view: LedgerView, node_id: str) -> bool:
    """True if more is used in a node than its limit. What is idle below it does not count: it is given back first."""
    if (room := view.node(node_id).room) is not None and room < 0:
        recall(view, node_id, -room)
    room = view.node(node_id).room
    return room is not None and room < 0


def move_past(view: LedgerView, before: Hold, after: Hold) -> None:
    """Count what one step of a hold moves in the windows that are over: see ``kernel.windows.past_after``."""
    was, now = (
        Taken(hold.state, hold.captured, hold.closed_ms, hold.first_captured if hold.state is HoldState.CAPTURED else 0)
        for hold in (before, after)
    )
    for node in view.path(after.node_id):
        past = past_after(node, was, now)
        if past != node.past:
            view.put_node(replace(node, past=past))


def reaches_soft_limit(node: Node, amount: int) -> bool:
    """True if what is spent in a budget, with *amount* (nano-dollars), reaches a soft limit of which nothing was said yet."""
    limit, spent = node.limit, node.captured + node.held + node.granted_out - node.past - node.live + amount
    told = node.warned % _OVERSHOT
    return limit is not None and any(part > told and spent * PARTS >= limit * part for part in node.soft)


def note_soft_limits(view: LedgerView, node_id: str) -> None:
    """Write an event and a notice for each soft limit reached on the path: once, and once again in each new window."""
    for node in view.path(node_id):
        if not node.soft or not reaches_soft_limit(node, 0):
            continue
        for part in _reached(view, node):
            if part > node.warned % _OVERSHOT:
                now = view.node(node.id)
                view.put_node(replace(now, warned=now.warned - now.warned % _OVERSHOT + part))
                _tell_soft(view, unlent(view, node.id), part)


def _reached(view: LedgerView, node: Node) -> list[int]:
    """Return the soft limits that what is spent in a node has reached."""
    limit, spent = node.limit or 0, node.spent
    reached = [part for part in node.soft if limit and spent * PARTS >= limit * part]
    if not any(part > node.warned % _OVERSHOT for part in reached) or not view.lends(node.id):
        return reached
    spent = unlent(view, node.id).spent  # it is less
    return [part for part in reached if spent * PARTS >= limit * part]


def forget_soft_limits(view: LedgerView, node_id: str) -> None:
    """After a change of the limit, count only the soft limits already reached as notified."""
    node = view.node(node_id)
    warned = max(_reached(view, replace(node, warned=0)), default=0)
    view.put_node(replace(node, warned=node.warned - node.warned % _OVERSHOT + warned))


def _tell_soft(view: LedgerView, node: Node, reached: int) -> None:
    limit, spent = node.limit or 0, node.spent
    percent = reached / (PARTS // 100)
    session = node.id.removesuffix("/tokens")
    where = session if view.has_node(session) else node.id
    if node.kind is NodeKind.TOKENS:
        tokens = {"used_tokens": spent, "soft_tokens": -(-limit * reached // PARTS)}
        view.record(where, "event", facts={"name": "tokens_soft_limit", "percent": percent, **tokens})
        message = f"tokens: {spent:,} of {limit:,} are used in {node.name!r}, over {percent:g} %"
        facts = {"name": node.name, "percent": percent, **tokens}
        view.tell("tokens_soft_limit", "warning", message, session=session, facts=facts)
        return
    dollars = {"spent": format_dollars(spent), "budget": format_dollars(limit)}
    view.record(where, "event", facts={"name": "soft_limit", "percent": percent, **dollars})
    message = (
        f"{node.kind} {node.name!r} has spent ${format_dollars(spent)} of ${format_dollars(limit)}, over {percent:g} %"
    )
    facts = {"name": node.name, "percent": percent, **dollars}
    view.tell("soft_limit", "warning", message, session=session, amount=spent, limit=limit, facts=facts)


def trip_exceeded(view: LedgerView, node_id: str) -> None:
    """Trip every node on the path that is past its limit. A token budget never trips."""
    for node in view.path(node_id):
        if node.kind is not NodeKind.TOKENS and is_past_limit(view, node.id):
            used, limit = view.node(node.id).counted, node.limit or 0
            trip(view, node.id, OVERSHOOT, f"${format_dollars(used)} used of ${format_dollars(limit)}")


def trip(view: LedgerView, node_id: str, word: str, reason: str, by: str | None = None) -> None:
    """Trip a node until its owner resets it. *word* is one of ``TERMINATIONS``. A tripped node keeps its first word.

    Where the node has a window, a trip by an overshoot ends with it; another trip that comes after it is written, too.

    *by* is the owner who does it with a command.

    In shadow mode the owner and a limit that is exceeded still trip it; what the rules would trip is recorded.
    """
    node = view.node(node_id)
    if node.state is NodeState.TRIPPED and not (ends_with_window(node) and word != OVERSHOOT):
        return
    if view.shadow and word not in (KILL_SWITCH, OVERSHOOT):
        view.record(node_id, "event", facts={"name": WOULD_TRIP, "rule": word, "reason": reason})
        told = f"{node.kind} {node.name!r} would be tripped ({word}) outside shadow mode: {reason}"
        view.tell(WOULD_TRIP, "info", told, session=node_id, rule=word, logged_only=True)
        return
    reason = as_line(reason)
    named = {} if by is None else {"by": as_line(by)}
    view.record(node_id, "trip", facts={"word": word, "reason": reason, **named})
    until = "until its owner resets it"
    if word == OVERSHOOT and node.window is not None:
        until = f"until {window_end_text(node, view.clock_ms)}, or {until}"
    message = f"{node.kind} {node.name!r} is tripped ({word}): {reason}; nothing more is authorized {until}"
    view.tell(
        "tripped", "critical", message, session=node_id, amount=unlent(view, node_id).counted, limit=node.limit, rule=word,
        facts={"name": node.name, "reason": reason},
    )  # fmt: skip
    node = view.node(node_id)
    # The end of its window takes this back, and so ends the trip: see ``kernel.windows.rolled``.
    warned = node.warned % _OVERSHOT + (_OVERSHOT if word == OVERSHOOT else 0)
    tripped = replace(node, state=NodeState.TRIPPED, terminated_by=word, trip_reason=reason, warned=warned)
    view.put_node(tripped)
    balance_grants(view, node_id)


def node_told(node: Node) -> Node:
    """Return a node of which no overshoot is noted, and the soft limits that were told as before."""
    return replace(node, warned=node.warned % _OVERSHOT)


def ends_with_window(node: Node) -> bool:
    """True for a node that an overshoot has tripped until its window ends: see ``kernel.windows.rolled``."""
    return node.terminated_by == OVERSHOOT and node.window is not None


def window_end_text(node: Node, now_ms: int) -> str:
    """Return when the present window of a node ends, such as ``its day ends (2026-11-04 00:00 Europe/Berlin)``."""
    assert node.window is not None
    per, tz = node.window.per, node.window.tz
    end = datetime.fromtimestamp(window_end_ms(node.window, now_ms) / 1000, zone(tz))
    return f"its {per} ends ({end:%Y-%m-%d %H:%M} {tz})"


def as_line(text: str) -> str:
    """Return a text in one line, as a ledger takes it: what is not printable is escaped.

    A file's name or a word from a shell may be no UTF-8, and no stop fails by it.
    """
    line = " ".join(text.split())
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def trip_session(view: LedgerView, node_id: str, word: str, reason: str) -> None:
    """Trip the session that a node is, or is in. See ``trip``."""
    for node in view.path(node_id):
        if node.kind is not NodeKind.SCOPE:
            trip(view, node.id, word, reason)
            return

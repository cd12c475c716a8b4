"""Nests budgets by grants: every dollar that a child uses is drawn from its parent at the same time.

Each node keeps captured + held + granted out ≤ limit, and a node below the root has drawn exactly what it uses from its
parent. The transaction that writes a hold draws its amount level by level; a void, an expiry or a smaller capture gives
back at once what it frees. So siblings cannot spend one dollar twice, and no decision uses an outdated budget.
"""

from __future__ import annotations

import json
from typing import Final

from msgspec import Struct

from x402guard.frozen import replace
from x402guard.ledger.model import Hold, Node, NodeKind, NodeState
from x402guard.ledger.view import LedgerView
from x402guard.money import Nanos, format_dollars

KILL_SWITCH: Final = "kill_switch"
OVERSHOOT: Final = "overshoot"

WOULD_TRIP: Final = "would_trip"
"""The event of a rule that would have tripped a budget if the guard were not in shadow mode."""

PARTS: Final = 1_000_000
"""The denominator of soft limits: they are stored in millionths of a limit."""


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
    for node in view.path(node_id):
        room = _room(node, finalizing)
        if room is not None and amount > room:
            return Shortfall(node, Nanos(max(room, 0)), Nanos(amount + (node.room or 0) - room))
        if node.parent_id is not None:
            amount = max(0, node.used + amount - node.granted_in)
    return None


def _room(node: Node, finalizing: frozenset[str]) -> int | None:
    return node.room if node.id in finalizing else node.plain_room


def room_on_path(view: LedgerView, node_id: str, finalizing: frozenset[str] = frozenset()) -> Nanos | None:
    """Return the largest amount (nano-dollars) that fits a node and every budget above it; None if none has a limit."""
    rooms = [room for node in view.path(node_id) if (room := _room(node, finalizing)) is not None]
    return Nanos(max(0, min(rooms))) if rooms else None


def settle_grants(view: LedgerView, node_id: str) -> None:
    """Draw what each node on the path is short of, or give back what it no longer uses, level by level up to the root.

    It checks no limit: an amount that is owed already (a correction, a bill) is drawn past the limit.
    """
    current = view.node(node_id)
    while current.parent_id is not None:
        delta = current.used - current.granted_in
        if delta == 0:
            break
        verb = "grant" if delta > 0 else "return"
        facts = {"child": current.id, "amount": abs(delta)}
        view.record(current.id, verb, granted_in=delta, facts=facts)
        view.record(current.parent_id, verb, granted_out=delta, facts=facts)
        current = view.node(current.parent_id)


def first_captured(hold: Hold) -> int:
    """Return what a captured hold counted at first, before any correction."""
    end = json.loads(hold.ended_by or "{}")
    return int(hold.amount if end.get("event") == "lapse" else end.get("amount", hold.captured))


def correct_past(view: LedgerView, hold: Hold, amount: int) -> None:
    """Count a correction of a captured amount in the window of its capture, if that window is over.

    An amount given back frees no room in the current window. An amount that is taken again after it was given back
    costs nothing in the current window, up to the amount first captured. Anything above that counts now.
    """
    less = hold.captured - amount
    if less < 0:
        first = first_captured(hold)
        less = min(hold.captured, first) - min(amount, first)
    for node in view.path(hold.node_id):
        if node.window is not None and hold.closed_ms < node.since_ms:
            view.put_node(replace(node, past=max(0, node.past - less)))


def count_in_past(view: LedgerView, hold: Hold) -> None:
    """Count a captured amount in the window in which its hold was closed, if that window is over."""
    for node in view.path(hold.node_id):
        if node.window is not None and hold.closed_ms < node.since_ms:
            view.put_node(replace(node, past=node.past + hold.captured))


def note_soft_limits(view: LedgerView, node_id: str) -> None:
    """Write an event and a notice for each soft limit reached on the path: once, and once again in each new window."""
    for node in view.path(node_id):
        if not node.soft or node.limit is None:
            continue
        for part in _reached(node):
            if part > node.warned:
                view.put_node(replace(view.node(node.id), warned=part))
                _tell_soft(view, view.node(node.id), part)


def _reached(node: Node) -> list[int]:
    limit, spent = node.limit, node.spent
    return [part for part in node.soft if limit and spent * PARTS >= limit * part]


def forget_soft_limits(view: LedgerView, node_id: str) -> None:
    """After a change of the limit, count only the soft limits already reached as notified."""
    node = view.node(node_id)
    view.put_node(replace(node, warned=max(_reached(node), default=0)))


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
        if node.room is not None and node.room < 0 and node.kind is not NodeKind.TOKENS:
            trip(
                view,
                node.id,
                OVERSHOOT,
                f"${format_dollars(node.counted)} used of ${format_dollars(node.limit or 0)}",
            )


def trip(view: LedgerView, node_id: str, word: str, reason: str) -> None:
    """Trip a node until its owner resets it. *word* is one of ``TERMINATIONS``. A tripped node keeps its first word.

    In shadow mode the owner and a limit that is exceeded still trip it; what the rules would trip is recorded.
    """
    node = view.node(node_id)
    if node.state is NodeState.TRIPPED:
        return
    if view.shadow and word not in (KILL_SWITCH, OVERSHOOT):
        view.record(node_id, "event", facts={"name": WOULD_TRIP, "rule": word, "reason": reason})
        told = f"{node.kind} {node.name!r} would be tripped ({word}) outside shadow mode: {reason}"
        view.tell(WOULD_TRIP, "info", told, session=node_id, rule=word, logged_only=True)
        return
    view.restrains = True
    view.record(node_id, "trip", facts={"word": word, "reason": reason})
    message = (
        f"{node.kind} {node.name!r} is tripped ({word}): {reason}; nothing more is authorized until its owner resets it"
    )
    view.tell(
        "tripped", "critical", message, session=node_id, amount=node.counted, limit=node.limit, rule=word,
        facts={"name": node.name, "reason": reason},
    )  # fmt: skip
    tripped = replace(view.node(node_id), state=NodeState.TRIPPED, terminated_by=word, trip_reason=reason)
    view.put_node(tripped)

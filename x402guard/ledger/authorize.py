"""May this amount be held? The one place that says yes, and the counters of how often it said no."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.errors import BudgetExhausted, PaymentRefused, PolicyDenied, SessionClosed, SessionTripped
from x402guard.ledger.budgets import find_shortfall
from x402guard.ledger.model import Hold, HoldKind, Node, NodeKind, NodeState
from x402guard.ledger.transitions import Lapse, apply, begin
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.money import MAX_NANOS, Nanos, format_dollars

BUDGET: Final = "budget"
"""The rule that is an invariant of the ledger: with an empty policy it still holds."""

TOKENS: Final = "tokens"
"""The rule of a budget of tokens with nothing left."""

TRIPPED: Final = "session_tripped"
"""The rule of a session that is latched."""

ONLY_RESET: Final = "Only the owner can reset this session."

REFUSAL_SAMPLES: Final = 100
"""How many refusals of a rule are kept whole at each end: the first hundred and the last hundred."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A no, as a value: it is counted in the books and raised by the shell.

    Attributes:
        rule: the rule that decided.
        reason: a sentence for people, with the value and the setting.
        requested, available: nano-dollars, where known.
        retry_after_s: seconds after which the same call may pass, where known.
        is_out: a payment for the same purchase was signed before, and is out.
        error: the class that the caller gets.
        advice: what the caller can do, as a sentence; "" where the reason says it.
    """

    rule: str
    reason: str
    requested: Nanos | None = None
    available: Nanos | None = None
    retry_after_s: int | None = None
    is_out: bool = False
    error: type[PaymentRefused] = PolicyDenied
    advice: str = ""


def lapse_due(view: LedgerView) -> None:
    """End what is past its own deadline and has no chain to ask: the ceiling counts, as assumed."""
    for hold in view.live(view.due):
        apply(view, hold.id, Lapse())


def check_open(view: LedgerView, node_id: str) -> Refusal | None:
    """Return why nothing may be authorized in a node, or None while it and all above it are open."""
    for node in view.path(node_id):
        if node.state is NodeState.TRIPPED:
            why = f"{node.terminated_by}: {node.trip_reason}" if node.trip_reason else node.terminated_by
            reset = f"x402guard reset {node.id}"
            return Refusal(
                TRIPPED,
                f"{node.kind} {node.name!r} is tripped ({why}); only its owner can reset it: {reset}",
                error=SessionTripped,
            )
        if node.state is NodeState.CLOSED:
            return Refusal("session_closed", f"{node.kind} {node.name!r} has ended", error=SessionClosed)
    return None


def authorize(
    view: LedgerView, hold: Hold, facts: Mapping[str, Any], finalizing: frozenset[str] = frozenset()
) -> Hold | Refusal:
    """Hold an amount, if the node is open and every budget on its path can take it; both decided on live rows.

    Nodes *finalizing* may use what they keep in reserve. *facts* go into the journal for the report. Checks in this order, so that a refusal is the same everywhere: state from
    leaf to root, the amount itself, room from leaf to root.
    """
    closed = check_open(view, hold.node_id)
    if closed is not None:
        return dataclasses.replace(closed, requested=hold.amount)
    if hold.amount > MAX_NANOS:
        reason = "the amount is above a billion dollars, more than the ledger holds"
        return Refusal("amount_too_large", reason, hold.amount, MAX_NANOS)
    short = check_room(view, hold.node_id, hold.amount, finalizing)
    if short is not None:
        return short
    written = begin(view, hold, facts)
    if hold.kind is HoldKind.PAYMENT:
        _set_starved(view, hold.node_id, starved=False)
    return written


def check_room(
    view: LedgerView, node_id: str, amount: Nanos, finalizing: frozenset[str] = frozenset()
) -> Refusal | None:
    """Return why an amount does not fit into the budgets of a path, or None."""
    shortfall = find_shortfall(view, node_id, amount, finalizing)
    if shortfall is None:
        return None
    node = shortfall.node
    owner = "the wallet" if node.kind is NodeKind.WALLET else f"{node.kind} {node.name!r}"
    reason = (
        f"${format_dollars(amount)} does not fit: {owner} has ${format_dollars(shortfall.available)} left of "
        f"${format_dollars(node.limit or 0)}{_each(node)} ({_where_it_is(node)})"
    )
    return Refusal(BUDGET, reason, amount, shortfall.available, error=BudgetExhausted)


def _each(node: Node) -> str:
    return "" if node.window is None else f" a {node.window.per}"


def _where_it_is(node: Node) -> str:
    if node.window is None:
        parts = {"spent": node.captured, "held": node.held, "with sub-budgets": node.granted_out}
    else:
        parts = {"spent": node.spent, "held": node.live}
    parts["in reserve"] = node.reserve
    return (
        ", ".join(f"${format_dollars(amount)} {where}" for where, amount in parts.items() if amount) or "nothing spent"
    )


def refusal_marks(node_id: str, rule: str, count: int | None = None) -> MarkKey:
    """Return the key of a rule's counter in a node or, given *count*, of the slot that keeps that refusal whole.

    A space parts the two, because it stands in no id: a child's id begins with its parent's.
    """
    if count is None:
        return "refusals", f"{node_id} {rule}"
    slot = count if count < REFUSAL_SAMPLES else REFUSAL_SAMPLES + (count - REFUSAL_SAMPLES) % REFUSAL_SAMPLES
    return "refusal", f"{node_id} {rule} {slot:03d}"


def note_refusal(view: LedgerView, node_id: str, refusal: Refusal) -> None:
    """Count a refusal: its rule's counter, and one of two hundred slots. It restrains nothing and frees nothing."""
    counter = refusal_marks(node_id, refusal.rule)
    before = view.mark(counter)
    count = 0 if before is None else int(before["count"])
    sample = {
        "rule": refusal.rule,
        "reason": refusal.reason,
        "requested": refusal.requested,
        "available": refusal.available,
        "at_ms": view.now_ms,
    }
    first = view.now_ms if before is None else before["first_ms"]
    view.put_mark(counter, {**sample, "count": count + 1, "first_ms": first})
    view.put_mark(refusal_marks(node_id, refusal.rule, count), sample)
    if refusal.rule == BUDGET:
        _set_starved(view, node_id, starved=True)


def _set_starved(view: LedgerView, node_id: str, *, starved: bool) -> None:
    # The session is what ends "by exhaustion", also where one of its scopes was refused.
    for node in view.path(node_id):
        if node.kind is not NodeKind.WALLET and node.starved is not starved:
            view.put_node(dataclasses.replace(node, starved=starved))
        if node.kind is NodeKind.SESSION:
            break

"""Authorizes holds: the only place that decides whether an amount may be held. Counts the refusals."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import BudgetExhausted, PaymentRefused, PolicyDenied, SessionClosed, SessionTripped, quoted
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.proofs import Proof
from x402guard.kernel.rows import MAX_NANOS, NOTHING, Hold, HoldKind, Nanos, Node, NodeKind, NodeState
from x402guard.ledger.budgets import (
    ALL_STARVED,
    OVER,
    STARVED,
    TASK_STARVED,
    ends_with_window,
    find_shortfall,
    reaches_soft_limit,
    window_end_text,
)
from x402guard.ledger.events import Lapse
from x402guard.ledger.transitions import apply, begin, begin_plainly
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars

BUDGET: Final = "budget"
"""The rule of the budget limits. It is an invariant of the ledger, so it applies even with an empty policy."""

TOKENS: Final = "tokens"
"""The rule of a token budget with nothing left."""

TRIPPED: Final = "session_tripped"
"""The rule of a tripped session."""

DEADLINE: Final = "deadline"
"""The rule of a delegated session whose deadline is over."""

ONLY_RESET: Final = "Only the owner can reset this session."

WOULD_REFUSE: Final = "would_refuse"
"""The event of a call that passes in shadow mode although a rule would have refused it."""

REFUSAL_SAMPLES: Final = 100
"""How many refusals of a rule are kept in full at each end: the first hundred and the last hundred."""


class Latch(Struct, frozen=True):
    """The key of a mark that refuses calls, and until when it does, in unix milliseconds; None: until it is cleared."""

    key: MarkKey
    ends_ms: int | None


class Refusal(Struct, frozen=True):
    """A refusal, as a value. The ledger counts it; the drivers raise it as an error.

    Attributes:
        rule: the rule that refused.
        reason: a sentence for the owner, with the value and the setting.
        requested, available: nano-dollars, or None if unknown.
        retry_after_s: seconds after which the same call may pass, or None if unknown.
        is_out: True if a payment for the same purchase was signed earlier and can still be taken.
        error: the class of the error that the caller gets.
        advice: what the caller can do, as a sentence; "" if the reason says it.
        words: the peer's own words that the reason is about, or "".
        short_of: the budget that is short, for a lack of budget; else "".
        needs: the nano-dollars that have to be left in it, its reserve included.
        latch: what was seen before and makes it refuse; None for another reason.
    """

    rule: str
    reason: str
    requested: Nanos | None = None
    available: Nanos | None = None
    retry_after_s: int | None = None
    is_out: bool = False
    error: type[PaymentRefused] = PolicyDenied
    advice: str = ""
    words: str = ""
    short_of: str = ""
    needs: Nanos = NOTHING
    latch: Latch | None = None


def lapse_due(view: LedgerView) -> None:
    """Lapse the holds in view that are past their own deadline and have no chain to ask: captures their ceilings."""
    for hold in view.live(view.due):
        apply(view, hold.id, Lapse())


OUTLIVES_CHILD: Final = (
    "Nothing was paid. Begin what goes on after a child or scope outside of its block, or wrap its function with "
    "session.bind(…) of the session around it."
)


def check_open(view: LedgerView, node_id: str, *, resumes: bool = False, ended: bool = False) -> Refusal | None:
    """Return why nothing may be authorized in a node, or None if the node and all its ancestors are open.

    *resumes*: the node itself may have ended, because it is being opened again. *ended*: those above it may, too.
    """
    for node in view.path(node_id):
        if node.state is NodeState.TRIPPED:
            why = f"{node.terminated_by}: {node.trip_reason}" if node.trip_reason else node.terminated_by
            reset = f"its owner can reset it: {shlex.join(('x402guard', 'reset', node.id))}"
            until = f"until {window_end_text(node, view.clock_ms)}; " if ends_with_window(node) else "only "
            return Refusal(
                TRIPPED,
                f"{node.kind} {node.name!r} is tripped ({why}); {until}{reset}",
                error=SessionTripped,
            )
        if node.state is NodeState.CLOSED and not ended and not (resumes and node.id == node_id):
            advice = OUTLIVES_CHILD if "/" in node.id else ""
            return Refusal("session_closed", f"{node.kind} {node.name!r} has ended", error=SessionClosed, advice=advice)
        if node.until_ms is not None and view.now_ms >= node.until_ms:
            until = datetime.fromtimestamp(node.until_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            had = "has had the end of its task" if node.until_ms == OVER else f"had until {until}, the end of its task"
            reason = f"{node.kind} {node.name!r} {had}"
            return Refusal(DEADLINE, reason, error=SessionClosed, advice="Nothing was paid. It cannot be opened again.")
    return None


def enforced(view: LedgerView, refusal: Refusal | None) -> Refusal | None:
    """Return the refusal of a rule. In shadow mode note it in the view, and return None."""
    if refusal is None or not view.shadow:
        return refusal
    view.excused.append((refusal.rule, refusal.reason))
    return None


def record_excused(view: LedgerView, node_id: str, hold_id: str | None = None) -> None:
    """Record that a call passes which a rule would have refused: once, for the first of these rules."""
    if not view.excused:
        return
    rule, said = view.excused[0]
    view.excused.clear()
    reason = said.encode("utf-8", "backslashreplace").decode("utf-8")
    view.record(node_id, "event", hold_id=hold_id, facts={"name": WOULD_REFUSE, "rule": rule, "reason": reason})
    message = f"{rule} would refuse this call outside shadow mode: {reason}"
    view.tell(WOULD_REFUSE, "info", message, session=node_id, rule=rule, logged_only=True)


def authorize(
    view: LedgerView,
    hold: Hold,
    facts: Mapping[str, Any],
    finalizing: frozenset[str] = frozenset(),
    proof: Proof | None = None,
) -> Hold | Refusal:
    """Write a hold if the node and its ancestors are open and every budget on the path has room for the amount.

    The order of the checks is fixed, so that the refusal is the same everywhere: states from leaf to root, the amount
    itself, room from leaf to root. The nodes *finalizing* may use their reserve. *facts* go into the journal for the
    report.

    Returns the hold as written, or the refusal. Raises ``IllegalTransition`` if the id belongs to another hold or the
    amount is not positive.
    """
    if proof is None and is_plain(view, hold, finalizing):
        return begin_plainly(view, hold, facts)
    closed = check_open(view, hold.node_id)
    if closed is not None:
        return replace(closed, requested=hold.amount)
    if hold.amount > MAX_NANOS:
        reason = "the amount is above a billion dollars, more than the ledger holds"
        return Refusal("amount_too_large", reason, hold.amount, MAX_NANOS)
    short = check_room(view, hold.node_id, hold.amount, finalizing)
    if short is not None:
        return short
    written = begin(view, hold, facts, proof)
    record_excused(view, hold.node_id, written.id)
    if _GRANTS[hold.kind]:
        note_granted(view, hold.node_id, _GRANTS[hold.kind])
    return written


_GRANTS: Final = {kind: STARVED[kind] | TASK_STARVED if kind in STARVED else 0 for kind in HoldKind} | {
    HoldKind.PAYMENT: ALL_STARVED
}
"""Kind of a hold → the bits of ``Node.starved`` that are over where one was granted."""


def is_plain(view: LedgerView, hold: Hold, finalizing: frozenset[str], *, spends: bool = False) -> bool:
    """True if a hold fits, and each budget of its path is open and has drawn what it uses: nothing else is to be decided.

    *spends*: nor where it is captured in full at once; no budget has a window, and it reaches no soft limit.
    """
    amount, bits = hold.amount, _GRANTS[hold.kind]
    if finalizing or view.excused or view.keeps_idle or not 0 < amount <= MAX_NANOS or view.hold(hold.id) is not None:
        return False
    for node in view.path(hold.node_id):
        used = node.captured + node.held + node.granted_out
        if node.state is not NodeState.OPEN or node.until_ms is not None or node.starved & bits:
            return False
        if node.limit is not None and amount > node.limit - used + node.past - node.reserve:
            return False
        if node.parent_id is not None and node.granted_in != used:
            return False
        if spends and (node.window is not None or (node.soft and reaches_soft_limit(node, amount))):
            return False
    return True


def note_granted(view: LedgerView, node_id: str, bits: int) -> None:
    """Note, on the path of a node, that what these *bits* of ``STARVED`` mean was granted."""
    for node in view.path(node_id):
        if node.starved & bits:
            view.put_node(replace(node, starved=node.starved & ~bits))


def check_room(
    view: LedgerView, node_id: str, amount: Nanos, finalizing: frozenset[str] = frozenset()
) -> Refusal | None:
    """Return why *amount* (nano-dollars) does not fit into the budgets of a path, or None if it fits."""
    shortfall = find_shortfall(view, node_id, amount, finalizing)
    if shortfall is None:
        return None
    node = shortfall.node
    owner = "the wallet" if node.kind is NodeKind.WALLET else f"{node.kind} {node.name!r}"
    reason = (
        f"${format_dollars(amount)} does not fit: {owner} has ${format_dollars(shortfall.available)} left of "
        f"${format_dollars(node.limit or 0)}{_each(node)} ({_where_it_is(node)})"
    )
    return Refusal(
        BUDGET,
        reason,
        amount,
        shortfall.available,
        error=BudgetExhausted,
        short_of=node.id,
        needs=shortfall.needs,
    )


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
    """Return the key of a rule's counter in a node or, given *count*, of the slot that keeps that refusal in full.

    A space separates node id and rule. No id contains a space, and a child's id begins with its parent's id.
    """
    if count is None:
        return "refusals", f"{node_id} {rule}"
    slot = count if count < REFUSAL_SAMPLES else REFUSAL_SAMPLES + (count - REFUSAL_SAMPLES) % REFUSAL_SAMPLES
    return "refusal", f"{node_id} {rule} {slot:03d}"


def refused_mark(node_id: str, kind: HoldKind, what: str) -> MarkKey:
    """Return the key of the counter of a model's or tool's refusals in a node."""
    return "refused_what", f"{node_id} {kind} {what[:200]}"


def note_refusal(
    view: LedgerView,
    node_id: str,
    refusal: Refusal,
    of: tuple[HoldKind, str] | None = None,
    *,
    starves: int = STARVED[HoldKind.PAYMENT],
) -> None:
    """Count a refusal in its rule's counter, and in that *of* a model or tool, and keep it in one of 200 slots.

    *starves* is the bit of what is short, if it is no model or tool. No balance changes.
    """
    if of is not None:
        key = refused_mark(node_id, *of)
        known = view.mark(key) or {"kind": of[0], "what": of[1][:200], "count": 0}
        view.put_mark(key, {**known, "count": int(known["count"]) + 1})
    counter = refusal_marks(node_id, refusal.rule)
    before = view.mark(counter)
    count = 0 if before is None else int(before["count"])
    sample = {
        "rule": refusal.rule,
        "reason": refusal.reason,
        "requested": refusal.requested,
        "available": refusal.available,
        "at_ms": view.now_ms,
        **({"words": quoted(refusal.words)} if refusal.words else {}),
        **({"short_of": refusal.short_of} if refusal.short_of else {}),
        **({"latch": [*refusal.latch.key, refusal.latch.ends_ms]} if refusal.latch else {}),
    }
    first = view.now_ms if before is None else before["first_ms"]
    view.put_mark(counter, {**sample, "count": count + 1, "first_ms": first})
    view.put_mark(refusal_marks(node_id, refusal.rule, count), sample)
    if refusal.rule == BUDGET:
        _starve(view, node_id, refusal.short_of, starves if of is None else STARVED[of[0]])
    # The first refusal by a rule is told; an agent that tries again and again fills no inbox.
    view.tell(
        "refused",
        "warning" if before is None else "info",
        f"refused by {refusal.rule}: {refusal.reason}",
        session=node_id,
        amount=refusal.requested,
        limit=refusal.available,
        rule=refusal.rule,
        logged_only=before is not None,
    )


def _starve(view: LedgerView, node_id: str, short_of: str, bit: int) -> None:
    """Note the lack of budget: in the session that was refused, and in those up to the one whose budget is short.

    A session is what ends as "budget_exhausted", so a refusal in a scope marks its session too.
    """
    path = [node for node in view.path(node_id) if node.kind in (NodeKind.SESSION, NodeKind.SCOPE)]
    first = next((number for number, node in enumerate(path) if node.kind is NodeKind.SESSION), 0)
    short = next((number for number, node in enumerate(path) if node.id == short_of), 0)
    for node in path[: max(first, short) + 1]:
        if not node.starved & bit:
            view.put_node(replace(node, starved=node.starved | bit))

"""Counts tokens in the ledger: the tokens that an agent's context has used, summed over many calls.

A token budget is a root node of its own, because tokens are not dollars and draw on no other budget. All usage counts,
also past the total, because it has already happened. A token budget restrains only further reservations, so it never
trips.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import ConfigError
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Evidence, Hold, HoldKind, HoldState, Nanos, Node, NodeKind, Purpose
from x402guard.ledger.authorize import lapse_due
from x402guard.ledger.bills import STATED
from x402guard.ledger.budgets import note_soft_limits
from x402guard.ledger.events import Capture, Correct, Void
from x402guard.ledger.transitions import apply, begin, has_lapsed
from x402guard.ledger.view import LedgerView

DEFAULT_TOKENS: Final = 100_000
"""The default total of a token budget."""

MOST_TOKENS: Final = 10**15
"""The largest total, and the largest count that one call may add."""

_MOST_SOFT: Final = 100

RESERVED_S: Final = 900
"""A reservation without a reported end counts as used after this many seconds."""


class TokenLimit(Struct, frozen=True):
    """Where a session's tokens are counted.

    Attributes:
        node_id: the budget in the ledger.
        soft: the number of used tokens that triggers one warning, or None.
        session_id: the session whose journal gets that warning; None for a budget without a session.
        hard: True if an LLM call that may not fit is limited or refused.
    """

    node_id: str
    soft: int | None = None
    session_id: str | None = None
    hard: bool = False


class Reservation(Struct, frozen=True):
    """A request for tokens: a unique id, their number, the instance, the tool, and whether an LLM call used them."""

    id: str
    requested: int
    instance: str
    tool: str = ""
    llm: bool = False


def tokens_node(session_id: str) -> str:
    """Return the id of a session's own token budget."""
    return f"{session_id}/tokens"


def call_tokens(hold_id: str) -> str:
    """Return the id of the reservation of an LLM call's tokens."""
    return f"{hold_id}/tokens"


def soft_mark(node_id: str) -> MarkKey:
    """Return the key of the mark that keeps the warnings given, so that each is given once in all processes."""
    return "tokens_soft", node_id


def tokens_left(node: Node) -> int:
    """Return how many tokens are neither used nor reserved, never below zero."""
    return max(0, node.room or 0)


def open_tokens(view: LedgerView, node_id: str, total: int | None, name: str, soft: tuple[int, ...] = ()) -> Node:
    """Open a token budget, or return the stored one. ``total`` None takes the stored total, or the default.

    *soft* are the soft limits of a new budget, in millionths of the total.

    Raises ``ConfigError`` for a total above the stored one: it can be lowered and never raised.
    """
    if not view.has_node(node_id):
        limit = Nanos(DEFAULT_TOKENS if total is None else total)
        view.put_node(Node(node_id, None, NodeKind.TOKENS, name, limit, view.now_ms, view.now_ms, soft=soft))
        view.record(node_id, "open", facts={"kind": NodeKind.TOKENS, "name": name, "limit": limit})
        return view.node(node_id)
    node = view.node(node_id)
    standing = node.limit or 0
    if total is not None and total > standing:
        raise ConfigError(
            f"tokens: this session was opened with {standing:,} tokens; a total can be lowered and never raised, "
            f"but {total:,} were requested"
        )
    if total is not None and total != standing:
        view.record(node_id, "limit", facts={"from": standing, "to": total})
        view.put_node(replace(view.node(node_id), limit=Nanos(total)))
    return view.node(node_id)


def lapse_reservations(view: LedgerView, limit: TokenLimit) -> None:
    """Count reservations past their deadline as used."""
    lapse_due(view)
    _note_soft(view, limit)


def reserve_tokens(view: LedgerView, node_id: str, wanted: Reservation) -> Hold | None:
    """Reserve the requested tokens, or fewer if fewer are left; None if none are left. Idempotent by ``wanted.id``."""
    standing = view.hold(wanted.id)
    if standing is not None:
        return standing
    granted = min(wanted.requested, tokens_left(view.node(node_id)))
    return _begin(view, node_id, wanted, granted) if granted > 0 else None


def _begin(view: LedgerView, node_id: str, wanted: Reservation, tokens: int) -> Hold:
    hold = Hold(
        id=wanted.id,
        node_id=node_id,
        kind=HoldKind.TOKENS,
        amount=Nanos(tokens),
        created_ms=view.now_ms,
        deadline_unix=view.now_unix + RESERVED_S,
        flying_since_ms=view.now_ms,
        instance=wanted.instance,
        purpose=Purpose(tool=wanted.tool),
    )
    facts = {"kind": HoldKind.TOKENS, "requested": wanted.requested, "tool": wanted.tool, "llm": wanted.llm}
    return begin(view, hold, facts)


def end_reservation(view: LedgerView, limit: TokenLimit, hold_id: str, used: int | None) -> None:
    """Count the tokens *used* by a reservation, or give it back if *used* is None.

    Usage above the reservation counts in full. A lapsed reservation counts as used: more usage is added, less gives
    nothing back. Raises ``ConfigError`` for a reservation that has already ended or belongs to another budget.
    """
    hold = view.hold(hold_id)
    if hold is None or hold.kind is not HoldKind.TOKENS or hold.node_id != limit.node_id:
        raise ConfigError("reservation: it belongs to another budget; pass what allocate() of this budget returned")
    if has_lapsed(hold) and hold.evidence is Evidence.ASSUMED:
        if used is not None and used > hold.captured:
            apply(view, hold_id, Correct(Nanos(used), Evidence.ESTIMATE))
        _note_soft(view, limit)
        return
    if hold.state is not HoldState.HELD:
        raise ConfigError("reservation: it has already ended; call allocate() again, or record_usage() without it")
    if used is None:
        apply(view, hold_id, Void("released"), STATED)
        return
    apply(view, hold_id, Capture(Nanos(used), Evidence.ESTIMATE), STATED)
    _note_soft(view, limit)


def record_tokens(view: LedgerView, limit: TokenLimit, use: Reservation) -> None:
    """Count ``use.requested`` tokens that were not reserved. Idempotent by ``use.id``."""
    if use.requested and view.hold(use.id) is None:
        _begin(view, limit.node_id, use, use.requested)
        apply(view, use.id, Capture(Nanos(use.requested), Evidence.ESTIMATE))
    _note_soft(view, limit)


def count_tokens(view: LedgerView, limit: TokenLimit, used: int) -> None:
    """Count the tokens of a hold that ends in the same transaction."""
    used = min(used, MOST_TOKENS - view.node(limit.node_id).captured)
    if used > 0:
        view.record(limit.node_id, "usage", captured=used)
        note_soft_limits(view, limit.node_id)
    _note_soft(view, limit)


def end_call_tokens(view: LedgerView, limit: TokenLimit, use: Reservation, *, in_time: bool) -> None:
    """Count the tokens of an LLM call in place of its reservation, if it has one. *in_time*: its hold is ending now.

    Idempotent for a call that lapsed: a reservation that has ended has counted them.
    """
    reservation = view.hold(use.id)
    if reservation is not None:
        if reservation.state is HoldState.HELD or reservation.evidence is Evidence.ASSUMED:
            end_reservation(view, limit, use.id, use.requested)
    elif in_time:
        count_tokens(view, limit, use.requested)
    else:
        record_tokens(view, limit, use)


def release_call_tokens(view: LedgerView, hold_id: str) -> None:
    """Give back the tokens that were reserved for an LLM call that was never billed."""
    reservation = view.hold(call_tokens(hold_id))
    if reservation is not None and reservation.state is HoldState.HELD:
        apply(view, reservation.id, Void("released"), STATED)


def _note_soft(view: LedgerView, limit: TokenLimit) -> None:
    """Write an event and a notice, once, when the used tokens have reached the soft limit."""
    node = view.node(limit.node_id)
    if limit.soft is None or node.captured < limit.soft:
        return
    said = (view.mark(soft_mark(limit.node_id)) or {"soft": []})["soft"]
    if limit.soft in said:
        return
    view.put_mark(soft_mark(limit.node_id), {"soft": [*said, limit.soft][-_MOST_SOFT:]})
    where = limit.session_id or limit.node_id
    facts = {"used_tokens": node.captured, "soft_tokens": limit.soft}
    view.record(where, "event", facts={"name": "tokens_soft_limit", **facts})
    total = node.limit or 0
    message = f"tokens: {node.captured:,} of {total:,} are used in {node.name!r}; the soft limit is {limit.soft:,}"
    told = {"name": node.name, "percent": 100 * limit.soft / (total or 1), **facts}
    view.tell("tokens_soft_limit", "warning", message, session=where, facts=told)

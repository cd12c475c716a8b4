"""Runs the owner's commands on a budget: trip, reset, set the limit (also upwards). The journal records who and why."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.frozen import replace
from x402guard.ledger.budgets import (
    KILL_SWITCH,
    ROLLED_BACK,
    forget_soft_limits,
    is_past_limit,
    settle_grants,
    trip,
    trip_exceeded,
)
from x402guard.ledger.model import (
    WALLET,
    Delivery,
    Evidence,
    Hold,
    HoldKind,
    HoldState,
    Node,
    NodeKind,
    NodeState,
    Purpose,
)
from x402guard.ledger.transitions import Capture, Correct, apply, begin
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.ledger.windows import window_start_ms
from x402guard.money import Nanos, format_dollars

RESTORED: Final = "a lost ledger"
_NEVER_OVER: Final = frozenset({NodeKind.WALLET, NodeKind.BUDGET})


def owner_mark(node_id: str) -> MarkKey:
    """Return the key of the mark that keeps the limit set by the owner and the limit before it."""
    return "owner_limit", node_id


def trip_node(view: LedgerView, node_id: str, reason: str) -> Node:
    """Trip a session or the wallet: nothing is authorized in it or below it until its owner resets it.

    Payments already signed can still be taken, and count. A tripped budget keeps its first reason. Raises
    ``ConfigError`` if there is no such budget.
    """
    known_budget(view, node_id)
    trip(view, node_id, KILL_SWITCH, reason)
    return view.node(node_id)


def reset_node(view: LedgerView, node_id: str, by: str) -> Node:
    """Reset a tripped budget.

    Raises ``ConfigError`` if there is no such budget, if it is not tripped, or if it is still past its limit.
    """
    node = known_budget(view, node_id)
    if node.state is not NodeState.TRIPPED:
        raise ConfigError(f"session: {node_id!r} is {node.state}; only a tripped session can be reset")
    if is_past_limit(view, node_id):
        used = format_dollars(view.node(node_id).counted)
        raise ConfigError(
            f"session: {node_id!r} has used ${used} of ${format_dollars(node.limit or 0)}; raise its limit first: "
            + shlex.join(("x402guard", "budget", "set", node_id, used))  # no $, which a shell reads as a variable
        )
    view.restrains = True  # an owner's command has to survive a power cut
    view.record(node_id, "reset", facts={"by": by, "word": node.terminated_by})
    message = f"{node.kind} {node.name!r} was reset by {by}"
    view.tell(
        "reset", "info", message, session=node_id, rule=node.terminated_by or "", facts={"name": node.name, "by": by}
    )
    state = NodeState.OPEN if node.openers or node.kind in _NEVER_OVER else NodeState.CLOSED
    opened = replace(view.node(node_id), state=state, terminated_by=None, trip_reason=None)
    view.put_node(opened)
    return opened


def set_limit(view: LedgerView, node_id: str, limit: Nanos, by: str) -> Node:
    """Set the limit of a budget (nano-dollars), also upwards. A budget that is past its new limit is tripped.

    Raises ``ConfigError`` if there is no such budget.
    """
    node = known_budget(view, node_id)
    if node.limit == limit:
        return node
    view.restrains = True
    view.record(node_id, "limit", facts={"from": node.limit, "to": limit, "by": by})
    before = view.mark(owner_mark(node_id))
    opened_with = node.limit if before is None else before["was"]  # its process keeps asking for this limit
    view.put_mark(owner_mark(node_id), {"was": opened_with, "is": limit})
    view.put_node(replace(view.node(node_id), limit=limit))
    forget_soft_limits(view, node_id)
    settle_grants(view, node_id)
    trip_exceeded(view, node_id)
    return view.node(node_id)


def count_lost(view: LedgerView, hold_id: str, lost: Nanos, by: str, node_ids: Iterable[str]) -> None:
    """Count what a lost ledger had used beyond this older one, and trip every session and named budget of *node_ids*.

    *lost* (nano-dollars) is captured in the wallet as a hold with the id *hold_id*.
    """
    view.restrains = True
    view.record(WALLET, "event", facts={"name": "restored", "lost": lost, "by": by})
    if lost:
        facts = {"kind": HoldKind.TOOL, "amount": lost, "tool": RESTORED, "deadline": view.now_unix}
        hold = Hold(
            id=hold_id,
            node_id=WALLET,
            kind=HoldKind.TOOL,
            amount=lost,
            created_ms=view.now_ms,
            deadline_unix=view.now_unix,
            flying_since_ms=view.now_ms,
            instance="",
            purpose=Purpose(tool=RESTORED),
        )
        apply(view, begin(view, hold, facts).id, Capture(lost, Evidence.ASSUMED, note="spent in a ledger that is lost"))
    for node in map(view.node, node_ids):
        if node.kind in (NodeKind.SESSION, NodeKind.BUDGET):
            trip(view, node.id, KILL_SWITCH, "the ledger was restored from an older copy")
    trip_exceeded(view, WALLET)


class Written(Struct, frozen=True):
    """A hold as a process has written it last.

    Attributes:
        facts: those of its first entry in the journal.
        path: the budgets it is paid out of, from its own up.
    """

    hold: Hold
    facts: Mapping[str, Any]
    path: tuple[str, ...]


def trip_rolled_back(view: LedgerView, reason: str) -> None:
    """Trip the wallet, because the ledger's server has lost entries."""
    trip(view, WALLET, ROLLED_BACK, reason)


def count_again(view: LedgerView, lost: Iterable[Written]) -> int:
    """Enter the holds that the ledger's server has lost, and what else it counts too low; return how many these are.

    Each counts as it did: a payment until the chain decides, whatever else was captured as captured. It counts in its own
    budget, or in the nearest one above that is not lost as well, also past a limit.
    """
    entered = 0
    for each in lost:
        here = view.hold(each.hold.id)
        if here is None and each.hold.state in _COUNTED:
            _enter(view, each)
        elif here is None or not _counts_less(here, each.hold):
            continue
        elif here.state is HoldState.HELD:
            apply(view, here.id, Capture(each.hold.captured, Evidence.ASSUMED, note=_AGAIN))
        else:
            apply(view, here.id, Correct(each.hold.captured, each.hold.evidence or Evidence.ASSUMED))
        entered += 1
    return entered


def _enter(view: LedgerView, each: Written) -> None:
    hold, is_payment = each.hold, each.hold.intent is not None
    again = replace(
        hold,
        node_id=next((node_id for node_id in each.path if view.has_node(node_id)), WALLET),
        state=HoldState.HELD,
        captured=Nanos(0),
        evidence=None,
        claim=None,
        proof=None,
        closed_ms=0,
        doubt="the ledger's server has lost it" if is_payment else None,
        delivery=Delivery.LOST if is_payment else hold.delivery,
    )
    begin(view, again, each.facts)
    if hold.state is HoldState.CAPTURED and not is_payment:
        apply(view, hold.id, Capture(hold.captured, Evidence.ASSUMED, note=_AGAIN))
    trip_exceeded(view, again.node_id)


def _counts_less(here: Hold, written: Hold) -> bool:
    """True for what was captured above all that the ledger counts for it now; a payment is decided by the chain."""
    if written.intent is not None or written.state is not HoldState.CAPTURED:
        return False
    counted = {HoldState.HELD: here.amount, HoldState.CAPTURED: here.captured}.get(here.state)
    return counted is not None and written.captured > counted


_AGAIN: Final = "entered again: the ledger's server had lost it"
_COUNTED: Final = frozenset({HoldState.HELD, HoldState.CAPTURED})

CLOCK_MARK: Final[MarkKey] = ("clock", "accepted")
"""The key of the mark with the time, in unix milliseconds, that the owner has accepted last."""


def accept_clock(view: LedgerView, by: str) -> None:
    """Take the machine's clock as right, although the ledger's last entry is a day behind it, or ahead of it.

    Times of budgets that are in the future become the present.
    """
    view.restrains = True
    view.record(WALLET, "event", facts={"name": "clock_accepted", "by": by, "ahead_ms": -view.behind_ms})
    view.put_mark(CLOCK_MARK, {"at_ms": view.clock_ms})
    for node in view.nodes():
        since_ms = node.since_ms
        if node.window is not None and since_ms > view.clock_ms:
            since_ms = window_start_ms(node.window, view.clock_ms)
        last_ms = min(node.last_ms, view.clock_ms)
        if (since_ms, last_ms) != (node.since_ms, node.last_ms):
            view.put_node(replace(view.node(node.id), since_ms=since_ms, last_ms=last_ms))


def known_budget(view: LedgerView, node_id: str) -> Node:
    """Return a budget in view. Raises ``ConfigError`` if there is none with that id, or if it counts tokens."""
    if not view.has_node(node_id) or view.node(node_id).kind is NodeKind.TOKENS:
        raise ConfigError(f"session: there is no session {node_id!r} in this ledger")
    return view.node(node_id)

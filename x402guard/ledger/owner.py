"""Runs the owner's commands on a budget: trip, reset, set the limit (also upwards). The journal records who and why."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Final

from msgspec.structs import replace

from x402guard.errors import ConfigError
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.evm import Address
from x402guard.kernel.proofs import ByOwner
from x402guard.kernel.rows import (
    WALLET,
    Nanos,
    Node,
    NodeKind,
    NodeState,
    Window,
)
from x402guard.kernel.windows import window_start_ms
from x402guard.ledger.budgets import (
    KILL_SWITCH,
    as_line,
    balance_grants,
    forget_soft_limits,
    is_past_limit,
    node_told,
    trip,
    trip_exceeded,
)
from x402guard.ledger.store import LedgerReads
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars

_NEVER_OVER: Final = frozenset({NodeKind.WALLET, NodeKind.BUDGET})


def owner_mark(node_id: str) -> MarkKey:
    """Return the key of the mark that keeps the limit set by the owner and the limit before it."""
    return "owner_limit", node_id


def trip_node(view: LedgerView, node_id: str, reason: str, by: str | None = None) -> Node:
    """Trip a session or the wallet: nothing is authorized in it or below it until its owner resets it.

    Payments already signed can still be taken, and count. A tripped budget keeps its first reason. *by* is the owner who
    does it with a command. Raises ``ConfigError`` if there is no such budget.
    """
    known_budget(view, node_id)
    trip(view, node_id, KILL_SWITCH, check_reason(reason), by)
    return view.node(node_id)


_LONGEST_REASON: Final = 300


def check_reason(reason: object) -> str:
    """Return why something is stopped, as one line of at most 300 characters.

    Raises ``ConfigError`` for what is no text, and for a blank one.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise ConfigError(f"reason: {reason!r:.80} says nothing; write why, such as 'spends too much'")
    return as_line(reason.strip()[: _LONGEST_REASON * 10])[:_LONGEST_REASON]


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
    view.prove(ByOwner(node_id, "reset", by))
    view.record(node_id, "reset", facts={"by": by, "word": node.terminated_by})
    message = f"{node.kind} {node.name!r} was reset by {by}"
    view.tell(
        "reset", "info", message, session=node_id, rule=node.terminated_by or "", facts={"name": node.name, "by": by}
    )
    state = NodeState.OPEN if node.openers or node.kind in _NEVER_OVER else NodeState.CLOSED
    opened = replace(node_told(view.node(node_id)), state=state, terminated_by=None, trip_reason=None)
    view.put_node(opened)
    return opened


def restarted(view: LedgerView, node: Node, window: Window | None) -> Node:
    """Return a node whose spending restarts by a *window*: another one begins now, and what was captured before is past."""
    if window is None or window == node.window:
        return node
    return replace(node, window=window, since_ms=window_start_ms(window, view.clock_ms), past=node.used - node.live)


KEEP: Final = Window("day", "")
"""The window that a budget has."""


def change_payer(view: LedgerView, key: MarkKey, payer: Address, by: str) -> str:
    """Let a ledger belong to another key's account from now on, and return the one of before. *key* is ``PAYER_MARK``.

    What the key of before has signed stays and counts. Raises ``ConfigError`` if no key was ever used, or for the same one.
    """
    known = view.mark(key)
    if known is None or known["address"].lower() == payer.lower():
        what = "no key was ever used with it" if known is None else f"it belongs to {payer} already"
        raise ConfigError(f"keys rotate: there is nothing to change in this ledger: {what}")
    was = str(known["address"])
    view.prove(ByOwner(WALLET, "payer", by))
    before = [each for each in dict.fromkeys((*known.get("before", ()), was)) if each.lower() != payer.lower()]
    view.put_mark(key, {"address": payer, "before": before})
    view.record(WALLET, "event", facts={"name": "key_changed", "from": was, "to": payer, "by": by})
    return was


def set_limit(view: LedgerView, node_id: str, limit: Nanos | None, by: str, window: Window = KEEP) -> Node:
    """Set the limit of a budget (nano-dollars), also upwards. A budget that is past its new limit is tripped.

    *window*: when the spending of the wallet or of a named budget restarts. What was captured before it is set counts in no
    window. Raises ``ConfigError`` if there is no such budget, and for None (no limit) unless it is the wallet.
    """
    node = known_budget(view, node_id)
    if limit is None and node_id != WALLET:
        raise ConfigError(f"limit: {node.kind} {node.name!r} needs one; the wallet alone can be without")
    restarts = node.window if window is KEEP else window
    if node.limit == limit and node.window == restarts:
        return node
    if node.window != restarts and node.kind not in _NEVER_OVER:
        raise ConfigError(
            f"per: {node.kind} {node.name!r} has a budget for good; a named budget or the wallet may restart"
        )
    view.prove(ByOwner(node_id, "limit", by))
    said = {} if restarts is None or restarts == node.window else {"per": restarts.per, "tz": restarts.tz}
    view.record(node_id, "limit", facts={"from": node.limit, "to": limit, "by": by, **said})
    before = view.mark(owner_mark(node_id))
    # Its process keeps asking for the limit that it had; if it has lowered it since the last change, for the new one.
    opened_with = before["was"] if before is not None and node.limit == before["is"] else node.limit
    view.put_mark(owner_mark(node_id), {"was": opened_with, "is": limit})
    view.put_node(replace(restarted(view, view.node(node_id), restarts), limit=limit))
    forget_soft_limits(view, node_id)
    balance_grants(view, node_id)
    trip_exceeded(view, node_id)
    return view.node(node_id)


MOST_AHEAD_MS: Final = 26 * 3_600_000
"""A day, and two hours for a job that is late: the owner is asked about a clock that is further ahead, in milliseconds."""

CLOCK_MARK: Final[MarkKey] = ("clock", "accepted")
"""The key of the mark with the time, in unix milliseconds, that the owner has accepted last."""


def windows_ahead(ledger: LedgerReads) -> dict[str, int]:
    """Return the budgets whose window begins in the future, and what each had used before the present one began.

    In nano-dollars, at most: what was given back since then of what was used before is not used any more. A
    clock that was ahead has begun these windows, and taken what the present one has used for past. What was held then
    counts when it is captured, wherever that was: in the budget, or in one below it.
    """
    now_ms, found = ledger.now_ms(), {}
    for node in ledger.nodes():
        if node.window is None or node.since_ms <= now_ms:
            continue
        start_ms = window_start_ms(node.window, now_ms)
        entries = [each for each in ledger.entries(node.id) if each.captured]
        before = {each.hold_id for each in entries if each.at_ms < start_ms}
        found[node.id] = sum(
            each.captured if each.at_ms < start_ms else min(0, each.captured)
            for each in entries
            if each.hold_id in before
        )
    return found


def accept_time(view: LedgerView, by: str, ahead: Mapping[str, int], captured: Collection[str] = ()) -> None:
    """Take the machine's clock as right, although the ledger's last entry is a day behind it, or ahead of it.

    Times of budgets that are in the future become the present; *ahead* is what ``windows_ahead`` has found. So do those of
    *captured* holds, the ids of those that the chain can still correct: else a correction would count in a later window.
    """
    view.record(WALLET, "event", facts={"name": "clock_accepted", "by": by, "ahead_ms": -view.behind_ms})
    view.put_mark(CLOCK_MARK, {"at_ms": view.clock_ms})
    for node in view.nodes():
        since_ms, past = node.since_ms, node.past
        if node.window is not None and since_ms > view.clock_ms:
            since_ms, past = window_start_ms(node.window, view.clock_ms), min(past, ahead.get(node.id, 0))
        last_ms = min(node.last_ms, view.clock_ms)
        if (since_ms, last_ms) != (node.since_ms, node.last_ms):
            view.prove(ByOwner(node.id, "clock", by))
            view.put_node(replace(view.node(node.id), since_ms=since_ms, last_ms=last_ms, past=past))
            trip_exceeded(view, node.id)
    for hold in map(view.hold, captured):
        if hold is not None and hold.closed_ms > view.clock_ms:
            view.put_hold(replace(hold, closed_ms=view.clock_ms))


def known_budget(view: LedgerView, node_id: str) -> Node:
    """Return a budget in view. Raises ``ConfigError`` if there is none with that id, or if it counts tokens."""
    if not view.has_node(node_id) or view.node(node_id).kind is NodeKind.TOKENS:
        raise ConfigError(f"session: there is no session {node_id!r} in this ledger")
    return view.node(node_id)

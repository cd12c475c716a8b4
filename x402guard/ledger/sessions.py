"""Opens, resumes, lowers and closes nodes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import ConfigError
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.evm import Address
from x402guard.kernel.rows import WALLET, Nanos, Node, NodeKind, NodeState, Per, Window
from x402guard.kernel.windows import window_start_ms, zone_names
from x402guard.ledger.budgets import balance_grants, trip_exceeded, unlent
from x402guard.ledger.inputs import note_ignored
from x402guard.ledger.owner import owner_mark, restarted
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars


class NodeRequest(Struct, frozen=True):
    """A request to open or resume a node.

    Attributes:
        id, parent_id, kind, name: of the node.
        limit: nano-dollars; None takes the stored limit of a resumed node.
        opener: the token of this opening, for ``close_node``; the part before its ``#`` is the instance's id.
        gone: instances known to have ended; their openings are over.
        window: when its spending restarts; None for never.
        reserve: nano-dollars of the limit kept for last LLM calls; None for the stored reserve, or none.
        reserve_percent: in place of *reserve*, a part of the limit that results, in percent.
        soft: soft limits in millionths of the limit, lowest first; None for the stored ones, or none.
        until_ms: when a new node's time is over, in unix milliseconds; None for never.
    """

    id: str
    parent_id: str
    kind: NodeKind
    name: str
    limit: Nanos | None
    opener: str
    gone: frozenset[str] = frozenset()
    window: Window | None = None
    reserve: Nanos | None = None
    reserve_percent: int | None = None
    soft: tuple[int, ...] | None = None
    until_ms: int | None = None


def ensure_wallet(
    view: LedgerView, limit: Nanos | None, soft: tuple[int, ...] = (), window: Window | None = None
) -> Node:
    """Return the root node, and write it at first use. *limit* is in nano-dollars; None takes the ledger's limit.

    *soft* are the soft limits, in millionths of the limit; *window* is when its spending restarts.

    Raises ``ConfigError`` if the ledger already has another limit or window: two processes with different ones must not
    share it.
    """
    if not view.has_node(WALLET):
        since_ms = 0 if window is None else window_start_ms(window, view.now_ms)
        wallet = Node(WALLET, None, NodeKind.WALLET, WALLET, limit, view.now_ms, view.now_ms, soft=soft)
        view.put_node(replace(wallet, window=window, since_ms=since_ms))
        said = {} if window is None else {"per": window.per, "tz": window.tz}
        view.record(WALLET, "open", facts={"kind": NodeKind.WALLET, "name": WALLET, "limit": limit, **said})
        return view.node(WALLET)
    wallet = view.node(WALLET)
    if soft != wallet.soft:
        wallet = replace(wallet, soft=soft)
        view.put_node(wallet)
    set_by_owner = view.mark(owner_mark(WALLET))
    if limit is not None and set_by_owner is None and window != wallet.window and wallet.limit is not None:
        raise ConfigError(
            f"budget: Guard asks for one with the window {_shown(window)}, but this ledger's wallet has {_shown(wallet.window)}; "
            f"leave budget out to take the ledger's, or its owner changes it: {_set_wallet(limit, window)}"
        )
    if limit is None or limit == wallet.limit or is_owners_limit(set_by_owner, limit, wallet.limit):
        return wallet  # the limit of the ledger, also where its owner has changed it since
    if wallet.limit is None:
        view.put_node(restarted(view, wallet, window))
        _refuse_below_used(view, view.node(WALLET), limit, "budget")
        return _lower(view, view.node(WALLET), limit, {} if window is None else {"per": window.per, "tz": window.tz})
    raise ConfigError(
        f"budget: Guard asks for ${format_dollars(limit)}, but this ledger's wallet has a limit of "
        f"${format_dollars(wallet.limit)}; use that value, or leave budget out to take the ledger's limit"
    )


def _set_wallet(limit: Nanos, window: Window | None) -> str:
    per = [] if window is None else ["--per", window.per, "--tz", window.tz]
    return shlex.join(["x402guard", "budget", "set", WALLET, format_dollars(limit), *per])


def is_owners_limit(set_by_owner: Mapping[str, Any] | None, limit: Nanos, now: Nanos | None) -> bool:
    """Return whether the owner's limit stands in place of the *limit* that code asks for: the first one, or a higher one.

    *set_by_owner* is the row of ``owner_mark``, or None; *now* the limit in the ledger.
    """
    if set_by_owner is None or now is None:
        return False
    return bool(limit == set_by_owner["was"] or limit > now == set_by_owner["is"])


def name_mark(name: str) -> MarkKey:
    """Return the key of the mark that keeps the first session or named budget of a name."""
    return "named", name


def opening_scope(request: NodeRequest, *more: str) -> Scope:
    """Return the scope of ``open_node``; *more* are other nodes that the same transaction opens."""
    marks = (owner_mark(request.id), name_mark(request.id), name_mark(request.name))
    return Scope(nodes=(request.id, request.parent_id, *more), marks=marks, durable=True)


PAYER_MARK: Final[MarkKey] = ("wallet", "payer")


def ensure_payer(view: LedgerView, payer: Address) -> None:
    """Bind the ledger to one wallet at first use. Two wallets in one ledger would share one wallet's budget.

    Raises ``ConfigError`` if the ledger belongs to another wallet.
    """
    known = view.mark(PAYER_MARK)
    if known is None:
        view.put_mark(PAYER_MARK, {"address": payer})
    else:
        check_payer(view, payer)


def check_payer(view: LedgerView, payer: Address | None) -> None:
    """Raise ``ConfigError`` if the ledger belongs to another key's account than *payer*, maybe since a moment ago."""
    known = view.mark(PAYER_MARK)
    if payer is None or known is None or known["address"].lower() == payer.lower():
        return
    if payer.lower() in [each.lower() for each in known.get("before", ())]:
        raise ConfigError(
            f"signer: the owner has changed this ledger's key (x402guard keys rotate): {payer} signs nothing any more; use the key "
            f"of {known['address']}"
        )
    raise ConfigError(
        f"signer: this ledger belongs to the wallet {known['address']}, but the key belongs to {payer}; use a separate ledger for "
        "each wallet, or change this one's key: x402guard keys rotate KEYSTORE"
    )


def open_node(view: LedgerView, request: NodeRequest) -> Node:
    """Open a node, or resume the stored node with its id and the amount it has left.

    Raises ``ConfigError`` if the stored node has another parent, kind or window, if its limit would be raised, if its
    reserve would be lowered or take the whole budget, if a new node has no limit, or if its id is another one's name.
    """
    if not view.has_node(request.id):
        return _create(view, request)
    node = view.node(request.id)
    if (node.parent_id, node.kind) != (request.parent_id, request.kind):
        raise ConfigError(f"id: {request.id!r} is already a {node.kind} under {node.parent_id!r}; choose another id")
    if node.window != request.window:
        raise ConfigError(
            f"per: budget {node.name!r} has the window {_shown(node.window)}, not {_shown(request.window)}"
        )
    set_by_owner = view.mark(owner_mark(request.id))
    if request.limit is not None and is_owners_limit(set_by_owner, request.limit, node.limit):
        request = replace(request, limit=None)  # the owner has changed this limit since
    if request.limit is not None and node.limit is not None and request.limit > node.limit:
        field, what = ("limit", "budget") if node.kind is NodeKind.BUDGET else ("budget", "session")
        name = node.name if node.kind is NodeKind.BUDGET else node.id
        command = shlex.join(["x402guard", "budget", "set", node.id, format_dollars(request.limit)])
        raise ConfigError(
            f"{field}: {what} {name!r} was opened with ${format_dollars(node.limit)}; its limit can be lowered "
            f"and never raised by code, but ${format_dollars(request.limit)} was requested; the owner raises it: {command}"
        )
    if request.limit is not None and request.limit != node.limit:
        if node.kind is NodeKind.BUDGET:
            _refuse_below_used(view, node, request.limit, "limit")
        node = _lower(view, node, request.limit)
    is_owners = set_by_owner is not None and node.limit == set_by_owner["is"]
    node = _tighten(view, node, request, is_owners=is_owners)
    if node.kind is NodeKind.BUDGET:
        return node  # a named budget is shared: it is never opened or closed
    view.record(node.id, "resume", facts={"opener": request.opener})
    node = view.node(node.id)
    reopened = NodeState.OPEN if node.state is NodeState.CLOSED else node.state
    word = node.terminated_by if reopened is NodeState.TRIPPED else None
    alive = [opener for opener in node.openers if opener.rpartition("#")[0] not in request.gone]
    openers = (*alive, request.opener)
    view.put_node(replace(node, state=reopened, terminated_by=word, closed_ms=None, openers=openers, starved=0))
    return view.node(node.id)


def leave_unopened(view: LedgerView, node: Node) -> None:
    """Let a new node be open in no process."""
    view.put_node(replace(node, openers=()))


def _shown(window: Window | None) -> str:
    return "none" if window is None else f"{window.per} in {window.tz}"


def _tighten(view: LedgerView, node: Node, request: NodeRequest, *, is_owners: bool) -> Node:
    """Raise the reserve (never lower it) and replace the soft limits. A part of a limit that is lower now changes nothing.

    A budget whose limit is its owner's opens also where its reserve leaves nothing for payments.
    """
    reserve = node.reserve if request.reserve is None else request.reserve
    if request.reserve_percent is not None and node.limit is not None:
        reserve = max(node.reserve, part_of(node.limit, request.reserve_percent))
    elif reserve < node.reserve:
        raise ConfigError(
            f"reserve: session {node.id!r} keeps ${format_dollars(node.reserve)}; a reserve can be raised and never "
            f"lowered, but ${format_dollars(reserve)} was requested"
        )
    asks = request.reserve is not None or request.reserve_percent is not None
    if asks and node.limit is not None and reserve >= node.limit and (not is_owners or reserve > node.reserve):
        raise ConfigError(
            f"reserve: ${format_dollars(reserve)} of a budget of ${format_dollars(node.limit)} would leave nothing for payments"
        )
    tightened = replace(node, reserve=reserve, soft=node.soft if request.soft is None else request.soft)
    if tightened != node:
        view.put_node(tightened)
    return tightened


def part_of(limit: Nanos, percent: int) -> Nanos:
    """Return a part of a limit in nano-dollars, rounded up."""
    return Nanos(-(-limit * percent // 100))


def begin_finalizing(view: LedgerView, node_id: str) -> None:
    """Let a session's last LLM calls use its reserve.

    Raises ``ConfigError`` if it has no reserve, or if its last calls have already begun.
    """
    node = view.node(node_id)
    if not node.reserve:
        raise ConfigError(f'reserve: session {node.name!r} has no reserve; open it with reserve="10%"')
    if node.finalized:
        raise ConfigError(f"reserve: the last calls of session {node.name!r} have already begun; they begin once")
    view.record(node_id, "event", facts={"name": "finalizing", "amount": node.reserve})
    view.put_node(replace(view.node(node_id), finalized=True))


def _create(view: LedgerView, request: NodeRequest) -> Node:
    if request.limit is None:
        if request.kind is NodeKind.BUDGET:
            raise ConfigError(
                f'limit: the budget {request.name!r} is new; give it a limit: guard.budget({request.name!r}, "$5.00")'
            )
        raise ConfigError(
            f'budget: there is no {request.kind} {request.id!r} to resume, and a new one needs budget="$5.00" (or the guard '
            'session_budget="$5.00")'
        )
    named = view.mark(name_mark(request.id))
    if named is not None and named["id"] != request.id:
        reason = f"is the name of another budget ({named['id']}), and its owner could not tell them apart"
        raise ConfigError(f"id: {request.id!r} {reason}; choose another id")
    if "/" not in request.id and view.mark(name_mark(request.name)) is None:
        view.put_mark(name_mark(request.name), {"id": request.id})
    node = Node(
        id=request.id,
        parent_id=view.node(request.parent_id).id,
        kind=request.kind,
        name=request.name,
        limit=request.limit,
        created_ms=view.now_ms,
        last_ms=view.now_ms,
        openers=() if request.kind is NodeKind.BUDGET else (request.opener,),
        window=request.window,
        since_ms=0 if request.window is None else window_start_ms(request.window, view.now_ms),
        reserve=request.reserve or part_of(request.limit, request.reserve_percent or 0),
        soft=request.soft or (),
        until_ms=request.until_ms,
    )
    view.put_node(node)
    facts = {"kind": node.kind, "name": node.name, "limit": node.limit, "parent": node.parent_id}
    if node.window is not None:
        facts |= {"per": node.window.per, "tz": node.window.tz}
    view.record(node.id, "open", facts=facts)
    return view.node(node.id)


def _lower(view: LedgerView, node: Node, limit: Nanos, window: Mapping[str, str] | None = None) -> Node:
    view.record(node.id, "limit", facts={"from": node.limit, "to": limit, **(window or {})})
    view.put_node(replace(view.node(node.id), limit=limit))
    balance_grants(view, node.id)
    trip_exceeded(view, node.id)
    return view.node(node.id)


def _refuse_below_used(view: LedgerView, node: Node, limit: Nanos, field: str) -> None:
    """Raise ``ConfigError`` for a limit below what is used: one process's settings stop no budget that others share."""
    used = unlent(view, node.id).counted
    if limit < used:
        what = "the wallet" if node.id == WALLET else f"budget {node.name!r}"
        command = shlex.join(("x402guard", "budget", "set", node.id))
        raise ConfigError(
            f"{field}: ${format_dollars(limit)} is less than what {what} has used (${format_dollars(used)}), and would stop all "
            f"that pay from it; its owner sets the limit: {command} AMOUNT, or {command} {format_dollars(limit)} --yes to stop it"
        )


def _tell_end(view: LedgerView, node: Node, word: str | None) -> None:
    if node.kind is NodeKind.SCOPE:
        return
    spent = f"${format_dollars(node.spent)} of ${format_dollars(node.limit or 0)}"
    view.tell(
        "session_ended",
        "info",
        f"{node.kind} {node.name!r} has ended ({word or 'completed'}), with {spent} spent",
        session=node.id,
        amount=node.spent,
        limit=node.limit,
        rule=word or "completed",
        facts={"name": node.name},
    )


COMPLETED: Final = "completed"
NOT_VERIFIED: Final = "not_verified"

ERROR: Final = "error"
"""The end of a session whose block was left by an exception, and of which the agent has said nothing."""


class Closing(Struct, frozen=True):
    """How one opening of a node ends.

    Attributes:
        opener: the opening.
        left_by_refusal: True if a refusal for lack of its budget ended the ``with`` block.
        said: what the agent has said about its end, if anything.
        failed: True if an error left the block.
    """

    opener: str
    left_by_refusal: bool = False
    said: str | None = None
    failed: bool = False


def _word_of(node: Node, closing: Closing) -> str | None:
    starved = closing.left_by_refusal or (node.starved and closing.said != COMPLETED)
    if starved:
        return "budget_exhausted"
    return ERROR if closing.failed and closing.said is None else closing.said


Ending = Literal["normal", "abnormal"]


def ending_of(view: LedgerView, node_id: str, closing: Closing) -> Ending | None:
    """Return how a node ends with this opening, or None if it does not: others are open, or it has ended."""
    node = view.node(node_id)
    if node.openers != (closing.opener,):
        return None
    tripped = bool(view.killed_by) or any(each.state is NodeState.TRIPPED for each in view.path(node_id))
    stopped = tripped or node.state is not NodeState.OPEN
    said = _word_of(node, closing) in (None, COMPLETED, NOT_VERIFIED)
    return "normal" if said and not stopped and not closing.failed else "abnormal"


def close_node(view: LedgerView, node_id: str, closing: Closing) -> Node:
    """End one opening of a node. The node closes with its last opening. Live holds are unchanged and still count."""
    opener = closing.opener
    node = view.node(node_id)
    if opener not in node.openers:
        return node
    rest = tuple(other for other in node.openers if other != opener)
    if rest or node.state is not NodeState.OPEN:
        view.put_node(replace(node, openers=rest, closed_ms=None if rest else view.now_ms))
        if not rest:
            _tell_end(view, node, node.terminated_by)
        return view.node(node_id)
    word = _word_of(node, closing)
    if word in (None, COMPLETED) and note_ignored(view, node_id):
        word = NOT_VERIFIED
    view.record(node_id, "close", facts={"terminated_by": word})
    _tell_end(view, node, word)
    view.put_node(
        replace(view.node(node_id), state=NodeState.CLOSED, terminated_by=word, openers=(), closed_ms=view.now_ms)
    )
    balance_grants(view, node_id)
    return view.node(node_id)


def check_window(per: object, tz: object) -> Window:
    """Return a window. Raises ``ConfigError`` for an invalid period or a time zone unknown on this machine."""
    period = next((known for known in get_args(Per) if known == per), None)
    if period is None:
        raise ConfigError(f"per: {per!r} is not one of 'day', 'week' and 'month'")
    if not isinstance(tz, str):
        raise ConfigError(f"tz: {tz!r} is not the name of a time zone; write a name such as 'UTC' or 'Europe/Berlin'")
    if tz not in zone_names():
        raise ConfigError(
            f"tz: {tz!r:.80} is not a time zone that each machine knows; write a name such as 'UTC' or 'Europe/Berlin'"
        )
    return Window(period, tz)

"""Cuts a request down to what the session that delegates has itself: the intersection of both scopes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from x402guard.delegation.names import MOST_NAMES, is_name
from x402guard.errors import BudgetExhausted, ConfigError
from x402guard.flow.context import Context
from x402guard.kernel.rows import Nanos
from x402guard.ledger.authorize import BUDGET, Refusal, check_room
from x402guard.ledger.budgets import room_on_path
from x402guard.ledger.token_budget import tokens_left
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars, nanos_to_decimal
from x402guard.policy.patterns import allows_name, host_listed
from x402guard.policy.reach import Reach

if TYPE_CHECKING:
    from x402guard.delegation.messages import TaskRequest

Covers = Callable[[str, str], bool]


def narrowed(view: LedgerView, context: Context, request: TaskRequest) -> tuple[TaskRequest, dict[str, Any]] | Refusal:
    """Return the request as it can be granted, and field → what was removed from it.

    An equal scope is allowed. Raises ``ConfigError`` naming a field of which nothing is left; returns the refusal of a
    budget of which nothing is left.
    """
    changes: dict[str, Any] = {}
    removed: dict[str, Any] = {}
    _narrow_names(context, request, changes, removed)
    room = room_on_path(view, context.node_id, enough=request.limit)
    if room is not None and request.limit > room:
        if not room:
            return _nothing_left(view, context, request.limit)
        changes["budget"], removed["budget"] = nanos_to_decimal(room), format_dollars(Nanos(request.limit - room))
    until_unix = min((n.until_ms // 1000 for n in view.path(context.node_id) if n.until_ms is not None), default=None)
    if until_unix is not None and request.deadline > until_unix:
        changes["deadline"], removed["deadline"] = until_unix, request.deadline - until_unix
    if changes.get("deadline", request.deadline) <= view.now_unix:
        raise ConfigError(
            f"deadline: {request.deadline} is over; write unix seconds in the future, such as time.time() + 600"
        )
    limit = context.tokens
    if limit is not None and (request.token_budget is not None or limit.hard):
        left = tokens_left(view.node(limit.node_id))
        if not left:
            raise ConfigError("token_budget: nothing is left of the tokens of this session")
        if request.token_budget is None or request.token_budget > left:
            changes["token_budget"] = left
            removed |= {} if request.token_budget is None else {"token_budget": request.token_budget - left}
    return request.model_copy(update=changes), removed


def tokens_above(view: LedgerView, context: Context) -> int | None:
    """Return the total of the token budget that a session counts in, or None."""
    return None if context.tokens is None else view.node(context.tokens.node_id).limit


def _nothing_left(view: LedgerView, context: Context, amount: Nanos) -> Refusal:
    short = check_room(view, context.node_id, amount)
    if short is None:
        return Refusal(BUDGET, "nothing is left of the budget", amount, error=BudgetExhausted)
    return replace(short, reason=f"a delegated task needs a budget: {short.reason}")


def _around(context: Context, part: str) -> list[frozenset[str]]:
    """Return what the policy and each session around a delegation name as the only hosts, payees or tools."""
    listed = [
        None if part == "tools" else getattr(context.policy, part),
        *(getattr(each, part) for each in context.reach),
    ]
    return [frozenset(names) for names in listed if names is not None]


def _narrow_names(context: Context, request: TaskRequest, changes: dict[str, Any], removed: dict[str, Any]) -> None:
    for field, part, covers in _LISTS:
        asked: tuple[str, ...] | None = getattr(request, field)
        around = _around(context, part)
        if asked is None:
            kept = _all_of(around, covers)
            if kept is not None and len(kept) <= MOST_NAMES and all(map(is_name, kept)):
                changes[field] = kept  # without it, the sessions around it narrow it all the same
            continue
        kept = _all_of([frozenset(asked), *around], covers) or ()
        if asked and not kept:
            raise ConfigError(f"{field}: {', '.join(asked)[:200]}: this session may use none of them itself")
        if kept != asked and len(kept) <= MOST_NAMES and all(map(is_name, kept)):
            changes[field], removed[field] = kept, [name for name in asked if name not in kept]


def _all_of(lists: list[frozenset[str]], covers: Covers) -> tuple[str, ...] | None:
    """Return what is on all lists: the narrower of two names of which one includes the other. None without a list.

    A pattern that overlaps another one, and neither includes the other, stays: each use is compared with both.
    """
    if not lists:
        return None
    kept = set(lists[0])
    for listed in lists[1:]:
        after = set()
        for name in kept:
            inside = {each for each in listed if covers(name, each)}
            beside = {each for each in listed if covers is _covers_tool and _overlap(each, name)}
            if any(covers(each, name) for each in listed) or beside - inside:
                after.add(name)
            else:
                after |= inside
        kept = after
    return tuple(sorted(kept))


def _overlap(one: str, other: str) -> bool:
    """True if some tool may be meant by both of two patterns, as far as their first and their last letters tell."""
    if "*" not in one or "*" not in other:
        return False
    begins, begins_too = one.lower().split("*")[0], other.lower().split("*")[0]
    ends, ends_too = one.lower().split("*")[-1], other.lower().split("*")[-1]
    first = begins.startswith(begins_too) or begins_too.startswith(begins)
    return first and (ends.endswith(ends_too) or ends_too.endswith(ends))


def _covers_host(pattern: str, host: str) -> bool:
    """True if each host that the second name means is meant by the first one."""
    if host.startswith("*."):
        return pattern == host or (pattern.startswith("*.") and host.endswith(pattern[1:]))
    return host_listed(host, (pattern,))


def _covers_tool(pattern: str, tool: str) -> bool:
    """True if each tool that the second name means is meant by the first one; a star of the second stands for itself."""
    return pattern == tool or allows_name(pattern, tool)


def _covers_payee(payee: str, other: str) -> bool:
    return payee == other


_LISTS: Final[tuple[tuple[str, str, Covers], ...]] = (
    ("allowed_tools", "tools", _covers_tool),
    ("allowed_hosts", "hosts", _covers_host),
    ("allowed_payees", "payees", _covers_payee),
)


def reach_rows(context: Context, request: TaskRequest) -> tuple[dict[str, Any], ...]:
    """Return what the policy, each session around a delegation and the request narrow its payments to, as lists."""
    policy = {part: context.policy.hosts if part == "hosts" else context.policy.payees for part in ("hosts", "payees")}
    own = {"hosts": request.allowed_hosts, "payees": request.allowed_payees, "tools": request.allowed_tools}
    around = [{part: getattr(each, part) for part in ("hosts", "payees", "tools")} for each in context.reach]
    rows = (
        {part: sorted(names) for part, names in each.items() if names is not None} for each in (policy, *around, own)
    )
    return tuple(row for row in rows if row)


def read_reach(rows: Iterable[Any]) -> tuple[Reach, ...]:
    """Return the narrowings in the rows of a delegation."""
    return tuple(
        Reach(**{part: frozenset(row[part]) for part in ("hosts", "payees", "tools") if part in row}) for row in rows
    )

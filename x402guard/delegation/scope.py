"""Cuts a request down to what the session that delegates has itself: the intersection of both scopes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from x402guard.errors import BudgetExhausted, ConfigError
from x402guard.flow.context import Context
from x402guard.frozen import replace
from x402guard.ledger.authorize import BUDGET, Refusal, check_room
from x402guard.ledger.budgets import room_on_path
from x402guard.ledger.token_budget import tokens_left
from x402guard.ledger.view import LedgerView
from x402guard.money import Nanos, format_dollars, nanos_to_decimal
from x402guard.policy.patterns import matches_name
from x402guard.policy.reach import Reach, host_listed
from x402guard.policy.settings import each_of

if TYPE_CHECKING:
    from x402guard.delegation.messages import TaskRequest

Fits = Callable[[str, frozenset[str]], bool]


def narrowed(view: LedgerView, context: Context, request: TaskRequest) -> tuple[TaskRequest, dict[str, Any]] | Refusal:
    """Return the request as it can be granted, and field → what was removed from it.

    An equal scope is allowed. Raises ``ConfigError`` naming a field of which nothing is left; returns the refusal of a
    budget of which nothing is left.
    """
    changes: dict[str, Any] = {}
    removed: dict[str, Any] = {}
    _narrow_names(context, request, changes, removed)
    room = room_on_path(view, context.node_id)
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


def _narrow_names(context: Context, request: TaskRequest, changes: dict[str, Any], removed: dict[str, Any]) -> None:
    policy = Reach(each_of("hosts", context.policy.hosts, str), each_of("payees", context.policy.payees, str))
    for field, part, fits in _LISTS:
        asked: tuple[str, ...] | None = getattr(request, field)
        if asked is None:
            continue
        around = [named for each in (policy, *context.reach) if (named := getattr(each, part)) is not None]
        kept = tuple(name for name in asked if all(fits(name, named) for named in around))
        if asked and not kept:
            raise ConfigError(f"{field}: {', '.join(asked)[:200]}: this session may use none of them itself")
        if kept != asked:
            changes[field], removed[field] = kept, [name for name in asked if name not in kept]


def _host_fits(host: str, listed: frozenset[str]) -> bool:
    """True if a host, or some host of a ``*.domain`` pattern, is on the list."""
    if host_listed(host.removeprefix("*."), listed):
        return True
    return host.startswith("*.") and any(each.removeprefix("*").endswith(host[1:]) for each in listed)


def _tool_fits(tool: str, listed: frozenset[str]) -> bool:
    """True if a tool is on the list, or may be some of a pattern's. The use of each tool is compared with both again."""
    if "*" not in tool:
        return any(matches_name(each, tool, within=False) for each in listed)
    return any(_overlap(each.lower(), tool.lower()) for each in listed)


def _overlap(listed: str, pattern: str) -> bool:
    if "*" not in listed:
        return matches_name(pattern, listed, within=False)
    begins, theirs = listed.split("*", maxsplit=1)[0], pattern.split("*", maxsplit=1)[0]
    ends, their_end = listed.rsplit("*", maxsplit=1)[-1], pattern.rsplit("*", maxsplit=1)[-1]
    return begins.startswith(theirs[: len(begins)]) and ends.endswith(their_end[-len(ends) :] if ends else "")


_LISTS: Final[Iterable[tuple[str, str, Fits]]] = (
    ("allowed_tools", "tools", _tool_fits),
    ("allowed_hosts", "hosts", _host_fits),
    ("allowed_payees", "payees", lambda payee, listed: payee in listed),
)


def reach_rows(context: Context, request: TaskRequest) -> tuple[dict[str, Any], ...]:
    """Return what the sessions around a delegation narrow the policy to, and the request, as lists."""
    own = Reach(
        *(
            None if each is None else frozenset(each)
            for each in (request.allowed_hosts, request.allowed_payees, request.allowed_tools)
        )
    )
    return tuple(
        {part: sorted(names) for part in ("hosts", "payees", "tools") if (names := getattr(each, part)) is not None}
        for each in (*context.reach, own)
    )


def read_reach(rows: Iterable[Any]) -> tuple[Reach, ...]:
    """Return the narrowings in the rows of a delegation."""
    return tuple(
        Reach(**{part: frozenset(row[part]) for part in ("hosts", "payees", "tools") if part in row}) for row in rows
    )

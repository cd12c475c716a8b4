"""Named budgets, for a customer, a key or a team: parents of sessions and of each other, optionally with a window."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import TypedDict

import anyio.lowlevel
from typing_extensions import Unpack

from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.flow.drivers import transact_now
from x402guard.flow.threads import finish_change
from x402guard.guard.account import Account
from x402guard.guard.opening import (
    BUDGET_PREFIX,
    Basis,
    TokenLimiting,
    check_name,
    limited_tokens,
    parse_limit,
    session_request,
)
from x402guard.guard.session import Session
from x402guard.kernel.rows import NodeKind
from x402guard.ledger.sessions import NodeRequest, check_window, open_node, opening_scope
from x402guard.money import Dollars
from x402guard.policy.checks import SoftLimits
from x402guard.policy.reach import reach_of
from x402guard.tools.token_budget import TokenBudget


class SessionOptions(TypedDict, total=False):
    """The arguments of ``session`` beside its name."""

    budget: Dollars | None
    tokens: TokenBudget | int | None
    token_limit: TokenLimiting
    id: str | None
    reserve: Dollars | None
    soft_limit: SoftLimits | None
    hosts: Collection[str] | None
    payees: Collection[str] | None
    tools: Collection[str] | None


class BudgetParent:
    """What pays for sessions and named budgets below it: a guard's wallet, or a named budget."""

    _basis: Basis
    _node_id: str

    def session(
        self,
        name: str,
        *,
        budget: Dollars | None = None,
        tokens: TokenBudget | int | None = None,
        token_limit: TokenLimiting = "count",  # noqa: S107 - no password
        id: str | None = None,  # noqa: A002 - the user's word
        reserve: Dollars | None = None,
        soft_limit: SoftLimits | None = None,
        hosts: Collection[str] | None = None,
        payees: Collection[str] | None = None,
        tools: Collection[str] | None = None,
    ) -> Session:
        """Open a session with a budget, or resume the session ``id`` with what it has left.

        ``budget`` is in dollars, ``tokens`` are the most in its context (100,000 by default); those of a resumed
        session can be lowered, never raised. With ``token_limit="refuse"`` an LLM call that may not fit into them is
        limited to what is left, or refused. ``reserve`` (dollars, or a part such as ``"10%"``) is kept for LLM calls
        inside ``session.finalizing()``; ``soft_limit`` are the parts of the budget that send a notice, such as 0.9,
        instead of the policy's. ``hosts`` and ``payees`` are the only ones that it may pay, ``tools`` (names, or patterns
        such as ``search_*``) the only ones that it may use: they narrow the policy, and are given again at each opening.
        Raises ``ConfigError``.
        """
        reach = reach_of(self._basis.context.policy, hosts, payees, tools)
        request = session_request(
            self._basis, self._node_id, name, budget=budget, session_id=id, reserve=reserve, soft_limit=soft_limit
        )
        limited = limited_tokens(tokens, token_limit)
        return Session.open(self._basis, request, None, tokens=limited, reach=reach, later=id is None)

    @asynccontextmanager
    async def asession(self, name: str, **options: Unpack[SessionOptions]) -> AsyncIterator[Session]:
        """Open a session for an ``async with`` block, and end it after the block: ``session`` off the event loop.

        The arguments are those of ``session``. A task that is cancelled while the session opens closes it again.
        """
        opening = partial(copy_context().run, partial(self.session, name, **options))
        session = await finish_change(opening, self._basis.shell, _close_late)
        async with session:
            await anyio.lowlevel.checkpoint()
            yield session

    def budget(
        self, name: str, limit: Dollars | None = None, *, per: str | None = None, tz: str | None = None
    ) -> NamedBudget:
        """Return a named budget, opened at first use: a parent of many sessions and budgets, in all processes.

        ``limit`` is in dollars and can be lowered, never raised. With ``per`` (``day``, ``week``, ``month``) it starts
        again by the calendar of ``tz``, such as ``Europe/Berlin``; without it, by that of UTC. Default: the stored ones.
        Raises ``ConfigError``.
        """
        return open_budget(self._basis, self._node_id, name, limit, per=per, tz=tz)

    async def abudget(
        self, name: str, limit: Dollars | None = None, *, per: str | None = None, tz: str | None = None
    ) -> NamedBudget:
        """Do the same as ``budget``, off the event loop."""
        opening = partial(open_budget, self._basis, self._node_id, name, limit, per=per, tz=tz)
        return await finish_change(opening, self._basis.shell, lambda _: None)


def _close_late(session: Session) -> None:
    """Close a session that has opened after its task was cancelled. Its ledger may be closed by now."""
    with suppress(LedgerUnavailable):
        session.close()


class NamedBudget(BudgetParent, Account):
    """A budget with a name. Every process that names it shares it; it has no block, and never ends.

    Its numbers are those of its window, if it has one.
    """

    def __init__(self, basis: Basis, node_id: str, name: str) -> None:
        self._basis, self._node_id, self._name = basis, node_id, name


def open_budget(
    basis: Basis, parent_id: str, name: str, limit: Dollars | None, *, per: str | None, tz: str | None
) -> NamedBudget:
    """Open a budget, or return the existing one of that name. Raises ``ConfigError`` naming the argument."""
    check_name(name)
    if "/" in name:
        raise ConfigError(f"name: {name!r} cannot be a budget's name: a slash separates a session from its children")
    node_id = f"{BUDGET_PREFIX}{name}"
    if per is None and tz is not None:
        raise ConfigError(f"tz: {tz!r:.60} goes with per, such as per='day'; a budget without per never starts again")
    window = None if per is None else check_window(per, "UTC" if tz is None else tz)
    if limit is None and per is None:
        for node in basis.shell.store.path(node_id)[:1]:
            if node.parent_id != parent_id:
                raise ConfigError(f"name: budget {name!r} is under {node.parent_id!r}, not under {parent_id!r}")
            return NamedBudget(basis, node_id, name)
    request = NodeRequest(
        id=node_id,
        parent_id=parent_id,
        kind=NodeKind.BUDGET,
        name=name,
        limit=parse_limit(limit, field="limit"),
        opener="",
        window=window,
        soft=basis.context.policy.soft_parts,
    )
    if not _is_known(basis, request):
        transact_now(basis.shell, opening_scope(request), lambda view: open_node(view, request))
    return NamedBudget(basis, node_id, name)


def _is_known(basis: Basis, request: NodeRequest) -> bool:
    """True if a budget stands in the ledger as it is asked for: then to open it again would write nothing."""
    for node in basis.shell.store.path(request.id)[:1]:
        stands = (node.parent_id, node.kind, node.window, node.soft)
        asked = (request.parent_id, request.kind, request.window, node.soft if request.soft is None else request.soft)
        return stands == asked and request.limit in (None, node.limit)
    return False

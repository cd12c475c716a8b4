"""Tasks for other agents: a session delegates one, and a guard redeems its token in another process."""

from __future__ import annotations

from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from x402guard.errors import ConfigError
from x402guard.flow.drivers import run, run_async, to_the_end
from x402guard.flow.effects import Flow
from x402guard.flow.shell import Payer
from x402guard.guard.arguments import is_gone
from x402guard.guard.opening import Basis, opener_of
from x402guard.ledger.delegations import Delegation
from x402guard.ledger.inputs import Input
from x402guard.ledger.model import NodeKind
from x402guard.ledger.sessions import NodeRequest
from x402guard.money import Nanos
from x402guard.tools.token_budget import TokenBudget

if TYPE_CHECKING:
    from x402guard.delegation.handles import Delegated, Task
    from x402guard.delegation.messages import TaskRequest
    from x402guard.guard.session import Session


class Delegates(Payer):
    """The part of a session that works with other agents on the same ledger."""

    _task: Task | None = None

    @property
    def task(self) -> Task | None:
        """The task of a session that ``guard.redeem`` has opened; else None."""
        return self._task

    def take_task(self, task: Task) -> None:
        """Work on a task from now on (called by ``guard.redeem``)."""
        self._task = task

    def delegate(self, request: TaskRequest) -> Delegated:
        """Give a task to another agent: opens a session for it inside this one, and returns its token.

        The request is cut down to what this session has itself: tools, hosts, payees, the budget that is left, tokens and
        deadline; what was removed stands in the result and in the journal. The same request again is the same task.
        Raises ``ConfigError`` naming a field that is wrong, or of which nothing is left; ``BudgetExhausted``,
        ``SessionTripped``, ``SessionClosed``. Nothing is delegated then.
        """
        payer, offered = self._offered(request)
        return _delegated(payer, run(offered, self.shell))

    async def adelegate(self, request: TaskRequest) -> Delegated:
        """Do the same, awaited."""
        payer, offered = self._offered(request)
        return _delegated(payer, await run_async(offered, self.shell))

    def _offered(self, request: TaskRequest) -> tuple[Payer, Flow[tuple[Delegation, str]]]:
        from x402guard.delegation.flow import offer_task
        from x402guard.delegation.messages import TaskRequest

        if not isinstance(request, TaskRequest):
            raise ConfigError(f"request: {type(request).__name__} is no TaskRequest; write TaskRequest(task_type=…, …)")
        payer = self.innermost()
        return payer, offer_task(payer.context, request)

    def ask(self, session: str, payload: object, *, timeout_s: float = 300) -> Any:
        """Ask another agent of the same run for something: wait for its reply, and return it.

        *session* is the id of its session, *payload* and the reply are plain JSON. If it ends without a reply, its end is
        ``not_verified``. Raises ``ConfigError``, ``SessionClosed`` and ``SessionTripped``, also if the other one has ended,
        and ``TimeoutError``: the same question again waits on.
        """
        return run(self._asked(session, payload, timeout_s), self.shell)

    async def aask(self, session: str, payload: object, *, timeout_s: float = 300) -> Any:
        """Do the same, awaited."""
        return await run_async(self._asked(session, payload, timeout_s), self.shell)

    def _asked(self, session: str, payload: object, timeout_s: float) -> Flow[Any]:
        from x402guard.delegation.flow import ask
        from x402guard.delegation.handles import check_timeout
        from x402guard.delegation.messages import check_json

        check_json("payload", payload)
        check_timeout(timeout_s)
        return ask(self.context, session, payload, timeout_s)

    def inputs(self) -> list[Input]:
        """Return what other agents ask this session and what has no reply, and note that it was read."""
        from x402guard.delegation.flow import read_inputs

        return run(read_inputs(self.context), self.shell)

    async def ainputs(self) -> list[Input]:
        """Do the same, awaited."""
        from x402guard.delegation.flow import read_inputs

        return await run_async(read_inputs(self.context), self.shell)

    def reply(self, to: Input, payload: object) -> None:
        """Reply to what another agent asks; *payload* is plain JSON. Raises ``ConfigError`` if it waits for none."""
        run(self._replied(to, payload), self.shell)

    async def areply(self, to: Input, payload: object) -> None:
        """Do the same, awaited."""
        await run_async(self._replied(to, payload), self.shell)

    def _replied(self, to: Input, payload: object) -> Flow[None]:
        from x402guard.delegation.flow import reply
        from x402guard.delegation.messages import check_json

        check_json("reply", payload)
        return reply(self.context, to.sender, payload)


def _delegated(payer: Payer, offered: tuple[Delegation, str]) -> Delegated:
    from x402guard.delegation.handles import Delegated

    return Delegated(payer, *offered)


def redeemed(basis: Basis, token: str) -> Session:
    """Open the session of a token. Raises ``ConfigError`` naming what is wrong with it; nothing is opened then."""
    from x402guard.delegation.flow import redeem
    from x402guard.delegation.handles import Task
    from x402guard.delegation.scope import read_reach
    from x402guard.delegation.token import read_token
    from x402guard.guard.session import Session

    read = read_token(token)
    rows = basis.shell.store.marks("instance", "")
    gone = frozenset(key for key, row in rows.items() if is_gone(row))
    delegation = run(redeem(basis.context, read, gone), basis.shell)
    parent, _, _ = delegation.session.rpartition("/")
    opening = NodeRequest(
        id=delegation.session,
        parent_id=parent,
        kind=NodeKind.SESSION,
        name=delegation.task_type,
        limit=None,
        opener=opener_of(basis.context),
        gone=gone,
        alone=True,
    )
    hard = delegation.request["token_budget"] is not None
    quotes = tuple((pattern, Nanos(price)) for pattern, price in delegation.quotes)
    tokens, reach = TokenBudget(hard=hard), read_reach(delegation.reach)
    session = Session.open(basis, opening, None, tokens=tokens, reach=reach, quotes=quotes)
    session.take_task(Task(session, delegation))
    return session


async def aredeemed(basis: Basis, token: str) -> Session:
    """Do the same off the event loop. A task that is cancelled while the session opens closes it again."""
    opening = partial(copy_context().run, partial(redeemed, basis, token))
    return await to_the_end(opening, basis.shell, lambda session: session.close())

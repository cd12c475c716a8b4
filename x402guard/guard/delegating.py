"""Tasks for other agents: a session delegates one. ``guard.guard.redeemed`` opens it by its token, in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from x402guard.delegation.asking import REPLY_S, ask, read_inputs, reply
from x402guard.errors import ConfigError
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Flow
from x402guard.flow.shell import Payer
from x402guard.ledger.delegations import Delegation
from x402guard.ledger.inputs import Input

if TYPE_CHECKING:
    from x402guard.delegation.handles import Delegated, Task
    from x402guard.delegation.messages import TaskRequest


class Delegates(Payer):
    """The part of a session that works with other agents on the same ledger."""

    _task: Task | None = None

    @property
    def task(self) -> Task | None:
        """The task of a session that ``guard.redeem`` has opened; else None."""
        return self._task

    def work_on(self, task: Task | None) -> None:
        """Work on a task from now on, or on none (called by ``guard.redeem``)."""
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

    def delegated(self, request_id: str) -> Delegated | None:
        """Return the task that this session has delegated under an id, also in an earlier process; None without one.

        It has another token, as long as it can be answered. Raises ``SessionClosed``, ``LedgerUnavailable``.
        """
        payer, found = self._found(request_id)
        offered = run(found, self.shell)
        return None if offered is None else _delegated(payer, offered)

    async def adelegated(self, request_id: str) -> Delegated | None:
        """Do the same, awaited."""
        payer, found = self._found(request_id)
        offered = await run_async(found, self.shell)
        return None if offered is None else _delegated(payer, offered)

    def _found(self, request_id: str) -> tuple[Payer, Flow[tuple[Delegation, str] | None]]:
        from x402guard.delegation.offers import find_task

        payer = self.innermost()
        return payer, find_task(payer.context, str(request_id))

    def _offered(self, request: TaskRequest) -> tuple[Payer, Flow[tuple[Delegation, str]]]:
        from x402guard.delegation.messages import TaskRequest
        from x402guard.delegation.offers import offer_task

        if not isinstance(request, TaskRequest):
            raise ConfigError(f"request: {type(request).__name__} is no TaskRequest; write TaskRequest(task_type=…, …)")
        payer = self.innermost()
        return payer, offer_task(payer.context, request)

    def ask(self, session: str, payload: object, *, timeout_s: float = REPLY_S) -> Any:
        """Ask another agent of the same run for something: wait for its reply, and return it.

        *session* is the id of its session, *payload* and the reply are plain JSON. If it ends without a reply, its end is
        ``not_verified``. Raises ``ConfigError``, ``SessionClosed`` and ``SessionTripped``, also if the other one has ended,
        and ``TimeoutError``: the same question again waits on.
        """
        return run(self._asked(session, payload, timeout_s), self.shell)

    async def aask(self, session: str, payload: object, *, timeout_s: float = REPLY_S) -> Any:
        """Do the same, awaited."""
        return await run_async(self._asked(session, payload, timeout_s), self.shell)

    def _asked(self, session: str, payload: object, timeout_s: float) -> Flow[Any]:
        from x402guard.delegation.handles import check_timeout
        from x402guard.delegation.messages import check_json

        if not isinstance(session, str) or not session.isascii() or not session.isprintable():
            raise ConfigError(f"session: {session!r:.200} is no other session of this run; give the id of one")
        check_json("payload", payload)
        check_timeout(timeout_s)
        return ask(self.context, session, payload, timeout_s)

    def inputs(self) -> list[Input]:
        """Return what other agents ask this session and what has no reply, and note that it was read."""
        return run(read_inputs(self.context), self.shell)

    async def ainputs(self) -> list[Input]:
        """Do the same, awaited."""
        return await run_async(read_inputs(self.context), self.shell)

    def reply(self, to: Input, payload: object) -> None:
        """Reply to what another agent asks; *payload* is plain JSON. Raises ``ConfigError`` if it waits for none."""
        run(self._replied(to, payload), self.shell)

    async def areply(self, to: Input, payload: object) -> None:
        """Do the same, awaited."""
        await run_async(self._replied(to, payload), self.shell)

    def _replied(self, to: Input, payload: object) -> Flow[None]:
        from x402guard.delegation.messages import check_json

        if not isinstance(to, Input):
            raise ConfigError(f"to: {type(to).__name__} is no Input; take one of session.inputs()")
        check_json("payload", payload)
        return reply(self.context, to.sender, payload, to.number)


def _delegated(payer: Payer, offered: tuple[Delegation, str]) -> Delegated:
    from x402guard.delegation.handles import Delegated

    return Delegated(payer, *offered)

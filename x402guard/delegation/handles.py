"""What an agent holds of a delegation: the one that has delegated, and the worker."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from x402guard.delegation.asking import REPLY_S, ask, reply
from x402guard.delegation.messages import Status, TaskRequest, TaskResult, check_json, shown
from x402guard.delegation.offers import revoke_task
from x402guard.delegation.results import abandon, answer, take
from x402guard.errors import ConfigError
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Flow
from x402guard.flow.shell import Payer
from x402guard.kernel.rows import Nanos
from x402guard.ledger.delegations import Delegation
from x402guard.ledger.owner import check_reason
from x402guard.ledger.sessions import COMPLETED, NOT_VERIFIED
from x402guard.money import nanos_to_decimal


def check_timeout(timeout_s: object) -> None:
    """Raise ``ConfigError`` unless *timeout_s* is a number of seconds that is not negative."""
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 <= timeout_s < 10**9:
        raise ConfigError(f"timeout_s: {shown(timeout_s)} is not a number of seconds")


class Delegated:
    """A task that this session has given to another agent. Made by ``session.delegate``.

    Attributes:
        request: the request as it was granted.
        removed: field of the request → what was taken out of it, because this session does not have it itself.
        session_id: the id of the worker's session.
        token: what the worker redeems with ``guard.redeem``: a text that is as good as the session. Give it to the worker
            alone; it ends with the deadline of the request. Empty for a task that can have no answer any more.
    """

    def __init__(self, payer: Payer, delegation: Delegation, token: str) -> None:
        self._payer, self._delegation, self.token = payer, delegation, token
        self.request = TaskRequest.read(delegation.request)
        self.removed = dict(delegation.removed)
        self.session_id = delegation.session

    def result(self, *, timeout_s: float | None = None) -> TaskResult:
        """Wait for the result, at most *timeout_s* seconds, by default until the deadline; the same one each time.

        A task that was revoked, tripped or not answered in time has ``failed``, with the reason as its ``error``. With
        ``needs_clarification`` the worker waits for a ``reply`` to its ``output``. Raises ``NeedsReview`` for a result with
        a confidence below ``policy.min_confidence`` (0.7), or without one: after ``x402guard approvals allow`` it is
        returned. Raises ``ApprovalDenied``, ``TimeoutError``, ``SessionTripped``, ``SessionClosed``.
        """
        return run(self._taken(timeout_s), self._payer.shell)

    async def aresult(self, *, timeout_s: float | None = None) -> TaskResult:
        """Do the same, awaited."""
        return await run_async(self._taken(timeout_s), self._payer.shell)

    def _taken(self, timeout_s: float | None) -> Flow[TaskResult]:
        if timeout_s is not None:
            check_timeout(timeout_s)
        return take(self._payer.context, self._delegation, timeout_s)

    def reply(self, payload: object) -> None:
        """Answer what the worker asks; *payload* is plain JSON. Raises ``ConfigError`` if it asks nothing."""
        check_json("payload", payload)
        run(reply(self._payer.context, self.session_id, payload), self._payer.shell)

    async def areply(self, payload: object) -> None:
        """Do the same, awaited."""
        check_json("payload", payload)
        await run_async(reply(self._payer.context, self.session_id, payload), self._payer.shell)

    def revoke(self, reason: str = "it is not needed any more") -> None:
        """End the task: its token is worth nothing, and its session is tripped. Raises ``ConfigError`` if it is answered."""
        run(revoke_task(self._payer.context, self._delegation, check_reason(reason)), self._payer.shell)

    async def arevoke(self, reason: str = "it is not needed any more") -> None:
        """Do the same, awaited."""
        await run_async(revoke_task(self._payer.context, self._delegation, check_reason(reason)), self._payer.shell)

    def __repr__(self) -> str:
        return f"Delegated({self.request.request_id!r}, session={self.session_id!r})"


class Task:
    """The task of a worker's session: ``session.task`` after ``guard.redeem``. ``request`` is what was granted."""

    def __init__(self, payer: Payer, delegation: Delegation) -> None:
        self._payer, self._delegation = payer, delegation
        self.request = TaskRequest.read(delegation.request)
        self._ended_as: str | None = None

    def answer(
        self,
        output: object = None,
        *,
        confidence: float | None = None,
        status: Status = "completed",
        error: str | None = None,
    ) -> TaskResult:
        """Answer the task, once, and return the result; its cost and tokens are those of the ledger.

        *output* is plain JSON; *confidence* is from 0 to 1: without one, or with a low one, a person reviews the result.
        Raises ``ConfigError`` naming the field, ``SessionTripped``, ``SessionClosed`` after the deadline.
        """
        stated = partial(self._stated, output=output, confidence=confidence, status=status, error=error)
        return self._noted(run(answer(self._payer.context, self._delegation, stated), self._payer.shell))

    async def aanswer(
        self,
        output: object = None,
        *,
        confidence: float | None = None,
        status: Status = "completed",
        error: str | None = None,
    ) -> TaskResult:
        """Do the same, awaited."""
        stated = partial(self._stated, output=output, confidence=confidence, status=status, error=error)
        return self._noted(await run_async(answer(self._payer.context, self._delegation, stated), self._payer.shell))

    def submit(self, result: TaskResult | str | bytes | Mapping[str, Any]) -> TaskResult:
        """Answer the task with a whole result: a ``TaskResult``, or one as JSON.

        It is refused with ``ConfigError`` for another ``request_id``, a missing field, a cost or tokens above the budget of
        the task or below what the ledger has counted. Raises as ``answer``.
        """
        given = result if isinstance(result, TaskResult) else TaskResult.read(result)
        return self._noted(run(answer(self._payer.context, self._delegation, lambda *_: given), self._payer.shell))

    async def asubmit(self, result: TaskResult | str | bytes | Mapping[str, Any]) -> TaskResult:
        """Do the same, awaited."""
        given = result if isinstance(result, TaskResult) else TaskResult.read(result)
        return self._noted(
            await run_async(answer(self._payer.context, self._delegation, lambda *_: given), self._payer.shell)
        )

    def ask(self, payload: object, *, timeout_s: float = REPLY_S) -> Any:
        """Ask who has delegated for what is missing (``request.withheld``), wait for the reply, and return it.

        Its ``result`` returns ``needs_clarification`` then. Raises ``TimeoutError``; the same question again waits on.
        """
        return run(self._asked(payload, timeout_s), self._payer.shell)

    async def aask(self, payload: object, *, timeout_s: float = REPLY_S) -> Any:
        """Do the same, awaited."""
        return await run_async(self._asked(payload, timeout_s), self._payer.shell)

    def end(self, error: BaseException | None) -> str:
        """Return the word of the session's end. A task that is neither answered nor waits for a reply has failed."""
        if self._ended_as is not COMPLETED:
            why = "without an answer" if error is None else f"by {type(error).__name__}"
            run(abandon(self._payer.context, self._delegation, f"the worker has ended {why}"), self._payer.shell)
        return self._ended_as or NOT_VERIFIED

    def _asked(self, payload: object, timeout_s: float) -> Flow[Any]:
        check_json("payload", payload)
        check_timeout(timeout_s)
        return ask(self._payer.context, self._delegation.parent, payload, timeout_s)

    def _stated(self, spent: Nanos, tokens: int, **said: Any) -> TaskResult:
        cost, responder = nanos_to_decimal(spent), self._payer.context.instance
        return TaskResult(request_id=self.request.request_id, responder_id=responder, cost=cost, tokens=tokens, **said)

    def _noted(self, result: TaskResult) -> TaskResult:
        self._ended_as = COMPLETED if result.status == "completed" else NOT_VERIFIED
        return result

    def __repr__(self) -> str:
        return f"Task({self.request.request_id!r})"

"""The steps of an agent: counted, refused when its state repeats, and verified before the end."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.flow.admission import consent
from x402guard.flow.drivers import close_to_the_end, run, run_async
from x402guard.flow.effects import Flow, Transact
from x402guard.flow.refusals import enforce, refused
from x402guard.flow.shell import Payer
from x402guard.ledger.authorize import Refusal, check_open, enforced, record_excused
from x402guard.ledger.model import NOTHING, HoldKind
from x402guard.ledger.sessions import COMPLETED, NOT_VERIFIED
from x402guard.ledger.view import LedgerView, MarkKey, Scope
from x402guard.policy.judge import Unasked, objection, spent_so_far, would_refuse
from x402guard.policy.steps import run_of, state_step
from x402guard.policy.verdicts import Subject, Verdict, without_approver

FINISH: Final = "finish"
MIN_CONFIDENCE: Final = "min_confidence"

Verify = Callable[[Any], object]


class AgentSteps(Payer):
    """What a session knows of its agent's own steps."""

    _end: str | None = None

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """End this opening of the session."""

    def step(self, *, state: object = None) -> int:
        """Begin a step of the agent, and return its number in the run, from 1 on.

        It also begins the time of ``policy.timeouts.step_s``; every answer of the model begins that, too. *state* is
        what the agent works on, as plain JSON; only its hash is kept. Raises ``LoopDetected`` if the run has had the
        same state ``policy.loop.states`` times before, ``SessionTripped``, ``SessionClosed``.
        """
        return run(self._stepped(state), self.shell)

    async def astep(self, *, state: object = None) -> int:
        """Do the same as ``step``, awaited."""
        return await run_async(self._stepped(state), self.shell)

    def finish(self, result: object = None, *, verify: Verify | None = None, confidence: float | None = None) -> bool:
        """End the session as ``completed`` if the result holds; return whether it does.

        *verify* is a function of *result*: only True is a yes. After a no the session stays open, and ends as
        ``not_verified`` unless a later ``finish`` succeeds. With ``policy.min_confidence``, a *confidence* (0 to 1) below
        it, or none, asks the approver first. Raises ``ApprovalDenied``, ``NeedsReview`` without an approver, and what
        *verify* raises; the session then stays open.
        """
        checked = _confidence(confidence)
        said = True if verify is None else verify(result)
        if inspect.isawaitable(said):
            if inspect.iscoroutine(said):
                said.close()
            raise ConfigError("verify: it is async; write `await session.afinish(…)`")
        done = run(self._finished(said is True, checked), self.shell)
        if done:
            self.close()
        return done

    async def afinish(
        self, result: object = None, *, verify: Verify | None = None, confidence: float | None = None
    ) -> bool:
        """Do the same as ``finish``, awaited; *verify* may be ``async``."""
        checked = _confidence(confidence)
        said = True if verify is None else verify(result)
        if isinstance(said, Awaitable):
            said = await said
        done = await run_async(self._finished(said is True, checked), self.shell)
        if done:
            await close_to_the_end(self.close)
        return done

    def _stepped(self, state: object) -> Flow[int]:
        context, run_id = self.context, run_of(self.context.node_id)
        loop, timeouts = context.policy.loop, context.policy.timeouts
        try:
            step = None if state is None or loop is None else state_step(state, context.node_id)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"state: it is no plain JSON ({type(error).__name__}); write dicts, lists and texts"
            ) from None
        count: MarkKey = ("agent_steps", run_id)
        marks = (count, *timeouts.run_marks(run_id))
        if step is not None and loop is not None:
            marks = (*marks, *loop.state_marks(step))

        def change(view: LedgerView) -> int | Refusal:
            closed = check_open(view, context.node_id)
            looped = None if closed is not None or step is None or loop is None else loop.judge_state(view, step)
            refusal = closed or enforced(view, looped)
            if refusal is not None:
                return refusal
            record_excused(view, context.node_id)
            number = int((view.mark(count) or {"count": 0})["count"]) + 1
            view.put_mark(count, {"count": number})
            timeouts.begin_step(view, run_id)
            return number

        scope = Scope(nodes=(context.node_id,), marks=marks, durable=step is not None)  # a repeated state may trip
        decided: int | Refusal = yield Transact(scope, change)
        if isinstance(decided, Refusal):
            raise (yield from refused(context, decided))
        return decided

    def _finished(self, verified: bool, confidence: float | None) -> Flow[bool]:
        context, scope = self.context, Scope(nodes=(self.context.node_id,))
        closed = yield Transact(scope, lambda view: check_open(view, context.node_id))
        if closed is not None:
            raise (yield from refused(context, closed))
        if not verified:
            self._end = NOT_VERIFIED
            yield Transact(scope, lambda view: _note_no(view, context.node_id))
            return False
        least = context.policy.min_confidence
        if least is not None and (confidence is None or confidence < least):
            spent = yield Transact(scope, lambda view: spent_so_far(view, context.node_id))
            shown = "without a confidence" if confidence is None else f"with a confidence of {confidence:g}"
            reason = f"the agent ends its work {shown}, below {least:g} (policy.{MIN_CONFIDENCE})"
            subject, verdict = Subject(HoldKind.TOOL, (FINISH,), NOTHING), Verdict("ask", MIN_CONFIDENCE, reason, 1)
            if not context.asks:
                denied = objection(without_approver(verdict), subject)
            elif context.shadow:
                denied = would_refuse(verdict, subject)
            else:
                denied = yield from consent(context, Unasked(subject, verdict, (confidence,), spent=spent))
            if denied is not None:
                yield from enforce(context, denied)
        self._end = COMPLETED
        return True


def _note_no(view: LedgerView, node_id: str) -> None:
    view.record(node_id, "event", facts={"name": "not_verified"})
    view.tell("not_verified", "warning", "the agent's result did not pass its verification", session=node_id)


def _confidence(given: object) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise ConfigError(f"confidence: {given!r:.60} is not a number from 0 to 1")
    return float(given)

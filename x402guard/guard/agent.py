"""What a session knows of its agent's run: its steps, whether its result was verified, and what becomes of it at the end.

Steps are counted, and refused when the state repeats. At the end, what ``reversible`` functions have done becomes final,
or is undone.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from x402guard.errors import BudgetExhausted, ConfigError
from x402guard.flow.admission import consent
from x402guard.flow.drivers import run, run_async, transact_now
from x402guard.flow.effects import Flow, Transact
from x402guard.flow.refusals import enforce, refused
from x402guard.flow.threads import finish_closing
from x402guard.guard.account import Account
from x402guard.guard.delegating import Delegates
from x402guard.guard.opening import undoing
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import NOTHING, HoldKind, NodeKind
from x402guard.ledger.actions import OPEN_STATES, actions_mark, begin_end, end, note_abnormal
from x402guard.ledger.authorize import BUDGET, Refusal, check_open, enforced, record_excused
from x402guard.ledger.inputs import inputs_mark, note_ignored
from x402guard.ledger.sessions import COMPLETED, NOT_VERIFIED, Closing, Ending, close_node
from x402guard.ledger.view import Change, LedgerView, Scope
from x402guard.policy.judge import Unasked, objection, spent_so_far, would_refuse
from x402guard.policy.steps import run_of, state_step
from x402guard.policy.verdicts import Subject, Verdict, without_approver
from x402guard.tools.undo import actions_of, commit, is_begun_here, roll_back

P = ParamSpec("P")
R = TypeVar("R")

FINISH: Final = "finish"
MIN_CONFIDENCE: Final = "min_confidence"

Verify = Callable[[Any], object]


class AgentSteps(Delegates):
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
        it, or none, asks the approver first. While other agents wait for a reply (``session.inputs()``), the result does not
        hold. Raises ``ApprovalDenied``, ``NeedsReview`` without an approver, and what *verify* raises; the session then
        stays open. Raises ``SessionTripped`` and ``SessionClosed`` too, and ``ConfigError`` for a *confidence* that is none,
        a *verify* that has to be awaited, and a session that does a task (see ``session.task.answer``).
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
            await finish_closing(self.close)
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
        if self.task is not None:
            raise ConfigError("finish: a delegated task ends with session.task.answer(…), which says what came of it")
        context, me = self.context, self.context.session_id
        scope = Scope(nodes=(context.node_id, me), marks=(inputs_mark(me),))
        closed = yield Transact(scope, lambda view: check_open(view, context.node_id))
        if closed is not None:
            raise (yield from refused(context, closed))
        if verified and (yield Transact(scope, lambda view: note_ignored(view, me))):
            self._end = NOT_VERIFIED
            return False  # others wait for a reply: it can reply, and finish again
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


class Endings(Account, AgentSteps):
    """What ends a session, and makes final what was done in it."""

    _kind: NodeKind
    _opener: str
    _ended: bool
    _failed: bool

    @abstractmethod
    def bind(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return *function* so that it runs inside this session."""

    @abstractmethod
    def _report_id(self) -> str: ...

    def commit(self) -> None:
        """Make what ``reversible`` functions have done in this session and below final, and run what is staged now.

        Raises what a staged function raises, after all have run; ``SessionTripped`` if the session is tripped, or
        something above it; ``LedgerUnavailable``.
        """
        commit(self.shell, self.context, self._report_id())

    async def acommit(self) -> None:
        """Do the same, awaited; a cancelled task waits for its end."""
        await finish_closing(self.commit)

    def close(self, error: BaseException | None = None) -> None:
        """End this opening of the session; *error* is the error that left its block. Live holds still count.

        With the last opening, what ``reversible`` functions have done becomes final, or is undone after an abnormal end.
        """
        try:
            if self._task is not None and not self._ended:
                self._end = self._task.end(error)
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        refused = isinstance(error, BudgetExhausted) and error.rule == BUDGET and error.session == self._report_id()
        failed = self._failed or error is not None
        closing = Closing(self._opener, left_by_refusal=refused, said=self._end, failed=failed)
        if self._ended or self._kind is not NodeKind.SESSION:
            was_ended, self._ended = self._ended, True
            try:
                self._write_end(lambda view: close_node(view, self._node_id, closing))
            except ConfigError:
                if not was_ended:  # a ledger in memory may have forgotten it since
                    raise
            return
        run_id = run_of(self._node_id)
        try:
            ending = self._write_end(lambda view: begin_end(view, run_id, self._node_id, closing))
            if ending is not None:
                try:
                    self._end_actions(ending, closing)
                finally:
                    self._write_end(lambda view: end(view, run_id, self._node_id, closing))
        finally:
            self._ended = True

    def _write_end(self, change: Change[R]) -> R:
        marks = (actions_mark(run_of(self._node_id)), inputs_mark(self._node_id))
        return transact_now(self.shell, Scope(nodes=(self._node_id,), marks=marks), change)

    def _end_actions(self, ending: Ending, closing: Closing) -> None:
        """Commit what was done in this session and below; or undo it, also where it cannot be committed."""
        if ending == "normal":
            try:
                self.bind(self.commit)()
            except BaseException:
                self._write_end(lambda view: note_abnormal(view, run_of(self._node_id), self._node_id, closing))
                self._roll_back()
                raise
        else:
            self._roll_back()

    def _roll_back(self) -> None:
        store = self.shell.store
        if any(each.state in OPEN_STATES and is_begun_here(each) for each in actions_of(store, self._report_id())):
            with undoing(store, self._node_id):
                self.bind(roll_back)(store, partial(transact_now, self.shell), self._report_id())

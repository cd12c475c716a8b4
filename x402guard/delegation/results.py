"""The conversations in which a task is answered, and its result is taken or reviewed by a person."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from x402guard.delegation.asking import waited
from x402guard.errors import ApprovalDenied, ConfigError, NeedsReview
from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, Notify, Transact
from x402guard.flow.refusals import refused
from x402guard.kernel.rows import Nanos
from x402guard.ledger.authorize import Refusal, check_open
from x402guard.ledger.delegations import (
    UNANSWERED,
    Delegation,
    DelegationState,
    delegation_marks,
    keep_result,
    known_delegation,
    lost,
    move,
)
from x402guard.ledger.inputs import Wait, input_of, note_read, put_input
from x402guard.ledger.questions import Question, answer_of, approval_mark, put_question, take_answer
from x402guard.ledger.token_budget import tokens_node
from x402guard.ledger.view import LedgerView, Notice, Scope
from x402guard.money import format_dollars, nanos_to_decimal
from x402guard.policy.approvals import request_id
from x402guard.views.words import printable

if TYPE_CHECKING:
    from x402guard.delegation.messages import TaskResult

LEAST_CONFIDENCE: Final = 0.7
"""A result with a lower confidence is reviewed by a person, unless the policy has a ``min_confidence``."""

REVIEW: Final = "review"
"""The rule of a result that a person has to review."""

REVIEW_S: Final = 7 * 86_400
_SHOWN: Final = 4_000
GUARD: Final = "x402guard"
"""The responder of a result that the guard itself states: the task was revoked, or its time is over."""

Stated = Callable[[Nanos, int], "TaskResult"]
"""Makes a result from what the ledger has counted: nano-dollars and tokens."""


def answer(context: Context, delegation: Delegation, stated: Stated) -> Flow[TaskResult]:
    """Write the result of a task. Raises ``ConfigError`` naming the field that does not fit the request or the ledger.

    It is taken also where the session that has delegated has ended: it may be opened again.
    """
    session_id, parent = delegation.session, delegation.parent

    def change(view: LedgerView) -> TaskResult | Refusal:
        now, node, tokens = known_delegation(view, session_id), view.node(session_id), _tokens(view, session_id)
        result = stated(Nanos(node.spent), tokens).checked()
        if now.state is not DelegationState.WORKING:
            raise ConfigError(f"request_id: {now.request_id!r} is {now.state} already")
        if result.request_id != now.request_id:
            raise ConfigError(f"request_id: {result.request_id!r} is not the {now.request_id!r} of this task")
        if not any(opener.startswith(f"{context.instance}#") for opener in node.openers):
            raise ConfigError("token: this opening of the session has ended; redeem its token again")
        refusal = check_open(view, session_id, ended=True) if result.status != "failed" else None
        if refusal is not None:
            return refusal
        _check_figures(now, result, spent=node.spent, limit=node.limit or 0, tokens=tokens)
        if result.status == "needs_clarification":
            put_input(view, parent, session_id, result.output)
        else:
            move(view, session_id, DelegationState.ANSWERED, result=result.to_dict())
        return result

    scope = Scope((session_id, tokens_node(session_id)), marks=delegation_marks(delegation), durable=True)
    decided: TaskResult | Refusal = yield Transact(scope, change)
    if isinstance(decided, Refusal):
        raise (yield from refused(context, decided))
    return decided


def _tokens(view: LedgerView, session_id: str) -> int:
    return view.node(tokens_node(session_id)).captured


def _check_figures(delegation: Delegation, result: TaskResult, *, spent: int, limit: int, tokens: int) -> None:
    request, done = delegation.request, result.status != "failed"
    if done and result.spent > limit:
        budget = format_dollars(Nanos(limit))
        raise ConfigError(f"cost: ${result.cost} are more than the budget of this task, ${budget}")
    if result.spent < spent:
        raise ConfigError(f"cost: ${result.cost} are less than the ${format_dollars(Nanos(spent))} in the ledger")
    if done and request["token_budget"] is not None and result.tokens > request["token_budget"]:
        raise ConfigError(f"tokens: {result.tokens:,} are more than the {request['token_budget']:,} of this task")
    if result.tokens < tokens:
        raise ConfigError(f"tokens: {result.tokens:,} are less than the {tokens:,} in the ledger")
    has_output = result.status in ("completed", "partial")
    if request["structured_output"] and has_output and not isinstance(result.output, dict):
        raise ConfigError("output: the request asks for a JSON object (structured_output)")


def abandon(context: Context, delegation: Delegation, why: str) -> Flow[None]:
    """Write that a task has failed, unless it is answered, revoked, or waits for a reply."""
    session_id = delegation.session

    def change(view: LedgerView) -> None:
        now, asked = known_delegation(view, session_id), input_of(view, delegation.parent, session_id)
        if now.state is DelegationState.WORKING and (asked is None or asked.taken):
            result = _said(view, now, context.instance, "failed", error=why)
            move(view, session_id, DelegationState.ANSWERED, result=result.to_dict())

    scope = Scope((session_id, tokens_node(session_id)), marks=delegation_marks(delegation), durable=True)
    yield Transact(scope, change)


def _said(view: LedgerView, delegation: Delegation, responder: str, status: Any, **more: Any) -> TaskResult:
    from x402guard.delegation.messages import TaskResult

    cost = nanos_to_decimal(Nanos(view.node(delegation.session).spent))
    return TaskResult(
        request_id=delegation.request_id, responder_id=responder, status=status, cost=cost,
        tokens=_tokens(view, delegation.session), **more,
    )  # fmt: skip


class _Reviewed(Struct, frozen=True):
    """A result that waits for a person; *asked* is False if the question was there before."""

    question: str
    asked: bool
    reason: str


def take(context: Context, delegation: Delegation, timeout_s: float | None) -> Flow[TaskResult]:
    """Wait for the result of a task, and return it.

    Raises ``NeedsReview`` for one that a person has to review, ``ApprovalDenied`` for one that was denied, the refusal of
    the waiting session, and ``TimeoutError`` after *timeout_s* seconds; None waits until the deadline of the task.
    """
    me, session_id = context.session_id, delegation.session
    review = request_id(me, ["result", session_id])
    marks = (*delegation_marks(delegation), approval_mark(review))
    scope = Scope(nodes=(me, session_id, tokens_node(session_id)), marks=marks, durable=True)
    look = partial(_look, context=context, session_id=session_id, review=review)
    found = yield from waited(context, Wait(me, session_id, "result"), timeout_s, scope, look)
    if isinstance(found, _Reviewed):
        command = f"x402guard approvals allow {found.question}"
        if found.asked:
            message, facts = f"a person is asked to review a result: {found.reason}", {"id": found.question}
            yield Notify(Notice("approval_asked", "info", message, session=me, rule=REVIEW, facts=facts))
        advice = f"A person reviews it: {command}. Then take the result again."
        raise (yield from refused(context, Refusal(REVIEW, found.reason, error=NeedsReview, advice=advice)))
    result: TaskResult = found
    return result


def _look(view: LedgerView, context: Context, session_id: str, review: str) -> TaskResult | _Reviewed | Refusal | None:
    refusal = check_open(view, context.session_id)
    if refusal is not None:
        return refusal
    delegation = known_delegation(view, session_id)
    if delegation.state is DelegationState.DENIED:
        return _denied(delegation)
    reason = lost(view, delegation)
    if reason is not None and delegation.result is not None:
        return _read(view, delegation)
    if reason is not None:
        return _given_up(view, delegation, reason[:1000])
    if delegation.state not in UNANSWERED:
        return _judged(view, context, delegation, review)
    asked = note_read(view, context.session_id, session_id)
    worker = delegation.worker or GUARD
    return None if asked is None else _said(view, delegation, worker, "needs_clarification", output=asked.payload)


def _given_up(view: LedgerView, delegation: Delegation, reason: str) -> TaskResult:
    """Return the failure of a task that can have no result any more. From now on it is the result."""
    failed = _said(view, delegation, GUARD, "failed", error=reason)
    if delegation.state in UNANSWERED:
        move(view, delegation.session, DelegationState.ANSWERED, result=failed.to_dict())
        move(view, delegation.session, DelegationState.TAKEN)
    else:
        keep_result(view, delegation, failed.to_dict())
    return failed


def _judged(
    view: LedgerView, context: Context, delegation: Delegation, review: str
) -> TaskResult | _Reviewed | Refusal:
    """Return a result that may be taken; or the question to a person about it, or that person's no."""
    result = _read(view, delegation)
    least = LEAST_CONFIDENCE if context.policy.min_confidence is None else context.policy.min_confidence
    if delegation.state is DelegationState.TAKEN:
        return result
    if result.status == "failed" or (result.confidence is not None and result.confidence >= least):
        move(view, delegation.session, DelegationState.TAKEN)
        return result
    row = view.mark(approval_mark(review))
    if row is None or row["taken"] or not row["said"]:
        waits = row is not None and answer_of(row, view.now_ms) is None
        shown = "no confidence" if result.confidence is None else f"a confidence of {result.confidence}"
        about = f"the result of {delegation.task_type!r} ({result.request_id}) states {shown}, and {least} is needed"
        if not waits:
            _ask_a_person(view, context, result, review, about)
        return _Reviewed(review[:16], not waits, about)
    said: dict[str, bool] = dict(row["said"])
    take_answer(view, review)
    allowed = all(said.values())  # an answer that was given counts, however late it is taken
    facts = {"name": "approval", "allowed": allowed, "by": list(said), "rule": REVIEW, "what": delegation.request_id}
    view.record(context.session_id, "event", facts=facts)
    if allowed:
        move(view, delegation.session, DelegationState.TAKEN)
        return result
    people = ", ".join(name for name, yes in said.items() if not yes)
    return _denied(move(view, delegation.session, DelegationState.DENIED, reason=f"by {people}"))


def _read(view: LedgerView, delegation: Delegation) -> TaskResult:
    """Return the result in a delegation's row; a failure for one that cannot be read."""
    from x402guard.delegation.messages import TaskResult

    try:
        return TaskResult.read(delegation.result or {})
    except ConfigError as error:
        return _said(view, delegation, GUARD, "failed", error=f"its result cannot be read: {error}"[:1000])


def _denied(delegation: Delegation) -> Refusal:
    reason = f"the result of {delegation.task_type!r} ({delegation.request_id}) was denied {delegation.reason}"
    return Refusal(REVIEW, reason, error=ApprovalDenied, advice="Go on without it, or delegate the task again.")


def _ask_a_person(view: LedgerView, context: Context, result: TaskResult, review: str, about: str) -> None:
    """Write the question to a person. Its words leave the ledger with the answer."""
    output = json.dumps(result.output, ensure_ascii=False)
    text = output if len(output) <= _SHOWN else f"{output[:_SHOWN]}… ({len(output):,} characters)"
    words = printable(f"x402guard: may session {context.session_id} take a result? {about}. It is: {text}")
    what = f"the result of {result.request_id}"
    put_question(view, Question(review, context.session_id, what, words, 1, REVIEW_S))

"""The conversations of a delegation: it is offered, redeemed, answered, and its result is taken or reviewed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from x402guard.delegation.scope import narrowed, reach_rows, tokens_above
from x402guard.delegation.token import Token, new_token
from x402guard.errors import ApprovalDenied, ConfigError, NeedsReview
from x402guard.flow.admission import check_standing
from x402guard.flow.context import Context
from x402guard.flow.effects import Checkpoint, Flow, Interrupted, Notify, Transact, transact_anyway
from x402guard.flow.refusals import refused
from x402guard.flow.surroundings import here
from x402guard.frozen import replace
from x402guard.ledger.authorize import Refusal, check_open
from x402guard.ledger.delegations import (
    Delegation,
    DelegationState,
    add_key,
    delegation_mark,
    known_delegation,
    lost,
    move,
    offer,
    revoke,
)
from x402guard.ledger.inputs import (
    Input,
    Wait,
    begin_wait,
    end_wait,
    input_mark,
    input_of,
    inputs_mark,
    note_read,
    put_input,
    put_reply,
    senders_of,
    take_reply,
    wait_mark,
)
from x402guard.ledger.model import NodeKind
from x402guard.ledger.questions import Question, answer_of, approval_mark, put_question, take_answer
from x402guard.ledger.report_text import printable
from x402guard.ledger.sessions import NodeRequest, open_node, opening_scope
from x402guard.ledger.token_budget import open_tokens, tokens_node
from x402guard.ledger.view import LedgerView, MarkKey, Notice, Scope
from x402guard.money import Nanos, format_dollars, nanos_to_decimal
from x402guard.policy.approvals import request_id
from x402guard.policy.steps import run_of

if TYPE_CHECKING:
    from x402guard.delegation.messages import TaskRequest, TaskResult

LEDGER_ID: Final[MarkKey] = ("ledger", "id")
"""The key of the mark with the ledger's own id, so that a token is for one ledger."""

LEAST_CONFIDENCE: Final = 0.7
"""A result with a lower confidence is reviewed by a person, unless the policy has a ``min_confidence``."""

REVIEW: Final = "review"
"""The rule of a result that a person has to review."""

REVIEW_S: Final = 7 * 86_400
_SHOWN: Final = 4_000
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.5)  # then every half second
GUARD: Final = "x402guard"
"""The responder of a result that the guard itself states: the task was revoked, or its time is over."""


def offer_task(context: Context, request: TaskRequest) -> Flow[tuple[Delegation, str]]:
    """Open a session for a request, cut down to the scope of the session that delegates; return it, and its token.

    The same request again is the same delegation, with another token. Raises ``ConfigError`` naming the field, and the
    refusal of a budget of which nothing is left; nothing is delegated then.
    """
    asked = request if request.issuer_id else request.model_copy(update={"issuer_id": context.session_id})
    digest = hashlib.sha256(asked.to_json().encode()).hexdigest()
    child = f"{context.node_id}/session-{hashlib.sha256(asked.request_id.encode()).hexdigest()[:16]}"
    # The ledger gets its id with its first delegation.
    ledger_id = yield from _ledger_id()
    token, public = new_token(ledger_id, child, asked.deadline)
    opener = f"{context.instance}#{here().random_bytes(4).hex()}"
    opening = NodeRequest(child, context.node_id, NodeKind.SESSION, asked.task_type, Nanos(0), opener)

    def change(view: LedgerView) -> Delegation | Refusal:
        if view.mark(delegation_mark(child)) is not None:
            known = known_delegation(view, child)
            if known.asked != digest:
                raise ConfigError(
                    f"request_id: {asked.request_id!r} is another request of this session; give a new one"
                )
            return add_key(view, child, public)
        refusal = check_standing(view, context)
        cut = refusal or narrowed(view, context, asked)
        if isinstance(cut, Refusal):
            return cut
        granted, removed = cut
        until_ms = granted.deadline * 1000
        soft = context.policy.soft_parts
        node = open_node(view, replace(opening, limit=granted.limit, soft=soft, until_ms=until_ms))
        view.put_node(replace(node, openers=()))  # it is open in no process until its token is redeemed
        total = granted.token_budget or tokens_above(view, context)
        open_tokens(view, tokens_node(child), total, node.name, soft)
        reach = reach_rows(context, granted)
        quotes = tuple((pattern, int(price)) for pattern, price in context.quotes)
        return offer(
            view,
            Delegation(
                child, context.session_id, granted.to_dict(), digest, (public,), until_ms, reach, quotes, removed
            ),
        )

    nodes = (tokens_node(child), *(() if context.tokens is None else (context.tokens.node_id,)))
    around = opening_scope(opening, *nodes)
    decided = yield Transact(replace(around, marks=(*around.marks, delegation_mark(child))), change)
    if isinstance(decided, Refusal):
        raise (yield from refused(context, decided))
    delegation: Delegation = decided
    until_unix = delegation.until_ms // 1000
    if until_unix != asked.deadline:  # it was cut: the token ends with it
        token, public = new_token(ledger_id, child, until_unix)
        scope = Scope(nodes=(child,), marks=(delegation_mark(child),), durable=True)
        delegation = yield Transact(scope, lambda view: add_key(view, child, public))
    return delegation, token


def _ledger_id() -> Flow[str]:
    new = here().random_bytes(16).hex()

    def change(view: LedgerView) -> str:
        row = view.mark(LEDGER_ID)
        if row is None:
            view.put_mark(LEDGER_ID, {"id": new})
        return str((row or {"id": new})["id"])

    known: str = yield Transact(Scope(marks=(LEDGER_ID,)), change)
    return known


def redeem(context: Context, token: Token, gone: frozenset[str]) -> Flow[Delegation]:
    """Give the task of a token to this instance, and return it. Another worker of it has to be *gone*.

    Raises ``ConfigError`` for a token that is old, revoked, used up or for another ledger; the refusal of a session
    around it that is tripped or has ended. Nothing is opened then.
    """

    def change(view: LedgerView) -> Delegation | Refusal:
        _check_token(view, token)
        alive = [each for each in view.node(token.session).openers if each.rpartition("#")[0] not in gone]
        if alive:
            raise ConfigError(f"token: {alive[0].rpartition('#')[0]} works on its task, and is not known to have ended")
        refusal = check_open(view, token.session, resumes=True)
        if refusal is not None:
            return refusal
        view.restrains = True
        return move(view, token.session, DelegationState.WORKING, worker=context.instance)

    scope = Scope(nodes=(token.session,), marks=(LEDGER_ID, delegation_mark(token.session)), durable=True)
    decided: Delegation | Refusal = yield Transact(scope, change)
    if isinstance(decided, Refusal):
        raise (yield from refused(replace(context, node_id=token.session, session_id=token.session), decided))
    return decided


def _check_token(view: LedgerView, token: Token) -> None:
    here_id = (view.mark(LEDGER_ID) or {"id": ""})["id"]
    if token.ledger != here_id:
        raise ConfigError("token: it is for another ledger; open the ledger of the session that has delegated")
    row = view.mark(delegation_mark(token.session))
    if row is None or not token.is_signed_by(known_delegation(view, token.session).keys):
        raise ConfigError("token: this ledger has not issued it, or it was changed; its signature does not hold")
    delegation = known_delegation(view, token.session)
    if delegation.state is DelegationState.REVOKED:
        raise ConfigError(f"token: it is revoked: {delegation.reason}")
    if delegation.state not in (DelegationState.OFFERED, DelegationState.WORKING):
        raise ConfigError(f"token: its task {delegation.request_id!r} is {delegation.state} already")
    until_unix = min(token.until_unix, delegation.until_ms // 1000)
    if view.now_unix >= until_unix:
        raise ConfigError(f"token: it ended {view.now_unix - until_unix} s ago, with the deadline of its task")


Stated = Callable[[Nanos, int], "TaskResult"]
"""Makes a result from what the ledger has counted: nano-dollars and tokens."""


def answer(context: Context, delegation: Delegation, stated: Stated) -> Flow[TaskResult]:
    """Write the result of a task. Raises ``ConfigError`` naming the field that does not fit the request or the ledger."""
    session_id, parent = delegation.session, delegation.parent

    def change(view: LedgerView) -> TaskResult | Refusal:
        delegation, node = known_delegation(view, session_id), view.node(session_id)
        tokens = view.node(tokens_node(session_id)).captured
        result = stated(Nanos(node.spent), tokens)
        if delegation.state is not DelegationState.WORKING:
            raise ConfigError(f"request_id: {delegation.request_id!r} is {delegation.state} already")
        if result.request_id != delegation.request_id:
            raise ConfigError(f"request_id: {result.request_id!r} is not the {delegation.request_id!r} of this task")
        refusal = check_open(view, session_id) if result.status != "failed" else None
        if refusal is not None:
            return refusal
        _check_spent(delegation, result, node.spent, tokens)
        if result.status == "needs_clarification":
            put_input(view, parent, session_id, result.output)
        else:
            move(view, session_id, DelegationState.ANSWERED, result=result.to_dict())
        return result

    marks = (delegation_mark(session_id), input_mark(parent, session_id), inputs_mark(parent))
    scope = Scope(nodes=(session_id, tokens_node(session_id)), marks=marks)
    decided: TaskResult | Refusal = yield Transact(scope, change)
    if isinstance(decided, Refusal):
        raise (yield from refused(context, decided))
    return decided


def _check_spent(delegation: Delegation, result: TaskResult, spent: int, tokens: int) -> None:
    from x402guard.delegation.messages import TaskRequest

    request = TaskRequest.read(delegation.request)
    done = result.status != "failed"
    if done and result.spent > request.limit:
        raise ConfigError(f"cost: ${result.cost} are more than the budget of this task, ${request.budget}")
    if result.spent < spent:
        raise ConfigError(f"cost: ${result.cost} are less than the ${format_dollars(Nanos(spent))} in the ledger")
    if done and request.token_budget is not None and result.tokens > request.token_budget:
        raise ConfigError(f"tokens: {result.tokens:,} are more than the {request.token_budget:,} of this task")
    if result.tokens < tokens:
        raise ConfigError(f"tokens: {result.tokens:,} are less than the {tokens:,} in the ledger")
    if request.structured_output and result.status in ("completed", "partial") and not isinstance(result.output, dict):
        raise ConfigError("output: the request asks for a JSON object (structured_output)")


def abandon(context: Context, delegation: Delegation, why: str) -> Flow[None]:
    """Write that a task has failed, unless it is answered, revoked, or waits for a reply."""

    def change(view: LedgerView) -> None:
        now, asked = known_delegation(view, delegation.session), input_of(view, delegation.parent, delegation.session)
        if now.state is DelegationState.WORKING and not (asked is not None and not asked.taken):
            tokens = view.node(tokens_node(now.session)).captured
            result = _said(now, view.node(now.session).spent, tokens, context.instance, "failed", error=why)
            move(view, now.session, DelegationState.ANSWERED, result=result.to_dict())

    marks = (delegation_mark(delegation.session), input_mark(delegation.parent, delegation.session))
    yield Transact(Scope(nodes=(delegation.session, tokens_node(delegation.session)), marks=marks), change)


class _Reviewed(Struct, frozen=True):
    """A result that waits for a person; *asked* is False if the question was there before."""

    question: str
    asked: bool
    reason: str


def take(context: Context, session_id: str, timeout_s: float | None) -> Flow[TaskResult]:
    """Wait for the result of a task, and return it.

    Raises ``NeedsReview`` for one that a person has to review, ``ApprovalDenied`` for one that was denied, the refusal of
    the waiting session, and ``TimeoutError`` after *timeout_s* seconds; None waits until the deadline of the task.
    """
    me = context.session_id
    review = request_id(me, ["result", session_id])
    marks = (
        delegation_mark(session_id), wait_mark(me, session_id), input_mark(me, session_id), inputs_mark(me),
        approval_mark(review),
    )  # fmt: skip
    scope = Scope(nodes=(me, session_id, tokens_node(session_id)), marks=marks, durable=True)
    look = partial(_look, context=context, session_id=session_id, review=review)
    found = yield from _waited(context, Wait(me, session_id, "result"), timeout_s, scope, look)
    if isinstance(found, _Reviewed):
        command = f"x402guard approvals allow {found.question}"
        if found.asked:
            message = f"a person is asked to review a result: {found.reason}"
            yield Notify(
                Notice("approval_asked", "info", message, session=me, rule=REVIEW, facts={"id": found.question})
            )
        refusal = Refusal(
            REVIEW,
            found.reason,
            error=NeedsReview,
            advice=f"A person reviews it: {command}. Then take the result again.",
        )
        raise (yield from refused(context, refusal))
    result: TaskResult = found
    return result


Look = Callable[[LedgerView], Any]


def _waited(context: Context, wait: Wait, timeout_s: float | None, scope: Scope, look: Look) -> Flow[Any]:
    """Look again and again until there is something, and note in the ledger that a session waits for another."""
    number, until_ms = 0, None

    def change(view: LedgerView) -> tuple[Any, int]:
        found = look(view)
        if found is None and not number:
            begin_wait(view, wait)
        elif found is not None and number:
            end_wait(view, wait)
        return found, view.now_ms

    try:
        while True:
            found, now_ms = yield Transact(scope, change)
            if found is not None:
                break
            if until_ms is None and timeout_s is not None:
                until_ms = now_ms + timeout_s * 1000
            number += 1
            if until_ms is not None and now_ms >= until_ms:
                break
            yield Checkpoint(_PAUSES_S[min(number, len(_PAUSES_S)) - 1])
    except (Exception, Interrupted):
        if number:
            yield from transact_anyway(
                Scope(marks=(wait_mark(wait.waiter, wait.target),)), lambda view: end_wait(view, wait)
            )
        raise
    if found is None:
        yield Transact(Scope(marks=(wait_mark(wait.waiter, wait.target),)), lambda view: end_wait(view, wait))
        raise TimeoutError(f"{wait.target}: no {wait.awaits} after {timeout_s:g} s; it goes on, and may be asked again")
    if isinstance(found, Refusal):
        raise (yield from refused(context, found))
    return found


def _look(view: LedgerView, context: Context, session_id: str, review: str) -> Any:
    refusal = check_open(view, context.session_id)
    if refusal is not None:
        return refusal
    delegation, node = known_delegation(view, session_id), view.node(session_id)
    if delegation.state is DelegationState.DENIED:
        return _denied(delegation)
    if delegation.result is not None:
        return _judged(view, context, delegation, review)
    said = partial(_said, delegation, node.spent, view.node(tokens_node(session_id)).captured)
    reason = lost(view, delegation)
    if reason is not None:
        return said(GUARD, "failed", error=reason[:1000])
    asked = note_read(view, context.session_id, session_id)
    return None if asked is None else said(delegation.worker or GUARD, "needs_clarification", output=asked.payload)


def _said(delegation: Delegation, spent: int, tokens: int, responder: str, status: Any, **more: Any) -> TaskResult:
    from x402guard.delegation.messages import TaskResult

    cost = nanos_to_decimal(Nanos(spent))
    return TaskResult(
        request_id=delegation.request_id, responder_id=responder, status=status, cost=cost, tokens=tokens, **more
    )


def _judged(
    view: LedgerView, context: Context, delegation: Delegation, review: str
) -> TaskResult | _Reviewed | Refusal:
    """Return a result that may be taken; or the question to a person about it, or that person's no."""
    from x402guard.delegation.messages import TaskResult

    result = TaskResult.read(delegation.result or {})
    least = LEAST_CONFIDENCE if context.policy.min_confidence is None else context.policy.min_confidence
    sure = result.status == "failed" or (result.confidence is not None and result.confidence >= least)
    if delegation.state is DelegationState.TAKEN:
        return result
    if sure:
        move(view, delegation.session, DelegationState.TAKEN)
        return result
    row = view.mark(approval_mark(review))
    if row is None or row["taken"] or not row["said"]:
        waits = row is not None and answer_of(row, view.now_ms) is None
        shown = "no confidence" if result.confidence is None else f"a confidence of {result.confidence:g}"
        about = f"the result of {delegation.task_type!r} ({result.request_id}) states {shown}, and {least:g} is needed"
        if not waits:
            _asked(view, context, result, review, about)
        return _Reviewed(review[:16], not waits, about)
    allowed, people, _ = take_answer(view, review)
    facts = {"name": "approval", "allowed": allowed, "by": list(people), "rule": REVIEW, "what": delegation.request_id}
    view.record(context.session_id, "event", facts=facts)
    if allowed:
        move(view, delegation.session, DelegationState.TAKEN)
        return result
    return _denied(move(view, delegation.session, DelegationState.DENIED, reason=f"by {', '.join(people)}"))


def _denied(delegation: Delegation) -> Refusal:
    reason = f"the result of {delegation.task_type!r} ({delegation.request_id}) was denied {delegation.reason}"
    return Refusal(REVIEW, reason, error=ApprovalDenied, advice="Go on without it, or delegate the task again.")


def _asked(view: LedgerView, context: Context, result: TaskResult, review: str, about: str) -> None:
    """Write the question to a person. It leaves the ledger with the answer."""
    output = json.dumps(result.output, ensure_ascii=False)
    text = output if len(output) <= _SHOWN else f"{output[:_SHOWN]}… ({len(output):,} characters)"
    words = printable(f"x402guard: may session {context.session_id} take a result? {about}. It is: {text}")
    what = f"the result of {result.request_id}"
    put_question(view, Question(review, context.session_id, what, words, 1, REVIEW_S))


def ask(context: Context, to: str, payload: Any, timeout_s: float) -> Flow[Any]:
    """Ask another session of the same run, wait for its reply, and return it.

    Raises ``ConfigError`` if there is no such session, the refusal of the asking session or of one that has ended, and
    ``TimeoutError`` after *timeout_s* seconds: the question stays, and the same one again waits on.
    """
    me = context.session_id

    def look(view: LedgerView) -> Input | Refusal | None:
        refusal = check_open(view, context.node_id)
        if refusal is not None:
            return refusal
        if not view.has_node(to) or view.node(to).kind is not NodeKind.SESSION or run_of(to) != run_of(me) or to == me:
            raise ConfigError(f"to: {to!r:.200} is no other session of this run; give the id of one")
        found = put_input(view, to, me, payload)
        if not found.is_open:
            return take_reply(view, found)
        ended = check_open(view, to)
        return None if ended is None else replace(ended, reason=f"no reply can come: {ended.reason}")

    marks = (input_mark(to, me), inputs_mark(to), wait_mark(me, to))
    found: Input = yield from _waited(context, Wait(me, to, "reply"), timeout_s, Scope((me, to), marks=marks), look)
    return found.reply


def read_inputs(context: Context) -> Flow[list[Input]]:
    """Return the questions to this session that have no reply, and note that they are read."""
    me = context.session_id
    senders = yield Transact(Scope(marks=(inputs_mark(me),)), lambda view: senders_of(view, me))
    marks = (inputs_mark(me), *(input_mark(me, sender) for sender in senders))

    def change(view: LedgerView) -> list[Input]:
        return [found for sender in senders if (found := note_read(view, me, sender)) is not None]

    read: list[Input] = yield Transact(Scope(marks=marks), change)
    return read


def reply(context: Context, sender: str, payload: Any) -> Flow[None]:
    """Write the reply to the question of a session. Raises ``ConfigError`` if it has none that is open."""
    me = context.session_id
    scope = Scope((me,), marks=(input_mark(me, sender), inputs_mark(me)))
    yield Transact(scope, lambda view: put_reply(view, me, sender, payload))


def revoke_task(context: Context, session_id: str, reason: str) -> Flow[None]:
    """Revoke a delegation, and trip its session. Raises ``ConfigError`` if it is answered."""
    scope = Scope((session_id,), marks=(delegation_mark(session_id),), durable=True)
    yield Transact(scope, lambda view: revoke(view, session_id, f"{reason} (by {context.session_id})"))

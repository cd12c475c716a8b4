"""The flow of a reported LLM call. It is owed, so its cost is captured in full and trips the limits it exceeds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from msgspec import Struct

from x402guard.errors import LedgerUnavailable
from x402guard.flow import short_way
from x402guard.flow.capture import HIDDEN, HOLD_S, Bill, tell_unread, tokens_in
from x402guard.flow.context import Context
from x402guard.flow.effects import Compute, Flow, Interrupted, Transact, transact_anyway
from x402guard.flow.receipt import Receipt, receipt_of
from x402guard.flow.refusals import refusal_error, refused
from x402guard.frozen import replace
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import NOTHING, Hold, HoldKind, Nanos, Purpose
from x402guard.ledger.authorize import TRIPPED, Refusal, check_open, is_plain
from x402guard.ledger.budgets import trip_exceeded
from x402guard.ledger.events import Capture
from x402guard.ledger.token_budget import count_tokens, soft_mark
from x402guard.ledger.transitions import apply, begin, begin_plainly
from x402guard.ledger.view import LedgerView, Scope
from x402guard.llm.meter import Meter
from x402guard.llm.rates import Rates
from x402guard.llm.reported import Statement, price_statement
from x402guard.policy.guards import guard_marks, note_taken, pass_plainly
from x402guard.policy.steps import Step, bare_key, messages_key

_OWED: Final = (
    "The call is owed, and it may be in the ledger already: once the ledger can be written, check session.spent before "
    "you report it again."
)


class _Recorded(Struct, frozen=True):
    hold: Hold
    told: Refusal | None = None


def record_call(context: Context, meter: Meter, entropy: bytes, statement: Statement) -> Flow[Receipt]:
    """Capture the cost of a reported call, past the limit too, and return its receipt. *entropy* is 32 random bytes.

    Raises ``ValueError`` for impossible counts and ``Unpriced`` for an unknown price; nothing is captured then. Raises
    ``SessionTripped`` after the capture if the session was tripped before, because no transport refused the call.
    """

    def price(now_ms: int) -> tuple[Bill, Rates] | Refusal:
        return price_statement(meter, statement, now_ms // 1000)

    hold_id = hashlib.sha256(b"recorded call" + entropy).hexdigest()
    tokens = context.tokens
    nodes = (context.node_id,) if tokens is None else (context.node_id, tokens.node_id)
    marks = () if tokens is None else (soft_mark(tokens.node_id),)
    # The limits of the guards do not apply to an owed call; it is counted for later steps, and a loop is told.
    step = Step(HoldKind.LLM, statement.model, _key(context, statement), context.node_id)
    marks = (
        *marks,
        _place(statement),
        *guard_marks(context.policy, step),
        *guard_marks(context.policy, step, ending=True),
    )
    scope = Scope(nodes=nodes, holds=(hold_id,), marks=marks, durable=True)
    book = partial(_book, context=context, hold_id=hold_id, statement=statement, step=step)

    def late(view: LedgerView) -> None:
        try:
            priced = price(view.now_ms)
        except ValueError:
            return  # the cancellation has priority over the invalid counts
        if not isinstance(priced, Refusal):
            book(view, priced)

    try:
        priced = yield Compute(price, quick=meter.ready)
    except Interrupted:
        # A cancelled task still owes the call: the transaction prices it, and the driver waits for the transaction.
        yield Transact(scope, late)
        raise
    if isinstance(priced, Refusal):
        raise (yield from refused(context, priced))
    try:
        recorded = yield from transact_anyway(scope, lambda view: book(view, priced))
    except LedgerUnavailable as error:
        error.advice, error.money_may_have_moved = _OWED, True
        raise
    if recorded.told is not None:
        # Not counted as a refusal, because the call is in the ledger.
        told = refusal_error(context, recorded.told)
        told.advice = f"This call is in the ledger. {recorded.told.advice or 'Only the owner can reset this session.'}"
        told.money_may_have_moved = True
        raise told
    receipt = receipt_of(recorded.hold)
    return replace(receipt, model=statement.model, usage=priced[0].usage)


def _place(statement: Statement) -> MarkKey:
    return HIDDEN, f"{statement.provider} {statement.model}"


def _key(context: Context, statement: Statement) -> str:
    loop = context.policy.loop
    if loop is None:
        return ""
    if statement.messages is None:
        return bare_key(HoldKind.LLM, statement.model, NOTHING)
    try:
        return messages_key(statement.model, statement.messages, similar=loop.similar)
    except (TypeError, ValueError, RecursionError):
        return bare_key(HoldKind.LLM, statement.model, NOTHING)  # no plain JSON; the call is owed all the same


def _book(
    view: LedgerView, priced: tuple[Bill, Rates], *, context: Context, hold_id: str, statement: Statement, step: Step
) -> _Recorded:
    bill, rates = priced
    standing = view.hold(hold_id)
    if standing is not None:
        return _Recorded(standing)
    closed = check_open(view, context.node_id)
    hold = Hold(
        id=hold_id,
        node_id=context.node_id,
        kind=HoldKind.LLM,
        amount=Nanos(max(1, bill.amount)),
        created_ms=view.now_ms,
        deadline_unix=view.now_unix + HOLD_S,
        flying_since_ms=view.now_ms,
        instance=context.instance,
        purpose=Purpose(tool=statement.model),
    )
    # The budget is not checked, because the amount is owed.
    start = begin_plainly if is_plain(view, hold, frozenset()) else begin
    start(view, hold, _facts(hold, statement, rates))
    usage: Mapping[str, int] = bill.usage or {}
    after = apply(view, hold_id, Capture(bill.amount, bill.evidence, usage=dict(usage)), bill.proof(hold))
    if bill.unread:
        tell_unread(view, after, (_place(statement),), bill.unread)
    trip_exceeded(view, context.node_id)
    priced_step = step.at(bill.amount)

    def note(view: LedgerView) -> Refusal | None:
        loop = context.policy.loop
        words = None if loop is None else loop.find_loop(view, step)
        looped = None if loop is None or words is None else loop.refuse(view, step, words)
        if looped is None:
            note_taken(view, context.policy, priced_step)
        return looped

    looped = short_way.decide(view, lambda same: pass_plainly(same, context.policy, priced_step), note)
    if context.policy.spike is not None:
        context.policy.spike.note_tokens(view, step, tokens_in(usage))
    if context.tokens is not None:
        count_tokens(view, context.tokens, tokens_in(usage))
    if closed is None or closed.rule != TRIPPED:
        return _Recorded(after, looped)
    return _Recorded(after, replace(closed, reason=f"{closed.reason}; this call is in the ledger"))


def _facts(hold: Hold, statement: Statement, rates: Rates) -> dict[str, Any]:
    return {
        "kind": HoldKind.LLM,
        "amount": hold.amount,
        "model": statement.model,
        "provider": statement.provider,
        "price": rates.facts(),
        "recorded": True,
        "deadline": hold.deadline_unix,
    }

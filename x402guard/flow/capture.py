"""Decisions in one ledger transaction about the end of an LLM call or a tool: what is captured, what is given back. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from x402guard.errors import LedgerUnavailable
from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, cause, transact_anyway
from x402guard.flow.ports import Usage
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.proofs import Billed, Stated
from x402guard.kernel.rows import Claim, Evidence, Hold, HoldKind, HoldState, Nanos
from x402guard.ledger.bills import BILLED_NOTHING, BILLED_REFUSED, BILLED_USAGE, STATED
from x402guard.ledger.budgets import trip_session
from x402guard.ledger.events import Capture, Correct, Note, Void
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.token_budget import Reservation, call_tokens, end_call_tokens, release_call_tokens, soft_mark
from x402guard.ledger.transitions import apply, has_lapsed
from x402guard.ledger.view import Change, LedgerView, Scope
from x402guard.money import format_dollars
from x402guard.policy.guards import give_step_back, guard_marks, note_end
from x402guard.policy.step_guard import Outcome, StepEnd
from x402guard.policy.steps import Step, step_of

HOLD_S: Final = 900  # seconds after which a call without a reported end is captured at its ceiling
DISPUTED: Final = "disputed_usage"
MEAN: Final = "llm_mean"
ESTIMATED: Final = "llm_estimated"
HIDDEN: Final = "hidden_input"
UNREAD: Final = "usage_not_read"
"""The event of stated counts that nothing reads."""
_MOST_UNREAD: Final = 20
_LONGEST_NAME: Final = 60


class Bill(Struct, frozen=True):
    """An amount to capture, and why.

    Attributes:
        amount: nano-dollars.
        evidence: why the amount is believed.
        usage: what was used, by unit, if stated.
        note: for the ledger: why it is the ceiling, or what was unusual.
        claimed: nano-dollars that the stated usage would cost, if the amount is disputed; else None.
        tokens: the tokens of a disputed usage, up to the most that the model can take.
        hidden_input: input tokens beyond those that the request's bytes allow.
        unread: the names of stated counts that nothing reads, and that are booked at the dearest rate.
        latches: True if the owner's settings trip the session after such a bill.
    """

    amount: Nanos
    evidence: Evidence
    usage: Usage | None = None
    note: str = ""
    claimed: Nanos | None = None
    tokens: int = 0
    hidden_input: int = 0
    unread: tuple[str, ...] = ()
    latches: bool = False

    def proof(self, hold: Hold) -> Billed | Stated | None:
        """Return why less than the ceiling may be captured: the caller states what a tool costs, a provider bills a usage."""
        if hold.kind is HoldKind.TOOL:
            return STATED
        if self.evidence is Evidence.ASSUMED:
            return None
        return BILLED_REFUSED if self.usage is None else BILLED_USAGE


def ceiling_bill(held: Nanos, note: str) -> Bill:
    """Return the bill of a call whose cost is unknown: all that was held."""
    return Bill(held, Evidence.ASSUMED, note=note)


def write_void(
    context: Context,
    hold_id: str,
    reason: str,
    marks: tuple[MarkKey, ...] = (),
    *,
    step: Step | None = None,
    outcome: Outcome = "unknown",
) -> tuple[Scope, Change[Hold | None]]:
    """Return the transaction that voids a hold that was never billed, and removes its *step* from the guards' counts.

    The guards still count its *outcome*. A hold that was never written is no error.
    """
    seen = () if step is None else guard_marks(context.policy, step)
    tokens = context.tokens if context.tokens is not None and context.tokens.hard else None

    def change(view: LedgerView) -> Hold | None:
        hold = view.hold(hold_id)
        if hold is not None and hold.state is HoldState.HELD:
            apply(view, hold_id, Void(reason[:300]), STATED if hold.kind is HoldKind.TOOL else BILLED_NOTHING)
            if step is not None:
                give_step_back(view, context.policy, step, hold.created_ms)
                note_end(view, context.policy, step, StepEnd(hold.id, outcome))
            if tokens is not None:
                release_call_tokens(view, hold_id)
        _forget_estimate(view, marks, hold_id)
        return view.hold(hold_id)

    nodes = (context.node_id,) if tokens is None else (context.node_id, tokens.node_id)
    holds = (hold_id,) if tokens is None else (hold_id, call_tokens(hold_id))
    return Scope(nodes=nodes, holds=holds, marks=(*marks, *seen)), change


def write_bill(
    context: Context,
    hold: Hold,
    bill: Bill,
    marks: tuple[MarkKey, ...],
    *,
    most_tokens: int = 0,
    outcome: Outcome = "ok",
) -> tuple[Scope, Change[Hold]]:
    """Return the transaction that captures a cost: its scope and the change, which is idempotent.

    The session's tokens count the stated usage, or *most_tokens* without one. The guards count the *outcome*.
    """
    step = step_of(hold)
    spike = context.policy.spike
    may_trip = spike is not None and spike.action == "trip" and bill.usage is not None
    restrains = bill.amount > hold.amount or bill.latches or may_trip
    tokens = context.tokens if bill.usage is not None or most_tokens else None
    used = max(bill.tokens, most_tokens) if bill.usage is None else tokens_in(bill.usage)
    late = Reservation(call_tokens(hold.id), used, context.instance, llm=True)
    nodes = (context.node_id,) if tokens is None else (context.node_id, tokens.node_id)
    seen = (*marks, *guard_marks(context.policy, step, ending=True))
    if tokens is not None:
        seen = (*seen, soft_mark(tokens.node_id))

    def change(view: LedgerView) -> Hold:
        before = view.known_hold(hold.id)
        after = _end(view, before, bill, marks)
        if before.state is HoldState.HELD:
            note_end(view, context.policy, step, StepEnd(hold.id, outcome))
            if bill.usage is not None and context.policy.spike is not None:
                context.policy.spike.note_tokens(view, step, tokens_in(bill.usage))
        if tokens is None or (before.state is not HoldState.HELD and not has_lapsed(before)):
            return after
        end_call_tokens(view, tokens, late, in_time=before.state is HoldState.HELD)
        return after

    return Scope(nodes=nodes, holds=(hold.id, late.id), marks=seen, durable=restrains), change


def tokens_in(usage: Usage) -> int:
    """Return the tokens in a usage: input and output."""
    return usage.get("input_tokens", 0) + usage.get("output_tokens", 0)


def _end(view: LedgerView, now: Hold, bill: Bill, marks: tuple[MarkKey, ...]) -> Hold:
    _forget_estimate(view, marks, now.id)
    if now.state is not HoldState.HELD:
        return _late(view, now, bill)
    if bill.claimed is not None:
        apply(view, now.id, Note(claim=Claim(bill.claimed, "")))
        _tell_dispute(view, now, bill)
    after = apply(view, now.id, _capture(bill), bill.proof(now))
    if bill.latches:
        trip_session(view, now.node_id, DISPUTED, bill.note)
    if marks and bill.usage is not None:
        _add_to_mean(view, marks[0], bill.amount)
    if bill.hidden_input:
        _learn_hidden_input(view, now, marks, bill.hidden_input)
    if bill.unread:
        tell_unread(view, now, marks, bill.unread)
    return after


def _capture(bill: Bill) -> Capture:
    usage = None if bill.usage is None else dict(bill.usage)
    return Capture(bill.amount, bill.evidence, usage=usage, note=bill.note or None)


def _learn_hidden_input(view: LedgerView, hold: Hold, marks: tuple[MarkKey, ...], tokens: int) -> None:
    """Hold for the input that a server adds by itself from the next call on. The owner hears of it once a place."""
    key = next((key for key in marks if key[0] == HIDDEN), None)
    if key is None:
        return
    known = view.mark(key) or {}
    view.put_mark(key, {**known, "tokens": max(tokens, int(known.get("tokens", 0)))})
    if not known.get("tokens"):
        facts = {"name": "hidden_input", "place": key[1], "tokens": tokens}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)
        message = (
            f"{key[1]} counts {tokens:,} input tokens more than the request has: the server adds a prompt of its own. They "
            "are billed, and held for from now on"
        )
        view.tell("hidden_input", "warning", message, session=hold.node_id, facts={"place": key[1], "tokens": tokens})


def tell_unread(view: LedgerView, hold: Hold, marks: tuple[MarkKey, ...], names: tuple[str, ...]) -> None:
    """Tell of counts that nothing reads, each name once a host and model, and of the first ones alone.

    The names are the provider's words, which a report does not show: only the owner's notice has them.
    """
    key = next((key for key in marks if key[0] == HIDDEN), None)
    if key is None:
        return
    before = dict(view.mark(key) or {"tokens": 0})
    told: list[str] = before.get("unread", [])
    new = [name[:_LONGEST_NAME] for name in names if name[:_LONGEST_NAME] not in told][: _MOST_UNREAD - len(told)]
    if not new:
        return
    view.put_mark(key, {**before, "unread": [*told, *new]})
    view.record(hold.node_id, "event", hold_id=hold.id, facts={"name": UNREAD, "place": key[1]})
    message = f"{key[1]} states counts that nothing reads, and they are booked at the dearest rate"
    view.tell(UNREAD, "warning", message, session=hold.node_id, facts={"place": key[1], "counts": ", ".join(new)})


def _tell_dispute(view: LedgerView, hold: Hold, bill: Bill) -> None:
    claimed = format_dollars(Nanos(bill.claimed or 0))
    shown = f"${claimed}" if len(claimed) <= 40 else "an absurd amount"
    message = (
        f"{hold.purpose.tool}: its server states a usage that costs {shown}, and ${format_dollars(bill.amount)} are booked "
        f"({bill.note}); compare it with the provider's own bill (metering.disputes says what such a usage does)"
    )
    facts = {"hold_id": hold.id, "host": hold.purpose.host, "model": hold.purpose.tool, "claimed": claimed[:40]}
    view.tell(DISPUTED, "warning", message, session=hold.node_id, amount=bill.amount, facts=facts)


def _late(view: LedgerView, hold: Hold, bill: Bill) -> Hold:
    """Apply a bill that comes after the hold lapsed to its ceiling: what is above it is owed, less frees nothing."""
    if hold.state is not HoldState.CAPTURED or hold.evidence is not Evidence.ASSUMED:
        return hold
    if bill.claimed is not None:
        facts = {"name": "usage_disputed", "claimed": bill.claimed, "reason": bill.note}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)
        _tell_dispute(view, hold, bill)
    if bill.latches:
        trip_session(view, hold.node_id, DISPUTED, bill.note)
    if bill.amount > hold.captured:
        return apply(view, hold.id, Correct(bill.amount, bill.evidence))
    return hold


def _add_to_mean(view: LedgerView, key: MarkKey, amount: Nanos) -> None:
    before = view.mark(key) or {"calls": 0, "nanos": 0}
    view.put_mark(key, {"calls": int(before["calls"]) + 1, "nanos": int(before["nanos"]) + amount})


def _forget_estimate(view: LedgerView, marks: tuple[MarkKey, ...], hold_id: str) -> None:
    for kind, node_id in marks:
        row = view.mark((kind, node_id))
        if kind == ESTIMATED and row is not None and row["hold"] == hold_id:
            view.put_mark((kind, node_id), {"hold": None, "until": 0})


def capture_bill(
    context: Context,
    hold: Hold,
    bill: Bill,
    marks: tuple[MarkKey, ...] = (),
    *,
    most_tokens: int = 0,
    outcome: Outcome = "ok",
) -> Flow[Hold]:
    """Capture what was used. See ``write_bill``."""
    scope, change = write_bill(context, hold, bill, marks, most_tokens=most_tokens, outcome=outcome)
    trips = (DISPUTED, bill.note) if bill.latches and not context.shadow else None
    return (
        yield from transact_anyway(
            scope, change, late=LateEnd(hold.id, capture=_capture(bill), proof=bill.proof(hold), trips=trips)
        )
    )


def give_back(
    context: Context,
    held: Hold | str,
    reason: str,
    error: BaseException | None,
    marks: tuple[MarkKey, ...] = (),
    *,
    outcome: Outcome = "unknown",
) -> Flow[None]:
    """Void what was never billed: a hold, or its id if it is unknown whether the hold was written.

    If the ledger cannot be written, the hold stays: that costs budget, never money. The guards count the *outcome*.
    """
    hold_id, step = (held.id, step_of(held)) if isinstance(held, Hold) else (held, None)
    try:
        yield from transact_anyway(*write_void(context, hold_id, reason, marks, step=step, outcome=outcome))
    except LedgerUnavailable as again:
        if error is None:
            return  # the hold lapses to its ceiling; the caller still gets the answer
        cause(error).add_note(f"hold {hold_id} could not be given back: {again}")

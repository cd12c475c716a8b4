"""Step 9 and after: applies the reply to a payment, and the findings of the chain, to the ledger."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from x402guard.assets import resolve_network
from x402guard.errors import IllegalTransition, PaidNotDelivered, ProtocolError, SettlementUncertain, quoted
from x402guard.flow.context import Context, Looked
from x402guard.flow.effects import AskChain, Flow, Notify, Reply, Transact
from x402guard.flow.ports import HoldStatus
from x402guard.kernel.proofs import Unsent
from x402guard.kernel.rows import NOTHING, Claim, Delivery, Evidence, Hold, HoldState, Nanos
from x402guard.ledger.budgets import room_on_path
from x402guard.ledger.events import Note, Void
from x402guard.ledger.evidence import (
    CONTRADICTED,
    claim_settlement,
    named_transaction,
    note_checked,
    receipt_mark,
    transaction_of,
    weigh,
    weigh_marks,
)
from x402guard.ledger.findings import Finding, Unreadable
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.purchases import in_doubt, lose, presentation_of
from x402guard.ledger.transitions import apply
from x402guard.ledger.upto_sellers import ceiling_mark
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars
from x402guard.policy.approvals import give_unapproved_back, unapproved_mark
from x402guard.policy.guards import give_step_back, guard_marks, note_end
from x402guard.policy.step_guard import StepEnd
from x402guard.policy.steps import step_of
from x402guard.x402.delivery import AnswerEnd, doubted_mark, ending_of, late_delivery
from x402guard.x402.wire import PAYMENT_REQUIRED, SettleResponse, decode_payment_required, decode_receipt, only_header

SWEEP_SIZE: Final = 16
"""The most holds that one sweep asks the chain about."""

SWEEP_PAUSE_MS: Final = 2_000
"""The least time in milliseconds between two sweeps that check the same hold."""


PAYMENT_REQUIRED_STATUS: Final = 402
ACCEPTED_STATUS: Final = 202
"""Of a job that has begun. Its seller has not failed."""

_MOST_WORDS: Final = 1024


def succeeded(status: int) -> bool:
    """True for a status of success: 2xx, 3xx, or 101."""
    return 200 <= status < 400 or status == 101


def delivers(reply: Reply) -> bool:
    """True for an answer that delivers what was paid for: a success, and no part of it alone."""
    return succeeded(reply.status) and not reply.is_less


class Doubt(Struct, frozen=True):
    """The reason why a reply is not a valid claim, and the transaction and the server's words in it, or ""."""

    reason: str
    transaction: str = ""
    words: str = ""


def judge_reply(reply: Reply, hold: Hold) -> Claim | Doubt:
    """Return the claim in the reply to a paid request, or a doubt.

    Only a success receipt for this payer and network is a claim. After a reply without a receipt, a failure or another
    402 the server still has the signature and can use it.
    """
    try:
        receipt = decode_receipt(reply.headers)
    except ProtocolError as error:
        return Doubt(f"status {reply.status} with an unreadable receipt ({error})")
    if receipt is None:
        return Doubt(f"status {reply.status} without a receipt", words=_refusal_words(reply))
    if not receipt.success:
        # A server may report a failure before its transaction is mined, so the chain is asked about the transaction.
        return Doubt(f"status {reply.status}, settlement failed", receipt.transaction, receipt.error_reason or "")
    intent = hold.payment()
    if receipt.network and resolve_network(receipt.network) != intent.network:
        return Doubt(f"the receipt is for another network than {intent.network}", words=receipt.network)
    if receipt.payer is not None and receipt.payer.lower() != intent.payer.lower():
        return Doubt("the receipt names another payer")
    return _claim(receipt, hold)


def _refusal_words(reply: Reply) -> str:
    """Return what a 402 that answers a payment says is wrong with it (HTTP transport v2), or ""."""
    try:
        header = only_header(reply.headers, PAYMENT_REQUIRED) if reply.status == PAYMENT_REQUIRED_STATUS else None
        told = None if header is None else decode_payment_required(header).error
    except ProtocolError:
        return ""
    return told[:_MOST_WORDS] if isinstance(told, str) else ""


def _claim(receipt: SettleResponse, hold: Hold) -> Claim | Doubt:
    intent = hold.payment()
    if intent.scheme == "exact":
        return Claim(hold.amount, receipt.transaction)  # exact receipts have no amount: it is the signed amount
    if receipt.amount is None:
        return Claim(hold.amount, receipt.transaction)
    claimed = int(receipt.amount)
    if claimed > intent.amount_atomic:
        return Doubt(f"the receipt claims {claimed} units, more than the signed {intent.amount_atomic}")
    return Claim(Nanos(-(-hold.amount * claimed // intent.amount_atomic)), receipt.transaction)


def write_claim(
    context: Context, hold: Hold, claim: Claim, *, status: int, is_less: bool = False, end: AnswerEnd | None = None
) -> Flow[Hold]:
    """Record a claim. ``exact`` is captured in full as claimed; an ``upto`` stays held and keeps the claim.

    An answer with a *status* of 400 or more, or that *is less* than what was asked for, delivers nothing; the guards
    count a 402 or a 5xx as a failure. *end* is how the answer ended, if it has ended.
    """
    failed, has_come = status >= 500 or status == PAYMENT_REQUIRED_STATUS, succeeded(status) and not is_less
    intent = hold.payment()
    believe = intent.scheme == "exact" or (context.unsafe_trust_receipts and not hold.chain_evidence)
    step, ending = step_of(hold), ending_of(context, hold, end)

    def change(view: LedgerView) -> Hold:
        now = view.known_hold(hold.id)
        if end is not None and now.claim == claim and _is_ended(now, hold):
            return now
        note_end(view, context.policy, step, StepEnd(hold.id, "failed" if failed else "ok", begun_ms=hold.created_ms))
        view.recheck = hold.chain_evidence
        claim_settlement(view, hold.id, claim, believe=believe)
        return ending.change(view) if has_come else lose(view, presentation_of(hold))

    receipt = [receipt_mark(intent.network, claim.transaction)] if claim.transaction else []
    noted = (ceiling_mark(intent.payee), *receipt)
    marks = (*noted, *guard_marks(context.policy, step, ending=True), *ending.marks)
    scope = replace(_scope_of(context, hold.id), marks=marks, durable=failed or ending.durable)
    late = LateEnd(
        hold.id,
        claim=claim,
        believe=believe,
        marks=noted,
        presented=hold.presented,
        delivery=late_delivery(context, presentation_of(hold), end) if has_come else Delivery.LOST,
    )
    answer: Hold = yield Transact(scope, change, late)
    return answer


def note_doubt(
    context: Context,
    hold: Hold,
    doubt: Doubt,
    *,
    sent: bool = True,
    answered: bool = False,
    end: AnswerEnd | None = None,
) -> Flow[Hold]:
    """Record that the outcome of a payment is unknown. It stays held and counts in full.

    A transaction that the server named is kept as a claim of the full amount. *sent* is False if the failure cannot be
    the payee's. *answered* is True if the reply is handed over: its end, *end* if it has ended, says whether the answer
    is lost.
    """
    step, claim = step_of(hold), Claim(hold.amount, doubt.transaction) if doubt.transaction else None
    place, ending = doubted_mark(context, step.name), ending_of(context, hold, end)

    def change(view: LedgerView) -> Hold:
        now = view.known_hold(hold.id)
        if end is not None and now.doubt == doubt.reason and _is_ended(now, hold):
            return now
        again = now.doubt is not None or now.presented > 0
        failed = StepEnd(hold.id, "failed", again=again, begun_ms=hold.created_ms)
        outcome = failed if sent else StepEnd(hold.id, "unknown")
        note_end(view, context.policy, step, outcome)
        view.recheck = claim is not None and hold.chain_evidence
        if now.state is HoldState.HELD:
            apply(view, hold.id, Note(doubt.reason, claim, quoted(doubt.words) or None))
            view.put_mark(place, {"hold": hold.id, "until": hold.deadline_unix})
        return ending.change(view) if answered else lose(view, presentation_of(hold))

    marks = (place, *guard_marks(context.policy, step, ending=True), *ending.marks)
    scope = replace(_scope_of(context, hold.id), marks=marks, durable=sent or ending.durable)
    late = LateEnd(
        hold.id,
        claim=claim,
        doubt=doubt.reason,
        presented=hold.presented,
        delivery=late_delivery(context, presentation_of(hold), end) if answered else Delivery.LOST,
    )
    answer: Hold = yield Transact(scope, change, late)
    return answer


def _is_ended(now: Hold, hold: Hold) -> bool:
    """True if an earlier run of the same change has recorded the end already: the answer to its commit was lost."""
    return presentation_of(now) == presentation_of(hold) and now.delivery in (Delivery.DONE, Delivery.LOST)


def void(
    context: Context, held: Hold | str, reason: str, *, presented: int = 0, unsent: Unsent | None = None
) -> Flow[bool]:
    """Void a hold that was not signed or, by *unsent*, not sent. Returns True if nothing of it can be taken.

    Compare-and-set: a hold that another instance has taken over (*presented* has changed) may have been sent, so it
    stays. A hold that was never written is not an error.
    """
    hold_id, step = (held.id, step_of(held)) if isinstance(held, Hold) else (held, None)

    def change(view: LedgerView) -> bool:
        hold = view.hold(hold_id)
        if hold is None:
            return True
        proof = unsent or view.unsigned(hold_id)
        if proof is not None and hold.state is HoldState.HELD and hold.presented == presented:
            hold = apply(view, hold_id, Void(reason), proof)
            if step is not None:
                give_step_back(view, context.policy, step, hold.created_ms)
                give_unapproved_back(view, context.policy.approvals, step)
                note_end(view, context.policy, step, StepEnd(hold.id, "unknown"))
        return hold.state is HoldState.VOIDED

    marks = () if step is None else guard_marks(context.policy, step, (step.payee,))
    if step is not None and context.policy.approvals.more_than is not None:
        marks = (*marks, unapproved_mark(step.run_id, step.payee))
    answer: bool = yield Transact(replace(_scope_of(context, hold_id), marks=marks), change)
    return answer


def _scope_of(context: Context, hold_id: str) -> Scope:
    return Scope(nodes=(context.node_id,), holds=(hold_id,))


def ask_chain(context: Context, hold: Hold) -> Flow[Hold]:
    """Ask the chain about one payment, apply its finding, and return the hold after it."""
    finding = yield AskChain(HoldStatus(hold))
    if isinstance(finding, Unreadable):
        return hold
    after, _ = yield from weighed(context, hold, finding)
    return after


def weighed(context: Context, hold: Hold, finding: Finding) -> Flow[tuple[Hold, bool]]:
    """Apply a finding; return the hold after it, and whether the chain contradicts the payment's receipt."""
    most = context.policy.most_exposed

    def change(view: LedgerView) -> tuple[Hold, bool]:
        after = weigh(view, hold.id, finding, most_exposed=most)
        return after, any(notice.kind == CONTRADICTED for notice in view.notices)

    # Durable, because an upward correction reduces the budget.
    scope = Scope(nodes=(hold.node_id,), holds=(hold.id,), marks=weigh_marks(hold, finding), durable=True)
    answer: tuple[Hold, bool] = yield Transact(scope, change)
    return answer


def weighed_alone(context: Context, hold: Hold, finding: Finding) -> Flow[tuple[Hold, bool] | None]:
    """Do as ``weighed``; None if the ledger's table forbids it: the error of one payment ends no check of the others."""
    try:
        return (yield from weighed(context, hold, finding))
    except IllegalTransition as error:
        yield Notify(f"hold {hold.id[:16]}… keeps its state, although the chain shows another one: {error}")
        return None


class Swept(Struct, frozen=True):
    """The result of a sweep.

    Attributes:
        still_open: payments that are open after it.
        more: True if there may be more payments to check.
        asked: payments that it asked the chain about.
        room: nano-dollars that fitted into the budgets when it began; None without a limit.
        waits: nano-dollars of claimed payments that are given back once their blocks are final.
        until: unix seconds by which they are decided, once a block after it is final; 0 if nothing waits.
        began_ms: when it began, by the ledger's clock, in unix milliseconds.
    """

    still_open: int
    more: bool
    asked: int = 0
    room: Nanos | None = None
    waits: Nanos = NOTHING
    until: int = 0
    began_ms: int = 0


def sweep(context: Context, *, live_first: bool = False, since_ms: int | None = None, enough: int = 0) -> Flow[Swept]:
    """Ask the chain about up to ``SWEEP_SIZE`` unproven payments, those with the oldest check first.

    *live_first*: those that take budget before those that only wait for a confirmation. Skips payments checked within
    ``SWEEP_PAUSE_MS``, or from *since_ms* (unix milliseconds) on, so that one check asks a slow chain only once. An
    unreadable network is asked only once. The room that it finds is exact up to *enough* (nano-dollars).
    """
    waiting = seen = began_ms = 0
    room: Nanos | None = None

    def pick(view: LedgerView) -> tuple[Hold, ...]:
        nonlocal waiting, seen, room, began_ms
        began_ms = view.now_ms
        before_ms = view.now_ms - SWEEP_PAUSE_MS if since_ms is None else min(since_ms, view.now_ms - SWEEP_PAUSE_MS)
        room = room_on_path(view, context.node_id, context.finalizing, enough=enough)
        worth = [h for h in map(view.known_hold, view.sweep) if is_worth_asking(view, h, context.flight_ms)]
        chosen = tuple(hold for hold in worth if hold.checked_ms < before_ms)
        waiting, seen = len(worth) - len(chosen), len(chosen)
        return chosen

    scope = Scope(nodes=(context.node_id,), sweep=SWEEP_SIZE, live_first=live_first, flight_ms=context.flight_ms)
    still_open, unreadable, asked = 0, set[str](), list[Hold]()
    waits, until = 0, 0
    for hold in (yield Transact(scope, pick)):
        network = hold.payment().network
        finding = Unreadable("") if network in unreadable else (yield AskChain(HoldStatus(hold)))
        if isinstance(finding, Unreadable) and not finding.alone:
            unreadable.add(network)
        taken = None if isinstance(finding, Unreadable) else (yield from weighed_alone(context, hold, finding))
        if taken is None:
            asked.append(hold)
        else:
            still_open += is_open(taken[0])
        now = hold if taken is None else taken[0]
        if now.state is HoldState.HELD and now.claim is not None and now.claim.amount < now.amount:
            waits, until = waits + now.amount - now.claim.amount, max(until, now.deadline_unix)
    if asked:
        yield from _note_asked(asked)
    # A payment that cannot be read alone, as one whose seller names an invisible transaction, holds up no other.
    more = seen == SWEEP_SIZE and not unreadable
    return Swept(still_open + len(asked) + waiting, more, seen, room, Nanos(waits), until, began_ms)


def may_fit_now(context: Context, fitted: Nanos) -> Flow[Looked]:
    """Ask the chain about claims that may cost less than their holds, and return whether more than *fitted* may fit now.

    *fitted* is in nano-dollars. More may also fit if another caller's sweep has just freed budget.
    """
    swept = yield from sweep(context, live_first=True, enough=fitted + 1)
    may_fit = swept.asked > 0 or swept.room is None or swept.room > fitted
    return Looked(may_fit, _waiting(swept) if swept.waits else "")


def _waiting(swept: Swept) -> str:
    until = datetime.fromtimestamp(swept.until, UTC).strftime("%H:%M:%S UTC")
    return (
        f"; ${format_dollars(swept.waits)} more wait for the finality of their blocks, at the latest of one after {until} "
        "(policy.reorg_exposure lets remainders be used before)"
    )


def _note_asked(holds: list[Hold]) -> Flow[None]:
    """Record the time of the check, so that not every refusal asks an unreadable network."""

    def change(view: LedgerView) -> None:
        for hold in holds:
            note_checked(view, hold.id)

    scope = Scope(nodes=tuple({hold.node_id for hold in holds}), holds=tuple(hold.id for hold in holds))
    yield Transact(scope, change)


def is_worth_asking(view: LedgerView, hold: Hold, flight_ms: int) -> bool:
    """True if the hold is in doubt, or if its evidence is a claim, an assumption or a block that is not final."""
    if hold.state is HoldState.HELD:
        return hold.claim is not None or in_doubt(view, hold, flight_ms=flight_ms)
    return is_open(hold)


def is_open(hold: Hold) -> bool:
    """True for a payment whose outcome no final block has proven."""
    on_word = hold.evidence in (Evidence.CLAIMED, Evidence.CHAIN_HEAD, Evidence.ASSUMED)
    return hold.state is HoldState.HELD or (hold.state is HoldState.CAPTURED and on_word)


def was_taken(hold: Hold) -> bool:
    """True if the chain shows that a payment was taken, or if the server said so."""
    return hold.state is HoldState.CAPTURED and hold.captured > 0 and hold.evidence is not Evidence.ASSUMED


def proven_taken(hold: Hold) -> bool:
    """True if the chain shows that a payment was taken."""
    return hold.state is HoldState.CAPTURED and hold.evidence in (Evidence.CHAIN, Evidence.CHAIN_HEAD)


E = TypeVar("E", bound=SettlementUncertain)


def uncertain_of(kind: type[E], hold: Hold, message: str, *, advice: str | None = None) -> E:
    """Return the error with the facts of a payment that was or may be taken."""
    payment, purpose = hold.payment(), hold.purpose
    return kind(
        message,
        hold_id=hold.id,
        deadline=hold.deadline_unix,
        advice=advice,
        amount=hold.captured if was_taken(hold) else hold.amount,
        payee=payment.payee,
        network=payment.network,
        place=f"{purpose.method} {purpose.url}",
        payment_id=payment.payment_id,
        transaction=_transaction_of(hold),
    )


def _transaction_of(hold: Hold) -> str:
    return named_transaction(hold) if hold.proof is None else transaction_of(hold.proof)


def resolve_open(context: Context, hold: Hold) -> Flow[None]:
    """Ask the chain about an open purchase that cannot be presented again; return only if it may be bought again."""
    asks = hold.chain_evidence and hold.evidence is not Evidence.CHAIN
    after = (yield from ask_chain(context, hold)) if asks else hold
    if was_taken(after):
        raise not_delivered(after)
    if after.state is HoldState.HELD or after.captured:
        live = after.state is HoldState.HELD
        wait = "Wait until the chain is past its deadline, or ask" if live else "No chain can tell how it ended. Ask"
        uncertain = uncertain_of(
            SettlementUncertain,
            after,
            f"a payment for the same request is in doubt ({after.doubt or 'no answer came'}) and cannot be presented again",
            advice=f"{wait} with extensions={{'pay_again': True}} to pay a second time.",
        )
        uncertain.retry = "later" if live else "no"
        raise uncertain


def not_delivered(hold: Hold) -> PaidNotDelivered:
    """Return the error about a payment that was taken, and whose answer was not handed over."""
    shown = "the chain shows" if proven_taken(hold) else "the server's receipt says"
    return uncertain_of(
        PaidNotDelivered,
        hold,
        f"{shown} that {hold.payment().payee} took ${format_dollars(hold.captured)} for this request (hold {hold.id[:16]}…), "
        "but its answer was not handed over",
    )

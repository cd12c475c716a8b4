"""The conversation for one request, step by step. The numbers are those of ``docs/architecture.md``.

2. send it · 3. read the offer · 4. screen and freeze one · 5. rules · 6. write the hold · 7. sign · 8. send again, paid ·
9. believe the receipt as far as it goes · 10. hand the response over.

What is written before what is signed, what is signed before what is sent: this file is the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from x402guard.errors import (
    CallTimeout,
    LedgerUnavailable,
    NoAcceptableOffer,
    PaidNotDelivered,
    PaymentRefused,
    SettlementUncertain,
    SignerError,
)
from x402guard.flow.admission import Seat, hold_or_refuse
from x402guard.flow.context import Context
from x402guard.flow.effects import (
    Checkpoint,
    Compute,
    Flow,
    HeaderLine,
    Reply,
    Send,
    SendFailed,
    Sign,
    cause,
    error_name,
)
from x402guard.flow.receipt import Receipt, receipt_of
from x402guard.flow.refusals import refused
from x402guard.flow.request import RequestFacts, guarding_earlier_payment
from x402guard.flow.sealed import Sealed, forgetting
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.model import Hold, HoldKind, HoldState
from x402guard.ledger.view import LedgerView
from x402guard.policy.judge import Consented, Unasked
from x402guard.x402.challenge import Payable, read_challenge, screen
from x402guard.x402.offer import Offer
from x402guard.x402.offer_rules import rank
from x402guard.x402.origins import note_version, origin_mark
from x402guard.x402.purchase import Authorized, Stuck, authorize_purchase, payment_step, purchase_scope
from x402guard.x402.schemes import payment_header
from x402guard.x402.settlement import (
    Doubt,
    ask_chain,
    judge_reply,
    note_doubt,
    proven_taken,
    uncertain_of,
    void,
    write_claim,
)

PAYMENT_REQUIRED_STATUS: Final = 402
QUICK_BYTES: Final = 16_384
"""A body up to this size is compared with those before it on the event loop."""

ONE_PAYMENT: Final = "one_payment_per_request"


def paid_request(request: RequestFacts, context: Context, reply: Reply | None = None) -> Flow[Receipt | None]:
    """Return one request's whole conversation; the driver hands over the last response that was sent.

    *reply* is the answer that it begins with, where the request was sent already.
    The flow returns the receipt of what was paid, or None where nothing was. It raises ``PaymentRefused`` and what derives from
    it, ``ProtocolError``, ``SettlementUncertain``, ``SignerError``, ``LedgerUnavailable``; and ``SendFailed`` where no payment
    was involved.
    """
    return guarding_earlier_payment(request, _conversation(request, context, reply))


def _conversation(request: RequestFacts, context: Context, reply: Reply | None) -> Flow[Receipt | None]:
    reply = reply or (yield Send())  # 2
    if reply.status != PAYMENT_REQUIRED_STATUS or request.pays_itself:
        return None
    timeouts = context.policy.timeouts
    challenge = yield from read_challenge(reply, timeouts.payment_s)  # 3
    if challenge is None:
        return None
    no = partial(refused, context)
    if challenge.required.version == 2:  # refused or not, the origin is not believed in v1 any more
        learn, key = partial(note_version, origin=request.origin), origin_mark(request.origin)
        no = partial(refused, context, also=learn, marks=(key,))
    impossible = _cannot_pay(request, context)
    if impossible is not None:
        raise (yield from no(impossible))
    payable = yield from screen(challenge, request, context)  # 4, 5
    if not payable.offers:
        raise (yield from no(_none_payable(payable)))
    authorized = yield from _authorize(request, context, rank(payable.offers), no)  # 6
    header = yield from _sign(context, authorized)  # 7
    hold = yield from _present(context, authorized, header)  # 8, 9
    return receipt_of(hold, represented=authorized.represented)  # 10


def _cannot_pay(request: RequestFacts, context: Context) -> Refusal | None:
    """What keeps us from paying whatever is offered."""
    if request.paid_by is not None:
        reason = f"this request has paid already (hold {request.paid_by[:16]}…); one request signs at most once"
        return Refusal(ONE_PAYMENT, reason)
    if context.payer is None:
        return Refusal(
            "no_signer",
            "this guard has no signer; give it one with Guard(signer=…) or X402GUARD_PRIVATE_KEY",
            advice="Give the guard a key.",
        )
    if request.body_sha256 is None:
        reason = "the request body streamed on past the buffer limit, so the paid request could not repeat it"
        return Refusal("not_replayable", reason, advice="Send the body in memory, or raise max_body_bytes.")
    return None


def _authorize(
    request: RequestFacts,
    context: Context,
    offers: tuple[Offer, ...],
    no: Callable[[Refusal], Flow[PaymentRefused]],
) -> Flow[Authorized]:
    """Step 6: durable before anything is signed. A person who has to be asked is asked here, with nothing held."""
    quick = len(request.body or b"") <= QUICK_BYTES
    step = yield Compute(lambda _now_ms: payment_step(context, request), quick=quick)
    scope = purchase_scope(context, request, offers, step)

    def change(view: LedgerView, consented: Consented) -> Authorized | Stuck | Unasked | Refusal:
        return authorize_purchase(view, consented, context=context, request=request, offers=offers, step=step)

    def undo(error: BaseException) -> Flow[None]:
        # The commit may have happened although its answer was lost. Nothing was signed, so nothing is owed.
        reason = f"the commit's answer was lost: {error_name(error)}"
        yield from _give_back(context, request.entropy.hex(), reason, error)

    seat = Seat(HoldKind.PAYMENT, request.host)
    while True:
        holding: Flow[Authorized | Stuck] = hold_or_refuse(context, scope, change, undo, refuse=no, seat=seat)
        decided = yield from holding
        if isinstance(decided, Authorized):
            return decided
        yield from _resolve(decided.hold)


def _resolve(hold: Hold) -> Flow[None]:
    """A purchase in doubt that cannot be presented again: only the chain can say whether it may be bought anew."""
    after = (yield from ask_chain(hold)) if hold.chain_evidence else hold
    if proven_taken(after):
        raise uncertain_of(
            PaidNotDelivered,
            hold,
            f"the chain shows that {hold.payment().payee} took this payment, and no answer ever came",
        )
    if after.state is HoldState.HELD:
        uncertain = uncertain_of(
            SettlementUncertain,
            hold,
            f"a payment for this very request is in doubt ({after.doubt or 'no answer came'}) and can't be presented again",
            advice="Wait until the chain is past its deadline, or ask with extensions={'pay_again': True} to pay a second time.",
        )
        uncertain.retry = "later"
        raise uncertain


def _sign(context: Context, authorized: Authorized) -> Flow[HeaderLine]:
    """Step 7: the header, made from the committed hold alone. Before the signature a cancellation costs nothing."""
    hold = authorized.hold
    signing = False
    try:
        yield Checkpoint()
        signing = True
        return _sealed_header(hold, (yield Sign(hold)))
    except GeneratorExit:
        raise
    except SignerError as error:
        # A definite no. But a cheque that was out before, or that somebody took over meanwhile, is out all the same.
        if not authorized.represented and (
            yield from _give_back(context, hold, f"the signer refused: {error}", error, hold.presented)
        ):
            raise
        raise (
            yield from _uncertain(context, hold, "the signer refused a payment that may be out", error, sent=False)
        ) from error
    except Exception as error:
        # A remote signer that timed out may have signed.
        raise (
            yield from _uncertain(context, hold, f"signing failed: {type(error).__name__}", error, sent=False)
        ) from error
    except BaseException as error:
        if signing or authorized.represented:
            yield from _uncertain(context, hold, "cancelled while signing", error, sent=False)
        else:
            yield from _give_back(context, hold, f"nothing was signed: {error_name(error)}", error, hold.presented)
        raise


def _sealed_header(hold: Hold, signature: Sealed[bytes]) -> HeaderLine:
    with forgetting():
        name, value = map(Sealed, payment_header(hold.payment(), signature.reveal()))
    return name.reveal(), value


def _present(context: Context, authorized: Authorized, header: HeaderLine) -> Flow[Hold]:
    """Steps 8 and 9: the cheque leaves. From here on only proof frees the hold, and no error says that nothing was paid."""
    hold = authorized.hold
    try:
        reply: Reply = yield Send((header,), pays=hold.id, call_s=context.policy.timeouts.payment_s)
        return (yield from _book(context, authorized, reply))
    except (GeneratorExit, SettlementUncertain):
        raise
    except SendFailed as failure:
        unsent = failure.before_connection and not authorized.represented
        reason = f"no connection, it never left: {type(failure.cause).__name__}"
        if unsent and (yield from _give_back(context, hold, reason, failure, hold.presented)):
            raise
        reason = f"no answer: {type(failure.cause).__name__}"
        sent = not failure.before_connection
        uncertain = yield from _uncertain(context, hold, reason, failure, sent=sent)
        if isinstance(failure.cause, CallTimeout):
            raise _timed_out(failure.cause, uncertain) from None
        raise uncertain from failure.cause
    except Exception as error:
        raise (yield from _uncertain(context, hold, f"no answer: {type(error).__name__}", error)) from error
    except BaseException as error:
        yield from _uncertain(context, hold, "cancelled while the payment was out", error, sent=False)
        raise


def _book(context: Context, authorized: Authorized, reply: Reply) -> Flow[Hold]:
    """Step 9: a claim is written down, and checked later; anything else is a doubt.

    Books that cannot be written now do not take the answer from the caller: the hold stands in full, and is in doubt by age.
    """
    hold = authorized.hold
    claim = judge_reply(reply, hold)
    try:
        if not isinstance(claim, Doubt):
            hold = yield from write_claim(
                context, hold, claim, delivered=reply.status < 500 and reply.status != PAYMENT_REQUIRED_STATUS
            )
            return (yield from _check_soon(hold))
        if authorized.represented and hold.chain_evidence:
            # Facilitators answer a nonce that is used already like a new offer; the chain knows better.
            yield from _resolve_represented(hold)
        hold = yield from note_doubt(context, hold, claim.reason, claim.transaction, sent=reply.status >= 400)
        return (yield from _check_soon(hold)) if claim.transaction else hold
    except LedgerUnavailable as error:
        return (
            hold
            if hold.state is HoldState.CAPTURED
            else replace(hold, doubt=f"the books could not be written: {error}")
        )


def _check_soon(hold: Hold) -> Flow[Hold]:
    """Ask the chain at once about a payment that counts in full until its transaction is named; others wait for the recheck."""
    return (yield from ask_chain(hold)) if proven_taken(hold) and hold.proof is None else hold


def _resolve_represented(hold: Hold) -> Flow[None]:
    after = yield from ask_chain(hold)
    if proven_taken(after):
        words = "the payment was presented again, and the chain shows that it had been taken already"
        raise uncertain_of(PaidNotDelivered, hold, words)


def _give_back(context: Context, held: Hold | str, reason: str, error: BaseException, presented: int = 0) -> Flow[bool]:
    """Void on the way out of an error; True where it is certain that nothing of the hold can be taken any more.

    A ledger that cannot be written now keeps the hold: that costs budget until the deadline and never money.
    """
    try:
        return (yield from void(context, held, reason[:300], presented=presented))
    except Exception as again:  # noqa: BLE001 - no bookkeeping failure may hide that money is at risk
        cause(error).add_note(
            f"hold {held if isinstance(held, str) else held.id} could not be given back either: {again}"
        )
        return False


def _uncertain(
    context: Context, hold: Hold, reason: str, error: BaseException, *, sent: bool = True
) -> Flow[SettlementUncertain]:
    """Note a doubt on the way out of an error, and return the error that says what the caller has to know.

    Unwritten, the doubt is derived from the hold's age all the same.
    """
    try:
        yield from note_doubt(context, hold, reason, sent=sent)
    except Exception as again:  # noqa: BLE001 - no bookkeeping failure may hide that money is at risk
        cause(error).add_note(f"the doubt about hold {hold.id} could not be written: {again}")
    return uncertain_of(
        SettlementUncertain, hold, f"{reason}; the payment of hold {hold.id[:16]}… may be taken until its deadline"
    )


def _timed_out(timeout: CallTimeout, uncertain: SettlementUncertain) -> CallTimeout:
    """Our own time limit, with what the caller has to know: the payment is out, and asking again shows the same one."""
    timeout.hold_id, timeout.deadline = uncertain.hold_id, uncertain.deadline
    timeout.retry, timeout.advice = "same_request", uncertain.advice
    return timeout


def _none_payable(payable: Payable) -> Refusal:
    """No offer may be paid: one offer's own rule, or all the reasons together."""
    reasons = payable.refusals
    first = reasons[0]
    if len(reasons) == 1:
        return first
    listed = "; ".join(f"({i + 1}) {r.rule}: {r.reason}" for i, r in enumerate(reasons[:8]))
    more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
    return Refusal(
        "no_acceptable_offer", f"none of {len(reasons)} offers may be paid: {listed}{more}", error=NoAcceptableOffer
    )

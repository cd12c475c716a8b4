"""The flow of one paid request. The step numbers are those of ``docs/architecture.md``.

2. send the request · 3. read the offers · 4. screen them · 5. rules · 6. write the hold · 7. sign ·
8. send again with the payment, and read a short answer · 9. record the receipt as a claim · 10. return the response.

This file fixes the order: the hold is written before the signature, and the signature exists before the send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from x402guard.errors import (
    AlreadyPaid,
    CallTimeout,
    LedgerUnavailable,
    PaymentRefused,
    ProtocolError,
    SettlementUncertain,
    SignerError,
)
from x402guard.flow.admission import Seat, hold_or_refuse
from x402guard.flow.context import Context
from x402guard.flow.effects import (
    Checkpoint,
    Flow,
    HeaderLine,
    Interrupted,
    PeekBody,
    Reply,
    Send,
    SendFailed,
    Sign,
    cause,
    error_name,
)
from x402guard.flow.receipt import Receipt, receipt_of, timed_out
from x402guard.flow.refusals import refused
from x402guard.flow.request import RequestFacts, guarding_earlier_payment, host_refusal, note_once, route_of
from x402guard.flow.sealed import Sealed, forgetting
from x402guard.flow.surroundings import here
from x402guard.frozen import replace
from x402guard.kernel.proofs import Unsent
from x402guard.kernel.rows import Hold, HoldKind, HoldState
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.purchases import Presentation, presentation_of
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars
from x402guard.policy.judge import Consented, Unasked
from x402guard.policy.timeouts import LONGEST_S
from x402guard.x402.challenge import (
    NO_TERMS,
    Challenge,
    Payable,
    asks_to_sign_in,
    none_payable,
    noting_unread,
    read_challenge,
    screen,
)
from x402guard.x402.delivery import AnswerEnd, carry, note_cut
from x402guard.x402.offer_rules import rank
from x402guard.x402.origins import note_version, version_marks
from x402guard.x402.purchase import (
    ALREADY_PAID,
    Authorized,
    Bought,
    Decision,
    Flying,
    Stuck,
    authorize_purchase,
    is_out,
    purchase_key,
    purchase_scope,
    step_of_payment,
)
from x402guard.x402.schemes import payment_header
from x402guard.x402.settlement import (
    ACCEPTED_STATUS,
    PAYMENT_REQUIRED_STATUS,
    Doubt,
    ask_chain,
    delivers,
    judge_reply,
    not_delivered,
    note_doubt,
    proven_taken,
    resolve_open,
    succeeded,
    uncertain_of,
    void,
    was_taken,
    write_claim,
)
from x402guard.x402.wire import has_receipt, stated_length

SHORT_BYTES: Final = 65_536
"""The largest paid answer, in bytes, that is read before it is recorded: its claim and its end are one change."""

_TERMS_S: Final = 10
"""Seconds for the body of a 402: nothing is paid yet, so a slow one is not waited for."""

_PAYMENT_S: Final = "policy.timeouts.payment_s"
_READ: Final = "the client's own read timeout"
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0

ONE_PAYMENT: Final = "one_payment_per_request"


def paid_request(request: RequestFacts, context: Context, reply: Reply | None = None) -> Flow[Receipt | None]:
    """Return the whole flow of one request; the driver returns the last response.

    *reply* is the first answer, if the request was sent already. The flow returns the receipt of the payment, or None
    without one. It raises ``PaymentRefused`` and its subclasses, ``ProtocolError``, ``SettlementUncertain``,
    ``SignerError``, ``LedgerUnavailable``; and ``SendFailed`` if no payment was involved.
    """
    return guarding_earlier_payment(request, _steps(request, context, reply))


def _steps(request: RequestFacts, context: Context, reply: Reply | None) -> Flow[Receipt | None]:
    reply = reply or (yield Send())  # 2
    if reply.status != PAYMENT_REQUIRED_STATUS or request.pays_itself:
        if request.paid_by is None and has_receipt(reply.headers) and not request.pays_itself:
            yield from note_once(context, "foreign_receipt", request.origin, route_of(request))
        return None
    carried = (yield from carry(context, request)) if request.carries else None
    if carried is not None:
        return (yield from _signed_and_sent(request, context, Authorized(carried, represented=True), 0))
    challenge = yield from _challenge_of(request, context, reply)  # 3
    if challenge is None:
        return None
    if asks_to_sign_in(challenge.required):
        yield from note_once(context, "sign_in_asked", request.origin, route_of(request))
        return None
    refuse = partial(refused, context)
    if challenge.required.version == 2:  # even after a refusal, this route's v1 offers are not accepted any more
        learn, keys = partial(note_version, policy=context.policy, request=request), tuple(version_marks(request))
        refuse = partial(refused, context, also=learn, marks=keys)
    impossible = _cannot_pay(request, context)
    if impossible is not None:
        raise (yield from refuse(impossible))
    payable = yield from _payable_in(challenge, request, context)  # 4, 5
    if not payable.cases and not (yield from is_out(context, request)):
        raise (yield from refuse(none_payable(payable)))
    authorized = yield from _authorize(request, context, payable, refuse)  # 6
    authorized = replace(authorized, polls=True) if request.polls else authorized
    offered_s = max((case.offer.max_timeout_s for case in payable.cases), default=0)
    return (yield from _signed_and_sent(request, context, authorized, offered_s))


def _challenge_of(request: RequestFacts, context: Context, reply: Reply) -> Flow[Challenge | None]:
    """Return the terms of a 402, or None. Whatever it says, and if it cannot be read, a payment that is out is presented."""
    timeouts, unread = context.policy.timeouts, None
    reading = read_challenge(reply, min(_TERMS_S, timeouts.payment_s or _TERMS_S))
    try:
        challenge = yield from noting_unread(reading, request, context)
    except ProtocolError as error:
        challenge, unread = None, error
    if challenge is None and (yield from is_out(context, request)):
        return NO_TERMS
    if unread is not None:
        raise unread
    return challenge


def _payable_in(challenge: Challenge, request: RequestFacts, context: Context) -> Flow[Payable]:
    if challenge is NO_TERMS:
        return Payable((), ())
    try:
        return (yield from noting_unread(screen(challenge, request, context), request, context))
    except ProtocolError:
        if (yield from is_out(context, request)):
            return Payable((), ())
        raise


def _signed_and_sent(request: RequestFacts, context: Context, authorized: Authorized, offered_s: int) -> Flow[Receipt]:
    try:
        header = yield from _sign(context, authorized)  # 7
        head = _wait_of(context, request, offered_s)
        hold = yield from _present(context, authorized, header, head)  # 8, 9
    except BaseException:
        presentation = presentation_of(authorized.hold)
        context.in_flight.pop(presentation, None)
        context.between_hops.pop(presentation, None)
        raise
    return replace(receipt_of(hold), presented=authorized.hold.presented)  # 10


def _cannot_pay(request: RequestFacts, context: Context) -> Refusal | None:
    """Return the refusal that applies to every offer, or None."""
    if request.paid_by is not None:
        reason = f"this request has paid already (hold {request.paid_by[:16]}…); one request signs at most once"
        return Refusal(ONE_PAYMENT, reason)
    if request.host_header:
        return host_refusal(request)
    if context.payer is None:
        return Refusal(
            "no_signer",
            "this guard has no signer; give it one with Guard(signer=…) or X402GUARD_PRIVATE_KEY",
            advice="Give the guard a key.",
        )
    if request.body_sha256 is None:
        reason = "the request body streams past max_body_bytes, so the paid request could not repeat it"
        return Refusal("not_replayable", reason, advice="Send the body in memory, or raise max_body_bytes.")
    return None


def _authorize(
    request: RequestFacts,
    context: Context,
    payable: Payable,
    refuse: Callable[[Refusal], Flow[PaymentRefused]],
) -> Flow[Authorized]:
    """Step 6: write the hold, durable before anything is signed. Approvers are asked before it, with nothing held."""
    cases, step = rank(payable.cases), (yield from step_of_payment(context, request))
    otherwise = None if cases else none_payable(payable)
    purchase = purchase_key(context, request, step)
    scope = purchase_scope(context, request, cases, step, purchase)
    if purchase in context.in_flight.copy().values():
        here().collect_dropped()  # an answer that an interrupt has thrown away is under way until it is collected
        _end_waiting(context, purchase)
    begun: list[Presentation] = []
    decide = partial(authorize_purchase, context=context, request=request, cases=cases, step=step)

    def change(view: LedgerView, consented: Consented) -> Decision | Unasked | Refusal | None:
        if context.cut_off:  # one of them may be this purchase, which the ledger may have as handed over
            return None
        decided = decide(view, consented, purchase=purchase, otherwise=otherwise)
        if isinstance(decided, Authorized):  # before the commit: no other call may take it for one that is over
            begun.append(presentation_of(decided.hold))
            context.in_flight.update(dict.fromkeys(begun, purchase))
        return decided

    def undo(error: BaseException) -> Flow[None]:
        # The commit may have succeeded although its answer was lost. Nothing was signed, so nothing can be taken.
        reason = f"the commit's answer was lost: {error_name(error)}"
        yield from _give_back(context, request.entropy.hex(), reason, error)

    seat, pauses = Seat(HoldKind.PAYMENT, request.host, request.begun), _pauses(context.flight_ms)
    while True:
        holding: Flow[Decision] = hold_or_refuse(
            context, scope, change, undo, refuse=refuse, seat=seat, first=partial(_note_cut_off, context)
        )
        try:
            decided = yield from holding
        except BaseException:
            for each in begun:
                context.in_flight.pop(each, None)
            raise
        match decided:
            case Authorized():
                return decided
            case Stuck(hold):
                yield from resolve_open(context, hold)
            case Bought(hold):
                raise (yield from _already_paid(hold, refuse))
            case Flying(refusal):
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise (yield from refuse(refusal))
                seat.leave()
                if (yield Checkpoint(pause_s, others=True)) is False:
                    raise (yield from refuse(refusal))
                _end_waiting(context, purchase)


def _note_cut_off(context: Context) -> Flow[None]:
    if context.cut_off:  # another call may have written it meanwhile
        yield from note_cut(context, *sorted(context.cut_off))


def _end_waiting(context: Context, purchase: str) -> None:
    """End what waits for a next hop of this task, which asks again, or of one that has ended: that does not come any more."""
    for presentation, is_over in context.between_hops.copy().items():
        if context.in_flight.get(presentation) == purchase and is_over():
            context.between_hops.pop(presentation, None)
            context.in_flight.pop(presentation, None)


def _pauses(flight_ms: int) -> Iterator[float]:
    """Yield pauses in seconds, each half as long again as the one before, of *flight_ms* (milliseconds) in all."""
    pause_s, left_s = _FIRST_PAUSE_S, flight_ms / 1000
    while left_s > 0:
        yield pause_s
        left_s -= pause_s
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _already_paid(hold: Hold, refuse: Callable[[Refusal], Flow[PaymentRefused]]) -> Flow[PaymentRefused]:
    # Without the name: it may be an Idempotency-Key, of which the ledger keeps a hash alone.
    paid = f"${format_dollars(hold.captured or hold.amount)} to {hold.payment().payee} (hold {hold.id[:16]}…)"
    reason = f"a purchase of this name was paid with {paid}, and its answer was handed over (a job: session.poll)"
    error = yield from refuse(Refusal(ALREADY_PAID, reason, error=AlreadyPaid))
    if isinstance(error, AlreadyPaid):
        error.receipt = receipt_of(hold)
    return error


def _sign(context: Context, authorized: Authorized) -> Flow[HeaderLine]:
    """Step 7: build the header from the committed hold only. A cancelled task before the signature costs nothing."""
    hold = authorized.hold
    signing = False
    try:
        yield Checkpoint()
        signing = True
        return _sealed_header(hold, (yield Sign(hold, context.node_id)))
    except GeneratorExit:
        raise
    except SignerError as error:
        # Nothing was signed now, but a hold that was presented before or taken over may have a signature in use.
        if not authorized.represented and (
            yield from _give_back(context, hold, f"the signer refused: {error}", error, hold.presented)
        ):
            raise
        raise (
            yield from _uncertain(context, hold, "the signer refused a payment that may be in use", error, sent=False)
        ) from error
    except Exception as error:
        # A remote signer may have signed before it timed out.
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


def _wait_of(context: Context, request: RequestFacts, offered_s: int) -> tuple[float, str] | None:
    """Return how long the answer to a payment may take to begin, in seconds, and what sets that; None if it may end then.

    Once the money is out, a shorter wait saves nothing: so it is the longer one of the offer's and the client's own. What
    has begun to come has until ``payment_s``, or to that time if there is none.
    """
    most_s, read_s = context.policy.timeouts.payment_s, request.read_s
    if read_s is None:
        return None
    wait_s, by = (offered_s, "the offer's maxTimeoutSeconds") if offered_s >= read_s else (read_s, _READ)
    if most_s is not None and most_s <= wait_s:
        return None
    return min(wait_s, LONGEST_S), by  # a seller's number, and no lock of the system waits for any longer


def _present(
    context: Context, authorized: Authorized, header: HeaderLine, head: tuple[float, str] | None
) -> Flow[Hold]:
    """Steps 8 and 9: send the payment. From here on only a proof frees the hold, and no error denies a payment."""
    hold, cut = authorized.hold, None
    try:
        most_s: float | None = context.policy.timeouts.payment_s
        by = _PAYMENT_S
        if most_s is None and head is not None:  # an answer without any end would keep its slot for ever
            (most_s, by), head = head, None
        reply: Reply = yield Send((header,), pays=hold.id, call_s=most_s, limited_by=by, head=head)
        try:
            end = yield from _read_if_short(authorized, reply)
        except Interrupted as interrupted:
            end, cut = "cut", interrupted
        hold = yield from _record_reply(context, authorized, reply, end)
    except (GeneratorExit, SettlementUncertain):
        raise
    except SendFailed as failure:
        unsent = None if authorized.represented else failure.unsent(hold.id)
        reason = f"no connection, nothing was sent: {type(failure.cause).__name__}"
        if unsent and (yield from _give_back(context, hold, reason, failure, hold.presented, unsent=unsent)):
            raise
        reason = f"no answer: {type(failure.cause).__name__}"
        sent = not failure.before_connection
        uncertain = yield from _uncertain(context, hold, reason, failure, sent=sent)
        if isinstance(failure.cause, CallTimeout):
            raise _timed_out(failure.cause, hold, uncertain) from None
        raise uncertain from failure.cause
    except Exception as error:
        raise (yield from _uncertain(context, hold, f"no answer: {type(error).__name__}", error)) from error
    except BaseException as error:
        yield from _uncertain(context, hold, "cancelled while the payment was in flight", error, sent=False)
        raise
    if cut is not None:
        raise cut
    return hold


def _read_if_short(authorized: Authorized, reply: Reply) -> Flow[AnswerEnd | None]:
    """Read a short answer that delivers, and return how it ended; None if it is still to be read.

    One that breaks breaks for the caller at the same byte. The answer to a payment that was presented before is recorded
    first: the chain may be asked about it, which takes longer than an answer may be kept back.
    """
    if authorized.represented or not delivers(reply) or reply.status in _REDIRECTS:
        return None  # what a redirect leads to may be what was paid for
    length = stated_length(reply.headers)
    if length is None or length > SHORT_BYTES:
        return None
    try:
        body = yield PeekBody(SHORT_BYTES)
    except SendFailed:
        return "late"
    except Exception:  # noqa: BLE001 - what cannot be read ahead has come all the same: its reader decides
        return None
    return None if body is None else "whole"


def _record_reply(context: Context, authorized: Authorized, reply: Reply, end: AnswerEnd | None) -> Flow[Hold]:
    """Step 9: record the server's claim, to be checked later; without a claim the hold is in doubt.

    *end* is how the answer ended, if it has. One change records both, so that a short answer costs no second one.
    If the ledger cannot be written, the caller still gets the answer: the hold counts in full, and is in doubt by its
    age.
    """
    hold = authorized.hold
    claim = judge_reply(reply, hold)
    try:
        if not isinstance(claim, Doubt):
            hold = yield from write_claim(context, hold, claim, status=reply.status, is_less=reply.is_less, end=end)
            hold = yield from _check_soon(context, hold)
        else:
            has_come = delivers(reply)
            # Facilitators answer a used nonce with a new offer, and a job has begun: the seller has not failed.
            is_used = authorized.represented and reply.status == PAYMENT_REQUIRED_STATUS
            failed = not has_come and not is_used and reply.status != ACCEPTED_STATUS
            hold = yield from note_doubt(context, hold, claim, sent=failed, answered=has_come, end=end)
            if not has_come and authorized.represented and hold.chain_evidence and hold.proof is None:
                hold = yield from ask_chain(context, hold)
            elif claim.transaction:
                hold = yield from _check_soon(context, hold)
        if authorized.represented and not authorized.polls and not succeeded(reply.status) and was_taken(hold):
            raise not_delivered(hold)
        return hold
    except LedgerUnavailable as error:
        return (
            hold
            if hold.state is HoldState.CAPTURED
            else replace(hold, doubt=f"the ledger could not be written: {error}")
        )


def _check_soon(context: Context, hold: Hold) -> Flow[Hold]:
    """Ask the chain at once about a taken payment without a proof; others wait for the background recheck."""
    return (yield from ask_chain(context, hold)) if proven_taken(hold) and hold.proof is None else hold


def _give_back(
    context: Context,
    held: Hold | str,
    reason: str,
    error: BaseException,
    presented: int = 0,
    *,
    unsent: Unsent | None = None,
) -> Flow[bool]:
    """Void a hold while another error propagates. Returns True if it is certain that nothing of the hold can be taken.

    If the ledger cannot be written, the hold stays: this costs budget until the deadline, but no money.
    """
    try:
        return (yield from void(context, held, reason[:300], presented=presented, unsent=unsent))
    except Exception as again:  # noqa: BLE001 - no bookkeeping failure may hide that money is at risk
        cause(error).add_note(f"hold {held if isinstance(held, str) else held.id} could not be voided either: {again}")
        return False


def _uncertain(
    context: Context, hold: Hold, reason: str, error: BaseException, *, sent: bool = True
) -> Flow[SettlementUncertain]:
    """Record a doubt while another error propagates, and return the error for the caller.

    If the ledger cannot be written, the hold is still in doubt by its age.
    """
    presentation = presentation_of(hold)
    context.cut_off.add(presentation)  # the change that has failed, or will run later, may hand the answer over
    try:
        hold = yield from note_doubt(context, hold, Doubt(reason), sent=sent)
        context.cut_off.discard(presentation)
    except Exception as again:  # noqa: BLE001 - no bookkeeping failure may hide that money is at risk
        cause(error).add_note(f"the doubt about hold {hold.id} could not be written: {again}")
    if was_taken(hold):
        return not_delivered(hold)
    return uncertain_of(
        SettlementUncertain, hold, f"{reason}; the payment of hold {hold.id[:16]}… may be taken until its deadline"
    )


def _timed_out(cut: CallTimeout, hold: Hold, uncertain: SettlementUncertain) -> CallTimeout:
    """Return the time-out with the facts of the payment: it may be taken, and the same request presents it again."""
    told = timed_out(cut, receipt_of(hold))
    told.retry, told.advice = "same_request", uncertain.advice
    return told

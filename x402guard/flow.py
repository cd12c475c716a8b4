"""The conversation for one request, step by step. The numbers are those of ``docs/architecture.md``.

2. send it · 3. read the offer · 4. screen and freeze one · 5. rules · 6. write the hold · 7. sign · 8. send again, paid ·
9. believe the receipt as far as it goes · 10. hand the response over.

What is written before what is signed, what is signed before what is sent: this file is the order.
"""

from __future__ import annotations

from functools import partial

from x402guard.assets import AssetRegistry
from x402guard.challenge import Payable, read_challenge, screen
from x402guard.effects import Flow, Interrupted, Reply, SendFailed, checkpoint, send, sign, transact
from x402guard.errors import (
    BudgetExhausted,
    LedgerUnavailable,
    NoAcceptableOffer,
    PaidNotDelivered,
    PaymentRefused,
    PolicyDenied,
    SessionClosed,
    SessionTripped,
    SettlementUncertain,
    SignerError,
)
from x402guard.ledger.authorize import BUDGET, Refusal, note_refusal, refusal_marks
from x402guard.ledger.model import Hold, HoldState
from x402guard.ledger.view import LedgerView, Scope
from x402guard.offer import Offer
from x402guard.policy import RequestFacts, choose
from x402guard.purchase import Authorized, Stuck, Terms, authorize_purchase, purchase_scope
from x402guard.schemes import payment_header
from x402guard.settlement import (
    Receipt,
    ask_chain,
    judge_reply,
    note_doubt,
    proven_taken,
    receipt_of,
    sweep,
    void,
    write_claim,
)

__all__ = ["paid_request", "refusal_error"]

PAYMENT_REQUIRED_STATUS = 402


def paid_request(request: RequestFacts, terms: Terms, registry: AssetRegistry) -> Flow[Receipt | None]:
    """Hold one request's whole conversation; the driver hands over the last response that was sent.

    Returns the receipt of what was paid, or None where nothing was. Raises ``PaymentRefused`` and its kin, ``ProtocolError``,
    ``SettlementUncertain``, ``SignerError``, ``LedgerUnavailable``; and ``SendFailed`` where no payment was involved.
    """
    reply = yield from send()  # 2
    if reply.status != PAYMENT_REQUIRED_STATUS or request.pays_itself:
        return None
    challenge = yield from read_challenge(reply)  # 3
    if challenge is None:
        return None
    impossible = _cannot_pay(request, terms)
    if impossible is not None:
        raise (yield from _refused(terms, impossible))
    payable = yield from screen(challenge, request, terms, registry)  # 4, 5
    chosen = choose(payable.offers)
    if chosen is None:
        raise (yield from _all_refused(terms, payable))
    authorized = yield from _authorize(request, terms, payable.offers, chosen)  # 6
    headers = yield from _sign(terms, authorized)  # 7
    paid = yield from _send_paid(terms, authorized, headers)  # 8
    hold = yield from _book(terms, authorized, paid)  # 9
    return receipt_of(hold, represented=authorized.represented)  # 10


def _cannot_pay(request: RequestFacts, terms: Terms) -> Refusal | None:
    """What keeps us from paying whatever is offered."""
    if request.paid_by is not None:
        reason = f"this request has paid already (hold {request.paid_by[:16]}…); one request signs at most once"
        return Refusal("one_payment_per_request", reason)
    if terms.payer is None:
        return Refusal(
            "no_signer", "this guard has no signer; give it one with Guard(signer=…) or X402GUARD_PRIVATE_KEY"
        )
    if request.body_sha256 is None:
        reason = "the request body streamed on past the buffer limit, so the paid request could not repeat it"
        return Refusal("not_replayable", reason)
    return None


def _authorize(request: RequestFacts, terms: Terms, offers: tuple[Offer, ...], chosen: Offer) -> Flow[Authorized]:
    """Step 6: durable before anything is signed. Raises where the answer is no."""
    scope = purchase_scope(terms, request)
    change = partial(authorize_purchase, terms=terms, request=request, offers=offers, chosen=chosen)
    swept = False
    while True:
        try:
            decided = yield from transact(scope, change)
        except (LedgerUnavailable, Interrupted) as error:
            # The commit may have happened although its answer was lost. Nothing was signed, so nothing is owed.
            yield from _void_after(terms, request.entropy.hex(), error)
            raise
        match decided:
            case Authorized():
                return decided
            case Stuck(hold):
                yield from _resolve(hold)
            case Refusal(rule=rule):
                if rule == BUDGET and not swept and (yield from sweep(terms)) > 0:
                    swept = True
                    continue
                raise (yield from _refused(terms, decided))


def _resolve(hold: Hold) -> Flow[None]:
    """A purchase in doubt that cannot be presented again: only the chain can say whether it may be bought anew."""
    after = (yield from ask_chain(hold)) if hold.chain_evidence else hold
    if proven_taken(after):
        raise PaidNotDelivered(
            f"the chain shows that {hold.payment().payee} took this payment, and no answer ever came",
            hold_id=hold.id,
            deadline=hold.deadline_unix,
        )
    if after.state is HoldState.HELD:
        raise SettlementUncertain(
            f"a payment for this very request is in doubt ({after.doubt or 'no answer came'}) and can't be presented again",
            hold_id=hold.id,
            deadline=hold.deadline_unix,
            advice="Wait until the deadline has passed, or ask with extensions={'pay_again': True} to pay a second time.",
        )


def _sign(terms: Terms, authorized: Authorized) -> Flow[tuple[str, str]]:
    """Step 7: typed data from the committed hold alone. Before the signature a cancellation costs nothing."""
    hold = authorized.hold
    signing = False
    try:
        yield from checkpoint()
        signing = True
        signature = yield from sign(hold)
    except SignerError as error:
        yield from _void_after(terms, hold.id, error, never_left=not authorized.represented)
        raise
    except Interrupted as error:
        yield from _void_after(terms, hold.id, error, never_left=not (signing or authorized.represented))
        raise
    except Exception as error:
        # A remote signer that timed out may have signed.
        yield from _doubt_after(terms, hold, f"signing failed: {type(error).__name__}", error)
        raise SettlementUncertain(
            f"the signer failed without saying no ({type(error).__name__}); a signature may exist",
            hold_id=hold.id,
            deadline=hold.deadline_unix,
        ) from error
    return payment_header(hold.payment(), signature)


def _send_paid(terms: Terms, authorized: Authorized, header: tuple[str, str]) -> Flow[Reply]:
    """Step 8: the cheque leaves. From here on only proof frees the hold."""
    hold = authorized.hold
    try:
        return (yield from send(header))
    except SendFailed as failure:
        if failure.before_connection and not authorized.represented:
            yield from void(terms, hold.id, "no connection: the payment never left")
            raise
        yield from _doubt_after(terms, hold, f"no answer: {type(failure.cause).__name__}", failure)
        raise SettlementUncertain(
            f"the paid request got no answer ({type(failure.cause).__name__}); the server may hold the payment",
            hold_id=hold.id,
            deadline=hold.deadline_unix,
        ) from failure.cause
    except Interrupted as error:
        yield from _doubt_after(terms, hold, "cancelled while the payment was out", error)
        raise


def _book(terms: Terms, authorized: Authorized, reply: Reply) -> Flow[Hold]:
    """Step 9: a claim is written down, then checked once; anything else is a doubt."""
    hold = authorized.hold
    claim = judge_reply(reply, hold)
    if not isinstance(claim, str):
        hold = yield from write_claim(terms, hold, claim)
        return (yield from ask_chain(hold)) if hold.chain_evidence else hold
    if authorized.represented and hold.chain_evidence:
        # Facilitators answer a nonce that is used already like a new offer; the chain knows better.
        yield from _resolve_represented(hold)
    return (yield from note_doubt(terms, hold.id, claim))


def _resolve_represented(hold: Hold) -> Flow[None]:
    after = yield from ask_chain(hold)
    if proven_taken(after):
        raise PaidNotDelivered(
            "the payment was presented again, and the chain shows that it had been taken already",
            hold_id=hold.id,
            deadline=hold.deadline_unix,
        )


def _void_after(terms: Terms, hold_id: str, error: BaseException, *, never_left: bool = True) -> Flow[None]:
    """Give a hold back on the way out of an error; where the cheque was out before, it is a doubt instead.

    A ledger that cannot be written now keeps the hold: that costs budget until the deadline and never money.
    """
    try:
        if never_left:
            yield from void(terms, hold_id, f"nothing was signed: {type(error).__name__}")
        else:
            yield from note_doubt(terms, hold_id, f"{type(error).__name__} while signing")
    except LedgerUnavailable as again:
        error.add_note(f"hold {hold_id} could not be updated either: {again}")


def _doubt_after(terms: Terms, hold: Hold, reason: str, error: BaseException) -> Flow[None]:
    """Note a doubt on the way out of an error. Unwritten, it is derived from the hold's age all the same."""
    try:
        yield from note_doubt(terms, hold.id, reason)
    except LedgerUnavailable as again:
        error.add_note(f"the doubt about hold {hold.id} could not be written: {again}")


def _all_refused(terms: Terms, payable: Payable) -> Flow[PaymentRefused]:
    """No offer may be paid: one offer's own rule, or all the reasons together."""
    reasons = payable.rejections
    first = reasons[0]
    if len(reasons) == 1:
        return (yield from _refused(terms, Refusal(first.rule, first.reason, first.requested, first.available)))
    listed = "; ".join(f"({i + 1}) {r.rule}: {r.reason}" for i, r in enumerate(reasons[:8]))
    more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
    refusal = Refusal("no_acceptable_offer", f"none of {len(reasons)} offers may be paid: {listed}{more}")
    return (yield from _refused(terms, refusal))


def _refused(terms: Terms, refusal: Refusal) -> Flow[PaymentRefused]:
    """Count the refusal in the books, and return it as the error to raise. Nothing is signed, nothing held."""
    node_id, rule = terms.node_id, refusal.rule
    counter = refusal_marks(node_id, rule)

    def count(view: LedgerView) -> None:
        note_refusal(view, node_id, refusal)

    yield from transact(Scope(nodes=(node_id,), marks=(counter,)), count)
    return refusal_error(terms, refusal)


_ERRORS: dict[str, type[PaymentRefused]] = {
    BUDGET: BudgetExhausted,
    "session_tripped": SessionTripped,
    "session_closed": SessionClosed,
    "no_acceptable_offer": NoAcceptableOffer,
}


def refusal_error(terms: Terms, refusal: Refusal) -> PaymentRefused:
    """Return a refusal as the typed error that its rule has."""
    kind = _ERRORS.get(refusal.rule, PolicyDenied)
    return kind(
        f"{refusal.rule}: {refusal.reason}",
        rule=refusal.rule,
        requested=refusal.requested,
        available=refusal.available,
        session=terms.session_id,
    )

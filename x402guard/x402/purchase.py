"""Says which purchase a request is, and decides on it inside one ledger transaction. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import astuple, replace

from x402guard.errors import NeedsReview
from x402guard.flow.admission import check_clock, check_standing
from x402guard.flow.context import Context
from x402guard.flow.effects import Compute, Flow, Transact
from x402guard.flow.request import RequestFacts, purpose_of, route_of, routes_of, split_path
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.commit import NAMED
from x402guard.kernel.intent import Terms
from x402guard.kernel.proofs import PayAgain
from x402guard.kernel.rows import Delivery, Hold, HoldKind, HoldState, Nanos
from x402guard.ledger.authorize import BUDGET, Refusal, authorize, check_room, enforced, record_excused
from x402guard.ledger.purchases import (
    bought_before,
    close_purchase,
    is_in_flight_elsewhere,
    is_lost,
    is_on_another_machine,
    open_purchases,
    presentation_of,
    take_over,
)
from x402guard.ledger.sessions import PAYER_MARK, check_payer
from x402guard.ledger.upto_sellers import ceiling_mark
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars
from x402guard.policy.approvals import (
    judge_unapproved,
    note_unapproved,
    shown_text,
    unapproved_latch,
    unapproved_mark,
)
from x402guard.policy.guards import guard_marks, judge_step, note_taken
from x402guard.policy.judge import Consented, Unasked, effective_verdict, spent_so_far, verdict_facts
from x402guard.policy.prices import PRICE_RATIO, asked_of
from x402guard.policy.settings import MIN_LIFETIME_S
from x402guard.policy.spikes import SPIKE
from x402guard.policy.steps import LOCAL, Said, Step, read_body, request_key, run_of, step_of
from x402guard.policy.verdicts import NEEDS_REVIEW, Verdict, strictest
from x402guard.x402.delivery import MIN_REMAINING_S, bought_mark, doubted_mark, has_time, note_cut
from x402guard.x402.offer_rules import Case, lifetime_s
from x402guard.x402.origins import (
    judge_live,
    note_payee,
    note_resource,
    note_secret,
    origin_marks,
    payee_marks,
    shape_mark,
    version_marks,
)
from x402guard.x402.schemes import scheme_for
from x402guard.x402.schemes.scheme import Proposal

QUICK_BYTES: Final = 16_384
"""The largest body, in bytes, whose deduplication key is computed on the event loop."""

_PAUSE_S: Final = 5
"""From a failure to the next presentation past a breaker's rest; and the room that a caller has who waits for that."""

IN_FLIGHT: Final = "in_flight"
"""The rule of a request whose purchase another call is paying for."""

REPEAT: Final = "repeat"
"""The rule of a request that the run has bought before."""

ALREADY_PAID: Final = "already_paid"
_TOKEN: Final = attrgetter("network", "token")
"""The rule of a named purchase that was paid and handed over."""


class Authorized(Struct, frozen=True):
    """A hold that may be signed. ``represented``: the same payment is presented again; ``polls``: for a job."""

    hold: Hold
    represented: bool
    polls: bool = False


class Stuck(Struct, frozen=True):
    """A hold keeps the same purchase open and cannot be presented again, so the chain has to be asked."""

    hold: Hold


class Flying(Struct, frozen=True):
    """Another request of the same name is paying, and its outcome decides. *refusal*: the answer after a long wait."""

    refusal: Refusal


class Bought(Struct, frozen=True):
    """The hold of a named purchase whose answer was handed over."""

    hold: Hold


Decision = Authorized | Stuck | Flying | Bought


def purchase_key(context: Context, request: RequestFacts, step: Step) -> str:
    """Return the deduplication key of a purchase: the session, and the caller's purchase name or what the request says.

    A name is valid for one origin, so that a payment for one server is never sent to another.
    """
    parts = [context.session_id, step.fingerprint]  # the same request in another spelling is the same purchase
    if request.purchase is not None:
        parts = [context.session_id, "named", request.origin, request.purchase]
    hashed = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return hashed if request.purchase is None else f"{NAMED}{hashed}"


def payment_step(context: Context, request: RequestFacts) -> Step:
    """Return the step of paying for a request."""
    loop, said = context.policy.loop, read_body(request.body or b"")
    key = ""
    if loop is not None:
        key = request_key(HoldKind.PAYMENT, request.method, request.url, said, loop.ignored, similar=loop.similar)
    return Step(
        HoldKind.PAYMENT,
        route_of(request),
        key,
        context.node_id,
        routes=routes_of(request),
        is_local=split_path(request.url).scheme == LOCAL,
        begun=request.begun,
        fingerprint=_fingerprint(request, said),
        # The query of a place that a redirect has named is a seller's word.
        asks=asked_of(said, "" if request.begun else request.url, len(request.body or b""), request.price_class),
    )


def purchase_scope(
    context: Context, request: RequestFacts, cases: tuple[Case, ...], step: Step, purchase: str
) -> Scope:
    """Return the scope of ``authorize_purchase``."""
    marks = [PAYER_MARK, *origin_marks(request), *version_marks(request)]
    marks += [shape_mark(request.host), doubted_mark(context, step.name)]
    payees: list[str] = []
    for case in cases:
        payee = case.offer.payee
        if payee not in payees:
            payees.append(payee)
            marks.extend(payee_marks(request, payee))
            if context.policy.approvals.more_than is not None:
                marks.append(unapproved_mark(run_of(context.node_id), payee))
        if case.offer.scheme == "upto":
            marks.append(ceiling_mark(payee))
    return Scope(
        nodes=(context.node_id,),
        holds=(request.entropy.hex(),),
        purchase=purchase,
        named=request.purchase is not None,
        marks=(*marks, *_repeats(context, request, step), *guard_marks(context.policy, step, tuple(payees))),
        out=tuple({_TOKEN(case.offer) for case in cases if case.funds is not None}),
        durable=True,
    )


def step_of_payment(context: Context, request: RequestFacts) -> Flow[Step]:
    """Return the step of paying for a request, computed off the event loop if its body is large."""
    if len(request.body or b"") <= QUICK_BYTES:
        return payment_step(context, request)
    computed: Step = yield Compute(lambda _now_ms: payment_step(context, request), quick=False)
    return computed


def is_out(context: Context, request: RequestFacts) -> Flow[bool]:
    """True if a payment for this request is out and lost: whatever its seller says by now, that one is presented."""
    if request.polls or request.pay_again or not request.is_http:
        return request.polls
    step = yield from step_of_payment(context, request)
    if context.cut_off:  # one may be this purchase, which the ledger has as handed over
        yield from note_cut(context, *sorted(context.cut_off))
    scope = Scope(purchase=purchase_key(context, request, step), named=request.purchase is not None)
    return bool((yield Transact(scope, lambda view: _lost_in(view, context))))


def authorize_purchase(
    view: LedgerView,
    consented: Consented,
    *,
    context: Context,
    request: RequestFacts,
    cases: tuple[Case, ...],
    step: Step,
    purchase: str,
    otherwise: Refusal | None,
) -> Decision | Unasked | Refusal:
    """Present a lost payment again, hold the best offer, return a question for approval, or refuse.

    *cases* are the offers that the rules allow, best first: the first one that the origin's marks allow is held. Without
    any, *otherwise* is the refusal. *step* is the step that the guards judge, *purchase* the deduplication key;
    *consented* are the approved offers.
    """
    closed = check_standing(view, context) or check_clock(view)
    if closed is not None:
        return closed
    check_payer(view, context.payer)  # its owner may have changed the key since this process has started
    unfinished = _unfinished(view, context, request, cases, step)
    if unfinished is not None:
        return unfinished
    if otherwise is not None or request.polls:
        return otherwise or _NOTHING_TO_POLL
    guarded = judge_step(view, context.policy, step)
    if guarded is not None:
        return guarded
    repeated = _repeated(view, context, request, step)
    if isinstance(repeated, Refusal):
        refused = enforced(view, repeated)
        if refused is not None:
            return refused
        repeated = ""
    refusals: list[Refusal] = []
    for case in cases:
        if repeated:
            case = replace(case, verdict=replace(case.verdict, action="ask", rule=REPEAT, reason=repeated))  # noqa: PLW2901
        decided = _buy(view, context, case, step, purchase, consented=consented)
        if not isinstance(decided, Refusal) or decided.rule in (SPIKE, BUDGET):
            return decided  # the other offers are not cheaper, so they do not fit either
        refusals.append(decided)
    return refusals[0]


def _lost_in(view: LedgerView, context: Context) -> list[Hold]:
    """Return the lost payments for the purchase of the scope."""
    instance, flight_ms = context.instance, context.flight_ms
    return [
        hold
        for hold in open_purchases(view, memory_ms=context.memory_ms)
        if is_lost(view, hold, instance=instance, in_flight=context.in_flight, flight_ms=flight_ms)
    ]


def _unfinished(
    view: LedgerView, context: Context, request: RequestFacts, cases: tuple[Case, ...], step: Step
) -> Decision | Refusal | None:
    """Return what an earlier payment asks for: the same one again, the chain, or to wait. None to sign a new one."""
    if request.pay_again:
        return None
    bought = None if request.purchase is None else bought_before(view, memory_ms=context.memory_ms)
    if bought is not None:
        if request.polls:
            return _present_again(view, context, bought, step) if has_time(view, bought) else _NOTHING_TO_POLL
        return Bought(bought)
    lost = _lost_in(view, context)
    late = enforced(view, context.policy.timeouts.judge(view, step)) if lost else None
    if late is not None:
        return late
    terms = [case.offer.terms for case in cases]
    for hold in sorted(lost, key=lambda each: each.payment().terms not in terms):
        if hold.payment().payer == context.payer and _is_presentable(view, hold, request, terms):  # of no key of before
            return _present_again(view, context, hold, step)
    if lost:
        return _NOTHING_TO_POLL if request.polls else Stuck(lost[0])
    for hold in open_purchases(view, memory_ms=context.memory_ms):
        waits = presentation_of(hold) in context.between_hops  # its next hop brings it, or it is lost in a moment
        if waits or request.purchase is not None or context.policy.repeat != "allow" or not request.is_http:
            refusal = _in_flight(view, hold, context.flight_ms)
            # One who waits for a container that was killed would wait in silence, for minutes.
            return refusal if is_on_another_machine(view, hold, context.machine) else Flying(refusal)
        if is_in_flight_elsewhere(hold, instance=context.instance):
            return _in_flight(view, hold, context.flight_ms)
    return None


def _fingerprint(request: RequestFacts, said: Said) -> str:
    """Return the fingerprint of a payment: SHA-256 over method, URL and what the body says, the same however they are spelt.

    A model that writes a request anew spells it otherwise: the order of parameters and members, blanks, escapes.
    """
    key = request_key(HoldKind.PAYMENT, request.method, request.url, said, ())
    # A place that is no request may name goods in its fragment.
    fragment = "" if request.is_http else urlsplit(request.url).fragment
    return hashlib.sha256(f"{key}#{fragment}".encode()).hexdigest() if fragment else key


def _repeats(context: Context, request: RequestFacts, step: Step) -> tuple[MarkKey, ...]:
    """Return the key of an earlier purchase of the same request by this run, if the policy asks for it."""
    if context.policy.repeat == "allow" or request.pay_again or request.purchase is not None:
        return ()
    return (bought_mark(context, step.fingerprint),)


def _repeated(view: LedgerView, context: Context, request: RequestFacts, step: Step) -> Refusal | str:
    """Return the refusal of a request that this run has bought before, or why an approver is asked; "" for a new one."""
    known = next(filter(None, map(view.mark, _repeats(context, request, step))), None)
    if known is None or known["hold"] is None:
        return ""
    reason = f"this run has bought the same request before and was given its answer (hold {known['hold'][:16]}…)"
    if context.policy.repeat == "ask":
        return f"{reason} (policy.repeat)"
    return Refusal(
        REPEAT,
        f"{reason}; setting policy.repeat",
        advice="Use the answer that you have. To buy it again, send the request with extensions={'pay_again': True}.",
    )


_NOTHING_TO_POLL: Final = Refusal(
    "nothing_to_poll",
    "no payment of that name is valid for this origin, or none any more, and a poll pays nothing",
    advice="Begin the job with that purchase name. A slow one may need a higher policy.max_lifetime_s.",
)


def _in_flight(view: LedgerView, hold: Hold, flight_ms: int) -> Refusal:
    wait_ms = hold.flying_since_ms + flight_ms - view.now_ms
    return Refusal(
        IN_FLIGHT,
        f"another call is paying for the same request (hold {hold.id[:16]}…), and its answer may still come",
        retry_after_s=max(1, -(-wait_ms // 1000)),
        is_out=True,
    )


def _present_again(view: LedgerView, context: Context, hold: Hold, asked: Step) -> Authorized | Refusal:
    step, policy = step_of(hold), context.policy
    if policy.breaker is not None:
        # The breakers of the host and of the payee judge it, as they judge a new payment.
        is_open = policy.breaker.judge(view, asked) or policy.breaker.judge(view, step)
        if is_open is not None and is_open.retry_after_s is not None:
            # A rest that ends after its last chance would lose what is paid for. It costs no more, and a seller has a pause.
            ends_unix = view.now_unix + is_open.retry_after_s
            if ends_unix >= hold.deadline_unix - MIN_REMAINING_S - _PAUSE_S:
                pause_s = _PAUSE_S - policy.breaker.quiet_s(view, (asked, step))
                is_open = replace(is_open, retry_after_s=pause_s) if pause_s > 0 else None
            is_open = enforced(view, is_open)
        if is_open is not None:
            reason = f"{is_open.reason}; the payment of hold {hold.id[:16]}… may be taken until its deadline"
            return replace(is_open, reason=reason, is_out=True)
        policy.breaker.taken(view, step, hold.id)
    record_excused(view, hold.node_id, hold.id)
    return Authorized(take_over(view, hold, instance=context.instance), represented=True)


def _buy(
    view: LedgerView, context: Context, case: Case, step: Step, purchase: str, *, consented: Consented
) -> Authorized | Unasked | Refusal:
    """Hold one offer if the origin's marks, the guards, the budget and (if the rules ask) an approver allow it."""
    offer, subject = case.offer, case.subject
    objection = enforced(view, case.excused or judge_live(view, context.policy, case))
    if objection is not None:
        return replace(objection, requested=Nanos(offer.amount_nanos))
    objection = _beyond_funds(view, case)
    if objection is not None:
        return objection
    priced = step.at(Nanos(offer.amount_nanos), offer.payee)
    excess = judge_step(view, context.policy, priced)
    if excess is not None and not (excess.rule == PRICE_RATIO and context.asks):
        return excess
    if excess is not None:
        case = replace(case, verdict=strictest(case.verdict, Verdict("ask", PRICE_RATIO, excess.reason)))
    run_id, approvals = run_of(context.node_id), context.policy.approvals
    judged = judge_unapproved(view, approvals, subject, run_id, case.verdict)
    verdict = effective_verdict(view, judged, subject)
    if verdict.action == "ask" and not context.asks:
        reason = f"{verdict.reason}, and this guard has no approver"
        latch = None if judged is case.verdict else unapproved_latch(view, approvals, run_id, subject.payee)
        return Refusal(NEEDS_REVIEW, reason, priced.amount, error=NeedsReview, latch=latch)
    if verdict.action == "ask":
        unasked = Unasked(
            subject,
            verdict,
            _asked_about(case),
            offer.network,
            query=shown_text(urlsplit(case.request.url).query),
            body=shown_text(case.request.body or b""),
            spent=spent_so_far(view, context.node_id),
        )
        if unasked.key not in consented:
            return check_room(view, context.node_id, priced.amount, context.undoing) or unasked
    hold = _hold(view, context, case, priced, purchase)
    again = PayAgain() if case.request.pay_again else None
    before = open_purchases(view, memory_ms=context.memory_ms) if again else []
    decided = authorize(view, hold, {**_facts(case, hold), **verdict_facts(verdict)}, context.undoing, again)
    if isinstance(decided, Refusal):
        return decided
    for each in before:  # only now: where nothing new is signed, the next request presents the earlier payment again
        if again is not None and each.state is HoldState.CAPTURED:
            close_purchase(view, each.id, again)  # its payment counts as before
    note_taken(view, context.policy, priced, decided.id)
    note_secret(view, decided, case)
    note_payee(view, context.policy, case)
    note_unapproved(view, approvals, subject, run_id, approved=verdict.action == "ask")
    note_resource(view, decided, case)
    _note_like(view, context, decided, priced)
    return Authorized(decided, represented=False)


def _beyond_funds(view: LedgerView, case: Case) -> Refusal | None:
    """Return the refusal of a payment for which the account has too little beside what is signed and not yet taken."""
    if case.funds is None:
        return None
    out, amount = view.out.get(_TOKEN(case.offer), 0), Nanos(case.offer.amount_nanos)
    if out + amount <= case.funds:
        return None
    symbol, network = case.offer.asset.symbol, case.offer.network
    reason = (
        f"the account can pay ${format_dollars(case.funds)} of {symbol} on {network}, and payments of "
        f"${format_dollars(Nanos(out))} are out already"
    )
    return Refusal("balance", reason, amount, Nanos(max(0, case.funds - out)), retry_after_s=_SETTLES_S)


_SETTLES_S: Final = 30
"""Seconds after which a payment that is out has mostly been taken."""


def _asked_about(case: Case) -> tuple[Any, ...]:
    """Return what an approval covers: exactly this offer for this request."""
    offer, request = case.offer, case.request
    return (
        *map(str, astuple(offer.terms)),
        request.method, request.url, request.body_sha256 or "", request.purchase or "",
    )  # fmt: skip


def _is_presentable(view: LedgerView, hold: Hold, request: RequestFacts, terms: Sequence[Terms]) -> bool:
    """True if a lost payment goes out again. One of an HTTP request does so whatever its seller asks for by now.

    It goes to the origin that has it, for the request that it was signed for, and costs no more than it does. An offer
    that did not come by HTTP is handed over by the caller's own code, and other terms may be another sale.
    """
    # Without the facilitator: the signed payment names its own, and official servers offer another one each time.
    return has_time(view, hold) and (request.is_http or hold.payment().terms in terms)


def _hold(view: LedgerView, context: Context, case: Case, step: Step, purchase: str) -> Hold:
    request, offer = case.request, case.offer
    if context.payer is None:
        raise ValueError("a payment needs a payer")
    hold_id = request.entropy.hex()
    proposal = Proposal(
        offer=offer,
        payer=context.payer,
        now_unix=view.clock_ms // 1000,
        lifetime_s=max(MIN_LIFETIME_S, lifetime_s(context.policy, case)),  # in shadow mode a shorter one was excused
        nonce=int(hold_id, 16),
        payment_id=f"pay_{hold_id[:32]}",
    )
    intent = scheme_for(offer.scheme, offer.method).propose(proposal)
    return Hold(
        id=hold_id,
        node_id=context.node_id,
        kind=HoldKind.PAYMENT,
        amount=Nanos(offer.amount_nanos),
        created_ms=view.now_ms,
        deadline_unix=intent.valid_until,
        flying_since_ms=view.now_ms,
        instance=context.instance,
        purpose=purpose_of(request, step.fingerprint, step=step.key),
        chain_evidence=offer.network in context.chains,
        purchase_key=purchase,
        intent=intent,
        delivery=Delivery.OPEN,
    )


def _facts(case: Case, hold: Hold) -> Mapping[str, Any]:
    """Return the journal facts of a purchase, for the report."""
    offer, purpose = case.offer, hold.purpose
    return {
        "kind": HoldKind.PAYMENT,
        "amount": offer.amount_nanos,
        "atomic": str(offer.amount_atomic),
        "token": offer.token,
        "symbol": offer.asset.symbol,
        "network": offer.network,
        "scheme": offer.scheme,
        "method": offer.method,
        "payee": offer.payee,
        "host": purpose.host,
        "request": f"{purpose.method} {purpose.url}",
        "fingerprint": purpose.fingerprint,
        "answer": hold.delivery,
        "deadline": hold.deadline_unix,
    }


def _note_like(view: LedgerView, context: Context, hold: Hold, step: Step) -> None:
    """Record that another payment of the run at the same route is in doubt: this may be the same purchase, planned anew."""
    doubted = view.mark(doubted_mark(context, step.name))
    if doubted is not None and view.now_unix <= doubted["until"]:
        facts = {"name": "like_purchase_in_doubt", "place": step.name, "in_doubt": doubted["hold"]}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)

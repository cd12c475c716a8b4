"""The decision to buy, taken inside one ledger transaction. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from x402guard.evm import Address
from x402guard.ledger.authorize import Refusal, authorize, check_open, lapse_due
from x402guard.ledger.ceilings import ceiling_mark
from x402guard.ledger.doubt import in_doubt, take_over
from x402guard.ledger.intent import Intent
from x402guard.ledger.model import Hold, HoldKind, Purpose
from x402guard.ledger.tokens import TokenLimit
from x402guard.ledger.view import LedgerView, Scope
from x402guard.metering.classify import Meter
from x402guard.money import Nanos
from x402guard.offer import Offer
from x402guard.policy import Case, Policy, RequestFacts, judge_live
from x402guard.policy.decide import origin_mark
from x402guard.policy.guards import SPIKE, guard_marks, judge_amount, judge_step, note_taken
from x402guard.policy.rules import lifetime_s, resource_host
from x402guard.policy.steps import Step, place, request_key
from x402guard.schemes import scheme_for
from x402guard.schemes.terms import Proposal

__all__ = [
    "Authorized",
    "Stuck",
    "Terms",
    "authorize_purchase",
    "payment_step",
    "place_of",
    "purchase_key",
    "purchase_scope",
    "purpose_of",
]

MAX_CLOCK_GAP_MS: Final = 60_000
"""How far the clock may be behind the ledger's last stamp, in milliseconds."""

MIN_REMAINING_S: Final = 10
"""A cheque in doubt is presented again only while it is good for more than this many seconds."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a flow works under; plain facts, the same for every request of a session.

    Attributes:
        session_id: whose report a refusal stands in.
        node_id: the budget that pays: the session, or a scope inside it.
        instance: this process instance.
        policy: the owner's rules.
        payer: the signer's account, or None where there is no signer and so nothing is ever signed.
        chains: networks whose chain can be read.
        flight_ms: how long a request may be out before its hold is in doubt, in milliseconds.
        unsafe_no_chain: pay on real networks whose chain cannot be read.
        unsafe_trust_receipts: capture what an ``upto`` receipt claims where no chain can tell.
        meter: what LLM calls are held and priced by; None meters nothing.
        tokens: where the tokens of LLM calls are counted; None counts none.
    """

    session_id: str
    node_id: str
    instance: str
    policy: Policy
    payer: Address | None
    chains: frozenset[str]
    flight_ms: int = 30_000
    unsafe_no_chain: bool = False
    unsafe_trust_receipts: bool = False
    meter: Meter | None = None
    tokens: TokenLimit | None = None


@dataclass(frozen=True, slots=True)
class Authorized:
    """A hold that may be signed; ``represented`` where it is one in doubt, presented again."""

    hold: Hold
    represented: bool


@dataclass(frozen=True, slots=True)
class Stuck:
    """A hold for this very purchase is in doubt and can't be presented again: only the chain knows."""

    hold: Hold


def purchase_key(terms: Terms, request: RequestFacts) -> str:
    """Return what makes two requests the same purchase: the session, and the caller's word or the request itself.

    A name is good for one origin: a cheque made out for one server is never shown to another.
    """
    if request.purchase is not None:
        parts = [terms.session_id, "named", request.origin, request.purchase]
    else:
        parts = [terms.session_id, request.method, request.url, request.body_sha256 or ""]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def payment_step(terms: Terms, request: RequestFacts) -> Step:
    """Return the step that paying for a request is."""
    loop = terms.policy.loop
    key = ""
    if loop is not None:
        key = request_key(HoldKind.PAYMENT, request.method, request.url, request.body or b"", loop.ignored)
    return Step(HoldKind.PAYMENT, place_of(request), key)


def place_of(request: RequestFacts) -> str:
    """Return a request's place as the owner names it in a policy: ``GET host/path``."""
    return place(request.method, request.host, urlsplit(request.url).path)


def purchase_scope(terms: Terms, request: RequestFacts, offers: tuple[Offer, ...], step: Step) -> Scope:
    """Return the rows that ``authorize_purchase`` has to see."""
    payees = tuple(dict.fromkeys(offer.payee for offer in offers))
    sellers = {ceiling_mark(offer.payee) for offer in offers if offer.scheme == "upto"}
    return Scope(
        nodes=(terms.node_id,),
        holds=(request.entropy.hex(),),
        purchase=None if request.pay_again else purchase_key(terms, request),
        marks=(origin_mark(request.origin), *sorted(sellers), *guard_marks(terms.policy, terms.node_id, step, payees)),
        durable=True,
    )


def authorize_purchase(
    view: LedgerView, terms: Terms, request: RequestFacts, offers: tuple[Offer, ...], step: Step
) -> Authorized | Stuck | Refusal:
    """Decide on live rows: present a cheque in doubt again, hold the best offer, or refuse. *step* is what the guards see.

    *offers* are all that the rules let pass, best first: any of them may match a hold in doubt, and the first that the
    ledger's memory of the origin has nothing against is taken.
    """
    lapse_due(view)
    closed = check_open(view, terms.node_id) or _clock_refusal(view)
    if closed is not None:
        return closed
    doubtful = [h for h in view.live(view.purchase) if in_doubt(view, h, flight_ms=terms.flight_ms)]
    for hold in doubtful:
        if _still_matches(view, hold, offers):
            return Authorized(take_over(view, hold, instance=terms.instance), represented=True)
    if doubtful:
        return Stuck(doubtful[0])
    guarded = judge_step(view, terms.policy, terms.node_id, step)
    if guarded is not None:
        return guarded
    refusals = []
    for offer in offers:
        case = Case(request, offer)
        objection = judge_live(view, terms.policy, case)
        if objection is not None:
            refusals.append(Refusal(objection.rule, objection.reason, offer.amount_nanos, objection.available))
            continue
        priced = step.at(Nanos(offer.amount_nanos), offer.payee)
        excess = judge_amount(view, terms.policy, terms.node_id, priced)
        if excess is not None:
            refusals.append(excess)
            if excess.rule == SPIKE:
                return excess
            continue
        hold = _hold(view, terms, case, priced)
        decided = authorize(view, hold, _facts(case, hold))
        if isinstance(decided, Refusal):
            return decided  # the best offer does not fit, so no dearer one does
        note_taken(view, terms.policy, terms.node_id, priced)
        _note_resource(view, decided, case)
        return Authorized(decided, represented=False)
    return refusals[0]


def _clock_refusal(view: LedgerView) -> Refusal | None:
    """A ledger that was written by a clock running ahead would date signatures by it, and make them good for too long."""
    if view.behind_ms <= MAX_CLOCK_GAP_MS:
        return None
    seconds = view.behind_ms // 1000
    return Refusal(
        "clock", f"this machine's clock is {seconds} s behind the ledger's last entry; set it right, or wait"
    )


def _still_matches(view: LedgerView, hold: Hold, offers: tuple[Offer, ...]) -> bool:
    if hold.deadline_unix - view.now_unix <= MIN_REMAINING_S:
        return False
    held = _cheque(hold.payment())
    return any(held == (o.version, o.scheme, o.method, o.network, o.asset.contract, o.amount_atomic, o.payee,
                       ) for o in offers)  # fmt: skip


def _cheque(intent: Intent) -> tuple[object, ...]:
    # Not the facilitator: the cheque names its own, and official servers show another one each time.
    return (
        intent.version,
        intent.scheme,
        intent.method,
        intent.network,
        intent.token,
        intent.amount_atomic,
        intent.payee,
    )


def _hold(view: LedgerView, terms: Terms, case: Case, step: Step) -> Hold:
    request, offer = case.request, case.offer
    if terms.payer is None:
        raise ValueError("a payment needs a payer")
    hold_id = request.entropy.hex()
    intent = scheme_for(offer.scheme, offer.method).propose(
        Proposal(
            offer=offer,
            payer=terms.payer,
            now_unix=view.clock_ms // 1000,
            lifetime_s=lifetime_s(terms.policy, case),
            nonce=int(hold_id, 16),
            payment_id=f"pay_{hold_id[:32]}",
        )
    )
    return Hold(
        id=hold_id,
        node_id=terms.node_id,
        kind=HoldKind.PAYMENT,
        amount=Nanos(offer.amount_nanos),
        created_ms=view.now_ms,
        deadline_unix=intent.valid_until,
        flying_since_ms=view.now_ms,
        owner=terms.instance,
        purpose=purpose_of(request, step=step.key),
        chain_evidence=offer.network in terms.chains,
        purchase_key=purchase_key(terms, request),
        intent=intent,
    )


def purpose_of(request: RequestFacts, tool: str = "", *, step: str = "") -> Purpose:
    """Return what a hold for *request* is for; *tool* is the model or tool it calls, *step* what makes it the same as others."""
    what = json.dumps([request.method, request.url, request.body_sha256 or ""])
    # No query, no fragment, and no user:password@ before the host.
    url = urlsplit(request.url)._replace(netloc=request.host, query="", fragment="").geturl()
    return Purpose(request.method, url, request.host, hashlib.sha256(what.encode()).hexdigest(), tool, step)


def _facts(case: Case, hold: Hold) -> Mapping[str, Any]:
    """What the journal keeps of a purchase, for the report."""
    offer, purpose = case.offer, hold.purpose
    return {
        "kind": HoldKind.PAYMENT,
        "amount": offer.amount_nanos,
        "atomic": str(offer.amount_atomic),
        "token": offer.asset.contract,
        "symbol": offer.asset.symbol,
        "network": offer.network,
        "scheme": offer.scheme,
        "method": offer.method,
        "payee": offer.payee,
        "host": purpose.host,
        "request": f"{purpose.method} {purpose.url}",
        "fingerprint": purpose.fingerprint,
        "deadline": hold.deadline_unix,
    }


def _note_resource(view: LedgerView, hold: Hold, case: Case) -> None:
    named = resource_host(case)
    if named is not None:
        facts = {"name": "resource_mismatch", "offered_for": named[:200], "asked": case.request.host}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)

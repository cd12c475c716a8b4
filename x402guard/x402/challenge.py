"""Steps 3 and 4: reads the offers of a 402 and selects those that may be paid."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from x402guard.assets import TEST_NETWORKS, Asset, AssetRegistry
from x402guard.errors import CallTimeout, NoAcceptableOffer, ProtocolError
from x402guard.flow.context import Context
from x402guard.flow.effects import AskChain, Flow, PeekBody, Reply, SendFailed, Transact
from x402guard.flow.ports import AccountFunds, HeadTime
from x402guard.flow.request import RequestFacts, route_of, routes_of
from x402guard.kernel.rows import Nanos
from x402guard.kernel.typed_data import EXACT_PROXY, PERMIT2, UPTO_PROXY
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars
from x402guard.policy.judge import verdict_of
from x402guard.policy.patterns import matches_route
from x402guard.policy.reach import judge_reach
from x402guard.policy.verdicts import NO_VERDICT, Verdict
from x402guard.x402.offer import UNUSABLE, Offer, Stated, conflicts_with, normalise, offers_in, stated_in
from x402guard.x402.offer_rules import Case, judge_offer
from x402guard.x402.tokens import doubt_of, facts_of
from x402guard.x402.wire import (
    MAX_BODY_BYTES,
    MOST_KEPT_CHARS,
    PAYMENT_REQUIRED,
    PaymentRequired,
    decode_base64_json,
    decode_json,
    decode_payment_required,
    entries_beside,
    has_receipt,
    only_header,
    parse_payment_required,
)

BODY_FIELD = "body"

SIGN_IN: Final = "sign-in-with-x"
"""The extension of a 402 that asks the wallet to sign a login."""

CONDITION: Final = "required_extension"
"""The rule of a 402 that a payment alone does not meet."""

_SIGNED: Final = "offer-receipt"
_MOST_SIGNED: Final = 256

_MET: Final = frozenset({SIGN_IN, "payment-identifier", "bazaar", _SIGNED})
"""Extensions that ask nothing of a payment but what the guard sends."""


class Challenge(Struct, frozen=True):
    """The terms of a 402: of its v2 header, else those of its body.

    ``beside``: what the entries in the body of a 402 with that header say. ``signed``: what its signed offers say. ``header``: that header, if its offers may be
    known.
    """

    required: PaymentRequired
    beside: Sequence[Stated] = ()
    signed: Sequence[Stated] = ()
    header: str | None = None

    def offers(self, registry: AssetRegistry) -> Sequence[Offer | Refusal]:
        """Return each entry of the terms that count as an ``Offer`` or a refusal. Raises as ``normalise`` does."""
        return normalise(self.required, registry) if self.header is None else offers_in(self.header, registry)


NO_TERMS: Final = Challenge(PaymentRequired(version=1, accepts=()))
"""Of a 402 that says nothing that can be read."""


class Payable(Struct, frozen=True):
    """The result of screening: the allowed offers, and the refusals of the others."""

    cases: tuple[Case, ...]
    refusals: tuple[Refusal, ...]


def read_challenge(reply: Reply, call_s: int | None = None) -> Flow[Challenge | None]:
    """Return the terms of a 402, or None if it is not an x402 offer.

    v2 terms are in the header, v1 terms in the body. A failed settlement is a 402 with a receipt and without terms.
    Raises ``ProtocolError`` for unreadable terms, ``CallTimeout`` for a body that takes longer than *call_s* seconds.
    """
    header = only_header(reply.headers, PAYMENT_REQUIRED)
    required, unread = None, None
    if header is not None:
        try:
            required = decode_payment_required(header)
        except ProtocolError as error:
            unread = error
    elif has_receipt(reply.headers):
        return None
    raw = yield from _body(call_s)
    if required is not None:
        known = header if header is not None and len(header) <= MOST_KEPT_CHARS else None
        return Challenge(required, tuple(map(stated_in, entries_beside(raw))), _signed_offers(required), known)
    terms = None if raw is None else _body_terms(raw)
    if terms is not None and terms.version == 1:
        return Challenge(terms)  # a header that is empty, or cannot be read, does not hide them
    if unread is not None:
        raise unread
    return None


def _peeked(call_s: int | None) -> Flow[bytes | None]:
    try:
        answer: bytes | None = yield PeekBody(MAX_BODY_BYTES, call_s)
        return answer
    except SendFailed as failure:
        if isinstance(failure.cause, CallTimeout):
            failure.cause.money_may_have_moved = False
            failure.cause.advice = "Nothing was paid: the offer is incomplete. Ask again, or ask another server."
            failure.cause.retry = "later"
        raise


def _body(call_s: int | None) -> Flow[bytes | None]:
    """Return a body that names terms of x402; None for another one, or one that is too large.

    A body that cannot be unpacked has none: a client may ask for an encoding that is not decoded here, and the answer to
    a ``HEAD`` has none at all. Its content type says nothing: sellers write ``text/plain``, and twice.
    """
    raw = yield from _peeked(call_s)
    return None if raw is None or b"x402Version" not in raw else raw


def _body_terms(raw: bytes) -> PaymentRequired | None:
    """Return the terms in a body; None for one that is no JSON object with terms. Raises ``ProtocolError``."""
    value = decode_json(raw.removeprefix(BOM_UTF8), field=BODY_FIELD, is_terms=True)
    if not isinstance(value, dict) or "x402Version" not in value or "accepts" not in value:
        return None
    return parse_payment_required(value, field=BODY_FIELD)


def asks_to_sign_in(required: PaymentRequired) -> bool:
    """True for a 402 that offers nothing for sale and asks the wallet to sign in, which the guard never signs."""
    return not required.accepts and SIGN_IN in (required.extensions or {})


def _condition_of(required: PaymentRequired) -> Refusal | None:
    """Return the refusal of terms that require an extension which the guard does not know; None without one.

    A seller that does so takes no payment of an ordinary client, and each try would hold budget until its deadline.
    """
    extensions = required.extensions if required.version == 2 else None
    for name, said in extensions.items() if isinstance(extensions, Mapping) else ():
        said = said if isinstance(said, Mapping) else {}  # noqa: PLW2901
        info = said.get("info")
        parts = [*said.items(), *(info.items() if isinstance(info, Mapping) else ())]
        if name not in _MET and any(
            value == "required" or (key == "required" and value is True) for key, value in parts
        ):
            reason = "the seller requires an extension of x402 that this guard does not know, and would take no payment"
            return Refusal(CONDITION, reason, advice="Buy from another seller.", words=f"extension {name[:40]}")
    return None


def _signed_offers(required: PaymentRequired) -> Sequence[Stated]:
    """Return what the signed offers of the extension ``offer-receipt`` ask for; what cannot be read says nothing.

    The signature is not checked: terms that it contradicts are the seller's own word against itself.
    """
    extensions = required.extensions if isinstance(required.extensions, Mapping) else {}
    info = extensions.get(_SIGNED)
    info = info.get("info") if isinstance(info, Mapping) else None
    offers = info.get("offers") if isinstance(info, Mapping) else None
    return [stated_in(_payload(each)) for each in offers[:_MOST_SIGNED]] if isinstance(offers, list | tuple) else ()


def _payload(signed: Any) -> Any:
    """Return what an offer signed by EIP-712, or as a compact JWS (RFC 7515, 7.1), says."""
    signed = signed if isinstance(signed, Mapping) else {}
    if "payload" in signed or not isinstance(signed.get("signature"), str):
        return signed.get("payload")
    try:
        return decode_base64_json(signed["signature"].split(".")[1], field=_SIGNED)
    except (ProtocolError, LookupError):
        return None


def screen(challenge: Challenge, request: RequestFacts, context: Context) -> Flow[Payable]:
    """Normalise every offer and keep those that the registry, the rules and (if a chain is read) the account allow."""
    condition = _condition_of(challenge.required)
    if condition is not None:
        return Payable((), (condition,))
    cases: list[Case] = []
    refusals: list[Refusal] = []
    for offer in challenge.offers(context.registry):
        case = offer if isinstance(offer, Refusal) else _judged(Case(request, offer), challenge, context)
        funds = case if isinstance(case, Refusal) else (yield from _unpayable(case.offer, context))
        if isinstance(funds, Refusal):
            refusals.append(funds)
        elif isinstance(case, Case):
            cases.append(replace(case, funds=funds))
    unread = next((refusal.reason for refusal in refusals if refusal.rule == UNUSABLE), None)
    if unread is not None:
        yield from _note_unread(unread, request, context)
    faultless = tuple(case for case in cases if case.excused is None)
    return Payable(faultless or tuple(cases), tuple(refusals))  # what would be paid if the rules refused the others


T = TypeVar("T")


def noting_unread(reading: Flow[T], request: RequestFacts, context: Context) -> Flow[T]:
    """Return what a flow reads. What it cannot read is an event as well, once for each host."""
    try:
        return (yield from reading)
    except ProtocolError as error:
        yield from _note_unread(str(error), request, context)
        raise


def _note_unread(why: str, request: RequestFacts, context: Context) -> Flow[None]:
    key, node_id = ("once", f"{context.node_id} offer_not_read {request.origin}"), context.node_id
    facts = {"place": route_of(request), "why": why}

    def change(view: LedgerView) -> None:
        if view.mark(key) is None:
            view.put_mark(key, facts)
            view.record(node_id, "event", facts={"name": "offer_not_read", **facts})
            view.tell("offer_not_read", "warning", f"{facts['place']}: {why}", session=node_id, facts=facts)

    yield Transact(Scope(nodes=(node_id,), marks=(key,)), change)


def _judged(case: Case, challenge: Challenge, context: Context) -> Case | Refusal:
    """Return an offer with the verdict of the owner's rules, or the first objection to it."""
    offer, policy = case.offer, context.policy
    if conflicts_with(offer, challenge.required.accepts, challenge.beside):
        return Refusal("header_body_conflict", "header and body of the 402 ask for different payments")
    if conflicts_with(offer, challenge.required.accepts, challenge.signed):
        return Refusal(
            "signed_offer", "the offer that the seller has signed asks for another payment than its terms do"
        )
    if offer.payee in (context.payer, PERMIT2, EXACT_PROXY, UPTO_PROXY):
        return Refusal("payee", f"payee {offer.payee} is the payer itself or a contract of the protocol, not a seller")
    reached = judge_reach(context.reach, host=case.request.host, payee=offer.payee, begun=case.request.begun)
    amount = Nanos(offer.amount_nanos)
    objection, quoted = judge_offer(policy, case) or reached, above_quote(amount, case.request, context)
    if quoted is not None and (objection is None or context.shadow):
        return quoted  # the caller's own word for this request, and no rule
    if objection is None:
        case = replace(case, verdict=verdict_of(policy, case.subject, asks=context.asks))
        objection = denied(case.verdict, amount)
    if objection is not None and context.shadow:
        return replace(case, verdict=NO_VERDICT, excused=objection)
    return objection or case


def above_quote(amount: Nanos, request: RequestFacts, context: Context) -> Refusal | None:
    """Return the refusal of a payment of *amount* above a price that the request or its session was quoted."""
    quotes = [] if request.max_price is None else [(request.max_price, "extensions['max_price']")]
    if context.quotes:
        routes = routes_of(request)
        quotes += [
            (most, f"session.expect({of!r})")
            for of, most in context.quotes
            if any(matches_route(of, route) for route in routes)
        ]
    most, said_by = min(quotes, default=(None, ""))
    if most is None or amount <= most:
        return None
    reason = f"${format_dollars(amount)} is above the quoted ${format_dollars(most)} ({said_by})"
    return Refusal("price_above_quote", reason, amount, most, advice="Ask for the price again, and decide anew.")


def _unpayable(offer: Offer, context: Context) -> Flow[Refusal | Nanos | None]:
    """Return why an offer cannot be paid; else what the account has for it, in nano-dollars, or None if unknown."""
    if context.may_lose_holds and offer.network not in TEST_NETWORKS:
        reason = (
            "the ledger's server has replicas and none is synchronous, so a failover loses the newest holds; set "
            "synchronous_standby_names there, or unsafe_async_failover"
        )
        return Refusal("async_failover", reason)
    if (
        context.registry.is_added(offer.asset)
        and (unproven := (yield from _unproven(offer.asset, context))) is not None
    ):
        return Refusal("asset_unproven", unproven, advice="Ask the owner to run `x402guard doctor`.")
    if offer.network not in context.chains:
        if offer.network in TEST_NETWORKS or context.unsafe_no_chain:
            return None
        reason = f"no RPC for {offer.network}: claims about real money cannot be checked; set chains or unsafe_no_chain"
        return Refusal("no_chain", reason)
    return (yield from _ahead(offer.network, context)) or (yield from _unaffordable(offer, context))


_MOST_AHEAD_S: Final = 3_600


def _ahead(network: str, context: Context) -> Flow[Refusal | None]:
    """Refuse the first payment of a guard on a real network whose newest block is an hour behind the clock.

    A signature by such a clock could be taken for as long after its deadline, and a window of a budget would begin early.
    The owner of a test network moves its clock.
    """
    if network in TEST_NETWORKS or network in context.clocks:
        return None
    head_unix = yield AskChain(HeadTime(network))
    if head_unix is None:
        return None  # whether a payment needs the chain is asked next
    ahead_s = (yield Transact(Scope(), lambda view: view.clock_ms // 1000)) - head_unix
    if ahead_s <= _MOST_AHEAD_S:
        context.clocks.add(network)
        return None
    hours = f"{ahead_s / 3_600:.1f} hours"
    reason = f"the clock is {hours} ahead of the newest block of {network}: one of both is wrong, the clock or the node"
    return Refusal("clock", reason, advice="Set this machine's clock, or name another node.")


def _unproven(asset: Asset, context: Context) -> Flow[str | None]:
    """Return why the figures of a token that its owner has added are not believed: its contract is asked."""
    says = None
    if asset.network in context.chains:
        says = yield AskChain(facts_of(asset))
    return None if says is None and context.unsafe_no_chain else doubt_of(asset, says)


def denied(verdict: Verdict, amount: Nanos) -> Refusal | None:
    """Return the refusal if the owner's rules deny a payment of *amount*, or narrow it below that."""
    if verdict.action == "deny":
        return Refusal(verdict.rule, verdict.reason, amount, error=verdict.error)
    most = None if verdict.narrow is None else verdict.narrow.most
    if most is not None and amount > most:
        rule = verdict.narrowed_by
        reason = f"rule {rule!r} narrows this to ${format_dollars(most)}, but the price is ${format_dollars(amount)}"
        return Refusal(rule, reason, amount, most)
    return None


def _unaffordable(offer: Offer, context: Context) -> Flow[Refusal | Nanos | None]:
    """Return the refusal of a payment that the account cannot make, which would hold budget; else what it has."""
    if context.payer is None:
        return None
    funds = yield AskChain(AccountFunds(offer.network, offer.token, context.payer))
    if funds is None and context.unsafe_no_chain:
        return None
    if funds is None:
        reason = f"no RPC of {offer.network} answers, so the outcome of a payment could not be checked"
        return Refusal(
            "chain_unreadable", f"{reason}; see `x402guard doctor`, set several URLs, or set unsafe_no_chain"
        )
    if funds.balance < offer.amount_atomic:
        have = Nanos(offer.asset.value_nanos(funds.balance))
        reason = f"{context.payer} has {funds.balance} units of {offer.asset.symbol} on {offer.network}"
        return Refusal("balance", reason, offer.amount_nanos, have)
    if offer.method == "permit2" and funds.permit2_allowance < offer.amount_atomic:
        reason = (
            f"{context.payer} has not allowed Permit2 to move {offer.asset.symbol} on {offer.network}; "
            "allow an exact sum with `x402guard allowance grant AMOUNT`"
        )
        return Refusal("permit2_allowance", reason, offer.amount_nanos)
    most = funds.balance if offer.method == "eip3009" else min(funds.balance, funds.permit2_allowance)
    return Nanos(offer.asset.value_nanos(most))


def none_payable(payable: Payable) -> Refusal:
    """Return the refusal of a single offer, or one refusal with the reasons of all offers."""
    reasons = payable.refusals or (Refusal("no_acceptable_offer", "the 402 has no offer that can be read"),)
    first = reasons[0]
    if len(reasons) == 1:
        return first
    listed = "; ".join(f"({i + 1}) {r.rule}: {r.reason}" for i, r in enumerate(reasons[:8]))
    more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
    reason = f"none of {len(reasons)} offers may be paid: {listed}{more}"
    words = "; ".join(r.words for r in reasons if r.words)
    return Refusal("no_acceptable_offer", reason, error=NoAcceptableOffer, words=words)

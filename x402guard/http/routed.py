"""The flow of a request by its route: a metered call, a poll, an apparent LLM call, or a refusal."""

from __future__ import annotations

from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, Notify, Reply
from x402guard.flow.receipt import Receipt
from x402guard.flow.refusals import refused
from x402guard.flow.request import RequestFacts, guarding_earlier_payment, note_once, split_path
from x402guard.frozen import replace
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import Notice
from x402guard.llm.background import polled
from x402guard.llm.flow import InFlight, Upload, called
from x402guard.llm.meter import FixedPrice, Meter, Polled, Unmetered, speaks_to_a_model, unknown_host
from x402guard.policy.patterns import host_listed
from x402guard.policy.sellers import sellers_at
from x402guard.vendors.routes import Route
from x402guard.x402.flow import paid_request
from x402guard.x402.settlement import PAYMENT_REQUIRED_STATUS

Handed = InFlight | Receipt | None
"""The result of a flow: a body to meter, a receipt, or None for a free request."""


def without_words(facts: RequestFacts, refusal: Refusal) -> Refusal:
    """Return a refusal without the path that a seller's redirect has named: a model may read it."""
    if not facts.begun:
        return refusal
    return replace(
        refusal, reason=f"what {facts.begun} redirected to is a metered host, and this request cannot be priced there"
    )


def refuse(context: Context, refusal: Refusal) -> Flow[Handed]:
    """Refuse a request by its address or its route: nothing is sent or held. Raises the refusal's error."""
    raise (yield from refused(context, refusal))


def metered_request(
    request: RequestFacts, route: Route | FixedPrice, upload: Upload, context: Context, meter: Meter
) -> Flow[Handed]:
    """Run the flow of one call up to its answer's body; pay a 402 of a metered host like any other.

    Returns an ``InFlight`` whose body is to be metered, the receipt of a payment or of a call that has ended, or None if
    it cost nothing. Raises ``PaymentRefused`` and its subclasses (nothing is sent or held then), ``LedgerUnavailable``,
    ``SendFailed``.
    """
    return (yield from _paid_if_asked(request, context, called(request, route, upload, context, meter)))


def poll_request(request: RequestFacts, route: Polled, context: Context, meter: Meter) -> Flow[Handed]:
    """Send a poll of a response that may run in the background; pay a 402 like any other."""
    return (yield from _paid_if_asked(request, context, polled(request, route, context, meter)))


def _paid_if_asked(request: RequestFacts, context: Context, flow: Flow[tuple[Handed, Reply]]) -> Flow[Handed]:
    handed, reply = yield from guarding_earlier_payment(request, flow)
    return (yield from paid_request(request, context, reply)) if reply.status == PAYMENT_REQUIRED_STATUS else handed


def unmetered_request(request: RequestFacts, route: Unmetered, context: Context, body: bytes | None) -> Flow[Handed]:
    """Tell of an apparent LLM call that is not metered, once a host, and handle it as any request; or refuse it."""
    policy = context.policy
    named = host_listed(request.host, policy.hosts or ()) or sellers_at(policy.sellers, request.host)
    if policy.unknown_llm_hosts == "refuse" and not named and speaks_to_a_model(split_path(request.url).path, body):
        raise (yield from refused(context, unknown_host(request, route)))
    if (yield from note_once(context, "unmetered", request.host, route.route_name)):
        message = f"{route.route_name} looks like an LLM call, but its host is not metered: nothing is held for it"
        facts = {"place": route.route_name}
        yield Notify(Notice("unmetered", "warning", message, session=context.node_id, facts=facts))
    return (yield from paid_request(request, context))

"""Judges payments that the guard did not make, in a guarded client and, under ``install``, where requests leave."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from x402guard.flow.context import Context
from x402guard.flow.effects import Flow
from x402guard.flow.refusals import refused
from x402guard.flow.request import RequestFacts, route_of
from x402guard.http.request import request_facts, unknown_payments
from x402guard.ledger.authorize import Refusal
from x402guard.money import format_dollars
from x402guard.policy.reach import host_listed, judge_reach
from x402guard.tools.flow import ToolCall, charge_tool
from x402guard.x402.foreign import ForeignPayment, Taking, most_taken, payments_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import httpx

    from x402guard.flow.shell import Payer, Shell
    from x402guard.http.families import Library

FOREIGN: Final = "foreign_payment"
"""The rule that refuses a payment of another client, and the name under which it is booked."""

R = TypeVar("R")


def judge_foreign(context: Context, payments: Sequence[ForeignPayment], host: str, route: str) -> Flow[None]:
    """Refuse, book or let pass the payments of a request that the guard did not make, as the policy says.

    A booked one is charged before it is sent, once however often it is sent. Raises the refusal.
    """
    policy = context.policy
    choice = policy.foreign_payments
    for payment in payments if choice != "allow" else ():
        taking = most_taken(payment, context.registry) if choice == "book" else None
        if taking is None:
            raise (yield from refused(context, _refusal(payment, route, choice)))
        objection = _objection(context, taking, host)
        if objection is not None:
            raise (yield from refused(context, objection))
        call = ToolCall(FOREIGN, taking.amount, payment.digest, arguments={"route": route}, fixed=True)
        # The session's tools= are about tools; its hosts= and payees= were judged above.
        yield from charge_tool(replace(context, reach=()), call)


def _objection(context: Context, taking: Taking, host: str) -> Refusal | None:
    """Return the refusal by the owner's lists and cap, which hold for every payment."""
    policy, amount = context.policy, taking.amount
    if policy.hosts is not None and not host_listed(host, policy.hosts):
        return Refusal("hosts", f"host {host} is not in policy.hosts", amount)
    if policy.payees is not None and taking.payee not in policy.payees:
        return Refusal("payees", f"payee {taking.payee or 'unknown'} is not in policy.payees", amount)
    if policy.cap_nanos is not None and amount > policy.cap_nanos:
        reason = f"${format_dollars(amount)} is above policy.per_payment_cap (${format_dollars(policy.cap_nanos)})"
        return Refusal("per_payment_cap", reason, amount, policy.cap_nanos)
    return judge_reach(context.reach, host=host, payee=taking.payee or "unknown")


def after_foreign(
    context: Context, payments: Sequence[ForeignPayment], request: RequestFacts, flow: Flow[R]
) -> Flow[R]:
    """Return *flow* after the judgement on a request's foreign payments."""
    yield from judge_foreign(context, payments, request.host, route_of(request))
    return (yield from flow)


def judge_leaving(
    innermost: Callable[[], Payer], library: Library, request: httpx.Request
) -> tuple[Flow[None], Shell] | None:
    """Return the judgement on a request that a library's own transport is about to send; None if it needs none.

    A transport below a guarded one, such as another x402 client's, can have put a payment into it.
    """
    body = b"".join(request.stream) if isinstance(request.stream, library.bytes_stream) else None
    payments = unknown_payments(request, payments_in(request.headers.multi_items(), body))
    if not payments:
        return None
    payer, facts = innermost(), request_facts(request)
    return judge_foreign(payer.context, payments, facts.host, route_of(facts)), payer.shell


def _refusal(payment: ForeignPayment, route: str, choice: str) -> Refusal:
    if choice == "book":
        reason = f"{payment.where} of {route} is a payment of another client, and its amount cannot be read"
    else:
        reason = f"{payment.where} of {route} is a payment of another client, which no budget counts"
    return Refusal(
        FOREIGN,
        f"{reason} (policy.foreign_payments)",
        advice="Send the request without it, and the guard pays; or ask the owner to set policy.foreign_payments.",
    )

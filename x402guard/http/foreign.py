"""Judges payments that the guard did not make, in a guarded client and, under ``install``, where requests leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from x402guard.flow.context import Context
from x402guard.flow.effects import Flow
from x402guard.flow.refusals import enforce, refused
from x402guard.flow.request import RequestFacts, route_of, routes_of
from x402guard.frozen import replace
from x402guard.http.request import lines_of, request_facts, unknown_payments
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.authorize import Refusal
from x402guard.policy import Policy
from x402guard.policy.reach import judge_reach
from x402guard.policy.rules import judge_rules
from x402guard.policy.verdicts import UNKNOWN_PAYEE, Subject
from x402guard.tools.flow import ToolCall, charge_tool
from x402guard.x402.challenge import above_quote, denied
from x402guard.x402.foreign import ForeignPayment, Taking, most_taken, payments_in
from x402guard.x402.offer_rules import judge_amount, judge_host, judge_network, judge_payee

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import httpx

    from x402guard.flow.shell import Payer, Shell
    from x402guard.http.families import Library

FOREIGN: Final = "foreign_payment"
"""The rule that refuses a payment of another client, and the name under which it is booked."""

R = TypeVar("R")


def judge_foreign(context: Context, payments: Sequence[ForeignPayment], request: RequestFacts) -> Flow[None]:
    """Refuse, book or let pass the payments of a request that the guard did not make, as the policy says.

    A booked one is charged before it is sent, once however often it is sent. Raises the refusal. In shadow mode a
    payment is booked instead of refused, if its amount can be read.
    """
    choice, route = context.policy.foreign_payments, route_of(request)
    for payment in payments if choice != "allow" else ():
        taking = most_taken(payment, context.registry) if choice == "book" or context.shadow else None
        if taking is None:
            raise (yield from refused(context, _refusal(payment, request.begun or route, choice)))
        if choice == "refuse":
            yield from enforce(context, _refusal(payment, request.begun or route, choice))
        above = above_quote(taking.amount, request, context)
        if above is not None:
            raise (yield from refused(context, above))  # a quote is the caller's own, and holds in shadow mode as well
        objection = _objection(context, taking, request)
        if objection is not None:
            yield from enforce(context, objection)
        call = ToolCall(FOREIGN, taking.amount, payment.digest, arguments={"route": route}, fixed=True)
        # The session's tools= are about tools; its hosts= and payees= were judged above.
        yield from charge_tool(replace(context, reach=()), call)


def _objection(context: Context, taking: Taking, request: RequestFacts) -> Refusal | None:
    """Return the refusal by the owner's lists, cap and rules, which hold for every payment."""
    policy, payee, host = context.policy, taking.payee or UNKNOWN_PAYEE, request.host
    listed = (
        judge_host(policy, host, request.begun) or judge_payee(policy, payee) or judge_amount(policy, taking.amount)
    )
    reached = judge_reach(context.reach, host=host, payee=payee, begun=request.begun)
    return (
        listed
        or judge_network(policy, taking.network)
        or reached
        or _ruled_out(policy, Subject(HoldKind.PAYMENT, routes_of(request), taking.amount, payee, begun=request.begun))
    )


def _ruled_out(policy: Policy, subject: Subject) -> Refusal | None:
    """Return the refusal by the owner's rules. No approver is asked about a payment that another client has signed already."""
    verdict = judge_rules(policy.rules or (), subject)
    if verdict.action == "ask":
        reason = f"{verdict.reason}, and no approver is asked about a payment of another client"
        return Refusal(verdict.rule, reason, subject.amount)
    return denied(verdict, subject.amount)


def after_foreign(
    context: Context, payments: Sequence[ForeignPayment], request: RequestFacts, flow: Flow[R]
) -> Flow[R]:
    """Return *flow* after the judgement on a request's foreign payments."""
    yield from judge_foreign(context, payments, request)
    return (yield from flow)


def judge_leaving(
    innermost: Callable[[], Payer], library: Library, request: httpx.Request
) -> tuple[Flow[None], Shell] | None:
    """Return the judgement on a request that a library's own transport is about to send; None if it needs none.

    A transport below a guarded one, such as another x402 client's, can have put a payment into it.
    """
    body = b"".join(request.stream) if isinstance(request.stream, library.bytes_stream) else None
    payments = unknown_payments(request, payments_in(lines_of(request.headers), body))
    if not payments:
        return None
    payer, facts = innermost(), request_facts(request)
    return judge_foreign(payer.context, payments, facts), payer.shell


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

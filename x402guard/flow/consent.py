"""A person's yes to one call: asked before anything is held, written into the books, and good for that call alone."""

from __future__ import annotations

from x402guard.flow.effects import Flow, ask, transact
from x402guard.flow.terms import Terms
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars, nanos_to_decimal
from x402guard.policy.approvals import APPROVAL, ApprovalRequest, request_id
from x402guard.policy.verdicts import Unasked


def consent(terms: Terms, unasked: Unasked) -> Flow[Refusal | None]:
    """Ask, and write the answer down. None is a yes, good for this one call; the caller runs all its checks again after it."""
    subject, verdict = unasked.subject, unasked.verdict
    request = ApprovalRequest(
        id=request_id(terms.session_id, list(unasked.key)),
        session=terms.session_id,
        kind=str(subject.kind),
        what=subject.names[0],
        amount=nanos_to_decimal(subject.amount),
        payee=subject.payee,
        network=unasked.network,
        arguments=subject.arguments,
        rule=verdict.rule,
        reason=verdict.reason,
        approvers=max(1, verdict.approvers),
        timeout_s=terms.policy.approvals.timeout_s,
    )
    answer = yield from ask(request)
    allowed = answer.allowed is True
    facts = {
        "name": APPROVAL,
        "allowed": allowed,
        "by": list(answer.by),
        "rule": verdict.rule,
        "what": subject.names[0],
        "requested": format_dollars(subject.amount),
        "reason": answer.reason[:300],
    }

    def note(view: LedgerView) -> None:
        view.record(terms.node_id, "event", facts=facts)

    yield from transact(Scope(nodes=(terms.node_id,)), note)
    if allowed:
        return None
    why = answer.reason or "it was denied"
    return Refusal(APPROVAL, f"{subject.names[0]}: {verdict.reason}; {why}", subject.amount or None)

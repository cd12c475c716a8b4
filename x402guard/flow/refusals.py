"""How a refusal leaves: counted in the books, and raised as the typed error that its rule has."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from x402guard.errors import (
    ApprovalDenied,
    BudgetExhausted,
    CircuitOpen,
    LoopDetected,
    NeedsReview,
    NoAcceptableOffer,
    PaymentRefused,
    PolicyDenied,
    SessionClosed,
    SessionTripped,
    SpendSpike,
    Unpriced,
    VelocityExceeded,
)
from x402guard.flow.admission import BUSY
from x402guard.flow.effects import Flow, transact
from x402guard.flow.terms import Terms
from x402guard.ledger.authorize import BUDGET, TOKENS, Refusal, note_refusal, refusal_marks
from x402guard.ledger.view import LedgerView, Scope
from x402guard.llm.ceiling import UNBOUNDED_INPUT, UNBOUNDED_OUTPUT, UNPRICED
from x402guard.llm.request import UNREADABLE
from x402guard.policy.approvals import APPROVAL, NEEDS_REVIEW
from x402guard.policy.breakers import BREAKER
from x402guard.policy.guards import LOOP, SPIKE
from x402guard.policy.timeouts import SESSION_TIMEOUT
from x402guard.x402.origins import note_version, origin_mark


def refused(terms: Terms, refusal: Refusal, speaks_v2: str | None = None) -> Flow[PaymentRefused]:
    """Count the refusal in the books, and return it as the error to raise. Nothing is signed, nothing held.

    *speaks_v2* is the origin that was refused, where it spoke v2: refused or not, it is not believed in v1 any more.
    """
    node_id = terms.node_id
    # What a request or a server says may hold halves of characters, which no file takes.
    reason = refusal.reason.encode("utf-8", "backslashreplace").decode("utf-8")
    refusal = replace(refusal, reason=reason)
    marks = [refusal_marks(node_id, refusal.rule)]
    if speaks_v2 is not None:
        marks.append(origin_mark(speaks_v2))

    def count(view: LedgerView) -> None:
        note_refusal(view, node_id, refusal)
        if speaks_v2 is not None:
            note_version(view, speaks_v2)

    yield from transact(Scope(nodes=(node_id,), marks=tuple(marks)), count)
    return refusal_error(terms, refusal)


_ERRORS: Final[dict[str, type[PaymentRefused]]] = {
    BUDGET: BudgetExhausted,
    TOKENS: BudgetExhausted,
    "session_tripped": SessionTripped,
    "session_closed": SessionClosed,
    "no_acceptable_offer": NoAcceptableOffer,
    UNPRICED: Unpriced,
    UNREADABLE: Unpriced,
    UNBOUNDED_INPUT: Unpriced,
    UNBOUNDED_OUTPUT: Unpriced,
    LOOP: LoopDetected,
    SPIKE: SpendSpike,
    **dict.fromkeys(
        (f"{what}_per_{window}" for what in ("dollars", "calls") for window in ("minute", "hour", "day")),
        VelocityExceeded,
    ),
    "new_payees_per_day": VelocityExceeded,
    BREAKER: CircuitOpen,
    BUSY: CircuitOpen,
    APPROVAL: ApprovalDenied,
    NEEDS_REVIEW: NeedsReview,
    SESSION_TIMEOUT: SessionTripped,
}


_ADVICE: Final = {
    TOKENS: "Finish with what the context holds, or ask for a larger budget of tokens.",
    "https": "Ask the server over https.",
    SPIKE: "Only the owner can reset this session.",
    LOOP: "Only the owner can reset this session.",
    "no_signer": "Give the guard a key.",
    SESSION_TIMEOUT: "Only the owner can reset this session.",
    BREAKER: "Do something else meanwhile, or ask somebody else.",
    BUSY: "Wait for a call to end, or raise policy.bulkhead.",
    APPROVAL: "Ask again if it matters, or go on without.",
    "clock": "Set this machine's clock.",
    "not_replayable": "Send the body in memory, or raise max_body_bytes.",
}


def refusal_error(terms: Terms, refusal: Refusal) -> PaymentRefused:
    """Return a refusal as the typed error that its rule has."""
    kind = _ERRORS.get(refusal.rule, PolicyDenied)
    error = kind(
        f"{refusal.rule}: {refusal.reason}",
        rule=refusal.rule,
        requested=refusal.requested,
        available=refusal.available,
        session=terms.session_id,
        retry_after=refusal.retry_after_s,
    )
    error.money_may_have_moved = refusal.is_out
    if refusal.is_out:
        error.advice = (
            "A payment for this is out until its deadline, and counts. Ask again when retry_after has passed."
        )
    elif refusal.rule in _ADVICE:
        error.advice = f"Nothing was paid. {_ADVICE[refusal.rule]}"
    return error

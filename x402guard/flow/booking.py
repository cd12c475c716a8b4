"""What everything that is held goes through alike, be it an LLM call or a tool: held or refused, booked, or given back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from x402guard.errors import LedgerUnavailable, PaymentRefused
from x402guard.flow.admission import Seat, stopped
from x402guard.flow.capture import write_bill, write_void
from x402guard.flow.consent import consent
from x402guard.flow.effects import Flow, Interrupted, SendFailed, transact, transact_anyway, warn
from x402guard.flow.refusals import refused
from x402guard.flow.terms import Terms
from x402guard.ledger.authorize import BUDGET, Refusal
from x402guard.ledger.model import Hold
from x402guard.ledger.view import LedgerView, MarkKey, Scope
from x402guard.llm.bill import Bill
from x402guard.policy.approvals import APPROVAL
from x402guard.policy.steps import step_of
from x402guard.policy.verdicts import Consented, Unasked
from x402guard.x402.settlement import sweep

T = TypeVar("T")

_MOST_QUESTIONS: Final = 8


def hold_or_refuse(
    terms: Terms,
    scope: Scope,
    change: Callable[[LedgerView, Consented], T | Unasked | Refusal],
    undo: Callable[[BaseException], Flow[None]],
    *,
    refuse: Callable[[Refusal], Flow[PaymentRefused]] | None = None,
    seat: Seat | None = None,
) -> Flow[T]:
    """Write a hold, durably, and return what *change* made of it; before a refusal for lack of budget, sweep once.

    A place is taken first, where a *seat* is given. Where a person has to be asked, that comes before the hold, with no place taken;
    then *change* is run anew, and shown what was allowed.
    *undo* gives back what may have been written where nobody knows: the answer of the books was lost, or the task was cancelled.
    Raises the refusal, counted in the books by *refuse*, and ``LedgerUnavailable``.
    """
    no = refuse or partial(refused, terms)
    consented: frozenset[tuple[Any, ...]] = frozenset()
    swept, seated = False, seat is None
    while True:
        if seat is not None and not seated:
            full = yield from seat.take(terms)
            if full is not None:
                raise (yield from no(full))
            seated = True
        stop = yield from stopped(terms)
        if stop is not None:
            raise (yield from no(stop))
        try:
            decided = yield from transact(scope, partial(_shown, change, consented))
        except (LedgerUnavailable, Interrupted) as error:
            yield from undo(error)
            raise
        if isinstance(decided, Unasked):
            if seat is not None:
                seat.leave()
                seated = False
            denied = _asked_too_often(decided, consented) or (yield from consent(terms, decided))
            if denied is not None:
                raise (yield from no(denied))
            consented |= {decided.key}
        elif not isinstance(decided, Refusal):
            return decided
        elif decided.rule == BUDGET and not swept and terms.chains and (yield from _may_fit_now(terms, decided)):
            swept = True
        else:
            raise (yield from no(decided))


def _may_fit_now(terms: Terms, refusal: Refusal) -> Flow[bool]:
    """Ask the chain about what is claimed: it may have cost less than is held. Somebody else may have found that out just now."""
    swept = yield from sweep(terms)
    return swept.asked > 0 or swept.room is None or swept.room > (refusal.available or 0)


def _asked_too_often(unasked: Unasked, consented: Consented) -> Refusal | None:
    if len(consented) < _MOST_QUESTIONS:
        return None
    what, times = unasked.subject.names[0], len(consented)
    return Refusal(
        APPROVAL, f"{what}: what it costs has changed {times} times while people were asked", unasked.subject.amount
    )


def _shown(change: Callable[[LedgerView, Consented], T], consented: Consented, view: LedgerView) -> T:
    return change(view, consented)


def book(
    terms: Terms,
    hold: Hold,
    bill: Bill,
    marks: tuple[MarkKey, ...] = (),
    *,
    most_tokens: int = 0,
    well: bool | None = True,
) -> Flow[Hold]:
    """Capture what was used, and say so where that reached the soft limit of the session's tokens. See ``write_bill``."""
    written = yield from transact_anyway(*write_bill(terms, hold, bill, marks, most_tokens=most_tokens, well=well))
    if written.warning:
        yield from warn(written.warning)
    return written.hold


def give_back(
    terms: Terms,
    held: Hold | str,
    reason: str,
    error: BaseException | None,
    marks: tuple[MarkKey, ...] = (),
    *,
    well: bool | None = None,
) -> Flow[None]:
    """Void what was never billed: a hold, or its id where nobody knows whether it was written.

    *well* says whether whoever was called has answered; None says nothing of that.

    A ledger that cannot be written keeps the hold: that costs budget, never money.
    """
    hold_id, step = (held.id, step_of(held)) if isinstance(held, Hold) else (held, None)
    try:
        yield from transact_anyway(*write_void(terms, hold_id, reason, marks, step=step, well=well))
    except LedgerUnavailable as again:
        if error is None:
            return  # the hold lapses to its ceiling; what was answered is the caller's all the same
        cause(error).add_note(f"hold {hold_id} could not be given back: {again}")


def error_name(error: BaseException) -> str:
    """Return the name of what stands behind a flow's signal."""
    return type(cause(error)).__name__


def cause(error: BaseException) -> BaseException:
    """Return what stands behind a flow's signal, or the error itself."""
    return error.cause if isinstance(error, (Interrupted, SendFailed)) else error

"""What everything that is held goes through alike, be it an LLM call or a tool: held or refused, booked, or given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from x402guard.effects import Flow, Interrupted, SendFailed, transact, transact_anyway, warn
from x402guard.errors import LedgerUnavailable
from x402guard.held_calls import write_bill, write_void
from x402guard.ledger.authorize import BUDGET, Refusal
from x402guard.ledger.model import Hold
from x402guard.ledger.view import Change, MarkKey, Scope
from x402guard.metering.bill import Bill
from x402guard.policy.steps import step_of
from x402guard.purchase import Terms
from x402guard.refusals import refused
from x402guard.settlement import sweep

T = TypeVar("T")

__all__ = ["book", "cause", "error_name", "give_back", "hold_or_refuse"]


def hold_or_refuse(
    terms: Terms, scope: Scope, change: Change[T | Refusal], undo: Callable[[BaseException], Flow[None]]
) -> Flow[T]:
    """Write a hold, durably, and return what *change* made of it; before a refusal for lack of budget, sweep once.

    *undo* gives back what may have been written where nobody knows: the answer of the books was lost, or the task was cancelled.
    Raises the refusal, counted in the books, and ``LedgerUnavailable``.
    """
    swept = False
    while True:
        try:
            decided = yield from transact(scope, change)
        except (LedgerUnavailable, Interrupted) as error:
            yield from undo(error)
            raise
        if not isinstance(decided, Refusal):
            return decided
        if decided.rule != BUDGET or swept or (yield from sweep(terms)) == 0:
            raise (yield from refused(terms, decided))
        swept = True


def book(terms: Terms, hold: Hold, bill: Bill, marks: tuple[MarkKey, ...] = (), *, most_tokens: int = 0) -> Flow[Hold]:
    """Capture what was used, and say so where that reached the soft limit of the session's tokens. See ``write_bill``."""
    written = yield from transact_anyway(*write_bill(terms, hold, bill, marks, most_tokens=most_tokens))
    if written.warning:
        yield from warn(written.warning)
    return written.hold


def give_back(
    terms: Terms, held: Hold | str, reason: str, error: BaseException | None, marks: tuple[MarkKey, ...] = ()
) -> Flow[None]:
    """Void what was never billed: a hold, or its id where nobody knows whether it was written.

    A ledger that cannot be written keeps the hold: that costs budget, never money.
    """
    hold_id, step = (held.id, step_of(held)) if isinstance(held, Hold) else (held, None)
    try:
        yield from transact_anyway(*write_void(terms, hold_id, reason, marks, step=step))
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

"""Counts a refusal in the ledger, and makes its typed error."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from x402guard.errors import PaymentRefused, quoted
from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, Transact
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.authorize import (
    BUDGET,
    Refusal,
    enforced,
    note_refusal,
    record_excused,
    refusal_marks,
    refused_mark,
)
from x402guard.ledger.budgets import STARVED
from x402guard.ledger.view import LedgerView, Scope


def refused(
    context: Context,
    refusal: Refusal,
    *,
    of: tuple[HoldKind, str] | None = None,
    also: Callable[[LedgerView], None] | None = None,
    marks: tuple[MarkKey, ...] = (),
    starves: int = STARVED[HoldKind.PAYMENT],
) -> Flow[PaymentRefused]:
    """Count the refusal in the ledger, and return the error to raise. Nothing is signed, nothing is held.

    *of* is the model or tool that was refused, *starves* the bit of what was, if it is neither. *also* runs in the same transaction on the rows *marks*: it records what the refused request shows.
    """
    node_id = context.node_id
    # A request or an answer may contain lone surrogates, which no file can encode.
    reason = refusal.reason.encode("utf-8", "backslashreplace").decode("utf-8")
    refusal = replace(refusal, reason=reason)

    def count(view: LedgerView) -> None:
        note_refusal(view, node_id, refusal, of, starves=starves)
        if also is not None:
            also(view)

    counted = (refusal_marks(node_id, refusal.rule), *(() if of is None else (refused_mark(node_id, *of),)), *marks)
    yield Transact(Scope(nodes=(node_id,), marks=counted), count)
    return refusal_error(context, refusal)


def enforce(context: Context, refusal: Refusal) -> Flow[None]:
    """Count and raise the refusal of a rule. In shadow mode record it, and return."""
    if not context.shadow:
        raise (yield from refused(context, refusal))

    def change(view: LedgerView) -> None:
        enforced(view, refusal)
        record_excused(view, context.node_id)

    yield Transact(Scope(nodes=(context.node_id,)), change)


def refusal_error(context: Context, refusal: Refusal) -> PaymentRefused:
    """Return a refusal as its typed error."""
    error = refusal.error(
        f"{refusal.rule}: {refusal.reason}",
        rule=refusal.rule,
        requested=refusal.requested,
        available=refusal.available,
        session=context.session_id,
        retry_after=refusal.retry_after_s,
    )
    error.money_may_have_moved = refusal.is_out
    if refusal.retry_after_s is not None and refusal.rule == BUDGET:
        error.retry = "later"
    error.detail = quoted(refusal.words)
    if refusal.is_out:
        error.advice = (
            "A payment for this can be taken until its deadline, and counts. Ask again when retry_after has passed."
        )
    elif refusal.advice:
        error.advice = f"Nothing was paid. {refusal.advice}"
    return error

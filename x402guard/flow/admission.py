"""Checks before every hold: an open session, a plausible clock, no kill file, a free slot, and approval if needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from x402guard.errors import ApprovalDenied, CircuitOpen, PaymentRefused
from x402guard.flow.budget_queue import BudgetQueue, note_begun
from x402guard.flow.context import Context
from x402guard.flow.effects import Ask, Flow, Notify, TakeSlot, Transact
from x402guard.flow.ports import Slot
from x402guard.flow.refusals import refused
from x402guard.kernel.rows import NOTHING, HoldKind
from x402guard.ledger.authorize import BUDGET, Refusal, check_open, lapse_due
from x402guard.ledger.owner import trip_node
from x402guard.ledger.view import LedgerView, Notice, Scope
from x402guard.money import format_dollars, nanos_to_decimal
from x402guard.policy.approvals import APPROVAL, NO_ANSWER, ApprovalRequest, request_id
from x402guard.policy.breakers import slot_of
from x402guard.policy.judge import Consented, Unasked
from x402guard.policy.steps import run_of, shown_host

BUSY: Final = "bulkhead"
WAITED: Final = "slot_waited"
LONGEST_WAIT_S: Final = 300  # for a slot; then the call is refused
_MAX_BEHIND_MS: Final = 60_000


def check_standing(view: LedgerView, context: Context) -> Refusal | None:
    """Return why nothing may be held now, or None. Checks the kill file, the clock, and the budgets up to the root.

    A kill file trips the run. If the clock is plausible, holds past their own deadline lapse here.
    """
    if view.killed_by:
        trip_node(view, run_of(context.node_id), f"there is a kill file, {view.killed_by}")
        return check_open(view, context.node_id)
    if view.ahead_ms <= context.max_clock_jump_ms:
        lapse_due(view)
        return check_open(view, context.node_id)
    reason = (
        f"this machine's clock has jumped {view.ahead_ms // 1000} s ahead since the ledger was opened (max_clock_jump_s is "
        f"{context.max_clock_jump_ms // 1000}); set it right, or open the guard again if it is right now"
    )
    return Refusal("clock", reason, advice="Set this machine's clock.")


def check_clock(view: LedgerView) -> Refusal | None:
    """Return a refusal if the clock is behind the ledger's time, which would make new signatures valid for too long."""
    if view.behind_ms <= _MAX_BEHIND_MS:
        return None
    seconds = view.behind_ms // 1000
    return Refusal(
        "clock",
        f"this machine's clock is {seconds} s behind the ledger's last entry; set it right, or wait",
        advice="Set this machine's clock.",
    )


class Seat:
    """A slot at a host or of a tool for one call; none if the owner's bulkhead needs none.

    It is taken before the hold is written, and released while an approver is asked. *begun*: the name of the first hop,
    if a redirect has named the host.
    """

    def __init__(self, kind: HoldKind, name: str, begun: str = "") -> None:
        self._kind, self._name, self._begun = kind, name, begun
        self.slot: Slot | None = None
        self.waited: Mapping[str, Any] | None = None

    def take(self, context: Context) -> Flow[Refusal | None]:
        """Wait for a slot. Returns the refusal if none is free in time. In shadow mode no call waits, and none is taken."""
        slot = slot_of(context.policy.bulkhead, self._kind, self._name)
        if slot is None or context.shadow:
            return None
        self.leave()
        where, most = slot
        shown = where if self._kind is HoldKind.TOOL else shown_host(self._name, self._begun)
        message = f"a call waits for a slot of {shown}: {most} of the run are under way there (policy.bulkhead)"
        told = Notice(WAITED, "warning", message, session=context.node_id, facts={"place": shown, "slots": most})
        self.slot = yield TakeSlot(f"{run_of(context.node_id)} {where}", most, LONGEST_WAIT_S, told)
        if self.slot is not None:
            seconds = int(self.slot.waited_s)
            self.waited = {"name": WAITED, "place": shown, "seconds": seconds} if seconds else None
            return None
        return Refusal(
            BUSY,
            f"{most} {'call' if most == 1 else 'calls'} of {shown} may be under way at once, and no slot was free in time "
            "(policy.bulkhead)",
            retry_after_s=1,
            error=CircuitOpen,
            advice="Wait for a call to end, or raise policy.bulkhead. In an event loop await the call: a blocking one there "
            "does not wait for others.",
        )

    def leave(self) -> None:
        """Release the slot, if one is taken. May be called twice."""
        if self.slot is not None:
            self.slot.leave()


def consent(context: Context, unasked: Unasked) -> Flow[Refusal | None]:
    """Ask the approver and record the answer. None: a yes for this one call; the caller then repeats all its checks."""
    subject, verdict = unasked.subject, unasked.verdict
    request = ApprovalRequest(
        id=request_id(context.session_id, list(unasked.key)),
        session=context.session_id,
        kind=str(subject.kind),
        what=subject.names[0],
        amount=nanos_to_decimal(subject.amount),
        payee=subject.payee,
        network=unasked.network,
        arguments=None if subject.arguments is None else subject.arguments.cut(),
        rule=verdict.rule,
        reason=verdict.reason,
        approvers=max(1, verdict.approvers),
        timeout_s=context.policy.approvals.timeout_s,
        query=unasked.query,
        body=unasked.body,
        spent=nanos_to_decimal(unasked.spent),
    )
    about = {"id": request.id, "what": request.what, "approvers": request.approvers, "timeout_s": request.timeout_s}
    asked = partial(
        Notice, session=context.node_id, amount=request.amount, rule=request.rule, facts=about
    )  # the reason may hold arguments; it stands in the question
    yield Notify(asked("approval_asked", "info", f"an approver is asked to allow {request.what} for ${request.amount}"))
    answer = yield Ask(request)
    allowed = answer.allowed is True
    if answer.reason == NO_ANSWER:
        message = f"no approver answered within {request.timeout_s} s: {request.what} for ${request.amount} is denied"
        yield Notify(asked("approval_expired", "warning", message))
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
        view.record(context.node_id, "event", facts=facts)

    yield Transact(Scope(nodes=(context.node_id,)), note)
    if allowed:
        return None
    why = answer.reason or "it was denied"
    return Refusal(
        APPROVAL,
        f"{subject.shown}: {verdict.reason}; {why}",
        subject.amount or None,
        error=ApprovalDenied,
        advice="Ask again if it matters, or go on without.",
    )


T = TypeVar("T")

_MOST_QUESTIONS: Final = 8


def hold_or_refuse(
    context: Context,
    scope: Scope,
    change: Callable[[LedgerView, Consented], T | Unasked | Refusal | None],
    undo: Callable[[BaseException], Flow[None]],
    *,
    refuse: Callable[[Refusal], Flow[PaymentRefused]] | None = None,
    seat: Seat | None = None,
    first: Callable[[], Flow[None]] | None = None,
) -> Flow[T]:
    """Write a hold durably, and return the result of *change*. Before a refusal for lack of budget, sweep once, and wait.

    With a *seat*, its slot is taken first. If *change* needs approval, the slot is released while the approver is
    asked; then *change* runs again and is shown what was allowed. If the ledger's answer is lost or the task is
    cancelled, it is unknown whether the hold was written, and *undo* gives it back. Where *change* returns None, it
    cannot decide yet: *first* runs, and then *change* again. Raises ``LedgerUnavailable`` and the refusal that *refuse*
    counts.
    """
    no = refuse or partial(refused, context)
    note_begun(scope.holds)
    queue = BudgetQueue(context)
    try:
        return (yield from _held(context, scope, change, undo, no=no, seat=seat, queue=queue, first=first))
    finally:
        queue.leave()


def _held(
    context: Context,
    scope: Scope,
    change: Callable[[LedgerView, Consented], T | Unasked | Refusal | None],
    undo: Callable[[BaseException], Flow[None]],
    *,
    no: Callable[[Refusal], Flow[PaymentRefused]],
    seat: Seat | None,
    queue: BudgetQueue,
    first: Callable[[], Flow[None]] | None,
) -> Flow[T]:
    consented: frozenset[tuple[Any, ...]] = frozenset()
    swept, seated, waits = False, seat is None, ""
    while True:
        if seat is not None and not seated:
            full = yield from seat.take(context)
            if full is not None:
                raise (yield from no(full))
            seated = True
        try:
            waited = None if seat is None else seat.waited
            decided: T | Unasked | Refusal | None = yield Transact(
                scope, partial(_shown, change, consented, context, waited)
            )
        except GeneratorExit:
            raise
        except BaseException as error:  # also a time limit that a signal handler raises, as job queues have
            yield from undo(error)
            raise
        if decided is None:
            assert first is not None, "a change that cannot decide says what to do first"
            yield from first()
        elif isinstance(decided, Unasked):
            if seat is not None:
                seat.leave()
                seated = False
            denied = _asked_too_often(decided, consented) or (yield from consent(context, decided))
            if denied is not None:
                raise (yield from no(denied))
            consented |= {decided.key}
        elif not isinstance(decided, Refusal):
            return decided
        else:
            may_fit = False
            if decided.rule == BUDGET and not swept and context.may_fit_now is not None:
                swept = True
                looked = yield from context.may_fit_now(context, decided.available or NOTHING)
                may_fit, waits = looked.may_fit, looked.waits
            if may_fit:
                continue
            if seat is not None and decided.rule == BUDGET:
                seat.leave()  # others may need it to end
                seated = False
            short = yield from queue.wait(decided)
            if short is not None:
                reason = short.reason + (waits if short.rule == BUDGET else "")
                raise (yield from no(replace(short, reason=reason)))


def _asked_too_often(unasked: Unasked, consented: Consented) -> Refusal | None:
    if len(consented) < _MOST_QUESTIONS:
        return None
    what, times = unasked.subject.shown, len(consented)
    return Refusal(
        APPROVAL,
        f"{what}: its cost has changed {times} times while approvers were asked",
        unasked.subject.amount,
        error=ApprovalDenied,
        advice="Ask again if it matters, or go on without.",
    )


def _shown(
    change: Callable[[LedgerView, Consented], T],
    consented: Consented,
    context: Context,
    waited: Mapping[str, Any] | None,
    view: LedgerView,
) -> T:
    decided = change(view, consented)
    if waited is not None and not isinstance(decided, Refusal | Unasked):
        view.record(context.node_id, "event", facts=waited)  # a report says how long its calls waited for a slot
    return decided

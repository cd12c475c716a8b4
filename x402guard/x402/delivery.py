"""How the answer to a paid request ended: what that changes of its purchase, and for the guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from x402guard.flow.admission import check_clock, check_standing
from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, Transact
from x402guard.flow.request import RequestFacts
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Delivery, Hold, HoldState
from x402guard.ledger.purchases import Presentation, hand_over, lose, presentation_of, take_over
from x402guard.ledger.sessions import PAYER_MARK, check_payer
from x402guard.ledger.view import LedgerView, Scope
from x402guard.policy.guards import guard_marks, note_end
from x402guard.policy.step_guard import StepEnd
from x402guard.policy.steps import run_of, step_of

AnswerEnd = Literal["whole", "late", "cut"]
"""How a paid answer ended: handed over; late or broken by the server; cut off on the caller's side."""


class Ending(Struct, frozen=True):
    """What the end of an answer changes, the marks of its scope, and whether it restrains what follows."""

    change: Callable[[LedgerView], Hold]
    marks: tuple[MarkKey, ...] = ()
    durable: bool = False


def ending_of(context: Context, hold: Hold, end: AnswerEnd | None, presentation: Presentation | None = None) -> Ending:
    """Return what the *end* of the answer to a *presentation*, by default to the last one, changes; None: nothing yet.

    A purchase whose answer was lost stays open. One that is late or broken is a failure for the guards as well. The
    payment itself is unchanged.
    """
    presentation, step = presentation or presentation_of(hold), step_of(hold)
    if end is None:
        return Ending(lambda view: view.known_hold(hold.id))
    if end == "cut":
        return Ending(lambda view: lose(view, presentation))
    if end == "late":

        def late(view: LedgerView) -> Hold:
            note_end(view, context.policy, step, StepEnd(hold.id, "failed", late=True, begun_ms=hold.created_ms))
            return lose(view, presentation)

        return Ending(late, guard_marks(context.policy, step, ending=True), durable=True)
    if not _is_noted(context, presentation):
        return Ending(lambda view: _give(context, view, presentation))
    bought, doubted = bought_mark(context, hold.purpose.fingerprint), doubted_mark(context, step.name)

    def whole(view: LedgerView) -> Hold:
        given = _give(context, view, presentation)
        if presentation_of(given) != presentation or given.delivery is not Delivery.DONE:
            return given
        if context.policy.repeat != "allow":
            earlier = (view.mark(bought) or {}).get("hold")
            if earlier != hold.id:
                view.put_mark(bought, {"hold": hold.id, "before": earlier})
        known = view.mark(doubted)
        if known is not None and known["hold"] == hold.id:
            view.put_mark(doubted, {"hold": hold.id, "until": 0})
        return given

    return Ending(whole, (bought, doubted))


def _give(context: Context, view: LedgerView, presentation: Presentation) -> Hold:
    """Hand a purchase over, unless its answer was lost on the way to its caller before this change is written."""
    return (lose if presentation in context.cut_off else hand_over)(view, presentation)


def late_delivery(context: Context, presentation: Presentation, end: AnswerEnd | None) -> Delivery | None:
    """Return what another process writes of a purchase whose answer has ended; None: it stays open.

    It stays open also where marks say that it was handed over, because only this process writes them.
    """
    if end == "whole":
        return None if _is_noted(context, presentation) else Delivery.DONE
    return None if end is None else Delivery.LOST


def _is_noted(context: Context, presentation: Presentation) -> bool:
    """True if marks say that an answer was handed over: the policy asks about repeats, or the payment was in doubt."""
    return context.policy.repeat != "allow" or presentation[1] > 0


def bought_mark(context: Context, fingerprint: str) -> MarkKey:
    """Return the key of the mark that a run has bought a request and was given its answer (``Policy.repeat``)."""
    return "bought", f"{run_of(context.node_id)} {fingerprint}"


def doubted_mark(context: Context, route: str) -> MarkKey:
    """Return the key of the mark that a run has a payment in doubt at a route."""
    return "doubted", f"{run_of(context.node_id)} {route}"


MIN_REMAINING_S: Final = 10
"""A payment in doubt is presented again only while it is valid for more than this many seconds."""


def has_time(view: LedgerView, hold: Hold) -> bool:
    """True if a payment is valid for long enough to be presented again."""
    return hold.deadline_unix - view.now_unix > MIN_REMAINING_S


def carry(context: Context, request: RequestFacts) -> Flow[Hold | None]:
    """Take the payment of an earlier hop along: its answer has led to this request on the same origin, which asks for money.

    It is the same payment, so it costs nothing more. Returns None if it cannot be presented any more.
    """
    hold_id, begun = request.paid_by or "", list[Presentation]()

    def change(view: LedgerView) -> Hold | None:
        hold = view.hold(hold_id)
        if hold is None or check_standing(view, context) is not None or check_clock(view) is not None:
            return None
        check_payer(view, context.payer)
        if hold.state not in _PRESENTABLE or not has_time(view, hold):
            return None
        if presentation_of(hold) != (hold_id, request.presented) or hold.delivery is Delivery.FORGIVEN:
            return None  # another call has it by now
        taken = take_over(view, hold, instance=context.instance)
        begun.append(presentation_of(taken))
        context.in_flight[begun[-1]] = context.in_flight.pop(presentation_of(hold), taken.purchase_key)
        context.between_hops.pop(presentation_of(hold), None)
        return taken

    try:
        carried: Hold | None = yield Transact(
            Scope(nodes=(context.node_id,), holds=(hold_id,), marks=(PAYER_MARK,), durable=True), change
        )
    except BaseException:
        for each in begun:
            context.in_flight.pop(each, None)
        raise
    return carried


_PRESENTABLE: Final = frozenset({HoldState.HELD, HoldState.CAPTURED})


def note_cut(context: Context, *presentations: Presentation) -> Flow[None]:
    """Record that answers did not reach their callers. They are remembered until the ledger has it.

    A later purchase is not begun before. Raises ``LedgerUnavailable``.
    """
    context.cut_off.update(presentations)
    holds = tuple(dict.fromkeys(hold_id for hold_id, _ in presentations))
    bought: tuple[MarkKey, ...] = ()
    if context.policy.repeat != "allow":
        known = yield Transact(Scope(holds=holds), lambda view: list(filter(None, map(view.hold, holds))))
        bought = tuple({bought_mark(context, hold.purpose.fingerprint) for hold in known})

    def change(view: LedgerView) -> None:
        for presentation in presentations:
            if view.hold(presentation[0]) is not None and lose(view, presentation).delivery is Delivery.LOST:
                for key in bought:
                    _forget_bought(view, key, presentation[0])

    # Durable, because a power cut that took it back would leave the answer handed over.
    yield Transact(Scope(holds=holds, marks=bought, durable=True), change)
    context.cut_off.difference_update(presentations)


def _forget_bought(view: LedgerView, key: MarkKey, hold_id: str) -> None:
    """Take back that a run was given the answer to a request, if *hold_id* says so; an earlier one still does."""
    row = view.mark(key)
    if row is not None and row["hold"] == hold_id:
        view.put_mark(key, {"hold": row.get("before"), "before": None})


def note_answer_end(context: Context, presentation: Presentation, end: AnswerEnd) -> Flow[None]:
    """Record whether a paid answer was handed over. A purchase whose answer was lost stays open.

    The end of an earlier presentation says nothing about a later one.
    """
    scope = Scope(holds=(presentation[0],))
    if end == "cut":
        yield from note_cut(context, presentation)
    elif end == "whole" and not _is_noted(context, presentation):
        yield Transact(scope, lambda view: _give(context, view, presentation))
    else:
        hold = yield Transact(scope, lambda view: view.known_hold(presentation[0]))
        ending = ending_of(context, hold, end, presentation)
        where = Scope(nodes=(context.node_id,), holds=(hold.id,)) if end == "late" else scope
        yield Transact(replace(where, marks=ending.marks, durable=ending.durable), ending.change)

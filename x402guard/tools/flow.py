"""The flows of tools that no transport sees: held before they run and captured after, or charged at once. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import force_setattr

from x402guard.errors import ConfigError, LedgerUnavailable, PaymentRefused
from x402guard.flow import short_way
from x402guard.flow.admission import Seat, check_standing, hold_or_refuse
from x402guard.flow.capture import Bill, capture_bill, give_back, write_void
from x402guard.flow.context import Context
from x402guard.flow.effects import Checkpoint, Compute, Flow, Notify, Transact, error_name, transact_anyway
from x402guard.flow.receipt import Receipt, receipt_of
from x402guard.flow.refusals import refused
from x402guard.frozen import replace
from x402guard.kernel.rows import Evidence, Hold, HoldKind, HoldState, Nanos, Purpose
from x402guard.ledger.authorize import Refusal, authorize, check_room, is_plain, record_excused
from x402guard.ledger.bills import STATED
from x402guard.ledger.events import Capture
from x402guard.ledger.transitions import apply, begin_plainly, spend_plainly
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars
from x402guard.policy.guards import guard_marks, judge_step, note_end, note_taken, pass_plainly
from x402guard.policy.judge import Consented, Unasked, effective_verdict, objection, verdict_facts, verdict_of
from x402guard.policy.reach import judge_reach
from x402guard.policy.step_guard import Outcome, StepEnd, Unusual
from x402guard.policy.steps import Step, step_of, tool_key
from x402guard.policy.verdicts import Narrow, Subject, Verdict
from x402guard.tools.arguments import Readable, Seen, fingerprint

TOOL_HOLD_S: Final = 900
"""The default of ``lifetime_s``: seconds after which a tool without a reported end is captured at its ceiling."""


_NO_SUBJECT: Final = Subject(HoldKind.TOOL, ("",), Nanos(0))


class ToolCall(Struct, frozen=True):
    """One use of a tool.

    Attributes:
        tool: its name, as in reports.
        amount: its cost or its ceiling, in nano-dollars.
        entropy: 32 random bytes, from which its hold's id derives.
        arguments: its arguments as plain JSON, or None if unknown. They are not stored in the ledger.
        fingerprint: their SHA-256 in hex, or "" for None.
        lifetime_s: seconds after which its hold is captured at the ceiling if its end is not reported.
        fixed: True if the amount is the exact cost.
        needs: names of the required arguments.
        known: names that a rule can remove; None for any name.
        groups: name of the ``**`` parameter → the names in it.
        shown: its arguments for approvers and the owner's code. They are not stored in the ledger.
        hold_id: the id of its hold; it differs from that of a payment or an LLM call with the same random bytes.
        subject: what the owner's rules see of it.
    """

    tool: str
    amount: Nanos
    entropy: bytes
    arguments: Mapping[str, Any] | None = None
    lifetime_s: int = TOOL_HOLD_S
    fixed: bool = False
    needs: frozenset[str] = frozenset()
    known: frozenset[str] | None = None
    groups: Mapping[str, frozenset[str]] = {}
    shown: Readable | Seen | None = None
    fingerprint: str = ""
    hold_id: str = ""
    subject: Subject = _NO_SUBJECT

    def __post_init__(self) -> None:
        force_setattr(self, "fingerprint", fingerprint(self.arguments))
        force_setattr(self, "hold_id", hashlib.sha256(b"tool call" + self.entropy).hexdigest())
        force_setattr(self, "subject", Subject(HoldKind.TOOL, (self.tool,), self.amount, arguments=self.shown))

    def __repr__(self) -> str:
        return f"ToolCall({self.tool!r}, {self.amount})"  # not its arguments


class ToolEnd(Struct, frozen=True):
    """How a use of a tool ended.

    Attributes:
        amount: its cost in nano-dollars, or None if not reported: then the ceiling counts.
        void: the reason why it was not billed, or None if it was or may have been billed.
        note: a note for the ledger.
        forgotten: True if it succeeded and its caller reported no cost: the owner is notified.
        outcome: ok, failed or unknown.
    """

    amount: Nanos | None = None
    void: str | None = None
    note: str = ""
    forgotten: bool = False
    outcome: Outcome = "ok"


class HeldTool(Struct, frozen=True):
    """A use of a tool that may begin.

    Attributes:
        hold: the hold as committed.
        ceiling: the nano-dollars captured if no cost is reported.
        narrow: the narrowing by the owner's rules, or None.
        approved: the arguments that an approver has allowed, or None if none was asked.
    """

    hold: Hold
    ceiling: Nanos
    narrow: Narrow | None = None
    approved: Approved | None = None


class Approved(Struct, frozen=True):
    """The arguments of a use that an approver has allowed, or that the owner's ``classify`` has judged.

    Attributes:
        digest: their SHA-256, without what a rule removes; "" if unknown.
        narrow: the narrowing by the owner's rules, or None.
        asks: an approver was asked.
    """

    digest: str
    narrow: Narrow | None
    asks: bool = True


def check_tool(tool: object) -> str:
    """Return a tool's name as a plain string. Raises ``ConfigError`` for a name that reports cannot print."""
    if not isinstance(tool, str):
        raise ConfigError(f"tool: a {type(tool).__name__} is not a name for a tool; write a string such as 'serp'")
    name = str.__str__(tool)  # a subclass may override __str__
    if not name or not name.isprintable() or len(name) > 200:
        raise ConfigError(f"tool: {name[:60]!a} is not a name for a tool; write a string such as 'serp'")
    return name


def hold_tool(context: Context, call: ToolCall, seat: Seat | None = None) -> Flow[HeldTool]:
    """Hold the ceiling of a tool, durably. Raises the refusal or ``LedgerUnavailable``, with nothing held.

    Takes *seat*, if given, first; the caller releases it.
    """

    def undo(error: BaseException) -> Flow[None]:
        return give_back(context, call.hold_id, f"the tool never ran: {error_name(error)}", error)

    judged = yield from judge_tool(context, call)
    if isinstance(judged, Refusal):
        raise (yield from refused(context, judged, of=(HoldKind.TOOL, call.tool)))
    call, verdict = judged
    call, approved = yield from _approved(call, verdict)
    step = _step(context, call)
    change = _holding(context, call, step, verdict)
    held = yield from hold_or_refuse(
        context, _scope(context, call, step), change, undo, refuse=_refuse(context, call), seat=seat
    )
    try:
        yield Checkpoint()  # if cancelled during the write, the hold is voided before the tool runs
    except GeneratorExit:
        raise
    except BaseException as error:
        yield from undo(error)
        raise
    return HeldTool(held, call.amount, verdict.narrow, approved)


def _approved(call: ToolCall, verdict: Verdict) -> Flow[tuple[ToolCall, Approved | None]]:
    """Return the call as an approver will be shown it, and what they, or the owner's code, will have judged."""
    asks = verdict.action == "ask"
    if asks and isinstance(call.shown, Readable):
        call = yield Compute(lambda _now_ms: _seen(call), quick=False)
    if not asks and not isinstance(call.shown, Seen):
        return call, None
    return call, Approved(call.shown.digest if isinstance(call.shown, Seen) else "", verdict.narrow, asks=asks)


def _seen(call: ToolCall) -> ToolCall:
    """Return the call with its arguments as they are now."""
    return replace(call, shown=call.shown.seen()) if isinstance(call.shown, Readable) else call


def judge_tool(context: Context, given: ToolCall) -> Flow[tuple[ToolCall, Verdict] | Refusal]:
    """Return a use of a tool narrowed by the owner's rules, and their verdict on it; or a refusal.

    In shadow mode it is not narrowed, and a refusal is a verdict that denies.
    """
    excluded = judge_reach(context.reach, tool=given.tool)
    if excluded is not None:
        return (given, _denial(excluded)) if context.shadow else excluded
    risk = context.policy.risk
    quick = risk is None or risk.classify is None

    def job(_now_ms: int) -> tuple[ToolCall, Verdict] | Refusal:
        call = given if quick else _seen(given)  # what the owner's code judges is what an approver is shown
        before = verdict_of(context.policy, call.subject, asks=context.asks)
        if before.narrow is None:
            return call, before
        narrowed = _narrowed(call, before)
        if context.shadow:
            return call, _denial(narrowed) if isinstance(narrowed, Refusal) else replace(before, narrow=None)
        if isinstance(narrowed, Refusal):
            return narrowed
        after = verdict_of(context.policy, narrowed.subject, asks=context.asks)  # the rules judge the narrowed amount
        return narrowed, replace(after, narrow=before.narrow, narrowed_by=before.narrowed_by)

    if quick:
        return job(0)  # it depends on no time, and an effect would cost more than it does
    answer: tuple[ToolCall, Verdict] | Refusal = yield Compute(job, quick=False)
    return answer


def _denial(refusal: Refusal) -> Verdict:
    return Verdict("deny", refusal.rule, refusal.reason, error=refusal.error)


def _narrowed(call: ToolCall, verdict: Verdict) -> ToolCall | Refusal:
    """Return a use of a tool narrowed by *verdict*, or a refusal."""
    narrow, rule = verdict.narrow, verdict.narrowed_by
    if narrow is None:
        return call
    lost = sorted(call.needs & frozenset(narrow.remove))
    if lost:
        return Refusal(
            rule, f"rule {rule!r} removes {lost[0]!r}, but {call.tool} cannot be called without it", call.amount
        )
    unknown = [] if call.known is None else sorted(frozenset(narrow.remove) - call.known)
    if unknown:
        reason = f"rule {rule!r} removes {unknown[0]!r}, but it is unknown which of {call.tool}'s arguments that is"
        return Refusal(rule, reason, call.amount)
    removed = frozenset(narrow.remove).union(*(call.groups.get(name, ()) for name in narrow.remove))
    kept, shown = _without(removed, call.arguments), None if call.shown is None else call.shown.without(removed)
    if narrow.most is None or narrow.most >= call.amount:
        return replace(call, arguments=kept, shown=shown)
    if call.fixed:
        cost, most = format_dollars(call.amount), format_dollars(narrow.most)
        reason = f"rule {rule!r} narrows {call.tool} to ${most}, but it costs ${cost}"
        return Refusal(rule, reason, call.amount, narrow.most)
    return replace(call, arguments=kept, shown=shown, amount=narrow.most)


def _without(removed: frozenset[str], arguments: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if arguments is None:
        return None
    return {name: value for name, value in arguments.items() if name not in removed}


def charge_tool(context: Context, call: ToolCall) -> Flow[Receipt]:
    """Hold and capture the cost of a tool in one transaction. Raises as ``hold_tool`` does."""
    judged = yield from judge_tool(context, call)
    if isinstance(judged, Refusal):
        raise (yield from refused(context, judged, of=(HoldKind.TOOL, call.tool)))
    call, _ = yield from _approved(*judged)
    verdict, step = judged[1], _step(context, call)
    change = _holding(context, call, step, verdict, Capture(call.amount, Evidence.ESTIMATE))

    def undo(error: BaseException) -> Flow[None]:
        # A captured charge stays, because the caller reported it.
        return give_back(context, call.hold_id, f"the tool never ran: {error_name(error)}", error)

    try:
        captured = yield from hold_or_refuse(
            context, _scope(context, call, step), change, undo, refuse=_refuse(context, call)
        )
    except LedgerUnavailable as error:
        error.advice = "The charge may be in the ledger: check session.spent before you repeat it."
        raise
    return receipt_of(captured)


def end_tool(context: Context, hold: Hold, end: ToolEnd, *, ceiling: Nanos) -> Flow[Receipt]:
    """Record the end of a tool: capture its cost, also above the ceiling, or else the ceiling; or void it.

    If the ledger cannot be written, nothing is raised: the hold counts in full, and later lapses to its ceiling.
    """
    try:
        if end.void is not None:
            voided = (yield from transact_anyway(*write_void(context, hold.id, end.void, step=step_of(hold)))) or hold
            receipt = replace(receipt_of(voided), note=end.void)
            return replace(receipt, amount=Decimal(0)) if voided.state is HoldState.VOIDED else receipt
        if end.amount is None:
            bill = Bill(
                ceiling, Evidence.ASSUMED, note=end.note
            )  # not hold.amount: a free tool is held at 1 nano-dollar
        else:
            bill = Bill(end.amount, Evidence.ESTIMATE, note=end.note)
        ended = yield from capture_bill(context, hold, bill, outcome=end.outcome)
        if end.forgotten:
            yield Notify(
                f"tool {hold.purpose.tool!r}: {end.note}, so its ceiling ${format_dollars(ceiling)} is captured"
            )
        elif end.amount is not None and end.amount > hold.amount:
            cost, most = format_dollars(end.amount), format_dollars(ceiling)
            yield Notify(f"tool {hold.purpose.tool!r}: it cost ${cost}, above its ceiling ${most}")
    except LedgerUnavailable as error:
        problem = f"the ledger could not be written: {error}"
        yield Notify(f"tool {hold.purpose.tool!r}: {problem}; its hold {hold.id} counts in full")
        return replace(receipt_of(hold), in_doubt=True, note=problem)
    return replace(receipt_of(ended), note=end.note)


def check_free(context: Context, call: ToolCall, seat: Seat | None) -> Flow[tuple[Narrow | None, Approved | None]]:
    """Check a tool that costs no dollars. Returns its narrowing by the rules, and what an approver has allowed.

    ``end_free`` records its end.

    Raises the refusal: of a tripped or closed session, a timeout, an open circuit or another guard, or a rule.
    """
    judged = yield from judge_tool(context, call)
    if isinstance(judged, Refusal):
        raise (yield from refused(context, judged, of=(HoldKind.TOOL, call.tool)))
    call, verdict = judged
    call, approved = yield from _approved(call, verdict)
    step = _step(context, call)

    def change(view: LedgerView, consented: Consented) -> bool | Unasked | Refusal:
        refusal = (
            check_standing(view, context)
            or judge_step(view, context.policy, step)
            or judge_step(view, context.policy, step.at(Nanos(0)))
            or _unconsented(call, effective_verdict(view, verdict, call.subject), consented)
        )
        if refusal is None:
            record_excused(view, context.node_id)
            note_taken(view, context.policy, step, call.hold_id)
            _note_medium(view, call, verdict)
        return refusal or True

    def undo(_error: BaseException) -> Flow[None]:
        yield from ()  # nothing to undo

    marks = guard_marks(context.policy, step)
    scope = Scope(nodes=(context.node_id,), marks=marks, durable=True)
    yield from hold_or_refuse(context, scope, change, undo, refuse=_refuse(context, call), seat=seat)
    return verdict.narrow, approved


def end_free(context: Context, call: ToolCall, *, outcome: Outcome) -> Flow[None]:
    """Count the end of a tool that costs no dollars for the guards. Notifies, and never raises, if the ledger fails."""
    step = Step(HoldKind.TOOL, call.tool, "", context.node_id)
    marks = guard_marks(context.policy, step, ending=True)
    if not marks:
        return

    def change(view: LedgerView) -> None:
        note_end(view, context.policy, step, StepEnd(call.hold_id, outcome))

    try:
        yield Transact(Scope(marks=marks), change)
    except LedgerUnavailable as error:
        yield Notify(f"tool {call.tool!r}: the ledger could not be written: {error}")


def _unconsented(call: ToolCall, verdict: Verdict, consented: Consented) -> Unasked | Refusal | None:
    # Without comparable arguments an approval covers only this use; else those that the approver is shown.
    shown = (call.shown.digest,) if verdict.action == "ask" and isinstance(call.shown, Seen) else ()
    unasked = Unasked(call.subject, verdict, (call.fingerprint or call.hold_id, *shown))
    if verdict.action == "ask":
        return None if unasked.key in consented else unasked
    return objection(verdict, unasked.subject)


def _note_medium(view: LedgerView, call: ToolCall, verdict: Verdict) -> None:
    if verdict.level == "MEDIUM":
        message = f"tool {call.tool!r} has medium risk and runs"
        view.tell("risk_medium", "info", message, facts={"tool": call.tool}, logged_only=True)


def _scope(context: Context, call: ToolCall, step: Step) -> Scope:
    marks = guard_marks(context.policy, step)
    return Scope(nodes=(context.node_id,), holds=(call.hold_id,), marks=marks, durable=True)


def _refuse(context: Context, call: ToolCall) -> Callable[[Refusal], Flow[PaymentRefused]]:
    return partial(refused, context, of=(HoldKind.TOOL, call.tool))


def _step(context: Context, call: ToolCall) -> Step:
    loop = context.policy.loop
    key = ""
    if loop is not None:
        key = tool_key(call.tool, call.arguments, loop.ignored, call.amount, similar=loop.similar)
    return Step(HoldKind.TOOL, call.tool, key, context.node_id, call.amount)


def _holding(
    context: Context, call: ToolCall, step: Step, verdict: Verdict, end: Capture | None = None
) -> Callable[[LedgerView, Consented], Hold | Unasked | Refusal]:
    """Return the change that holds the ceiling of a use; given its *end*, it captures the use as well."""

    def general(view: LedgerView, consented: Consented) -> Hold | Unasked | Refusal:
        standing = None if end is None else view.hold(call.hold_id)
        held = standing or _hold(view, consented, context=context, call=call, step=step, verdict=verdict)
        if end is None or not isinstance(held, Hold):
            return held
        if standing is None:  # the tool has not run yet, and its end is never reported
            note_end(view, context.policy, step.at(call.amount), StepEnd(held.id, "unknown"))
        return apply(view, held.id, end, STATED)

    def short(view: LedgerView) -> Hold | Unusual:
        return _hold_plainly(view, context=context, call=call, step=step, verdict=verdict, end=end)

    return lambda view, consented: short_way.decide(view, short, lambda same: general(same, consented))


def _hold(
    view: LedgerView, consented: Consented, *, context: Context, call: ToolCall, step: Step, verdict: Verdict
) -> Hold | Unasked | Refusal:
    """Hold the ceiling of a use, refuse it, or return a question for approval."""
    refusal = (
        check_standing(view, context)
        or judge_step(view, context.policy, step)
        or judge_step(view, context.policy, step.at(call.amount))
    )
    if refusal is not None:
        return replace(refusal, requested=call.amount)
    unasked = _unconsented(call, effective_verdict(view, verdict, call.subject), consented)
    if unasked is not None:
        return check_room(view, context.node_id, call.amount, context.undoing) or unasked
    hold = _new_hold(view, context, call, step)
    written = authorize(view, hold, _facts(hold, call, verdict), context.undoing)
    if not isinstance(written, Refusal):
        note_taken(view, context.policy, step, hold.id)
        _note_medium(view, call, verdict)
    return written


_STOPPED: Final = Unusual("a kill file, a clock that has jumped, or a hold that has lapsed")
_JUDGED: Final = Unusual("the owner's rules do not simply allow it")
_CLOSE: Final = Unusual("its budgets leave more to decide")


def _hold_plainly(
    view: LedgerView, *, context: Context, call: ToolCall, step: Step, verdict: Verdict, end: Capture | None = None
) -> Hold | Unusual:
    """Do what ``_hold`` does for an ordinary use, in one go; given its *end*, capture it in full as well."""
    if view.killed_by or view.ahead_ms > context.max_clock_jump_ms or view.due:
        return _STOPPED
    if verdict.action != "allow" or not call.amount:
        return _JUDGED
    hold = _new_hold(view, context, call, step)
    if not is_plain(view, hold, context.undoing, spends=end is not None):
        return _CLOSE
    unusual = pass_plainly(view, context.policy, step)
    if unusual is not None:
        return unusual
    _note_medium(view, call, verdict)
    facts = _facts(hold, call, verdict)
    return begin_plainly(view, hold, facts) if end is None else spend_plainly(view, hold, facts, end, STATED)


def _new_hold(view: LedgerView, context: Context, call: ToolCall, step: Step) -> Hold:
    return Hold(
        id=call.hold_id,
        node_id=context.node_id,
        kind=HoldKind.TOOL,
        amount=Nanos(max(1, call.amount)),
        created_ms=view.now_ms,
        deadline_unix=view.now_unix + call.lifetime_s,
        flying_since_ms=view.now_ms,
        instance=context.instance,
        purpose=Purpose(tool=call.tool, fingerprint=call.fingerprint, step=step.key),
    )


def _facts(hold: Hold, call: ToolCall, verdict: Verdict) -> dict[str, Any]:
    """Return what the journal keeps of a use."""
    facts = {"kind": HoldKind.TOOL, "amount": hold.amount, "tool": call.tool, "deadline": hold.deadline_unix}
    facts |= verdict_facts(verdict)
    if call.fingerprint:
        facts["arguments"] = call.fingerprint
    return facts

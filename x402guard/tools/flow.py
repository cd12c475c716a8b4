"""What a tool costs that no transport sees: held before it runs, captured when it has; or charged at once. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any, Final

from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.flow.admission import Seat, check_standing, hold_or_refuse
from x402guard.flow.capture import Bill, book, give_back, write_void
from x402guard.flow.context import Context
from x402guard.flow.effects import Checkpoint, Compute, Flow, Notify, Transact, error_name, transact_anyway
from x402guard.flow.receipt import Receipt, receipt_of
from x402guard.flow.refusals import refused
from x402guard.ledger.authorize import Refusal, authorize, check_room
from x402guard.ledger.model import Evidence, Hold, HoldKind, HoldState, Purpose
from x402guard.ledger.transitions import Capture, apply
from x402guard.ledger.view import LedgerView, Notice, Scope
from x402guard.money import Nanos, format_dollars
from x402guard.policy.guards import (
    guard_marks,
    judge_step,
    note_end,
    note_taken,
)
from x402guard.policy.judge import Consented, Unasked, objection, verdict_facts, verdict_of
from x402guard.policy.step_guard import Outcome, StepEnd
from x402guard.policy.steps import Step, step_of, tool_key
from x402guard.policy.verdicts import Narrow, Subject, Verdict
from x402guard.tools.arguments import fingerprint

TOOL_HOLD_S: Final = 900
"""A tool whose end nobody reports is captured at its ceiling after this many seconds, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One use of a tool.

    Attributes:
        tool: its name, as it stands in reports.
        amount: nano-dollars: what it costs, or costs at most.
        entropy: 32 random bytes, from which its hold's id derives.
        arguments: its arguments as plain JSON, or None where they were not told. They go into no book.
        fingerprint: their SHA-256 in hex, or "" for None.
        lifetime_s: seconds after which its hold counts in full, if nobody says how it ended.
        fixed: the amount is what it costs, and cannot be less.
        needs: names of the arguments that it cannot be called without.
        known: names that can be left out; None for any.
        groups: name of what gathers others (``**more``) → the names that it gathers.
        shown: its arguments for people and for the owner's own code; they stand in no book.
    """

    tool: str
    amount: Nanos
    entropy: bytes
    arguments: Mapping[str, Any] | None = field(default=None, repr=False)
    lifetime_s: int = TOOL_HOLD_S
    fixed: bool = False
    needs: frozenset[str] = frozenset()
    known: frozenset[str] | None = None
    groups: Mapping[str, frozenset[str]] = field(default_factory=dict)
    shown: Mapping[str, Any] | None = field(default=None, repr=False)
    fingerprint: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", fingerprint(self.arguments))

    @property
    def hold_id(self) -> str:
        """The id of its hold: another than that of a payment or an LLM call of the same random bytes."""
        return hashlib.sha256(b"tool call" + self.entropy).hexdigest()


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """How a use of a tool ended.

    Attributes:
        amount: nano-dollars that it cost, or None where nobody says: the ceiling counts.
        void: why it was not billed, or None where it was, or may have been.
        note: for the books.
        forgotten: it ended well, and its caller said nothing: people ought to know.
        well: it did what it is for; None says nothing of that.
    """

    amount: Nanos | None = None
    void: str | None = None
    note: str = ""
    forgotten: bool = False
    outcome: Outcome = "ok"


@dataclass(frozen=True, slots=True)
class HeldTool:
    """A use of a tool that may begin.

    Attributes:
        hold: as committed.
        ceiling: nano-dollars that it costs where nobody says.
        narrow: what the owner's rules leave of it; None for all.
        fingerprint: of the arguments that it was held, and asked, for.
    """

    hold: Hold
    ceiling: Nanos
    narrow: Narrow | None = None
    fingerprint: str = ""


def check_tool(tool: object) -> str:
    """Return a tool's name as plain text. Raises ``ConfigError`` for what is none: a report has to print it."""
    if not isinstance(tool, str):
        raise ConfigError(f"tool: a {type(tool).__name__} is not a name for a tool; write text such as 'serp'")
    name = str.__str__(tool)  # a subclass may say of itself what it likes
    if not name or not name.isprintable() or len(name) > 200:
        raise ConfigError(f"tool: {name[:60]!a} is not a name for a tool; write text such as 'serp'")
    return name


def hold_tool(context: Context, call: ToolCall, seat: Seat | None = None) -> Flow[HeldTool]:
    """Hold what a tool costs at most, durably. Raises the refusal where it does not fit, ``LedgerUnavailable``; nothing held.

    *seat* is taken first, where one is given; whoever gives it leaves it.
    """

    def undo(error: BaseException) -> Flow[None]:
        return give_back(context, call.hold_id, f"the tool never ran: {error_name(error)}", error)

    judged = yield from judge_tool(context, call)
    if isinstance(judged, Refusal):
        raise (yield from refused(context, judged))
    call, verdict = judged
    step = _step(context, call)
    change = partial(_hold, context=context, call=call, step=step, verdict=verdict)
    held = yield from hold_or_refuse(context, _scope(context, call, step), change, undo, seat=seat)
    try:
        yield Checkpoint()  # cancelled while it was written: it is given back, before the tool has begun
    except GeneratorExit:
        raise
    except BaseException as error:
        yield from undo(error)
        raise
    return HeldTool(held, call.amount, verdict.narrow, call.fingerprint if verdict.action == "ask" else "")


def judge_tool(context: Context, call: ToolCall) -> Flow[tuple[ToolCall, Verdict] | Refusal]:
    """Return a use of a tool as the owner's rules leave it, and what they say of that; or why nothing of it is left."""
    risk = context.policy.risk
    quick = risk is None or risk.classify is None

    def job(_now_ms: int) -> tuple[ToolCall, Verdict] | Refusal:
        before = verdict_of(context.policy, _subject(call), asks=context.asks)
        if before.narrow is None:
            return call, before
        narrowed = _narrowed(call, before)
        if isinstance(narrowed, Refusal):
            return narrowed
        after = verdict_of(
            context.policy, _subject(narrowed), asks=context.asks
        )  # a rule above a sum is about what is left
        return narrowed, replace(after, narrow=before.narrow, narrowed_by=before.narrowed_by)

    answer: tuple[ToolCall, Verdict] | Refusal = yield Compute(job, quick=quick)
    return answer


def _subject(call: ToolCall) -> Subject:
    return Subject(HoldKind.TOOL, (call.tool,), call.amount, arguments=call.shown)


def _narrowed(call: ToolCall, verdict: Verdict) -> ToolCall | Refusal:
    """Return a use of a tool as the owner's rules leave it, or why nothing of it is left."""
    narrow, rule = verdict.narrow, verdict.narrowed_by
    if narrow is None:
        return call
    lost = sorted(call.needs & frozenset(narrow.remove))
    if lost:
        return Refusal(
            rule, f"rule {rule!r} removes {lost[0]!r}, without which {call.tool} cannot be called", call.amount
        )
    unknown = [] if call.known is None else sorted(frozenset(narrow.remove) - call.known)
    if unknown:
        reason = f"rule {rule!r} removes {unknown[0]!r}, and nobody can tell which of {call.tool}'s arguments that is"
        return Refusal(rule, reason, call.amount)
    removed = frozenset(narrow.remove).union(*(call.groups.get(name, ()) for name in narrow.remove))
    kept, shown = (_without(removed, arguments) for arguments in (call.arguments, call.shown))
    if narrow.most is None or narrow.most >= call.amount:
        return replace(call, arguments=kept, shown=shown)
    if call.fixed:
        cost, most = format_dollars(call.amount), format_dollars(narrow.most)
        reason = f"rule {rule!r} narrows {call.tool} to ${most}, and it costs ${cost}"
        return Refusal(rule, reason, call.amount, narrow.most)
    return replace(call, arguments=kept, shown=shown, amount=narrow.most)


def _without(removed: frozenset[str], arguments: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if arguments is None:
        return None
    return {name: value for name, value in arguments.items() if name not in removed}


def charge_tool(context: Context, call: ToolCall) -> Flow[Receipt]:
    """Hold and capture what a tool costs, in one transaction. Raises as ``hold_tool`` does."""
    judged = yield from judge_tool(context, call)
    if isinstance(judged, Refusal):
        raise (yield from refused(context, judged))
    call, verdict = judged
    step = _step(context, call)

    def change(view: LedgerView, consented: Consented) -> Hold | Unasked | Refusal:
        standing = view.hold(call.hold_id)
        if standing is not None:
            return apply(view, standing.id, Capture(call.amount, Evidence.ESTIMATE))
        held = _hold(view, consented, context=context, call=call, step=step, verdict=verdict)
        if not isinstance(held, Hold):
            return held
        # It has not run yet, and how it ends is never said.
        note_end(view, context.policy, step.at(call.amount), StepEnd(held.id, "unknown"))
        return apply(view, held.id, Capture(call.amount, Evidence.ESTIMATE))

    def undo(error: BaseException) -> Flow[None]:
        # What was captured stays so: it costs budget, and was the caller's own word.
        return give_back(context, call.hold_id, f"the tool never ran: {error_name(error)}", error)

    try:
        captured = yield from hold_or_refuse(context, _scope(context, call, step), change, undo)
    except LedgerUnavailable as error:
        error.advice = "The charge may have been booked: look at session.spent before you repeat it."
        raise
    return receipt_of(captured, represented=False)


def end_tool(context: Context, hold: Hold, end: ToolEnd, *, ceiling: Nanos) -> Flow[Receipt]:
    """Write down how a tool ended. What it cost is captured past the ceiling too; the ceiling, where nobody said.

    Books that cannot be written take nothing from the caller: the hold stands in full, and lapses to its ceiling.
    """
    try:
        if end.void is not None:
            voided = (yield from transact_anyway(*write_void(context, hold.id, end.void, step=step_of(hold)))) or hold
            receipt = replace(receipt_of(voided, represented=False), note=end.void)
            return replace(receipt, amount=Decimal(0)) if voided.state is HoldState.VOIDED else receipt
        if end.amount is None:
            bill = Bill(ceiling, Evidence.ASSUMED, note=end.note)  # what is free is held as a nano-dollar
        else:
            bill = Bill(end.amount, Evidence.ESTIMATE, note=end.note)
        ended = yield from book(context, hold, bill, outcome=end.outcome)
        if end.forgotten:
            yield Notify(f"tool {hold.purpose.tool!r}: {end.note}, so its ceiling ${format_dollars(ceiling)} is booked")
        elif end.amount is not None and end.amount > hold.amount:
            cost, most = format_dollars(end.amount), format_dollars(ceiling)
            yield Notify(f"tool {hold.purpose.tool!r}: it cost ${cost}, above its ceiling ${most}")
    except LedgerUnavailable as error:
        problem = f"the books could not be written: {error}"
        yield Notify(f"tool {hold.purpose.tool!r}: {problem}; its hold {hold.id} counts in full")
        return replace(receipt_of(hold, represented=False), in_doubt=True, note=problem)
    return replace(receipt_of(ended, represented=False), note=end.note)


def check_free(context: Context, call: ToolCall, seat: Seat | None) -> Flow[Narrow | None]:
    """Raise the refusal of a tool that costs no dollars: of a session that is tripped or closed, late, at rest, or by a rule.

    Returns what the rules leave of it. What it does is told with ``end_free``.
    """
    judged = yield from judge_tool(context, call)
    if isinstance(judged, Refusal):
        raise (yield from refused(context, judged))
    call, verdict = judged
    step = _step(context, call)

    def change(view: LedgerView, consented: Consented) -> bool | Unasked | Refusal:
        refusal = (
            check_standing(view, context)
            or judge_step(view, context.policy, step)
            or judge_step(view, context.policy, step.at(Nanos(0)))
            or _unconsented(call, verdict, consented)
        )
        if refusal is None:
            note_taken(view, context.policy, step, call.hold_id)
            _note_medium(view, call, verdict)
        return refusal or True

    def undo(_error: BaseException) -> Flow[None]:
        yield from ()  # nothing was written

    marks = guard_marks(context.policy, step)
    scope = Scope(nodes=(context.node_id,), marks=marks, durable=True)
    yield from hold_or_refuse(context, scope, change, undo, seat=seat)
    return verdict.narrow


def end_free(context: Context, call: ToolCall, *, outcome: Outcome) -> Flow[None]:
    """Count how a tool ended that costs no dollars; a ledger that cannot be written takes nothing from its caller."""
    step = Step(HoldKind.TOOL, call.tool, "", context.node_id)
    marks = guard_marks(context.policy, step, ending=True)
    if not marks:
        return

    def change(view: LedgerView) -> None:
        note_end(view, context.policy, step, StepEnd(call.hold_id, outcome))

    try:
        yield Transact(Scope(marks=marks), change)
    except LedgerUnavailable as error:
        yield Notify(f"tool {call.tool!r}: the books could not be written: {error}")


def _unconsented(call: ToolCall, verdict: Verdict, consented: Consented) -> Unasked | Refusal | None:
    # Arguments that nobody can tell apart are one use's alone.
    unasked = Unasked(_subject(call), verdict, (call.fingerprint or call.hold_id,))
    if verdict.action == "ask":
        return None if unasked.key in consented else unasked
    return objection(verdict, unasked.subject)


def _note_medium(view: LedgerView, call: ToolCall, verdict: Verdict) -> None:
    if verdict.level == "MEDIUM":
        message = f"tool {call.tool!r} is of medium risk, and runs"
        view.notices.append(Notice("risk_medium", message, {"tool": call.tool}, pressing=False))


def _scope(context: Context, call: ToolCall, step: Step) -> Scope:
    marks = guard_marks(context.policy, step)
    return Scope(nodes=(context.node_id,), holds=(call.hold_id,), marks=marks, durable=True)


def _step(context: Context, call: ToolCall) -> Step:
    loop = context.policy.loop
    key = "" if loop is None else tool_key(call.tool, call.arguments, loop.ignored)
    return Step(HoldKind.TOOL, call.tool, key, context.node_id, call.amount)


def _hold(
    view: LedgerView, consented: Consented, *, context: Context, call: ToolCall, step: Step, verdict: Verdict
) -> Hold | Unasked | Refusal:
    refusal = (
        check_standing(view, context)
        or judge_step(view, context.policy, step)
        or judge_step(view, context.policy, step.at(call.amount))
    )
    if refusal is not None:
        return replace(refusal, requested=call.amount)
    unasked = _unconsented(call, verdict, consented)
    if unasked is not None:
        return check_room(view, context.node_id, call.amount) or unasked
    hold = Hold(
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
    facts = {"kind": HoldKind.TOOL, "amount": hold.amount, "tool": call.tool, "deadline": hold.deadline_unix}
    facts |= verdict_facts(verdict)
    if call.fingerprint:
        facts["arguments"] = call.fingerprint
    written = authorize(view, hold, facts)
    if not isinstance(written, Refusal):
        note_taken(view, context.policy, step, hold.id)
        _note_medium(view, call, verdict)
    return written

"""Applies events to holds, as the kernel's table allows them.

An event that the table forbids raises ``IllegalTransition`` and leaves the view unchanged. The same event with the same
contents is idempotent; with other contents it is illegal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import asdict, replace

from x402guard.errors import IllegalTransition
from x402guard.kernel.proofs import Cancelled, Proof
from x402guard.kernel.rows import MAX_NANOS, NOTHING, Evidence, Hold, HoldKind, HoldState, Nanos, Node
from x402guard.kernel.table import AUTHORIZE
from x402guard.kernel.windows import closing_ms
from x402guard.ledger.budgets import balance_grants, move_past, note_soft_limits, trip_exceeded
from x402guard.ledger.events import TABLE, Capture, Correct, Event, Expire, Lapse, Note, Reopen, Void
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars
from x402guard.strict_json import json_writer

_HELD, _CAPTURED, _VOIDED, _EXPIRED = HoldState.HELD, HoldState.CAPTURED, HoldState.VOIDED, HoldState.EXPIRED


_RANK: Final = {evidence: rank for rank, evidence in enumerate(Evidence)}


def rank_of(evidence: Evidence) -> int:
    """Return 0 for the best evidence; a larger number is weaker evidence."""
    return _RANK[evidence]


def begin(view: LedgerView, hold: Hold, facts: Mapping[str, Any], proof: Proof | None = None) -> Hold:
    """Write a new hold in state HELD. The function ``authorize`` has already decided that it fits.

    Returns the hold as written, or the stored hold if it has the same contents (a repeated transaction). Raises
    ``IllegalTransition`` if another hold has its id, or if the amount is not in 1 … ``MAX_NANOS``.
    """
    existing = view.hold(hold.id)
    if existing is not None:
        same = (existing.node_id, existing.amount, existing.purchase_key) == (
            hold.node_id,
            hold.amount,
            hold.purchase_key,
        )
        if same and existing.state is _HELD:
            return existing
        raise IllegalTransition(f"hold {hold.id} already exists with other contents")
    if not 0 < hold.amount <= MAX_NANOS:
        raise IllegalTransition(f"a hold of {hold.amount} nano-dollars cannot be written")
    view.take_step(AUTHORIZE, hold, proof)
    view.record(hold.node_id, "authorize", hold_id=hold.id, held=hold.amount, facts=facts)
    balance_grants(view, hold.node_id, None)
    return hold


def begin_plainly(view: LedgerView, hold: Hold, facts: Mapping[str, Any]) -> Hold:
    """Do the same for a new hold on a path of budgets that have all drawn what they use, where it fits."""
    view.take_step(AUTHORIZE, hold)
    view.draw(hold, facts)
    return hold


def spend_plainly(view: LedgerView, hold: Hold, facts: Mapping[str, Any], event: Capture, proof: Proof) -> Hold:
    """Begin a hold and capture it in full, both in one go, where ``begin_plainly`` may and no window or soft limit counts it."""
    view.draw(hold, facts, _facts(hold, event))
    after = replace(_after(hold, event, _CAPTURED, proof), closed_ms=view.clock_ms)
    view.take_step(AUTHORIZE, hold)
    view.take_step("capture", after, proof)
    _log_capture(view, after, event)
    return after


def apply(view: LedgerView, hold_id: str, event: Event, proof: Proof | None = None) -> Hold:
    """Apply one event of the table and return the hold after it. What lowers the amount that it counts needs a *proof*.

    Raises ``IllegalTransition`` if the table or a condition forbids the event; the view is then unchanged.
    """
    hold = view.known_hold(hold_id)
    if _repeats(hold, event):
        return hold
    target = TABLE.get((hold.state, type(event)))
    name = type(event).__name__.lower()
    if target is None:
        raise IllegalTransition(f"{name} is not possible: hold {hold_id} is {hold.state}, ended by {hold.ended_by}")
    objection = _objection(view, hold, event)
    if objection is not None:
        raise IllegalTransition(f"{name} of hold {hold_id}: {objection}")
    after = _after(hold, event, target, proof)
    if after.state is _CAPTURED and not hold.closed_ms:
        after = replace(after, closed_ms=_closed_ms(view, hold, event))
    if type(event) is Capture and _is_plain_end(view, hold, event):
        view.take(hold, event.amount, _facts(after, event))
        view.take_step(name, after, proof)
        note_soft_limits(view, hold.node_id)
        _log_capture(view, after, event)
        return after
    held = (hold.amount if after.state is _HELD else 0) - (hold.amount if hold.state is _HELD else 0)
    counted_before = hold.amount if hold.state is _HELD else hold.captured
    counted_after = after.amount if after.state is _HELD else after.captured
    view.record(
        hold.node_id,
        name,
        hold_id=hold.id,
        held=held,
        captured=after.captured - hold.captured,
        facts=_facts(after, event),
    )
    view.take_step(name, after, proof)
    balance_grants(view, hold.node_id, hold.amount)
    move_past(view, hold, after)
    # ``weigh`` alone reopens. It looks at the limit itself, because a second event may follow.
    if counted_after > counted_before and not isinstance(event, Reopen):
        trip_exceeded(view, hold.node_id)
    note_soft_limits(view, hold.node_id)
    if isinstance(event, Capture):
        _log_capture(view, after, event)
    return after


def _is_plain_end(view: LedgerView, hold: Hold, event: Capture) -> bool:
    """True if a live hold is captured for the first time, by no more than it holds, where no budget has a window.

    Each budget of its path has drawn what it uses: nothing is drawn anew.
    """
    if hold.state is not _HELD or event.amount > hold.amount or hold.closed_ms or view.keeps_idle:
        return False
    return all(node.window is None and node.granted_in == _drawn(node) for node in view.path(hold.node_id))


def _drawn(node: Node) -> int:
    return node.used if node.parent_id is not None else 0


def _closed_ms(view: LedgerView, hold: Hold, event: Event) -> int:
    """Return when a captured hold closes, in unix ms: see ``kernel.windows.closing_ms``."""
    begun_ms = max((node.since_ms for node in view.path(hold.node_id) if node.window is not None), default=0)
    lapses_ms = max(hold.created_ms, hold.deadline_unix * 1000) if isinstance(event, Lapse) else None
    return closing_ms(begun_ms, view.clock_ms, lapses_ms=lapses_ms)


_LOGGED: Final = {HoldKind.PAYMENT: "payment", HoldKind.LLM: "llm_call", HoldKind.TOOL: "tool_use"}


def _log_capture(view: LedgerView, hold: Hold, event: Capture) -> None:
    kind = _LOGGED.get(hold.kind) if view.is_logged else None
    if kind is None:
        return
    purpose = hold.purpose
    what = purpose.tool or f"{purpose.method} {purpose.url}"
    facts = {"hold_id": hold.id, "what": what, "evidence": str(event.evidence)}
    if hold.intent is not None:
        facts["payee"] = hold.intent.payee
    message = f"{kind}: ${format_dollars(event.amount)} for {what} ({event.evidence})"
    view.tell(kind, "info", message, session=hold.node_id, amount=event.amount, facts=facts, logged_only=True)


def was_cancelled(hold: Hold, transaction: str = "") -> bool:
    """True if a hold was voided because the chain showed its cancellation: by *transaction*, if one is named."""
    shown = hold.state is _VOIDED and hold.evidence is Evidence.CHAIN
    return shown and transaction in ("", (hold.proof or "").rpartition("/")[2])


def _was_shown(hold: Hold) -> bool:
    """True if a payment ended by evidence from the chain."""
    taken = hold.state is _CAPTURED and hold.evidence in (Evidence.CHAIN, Evidence.CHAIN_HEAD)
    return hold.intent is not None and (taken or was_cancelled(hold))


def has_lapsed(hold: Hold) -> bool:
    """True if a hold ended because its own deadline was past."""
    return hold.ended_by == _as_json(Lapse())


def _repeats(hold: Hold, event: Event) -> bool:
    match event:
        case Note(doubt, claim):
            answered = claim is not None and doubt is None and hold.doubt is not None
            return hold.state is _HELD and not answered and doubt in (None, hold.doubt) and claim in (None, hold.claim)
        case Correct(amount, evidence, proof):
            return hold.state is _CAPTURED and (amount, evidence, proof) == (hold.captured, hold.evidence, hold.proof)
        case _:
            return hold.ended_by is not None and hold.ended_by == _as_json(event)


def _objection(view: LedgerView, hold: Hold, event: Event) -> str | None:
    """Return which condition forbids an event that the table allows, or None."""
    match event:
        case Note(None, None):
            return "it has neither a doubt nor a claim"
        case Capture(amount) if amount < 0:
            return "an amount cannot be negative"
        case Capture(amount) if hold.kind is HoldKind.PAYMENT and amount > hold.amount:
            return f"{amount} is more than the {hold.amount} that was signed"
        case Expire() if hold.intent is None or not hold.chain_evidence:
            return "only a payment on a readable chain expires"
        case Expire(block_time) if hold.intent is not None and not hold.intent.dead_at(block_time):
            return f"a block of time {block_time} could still take it until {hold.intent.valid_until}"
        case Lapse() if hold.chain_evidence:
            return "the chain can prove how it ended"
        case Lapse() if view.now_unix <= hold.deadline_unix:
            return f"its deadline {hold.deadline_unix} has not passed"
        case Correct():
            return _correction_objection(hold, event)
        case Reopen() if not _was_shown(hold):
            return "only a payment that ended by chain evidence can be reopened"
        case Reopen(block_time) if hold.intent is not None and hold.intent.dead_at(block_time):
            return f"a block of time {block_time} can no longer take it"
        case _:
            return None


def _correction_objection(hold: Hold, event: Correct) -> str | None:
    if event.amount < 0:
        return "an amount cannot be negative"
    on_chain = event.evidence in (Evidence.CHAIN, Evidence.CHAIN_HEAD)
    if hold.state in (_EXPIRED, _VOIDED):
        return None if on_chain else f"it is {hold.state}; only chain evidence can correct it"
    if hold.evidence is None or rank_of(event.evidence) > rank_of(hold.evidence):
        return f"the evidence {event.evidence} is weaker than {hold.evidence}, which it would replace"
    if event.evidence is hold.evidence and not on_chain:
        return f"the evidence {event.evidence} is not better than the present one"
    frees_unproven = event.amount < hold.captured and event.evidence is not Evidence.CHAIN
    head_over_head = hold.evidence is Evidence.CHAIN_HEAD and event.evidence is Evidence.CHAIN_HEAD
    if frees_unproven and not head_over_head:
        return "only final chain evidence lowers a captured amount"
    return None


def _after(hold: Hold, event: Event, target: HoldState, proof: Proof | None) -> Hold:
    match event:
        case Note(doubt, claim):
            # A claim is an answer, so the doubt about a missing answer ends.
            return replace(hold, doubt=doubt or (None if claim else hold.doubt), claim=claim or hold.claim)
        case Capture(amount=amount, evidence=evidence, proof=shown) | Correct(amount, evidence, shown):
            ended_by = hold.ended_by or _as_json(event)
            captured = Nanos(amount)
            return replace(hold, state=target, captured=captured, evidence=evidence, proof=shown, ended_by=ended_by)
        case Lapse():
            return replace(
                hold, state=target, captured=hold.amount, evidence=Evidence.ASSUMED, ended_by=_as_json(event)
            )
        case Reopen():
            return replace(
                hold,
                state=target,
                captured=NOTHING,
                evidence=None,
                proof=None,
                ended_by=None,
                closed_ms=hold.closed_ms if event.same else 0,
                doubt=_UNDONE,
            )
        case Void() if isinstance(proof, Cancelled):
            by = f"{proof.network}/{proof.transaction}"
            return replace(hold, state=target, evidence=Evidence.CHAIN, proof=by, ended_by=_as_json(event))
        case Void() | Expire():
            return replace(hold, state=target, ended_by=_as_json(event))


_UNDONE: Final = "the block that settled it was undone"


_ENCODED: Final = json_writer(sort_keys=True, default=asdict)
"""Writes an event as each version has written it: the texts are compared."""


def _as_json(event: Event) -> str:
    if type(event) is Capture and event.proof is None and event.usage is None and event.note is None:
        return (
            f'{{"amount": {event.amount}, "event": "capture", "evidence": "{event.evidence}", "note": null, "proof": null, '
            '"usage": null}'
        )
    return _ENCODED({"event": type(event).__name__.lower(), **asdict(event)})


def _facts(after: Hold, event: Event) -> dict[str, Any]:
    if isinstance(event, Lapse):
        return {"amount": after.captured, "evidence": Evidence.ASSUMED}
    return {key: value for key, value in asdict(event).items() if value is not None}

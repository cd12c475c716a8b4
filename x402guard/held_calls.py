"""The decisions about an LLM call that are taken inside one ledger transaction: what is held, and what is captured. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.ledger.authorize import BUDGET, Refusal, authorize, check_open, lapse_due
from x402guard.ledger.budgets import room_on_path, trip
from x402guard.ledger.model import WALLET, Claim, Evidence, Hold, HoldKind, HoldState, NodeKind
from x402guard.ledger.tokens import Reservation, count_tokens, record_tokens, soft_mark, soft_warning
from x402guard.ledger.transitions import Capture, Correct, Note, Void, apply, has_lapsed
from x402guard.ledger.view import Change, LedgerView, MarkKey, Scope
from x402guard.metering.bill import Bill
from x402guard.metering.call import Call, limit_field
from x402guard.metering.ceiling import UNBOUNDED_OUTPUT, Ceiling
from x402guard.metering.classify import FixedPrice, Meter, Unmetered
from x402guard.money import Nanos
from x402guard.policy import RequestFacts
from x402guard.policy.guards import give_step_back, guard_marks, judge_amount, judge_step, note_taken
from x402guard.policy.steps import Step, request_key
from x402guard.ports import Usage
from x402guard.purchase import Terms, place_of, purpose_of

__all__ = [
    "HOLD_S",
    "LEAST_FITTED",
    "Booked",
    "Granted",
    "call_id",
    "call_marks",
    "call_scope",
    "call_step",
    "fix_price",
    "grant_call",
    "note_unmetered",
    "tokens_in",
    "write_bill",
    "write_void",
]

HOLD_S: Final = 900
"""A call whose end nobody reports is captured at its ceiling after this many seconds."""

LEAST_FITTED: Final = 1_024
"""An answer of fewer tokens than this is not worth buying: what leaves no room for it is refused."""

_SHARE: Final = 4
"""A limit that we write takes at most one part in this many of what is left."""

DISPUTED: Final = "disputed_usage"


@dataclass(frozen=True, slots=True)
class Granted:
    """A call that may be sent.

    Attributes:
        hold: as committed.
        model: the model, or the place of a fixed price.
        marks: the small rows that its end has to see.
        limit: the output limit that is held for, in tokens for each choice.
        written: the limit is ours and has to be written into the request.
        bound: more output than this, for each choice, is impossible.
        most_tokens: what it takes of a budget of tokens where nobody states what it used.
    """

    hold: Hold
    model: str
    marks: tuple[MarkKey, ...] = ()
    limit: int = 0
    written: bool = False
    bound: int = 0
    most_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Booked:
    """A hold as its end left it, and what people ought to be told, or ""."""

    hold: Hold
    warning: str = ""


@dataclass(frozen=True, slots=True)
class _Choice:
    amount: Nanos
    limit: int
    bound: int
    written: bool = False
    estimated: bool = False


_MEAN: Final = "llm_mean"
_ESTIMATED: Final = "llm_estimated"


def call_id(request: RequestFacts) -> str:
    """Return the id of a request's LLM hold: another than that of the payment which a 402 may ask of the same request."""
    return hashlib.sha256(b"llm call" + request.entropy).hexdigest()


def call_marks(terms: Terms, call: Call, ceiling: Ceiling, meter: Meter) -> tuple[MarkKey, ...]:
    """Return the keys of the small rows that a call's transactions see.

    What the ledger's calls to the model have cost so far; and where means are held, which budgets have such a call out.
    """
    mean = (_MEAN, f"{call.route.provider} {ceiling.rates.priced.model}")
    if meter.settings.unbounded_output != "average" or ceiling.limit is not None:
        return (mean,)
    parts = terms.node_id.split("/")  # a child's id begins with its parent's
    return (mean, (_ESTIMATED, WALLET), *((_ESTIMATED, "/".join(parts[: n + 1])) for n in range(len(parts))))


def call_step(terms: Terms, request: RequestFacts, said: bytes | Mapping[str, Any]) -> Step:
    """Return the step that an LLM call is; *said* is its body, decoded where it was read."""
    loop = terms.policy.loop
    key = "" if loop is None else request_key(HoldKind.LLM, request.method, request.url, said, loop.ignored)
    return Step(HoldKind.LLM, place_of(request), key)


def call_scope(terms: Terms, request: RequestFacts, step: Step, marks: tuple[MarkKey, ...]) -> Scope:
    """Return the rows that ``grant_call`` and ``fix_price`` have to see."""
    seen = (*marks, *guard_marks(terms.policy, terms.node_id, step))
    return Scope(nodes=(terms.node_id,), holds=(call_id(request),), marks=seen, durable=True)


def grant_call(
    view: LedgerView, *, terms: Terms, request: RequestFacts, step: Step, call: Call, ceiling: Ceiling, meter: Meter
) -> Granted | Refusal:
    """Hold what *call* costs at most, on live rows, or refuse it."""
    lapse_due(view)
    closed = check_open(view, terms.node_id)
    refusal = closed or judge_step(view, terms.policy, terms.node_id, step)
    if refusal is not None:
        return refusal
    marks = call_marks(terms, call, ceiling, meter)
    choice = _choose(view, terms.node_id, call, ceiling, meter=meter, marks=marks)
    if isinstance(choice, Refusal):
        return choice
    hold = _new_hold(view, terms, request, step.at(Nanos(max(1, choice.amount))), call.model)
    excess = judge_amount(view, terms.policy, terms.node_id, step.at(choice.amount))
    if excess is not None:
        return excess
    written = authorize(view, hold, _facts(hold, call, ceiling, choice))
    if isinstance(written, Refusal):
        return written
    note_taken(view, terms.policy, terms.node_id, step.at(choice.amount))
    if choice.written:
        facts = {"name": "output_limited", "model": call.model, "output_tokens": choice.limit}
        view.record(terms.node_id, "event", hold_id=hold.id, facts=facts)
    if choice.estimated:
        _note_estimate(view, marks, written)
    most_tokens = ceiling.input_tokens + choice.limit * ceiling.choices
    return Granted(written, call.model, marks, choice.limit, choice.written, choice.bound, most_tokens)


def fix_price(
    view: LedgerView, *, terms: Terms, request: RequestFacts, step: Step, price: FixedPrice
) -> Granted | Refusal:
    """Hold what the owner says one request costs, or refuse it."""
    lapse_due(view)
    refusal = (
        check_open(view, terms.node_id)
        or judge_step(view, terms.policy, terms.node_id, step)
        or judge_amount(view, terms.policy, terms.node_id, step.at(price.amount))
    )
    if refusal is not None:
        return refusal
    hold = _new_hold(view, terms, request, step.at(Nanos(max(1, price.amount))), price.place)
    facts = {
        **_journal_facts(hold, price.place),
        "provider": price.provider,
        "price": {"source": "owner", "fixed": True},
    }
    written = authorize(view, hold, facts)
    if isinstance(written, Refusal):
        return written
    note_taken(view, terms.policy, terms.node_id, step.at(price.amount))
    return Granted(written, price.place)


def _choose(
    view: LedgerView, node_id: str, call: Call, ceiling: Ceiling, *, meter: Meter, marks: tuple[MarkKey, ...]
) -> _Choice | Refusal:
    """Decide on an output limit. The request's own, where it has one; else the setting's way."""
    if ceiling.limit is not None:
        return _Choice(ceiling.amount(ceiling.limit), ceiling.limit, ceiling.limit)
    way = meter.settings.unbounded_output
    if way == "refuse":
        return Refusal(UNBOUNDED_OUTPUT, f"{limit_field(call)}: the request sets no output limit; set one")
    if ceiling.maximum is None:
        return Refusal(
            UNBOUNDED_OUTPUT,
            f"{limit_field(call)}: the request sets no output limit, and nobody says how much {call.model!r} answers with; "
            "set one, or give the model a ModelPrice(max_output=…)",
        )
    most = ceiling.maximum
    bound = max(most, ceiling.rates.priced.context_window or 0)
    mean = view.mark(marks[0]) if way == "average" and not _estimate_is_out(view, marks) else None
    if mean is not None:
        return _Choice(Nanos(-(-int(mean["nanos"]) // int(mean["calls"]))), most, bound, estimated=True)
    # What people say of a model's maximum is made true: it goes into the request.
    said = ceiling.rates.priced.source in ("owner", "session")
    whole = _Choice(ceiling.amount(most), most, most if said else bound, written=said)
    left = room_on_path(view, node_id)
    if way != "fit" or left is None or whole.amount <= left:
        return whole
    return _fit(call, ceiling, left)


def _fit(call: Call, ceiling: Ceiling, left: Nanos) -> _Choice | Refusal:
    share = Nanos(left // _SHARE)
    limit = min(ceiling.affordable(share), ceiling.maximum or 0)
    if limit < LEAST_FITTED:
        least = ceiling.amount(LEAST_FITTED)
        reason = (
            f"{limit_field(call)}: a quarter of what is left pays for {max(limit, 0)} tokens of {call.model!r}, too few to choose "
            f"a limit for you (the least is {LEAST_FITTED}); set one yourself, or finish with what you have"
        )
        return Refusal(BUDGET, reason, least, share)
    return _Choice(ceiling.amount(limit), limit, limit, written=True)


def _estimate_is_out(view: LedgerView, marks: tuple[MarkKey, ...]) -> bool:
    """True where a budget with a limit has a call out that is held at a mean: a second could overshoot beside it."""
    for kind, node_id in marks:
        row = view.mark((kind, node_id))
        if kind == _ESTIMATED and row is not None and row["hold"] and row["until"] >= view.now_unix:
            return True
    return False


def _note_estimate(view: LedgerView, marks: tuple[MarkKey, ...], hold: Hold) -> None:
    for kind, node_id in marks:
        if kind == _ESTIMATED and view.node(node_id).limit is not None:
            view.put_mark((kind, node_id), {"hold": hold.id, "until": hold.deadline_unix})


def _forget_estimate(view: LedgerView, marks: tuple[MarkKey, ...], hold_id: str) -> None:
    for kind, node_id in marks:
        row = view.mark((kind, node_id))
        if kind == _ESTIMATED and row is not None and row["hold"] == hold_id:
            view.put_mark((kind, node_id), {"hold": None, "until": 0})


def note_unmetered(terms: Terms, request: RequestFacts, route: Unmetered) -> tuple[Scope, Change[None]]:
    """Return the transaction that remembers a host whose calls nobody meters: an event, the first time in a budget."""
    key = ("unmetered", f"{terms.node_id} {request.host}")

    def change(view: LedgerView) -> None:
        if view.mark(key) is None:
            view.put_mark(key, {"place": route.place})
            view.record(terms.node_id, "event", facts={"name": "unmetered", "place": route.place})

    return Scope(nodes=(terms.node_id,), marks=(key,)), change


def _new_hold(view: LedgerView, terms: Terms, request: RequestFacts, step: Step, model: str) -> Hold:
    return Hold(
        id=call_id(request),
        node_id=terms.node_id,
        kind=HoldKind.LLM,
        amount=step.amount,
        created_ms=view.now_ms,
        deadline_unix=view.now_unix + HOLD_S,
        flying_since_ms=view.now_ms,
        owner=terms.instance,
        purpose=purpose_of(request, model, step=step.key),
    )


def _journal_facts(hold: Hold, model: str) -> dict[str, Any]:
    purpose = hold.purpose
    return {
        "kind": HoldKind.LLM,
        "amount": hold.amount,
        "model": model,
        "host": purpose.host,
        "request": f"{purpose.method} {purpose.url}",
        "fingerprint": purpose.fingerprint,
        "deadline": hold.deadline_unix,
    }


def _facts(hold: Hold, call: Call, ceiling: Ceiling, choice: _Choice) -> Mapping[str, Any]:
    """What the journal keeps of a call: by which prices it was held, and how its ceiling came about."""
    held = {
        "input_tokens": ceiling.input_tokens,
        "counted_by": ceiling.counted_by,
        "output_tokens": choice.limit,
        "output_by": "the request" if ceiling.limit is not None else ceiling.maximum_from,
        "estimate": choice.estimated,
    }
    return {
        **_journal_facts(hold, call.model),
        "provider": call.route.provider,
        "price": ceiling.rates.facts(),
        "ceiling": held,
    }


def write_void(
    terms: Terms, hold_id: str, reason: str, marks: tuple[MarkKey, ...] = (), *, step: Step | None = None
) -> tuple[Scope, Change[Hold | None]]:
    """Return the transaction that gives back what was never billed, and its *step*: the guards do not count it.

    A hold that was never written is no error.
    """
    seen = () if step is None else guard_marks(terms.policy, terms.node_id, step)

    def change(view: LedgerView) -> Hold | None:
        hold = view.hold(hold_id)
        if hold is not None and hold.state is HoldState.HELD:
            apply(view, hold_id, Void(reason[:300]))
            if step is not None:
                give_step_back(view, terms.policy, terms.node_id, step, hold.created_ms)
        _forget_estimate(view, marks, hold_id)
        return view.hold(hold_id)

    return Scope(nodes=(terms.node_id,), holds=(hold_id,), marks=(*marks, *seen)), change


def write_bill(
    terms: Terms, hold: Hold, bill: Bill, marks: tuple[MarkKey, ...], *, most_tokens: int = 0
) -> tuple[Scope, Change[Booked]]:
    """Return the transaction that captures a cost: its scope, and the change. It is done once; again does nothing.

    What was used is counted among the session's tokens: what is stated, else *most_tokens*.
    """
    restrains = bill.amount > hold.amount or bill.claimed is not None
    tokens = terms.tokens if bill.usage is not None or most_tokens else None
    used = most_tokens if bill.usage is None else tokens_in(bill.usage)
    late = Reservation(f"{hold.id}/tokens", used, terms.instance, llm=True)
    nodes = (terms.node_id,) if tokens is None else (terms.node_id, tokens.node_id)
    seen = marks if tokens is None else (*marks, soft_mark(tokens.node_id))

    def change(view: LedgerView) -> Booked:
        before = view.known_hold(hold.id)
        after = _end(view, before, bill, marks)
        if tokens is None or (before.state is not HoldState.HELD and not has_lapsed(before)):
            return Booked(after)
        in_time = before.state is HoldState.HELD
        reached = count_tokens(view, tokens, used) if in_time else record_tokens(view, tokens, late)
        return Booked(after, soft_warning(view, tokens) if reached else "")

    return Scope(nodes=nodes, holds=(hold.id, late.id), marks=seen, durable=restrains), change


def tokens_in(usage: Usage) -> int:
    """Return the tokens in a usage: what a model was shown, and what it wrote."""
    return usage.get("input_tokens", 0) + usage.get("output_tokens", 0)


def _end(view: LedgerView, now: Hold, bill: Bill, marks: tuple[MarkKey, ...]) -> Hold:
    _forget_estimate(view, marks, now.id)
    if now.state is not HoldState.HELD:
        return _late(view, now, bill)
    if bill.claimed is not None:
        apply(view, now.id, Note(claim=Claim(bill.claimed, "")))
    usage = None if bill.usage is None else dict(bill.usage)
    after = apply(view, now.id, Capture(bill.amount, bill.evidence, usage=usage, note=bill.note or None))
    if bill.claimed is not None:
        _trip_session(view, now.node_id, bill.note)
    elif marks and bill.usage is not None:
        _add_to_mean(view, marks[0], bill.amount)
    return after


def _late(view: LedgerView, hold: Hold, bill: Bill) -> Hold:
    """Take what a call's end says after it had lapsed to its ceiling: more than that is owed, less frees nothing."""
    if hold.state is not HoldState.CAPTURED or hold.evidence is not Evidence.ASSUMED:
        return hold
    if bill.claimed is not None:
        facts = {"name": "usage_disputed", "claimed": bill.claimed, "reason": bill.note}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)
        _trip_session(view, hold.node_id, bill.note)
    elif bill.amount > hold.captured:
        return apply(view, hold.id, Correct(bill.amount, bill.evidence))
    return hold


def _trip_session(view: LedgerView, node_id: str, reason: str) -> None:
    for node in view.path(node_id):
        if node.kind is not NodeKind.SCOPE:
            trip(view, node.id, DISPUTED, reason)
            return


def _add_to_mean(view: LedgerView, key: MarkKey, amount: Nanos) -> None:
    before = view.mark(key) or {"calls": 0, "nanos": 0}
    view.put_mark(key, {"calls": int(before["calls"]) + 1, "nanos": int(before["nanos"]) + amount})

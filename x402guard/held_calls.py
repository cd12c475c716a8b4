"""The decisions about an LLM call that are taken inside one ledger transaction: what is held, and what is captured. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.ledger.authorize import BUDGET, Refusal, authorize, check_open, lapse_due
from x402guard.ledger.budgets import room_on_path, trip
from x402guard.ledger.model import Claim, Hold, HoldKind, HoldState, NodeKind
from x402guard.ledger.transitions import Capture, Correct, Note, apply
from x402guard.ledger.view import Change, LedgerView, MarkKey, Scope
from x402guard.metering.bill import Bill
from x402guard.metering.call import Call
from x402guard.metering.ceiling import UNBOUNDED_OUTPUT, Ceiling
from x402guard.metering.classify import FixedPrice, Meter
from x402guard.money import Nanos
from x402guard.policy import RequestFacts
from x402guard.purchase import Terms, purpose_of

__all__ = ["HOLD_S", "LEAST_FITTED", "Granted", "call_scope", "fix_price", "grant_call", "mean_mark", "write_bill"]

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
        limit: the output limit that is held for, in tokens for each choice.
        written: the limit is ours and has to be written into the request.
        bound: more output than this, for each choice, is impossible.
    """

    hold: Hold
    model: str
    limit: int = 0
    written: bool = False
    bound: int = 0


@dataclass(frozen=True, slots=True)
class _Choice:
    amount: Nanos
    limit: int
    bound: int
    written: bool = False
    estimated: bool = False


def mean_mark(call: Call, ceiling: Ceiling) -> MarkKey:
    """Return the key of the row that keeps what a ledger's calls to a model have cost so far."""
    return "llm_mean", f"{call.route.provider} {ceiling.rates.priced.model}"


def call_scope(terms: Terms, request: RequestFacts, marks: tuple[MarkKey, ...]) -> Scope:
    """Return the rows that ``grant_call`` and ``fix_price`` have to see."""
    return Scope(nodes=(terms.node_id,), holds=(request.entropy.hex(),), marks=marks, durable=True)


def grant_call(
    view: LedgerView, *, terms: Terms, request: RequestFacts, call: Call, ceiling: Ceiling, meter: Meter
) -> Granted | Refusal:
    """Hold what *call* costs at most, on live rows, or refuse it."""
    lapse_due(view)
    closed = check_open(view, terms.node_id)
    if closed is not None:
        return closed
    choice = _choose(view, terms.node_id, call, ceiling, meter)
    if isinstance(choice, Refusal):
        return choice
    hold = _new_hold(view, terms, request, Nanos(max(1, choice.amount)), call.model)
    written = authorize(view, hold, _facts(hold, call, ceiling, choice))
    if isinstance(written, Refusal):
        return written
    if choice.written:
        facts = {"name": "output_limited", "model": call.model, "output_tokens": choice.limit}
        view.record(terms.node_id, "event", hold_id=hold.id, facts=facts)
    return Granted(written, call.model, choice.limit, choice.written, choice.bound)


def fix_price(view: LedgerView, terms: Terms, request: RequestFacts, price: FixedPrice) -> Granted | Refusal:
    """Hold what the owner says one request costs, or refuse it."""
    lapse_due(view)
    hold = _new_hold(view, terms, request, Nanos(max(1, price.amount)), price.place)
    facts = {
        **_journal_facts(hold, price.place),
        "provider": price.provider,
        "price": {"source": "owner", "fixed": True},
    }
    written = authorize(view, hold, facts)
    return written if isinstance(written, Refusal) else Granted(written, price.place)


def _choose(view: LedgerView, node_id: str, call: Call, ceiling: Ceiling, meter: Meter) -> _Choice | Refusal:
    """Decide on an output limit. The request's own, where it has one; else the setting's way."""
    if ceiling.limit is not None:
        return _Choice(ceiling.amount(ceiling.limit), ceiling.limit, ceiling.limit)
    way = meter.settings.unbounded_output
    if way == "refuse":
        return Refusal(UNBOUNDED_OUTPUT, f"{_limit_field(call)}: the request sets no output limit; set one")
    if ceiling.maximum is None:
        return Refusal(
            UNBOUNDED_OUTPUT,
            f"{_limit_field(call)}: the request sets no output limit, and nobody says how much {call.model!r} answers with; "
            "set one, or give the model a ModelPrice(max_output=…)",
        )
    most = ceiling.maximum
    bound = max(most, ceiling.rates.priced.context_window or 0)
    mean = view.mark(mean_mark(call, ceiling)) if way == "average" else None
    if mean is not None:
        return _Choice(Nanos(-(-int(mean["nanos"]) // int(mean["calls"]))), most, bound, estimated=True)
    whole = _Choice(ceiling.amount(most), most, bound)
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
            f"{_limit_field(call)}: a quarter of what is left pays for {max(limit, 0)} tokens of {call.model!r}, and an answer "
            f"of fewer than {LEAST_FITTED} is not asked for unsaid; set a limit of your own, or finish with what you have"
        )
        return Refusal(BUDGET, reason, least, share)
    return _Choice(ceiling.amount(limit), limit, limit, written=True)


def _limit_field(call: Call) -> str:
    fields = {"messages": "max_tokens", "gemini": "generationConfig.maxOutputTokens", "responses": "max_output_tokens",
              "chat": "max_completion_tokens"}  # fmt: skip
    return fields.get(call.route.flavour, "max_tokens")


def _new_hold(view: LedgerView, terms: Terms, request: RequestFacts, amount: Nanos, model: str) -> Hold:
    return Hold(
        id=request.entropy.hex(),
        node_id=terms.node_id,
        kind=HoldKind.LLM,
        amount=amount,
        created_ms=view.now_ms,
        deadline_unix=view.now_unix + HOLD_S,
        flying_since_ms=view.now_ms,
        owner=terms.instance,
        purpose=purpose_of(request, model),
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
    priced = ceiling.rates.priced
    day = dt.datetime.fromtimestamp(priced.at_unix, dt.UTC).date().isoformat()
    price = {"source": priced.source, "version": priced.version, "date": day, "model": priced.model}
    if ceiling.rates.based_on is not None:
        price["based_on"] = ceiling.rates.based_on
    held = {
        "input_tokens": ceiling.input_tokens,
        "counted_by": ceiling.counted_by,
        "output_tokens": choice.limit,
        "estimate": choice.estimated,
    }
    return {**_journal_facts(hold, call.model), "provider": call.route.provider, "price": price, "ceiling": held}


def write_bill(terms: Terms, hold: Hold, bill: Bill, mean: MarkKey | None) -> tuple[Scope, Change[Hold]]:
    """Return the transaction that captures a call's cost: its scope, and the change. It is done once; again does nothing."""
    restrains = bill.amount > hold.amount or bill.claimed is not None
    marks = () if mean is None else (mean,)
    scope = Scope(nodes=(terms.node_id,), holds=(hold.id,), marks=marks, durable=restrains)

    def change(view: LedgerView) -> Hold:
        now = view.known_hold(hold.id)
        if now.state is HoldState.CAPTURED and bill.amount > now.captured and now.evidence is not bill.evidence:
            return apply(
                view, hold.id, Correct(bill.amount, bill.evidence)
            )  # it had lapsed to a ceiling that was too low
        if now.state is not HoldState.HELD:
            return now
        if bill.claimed is not None:
            apply(view, hold.id, Note(claim=Claim(bill.claimed, "")))
        usage = None if bill.usage is None else dict(bill.usage)
        after = apply(view, hold.id, Capture(bill.amount, bill.evidence, usage=usage, note=bill.note or None))
        if bill.claimed is not None:
            _trip_session(view, hold.node_id, bill.note)
        elif mean is not None and bill.usage is not None:
            _add_to_mean(view, mean, bill.amount)
        return after

    return scope, change


def _trip_session(view: LedgerView, node_id: str, reason: str) -> None:
    for node in view.path(node_id):
        if node.kind is not NodeKind.SCOPE:
            trip(view, node.id, DISPUTED, reason)
            return


def _add_to_mean(view: LedgerView, key: MarkKey, amount: Nanos) -> None:
    before = view.mark(key) or {"calls": 0, "nanos": 0}
    view.put_mark(key, {"calls": int(before["calls"]) + 1, "nanos": int(before["nanos"]) + amount})

"""Decides inside one ledger transaction whether an LLM call may be sent, and with which output limit. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import BudgetExhausted, TokensExhausted, Unpriced
from x402guard.flow.admission import check_standing
from x402guard.flow.capture import ESTIMATED, HIDDEN, HOLD_S, MEAN
from x402guard.flow.context import Context
from x402guard.flow.request import RequestFacts, fingerprint_of, purpose_of, route_of, routes_of
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import WALLET, Hold, HoldKind, Nanos
from x402guard.ledger.authorize import BUDGET, TOKENS, Refusal, authorize, check_room
from x402guard.ledger.budgets import room_on_path, tightest_part
from x402guard.ledger.token_budget import Reservation, TokenLimit, call_tokens, reserve_tokens, tokens_left
from x402guard.ledger.view import LedgerView, Scope
from x402guard.llm.ceiling import UNBOUNDED_OUTPUT, Ceiling
from x402guard.llm.meter import FixedPrice, Meter
from x402guard.llm.rates import whole_nanos
from x402guard.llm.request import Call, limit_field
from x402guard.money import format_dollars
from x402guard.policy.approvals import shown_text
from x402guard.policy.guards import guard_marks, judge_step, note_taken
from x402guard.policy.judge import (
    Consented,
    Unasked,
    effective_verdict,
    objection,
    spent_so_far,
    verdict_facts,
    verdict_of,
)
from x402guard.policy.steps import Step, last_said, request_key
from x402guard.policy.verdicts import Subject, Verdict

LEAST_LIMITED: Final = 16
"""The smallest output limit, in tokens, that a hard limit of tokens leaves to a call."""

LEAST_FITTED: Final = 1_024
"""The smallest output limit, in tokens, that the library writes. If it does not fit, the call is refused."""

_SHARE: Final = 4
"""An output limit that the library writes costs at most 1/4 of what is left of a budget of which others hold something."""


class Granted(Struct, frozen=True):
    """A call that may be sent.

    Attributes:
        hold: the hold as committed.
        model: the model, or the route of a fixed price.
        marks: the marks that the end of the call reads.
        limit: the output limit of the hold, in tokens for each choice.
        written: True if the library chose the limit and has to write it into the request.
        bound: the most output tokens that are possible for each choice.
        most_tokens: the tokens counted in a token budget if the usage stays unknown.
        hidden_input: the input tokens in the hold that the server is known to add by itself.
        filtered: nano-dollars of the input, where the provider bills a prompt that it refuses by status 400; else None.
    """

    hold: Hold
    model: str
    marks: tuple[MarkKey, ...] = ()
    limit: int = 0
    written: bool = False
    bound: int = 0
    most_tokens: int = 0
    hidden_input: int = 0
    filtered: Nanos | None = None


class _Choice(Struct, frozen=True):
    amount: Nanos
    limit: int
    bound: int
    written: bool = False
    estimated: bool = False


def call_id(request: RequestFacts) -> str:
    """Return the id of a request's LLM hold. It differs from the id of a payment for the same request (after a 402)."""
    return hashlib.sha256(b"llm call" + request.entropy).hexdigest()


def call_marks(
    context: Context, request: RequestFacts, call: Call, ceiling: Ceiling, meter: Meter
) -> tuple[MarkKey, ...]:
    """Return the marks in the scope of a call's transactions.

    These are the mean cost of the ledger's calls to the model; the input that the server adds by itself; and, if means
    are held, the budgets with such a call open.
    """
    mean: MarkKey = (MEAN, f"{call.route.provider} {ceiling.rates.priced.model}")
    hidden: MarkKey = (HIDDEN, f"{request.host} {call.model}")
    if meter.settings.unbounded_output != "average" or ceiling.limit is not None:
        return (mean, hidden)
    parts = context.node_id.split("/")  # a child's id begins with its parent's
    return (mean, hidden, (ESTIMATED, WALLET), *((ESTIMATED, "/".join(parts[: n + 1])) for n in range(len(parts))))


def call_step(context: Context, request: RequestFacts, said: bytes | Mapping[str, Any]) -> Step:
    """Return the step of an LLM call. *said* is its body, decoded if it was read."""
    loop = context.policy.loop
    key = last = ""
    if loop is not None:
        key = request_key(HoldKind.LLM, request.method, request.url, said, loop.ignored, similar=loop.similar)
        last = "" if isinstance(said, bytes) else last_said(str(said.get("model", request.url)), said)
    routes = routes_of(request)
    return Step(
        HoldKind.LLM, route_of(request), key, context.node_id, routes=routes, begun=request.begun, said_key=last
    )


def call_scope(context: Context, request: RequestFacts, step: Step, marks: tuple[MarkKey, ...]) -> Scope:
    """Return the scope of ``grant_call`` and ``fix_price``."""
    seen = (*marks, *guard_marks(context.policy, step))
    hold_id = call_id(request)
    if context.tokens is None or not context.tokens.hard:
        return Scope(nodes=(context.node_id,), holds=(hold_id,), marks=seen, durable=True)
    nodes = (context.node_id, context.tokens.node_id)
    return Scope(nodes=nodes, holds=(hold_id, call_tokens(hold_id)), marks=seen, durable=True)


def grant_call(
    view: LedgerView,
    consented: Consented,
    *,
    context: Context,
    request: RequestFacts,
    step: Step,
    call: Call,
    ceiling: Ceiling,
    meter: Meter,
    narrowed_by: str = "",
) -> Granted | Unasked | Refusal:
    """Hold the ceiling of *call*, refuse it, or return a question for approval. *narrowed_by* is the narrowing rule."""
    refusal = check_standing(view, context) or judge_step(view, context.policy, step)
    if refusal is not None:
        return refusal
    marks = call_marks(context, request, call, ceiling, meter)
    learned = view.mark(marks[1])
    ceiling = ceiling.hiding(0 if learned is None else int(learned["tokens"]))
    choice = _choose(view, context, call, ceiling, meter=meter, marks=marks)
    if not isinstance(choice, Refusal) and context.tokens is not None and context.tokens.hard:
        choice = _within_tokens(view, context.tokens, call, ceiling, choice)
    if isinstance(choice, Refusal):
        return choice
    subject = call_subject(request, call, ceiling, choice.amount)
    priced = step.at(choice.amount)
    about = (request.method, request.url, request.body_sha256 or "", choice.limit)
    decided = _allow(view, context, request, about, subject=subject, priced=priced, consented=consented)
    if not isinstance(decided, Verdict):
        return decided
    lives_s = _BACKGROUND_S if call.body.get("background") is True else HOLD_S
    hold = _new_hold(view, context, request, step.at(Nanos(max(1, choice.amount))), call.model, lives_s=lives_s)
    facts = {**_facts(hold, call, ceiling, choice), **verdict_facts(replace(decided, narrowed_by=narrowed_by))}
    written = authorize(view, hold, facts, context.finalizing)
    if isinstance(written, Refusal):
        return written
    note_taken(view, context.policy, priced, hold.id)
    if choice.written:
        facts = {"name": "output_limited", "model": call.model, "output_tokens": choice.limit}
        view.record(context.node_id, "event", hold_id=hold.id, facts=facts)
    if choice.estimated:
        _note_estimate(view, marks, written)
    most_tokens = _most_tokens(ceiling, choice.limit)
    if context.tokens is not None and context.tokens.hard:
        wanted = Reservation(call_tokens(hold.id), most_tokens, context.instance, llm=True)
        reserve_tokens(view, context.tokens.node_id, wanted)
    filtered = whole_nanos(ceiling.input_dollars) if call.route.endpoint.dialect == "azure" else None
    return Granted(
        hold=written,
        model=call.model,
        marks=marks,
        limit=choice.limit,
        written=choice.written,
        bound=choice.bound,
        most_tokens=most_tokens,
        hidden_input=ceiling.learned,
        filtered=filtered,
    )


def call_subject(request: RequestFacts, call: Call, ceiling: Ceiling, amount: Nanos) -> Subject:
    """Return an LLM call as the owner's rules see it: its route, and its model under every name that it has.

    These are the name as sent, the name behind a gateway's prefix (``openai/gpt-4o``), and the name that it is priced as.
    """
    priced = ceiling.rates.priced.model
    names = (call.model, bare_model(call.model), priced, bare_model(priced))
    return Subject(HoldKind.LLM, tuple(dict.fromkeys((*routes_of(request), *names))), amount, begun=request.begun)


def fixed_subject(request: RequestFacts, price: FixedPrice) -> Subject:
    """Return a request at a fixed price as the owner's rules see it."""
    return Subject(
        HoldKind.LLM,
        (*routes_of(request), price.route_name, *((price.model,) if price.model else ())),
        price.amount,
        begun=request.begun,
    )


def bare_model(model: str) -> str:
    """Return a model's name without a gateway's prefix and suffix: ``gpt-4o`` for ``openai/gpt-4o:online``."""
    return model.rpartition("/")[2].partition(":")[0] or model


def _allow(
    view: LedgerView,
    context: Context,
    request: RequestFacts,
    about: tuple[Any, ...],
    *,
    subject: Subject,
    priced: Step,
    consented: Consented,
) -> Verdict | Unasked | Refusal:
    """Return the verdict on a call at its price if guards and rules allow it."""
    refusal = judge_step(view, context.policy, priced)
    if refusal is not None:
        return refusal
    verdict = effective_verdict(view, verdict_of(context.policy, subject, asks=context.asks), subject)
    if verdict.action != "ask":
        return objection(verdict, subject) or verdict
    unasked = Unasked(
        subject,
        verdict,
        about,
        query=shown_text(urlsplit(request.url).query),
        body=shown_text(request.body or b""),
        spent=spent_so_far(view, context.node_id),
    )
    if unasked.key not in consented:
        return check_room(view, context.node_id, priced.amount, context.finalizing) or unasked
    return verdict


def fix_price(
    view: LedgerView,
    consented: Consented,
    *,
    context: Context,
    request: RequestFacts,
    step: Step,
    price: FixedPrice,
) -> Granted | Unasked | Refusal:
    """Hold the owner's fixed price of a request, refuse the request, or return a question for approval."""
    refusal = check_standing(view, context) or judge_step(view, context.policy, step)
    if refusal is not None:
        return refusal
    subject = fixed_subject(request, price)
    about = (request.method, request.url, request.body_sha256 or "")
    decided = _allow(view, context, request, about, subject=subject, priced=step.at(price.amount), consented=consented)
    if not isinstance(decided, Verdict):
        return decided
    name = price.model or price.route_name
    hold = _new_hold(view, context, request, step.at(Nanos(max(1, price.amount))), name)
    facts = {
        **_journal_facts(hold, price.model or price.route_name),
        "provider": price.provider,
        "price": {"source": price.source, "fixed": True},
        **verdict_facts(decided),
    }
    written = authorize(view, hold, facts, context.finalizing)
    if isinstance(written, Refusal):
        return written
    note_taken(view, context.policy, step.at(price.amount), hold.id)
    return Granted(written, name)


def _choose(
    view: LedgerView, context: Context, call: Call, ceiling: Ceiling, *, meter: Meter, marks: tuple[MarkKey, ...]
) -> _Choice | Refusal:
    """Choose the output limit: the request's own, or else the one that ``unbounded_output`` gives."""
    if ceiling.limit is not None:
        return _Choice(ceiling.amount(ceiling.limit), ceiling.limit, ceiling.limit)
    way = meter.settings.unbounded_output
    if way == "refuse":
        return Refusal(
            UNBOUNDED_OUTPUT, f"{limit_field(call)}: the request sets no output limit; set one", error=Unpriced
        )
    if ceiling.maximum is None:
        return Refusal(
            UNBOUNDED_OUTPUT,
            f"{limit_field(call)}: the request sets no output limit, and the maximum output of {call.model!r} is unknown; "
            "set one, or give the model a ModelPrice(max_output=…)",
            error=Unpriced,
        )
    most = ceiling.maximum
    bound = max(most, ceiling.rates.priced.context_window or 0)
    mean = view.mark(marks[0]) if way == "average" and not _estimate_is_out(view, marks) else None
    if mean is not None:
        return _Choice(Nanos(-(-int(mean["nanos"]) // int(mean["calls"]))), most, bound, estimated=True)
    # A maximum that a setting states is enforced: the library writes it into the request.
    said = ceiling.rates.priced.source in ("owner", "session")
    whole = _Choice(ceiling.amount(most), most, most if said else bound, written=said)
    left = room_on_path(view, context.node_id, context.finalizing, enough=whole.amount)
    if way != "fit" or left is None or whole.amount <= left:
        return whole
    return _fit(view, context, call, ceiling)


def _most_tokens(ceiling: Ceiling, limit: int) -> int:
    return ceiling.input_tokens + limit * ceiling.choices + ceiling.extra_output


def _within_tokens(
    view: LedgerView, tokens: TokenLimit, call: Call, ceiling: Ceiling, choice: _Choice
) -> _Choice | Refusal:
    """Limit a call's output to the tokens that are left, or refuse the call: its input and output may not fit."""
    node = view.node(tokens.node_id)
    left = tokens_left(node)
    if ceiling.input_bound is None:
        unbounded = [part.field for part in call.unbounded] + [part.field for part in call.media]
        return _no_tokens(f"{', '.join(unbounded)[:200]}: its tokens have no bound, and a hard limit needs one")
    if _most_tokens(ceiling, choice.limit) <= left and not choice.estimated:
        return choice
    limit = min((left - _most_tokens(ceiling, 0)) // ceiling.choices, choice.limit)
    if limit < min(LEAST_LIMITED, choice.limit) or _most_tokens(ceiling, limit) > left:
        reason = (
            f"{ceiling.input_tokens:,} tokens of input and an answer do not fit into the {left:,} that are left of "
            f"{node.limit or 0:,} tokens ({node.captured:,} used, {node.held:,} reserved)"
        )
        return _no_tokens(reason)
    return _Choice(ceiling.amount(limit), limit, limit, written=True)


def _no_tokens(reason: str) -> Refusal:
    return Refusal(
        TOKENS, reason, error=TokensExhausted, advice=TokensExhausted.advice.removeprefix("Nothing was sent. ")
    )


def _fit(view: LedgerView, context: Context, call: Call, ceiling: Ceiling) -> _Choice | Refusal:
    part = tightest_part(view, context.node_id, _SHARE, context.finalizing)
    assert part is not None, "a call that does not fit has a budget with a limit"
    limit = min(ceiling.affordable(Nanos(part.most)), ceiling.maximum or 0)
    if limit >= LEAST_FITTED:
        return _Choice(ceiling.amount(limit), limit, limit, written=True)
    least, field = ceiling.amount(LEAST_FITTED), limit_field(call)
    of_it = "a quarter of the" if part.shared else "the"
    reason = (
        f"{field}: the request sets no output limit, and the one that the guard would write, {max(limit, 0)} tokens of "
        f"{call.model!r} for {of_it} ${format_dollars(part.left)} that is left, is below {LEAST_FITTED:,}; set {field} in the "
        "request, or raise the budget"
    )
    # Once what the others hold has come back, all that is left may be held.
    kept = (part.node.room or 0) - part.left
    return Refusal(
        BUDGET,
        reason,
        least,
        Nanos(part.most),
        error=BudgetExhausted,
        short_of=part.node.id,
        needs=Nanos(least + max(0, kept)),
    )


def _estimate_is_out(view: LedgerView, marks: tuple[MarkKey, ...]) -> bool:
    """True if a budget with a limit has an open call held at a mean: a second one at once could exceed the limit."""
    for kind, node_id in marks:
        row = view.mark((kind, node_id))
        if kind == ESTIMATED and row is not None and row["hold"] and row["until"] >= view.now_unix:
            return True
    return False


def _note_estimate(view: LedgerView, marks: tuple[MarkKey, ...], hold: Hold) -> None:
    for kind, node_id in marks:
        if kind == ESTIMATED and view.node(node_id).limit is not None:
            view.put_mark((kind, node_id), {"hold": hold.id, "until": hold.deadline_unix})


_BACKGROUND_S: Final = 21_600  # a response in the background may take hours


def _new_hold(
    view: LedgerView, context: Context, request: RequestFacts, step: Step, model: str, *, lives_s: int = HOLD_S
) -> Hold:
    return Hold(
        id=call_id(request),
        node_id=context.node_id,
        kind=HoldKind.LLM,
        amount=step.amount,
        created_ms=view.now_ms,
        deadline_unix=view.now_unix + lives_s,
        flying_since_ms=view.now_ms,
        instance=context.instance,
        purpose=purpose_of(request, fingerprint_of(request), model, step=step.key),
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
    """Return the journal facts of a call: the prices of its hold, and how its ceiling was computed."""
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

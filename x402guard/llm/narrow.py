"""Narrows LLM calls by the owner's rules: the narrowed call is priced, held and sent. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from x402guard.flow.context import Context
from x402guard.flow.request import RequestFacts
from x402guard.kernel.rows import Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.llm.authorize import call_subject, fixed_subject
from x402guard.llm.ceiling import Ceiling
from x402guard.llm.meter import FixedPrice
from x402guard.llm.request import Call, lower_limits, read_call, removed_fields
from x402guard.money import format_dollars
from x402guard.policy import Narrow
from x402guard.policy.judge import verdict_of
from x402guard.policy.verdicts import Verdict
from x402guard.strict_json import NotReadable, read_object, write_object

_LEAST_NARROWED: Final = 16
_TRIES: Final = 4

Price = Callable[[Call], Ceiling | Refusal]


class Narrowed(Struct, frozen=True):
    """A call to price and send. *changed*: its body differs from the caller's. *by*: the narrowing rule."""

    call: Call
    ceiling: Ceiling
    changed: bool = False
    by: str = ""


def narrow_call(
    context: Context, request: RequestFacts, call: Call, ceiling: Ceiling, price: Price
) -> Narrowed | Refusal:
    """Return the call narrowed by the owner's rules, or a refusal. *price* computes a ceiling."""
    verdict = verdict_of(context.policy, call_subject(request, call, ceiling, _most(ceiling)), asks=context.asks)
    narrow = verdict.narrow
    if narrow is None or context.shadow:
        return Narrowed(call, ceiling)
    before = call
    removed = removed_fields(call.body, narrow.remove)
    kept = {name: value for name, value in call.body.items() if name not in removed}
    body = lower_limits(call, kept, narrow.output_limit)
    if body != call.body:
        again = _again(call, body, price)
        if isinstance(again, Refusal):
            return again
        call, ceiling = again
    if narrow.most is not None and _most(ceiling) > narrow.most:
        fitted = _fit(call, ceiling, narrow, verdict, price)
        if isinstance(fitted, Refusal):
            return fitted
        call, ceiling = fitted
    return Narrowed(call, ceiling, call is not before, verdict.narrowed_by)


def _most(ceiling: Ceiling) -> Nanos:
    return ceiling.amount(ceiling.limit if ceiling.limit is not None else ceiling.maximum or 0)


def _again(call: Call, body: dict[str, object], price: Price) -> tuple[Call, Ceiling] | Refusal:
    read = read_call(call.route, write_object(body), tier=call.tier)
    if isinstance(read, Refusal):
        return read
    ceiling = price(read)
    return ceiling if isinstance(ceiling, Refusal) else (read, ceiling)


def _fit(
    call: Call, ceiling: Ceiling, narrow: Narrow, verdict: Verdict, price: Price
) -> tuple[Call, Ceiling] | Refusal:
    """Lower the output limit until the ceiling fits the rule's amount. The limit is input too: each try is priced."""
    most = narrow.most or Nanos(0)
    before = ceiling
    for _ in range(_TRIES):
        limit = min(ceiling.affordable(most), ceiling.maximum or ceiling.affordable(most))
        if ceiling.limit is not None:
            limit = min(limit, ceiling.limit)
        if limit < min(_LEAST_NARROWED, before.limit or _LEAST_NARROWED):
            break
        again = _again(call, lower_limits(call, dict(call.body), limit), price)
        if isinstance(again, Refusal):
            return again
        call, ceiling = again
        if _most(ceiling) <= most:
            return call, ceiling
    reason = (
        f"rule {verdict.narrowed_by!r} narrows this to ${format_dollars(most)}, which is not enough for an answer of "
        f"{call.model!r} (the minimum is {_LEAST_NARROWED} tokens)"
    )
    return Refusal(verdict.narrowed_by, reason, _most(before), most)


def narrow_fixed(
    context: Context, request: RequestFacts, price: FixedPrice, body: bytes | None
) -> bytes | Refusal | None:
    """Return the narrowed body of a call at a fixed price; None if it is sent unchanged.

    The price cannot be lowered: a rule that allows less refuses the call.
    """
    verdict = verdict_of(context.policy, fixed_subject(request, price), asks=context.asks)
    narrow, rule = verdict.narrow, verdict.narrowed_by
    if narrow is None or context.shadow:
        return None
    if narrow.most is not None and narrow.most < price.amount:
        cost = format_dollars(price.amount)
        reason = f"rule {rule!r} narrows this to ${format_dollars(narrow.most)}, but its fixed price is ${cost}"
        return Refusal(rule, reason, price.amount, narrow.most)
    if not narrow.remove:
        return None
    try:
        sent = read_object(body or b"")
    except NotReadable:
        return Refusal(rule, f"rule {rule!r} removes fields of this body, but the body cannot be read", price.amount)
    removed = removed_fields(sent, narrow.remove)
    return write_object({name: value for name, value in sent.items() if name not in removed}) if removed else None

"""LLM calls that a rule of the owner's makes smaller: what is narrowed is what is priced, held and sent. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from x402guard.granted_calls import LEAST_FITTED, call_subject
from x402guard.json_body import write_object
from x402guard.ledger.authorize import Refusal
from x402guard.metering.call import Call, lower_limits, read_call, removed_fields
from x402guard.metering.ceiling import Ceiling
from x402guard.money import Nanos, format_dollars
from x402guard.policy import Narrow, RequestFacts
from x402guard.policy.rule_list import Verdict
from x402guard.terms import Terms
from x402guard.verdicts import verdict_of

__all__ = ["Narrowed", "narrow_call"]

Price = Callable[[Call], Ceiling | Refusal]


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A call as it will be priced and sent; *changed* where its body is not the caller's own any more."""

    call: Call
    ceiling: Ceiling
    changed: bool = False


def narrow_call(terms: Terms, request: RequestFacts, call: Call, ceiling: Ceiling, price: Price) -> Narrowed | Refusal:
    """Return a call as the owner's rules leave it, or why nothing of it is left. *price* works out a ceiling."""
    verdict = verdict_of(terms, call_subject(request, call.model, _most(ceiling)))
    narrow = verdict.narrow
    if narrow is None:
        return Narrowed(call, ceiling)
    before = call
    removed = removed_fields(call.body, narrow.remove)
    kept = {name: value for name, value in call.body.items() if name not in removed}
    limit = narrow.output_limit
    if len(kept) < len(call.body) or limit is not None:
        again = _again(call, lower_limits(call, kept, limit), price)
        if isinstance(again, Refusal):
            return again
        call, ceiling = again
    if narrow.most is not None and _most(ceiling) > narrow.most:
        fitted = _fit(call, ceiling, narrow, verdict, price)
        if isinstance(fitted, Refusal):
            return fitted
        call, ceiling = fitted
    return Narrowed(call, ceiling, changed=call is not before)


def _most(ceiling: Ceiling) -> Nanos:
    return ceiling.amount(ceiling.limit if ceiling.limit is not None else ceiling.maximum or 0)


def _again(call: Call, body: dict[str, object], price: Price) -> tuple[Call, Ceiling] | Refusal:
    read = read_call(call.route, write_object(body))
    if isinstance(read, Refusal):
        return read
    ceiling = price(read)
    return ceiling if isinstance(ceiling, Refusal) else (read, ceiling)


def _fit(
    call: Call, ceiling: Ceiling, narrow: Narrow, verdict: Verdict, price: Price
) -> tuple[Call, Ceiling] | Refusal:
    """Lower the output limit until the call costs at most what the rule leaves."""
    most = narrow.most or Nanos(0)
    limit = min(ceiling.affordable(most), ceiling.maximum or ceiling.affordable(most))
    if ceiling.limit is not None:
        limit = min(limit, ceiling.limit)
    if limit < min(LEAST_FITTED, ceiling.limit or LEAST_FITTED):
        reason = (
            f"rule {verdict.narrowed_by!r} narrows this to ${format_dollars(most)}, which pays for {max(0, limit)} tokens of "
            f"{call.model!r}"
        )
        return Refusal(verdict.narrowed_by, reason, _most(ceiling), most)
    return _again(call, lower_limits(call, dict(call.body), limit), price)

"""Computes the cost of a call from the usage that its answer states. Without a stated usage it is the ceiling."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from x402guard.flow.capture import Bill, ceiling_bill
from x402guard.flow.ports import Usage
from x402guard.ledger.model import Evidence
from x402guard.llm.answer import AnswerRead
from x402guard.llm.ceiling import DEARER, Ceiling, Rates, whole_nanos
from x402guard.llm.models import reasons
from x402guard.llm.prices import TokenCounter
from x402guard.llm.request import Call
from x402guard.llm.settings import Metering
from x402guard.llm.usage import UNITS, Impossible, Stated, check_parts, read_usage
from x402guard.money import MAX_NANOS, Nanos

_STATED_BY_THE_TOKENS: Final = frozenset(
    {"audio", "cached_content", "document", "image_url", "stored_conversation", "video", "web_fetch", "model_fallback"}
)
"""Kinds of unbounded parts that only add input tokens: the stated usage includes them."""

_FREE_OF_FEES: Final = frozenset({("google", "code_execution")})
"""(provider, kind) of tools that are billed by their tokens only."""


def bill_answer(
    call: Call,
    ceiling: Ceiling,
    settings: Metering,
    counter: TokenCounter,
    answer: AnswerRead,
    *,
    held: Nanos,
    limit: int | None,
) -> Bill:
    """Return the cost of *answer*.

    *held* is in nano-dollars; *limit* is the output limit that was sent, in tokens for each choice, or None. No count
    is dropped or clamped: a possible usage above the ceiling is billed in full, and an impossible one is disputed.
    """
    if not answer.final or answer.body is None:
        return _counted_here(call, ceiling, counter, answer) or ceiling_bill(held, answer.why)
    try:
        stated = read_usage(call, answer.body, ceiling.rates.book)
        _check_possible(call, stated.usage, ceiling, limit)
        amount = stated_cost(call, ceiling.rates, settings, stated)
    except Impossible as error:
        return Bill(held, Evidence.ASSUMED, note=f"disputed: {error}", claimed=_claimed(call, ceiling, answer))
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        return ceiling_bill(held, f"the answer states no readable usage: {str(error)[:200]}")
    if amount is None:
        return ceiling_bill(held, "the answer was billed at a tier that is not in the price book")
    if amount > MAX_NANOS:
        return Bill(held, Evidence.ASSUMED, stated.usage, "disputed: more than a billion dollars", claimed=amount)
    guessed = _guessed(call, ceiling.rates, settings, stated)
    if stated.charged is None and guessed:
        return Bill(Nanos(amount + whole_nanos(guessed)), Evidence.ESTIMATE, stated.usage, "tools at their allowance")
    return Bill(amount, Evidence.PROVIDER_USAGE, stated.usage)


def _check_possible(call: Call, usage: Usage, ceiling: Ceiling, limit: int | None) -> None:
    """Raise ``Impossible`` for more output than the limit that was sent, or more input than the body's bytes allow."""
    into, out = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    check_parts(usage)
    if ceiling.input_bound is not None and into > ceiling.input_bound:
        raise Impossible(f"{into} input tokens, but the request's bytes allow at most {ceiling.input_bound}")
    if any(part.field == "context_management" for part in call.unbounded):
        limit = None  # the output of a compaction does not count towards the limit
    allowed = None if limit is None else limit * ceiling.choices + ceiling.extra_output
    if allowed is not None and out > allowed:
        raise Impossible(f"{out} output tokens, but {allowed} were allowed")


def stated_cost(call: Call, rates: Rates, settings: Metering, stated: Stated) -> Nanos | None:
    """Return the cost of a stated usage in nano-dollars; None for a tier that is not in the price book.

    Raises ``Impossible`` for counts that contradict each other.
    """
    if stated.charged is not None:
        return whole_nanos(stated.charged)
    context = dict(settings.price_context)
    # A tier that only the request names counts only if it costs more.
    asked = {key: value for key, value in call.context.items() if value in DEARER}
    for key, value in {**asked, **stated.context}.items():
        if (key, value) in rates.priced.contexts:
            context[key] = value
        elif value in DEARER:
            return None
    billed = Rates(rates.book, rates.priced, rates.based_on, context)
    try:
        return whole_nanos(billed.dollars(stated.usage, us_only=stated.us_only))
    except ValueError as error:
        raise Impossible(str(error)[:200]) from error


def _guessed(call: Call, rates: Rates, settings: Metering, stated: Stated) -> Decimal:
    """Return the allowances, in dollars, of tools whose use is not stated or that have no price."""
    priced = {kind for kind in stated.counted if UNITS[kind] in rates.priced.units}
    total = Decimal(0)
    for part in call.unbounded:
        fee = part.kind not in _STATED_BY_THE_TOKENS and (call.route.provider, part.kind) not in _FREE_OF_FEES
        if fee and part.kind not in priced:
            total += settings.allowance(part.kind) or 0
    return total


def _claimed(call: Call, ceiling: Ceiling, answer: AnswerRead) -> Nanos:
    """Return the cost of an impossible usage, or 0 if it cannot be computed; never below zero."""
    try:
        stated = read_usage(call, answer.body or {}, ceiling.rates.book)
        return whole_nanos(stated.charged if stated.charged is not None else ceiling.rates.dollars(stated.usage))
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return Nanos(0)


def _counted_here(call: Call, ceiling: Ceiling, counter: TokenCounter, answer: AnswerRead) -> Bill | None:
    """Return the bill of a local count for a complete stream without usage; None if the model may hide output."""
    if not answer.text or reasons(call.model) or call.route.flavour not in ("chat", "completions"):
        return None
    try:
        out = counter.count(answer.text, provider=call.route.provider, model=ceiling.rates.priced.model)
    except Exception:  # noqa: BLE001 - if a counter fails, the ceiling counts
        return None
    usage = {"input_tokens": ceiling.input_tokens, "output_tokens": out + 8 * call.choices}
    return Bill(whole_nanos(ceiling.rates.dollars(usage)), Evidence.ESTIMATE, usage, "counted locally")

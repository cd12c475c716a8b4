"""Computes the cost of a call from the usage that its answer states. Without a stated usage it is the ceiling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from x402guard.flow.capture import Bill, ceiling_bill, tokens_in
from x402guard.flow.ports import Usage
from x402guard.kernel.rows import Evidence, Nanos
from x402guard.llm.answer import AnswerRead
from x402guard.llm.ceiling import (
    DEAREST_TIER,
    NOT_DEARER,
    US_ONLY,
    Ceiling,
    Rates,
    find_model,
    most_possible,
    most_tokens,
    unread_cost,
    whole_nanos,
)
from x402guard.llm.content import kind_of
from x402guard.llm.models import reasons
from x402guard.llm.prices import TokenCounter
from x402guard.llm.request import Call
from x402guard.llm.settings import Metering
from x402guard.llm.usage import UNITS, Impossible, Stated, read_usage, tools_run

NOT_READ: Final = "counts that nothing reads, at the dearest rate"
"""A note. Their names are the provider's words: only the notice to the owner has them."""

_STATED_BY_THE_TOKENS: Final = frozenset(
    {"audio", "cached_content", "document", "image_url", "stored_conversation", "video", "web_fetch", "model_fallback"}
)
"""Kinds of unbounded parts that only add input tokens: the stated usage includes them."""

_FREE_OF_FEES: Final = frozenset({("google", "code_execution")})
"""(provider, kind) of tools that are billed by their tokens only."""


_OUTPUT: Final = frozenset({"candidatesTokenCount", "totalTokenCount"})
"""Gemini states one of them with each answer."""


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

    *held* is in nano-dollars; *limit* is the output limit that was sent, in tokens for each choice, or None. What the
    provider states is billed, also above the ceiling, up to the most that the model can take at all; the rest of such a
    claim is disputed. Counts that contradict each other are read at their dearest, and cost the ceiling at least.
    """
    if not answer.final or answer.body is None:
        return _counted_here(call, ceiling, counter, answer) or ceiling_bill(held, answer.why)
    try:
        read = _read(call, ceiling, settings, answer.body, held)
        factor = read.factor * (US_ONLY if read.stated.us_only else 1)
        usage = read.stated.usage
        most = most_possible(ceiling, read.rates, usage, factor=factor) if read.amount > held else read.amount
        most = Nanos(most + read.unread)  # it is bounded by itself
        tokens = min(tokens_in(usage), sum(most_tokens(ceiling, read.rates)))
    except Exception as error:  # noqa: BLE001 - a paid answer is its caller's, whatever its usage looks like
        return ceiling_bill(held, f"the answer states no readable usage ({type(error).__name__})")
    if not usage and not read.amount:
        return ceiling_bill(held, "the answer states a usage of nothing")
    amount, claimed, note = Nanos(min(read.amount, most)), None, ""
    if amount < read.amount:
        claimed, note = read.amount, f"disputed: the claim is more than any answer of {read.rates.priced.model} costs"
    if read.contradiction:
        amount, claimed, note = Nanos(max(amount, held)), read.amount, f"disputed: {read.contradiction}"
    beyond = "" if read.contradiction else _beyond(call, usage, ceiling, limit)
    return Bill(
        amount,
        Evidence.ESTIMATE if read.contradiction or read.estimated else Evidence.PROVIDER_USAGE,
        usage if claimed is None else None,
        note or beyond or read.note,
        claimed=claimed,
        tokens=tokens,
        hidden_input=0 if claimed is not None else _hidden(usage, ceiling),
        latches=settings.disputes == "latch" and bool(claimed is not None or beyond),
        unread=read.stated.unread_names,
    )


class _Read(Struct, frozen=True):
    """What an answer states, priced: *factor* on the prices, *contradiction* between the counts, or "".

    *estimated*: a part of the amount is not stated, which *note* names. *unread*: the part for counts that nothing reads.
    """

    stated: Stated
    amount: Nanos
    rates: Rates
    factor: Decimal
    contradiction: str = ""
    estimated: bool = False
    note: str = ""
    unread: Nanos = Nanos(0)


def _read(call: Call, ceiling: Ceiling, settings: Metering, body: Mapping[str, Any], held: Nanos) -> _Read:
    """Read and price an answer. Raises ``ValueError`` and its like if it states no readable usage.

    A tool that ran and has neither a price nor an allowance makes it cost what was *held* at least.
    """
    book, contradiction = ceiling.rates.book, ""
    counts = body.get("usageMetadata")
    if call.route.flavour == "gemini" and isinstance(counts, dict) and not _OUTPUT & counts.keys():
        raise ValueError("the usage states no output")  # a part of the answer was left out
    try:
        stated = read_usage(call, body, book)
        rates, factor = billed_rates(call, _dearer_model(call, ceiling.rates, body, stated), settings, stated)
        amount = cost_of(rates, factor, stated)
    except Impossible as error:
        contradiction = error.plain[:200]
        stated = read_usage(call, body, book, repaired=True)
        rates, factor = billed_rates(call, _dearer_model(call, ceiling.rates, body, stated), settings, stated)
        amount = cost_of(rates, factor, stated)
    guessed = Decimal(0) if stated.charged is not None else _guessed(call, rates, settings, stated, body)
    if guessed is None:
        amount, guessed, note = Nanos(max(amount, held)), Decimal(0), "a tool without a price or an allowance ran"
    else:
        note = "tools at their allowance" if guessed else ""
    unread, unpriced = Decimal(0), tuple(_unpriced(rates, stated))
    if unpriced:
        stated = replace(stated, unread=(*stated.unread, *unpriced))
    if stated.unread_names:
        unread = unread_cost(rates, stated.unread, sum(most_tokens(ceiling, rates))) * factor
        note = note or NOT_READ
    if factor != 1 and stated.charged is None:
        note = f"a tier without a price, at {factor} times the standard one"
    amount = Nanos(amount + whole_nanos(guessed + unread))
    return _Read(stated, amount, rates, factor, contradiction, bool(note), note, whole_nanos(unread))


def _unpriced(rates: Rates, stated: Stated) -> Iterator[tuple[str, int]]:
    """Yield the counts that are read, are no part of the tokens, and have no price. Tools have their allowances."""
    for unit, count in stated.usage.items():
        if not unit.endswith("_tokens") and unit not in rates.priced.units and unit not in _COUNTED_ELSEWHERE:
            yield unit, count


_COUNTED_ELSEWHERE: Final = frozenset({*UNITS.values(), "audio_seconds"})  # the whole of seconds that are read as parts


def _hidden(usage: Usage, ceiling: Ceiling) -> int:
    """Return the input tokens that the server added, if they are more than the ceiling expects; else 0."""
    beyond = 0 if ceiling.input_bound is None else usage.get("input_tokens", 0) - ceiling.input_bound
    return ceiling.learned + beyond if beyond > 0 else 0


def _beyond(call: Call, usage: Usage, ceiling: Ceiling, limit: int | None) -> str:
    """Return how a usage goes beyond the limit that was sent, or beyond the request's bytes; "" if it does not."""
    into, out = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    if _hidden(usage, ceiling):
        return f"{into} input tokens, but the request's bytes allow at most {ceiling.input_bound}"
    if limit is None or any(part.field == "context_management" for part in call.unbounded):
        return ""  # the output of a compaction does not count towards the limit
    allowed = limit * ceiling.choices + ceiling.extra_output
    return f"{out} output tokens, but {allowed} were allowed" if out > allowed else ""


def _dearer_model(call: Call, rates: Rates, body: Mapping[str, Any], stated: Stated) -> Rates:
    """Return the prices of the model that the answer names, if it costs more for this usage; else *rates*."""
    named = body.get("model") or body.get("modelVersion")
    if rates.priced.source == "owner" or not isinstance(named, str) or named in (call.model, rates.priced.model):
        return rates
    found = find_model(rates.book, call.route.provider, named.removeprefix("models/"), rates.priced.at_unix)
    if found is None:
        return rates
    other = Rates(rates.book, *found, rates.context)
    try:
        return other if other.dollars(stated.usage) > rates.dollars(stated.usage) else rates
    except ValueError:
        return rates  # contradictory counts have no price


def billed_rates(call: Call, rates: Rates, settings: Metering, stated: Stated) -> tuple[Rates, Decimal]:
    """Return the prices that a stated usage is billed at, and the factor on them for a dearer tier without a price."""
    context, factor = dict(settings.price_context), Decimal(1)
    # A tier that only the request names counts only if it costs more.
    asked = {key: value for key, value in call.context.items() if value not in NOT_DEARER}
    for key, value in {**asked, **stated.context}.items():
        if (key, value) in rates.priced.contexts:
            context[key] = value
        elif value not in NOT_DEARER:
            factor = Decimal(DEAREST_TIER)
    return Rates(rates.book, rates.priced, rates.based_on, context), factor


def cost_of(rates: Rates, factor: Decimal, stated: Stated) -> Nanos:
    """Return the cost of a stated usage in nano-dollars. Raises ``Impossible`` for counts that contradict each other."""
    if stated.charged is not None:
        return whole_nanos(stated.charged)
    try:
        return whole_nanos(rates.dollars(stated.usage, us_only=stated.us_only) * factor)
    except ValueError as error:
        raise Impossible(str(error)[:200]) from error


def _guessed(call: Call, rates: Rates, settings: Metering, stated: Stated, body: Mapping[str, Any]) -> Decimal | None:
    """Return the allowances, in dollars, of tools whose use is not stated or that have no price; None if one has none."""
    priced = {kind for kind in stated.counted if UNITS[kind] in rates.priced.units}
    asked, ran = (
        Counter(part.kind for part in call.unbounded),
        Counter(map(kind_of, tools_run(call.route.flavour, body))),
    )
    total = Decimal(0)
    for kind in asked | ran:  # a tool that the answer shows is billed, whether or not it was asked for
        free = kind in _STATED_BY_THE_TOKENS or (call.route.provider, kind) in _FREE_OF_FEES or kind in priced
        allowed = settings.allowance(kind)
        if allowed is None and not free and kind not in asked:
            return None
        if not (free and kind in asked):
            total += (allowed or 0) * max(asked[kind], ran[kind])
    return total


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

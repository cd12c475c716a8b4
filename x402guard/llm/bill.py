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
from x402guard.llm.ceiling import Ceiling, most_possible, most_tokens
from x402guard.llm.content import kind_of
from x402guard.llm.dearest import WINDOW, dearest_parts, unread_cost
from x402guard.llm.rates import Rates, billed_rates, find_model, whole_nanos
from x402guard.llm.request import Call, output_kinds
from x402guard.llm.settings import Metering
from x402guard.llm.tool_costs import container_cost, own_tools, pictured, rates_of_other
from x402guard.llm.tools_used import UNITS, tools_run
from x402guard.llm.usage import Impossible, Stated, is_same_model, read_usage
from x402guard.vendors.models import base_name, reasons
from x402guard.vendors.prices import TokenCounter

NOT_READ: Final = "counts that nothing reads, at the dearest rate"
"""A note. Their names are the provider's words: only the notice to the owner has them."""

_STATED_BY_THE_TOKENS: Final = frozenset(
    {"audio", "cached_content", "document", "image_url", "stored_conversation", "video", "web_fetch", "model_fallback"}
)
"""Kinds of unbounded parts that only add input tokens: the stated usage includes them."""

_LONGEST_NAME: Final = 300
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
        usage = read.stated.all_usage
        most = _most(call, ceiling, read) if read.amount > held else read.amount
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
    beyond = "" if read.contradiction else _beyond(call, read.stated.usage, ceiling, limit)
    return Bill(
        amount,
        Evidence.ESTIMATE if read.contradiction or read.estimated else Evidence.PROVIDER_USAGE,
        usage if claimed is None else None,
        note or beyond or read.note,
        claimed=claimed,
        tokens=tokens,
        hidden_input=0 if claimed is not None else _hidden(read.stated.usage, ceiling),
        latches=settings.disputes == "latch" and bool(claimed is not None or beyond),
        unread=read.stated.unread_names,
    )


class _Read(Struct, frozen=True):
    """What an answer states, priced: by *rates*, with a *contradiction* between the counts, or "".

    *estimated*: a part of the amount is not stated, which *note* names. *unread*: the part for counts that nothing reads.
    """

    stated: Stated
    amount: Nanos
    rates: Rates
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
    most = sum(most_tokens(ceiling, ceiling.rates))
    try:
        stated = read_usage(call, body, book)
        priced = price_stated(call, _dearer_model(call, ceiling.rates, body, stated), settings, stated, most)
    except Impossible as error:
        contradiction = error.plain[:200]
        stated = read_usage(call, body, book, repaired=True)
        priced = price_stated(call, _dearer_model(call, ceiling.rates, body, stated), settings, stated, most)
    amount, note, stated = priced.amount, priced.note, priced.stated
    guessed = Decimal(0) if stated.charged is not None else _guessed(call, priced.rates, settings, stated, body)
    if guessed is None:
        amount, guessed, note = Nanos(max(amount, held)), Decimal(0), "a tool without a price or an allowance ran"
    elif guessed:
        note = note or "tools at their allowance"
    amount = Nanos(amount + whole_nanos(guessed))
    return _Read(stated, amount, priced.rates, contradiction, bool(note), note, priced.unread)


class PricedUsage(Struct, frozen=True):
    """The cost of a stated usage in nano-dollars.

    Attributes:
        stated: the usage; its unread counts have those that no price is known for, too.
        amount: all of it, those counts among them.
        rates: the prices of the model that was asked.
        unread: the part of the amount for counts that nothing reads.
        note: what is not stated in the usage, or not in the book; "" for nothing.
    """

    stated: Stated
    amount: Nanos
    rates: Rates
    unread: Nanos
    note: str


def price_stated(call: Call, rates: Rates, settings: Metering, stated: Stated, most: int | None) -> PricedUsage:
    """Return the cost of a stated usage. *most* are the tokens that the model can take at all, if the request is known.

    Raises ``Impossible`` for counts that contradict each other.
    """
    rates, note = billed_rates(call, rates, settings, stated.context, us_only=stated.us_only)
    stated = _with_kinds(call, rates, stated)
    if stated.charged is not None:
        return PricedUsage(stated, whole_nanos(stated.charged), rates, Nanos(0), "")
    unpriced = tuple(_unpriced(rates, stated))
    if unpriced:
        stated = replace(stated, unread=(*stated.unread, *unpriced))
    unread = unread_cost(rates, stated.unread, most) if stated.unread else Decimal(0)
    try:
        dollars = stated.fees + sum((rates.dollars(each) for each in stated.rounds or (stated.usage,)), Decimal(0))
        for part in stated.others:
            other = rates_of_other(rates, call.route.provider, part.model)
            dollars += other.dollars(pictured(part.usage, other.priced.units))
    except ValueError as error:
        raise Impossible(str(error)[:200]) from error
    note = note or (NOT_READ if stated.unread else "")
    return PricedUsage(stated, Nanos(whole_nanos(dollars) + whole_nanos(unread)), rates, whole_nanos(unread), note)


def _with_kinds(call: Call, rates: Rates, stated: Stated) -> Stated:
    """Return a usage whose output is of the dearest kind that the request asks for, where the answer does not say its kinds."""
    out = stated.usage.get("output_tokens", 0)
    units = {f"output_{kind}_tokens" for kind in output_kinds(call)} & rates.priced.units
    if not units or stated.splits_output or not out or stated.rounds:
        return stated
    dearest = max(units, key=lambda unit: rates.dollars({"output_tokens": out, unit: out}))
    return replace(stated, usage={**stated.usage, dearest: out})


def _most(call: Call, ceiling: Ceiling, read: _Read) -> Nanos:
    """Return the most that an answer can cost: as many requests as it states, of each model the most that it can take."""
    rounds = min(max(1, len(read.stated.rounds)), _MOST_ROUNDS)
    most = most_possible(ceiling, read.rates, read.stated.usage) * rounds + read.unread  # which is bounded by itself
    for part in read.stated.others[:_MOST_ROUNDS]:
        other = rates_of_other(read.rates, call.route.provider, part.model)
        window = max(WINDOW, other.priced.context_window or 0)
        most += whole_nanos(sum(dearest_parts(other.book, other.priced, window, window, {})) * other.factor)
    return Nanos(most)


_MOST_ROUNDS: Final = 32


def _unpriced(rates: Rates, stated: Stated) -> Iterator[tuple[str, int]]:
    """Yield the counts that are read, are no part of the tokens, and have no price. Tools have their allowances."""
    for unit, count in stated.usage.items():
        # Google's models that speak have no price of their own for sound; no other model speaks at the price of its text.
        in_tokens = unit.endswith("_tokens") and (unit != "output_audio_tokens" or rates.priced.provider == "google")
        if not in_tokens and unit not in rates.priced.units and unit not in _COUNTED_ELSEWHERE:
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
    if len(named) > _LONGEST_NAME or (is_same_model(call.model, named) and base_name(named) is None):
        return rates  # what was asked for by the name of a region or a gateway
    found = find_model(rates.book, call.route.provider, named.removeprefix("models/"), rates.priced.at_unix)
    if found is None:
        return rates
    other = Rates(rates.book, *found, rates.context)
    try:
        return other if other.dollars(stated.usage) > rates.dollars(stated.usage) else rates
    except ValueError:
        return rates  # contradictory counts have no price


def _guessed(call: Call, rates: Rates, settings: Metering, stated: Stated, body: Mapping[str, Any]) -> Decimal | None:
    """Return the allowances, in dollars, of tools whose use is not stated or that have no price; None if one has none."""
    priced = {kind for kind in stated.counted if UNITS[kind] in rates.priced.units}
    asked, ran = (
        Counter(part.kind for part in call.unbounded),
        Counter(map(kind_of, tools_run(call.route.flavour, body))),
    )
    for kind in {part.kind for part in stated.others}:  # what their models have used is stated
        asked[kind] -= len(own_tools(call, "advisor")) if kind == "provider_tool" else asked[kind]
        if kind != "provider_tool":
            ran.pop(kind, None)
    total = Decimal(0)
    for kind in +asked | ran:  # a tool that the answer shows is billed, whether or not it was asked for
        free = kind in _STATED_BY_THE_TOKENS or (call.route.provider, kind) in _FREE_OF_FEES or kind in priced
        allowed, listed = settings.allowance(kind), container_cost(call) if kind == "code_execution" else Decimal(0)
        if allowed is None and not free and kind not in asked:
            return None
        if not (free and kind in asked):
            total += max((allowed or 0) * max(asked[kind], ran[kind]), listed)
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

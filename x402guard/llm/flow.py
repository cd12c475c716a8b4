"""The flow of one LLM call: holds the ceiling before the call and captures the cost after it.

Computes the ceiling · holds it, durably · sends the request · meters the answer while the caller reads it · captures
the cost at the end of the body. A call without a stated usage costs its ceiling; no count is dropped or clamped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace as altered

from x402guard.errors import CallTimeout, LedgerUnavailable, ProtocolError, Unpriced
from x402guard.flow.admission import Seat, hold_or_refuse
from x402guard.flow.capture import Bill, capture_bill, ceiling_bill, give_back
from x402guard.flow.context import Context
from x402guard.flow.effects import (
    Checkpoint,
    Compute,
    Flow,
    Interrupted,
    Notify,
    PeekBody,
    Reply,
    Send,
    SendFailed,
    cause,
    error_name,
)
from x402guard.flow.receipt import Receipt, receipt_of, timed_out
from x402guard.flow.refusals import refused
from x402guard.flow.request import RequestFacts, split_path
from x402guard.frozen import replace
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Evidence, Hold, HoldKind, HoldState
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import Notice
from x402guard.llm.answer import AnswerReader
from x402guard.llm.authorize import Granted, call_id, call_marks, call_scope, call_step, fix_price, grant_call
from x402guard.llm.background import RUNS, note_background, runs_on
from x402guard.llm.bill import bill_answer
from x402guard.llm.ceiling import Ceiling, find_ceiling
from x402guard.llm.listed import LISTED, bill_listed, price_listed
from x402guard.llm.meter import FixedPrice, Meter
from x402guard.llm.narrow import narrow_call, narrow_fixed
from x402guard.llm.outages import may_have_content, says_error
from x402guard.llm.request import Call, ask_for_usage, cap_price, lower_limits, read_call
from x402guard.llm.settings import place_of
from x402guard.policy.judge import Unasked
from x402guard.policy.step_guard import Outcome
from x402guard.policy.steps import Step
from x402guard.strict_json import NotReadable, read_object, write_object
from x402guard.vendors.routes import Route

QUICK_BYTES: Final = 16_384
"""The largest body, in bytes, that is priced on the event loop once price book and counter have loaded."""

ERROR_BYTES: Final = 262_144
"""The most bytes of an error's body that are read."""

ANSWER_BYTES: Final = 8_388_608
"""The most bytes of an answer at a fixed price that are read, to find what it states."""

_LLM_S: Final = "policy.timeouts.llm_s"
_TIMED_OUT: Final = frozenset({408, 499})


class Upload(Struct, frozen=True):
    """A request's body (None if it streams past ``max_body_bytes``), its content encoding and type, and a header's tier."""

    body: bytes | None
    encoding: str
    tier: str = ""
    kind: str = ""


class InFlight(Struct, frozen=True):
    """A call whose answer the caller is reading.

    Attributes:
        context, meter: the guard's side of the call.
        hold: its hold in the ledger.
        marks: the marks that its end reads.
        call, ceiling: the call as read, and its ceiling.
        limit: the most output tokens that are possible for each choice.
        most_tokens: the tokens counted in a token budget if the usage stays unknown.
        reader: reads the answer; the transport feeds it.
        receipt: the receipt until the answer has ended.
    """

    context: Context
    meter: Meter
    hold: Hold
    marks: tuple[MarkKey, ...]
    call: Call
    ceiling: Ceiling
    limit: int
    most_tokens: int
    reader: AnswerReader
    receipt: Receipt


class _Ready(Struct, frozen=True):
    call: Call
    ceiling: Ceiling
    step: Step
    changed: bool = False
    narrowed_by: str = ""


def called(
    request: RequestFacts, route: Route | FixedPrice, upload: Upload, context: Context, meter: Meter
) -> Flow[tuple[InFlight | Receipt | None, Reply]]:
    """Hold and send an LLM call. Returns (call in flight, receipt if it has ended or None if free; reply)."""
    if isinstance(route, FixedPrice):
        return (yield from _fixed(request, route, upload, context, None))
    if route.flavour in LISTED:
        place = place_of(request.host, split_path(request.url).path)
        price = yield Compute(
            lambda now_ms: price_listed(meter, route, upload.body, upload.kind, place=place, at_unix=now_ms // 1000),
            quick=False,
        )
        if isinstance(price, Refusal):
            raise (yield from refused(context, price))
        return (yield from _fixed(request, price, upload, context, partial(bill_listed, meter, route, price)))
    quick = _is_quick(meter, upload.body)
    prepare = partial(_prepare, route, upload, context=context, request=request, meter=meter)
    ready = yield Compute(partial(prepare, quick=quick), quick=quick)
    if ready is None:
        ready = yield Compute(partial(prepare, quick=False), quick=False)
    if isinstance(ready, Refusal):
        if request.begun and ready.error is Unpriced:  # a redirect's path may have named the model: not its words
            ready = altered(ready, reason=f"what {request.begun} redirected to is an LLM call that cannot be priced")
        raise (yield from refused(context, ready))
    call, ceiling, step = ready.call, ready.ceiling, ready.step
    grant = partial(grant_call, call=call, ceiling=ceiling, meter=meter, narrowed_by=ready.narrowed_by)
    change = partial(grant, context=context, request=request, step=step)
    marks = call_marks(context, request, call, ceiling, meter)
    granted = yield from _hold(context, request, step, change, marks, model=call.model)
    asks = _asks_for_usage(call, meter)
    reply = yield from _send(context, granted, _body_to_send(ready, granted, asks=asks))
    if 200 <= reply.status < 300:
        return _in_flight(context, meter, granted, ready, reply, hides=asks), reply
    return (yield from _end_by_status(context, granted, reply)), reply


def _fixed(
    request: RequestFacts,
    price: FixedPrice,
    upload: Upload,
    context: Context,
    stated: Callable[[Mapping[str, Any], int], Bill] | None,
) -> Flow[tuple[Receipt | None, Reply]]:
    """Hold and send a request at a fixed price. *stated* reads its cost in the answer, at a time in unix seconds."""
    quick = len(upload.body or b"") <= QUICK_BYTES
    step = yield Compute(lambda _now_ms: call_step(context, request, upload.body or b""), quick=quick)
    body = narrow_fixed(context, request, price, upload.body)
    if isinstance(body, Refusal):
        raise (yield from refused(context, body))
    fixed = partial(fix_price, context=context, request=request, step=step, price=price)
    granted = yield from _hold(context, request, step, fixed, (), model=price.model or price.route_name)
    reply = yield from _send(context, granted, body)
    return (yield from _end_by_status(context, granted, reply, stated)), reply


def _is_quick(meter: Meter, body: bytes | None) -> bool:
    return meter.ready and len(body or b"") <= QUICK_BYTES


def _prepare(
    route: Route, upload: Upload, now_ms: int, *, context: Context, request: RequestFacts, meter: Meter, quick: bool
) -> _Ready | Refusal | None:
    """Return the call with its ceiling; None if that is not *quick*, because a vocabulary has to be loaded first."""
    call = read_call(route, upload.body, upload.encoding, upload.tier)
    if isinstance(call, Refusal):
        return call
    if quick and meter.loads(route.provider, meter.settings.aliases.get(call.model, call.model)):
        return None

    def price(asked: Call) -> Ceiling | Refusal:
        return find_ceiling(asked, meter.settings, meter.book, meter.counter, now_ms // 1000)

    ceiling = price(call)
    if isinstance(ceiling, Refusal):
        return ceiling
    narrowed = narrow_call(context, request, call, ceiling, price)
    if isinstance(narrowed, Refusal):
        return narrowed
    step = call_step(context, request, call.body)  # the caller's body: narrowing must not make two calls equal
    return _Ready(narrowed.call, narrowed.ceiling, step, narrowed.changed, narrowed.by)


def _hold(
    context: Context,
    request: RequestFacts,
    step: Step,
    change: partial[Granted | Unasked | Refusal],
    marks: tuple[MarkKey, ...],
    *,
    model: str,
) -> Flow[Granted]:
    """Write the hold; it is durable before anything is sent. Raises the refusal if it does not fit."""

    def undo(error: BaseException) -> Flow[None]:
        return give_back(context, call_id(request), f"nothing was sent: {error_name(error)}", error, marks)

    seat, scope = Seat(HoldKind.LLM, request.host, request.begun), call_scope(context, request, step, marks)
    refuse = partial(refused, context, of=(HoldKind.LLM, model))
    return (yield from hold_or_refuse(context, scope, change, undo, refuse=refuse, seat=seat))


def _asks_for_usage(call: Call, meter: Meter) -> bool:
    """True if a stream would end without its usage unless the library asks for it."""
    return (
        call.streams
        and meter.settings.include_usage
        and not call.asked_for_usage
        and call.route.flavour in ("chat", "completions")
        and call.route.endpoint.dialect in ("openai", "azure", "google")
    )


def _body_to_send(ready: _Ready, granted: Granted, *, asks: bool) -> bytes | None:
    """Return the body that replaces the caller's, or None if the caller's is sent unchanged."""
    call, routed = ready.call, ready.call.route.provider == "openrouter"
    if not asks and not granted.written and not ready.changed and not routed:
        return None
    body = lower_limits(call, call.body, granted.limit) if granted.written else dict(call.body)
    if routed:
        body = cap_price(body, *ready.ceiling.unit_prices())
    return write_object(ask_for_usage(body) if asks else body)


def _send(context: Context, granted: Granted, body: bytes | None) -> Flow[Reply]:
    hold = granted.hold
    try:
        yield Checkpoint()
    except GeneratorExit:
        raise
    except BaseException as error:
        yield from give_back(context, hold, f"nothing was sent: {error_name(error)}", error, granted.marks)
        raise
    try:
        timeouts = context.policy.timeouts
        plain = ("accept-encoding", "identity")
        answer: Reply = yield Send(
            (plain,), body=body, call_s=timeouts.llm_s, chunk_s=timeouts.chunk_s, limited_by=_LLM_S
        )
        return answer
    except GeneratorExit:
        raise
    except SendFailed as failure:
        if failure.before_connection:
            reason = f"no connection: {error_name(failure)}"
            yield from give_back(context, hold, reason, failure, granted.marks)
        else:
            # Providers continue to generate, and bill, after the caller has disconnected.
            yield from _capture_anyway(context, granted, f"no answer: {error_name(failure)}", failure, outcome="failed")
        if isinstance(failure.cause, CallTimeout):
            failure.cause = timed_out(failure.cause, receipt_of(hold))
        raise
    except BaseException as error:
        yield from _capture_anyway(context, granted, "cancelled while the call was in flight", error)
        raise


_LEADS_TO_IT: Final = frozenset({302, 303})
"""A client gets the answer to a call by a GET then, which no meter sees. After 307 and 308 it makes the call again."""


def _end_by_status(
    context: Context, granted: Granted, reply: Reply, stated: Callable[[Mapping[str, Any], int], Bill] | None = None
) -> Flow[Receipt | None]:
    """End a call whose body is not metered. Returns None if it cost nothing. *stated* reads a bill in its answer."""
    hold, status = granted.hold, reply.status
    outcome: Outcome = "ok"
    if 200 <= status < 300:
        bill = Bill(hold.amount, Evidence.ESTIMATE, note="the owner's fixed price")
        if stated is not None:
            try:
                answer = yield from _peek_answer()
                bill = yield Compute(lambda now_ms: stated(answer, now_ms // 1000), quick=True)
            except Interrupted as cut:
                yield from _capture_anyway(context, granted, "cancelled while the answer was read", cut)
                raise
    elif status in _TIMED_OUT:
        bill, outcome = (
            ceiling_bill(hold.amount, f"status {status}: the call may have been answered and billed"),
            "failed",
        )
    elif status == 400 and granted.filtered is not None:
        try:
            refused_for = yield from _peek_code()
        except Interrupted as cut:
            yield from _capture_anyway(context, granted, "cancelled while the error was read", cut)
            raise
        if refused_for not in ("", "content_filter"):
            yield from give_back(context, hold, f"status {status}", None, granted.marks, outcome="ok")
            return None
        bill = Bill(granted.filtered, Evidence.ESTIMATE, note="status 400: Azure bills the prompt that it filtered")
    elif status < 500:
        try:
            may_cost = status < 200 or status in _LEADS_TO_IT or (status >= 400 and (yield from _peek_content()))
        except Interrupted as cut:
            yield from _capture_anyway(context, granted, "cancelled while the error was read", cut)
            raise
        if not may_cost:
            yield from give_back(context, hold, f"status {status}", None, granted.marks, outcome="ok")
            return None
        bill = ceiling_bill(hold.amount, f"status {status}: the call may have been answered and billed")
    else:
        outcome = "failed"
        try:
            error = yield from _peek_error(status)
        except Interrupted as cut:
            yield from _capture_anyway(context, granted, "cancelled while the error was read", cut)
            raise
        if error:
            yield from give_back(context, hold, f"status {status}, {error}", None, granted.marks, outcome="failed")
            return None
        bill = ceiling_bill(hold.amount, f"status {status} without a provider error: it may have been billed")
    return (yield from _write(context, hold, bill, granted, outcome=outcome))


def _peek_answer() -> Flow[dict[str, Any]]:
    """Return the answer in the body, empty if it cannot be read."""
    try:
        return read_object((yield PeekBody(ANSWER_BYTES)) or b"")
    except (NotReadable, ProtocolError, SendFailed):
        return {}


def _peek_code() -> Flow[str]:
    """Return the code of the error in the body, "" if it has none that can be read."""
    try:
        error = read_object((yield PeekBody(ERROR_BYTES)) or b"").get("error")
    except (NotReadable, ProtocolError, SendFailed):
        return ""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else ""


def _peek_error(status: int) -> Flow[str]:
    """Return "" unless the body of a 5xx is an error without content, of a provider or of a proxy before it."""
    try:
        return says_error((yield PeekBody(ERROR_BYTES)) or b"", status)
    except (ProtocolError, SendFailed):
        return ""


def _peek_content() -> Flow[bool]:
    """True if the body of a 4xx has content or usage: then it is an answer, whatever its status says."""
    try:
        body = yield PeekBody(ERROR_BYTES)
    except (ProtocolError, SendFailed):
        return False
    return body is None or may_have_content(body)


def _in_flight(
    context: Context, meter: Meter, granted: Granted, ready: _Ready, reply: Reply, *, hides: bool
) -> InFlight:
    call = ready.call
    headers = {name.lower(): value for name, value in reply.headers}
    reader = AnswerReader(
        call.route.flavour,
        headers.get("content-type", ""),
        headers.get("content-encoding", ""),
        hides_usage=hides,
        keeps_text=call.streams and not meter.settings.include_usage,
        choices=call.choices,
    )
    receipt = _receipt(granted.hold, granted, call.model)
    return InFlight(
        context=context,
        meter=meter,
        hold=granted.hold,
        marks=granted.marks,
        call=call,
        ceiling=ready.ceiling.hiding(granted.hidden_input),
        limit=granted.bound,
        most_tokens=granted.most_tokens,
        reader=reader,
        receipt=receipt,
    )


def _receipt(hold: Hold, granted: Granted, model: str) -> Receipt:
    return replace(receipt_of(hold), model=model, output_limit=granted.limit if granted.written else None)


def end_call(flight: InFlight, *, ended: bool, failed: bool = False) -> Flow[Receipt]:
    """Capture the cost of a call whose answer has *ended*, was abandoned, or *failed*. Returns the final receipt.

    If the ledger cannot be written, the caller still gets the answer: the hold stays and later lapses to its ceiling.
    """
    meter = flight.meter

    def job(_now_ms: int) -> Bill:
        return bill_answer(
            flight.call,
            flight.ceiling,
            meter.settings,
            meter.counter,
            flight.reader.answer(ended=ended),
            held=flight.hold.amount,
            limit=flight.limit,
        )

    nothing = flight.reader.nothing(ended=ended)
    if nothing:
        yield from give_back(flight.context, flight.hold, nothing, None, flight.marks, outcome="failed")
        return replace(flight.receipt, amount=Decimal(0), state=str(HoldState.VOIDED), note=nothing)
    response_id = runs_on(flight.call, flight.reader.whole(ended=ended))
    if response_id:
        try:
            yield from note_background(flight.hold, flight.call, response_id, flight.limit)
        except LedgerUnavailable as error:
            return replace(flight.receipt, in_doubt=True, note=f"the ledger could not be written: {error}")
        return replace(flight.receipt, note=RUNS)
    try:
        bill = yield Compute(job, quick=meter.ready and flight.reader.is_small)
    except Interrupted:
        yield from _booked(flight, job(0), outcome="unknown")
        raise
    try:
        hold = yield from _booked(flight, bill, outcome="failed" if failed else "ok" if ended else "unknown")
    except LedgerUnavailable as error:
        return replace(flight.receipt, in_doubt=True, note=f"the ledger could not be written: {error}")
    limit = flight.receipt.output_limit
    shortened = limit is not None and (bill.usage or {}).get("output_tokens", 0) >= limit * flight.call.choices
    if shortened:
        yield Notify(_shortened(flight, limit or 0))
    return replace(
        receipt_of(hold),
        model=flight.call.model,
        output_limit=limit,
        shortened=shortened,
        usage=bill.usage,
        note=bill.note,
    )


def _shortened(flight: InFlight, limit: int) -> Notice:
    message = (
        f"an answer of {flight.call.model} ends at {limit:,} tokens, the output limit that the guard wrote because the model's "
        "own did not fit into the budget (Metering.unbounded_output); its finish reason is the provider's"
    )
    facts = {"model": flight.call.model, "output_tokens": limit, "hold_id": flight.hold.id}
    return Notice("output_shortened", "warning", message, session=flight.context.node_id, facts=facts)


def _booked(flight: InFlight, bill: Bill, *, outcome: Outcome) -> Flow[Hold]:
    return capture_bill(
        flight.context, flight.hold, bill, flight.marks, most_tokens=flight.most_tokens, outcome=outcome
    )


def _write(context: Context, hold: Hold, bill: Bill, granted: Granted, *, outcome: Outcome) -> Flow[Receipt]:
    try:
        written = yield from capture_bill(
            context, hold, bill, granted.marks, most_tokens=granted.most_tokens, outcome=outcome
        )
    except LedgerUnavailable as error:
        note = f"the ledger could not be written: {error}"
        return replace(_receipt(hold, granted, granted.model), in_doubt=True, note=note)
    return replace(_receipt(written, granted, granted.model), note=bill.note)


def _capture_anyway(
    context: Context, granted: Granted, reason: str, error: BaseException, *, outcome: Outcome = "unknown"
) -> Flow[None]:
    """Capture the ceiling while another error propagates. A ledger failure becomes a note on that error."""
    hold = granted.hold
    try:
        bill = ceiling_bill(hold.amount, reason)
        yield from capture_bill(context, hold, bill, granted.marks, most_tokens=granted.most_tokens, outcome=outcome)
    except LedgerUnavailable as again:
        cause(error).add_note(f"hold {hold.id} could not be captured: {again}")

"""Sends what a guard commits to OpenTelemetry, in the background: a dead collector is felt by no payment.

A span begins with a hold and ends with it. Its parent is the span that was current when the hold was written.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct, field
from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from x402guard.flow.background import Background
from x402guard.ledger.model import Entry, Hold, HoldKind
from x402guard.telemetry import calls
from x402guard.telemetry.calls import ENDS, EVIDENCE, HOLD_ID, KIND, RULE, Attribute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import TracerProvider

    from x402guard.ledger.view import LedgerView, Notice

SCOPE: Final = "x402guard"
CLOSING_S: Final = 5.0
_MOST_KNOWN: Final = 10_000
_MS: Final = 1_000_000

_USD_BOUNDS: Final = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0)
_SECONDS_BOUNDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKEN_BOUNDS: Final = tuple(float(4**power) for power in range(14))


class _Begun(Struct):
    """A hold whose span has not ended: the context of its caller, the facts of its authorization, and its steps."""

    context: Context
    facts: Mapping[str, object] = field(default_factory=dict)
    steps: list[tuple[str, int]] = field(default_factory=list)


class _Committed(Struct, frozen=True):
    """A change that is in the ledger, and the context of its caller."""

    view: LedgerView
    context: Context


class _Step(Struct, frozen=True):
    """A step of a payment outside the ledger; *at_ns* is unix nanoseconds."""

    name: str
    hold_id: str
    at_ns: int


class Owned(Protocol):
    """A provider that this guard has made."""

    def shutdown(self) -> None:
        """Export what waits, and end."""


class Instruments:
    """The metrics. Amounts are floats of dollars: for exact sums take a report.

    Args:
        provider: where they are made.
        keeps_ids: True if the provider's views take the hold's id out of the attributes and into the exemplars.
    """

    def __init__(self, provider: MeterProvider, *, keeps_ids: bool) -> None:
        meter = provider.get_meter(SCOPE)
        self._keeps_ids = keeps_ids
        self._amount = meter.create_histogram(
            "x402guard.call.amount", "USD", "What a call took",
            explicit_bucket_boundaries_advisory=_USD_BOUNDS,
        )  # fmt: skip
        self._duration = meter.create_histogram(
            "x402guard.call.duration", "s", "From the hold to its end",
            explicit_bucket_boundaries_advisory=_SECONDS_BOUNDS,
        )  # fmt: skip
        self._corrected = meter.create_up_down_counter(
            "x402guard.corrected", "USD", "What the chain, a bill or an undone block has changed after a call's end"
        )
        self._refusals = meter.create_counter("x402guard.refusals", "{refusal}", "What each rule has refused")
        self._trips = meter.create_counter("x402guard.trips", "{trip}", "Budgets that were stopped, by reason")
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", "Number of input and output tokens used",
            explicit_bucket_boundaries_advisory=_TOKEN_BOUNDS,
        )  # fmt: skip
        self._inference = meter.create_histogram(
            "gen_ai.client.operation.duration", "s", "GenAI operation duration",
            explicit_bucket_boundaries_advisory=_SECONDS_BOUNDS,
        )  # fmt: skip

    def ended(self, shown: Mapping[str, Attribute], seconds: float, context: Context) -> None:
        """Record the end of a call, with the attributes of its span, in the context of its span."""
        names = (KIND, EVIDENCE, "x402guard.outcome", "x402.network")
        self._record(self._duration, seconds, shown, names, context)
        if "x402guard.amount_usd" in shown:
            self._record(self._amount, float(shown["x402guard.amount_usd"]), shown, names, context)
        if shown[KIND] != HoldKind.LLM:
            return
        names = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "server.address")
        self._record(self._inference, seconds, shown, names, context)
        for part in ("input", "output"):
            used = shown.get(f"gen_ai.usage.{part}_tokens")
            if used is not None:
                self._record(self._tokens, float(used), {**shown, "gen_ai.token.type": part}, (*names, "gen_ai.token.type"), context)  # fmt: skip

    def _record(
        self,
        instrument: Histogram,
        value: float,
        shown: Mapping[str, Attribute],
        names: tuple[str, ...],
        context: Context,
    ) -> None:
        kept = (*names, HOLD_ID) if self._keeps_ids else names
        instrument.record(value, {name: shown[name] for name in kept if name in shown}, context)

    def corrected(self, dollars: float, kind: str) -> None:
        """Count what changed after the end of a call, in dollars."""
        self._corrected.add(dollars, {KIND: kind})

    def noticed(self, notice: Notice) -> None:
        """Count a refusal or a trip."""
        counter = {"refused": self._refusals, "tripped": self._trips}.get(notice.kind)
        if counter is not None:
            counter.add(1, {RULE: notice.rule})


class Telemetry:
    """An ``Observer`` of a guard's flows. What it is told waits in a queue; past a thousand it is dropped and logged.

    Args:
        tracers, meters: OpenTelemetry's providers.
        keeps_ids: see ``Instruments``.
        owned: the providers that are shut down at the end.
    """

    def __init__(
        self, tracers: TracerProvider, meters: MeterProvider, *, keeps_ids: bool = False, owned: Sequence[Owned] = ()
    ) -> None:
        self._owned = owned
        self._tracer = tracers.get_tracer(SCOPE)
        self._instruments = Instruments(meters, keeps_ids=keeps_ids)
        self._begun: OrderedDict[str, _Begun] = OrderedDict()
        self._ended: OrderedDict[str, Context] = OrderedDict()
        self._queue: Background[_Committed | _Step] = Background("telemetry", self._take)

    def committed(self, view: LedgerView) -> None:
        """See ``Observer.committed``."""
        if view.entries or view.notices:
            self._queue.put(_Committed(view, contexts.get_current()))

    def step(self, name: str, hold_id: str) -> None:
        """See ``Observer.step``."""
        self._queue.put(_Step(name, hold_id, time.time_ns()))

    def close(self) -> None:
        """Hand over what waits; of providers of our own wait for the export, five seconds at most."""
        until_s = time.monotonic() + CLOSING_S
        self._queue.close(until_s)
        # In threads of their own: an exporter tries a dead collector again and again.
        ending = [threading.Thread(target=provider.shutdown, daemon=True) for provider in self._owned]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(max(0.0, until_s - time.monotonic()))

    # -- in the background ----------------------------------------------------------------------------------------------

    def _take(self, item: _Committed | _Step) -> None:
        if isinstance(item, _Step):
            begun = self._begun.get(item.hold_id)
            if begun is not None:
                begun.steps.append((item.name, item.at_ns))
            return
        for entry in item.view.entries:
            hold = None if entry.hold_id is None else item.view.hold(entry.hold_id)
            if hold is not None and hold.kind is not HoldKind.TOKENS:
                self._entry(entry, hold, item)
        for notice in item.view.notices:
            self._instruments.noticed(notice)
            if notice.kind in ("refused", "tripped"):
                self._mark(notice, item)

    def _entry(self, entry: Entry, hold: Hold, item: _Committed) -> None:
        at_ns = entry.at_ms * _MS
        if entry.event == "authorize":
            _put(self._begun, hold.id, _Begun(item.context, entry.facts()))
            return
        begun = self._begun.get(hold.id)
        if entry.event in ENDS and hold.id not in self._ended:
            self._end(hold, entry, self._begun.pop(hold.id, _Begun(item.context)), item.view)
        elif begun is not None:
            begun.steps.append((entry.event, at_ns))
        elif hold.id in self._ended or entry.event in ("correct", "reopen", "forgive"):
            self._later(hold, entry)

    def _end(self, hold: Hold, entry: Entry, begun: _Begun, view: LedgerView) -> None:
        call = calls.describe(hold, begun.facts, view)
        shown = {**call.attributes, **calls.outcome(hold, entry)}
        span = self._tracer.start_span(
            call.name,
            begun.context,
            SpanKind.INTERNAL if call.is_inside else SpanKind.CLIENT,
            shown,
            start_time=hold.created_ms * _MS,
        )
        for name, at_ns in begun.steps:
            span.add_event(name, timestamp=at_ns)
        span.add_event(entry.event, timestamp=entry.at_ms * _MS)
        if hold.doubt:
            span.set_status(Status(StatusCode.ERROR, hold.doubt))
        span.end(max(entry.at_ms, hold.created_ms) * _MS)
        within = trace.set_span_in_context(span, begun.context)
        _put(self._ended, hold.id, within)
        self._instruments.ended(shown, max(0, entry.at_ms - hold.created_ms) / 1000, within)

    def _later(self, hold: Hold, entry: Entry) -> None:
        """Show what changed after the end of a call, as a span of no length below that of the call."""
        facts = entry.facts()
        shown: dict[str, Attribute] = {HOLD_ID: hold.id, KIND: str(hold.kind)}
        shown |= {name: str(facts[fact]) for name, fact in ((EVIDENCE, "evidence"), ("x402.transaction", "proof")) if facts.get(fact)}  # fmt: skip
        if entry.captured:
            shown |= {"x402guard.amount_nanos": entry.captured, "x402guard.amount_usd": calls.dollars(entry.captured)}
            self._instruments.corrected(calls.dollars(entry.captured), str(hold.kind))
        at_ns = entry.at_ms * _MS
        span = self._tracer.start_span(
            f"x402guard {entry.event}", self._ended.get(hold.id), attributes=shown, start_time=at_ns
        )
        span.end(at_ns)

    def _mark(self, notice: Notice, item: _Committed) -> None:
        """Show a refusal or a trip as a span of no length, with an error."""
        at_ns = int(notice.time * 1000) * _MS
        shown: dict[str, Attribute] = {RULE: notice.rule, **calls.whereabouts(notice.session, item.view)}
        for name, amount in (("x402guard.requested_usd", notice.amount), ("x402guard.available_usd", notice.limit)):
            if amount is not None:
                shown[name] = float(amount)
        span = self._tracer.start_span(f"x402guard {notice.kind}", item.context, attributes=shown, start_time=at_ns)
        span.set_status(Status(StatusCode.ERROR, notice.message))
        span.end(at_ns)


def _put(known: OrderedDict[str, _Begun] | OrderedDict[str, Context], key: str, value: object) -> None:
    """Keep a value; the oldest of ten thousand goes."""
    known[key] = value  # type: ignore[assignment]
    if len(known) > _MOST_KNOWN:
        known.popitem(last=False)


def telemetry() -> Telemetry:
    """Return an observer for the providers of the program, or for OTLP exporters of our own if it has set none.

    Those read OpenTelemetry's environment (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``). Raises
    ``ConfigError`` for another exporter or protocol there, ``ImportError`` without the exporter.
    """
    tracers, meters = trace.get_tracer_provider(), metrics.get_meter_provider()
    if _is_set(tracers) or _is_set(meters):
        return Telemetry(tracers, meters)
    from x402guard.telemetry.export import providers

    own = providers()
    return Telemetry(*own, keeps_ids=True, owned=own)


def _is_set(provider: object) -> bool:
    """True for a provider of the program: the API's own ones only stand in for it."""
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))

"""Sends what a guard commits to OpenTelemetry, in the background: a dead collector is felt by no payment.

A span begins with a hold and ends with it. Its parent is the span that was current when the hold was written.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from msgspec import Struct, field
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from x402guard.flow.background import Background
from x402guard.flow.shell import LOG
from x402guard.http.redaction import redacted
from x402guard.kernel.rows import Entry, Hold, HoldKind, HoldState
from x402guard.ledger.purchases import ANSWER
from x402guard.telemetry.calls import (
    ENDS,
    EVIDENCE,
    HOLD_ID,
    KIND,
    RULE,
    Attribute,
    Call,
    describe,
    dollars,
    is_doubtful,
    outcome,
    proof_of,
    whereabouts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    """A hold whose span has not ended: the span of its caller, what its span shows, and its steps."""

    parent: SpanContext
    call: Call
    begun_ms: int
    steps: list[tuple[str, int]] = field(default_factory=list)


class _Committed(Struct, frozen=True):
    """A change that is in the ledger, and the span of its caller."""

    view: LedgerView
    parent: SpanContext


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
        self._refusals = meter.create_counter("x402guard.refused", "{refusal}", "What each rule has refused")
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
    """An ``Observer`` of guards' flows. What it is told waits in a queue; past a thousand it is dropped and logged.

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
        self._ended: OrderedDict[str, SpanContext] = OrderedDict()
        self._queue: Background[_Committed | _Step] = Background("telemetry", self._take)
        self._pid = os.getpid()
        self.users = 0

    def committed(self, view: LedgerView) -> None:
        """See ``Observer.committed``."""
        if (view.entries or view.notices) and self._pid == os.getpid():
            self._queue.put(_Committed(view, trace.get_current_span().get_span_context()))

    def step(self, name: str, hold_id: str) -> None:
        """See ``Observer.step``."""
        if self._pid == os.getpid():
            self._queue.put(_Step(name, hold_id, time.time_ns()))

    def close(self) -> None:
        """Leave it. The last guard that does so waits for what is under way, five seconds at most."""
        with _SHARING:
            self.users -= 1
            if self.users > 0:
                return
            _SHARED.discard(self)
        if self._pid == os.getpid():
            self.end()

    def end(self) -> None:
        """Hand over what waits, and end the spans of what is still open; of providers of our own wait for the export."""
        until_s = time.monotonic() + CLOSING_S
        self._queue.close(time.monotonic() + CLOSING_S / 2)
        # In threads of their own: a processor of the program may hang, an exporter tries a dead collector again and again.
        if not _joined([self._leave_all], until_s):
            self._leave_all()
        if not _joined([provider.shutdown for provider in self._owned], until_s):
            LOG.error("telemetry: the last spans and metrics are lost: the interpreter ends, and starts no thread")

    def _leave_all(self) -> None:
        for hold_id, begun in list(self._begun.items()):
            try:
                self._leave_open(hold_id, begun)
            except Exception:  # noqa: BLE001 - the program's own processor may raise any error
                LOG.exception("telemetry failed")

    # -- in the background ----------------------------------------------------------------------------------------------

    def _take(self, item: _Committed | _Step) -> None:
        if isinstance(item, _Step):
            begun = self._begun.get(item.hold_id)
            if begun is not None:
                begun.steps.append((item.name, item.at_ns))
            return
        for entry in item.view.entries:
            hold = None if entry.hold_id is None else item.view.hold(entry.hold_id)
            if hold is not None and hold.kind is not HoldKind.TOKENS and entry.event != ANSWER:
                self._entry(entry, hold, item)
        for notice in item.view.notices:
            self._instruments.noticed(notice)
            if notice.kind in ("refused", "tripped"):
                self._mark(notice, item)

    def _entry(self, entry: Entry, hold: Hold, item: _Committed) -> None:
        if entry.event == "authorize":
            _put(self._begun, hold.id, _Begun(item.parent, describe(hold, entry.facts(), item.view), hold.created_ms))
        elif entry.event in ENDS and hold.id not in self._ended:
            unseen = _Begun(item.parent, describe(hold, {}, item.view), hold.created_ms)
            self._end(hold, entry, self._begun.pop(hold.id, unseen))
        elif hold.id in self._ended or entry.event in ("correct", "reopen"):  # another process may have ended it
            begun = self._begun.pop(hold.id, None)
            parent = self._ended.get(hold.id) or (item.parent if begun is None else begun.parent)
            _put(self._ended, hold.id, parent)
            self._later(hold, entry, parent)
        else:
            begun = self._begun.get(hold.id)
            name = str(entry.facts().get("name") or entry.event)
            if begun is not None:
                begun.steps.append((name, entry.at_ms * _MS))
            if entry.event == "note" and hold.doubt:
                shown = {HOLD_ID: hold.id, "x402guard.doubt": redacted(hold.doubt)}
                self._point("x402guard in_doubt", item.parent, entry.at_ms, shown, error=redacted(hold.doubt))

    def _end(self, hold: Hold, entry: Entry, begun: _Begun) -> None:
        shown = {**begun.call.attributes, **outcome(hold, entry)}
        begun.steps.append((entry.event, entry.at_ms * _MS))
        error = redacted(hold.doubt) if hold.doubt and is_doubtful(hold) else None
        context = self._span(begun, shown, max(entry.at_ms, begun.begun_ms), error)
        _put(self._ended, hold.id, context)
        seconds = max(0, entry.at_ms - begun.begun_ms) / 1000
        self._instruments.ended(shown, seconds, _within(context))

    def _leave_open(self, hold_id: str, begun: _Begun) -> None:
        """End the span of a call that is still out as this process leaves it: it counts until its time is over."""
        shown = {**begun.call.attributes, "x402guard.outcome": str(HoldState.HELD)}
        last_ns = max((at_ns for _, at_ns in begun.steps), default=begun.begun_ms * _MS)
        self._span(begun, shown, -(-last_ns // _MS), "this process has seen no end of it: it may still be taken")
        self._begun.pop(hold_id, None)

    def _span(self, begun: _Begun, shown: Mapping[str, Attribute], end_ms: int, error: str | None) -> SpanContext:
        kind = SpanKind.INTERNAL if begun.call.is_inside else SpanKind.CLIENT
        span = self._tracer.start_span(
            begun.call.name, _within(begun.parent), kind, shown, start_time=begun.begun_ms * _MS
        )
        for name, at_ns in begun.steps:
            span.add_event(name, timestamp=at_ns)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_ms * _MS)
        return span.get_span_context()

    def _point(
        self, name: str, parent: SpanContext, at_ms: int, shown: Mapping[str, Attribute], *, error: str | None = None
    ) -> None:
        """Show something that has no length."""
        span = self._tracer.start_span(name, _within(parent), attributes=shown, start_time=at_ms * _MS)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(at_ms * _MS)

    def _later(self, hold: Hold, entry: Entry, parent: SpanContext) -> None:
        """Show what changed after the end of a call, below the span of the call."""
        facts = entry.facts()
        shown: dict[str, Attribute] = {HOLD_ID: hold.id, KIND: str(hold.kind), **proof_of(hold, facts)}
        if facts.get("evidence"):
            shown[EVIDENCE] = str(facts["evidence"])
        if entry.captured:
            shown |= {"x402guard.amount_nanos": entry.captured, "x402guard.amount_usd": dollars(entry.captured)}
            self._instruments.corrected(dollars(entry.captured), str(hold.kind))
        self._point(f"x402guard {facts.get('name') or entry.event}", parent, entry.at_ms, shown)

    def _mark(self, notice: Notice, item: _Committed) -> None:
        """Show a refusal or a trip, with an error."""
        shown: dict[str, Attribute] = {RULE: notice.rule, **whereabouts(notice.session, item.view)}
        names = ("requested", "available") if notice.kind == "refused" else ("counted", "limit")
        for name, amount in zip(names, (notice.amount, notice.limit), strict=True):
            if amount is not None:
                shown[f"x402guard.{name}_usd"] = float(amount)
        at_ms = int(notice.time * 1000)
        self._point(f"x402guard {notice.kind}", item.parent, at_ms, shown, error=redacted(notice.message))


def _within(parent: SpanContext) -> Context:
    """Return a context with a span in it, without the span: a caller's may hold whole prompts."""
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


V = TypeVar("V")


def _joined(jobs: Sequence[Callable[[], object]], until_s: float) -> bool:
    """Run jobs in threads, and wait for them until then. Returns False if no thread can start: the interpreter is ending."""
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        return False
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return True


def _put(known: OrderedDict[str, V], key: str, value: V) -> None:
    """Keep a value; the oldest of ten thousand goes."""
    known[key] = value
    if len(known) > _MOST_KNOWN:
        known.popitem(last=False)


_SHARING: Final = threading.Lock()
_SHARED: Final[set[Telemetry]] = set()
"""The one that the guards of this process share: two would overwrite each other's metrics at the collector."""


def telemetry() -> Telemetry:
    """Return the observer of this process, for the providers of the program, or for OTLP exporters of our own.

    Those read OpenTelemetry's environment (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``). Raises
    ``ConfigError`` for a setting there that cannot be used, ``ImportError`` without the exporter.
    """
    with _SHARING:
        found = next((each for each in _SHARED if each._pid == os.getpid()), None)  # noqa: SLF001 - of this module
        if found is None:
            _SHARED.clear()
            found = _made()
            _SHARED.add(found)
        found.users += 1
        return found


def _made() -> Telemetry:
    tracers, meters = trace.get_tracer_provider(), metrics.get_meter_provider()
    if not _stands_in(tracers) or not _stands_in(meters):
        return Telemetry(tracers, meters)
    from x402guard.telemetry.export import providers

    own = providers()
    return Telemetry(*own, keeps_ids=True, owned=own)


def _stands_in(provider: object) -> bool:
    """True for what the API gives to a program that has set no provider."""
    return type(provider).__name__.lstrip("_").startswith("Proxy")


@atexit.register
def _end_all() -> None:
    """End what a guard that was never closed has left."""
    for each in tuple(_SHARED):
        if each._pid == os.getpid():  # noqa: SLF001 - of this module
            _SHARED.discard(each)
            each.end()

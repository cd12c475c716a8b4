"""Makes OpenTelemetry providers that export by OTLP over HTTP, for a program that has set none."""

from __future__ import annotations

import os
from typing import Final
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from x402guard.errors import ConfigError
from x402guard.telemetry.calls import EVIDENCE, KIND

_INFERENCE: Final = frozenset(
    {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "server.address"}
)

VIEWS: Final = (
    View(instrument_name="x402guard.call.*", attribute_keys={KIND, EVIDENCE, "x402guard.outcome", "x402.network"}),
    View(instrument_name="gen_ai.client.*", attribute_keys={*_INFERENCE, "gen_ai.token.type"}),
)
"""The attributes of each metric. The hold's id is none of them, so it stands in the exemplars."""


def _is_exported(signal: str) -> bool:
    """Return whether a signal, TRACES or METRICS, is exported. Raises ``ConfigError`` for what is not OTLP over HTTP."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get(f"OTEL_{signal}_EXPORTER") or "otlp"
    if exporter == "none":
        return False
    if exporter != "otlp":
        raise ConfigError(
            f"telemetry: OTEL_{signal}_EXPORTER is {exporter!r:.60}, and x402guard exports otlp, or none of it; {_INSTEAD}"
        )
    name = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
    if not os.environ.get(name):
        name = "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = os.environ.get(name) or "http/protobuf"
    if protocol != "http/protobuf":
        raise ConfigError(f"telemetry: {name} is {protocol!r:.60}, and x402guard exports http/protobuf; {_INSTEAD}")
    return True


_INSTEAD: Final = "unset it, or set OpenTelemetry's providers in the program"
_INSTANCE: Final = "service.instance.id"


def _resource() -> Resource:
    """Return what OpenTelemetry's environment says of this process, with an id of its own: two are two series."""
    named = _INSTANCE in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create() if named else Resource.create({_INSTANCE: str(uuid4())})


def providers() -> tuple[TracerProvider, MeterProvider]:
    """Return providers that export spans in batches and metrics once a minute. Raises ``ConfigError``."""
    traces, measures = _is_exported("TRACES"), _is_exported("METRICS")
    try:
        # The end of the guard waits for the export, a few seconds; the end of the process would wait for longer.
        tracers = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        if traces:
            tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        readers = [PeriodicExportingMetricReader(OTLPMetricExporter())] if measures else []
        return tracers, MeterProvider(readers, tracers.resource, shutdown_on_exit=False, views=VIEWS)
    except ValueError as error:
        raise ConfigError(f"telemetry: OpenTelemetry cannot use its environment: {error}") from None

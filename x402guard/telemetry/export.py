"""Makes OpenTelemetry providers that export by OTLP over HTTP, for a program that has set none."""

from __future__ import annotations

import os
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import View
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
    exporter = os.environ.get(f"OTEL_{signal}_EXPORTER") or "otlp"
    if exporter not in ("otlp", "none"):
        raise ConfigError(
            f"telemetry: OTEL_{signal}_EXPORTER is {exporter!r:.60}, and x402guard exports otlp, or none of it; unset it, "
            "or set OpenTelemetry's providers in the program"
        )
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"):
        if os.environ.get(name, "http/protobuf") != "http/protobuf":
            raise ConfigError(
                f"telemetry: {name} is {os.environ[name]!r:.60}, and x402guard exports http/protobuf; unset it, or set "
                "OpenTelemetry's providers in the program"
            )
    return exporter == "otlp"


def providers() -> tuple[TracerProvider, MeterProvider]:
    """Return providers that export spans in batches and metrics once a minute. Raises ``ConfigError``."""
    traces, measures = _is_exported("TRACES"), _is_exported("METRICS")
    # The end of the guard waits for the export, a few seconds; the end of the process would wait for longer.
    tracers = TracerProvider(shutdown_on_exit=False)
    if traces:
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    readers = [PeriodicExportingMetricReader(OTLPMetricExporter())] if measures else []
    return tracers, MeterProvider(readers, shutdown_on_exit=False, views=VIEWS)

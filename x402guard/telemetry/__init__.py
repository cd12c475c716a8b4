"""Traces and metrics of what a guard commits, for OpenTelemetry."""

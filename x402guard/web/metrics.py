"""Writes the live view as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from x402guard.kernel.rows import NANOS_PER_DOLLAR
from x402guard.views.live import Totals

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_WORDS: Final = {
    "spent": "Captured, in the present window",
    "held": "Signed or sent, and not taken yet",
    "left": "Left under its own limit",
}


class _Ledger(Collector):
    """The metrics of one moment. Prometheus counts in floats, so dollars are rounded there, and only there."""

    def __init__(self, view: Totals) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view = self._view
        wallet = (("spent", view.spent), ("held", view.out), ("left", view.left))
        for name, amount in wallet:
            if amount is not None:
                words = f"{_WORDS[name]}, by the whole wallet"
                yield GaugeMetricFamily(f"x402guard_wallet_{name}_dollars", words, value=amount / NANOS_PER_DOLLAR)
        for name, words in _WORDS.items():
            family = GaugeMetricFamily(f"x402guard_{name}_dollars", words, labels=["customer"])
            for each in view.customers:
                amount = {"spent": each.spent, "held": each.out, "left": each.left}[name]
                if amount is not None:
                    family.add_metric([each.name], amount / NANOS_PER_DOLLAR)
            yield family
        stopped = GaugeMetricFamily("x402guard_stopped_customers", "Named budgets that are stopped")
        stopped.add_metric([], sum(each.stopped is not None for each in view.customers))
        yield stopped
        sessions = GaugeMetricFamily("x402guard_sessions", "Outermost sessions by state", labels=["state"])
        for state, number in view.counts.items():
            sessions.add_metric([state], number)
        yield sessions
        yield GaugeMetricFamily("x402guard_outstanding_calls", "Live holds", value=view.outstanding)
        yield GaugeMetricFamily("x402guard_questions", "Questions that wait for a person", value=view.asks)
        yield GaugeMetricFamily(
            "x402guard_wallet_stopped", "1 while the wallet is stopped", value=view.stopped is not None
        )
        refused = CounterMetricFamily("x402guard_refusals", "What each rule has refused", labels=["rule"])
        for rule, number in view.refused:
            refused.add_metric([rule], number)
        yield refused


def metrics(view: Totals) -> bytes:
    """Return the figures in Prometheus' text format, version 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Ledger(view))
    return generate_latest(registry)

"""Checks of a report: that it adds up, and agrees with the ledger's rows."""

from __future__ import annotations

from x402guard.ledger.queries import nodes_of
from x402guard.ledger.store import LedgerStore
from x402guard.money import dollars_to_nanos
from x402guard.testing.simulator.world import Violation
from x402guard.views.books import books_of
from x402guard.views.model import View
from x402guard.views.report import Report


def check_report(store: LedgerStore, node_id: str) -> None:
    """Check that a report adds up, and agrees with the ledger's rows."""
    node = nodes_of(store, node_id)[node_id]
    report = Report.of(books_of(store, node_id))
    _check_view(node_id, report.view)
    shown = report.values
    nanos = {name: dollars_to_nanos(shown[name]) for name in ("spent", "spent_total", "held")}
    if nanos["spent_total"] + nanos["held"] != node.used or nanos["spent"] != node.spent:
        raise Violation("report", f"{node_id}: {nanos}, used {node.used}, spent {node.spent}")
    if nanos["held"] != sum(dollars_to_nanos(row["amount"]) for row in shown["outstanding"]):
        raise Violation("report", f"{node_id}: what is outstanding is not {nanos['held']}")
    parts = {
        "evidence": sum(dollars_to_nanos(amount) for amount in shown["evidence"].values()),
        "kinds": sum(dollars_to_nanos(shown[kind]["total"]) for kind in ("llm", "tools", "payments")),
    }
    for name, total in parts.items():
        if total != nanos["spent_total"]:
            raise Violation("report", f"{node_id}: by {name} it is {total}, of {nanos}")
    settled = sum(dollars_to_nanos(shown["settlement"][how]) for how in ("proven", "claimed", "assumed"))
    if settled != dollars_to_nanos(shown["payments"]["total"]):
        raise Violation("report", f"{node_id}: settlement {shown['settlement']} of {shown['payments']['total']}")


def _check_view(node_id: str, view: View | None) -> None:
    """Check that every group of a view adds up to what is spent and out, also in the present window of a budget."""
    if view is None:
        raise Violation("view", f"{node_id}: there is none")
    total = view.sums.total
    groups = {
        "evidence": total - view.gap,
        "kinds": sum(row.sums.total for row in view.kinds),
        "agents": sum(row.sums.total for row in view.agents),
        "uses": sum(row.sums.total for row in (*view.sellers, *view.models, *view.tools)),
        "days": sum(day.sums.spent for day in view.days) + view.sums.out,
    }
    for name, found in groups.items():
        if found != total:
            raise Violation("view", f"{node_id}: by {name} it is {found} of {total}, spent {view.spent}")

"""Says for each hold what counts in a view: how much, on what evidence, and where it belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from x402guard.ledger.authorize import REFUSAL_SAMPLES
from x402guard.ledger.lines import HoldLine
from x402guard.ledger.model import Evidence, HoldKind, Node, NodeKind
from x402guard.ledger.tree import path
from x402guard.views.books import Books

NAMES: Final[Mapping[str, str]] = {
    Evidence.CHAIN: "proven",
    Evidence.CHAIN_HEAD: "proven",
    Evidence.CLAIMED: "claimed",
    Evidence.PROVIDER_USAGE: "stated",
    Evidence.ESTIMATE: "priced",
    Evidence.ASSUMED: "assumed",
}
"""What a report calls each kind of evidence."""


class Period(Struct, frozen=True):
    """The time in which a view counts what was captured, in unix milliseconds; the end is not included.

    ``window`` is True for the present window of a budget that begins again. There, a payment that lapsed or was corrected
    counts when it was first captured, as in the ledger.
    """

    since_ms: int | None = None
    until_ms: int | None = None
    window: bool = False

    @property
    def is_all(self) -> bool:
        """True for all time."""
        return self.since_ms is None and self.until_ms is None

    def holds(self, at_ms: int) -> bool:
        """True if a moment is in it."""
        return (self.since_ms is None or at_ms >= self.since_ms) and (self.until_ms is None or at_ms < self.until_ms)

    def captured(self, line: HoldLine) -> int:
        """Return what a hold has captured in it, in nano-dollars."""
        return sum(amount for at_ms, amount in self.changes(line) if self.holds(at_ms))

    def changes(self, line: HoldLine) -> Sequence[tuple[int, int]]:
        """Return when what a hold has captured changed, as it counts here."""
        if not self.window or not line.changes:
            return line.changes
        closed_ms, first = line.changes[0]
        if line.event == "lapse":
            closed_ms = min(closed_ms, int(line.facts.get("deadline") or closed_ms) * 1000)
        counted, so_far = [(closed_ms, first)], first
        for at_ms, amount in line.changes[1:]:
            again = amount if amount < 0 else max(0, min(amount, first - so_far))
            counted += [(closed_ms, again), (at_ms, amount - again)]
            so_far += amount
        return counted


class Home(Struct, frozen=True):
    """Where a node belongs: its agent, the outermost session around it, and the nearest named budget, by id and name."""

    agent: str
    agent_name: str
    session: str
    session_name: str
    customer: str
    customer_name: str


class Taken(Struct, frozen=True, gc=False):
    """What one hold counts in a view: captured (nano-dollars) on the evidence of that name, and still out."""

    line: HoldLine
    kind: str
    evidence: str
    captured: int
    out: int
    home: Home

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of its authorization."""
        return self.line.facts


def homes(books: Books) -> dict[str, Home]:
    """Return where each node of the books belongs, by the node's id."""
    return {node.id: _home(books, node) for node in books.below}


def _home(books: Books, node: Node) -> Home:
    above = path(books.nodes, node.id)
    agent = books.nodes[books.agents[node.id]]
    session = next((each for each in reversed(above) if each.kind is NodeKind.SESSION), node)
    budget = next((each for each in above if each.kind is NodeKind.BUDGET), None)
    customer = ("", "") if budget is None else (budget.id, budget.name)
    return Home(agent.id, agent.name, session.id, session.name, *customer)


def taken(books: Books, period: Period, where: Mapping[str, Home]) -> Iterator[Taken]:
    """Yield each hold that counts in a period, in the order of the journals. Reservations of tokens are none."""
    everything = period.is_all
    for line in books.lines.values():
        kind = line.facts.get("kind", HoldKind.PAYMENT)
        if kind == HoldKind.TOKENS:
            continue
        captured = line.captured if everything else period.captured(line)
        out = line.held if everything or period.until_ms is None or line.at_ms < period.until_ms else 0
        if captured or out > 0 or everything or any(period.holds(at_ms) for at_ms, _ in line.changes):
            evidence = NAMES.get(line.evidence or "", "")
            if everything and not evidence and out <= 0:
                continue
            yield Taken(line, kind, evidence or "assumed", captured, max(0, out), where[line.node_id])


class Refused(Struct, frozen=True):
    """What one rule has refused in one node within a period. Amounts and words are those of the last one there."""

    node: str
    rule: str
    count: int
    first_ms: int
    last_ms: int
    requested: int | None
    available: int | None
    reason: str
    is_least: bool


def refusals_in(books: Books, period: Period) -> list[Refused]:
    """Return what was refused in a period, by node and rule.

    A counter that lies in the period as a whole counts in full. Of one that does not, those refusals count that are kept
    one by one: the first and the last hundred.
    """
    samples: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in books.samples:
        if period.holds(int(row["at_ms"])):
            samples.setdefault((row["node"], str(row["rule"])), []).append(row)
    found = []
    for row in books.counters:
        first, last = int(row["first_ms"]), int(row["at_ms"])
        inside = samples.get((row["node"], str(row["rule"])), [])
        if period.holds(first) and period.holds(last):
            found.append(_refused(row, int(row["count"]), first, last, is_least=False))
        elif inside:
            inside.sort(key=lambda each: int(each["at_ms"]))
            first, last = int(inside[0]["at_ms"]), int(inside[-1]["at_ms"])
            is_least = int(row["count"]) > 2 * REFUSAL_SAMPLES
            found.append(_refused({**inside[-1], "node": row["node"]}, len(inside), first, last, is_least=is_least))
    return found


def _refused(row: Mapping[str, Any], count: int, first_ms: int, last_ms: int, *, is_least: bool) -> Refused:
    return Refused(
        row["node"], str(row["rule"]), count, first_ms, last_ms, row["requested"], row["available"], str(row["reason"]),
        is_least,
    )  # fmt: skip

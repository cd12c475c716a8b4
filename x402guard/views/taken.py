"""Says for each hold what counts in a view: how much, on what evidence, and where it belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from x402guard.kernel.rows import Evidence, HoldKind, Node, NodeKind
from x402guard.ledger.authorize import REFUSAL_SAMPLES
from x402guard.ledger.lines import HoldLine
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

    ``window`` is True for the present window of a budget that begins again. There, what was corrected counts when it was
    first captured, as in the ledger.
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

    def inside(self, line: HoldLine) -> list[tuple[int, int, str | None]]:
        """Return the changes of what a hold has captured that count in it: when, how much, on what evidence."""
        changes = line.counted if self.window else line.changes
        return [change for change in changes if self.holds(change[0])]

    def is_corrected_after(self, line: HoldLine) -> bool:
        """True if what a hold has captured changed after it: what is known now is not known of the amount of then.

        A proof that comes later and changes no amount counts for the call, in each period.
        """
        until_ms = self.until_ms
        return not self.window and until_ms is not None and any(at_ms >= until_ms for at_ms, _, _ in line.changes)

    def begins(self, line: HoldLine) -> bool:
        """True if a hold was first captured in it: a later correction is no call of its period."""
        changes = line.counted if self.window else line.changes
        return not changes or self.holds(changes[0][0])


class Home(Struct, frozen=True):
    """Where a node belongs: its agent, the outermost session around it, and the nearest named budget, by id and name."""

    agent: str
    agent_name: str
    session: str
    session_name: str
    customer: str
    customer_name: str


class Taken(Struct, frozen=True, gc=False):
    """What one hold counts in a view: captured (nano-dollars) on the evidence of that name, and still out.

    ``is_call`` is False for a correction in a period of a call of an earlier one.
    """

    line: HoldLine
    kind: str
    evidence: str
    captured: int
    out: int
    home: Home
    is_call: bool = True

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
        inside = [] if everything else period.inside(line)
        captured = line.captured if everything else sum(amount for _, amount, _ in inside)
        out = line.held if everything or period.until_ms is None or line.at_ms < period.until_ms else 0
        if not (captured or out > 0 or everything or inside):
            continue
        said = inside[-1][2] if inside and period.is_corrected_after(line) else line.evidence
        evidence = NAMES.get(said or "", "")
        if everything and not evidence and out <= 0:
            continue
        is_call = everything or period.begins(line)
        yield Taken(line, kind, evidence or "assumed", captured, max(0, out), where[line.node_id], is_call)


def exposed_until(deadline: int | None, method: str | None) -> int | None:
    """Return the first second at which a payment can no longer be taken, in unix seconds; None without a deadline.

    EIP-3009 is valid while t < deadline, Permit2 while t ≤ deadline.
    """
    return None if deadline is None else deadline + (method == "permit2")


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

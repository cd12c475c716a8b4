"""Folds journals into one line for each hold, which is what reports are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from x402guard.evm import is_transaction
from x402guard.kernel.rows import Entry, HoldKind
from x402guard.ledger.evidence import transaction_of

_ENDS: Final = frozenset({"capture", "lapse", "correct", "void", "expire"})
_NAMED_BY: Final[Mapping[str, str]] = {HoldKind.PAYMENT: "host", HoldKind.LLM: "model", HoldKind.TOOL: "tool"}


class HoldLine(Struct, gc=False):
    """The state of one hold after its entries. Amounts are in nano-dollars, times in unix ms, deadlines in unix s.

    A report has as many of them as calls, and none is part of a cycle, so the garbage collector does not look at them.
    """

    hold_id: str
    node_id: str
    facts: Mapping[str, Any]
    held: int
    at_ms: int
    captured: int = 0
    ended: bool = False
    event: str = "authorize"
    evidence: str | None = None
    proof: str | None = None
    doubt: str | None = None
    claimed: int = 0
    transaction: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    changes: tuple[tuple[int, int, str | None], ...] = ()
    """When what it has captured changed, in unix ms, by how much, and on what evidence."""
    closed_ms: int = 0
    """When it counts as captured in a window, in unix ms, by the rule of ``transitions``; 0 before the capture."""
    first: int = 0
    """The amount that was first captured since then."""
    counted: tuple[tuple[int, int, str | None], ...] = ()
    """The changes as windows count them: those of an earlier window at ``closed_ms``."""

    @property
    def kind(self) -> str:
        """``payment``, ``llm``, ``tool`` or ``tokens``."""
        return str(self.facts.get("kind", HoldKind.PAYMENT))

    @property
    def to(self) -> str:
        """The host of a payment, the model of an LLM call, the tool: what it was used for."""
        return str(self.facts.get(_NAMED_BY.get(self.kind, "")) or "unknown")

    @property
    def known_transaction(self) -> str:
        """The transaction that proves a payment, or that its seller names; ""."""
        return transaction_of(self.proof) or self.transaction

    @property
    def disputed(self) -> int:
        """What a provider claims for an LLM call beyond what is booked."""
        return max(0, self.claimed - self.captured) if self.kind == HoldKind.LLM else 0

    @property
    def was_captured(self) -> bool:
        """True if the hold ended in a capture, also one of zero."""
        return self.ended and self.evidence is not None


def fold_holds(entries: Iterable[Entry]) -> dict[str, HoldLine]:
    """Return every hold in *entries* (in order within each node), by id."""
    lines: dict[str, HoldLine] = {}
    for entry in entries:
        hold_id, event = entry.hold_id, entry.event
        if hold_id is None:
            continue
        if event == "authorize":
            lines[hold_id] = HoldLine(hold_id, entry.node_id, entry.facts(), entry.held, entry.at_ms)
        elif (line := lines.get(hold_id)) is not None:
            _follow(line, entry, entry.facts())
    return lines


def _follow(line: HoldLine, entry: Entry, facts: Mapping[str, Any]) -> None:
    line.held += entry.held
    if entry.captured or entry.event in _ENDS:
        _change(line, entry, facts.get("evidence"))
    line.doubt = facts.get("doubt", line.doubt)
    if claim := facts.get("claim"):
        line.claimed = claim.get("amount", line.claimed)
        named = claim.get("transaction", line.transaction)
        line.transaction = named if is_transaction(named) else ""  # a seller may write any text there
    if entry.event == "reopen":
        line.first, line.closed_ms = 0, line.closed_ms if facts.get("same") else 0
        line.ended, line.event, line.evidence, line.proof = False, "authorize", None, None
    elif entry.event in _ENDS:
        line.ended, line.event = True, entry.event
        line.evidence = facts.get("evidence", line.evidence)
        if usage := facts.get("usage"):
            line.tokens_in = int(usage.get("input_tokens", line.tokens_in))
            line.tokens_out = int(usage.get("output_tokens", line.tokens_out))
        line.proof = facts.get("proof", line.proof)


def _change(line: HoldLine, entry: Entry, evidence: str | None) -> None:
    """Note a change of what is captured: as it happened, and as windows count it (see ``kernel.windows.past_after``)."""
    before, amount = line.captured, entry.captured
    line.captured += amount
    if line.first == 0 and entry.event in ("capture", "lapse", "correct"):
        line.first = line.captured
    if not line.closed_ms and line.captured:
        ends_ms = max(line.at_ms, int(line.facts.get("deadline") or 0) * 1000)
        line.closed_ms = min(entry.at_ms, ends_ms) if entry.event == "lapse" else entry.at_ms
    if not amount:
        return
    change, closed_ms = ((entry.at_ms, amount, evidence),), line.closed_ms or entry.at_ms
    if not line.changes and closed_ms == entry.at_ms:
        line.changes = line.counted = change
        return
    line.changes += change
    again = amount if amount < 0 else min(line.captured, line.first) - min(before, line.first)
    line.counted += ((closed_ms, again, evidence), (entry.at_ms, amount - again, evidence))

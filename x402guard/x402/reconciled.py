"""Defines the result of a reconciliation. What reconciles loads at the first one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from x402guard.kernel.rows import Evidence, Hold, HoldState
from x402guard.money import format_dollars
from x402guard.x402.settlement import is_open


@dataclass(slots=True)
class Reconciliation:
    """The result of one reconciliation. Amounts in nano-dollars.

    Attributes:
        asked: payments that the chain was asked about.
        proven: payments newly proven by a final block.
        captured, expired, voided, reopened: payments that it ended, or made live again.
        still_open: payments that are not proven yet.
        freed, added: the amounts given back to budgets, and counted in addition.
        contradicted: ids of payments whose receipt the chain contradicts.
        unreadable: network → the reason why it could not be read.
        unexplained: Transfers out of the wallet that no payment in the ledger explains, until its owner acknowledges them.
        unexplained_total: their total value.
        allowances: the amounts that Permit2 may still move, one row per token.
        unproven_tokens: why figures of tokens that the owner has added are not believed, one sentence each.
        complete: False if one run could not read all Transfers; the next one continues.
    """

    asked: int = 0
    proven: int = 0
    captured: int = 0
    expired: int = 0
    voided: int = 0
    reopened: int = 0
    still_open: int = 0
    freed: int = 0
    added: int = 0
    contradicted: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    unexplained: list[dict[str, Any]] = field(default_factory=list)
    unexplained_total: int = 0
    allowances: list[dict[str, Any]] = field(default_factory=list)
    unproven_tokens: list[str] = field(default_factory=list)
    complete: bool = True

    @property
    def is_alarming(self) -> bool:
        """True if money moved that the ledger does not account for, or may have been counted by a wrong figure."""
        return bool(self.contradicted or self.unexplained or self.unproven_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values; amounts as decimal dollars."""
        rows: dict[str, Any] = dataclasses.asdict(self)
        for name in ("freed", "added", "unexplained_total"):
            rows[name] = format_dollars(rows[name])
        for row in (*rows["unexplained"], *rows["allowances"]):
            row |= {name: format_dollars(row[name]) for name in ("amount", "allowance", "exposed") if name in row}
        return rows

    def note(self, before: Hold, after: Hold) -> None:
        """Count the change of one payment."""
        counted, counts = _counted(before), _counted(after)
        self.freed += max(0, counted - counts)
        self.added += max(0, counts - counted)
        self.proven += after.evidence is Evidence.CHAIN and before.evidence is not Evidence.CHAIN
        if after.state is not before.state:
            self.captured += after.state is HoldState.CAPTURED
            self.expired += after.state is HoldState.EXPIRED
            self.voided += after.state is HoldState.VOIDED
            self.reopened += after.state is HoldState.HELD
        self.still_open += is_open(after)


def _counted(hold: Hold) -> int:
    return hold.amount if hold.state is HoldState.HELD else hold.captured

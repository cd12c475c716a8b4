"""Detects sellers that always take the ceiling: in ``upto`` the server alone chooses the amount, so it is recorded."""

from __future__ import annotations

from typing import Final

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.evm import Address
from x402guard.kernel.rows import Hold, Nanos
from x402guard.ledger.view import LedgerView

LAST_SETTLEMENTS: Final = 20
"""How many of a payee's settlements are remembered. If all of them are at the ceiling, the payee does not meter."""

_FULL_PERCENT: Final = 99


def ceiling_mark(payee: Address) -> MarkKey:
    """Return the key of the mark with a payee's last ``upto`` settlements."""
    return "upto", payee


def note_settlement(view: LedgerView, hold: Hold, amount: Nanos) -> None:
    """Remember whether an ``upto`` payment was settled at its ceiling (99 % or more).

    Writes the event ``always_at_ceiling`` once the last twenty settlements all were.
    """
    intent = hold.payment()
    if intent.scheme != "upto":
        return
    key = ceiling_mark(intent.payee)
    before = view.mark(key) or {"full": []}
    full = [*before["full"], amount * 100 >= hold.amount * _FULL_PERCENT][-LAST_SETTLEMENTS:]
    habit = len(full) == LAST_SETTLEMENTS and all(full)
    if habit and not always_at_ceiling(view, intent.payee):
        facts = {"name": "always_at_ceiling", "payee": intent.payee, "settlements": LAST_SETTLEMENTS}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)
    view.put_mark(key, {"full": full, "at_ms": view.now_ms})


def always_at_ceiling(view: LedgerView, payee: Address) -> bool:
    """True if a payee's last twenty ``upto`` settlements each took 99 % or more of the authorized amount."""
    full = (view.mark(ceiling_mark(payee)) or {"full": []})["full"]
    return len(full) == LAST_SETTLEMENTS and all(full)

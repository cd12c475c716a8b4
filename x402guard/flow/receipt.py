"""The receipt of one payment, call or tool, for the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from x402guard.ledger.model import Hold, HoldState
from x402guard.money import nanos_to_decimal


@dataclass(frozen=True, slots=True)
class Receipt:
    """The state of a payment, as ``response.extensions["x402guard"]``.

    Attributes:
        hold_id: its hold in the ledger.
        amount: dollars captured, or dollars held while the hold is live.
        evidence: why the amount is believed: ``chain``, ``chain_head``, ``claimed`` …; None while it is held.
        state: ``captured`` or ``held``.
        in_doubt: the outcome is unknown; the hold counts in full.
        transaction: the hash that the server names, or "".
        deadline: unix time in seconds after which the signature is worthless.
        presented: how often the payment had been presented before; 0 for one that was signed for this request.
        model: the model of an LLM call, "" for a payment. Its receipt is complete once the answer's body has ended.
        output_limit: the output limit that was written into an LLM call without one, in tokens; else None.
        usage: what an LLM call used, by unit, if its provider stated it.
        note: the ledger's note on an amount that the provider did not state.
    """

    hold_id: str
    amount: Decimal
    evidence: str | None
    state: str
    in_doubt: bool
    transaction: str
    deadline: int
    presented: int
    model: str = ""
    output_limit: int | None = None
    usage: Mapping[str, int] | None = None
    note: str = ""

    @property
    def represented(self) -> bool:
        """A payment in doubt was presented again; no new one was signed."""
        return self.presented > 0


def receipt_of(hold: Hold) -> Receipt:
    """Return the receipt of a hold as it stands."""
    amount = hold.captured if hold.state is HoldState.CAPTURED else hold.amount
    return Receipt(
        hold_id=hold.id,
        amount=nanos_to_decimal(amount),
        evidence=None if hold.evidence is None else str(hold.evidence),
        state=str(hold.state),
        in_doubt=hold.state is HoldState.HELD and hold.doubt is not None,
        transaction="" if hold.claim is None else hold.claim.transaction,
        deadline=hold.deadline_unix,
        presented=hold.presented,
    )

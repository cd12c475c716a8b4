"""The receipt of one payment, call or tool, for the caller."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from msgspec import Struct

from x402guard.errors import CallTimeout, PaidNotDelivered, SettlementUncertain
from x402guard.kernel.rows import Hold, HoldState
from x402guard.ledger.evidence import named_transaction
from x402guard.money import dollars_to_nanos, nanos_to_decimal


class Receipt(Struct, frozen=True):
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
        shortened: the answer used all of that output limit, so it ends before the model was done.
        usage: what an LLM call used, by unit, if its provider stated it.
        note: the ledger's note on an amount that the provider did not state.
        place: the method and URL of the request, without the query.
        payee, network: the paid address and its network (CAIP-2); "" for an LLM call.
        delivery: ``done`` if the whole answer was read before this receipt was made, ``open`` if its body is still to be
            read, ``lost`` if it broke; ``forgiven`` if the owner has closed the purchase meanwhile.
        payment_id: the ``payment-identifier`` that went with the payment; None if the server does not use it.
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
    shortened: bool = False
    usage: Mapping[str, int] | None = None
    note: str = ""
    place: str = ""
    payee: str = ""
    network: str = ""
    delivery: str = "done"
    payment_id: str | None = None

    @property
    def represented(self) -> bool:
        """A payment in doubt was presented again; no new one was signed."""
        return self.presented > 0

    def facts(self) -> dict[str, str | int | bool | None]:
        """Return what a caller without Python is told of it, as JSON values; dollars as a decimal string."""
        return {
            "hold_id": self.hold_id,
            "amount": format(self.amount, "f"),
            "state": self.state,
            "evidence": self.evidence,
            "in_doubt": self.in_doubt,
            "transaction": self.transaction,
            "presented": self.presented,
        }


def receipt_of(hold: Hold) -> Receipt:
    """Return the receipt of a hold as it stands."""
    amount = hold.captured if hold.state is HoldState.CAPTURED else hold.amount
    return Receipt(
        hold_id=hold.id,
        amount=nanos_to_decimal(amount),
        evidence=None if hold.evidence is None else str(hold.evidence),
        state=str(hold.state),
        in_doubt=hold.state is HoldState.HELD and hold.doubt is not None,
        transaction=named_transaction(hold),
        deadline=hold.deadline_unix,
        presented=hold.presented,
        place=f"{hold.purpose.method} {hold.purpose.url}".strip(),
        payee="" if hold.intent is None else hold.intent.payee,
        network="" if hold.intent is None else hold.intent.network,
        delivery=str(hold.delivery),
        payment_id=None if hold.intent is None else hold.intent.payment_id,
    )


def undelivered(
    reason: str, paid: Receipt, *, kind: type[SettlementUncertain] = PaidNotDelivered, advice: str | None = None
) -> SettlementUncertain:
    """Return the error for what was paid, or may have to be paid, and did not come; *reason* says what happened."""
    return kind(
        reason,
        hold_id=paid.hold_id,
        deadline=paid.deadline,
        advice=advice,
        amount=dollars_to_nanos(paid.amount),
        payee=paid.payee,
        network=paid.network,
        place=paid.place,
        payment_id=paid.payment_id,
        transaction=paid.transaction,
    )


_SET: Final = "policy.timeouts.payment_s, the client's read timeout and the seller's offer set how long it may take."
_TAKEN: Final = f"The same request pays no second time, and says that its answer was lost. {_SET}"
_OPEN: Final = f"The same request pays no second time: it presents the same payment again, or asks the chain. {_SET}"


def timed_out(cut: CallTimeout, paid: Receipt | None) -> CallTimeout:
    """Return the time-out with the facts of what its call has paid, or may have to pay."""
    if paid is None:
        return cut
    to = f" to {paid.payee} on {paid.network}" if paid.payee else ""
    state = "was taken" if paid.state == HoldState.CAPTURED else "may still be taken"
    where = "/".join(paid.place.split("/")[:3])  # a redirect of the seller may have named the path
    told = CallTimeout(f"{where}: {cut}; ${paid.amount}{to} {state} for it (hold {paid.hold_id[:16]}…)")
    told.hold_id, told.deadline, told.transaction = paid.hold_id, paid.deadline, paid.transaction
    told.amount, told.payee, told.network, told.place = paid.amount, paid.payee, paid.network, paid.place
    if paid.payee:
        told.advice, told.retry = (_TAKEN, "no") if paid.state == HoldState.CAPTURED else (_OPEN, "same_request")
    return told

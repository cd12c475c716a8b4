"""What a chain read finds of a payment, and the proof that it makes of it.

A chain read has three kinds of answer: the payment was settled or its nonce is used; it was not settled as of a block;
the chain could not be read. "Could not read" never means "not settled".
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from x402guard.kernel import proofs
from x402guard.kernel.intent import Intent


class Settled(Struct, frozen=True):
    """A transaction settled exactly this nonce: its own calldata and its one matching Transfer log show it.

    Attributes:
        amount_atomic: the amount moved, in the token's atomic units.
        transaction, log_index: the Transfer log; with the network it is the proof of one hold, and of no other.
        final: True if the block cannot be undone.
        proof: what the kernel takes: the same, with the payment's own names.
    """

    amount_atomic: int
    transaction: str
    log_index: int
    final: bool
    proof: proofs.AtHead | None = None


class Used(Struct, frozen=True):
    """The nonce is used, but the transaction that shows the amount is unknown."""

    final: bool


class Cancelled(Struct, frozen=True):
    """A cancellation in *transaction* used the nonce: nothing was moved, and nothing can be moved later."""

    transaction: str
    final: bool
    proof: proofs.Cancelled | None = None


class Unused(Struct, frozen=True):
    """The nonce is unused as of a final block of ``block_time`` (unix seconds)."""

    block_time: int
    proof: proofs.UnusedPastDeadline | None = None


class Unreadable(Struct, frozen=True):
    """The chain could not be read; ``reason`` says why.

    ``alone`` is True if only the questions about this payment failed and those about the chain itself were answered.
    """

    reason: str
    alone: bool = False


Finding = Settled | Used | Cancelled | Unused | Unreadable


def proven(payment: Intent, finding: Finding) -> Finding:
    """Return a finding about *payment* with its proof, if it is one that may give back."""
    named = payment.network, payment.token, payment.payer, f"{payment.nonce:064x}"
    match finding:
        case Settled(amount, transaction, log_index, final):
            kind = proofs.Final if final else proofs.AtHead
            return replace(finding, proof=kind(*named, payment.payee, amount, transaction, log_index))
        case Cancelled(transaction, final=True):
            return replace(finding, proof=proofs.Cancelled(*named, transaction))
        case Unused(block_time):
            return replace(finding, proof=proofs.UnusedPastDeadline(*named, block_time))
        case _:
            return finding

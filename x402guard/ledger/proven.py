"""Makes the proofs of the chain: what a finding shows, with the payment that it is about."""

from __future__ import annotations

from msgspec.structs import replace

from x402guard.kernel import proofs
from x402guard.kernel.intent import Intent
from x402guard.ledger.evidence import Cancelled, Finding, Settled, Unused


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

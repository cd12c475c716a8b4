"""What a chain shows of a payment, and what the books make of it.

A chain read has three kinds of answer: it was settled or the nonce is gone; it was not, as of a block; nobody could tell.
"Could not read" is never "not settled".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from x402guard.ledger.ceilings import note_settlement
from x402guard.ledger.model import Claim, Evidence, Hold, HoldState
from x402guard.ledger.transitions import Capture, Correct, Expire, Note, apply
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.money import Nanos

__all__ = [
    "Finding",
    "Settled",
    "Unreadable",
    "Unused",
    "Used",
    "claim_settlement",
    "proof_mark",
    "weigh",
]


@dataclass(frozen=True, slots=True)
class Settled:
    """A transaction settled this very nonce, by its own calldata and its one matching Transfer log.

    Attributes:
        amount_atomic: what moved, in the token's atomic units.
        transaction, log_index: where; together with the network they prove one hold, once.
        final: True where the block cannot be undone.
    """

    amount_atomic: int
    transaction: str
    log_index: int
    final: bool


@dataclass(frozen=True, slots=True)
class Used:
    """The nonce is used, and no transaction is known that shows how much moved."""

    final: bool


@dataclass(frozen=True, slots=True)
class Unused:
    """The nonce is unused as of a final block of ``block_time`` (unix seconds)."""

    block_time: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The chain could not be read; ``reason`` says why."""

    reason: str


Finding = Settled | Used | Unused | Unreadable


def proof_mark(network: str, finding: Settled) -> MarkKey:
    """Return the key under which a settlement is remembered as the proof of one hold."""
    return "proof", f"{network}/{finding.transaction.lower()}/{finding.log_index}"


def claim_settlement(view: LedgerView, hold_id: str, claim: Claim, *, believe: bool) -> Hold:
    """Write down that a server says a payment was settled.

    With *believe* the claim's amount is captured as claimed (``exact``: the amount that was signed); without, the hold
    stays and keeps the claim beside it. A hold that was captured meanwhile without a proof remembers the claim, so that the
    chain can be asked about its transaction; any other that has ended knows better and is left alone.
    """
    hold = view.known_hold(hold_id)
    if hold.state is HoldState.CAPTURED and hold.proof is None and hold.claim is None:
        facts = {"name": "late_claim", "claim": dataclasses.asdict(claim)}
        view.record(hold.node_id, "event", hold_id=hold_id, facts=facts)
        hold = dataclasses.replace(hold, claim=claim)
        view.put_hold(hold)
    if hold.state is not HoldState.HELD:
        return hold
    hold = apply(view, hold_id, Note(claim=claim))
    if not believe:
        return hold
    note_settlement(view, hold, claim.amount)
    return apply(view, hold_id, Capture(claim.amount, Evidence.CLAIMED))


def weigh(view: LedgerView, hold_id: str, finding: Finding) -> Hold:
    """Let a finding take effect on a payment hold, and return the hold after it.

    Used with a known settlement: what it moved. Used by nobody knows what: the maximum. Unused at a final block that can no
    longer take it: expired. Anything else leaves it as it is, and remembers that the chain was asked.
    """
    hold = dataclasses.replace(view.known_hold(hold_id), checked_ms=view.now_ms)
    view.put_hold(hold)
    match finding:
        case Settled():
            return _settle(view, hold, finding)
        case Used(final):
            return _take(view, hold, hold.amount, _chain(final=final), None)
        case Unused(block_time) if hold.state is HoldState.HELD and hold.payment().dead_at(block_time):
            return apply(view, hold_id, Expire(block_time))
        case Unused(block_time) if hold.state is HoldState.CAPTURED and hold.payment().dead_at(block_time):
            # Captured on somebody's word, and the chain shows it never happened and never can.
            return _take(view, hold, Nanos(0), Evidence.CHAIN, None)
        case _:
            return hold


def _settle(view: LedgerView, hold: Hold, finding: Settled) -> Hold:
    intent = hold.payment()
    key = proof_mark(intent.network, finding)
    owner = view.mark(key)
    if owner is not None and owner["hold"] != hold.id:
        # A seller with two cheques could show the small one's transaction for both.
        view.record(
            hold.node_id,
            "event",
            hold_id=hold.id,
            facts={"name": "receipt_reused", "transaction": finding.transaction, "proves": owner["hold"]},
        )
        return view.known_hold(hold.id)
    # What one atomic unit is worth was fixed when the hold was written: the ceiling scales down, rounded up.
    amount = Nanos(-(-hold.amount * finding.amount_atomic // intent.amount_atomic))
    if not finding.final and amount < hold.amount:
        return hold  # a block that can still be undone frees nothing; it is asked about again
    view.put_mark(key, {"hold": hold.id})
    return _take(view, hold, amount, _chain(final=finding.final), key[1])


def _chain(*, final: bool) -> Evidence:
    return Evidence.CHAIN if final else Evidence.CHAIN_HEAD


def _take(view: LedgerView, hold: Hold, amount: Nanos, evidence: Evidence, proof: str | None) -> Hold:
    if hold.state is HoldState.HELD:
        note_settlement(view, hold, amount)
        return apply(view, hold.id, Capture(amount, evidence, proof))
    if hold.state is HoldState.CAPTURED and hold.proof is not None and hold.evidence is Evidence.CHAIN:
        return hold  # proven already, and finally
    if hold.state is HoldState.CAPTURED and evidence.rank > (hold.evidence or evidence).rank:
        return hold
    if hold.state is HoldState.CAPTURED and amount < hold.captured and evidence is not Evidence.CHAIN:
        return hold
    if hold.state is HoldState.CAPTURED and hold.claim is not None and hold.captured != amount:
        view.record(
            hold.node_id,
            "event",
            hold_id=hold.id,
            facts={
                "name": "claim_contradicted",
                "claimed": hold.claim.amount,
                "chain": amount,
                "payee": hold.payment().payee,
                "facilitator": hold.payment().facilitator,
            },
        )
    return apply(view, hold.id, Correct(amount, evidence, proof))

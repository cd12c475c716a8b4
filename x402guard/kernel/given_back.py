"""Compares each proof with the row of the hold that it frees."""

from __future__ import annotations

from typing import Final

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.changes import Changes, Move, refuse
from x402guard.kernel.proofs import (
    AtHead,
    Billed,
    Cancelled,
    Stated,
    Unsent,
    Unsigned,
    UnusedPastDeadline,
)
from x402guard.kernel.proofs import (
    Final as FinalBlock,
)
from x402guard.kernel.rows import Evidence, Hold, HoldKind, HoldState

EXPOSED: Final[MarkKey] = ("exposed", "total")
"""The mark with the sum of all remainders that were given back before their block was final, in nano-dollars."""

CLOCK_S: Final = 60
"""By how many seconds the kernel's clock may be behind when a block shows that a payment can no longer be taken."""

_RULE: Final = "giving back"
_BILLED: Final = (HoldKind.LLM, HoldKind.TOKENS)
_STATED: Final = (HoldKind.TOOL, HoldKind.TOKENS)


def exposed_mark(hold_id: str) -> MarkKey:
    """Return the key of the mark with one payment's part of ``EXPOSED``."""
    return "exposed", hold_id


def proof_key(network: str, transaction: str, log_index: int) -> MarkKey:
    """Return the key of the mark that binds one Transfer log to the one hold that it proves."""
    return "proof", f"{network}/{transaction.lower()}/{log_index}"


def check_given_back(changes: Changes, move: Move) -> None:
    """Check the proof of a hold that counts less than before. Raises ``IllegalTransition``."""
    hold, proof = move.after, move.proof
    if hold.intent is not None:
        _check_payment(changes, move)
        return
    kinds = _BILLED if isinstance(proof, Billed) else _STATED if isinstance(proof, Stated) else ()
    if hold.kind not in kinds or move.before is None or move.before.state is not HoldState.HELD:
        refuse(_RULE, move.place, f"a {hold.kind} hold would count less by {_name(proof)}")


def _name(proof: object) -> str:
    return "no proof" if proof is None else type(proof).__name__


def _check_payment(changes: Changes, move: Move) -> None:
    hold, proof, before = move.after, move.proof, move.before
    ends_empty = hold.state in (HoldState.VOIDED, HoldState.EXPIRED) or not hold.captured
    match proof:
        case Unsigned(hold_id):
            free = hold_id == hold.id and hold.id in changes.now.unsigned and _is_first(before, hold)
        case Unsent(hold_id):
            free = hold_id == hold.id and changes.now.given.get(hold.id) == 1 and _is_first(before, hold)
        case Cancelled():
            free = _is_of(hold, proof) and ends_empty and hold.state is not HoldState.EXPIRED
        case UnusedPastDeadline(block_time=block_time):
            free = _is_of(hold, proof) and ends_empty and _is_dead(changes, hold, block_time)
        case AtHead():  # Final too
            free = _is_of(hold, proof) and _takes(changes, hold, proof)
        case None:
            free = _is_claimed(changes, hold)
        case _:
            free = False
    if not free:
        was = 0 if before is None else before.counts
        refuse(_RULE, move.place, f"{was - hold.counts} would come back by {_name(proof)}, which does not show that")


def _is_first(before: Hold | None, hold: Hold) -> bool:
    """True while the payment was never presented again: an earlier request may have left."""
    return before is not None and not before.presented and not hold.presented and hold.state is HoldState.VOIDED


def _is_of(hold: Hold, proof: AtHead | Cancelled | UnusedPastDeadline) -> bool:
    payment = hold.payment()
    return (proof.network, proof.token, proof.payer, proof.nonce) == (
        payment.network,
        payment.token,
        payment.payer,
        hold.id,
    )


def _is_dead(changes: Changes, hold: Hold, block_time: int) -> bool:
    """True if neither the block nor the kernel's own clock leaves time to take the payment; but on a test network."""
    payment = hold.payment()
    by_clock = payment.network in changes.opened.test_networks or payment.dead_at(changes.now.now_ms // 1000 + CLOCK_S)
    return payment.dead_at(block_time) and by_clock


def _takes(changes: Changes, hold: Hold, proof: AtHead) -> bool:
    """True if the Transfer of a proof is this payment's, and its amount is what is captured."""
    payment = hold.payment()
    amount = -(-hold.amount * proof.amount_atomic // payment.amount_atomic)
    key = proof_key(payment.network, proof.transaction, proof.log_index)
    mark = changes.mark(key)
    return (
        hold.state is HoldState.CAPTURED
        and proof.payee == payment.payee
        and hold.captured == amount
        and hold.proof == key[1]
        and mark is not None
        and mark["hold"] == hold.id
        and hold.evidence is (Evidence.CHAIN if isinstance(proof, FinalBlock) else Evidence.CHAIN_HEAD)
    )


def _is_claimed(changes: Changes, hold: Hold) -> bool:
    """True for the claim of an ``upto`` that no chain can prove, where the guard was opened to believe it."""
    payment = hold.payment()
    return (
        changes.opened.unsafe_trust_receipts
        and payment.scheme == "upto"
        and not hold.chain_evidence
        and hold.state is HoldState.CAPTURED
        and hold.evidence is Evidence.CLAIMED
        and hold.claim is not None
        and hold.claim.amount == hold.captured
    )


def _exposed(hold: Hold | None) -> int:
    if hold is None or hold.intent is None or hold.evidence is not Evidence.CHAIN_HEAD:
        return 0
    return hold.amount - hold.captured if hold.state is HoldState.CAPTURED else 0


def check_exposed(changes: Changes) -> None:
    """Check that what blocks give back that are not final is counted, and stays within ``opened.most_exposed`` in sum."""
    total, gives_back = 0, False
    for move in changes.moves:
        now = _exposed(move.after)
        if now != _exposed(move.before):
            mark, was = changes.mark(exposed_mark(move.after.id)), changes.before.marks[exposed_mark(move.after.id)]
            if mark is None or mark["nanos"] != now:
                refuse(_RULE, move.place, f"{now} of it would be exposed to an undone block, and nothing counts that")
            total += now - (0 if was is None else int(was["nanos"]))
            gives_back = gives_back or (move.before is not None and move.after.counts < move.before.counts)
    if total:
        known, row = changes.before.marks.get(EXPOSED), changes.mark(EXPOSED)
        sum_now = max(0, total + (0 if known is None else int(known["nanos"])))
        if row is None or row["nanos"] != sum_now:
            refuse(_RULE, f"mark {'/'.join(EXPOSED)}", f"it is not the sum, {sum_now}")
        if gives_back and total > 0 and sum_now > changes.opened.most_exposed:
            most = changes.opened.most_exposed
            refuse(_RULE, f"mark {'/'.join(EXPOSED)}", f"{sum_now} would be exposed to undone blocks, more than {most}")


def check_marks(changes: Changes) -> None:
    """Check the marks that decide about money: of a proof, of what is exposed, and of the wallet's address."""
    for (kind, key), value in changes.sent.change_set.marks:
        if kind == "proof":
            _check_proof_mark(changes, key, str(value["hold"]))
        elif kind == "exposed" and key != EXPOSED[1]:
            if not any(move.after.id == key for move in changes.moves):
                refuse(_RULE, f"mark {kind}/{key}", "it is written, and its hold is not")
        elif (kind, key) == EXPOSED:
            known = changes.before.marks[EXPOSED]
            if not changes.moves and known != value:
                refuse(_RULE, f"mark {kind}/{key}", "it is written, and no hold is")
        elif (kind, key) == ("wallet", "payer"):
            known = changes.before.marks[kind, key]
            if known is not None and known != value:
                refuse(_RULE, f"mark {kind}/{key}", "a ledger belongs to one wallet for good")


def _check_proof_mark(changes: Changes, key: str, owner: str) -> None:
    """One Transfer proves one hold: its mark changes hands as the proof of the first one changes. A free one may be taken."""
    known = changes.before.marks["proof", key]
    before = "" if known is None else str(known["hold"])
    if before in ("", owner):
        return
    released = any(
        move.after.id == before and move.before is not None and move.before.proof == key and move.after.proof != key
        for move in changes.moves
    )
    if not released:
        refuse(_RULE, f"mark proof/{key}", f"it proves hold {before}, whose proof does not change")

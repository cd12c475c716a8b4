"""Compares each proof with the row of the hold that it frees."""

from __future__ import annotations

from typing import Final

from x402guard.kernel import proofs
from x402guard.kernel.change_set import MONEY_MARKS, MarkKey, Step, mark_name
from x402guard.kernel.changes import Changes, Move, refuse
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


def check_given_back(changes: Changes, move: Move, was: HoldState, step: Step) -> None:
    """Check the proof of a step after which a hold counts less. Raises ``IllegalTransition``."""
    hold, proof = move.after, step.proof
    if hold.intent is not None:
        _check_payment(changes, move, proof)
        return
    kinds = _BILLED if isinstance(proof, proofs.Billed) else _STATED if isinstance(proof, proofs.Stated) else ()
    if not move.is_lost and (hold.kind not in kinds or was is not HoldState.HELD):
        refuse(_RULE, move.place, f"a {hold.kind} hold would count less by {_name(proof)}")


def _name(proof: object) -> str:
    return "no proof" if proof is None else type(proof).__name__


def _check_payment(changes: Changes, move: Move, proof: proofs.Proof | None) -> None:
    hold, before = move.after, move.before
    match proof:
        case proofs.Unsigned(hold_id):
            free = hold_id == hold.id and hold.id in changes.now.unsigned and _is_first(before, hold)
        case proofs.Unsent(hold_id):
            free = hold_id == hold.id and changes.now.given.get(hold.id) == 1 and _is_first(before, hold)
        case proofs.Cancelled():
            free = is_of(hold, proof) and not hold.captured and hold.state is not HoldState.EXPIRED
        case proofs.UnusedPastDeadline(block_time=block_time):
            free = is_of(hold, proof) and not hold.captured and _is_dead(changes, hold, block_time)
        case proofs.AtHead():  # Final too
            free = is_of(hold, proof) and _takes(changes, hold, proof)
        case None:
            free = _is_claimed(changes, hold)
        case _:
            free = False
    if not free:
        was = 0 if before is None else before.counts
        refuse(_RULE, move.place, f"{was - hold.counts} would come back by {_name(proof)}, which does not show that")


def _is_first(before: Hold | None, hold: Hold) -> bool:
    """True while the payment was never presented again: an earlier request may have left."""
    return before is not None and not hold.presented and hold.state is HoldState.VOIDED


def is_of(hold: Hold, proof: proofs.OfPayment) -> bool:
    """True if a chain proof names this payment."""
    payment = hold.payment()
    ours = (payment.network, payment.token, payment.payer, hold.id)
    return (proof.network, proof.token, proof.payer, proof.nonce) == ours


def _is_dead(changes: Changes, hold: Hold, block_time: int) -> bool:
    """True if neither the block nor the kernel's own clock leaves time to take the payment; but on a test network."""
    payment = hold.payment()
    by_clock = payment.network in changes.opened.test_networks or payment.dead_at(changes.now.now_ms // 1000 + CLOCK_S)
    return payment.dead_at(block_time) and by_clock


def _takes(changes: Changes, hold: Hold, proof: proofs.AtHead) -> bool:
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
        and hold.evidence is (Evidence.CHAIN if isinstance(proof, proofs.Final) else Evidence.CHAIN_HEAD)
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
    if hold is None or hold.evidence is not Evidence.CHAIN_HEAD:
        return 0
    return hold.amount - hold.captured if hold.state is HoldState.CAPTURED else 0


def check_exposed(changes: Changes) -> None:
    """Check that what blocks give back that are not final is counted, and stays within ``opened.most_exposed`` in sum."""
    expected: dict[str, int] = {}
    total, gives_back, known = 0, False, changes.before.marks
    for move in changes.moves:
        if move.after.intent is not None and (now := _exposed(move.after)) != _exposed(move.before):
            was = known.get(mark_name(exposed_mark(move.after.id)))
            total += now - (0 if was is None else int(was["nanos"]))
            expected[move.after.id] = now
            gives_back = gives_back or (move.before is not None and move.after.counts < move.before.counts)
    if expected:
        row = known.get(mark_name(EXPOSED))
        expected[EXPOSED[1]] = exposed = max(0, total + (0 if row is None else int(row["nanos"])))
        if gives_back and total > 0 and exposed > changes.opened.most_exposed:
            most = changes.opened.most_exposed
            refuse(_RULE, mark_name(EXPOSED), f"{exposed} would be exposed to undone blocks, more than {most}")
    for key, nanos in expected.items():
        mark = changes.mark(exposed_mark(key))
        if mark is None or mark["nanos"] != nanos:
            refuse(_RULE, mark_name(exposed_mark(key)), f"{nanos} are exposed to undone blocks, and it does not say so")
    for (kind, key), value in changes.change_set.marks:
        if kind == EXPOSED[0] and key not in expected and value != known[mark_name((kind, key))]:
            refuse(_RULE, mark_name((kind, key)), "it is written, and no hold moves it")


def check_marks(changes: Changes) -> None:
    """Check who is proven by what, and whose the wallet is.

    One Transfer proves one hold: its mark changes hands as the proof of the first one changes. A free one may be taken.
    """
    for (kind, key), value in changes.change_set.marks:
        if kind not in MONEY_MARKS:
            continue
        known = changes.before.marks.get(mark_name((kind, key)))
        if kind == "proof" and (value.keys() != {"hold"} or type(value["hold"]) is not str):
            refuse(_RULE, f"mark proof/{key}", "it names no hold")
        if kind == "proof" and known is not None and known["hold"] not in ("", value["hold"]):
            owner = next((move for move in changes.moves if move.after.id == known["hold"]), None)
            if owner is None or owner.before is None or owner.before.proof != key or owner.after.proof == key:
                refuse(_RULE, f"mark proof/{key}", f"it proves hold {known['hold']}, whose proof does not change")
        elif (kind, key) == ("wallet", "payer") and known not in (None, value) and (kind, key) not in changes.commands:
            refuse(_RULE, f"mark {kind}/{key}", "a ledger belongs to one wallet, until its owner says so")

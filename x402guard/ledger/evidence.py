"""Applies the findings of chain reads, and the claims of servers, to payment holds.

A chain read has three kinds of answer: the payment was settled or its nonce is used; it was not settled as of a block;
the chain could not be read. "Could not read" never means "not settled".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import asdict

from x402guard.assets import TEST_NETWORKS
from x402guard.evm import is_transaction
from x402guard.frozen import replace
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.evm import Address
from x402guard.kernel.given_back import CLOCK_S, EXPOSED, exposed_mark, proof_key
from x402guard.kernel.intent import Intent
from x402guard.kernel.proofs import ChainProof, Undone
from x402guard.kernel.rows import NOTHING, Claim, Evidence, Hold, HoldState, Nanos
from x402guard.ledger.budgets import trip_exceeded
from x402guard.ledger.events import Capture, Correct, Expire, Note, Reopen, Void
from x402guard.ledger.findings import Cancelled, Finding, Settled, Unreadable, Unused, Used
from x402guard.ledger.transitions import apply, rank_of, was_cancelled
from x402guard.ledger.upto_sellers import ceiling_mark, note_settlement
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars

MAX_AHEAD_S: Final = 900
"""The maximum number of seconds that a block's time may be ahead of the ledger's clock to be believed."""

TEST_AHEAD_S: Final = 400 * 86_400
"""``MAX_AHEAD_S`` for test networks: the owner of a local chain may move its time forward manually."""

SURELY_LATER_S: Final = 30
"""A block shows a settlement undone only if it is more than this many seconds after the last read that showed it."""

MOST_UNSHOWN: Final = 100
"""How many payments of one mark are remembered, at most, whose nonce is used but whose transaction was not found."""

UNSHOWN_S: Final = 86_400
"""How many seconds after its deadline a used nonce without a transaction is looked up again."""

CONTRADICTED: Final = "claim_contradicted"
"""The name of the journal event and notice if a receipt and the chain disagree."""


def proof_mark(network: str, finding: Settled) -> MarkKey:
    """Return the key of the mark that binds a settlement to the one hold that it proves."""
    return proof_key(network, finding.transaction, finding.log_index)


def proven_by(mark: Mapping[str, Any] | None) -> str | None:
    """Return the id of the hold that the Transfer log of a proof mark proves, or None."""
    return None if mark is None else str(mark["hold"]) or None


def transaction_of(proof: str | None) -> str:
    """Return the transaction of a proof, ``NETWORK/TRANSACTION/LOG``; "" without one."""
    return "" if proof is None else proof.split("/")[1]


def named_transaction(hold: Hold) -> str:
    """Return the transaction that a seller names for a payment; "" for none, and for a text that is no hash."""
    named = "" if hold.claim is None else hold.claim.transaction
    return named if is_transaction(named) else ""


def is_unsettled(hold: Hold, now_unix: int) -> bool:
    """True for a payment whose chain state can still change, as of *now_unix* (unix seconds).

    A payment that a final block has proven is checked again while its signature is valid: if even that block is undone,
    the payment can be taken again. One that is booked at its ceiling without a proof is checked for ``UNSHOWN_S`` more:
    another node may show its transaction.
    """
    if hold.intent is None:
        return False
    alive = hold.deadline_unix >= now_unix
    if hold.state is HoldState.VOIDED:
        return alive and was_cancelled(hold)
    unshown = hold.captured > 0 and hold.proof is None and hold.deadline_unix >= now_unix - UNSHOWN_S
    proven = hold.evidence is Evidence.CHAIN and not alive and not unshown
    return hold.state is HoldState.HELD or (hold.state is HoldState.CAPTURED and not proven)


def make_provable(view: LedgerView, hold: Hold) -> Hold:
    """Note that a chain can prove how a payment ended, and return the hold: it is from before the chain was configured."""
    provable = replace(hold, chain_evidence=True)
    view.put_hold(provable)
    return provable


def note_checked(view: LedgerView, hold_id: str) -> None:
    """Note that the chain was asked about a payment now."""
    view.put_hold(replace(view.known_hold(hold_id), checked_ms=view.now_ms))


def claim_settlement(view: LedgerView, hold_id: str, claim: Claim, *, believe: bool) -> Hold:
    """Record a server's claim that a payment was settled, and return the hold after it.

    With *believe*, captures the claimed amount with evidence ``claimed`` (for ``exact``: the signed amount). Otherwise
    the hold stays HELD and keeps the claim. A hold already captured without a proof keeps the claim too, so that the
    chain can be asked about its transaction. Any other ended hold is unchanged.

    Raises ``IllegalTransition`` if the hold is out of scope, or if *believe* is set and the claim is more than was
    signed.
    """
    hold = view.known_hold(hold_id)
    _note_receipt(view, hold, claim)
    if hold.state is HoldState.CAPTURED and hold.proof is None and hold.claim is None:
        facts = {"name": "late_claim", "claim": asdict(claim)}
        view.record(hold.node_id, "event", hold_id=hold_id, facts=facts)
        hold = replace(hold, claim=claim)
        view.put_hold(hold)
    if hold.state is not HoldState.HELD:
        return hold
    hold = apply(view, hold_id, Note(claim=claim))
    if not believe:
        return hold
    note_settlement(view, hold, claim.amount)
    return apply(view, hold_id, Capture(claim.amount, Evidence.CLAIMED))


def receipt_mark(network: str, transaction: str) -> MarkKey:
    """Return the key of the mark that keeps the first payment for which a server named a transaction."""
    return "receipt", f"{network}/{transaction.lower()}"


def _note_receipt(view: LedgerView, hold: Hold, claim: Claim) -> None:
    """Write an event if a transaction is named for two payments. It may be a batch: the chain's logs decide."""
    if not claim.transaction:
        return
    key = receipt_mark(hold.payment().network, claim.transaction)
    first = view.mark(key)
    if first is None:
        view.put_mark(key, {"hold": hold.id})
    elif first["hold"] != hold.id:
        facts = {"name": "receipt_shared", "transaction": claim.transaction, "shown_for": first["hold"]}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)


def shown_mark(hold_id: str) -> MarkKey:
    """Return the key of the mark of when the chain last showed a payment taken, where that is not its last check."""
    return "shown", hold_id


def cancelled_mark(hold_id: str) -> MarkKey:
    """Return the key of the mark with the final transaction that has cancelled a payment that was captured."""
    return "cancelled", hold_id


def weigh_marks(hold: Hold, finding: Finding) -> tuple[MarkKey, ...]:
    """Return the keys of the marks that ``weigh`` reads and writes."""
    payment = hold.payment()
    marks = (
        ceiling_mark(payment.payee),
        unshown_mark(hold.id, payment),
        EXPOSED,
        exposed_mark(hold.id),
        shown_mark(hold.id),
        cancelled_mark(hold.id),
    )
    before = () if hold.proof is None else (("proof", hold.proof),)
    found = (proof_mark(payment.network, finding), reuse_mark(hold.id)) if isinstance(finding, Settled) else ()
    return (*marks, *before, *found)


def weigh(view: LedgerView, hold_id: str, finding: Finding, *, most_exposed: Nanos = NOTHING) -> Hold:
    """Apply a finding to a payment hold, and return the hold after it.

    *most_exposed* (nano-dollars) is how much of all remainders may be used before their blocks are final. See below.
    """
    before = view.known_hold(hold_id).proof
    after = _weighed(view, hold_id, finding, most_exposed)
    if before not in (None, after.proof) and proven_by(view.mark(("proof", before or ""))) == hold_id:
        view.put_mark(("proof", before or ""), {"hold": ""})  # its block was undone: another Transfer may get its place
    if after.state is not HoldState.CAPTURED or not after.captured:
        _forget_unshown(view, after)
    trip_exceeded(view, after.node_id)  # what was freed may be used again, and what was reopened counts in this window
    note_exposed(view, after)
    return after


def note_exposed(view: LedgerView, hold: Hold) -> None:
    """Keep the sum of remainders in use that a block which is undone would take back."""
    head = hold.state is HoldState.CAPTURED and hold.evidence is Evidence.CHAIN_HEAD
    exposed = hold.amount - hold.captured if head else 0
    known = view.mark(exposed_mark(hold.id))
    before = 0 if known is None else int(known["nanos"])
    if exposed != before:
        total = 0 if (row := view.mark(EXPOSED)) is None else int(row["nanos"])
        view.put_mark(exposed_mark(hold.id), {"nanos": exposed})
        view.put_mark(EXPOSED, {"nanos": max(0, total + exposed - before)})


def _may_expose(view: LedgerView, remainder: int, most: Nanos) -> bool:
    row = view.mark(EXPOSED) if most else None
    return bool(most) and remainder + (0 if row is None else int(row["nanos"])) <= most


def _weighed(view: LedgerView, hold_id: str, finding: Finding, most_exposed: Nanos) -> Hold:
    """Apply a finding.

    - ``Settled``: captures the amount moved. A block that is not final frees a remainder only within *most_exposed*.
    - ``Used``: captures the ceiling.
    - ``Cancelled`` in a final block: captures nothing (voids a live hold). In a block that is not final, although the
      chain once showed less than the ceiling taken, or a cancellation by another transaction: both blocks can be
      undone, so the hold is reopened and counts in full.
    - ``Unused`` at a final block that can no longer take the payment: expires a live hold, corrects a captured one to 0.
    - ``Unused`` and still valid, although the chain once showed the payment taken: a block was undone, so the hold is
      reopened and counts in full. A final block from before the chain last showed it taken changes only
      ``checked_ms``: that node is behind, or was asked earlier.
    - Anything else changes only ``checked_ms``.

    Raises ``IllegalTransition`` if the hold is not in the scope of the view.
    """
    before = view.known_hold(hold_id)
    hold = replace(before, checked_ms=view.now_ms)
    view.put_hold(hold)
    row = view.mark(shown_mark(hold_id))
    shown_ms = before.checked_ms if row is None else int(row["at_ms"])
    if isinstance(finding, Unused) and _is_older(before, shown_ms, finding.block_time):
        if row is None:
            view.put_mark(shown_mark(hold_id), {"at_ms": shown_ms})
        return hold
    if row is not None and not isinstance(finding, Unused | Unreadable):
        view.put_mark(shown_mark(hold_id), {"at_ms": view.now_ms})
    match finding:
        case Settled():
            return _settle(view, hold, finding, most_exposed)
        case Used(final=False) if hold.captured < hold.amount and _was_undone(hold, None):
            return _take(view, _reopen(view, hold, Reopen(0)), hold.amount, Evidence.CHAIN_HEAD, None)
        case Used(final):
            after = _take(view, hold, hold.amount, _chain(final=final), None)
            if before.evidence is not Evidence.CHAIN:  # one that has explained a Transfer explains no second one
                note_unshown(view, after)
            return after
        case Cancelled(_, final=True):
            return _cancel(view, hold, finding)
        case Cancelled(transaction) if was_cancelled(hold) or (hold.captured < hold.amount and _was_undone(hold, None)):
            by = view.mark(cancelled_mark(hold.id)) if hold.state is HoldState.CAPTURED else None
            if was_cancelled(hold, transaction) or (not hold.captured and by == {"transaction": transaction}):
                return hold  # a node that is behind the one that has shown it final
            return _reopen(view, hold, Reopen(0))
        case Unused():
            return _unused(view, hold, finding)
        case _:
            return hold


def _is_older(hold: Hold, shown_ms: int, block_time: int) -> bool:
    taken = hold.state is HoldState.CAPTURED and hold.evidence in (Evidence.CHAIN, Evidence.CHAIN_HEAD)
    return (
        (taken or was_cancelled(hold))
        and block_time <= shown_ms // 1000 + SURELY_LATER_S
        and not hold.payment().dead_at(block_time)
    )


def _reopen(view: LedgerView, hold: Hold, event: Reopen) -> Hold:
    payment = hold.payment()
    return apply(view, hold.id, event, Undone(payment.network, payment.token, payment.payer, hold.id))


def _cancel(view: LedgerView, hold: Hold, finding: Cancelled) -> Hold:
    if hold.state is HoldState.HELD:
        _note_contradiction(view, hold, Nanos(0))
        return apply(view, hold.id, Void(f"cancelled on chain by {finding.transaction}"), finding.proof)
    if hold.state is not HoldState.CAPTURED:
        return hold
    view.put_mark(cancelled_mark(hold.id), {"transaction": finding.transaction})
    return _take(view, hold, Nanos(0), Evidence.CHAIN, None, shown=finding.proof)


def _unused(view: LedgerView, hold: Hold, finding: Unused) -> Hold:
    block_time = finding.block_time
    is_test = hold.payment().network in TEST_NETWORKS
    if block_time > view.now_unix + (TEST_AHEAD_S if is_test else MAX_AHEAD_S):
        return hold  # the node's block time cannot be right, so it must not free a budget
    dead = hold.payment().dead_at(block_time)
    if dead and not is_test and not hold.payment().dead_at(view.now_unix + CLOCK_S):
        return hold  # by the ledger's own clock the payment is still good
    if hold.state is HoldState.HELD and dead:
        _note_contradiction(view, hold, Nanos(0))
        return apply(view, hold.id, Expire(block_time), finding.proof)
    if hold.state is HoldState.CAPTURED and dead:
        # Captured on a claim, or by a block that was undone: it was not settled and never can be.
        return _take(view, replace(hold, proof=None), Nanos(0), Evidence.CHAIN, None, shown=finding.proof)
    on_chain = hold.state is HoldState.CAPTURED and hold.evidence in (Evidence.CHAIN, Evidence.CHAIN_HEAD)
    if not dead and (on_chain or was_cancelled(hold)):
        return _reopen(view, hold, Reopen(block_time))
    return hold


def _settle(view: LedgerView, hold: Hold, finding: Settled, most_exposed: Nanos) -> Hold:
    intent = hold.payment()
    key = proof_mark(intent.network, finding)
    owner = proven_by(view.mark(key))
    if owner not in (None, hold.id):
        # A seller with two signed payments could name the smaller one's transaction for both.
        _note_reuse(view, hold, finding.transaction, owner or "")
        used_up = finding.final and hold.state is HoldState.HELD and view.now_unix > hold.deadline_unix
        return _take(view, hold, hold.amount, Evidence.CHAIN, None) if used_up else hold
    # The value of one atomic unit was fixed when the hold was written: the ceiling is scaled down and rounded up.
    amount = Nanos(-(-hold.amount * finding.amount_atomic // intent.amount_atomic))
    if intent.scheme == "exact":
        amount = hold.amount  # a token that keeps a fee shows less, and all that was signed is gone
    if not finding.final and _was_undone(hold, key[1]):
        same = amount == hold.captured == hold.amount  # one that stays open has another window at its next step
        hold = _reopen(view, hold, Reopen(0, same=same))  # another block has settled it since
        if amount < hold.amount:
            return hold  # a block that can still be undone frees nothing
    if not finding.final and amount < hold.amount and hold.state in (HoldState.VOIDED, HoldState.EXPIRED):
        return apply(view, hold.id, Correct(hold.amount, Evidence.CHAIN_HEAD))
    higher = hold.state is HoldState.CAPTURED and amount > hold.captured
    used = hold.state is HoldState.HELD and _may_expose(view, hold.amount - amount, most_exposed)
    if not finding.final and amount < hold.amount and not higher and not used:
        return hold  # a block that can still be undone frees nothing; the chain is asked again later
    after = _take(view, hold, amount, _chain(final=finding.final), key[1], shown=finding.proof)
    if after.proof == key[1]:
        view.put_mark(key, {"hold": hold.id})
        _forget_unshown(view, hold)
    return after


def unshown_payee(network: str, token: Address, payee: Address) -> str:
    """Return what the keys of a payee's ``unshown`` marks begin with."""
    return f"{network}/{token}/{payee}"


def unshown_mark(hold_id: str, payment: Intent) -> MarkKey:
    """Return the key of a mark of payments whose nonce is used but whose settling transaction was not found.

    A payee has up to 256 of them, so that each stays small.
    """
    return "unshown", f"{unshown_payee(payment.network, payment.token, payment.payee)}/{hold_id[:2]}"


def note_unshown(view: LedgerView, hold: Hold) -> None:
    """Note that a payment's nonce is used, and by no transaction that was found."""
    payment = hold.payment()
    key = unshown_mark(hold.id, payment)
    waiting = dict((view.mark(key) or {}).get("holds", {}))
    if hold.proof is None and hold.id not in waiting and len(waiting) < MOST_UNSHOWN:
        waiting[hold.id] = f"{_EXACTLY if payment.scheme == 'exact' else ''}{payment.amount_atomic}"
        view.put_mark(key, {"holds": waiting})


def _forget_unshown(view: LedgerView, hold: Hold) -> None:
    """A payment with a Transfer of its own, or that took nothing, explains no other one."""
    key = unshown_mark(hold.id, hold.payment())
    waiting = dict((view.mark(key) or {}).get("holds", {}))
    if waiting.pop(hold.id, None) is not None:
        view.put_mark(key, {"holds": waiting})


def fitting_payments(unshown: Mapping[str, Mapping[str, Any]], amount_atomic: int) -> list[tuple[MarkKey, str]]:
    """Return the payments that may explain a Transfer of *amount_atomic*, the best first, each with the mark it is in.

    *unshown* is the marks of its payee. The best is the smallest: a larger one may explain a larger Transfer, and an
    ``upto`` also a smaller one than an ``exact`` of its ceiling.
    """
    found: list[tuple[int, bool, str, str]] = []
    for key, mark in unshown.items():
        for hold_id, most in mark["holds"].items():
            exactly, ceiling = most.startswith(_EXACTLY), int(most.removeprefix(_EXACTLY))
            if amount_atomic == ceiling or (amount_atomic < ceiling and not exactly):
                found.append((ceiling, not exactly, key, hold_id))
    return [(("unshown", key), hold_id) for _, _, key, hold_id in sorted(found)]


def explain(view: LedgerView, key: MarkKey, proof: MarkKey, hold_id: str) -> bool:
    """Match a Transfer to a payment whose settling transaction was not found, and which stands in the mark *key*.

    Returns False if another Transfer has been matched to it since. It frees nothing: the payment stays captured at its
    ceiling. It only shows that the Transfer belongs to a known payment. Another reconciliation, which runs at the same
    time, may have matched it already.
    """
    if proven_by(view.mark(proof)) is not None:
        return True
    waiting = dict((view.mark(key) or {}).get("holds", {}))
    if waiting.pop(hold_id, None) is None:
        return False
    view.put_mark(key, {"holds": waiting})
    view.put_mark(proof, {"hold": hold_id})
    return True


_EXACTLY: Final = "="
"""Before the amount of a payment of the scheme ``exact``, whose Transfer has exactly that amount."""


def _was_undone(hold: Hold, proof: str | None) -> bool:
    """True if the chain's evidence for a capture contradicts new evidence from a non-final block: a block was undone.

    *proof* is the new proof, or None if there is none.
    """
    on_chain = hold.evidence in (Evidence.CHAIN, Evidence.CHAIN_HEAD)
    less = hold.proof is not None or hold.captured < hold.amount
    return hold.state is HoldState.CAPTURED and on_chain and less and proof != (hold.proof or "")


def reuse_mark(hold_id: str) -> MarkKey:
    """Return the key of the mark that a payment was shown another's proof: the event is written once."""
    return "reuse", hold_id


def _note_reuse(view: LedgerView, hold: Hold, transaction: str, first: str) -> None:
    if view.mark(reuse_mark(hold.id)) is None:
        view.put_mark(reuse_mark(hold.id), {"transaction": transaction})
        facts = {"name": "receipt_reused", "transaction": transaction, "proves": first}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)


def _chain(*, final: bool) -> Evidence:
    return Evidence.CHAIN if final else Evidence.CHAIN_HEAD


def _take(
    view: LedgerView,
    hold: Hold,
    amount: Nanos,
    evidence: Evidence,
    proof: str | None,
    *,
    shown: ChainProof | None = None,
) -> Hold:
    if hold.state is HoldState.HELD:
        note_settlement(view, hold, amount)
        _note_contradiction(view, hold, amount, shown=proof is not None)
        return apply(view, hold.id, Capture(amount, evidence, proof), shown)
    if hold.state is HoldState.CAPTURED and not _is_better(hold, amount, evidence, proof):
        return hold
    if hold.captured != amount:
        _note_contradiction(view, hold, amount, shown=proof is not None or amount == 0)
    return apply(view, hold.id, Correct(amount, evidence, proof), shown)


def _is_better(hold: Hold, amount: Nanos, evidence: Evidence, proof: str | None) -> bool:
    """True if this evidence changes a hold that was captured already."""
    if hold.evidence is Evidence.CHAIN and hold.proof is not None:
        # Already proven by a final block. Another final proof can only come if that block was undone.
        return evidence is Evidence.CHAIN and proof not in (None, hold.proof)
    if rank_of(evidence) > rank_of(hold.evidence or evidence):
        return False
    return amount >= hold.captured or evidence is Evidence.CHAIN


def _note_contradiction(view: LedgerView, hold: Hold, amount: Nanos, *, shown: bool = True) -> None:
    """Write an event and a notice that a server's receipt and the chain disagree, with the payee and the facilitator.

    Without *shown* the chain has not shown an amount: the event says only that the receipt is unproven.
    """
    if hold.claim is None or hold.doubt is not None or hold.claim.amount == amount:
        return  # a transaction named in a failed answer claims no amount
    if not shown:
        facts = {"name": "claim_unproven", "claimed": hold.claim.amount, "amount": amount}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)
        return
    payment = hold.payment()
    who = {"payee": payment.payee, "facilitator": payment.facilitator}
    facts = {"name": CONTRADICTED, "claimed": hold.claim.amount, "chain": amount, **who}
    view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)
    claimed, took = format_dollars(hold.claim.amount), format_dollars(amount)
    message = f"{payment.payee} claimed ${claimed} of hold {hold.id[:16]}…, but the chain shows ${took}"
    told = {"hold_id": hold.id, "host": hold.purpose.host, "claimed": claimed, "chain": took, **who}
    view.tell(CONTRADICTED, "critical", message, session=hold.node_id, amount=amount, facts=told)

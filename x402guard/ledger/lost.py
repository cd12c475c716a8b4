"""Enters what the ledger does not have: what its server or an older copy has lost, and what a process could not write."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import ConfigError, IllegalTransition, LedgerUnavailable
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.proofs import Lost, Proof
from x402guard.kernel.rows import (
    WALLET,
    Claim,
    Delivery,
    Evidence,
    Hold,
    HoldKind,
    HoldState,
    Nanos,
    NodeKind,
    Purpose,
)
from x402guard.ledger.budgets import KILL_SWITCH, ROLLED_BACK, trip, trip_exceeded, trip_session
from x402guard.ledger.events import Capture, Correct, Note
from x402guard.ledger.evidence import claim_settlement
from x402guard.ledger.purchases import hand_over, lose, presentation_of, take_back
from x402guard.ledger.transitions import apply, begin
from x402guard.ledger.view import Change, LedgerView, Scope

RESTORED: Final = "a lost ledger"
ARCHIVED: Final = "an archived call"


def count_lost(view: LedgerView, hold_id: str, lost: Nanos, by: str, node_ids: Iterable[str]) -> None:
    """Count what a lost ledger had used beyond this older one, and trip every session and named budget of *node_ids*.

    *lost* (nano-dollars) is captured in the wallet as a hold with the id *hold_id*.
    """
    view.record(WALLET, "event", facts={"name": "restored", "lost": lost, "by": by})
    if lost:
        facts = {"kind": HoldKind.TOOL, "amount": lost, "tool": RESTORED, "deadline": view.now_unix}
        hold = _in_wallet(view, hold_id, lost, RESTORED)
        apply(view, begin(view, hold, facts).id, Capture(lost, Evidence.ASSUMED, note="spent in a ledger that is lost"))
    for node in map(view.node, node_ids):
        if node.kind in (NodeKind.SESSION, NodeKind.BUDGET):
            trip(view, node.id, KILL_SWITCH, "the ledger was restored from an older copy")
    trip_exceeded(view, WALLET)


class Written(Struct, frozen=True):
    """A hold as a process has written it last.

    Attributes:
        facts: those of its first entry in the journal.
        path: the budgets it is paid out of, from its own up.
    """

    hold: Hold
    facts: Mapping[str, Any]
    path: tuple[str, ...]


ROLLED_BACK_MARK: Final[MarkKey] = ("rolled_back", WALLET)
"""The key of the mark with the time at which the ledger's server was last seen to have lost entries; 0 once that is over."""


def trip_rolled_back(view: LedgerView, reason: str) -> None:
    """Trip the wallet, because the ledger's server has lost entries."""
    trip(view, WALLET, ROLLED_BACK, reason)
    view.put_mark(ROLLED_BACK_MARK, {"at_ms": view.now_ms})


class Compared(Struct, frozen=True):
    """What is known of the signatures that the ledger's server may have lost.

    Attributes:
        lifetime_s: how long a signature of this wallet lives at most, in seconds.
        finals: network → the time of the last final block up to which the wallet was compared, in unix seconds.
        signs: the wallet has an address, so there may be signatures.
    """

    lifetime_s: int
    finals: Mapping[str, int]
    signs: bool


def end_rolled_back(view: LedgerView, known: Compared, *, unsafe_early: bool) -> None:
    """Let the wallet be reset after its server has lost entries: what was signed and lost is dead, final and compared.

    Raises ``ConfigError`` if it is not, unless it is *unsafe_early*.
    """
    row = view.mark(ROLLED_BACK_MARK)
    if row is None or not row["at_ms"]:
        return
    dead_unix = int(row["at_ms"]) // 1000 + known.lifetime_s
    reason = "" if unsafe_early or not known.signs else _too_early(view.now_unix, dead_unix, known.finals)
    if reason:
        raise ConfigError(
            f"session: the ledger's server has lost entries, and {reason}. Then reset the wallet. With --unsafe-early it "
            "is reset now: what was signed and lost may still be taken, and nothing counts it"
        )
    view.put_mark(ROLLED_BACK_MARK, {"at_ms": 0})


def _too_early(now_unix: int, dead_unix: int, finals: Mapping[str, int]) -> str:
    """Return what has to be waited for, or ""."""
    until = datetime.fromtimestamp(dead_unix, UTC).strftime("%H:%M:%S UTC")
    if now_unix <= dead_unix:
        return f"a signature that was lost with them can be taken until {until}: wait, and run x402guard reconcile"
    if not finals:
        return "no chain was compared since: run x402guard reconcile, with the chains on which the wallet pays"
    behind = sorted(network for network, unix in finals.items() if unix <= dead_unix)
    if behind:
        return f"{', '.join(behind)} was not compared up to a final block after {until}: run x402guard reconcile"
    return ""


def count_again(view: LedgerView, lost: Iterable[Written]) -> int:
    """Enter the holds that the ledger's server has lost, and what else it counts too low; return how many these are.

    Each counts as it did: a payment until the chain decides, whatever else was captured as captured. It counts in its own
    budget, or in the nearest one above that is not lost as well, also past a limit. A purchase that the ledger has as handed
    over, and that was opened again or lost after that, is so again.
    """
    entered = 0
    for each in lost:
        here = view.hold(each.hold.id)
        if here is not None:
            _open_again(view, here, each.hold)
        if here is None and each.hold.state in _COUNTED:
            _enter(view, each)
        elif here is None or not _counts_less(here, each.hold):
            continue
        elif here.state is HoldState.HELD:
            apply(view, here.id, Capture(each.hold.captured, Evidence.ASSUMED, note=_AGAIN))
        else:
            apply(view, here.id, Correct(each.hold.captured, each.hold.evidence or Evidence.ASSUMED))
        entered += 1
    return entered


def _enter(view: LedgerView, each: Written) -> None:
    hold, is_payment = each.hold, each.hold.intent is not None
    again = replace(
        hold,
        node_id=next((node_id for node_id in each.path if view.has_node(node_id)), WALLET),
        state=HoldState.HELD,
        captured=Nanos(0),
        evidence=None,
        claim=None,
        proof=None,
        closed_ms=0,
        doubt="the ledger's server has lost it" if is_payment else None,
        delivery=Delivery.LOST if is_payment else hold.delivery,
    )
    said = {"answer": again.delivery} if "answer" in each.facts else {}
    begin(view, again, {**each.facts, **said}, Lost(hold.id))
    if hold.state is HoldState.CAPTURED and not is_payment:
        apply(view, hold.id, Capture(hold.captured, Evidence.ASSUMED, note=_AGAIN))
    trip_exceeded(view, again.node_id)


def _open_again(view: LedgerView, here: Hold, written: Hold) -> None:
    if here.delivery is not Delivery.DONE or presentation_of(here) != presentation_of(written):
        return
    if written.delivery is Delivery.OPEN:
        take_back(view, presentation_of(written))
    elif written.delivery is Delivery.LOST:
        lose(view, presentation_of(written))


def _counts_less(here: Hold, written: Hold) -> bool:
    """True for what was captured above all that the ledger counts for it now; a payment is decided by the chain."""
    if written.intent is not None or written.state is not HoldState.CAPTURED:
        return False
    counted = {HoldState.HELD: here.amount, HoldState.CAPTURED: here.captured}.get(here.state)
    return counted is not None and written.captured > counted


class LateEnd(Struct, frozen=True, omit_defaults=True):
    """What the end of an answer changes of its hold, as data: if its process cannot write it, another one can.

    Attributes:
        hold_id: the hold of the call or the payment.
        capture: what a call has cost. *proof*: why that may be less than was held.
        trips: the word and the reason if that trips the session.
        claim: what the server says was settled; *believe* if that is captured.
        doubt: why the outcome of the payment is unknown, whatever is claimed.
        marks: the keys of the marks that note the claim.
        presented: which answer of the payment has ended; *delivery* says how.
    """

    hold_id: str
    capture: Capture | None = None
    proof: Proof | None = None
    trips: tuple[str, str] | None = None
    claim: Claim | None = None
    believe: bool = False
    doubt: str | None = None
    marks: tuple[MarkKey, ...] = ()
    presented: int = 0
    delivery: Delivery | None = None


def to_enter(ends: Sequence[LateEnd]) -> list[LateEnd]:
    """Return ends as they are entered one by one: an answer that a later one says is lost is not handed over before."""
    lost = {(end.hold_id, end.presented) for end in ends if end.delivery is Delivery.LOST}
    return [replace(end, delivery=None) if (end.hold_id, end.presented) in lost and end.delivery is Delivery.DONE else end
            for end in ends]  # fmt: skip


def write_end(end: LateEnd) -> tuple[Scope, Change[bool]]:
    """Return the transaction that enters the end of an answer that its process could not write: scope and change.

    It changes what the hold counts, and whether its purchase is open. The counts of the guards stay as they are. The
    change is idempotent; its result is False if the ledger does not have the hold, and nothing is to be counted for it.
    """
    holds, nodes = ((end.hold_id,), ()) if end.capture is None else ((end.hold_id, _late_id(end.hold_id)), (WALLET,))
    return Scope(nodes=nodes, holds=holds, marks=end.marks, durable=True), lambda view: _enter_end(view, end)


class Writes(Protocol):
    """Runs a change in one transaction, as ``LedgerStore.transact``."""

    def __call__(self, scope: Scope, change: Change[bool], /) -> bool:
        """Return the result of the change."""


def enter_ends(ends: Sequence[LateEnd], written: Callable[[LateEnd], None], transact: Writes) -> Iterator[str]:
    """Write the ends of answers that no process can write any more, and hand each to *written* then.

    Yields why one is left out. Raises ``LedgerUnavailable``.
    """
    for end, entered in zip(ends, to_enter(ends), strict=True):
        try:
            if not transact(*write_end(entered)):
                yield f"the end of an answer is left out: its hold {end.hold_id} is not in the ledger"
        except IllegalTransition as error:
            if entered.believe:  # by a process that believed receipts; this one asks the chain
                transact(*write_end(replace(entered, believe=False)))
                written(end)
                continue
            yield f"the end of an answer can never be written, and its hold {end.hold_id} stays: {error}"
        except LedgerUnavailable as error:
            if error.retry != "no":
                raise
            yield f"the end of an answer can never be written, and its hold {end.hold_id} stays: {error}"
        written(end)


def _late_id(hold_id: str) -> str:
    """Return the id of the hold that counts a bill whose own hold is archived."""
    return hashlib.sha256(f"late {hold_id}".encode()).hexdigest()


def _enter_end(view: LedgerView, end: LateEnd) -> bool:
    hold = view.hold(end.hold_id)
    if hold is None:
        return end.capture is not None and _count_archived(view, end, end.capture)
    if end.capture is not None:
        _enter_bill(view, hold, end)
    if end.doubt is not None:
        if hold.state is HoldState.HELD:
            apply(view, hold.id, Note(end.doubt, end.claim))
    elif end.claim is not None:
        claim_settlement(view, hold.id, end.claim, believe=end.believe)
    presentation = hold.id, end.presented
    if end.delivery is Delivery.DONE:
        hand_over(view, presentation)
    elif end.delivery is Delivery.LOST:
        lose(view, presentation)
    return True


def _count_archived(view: LedgerView, end: LateEnd, bill: Capture) -> bool:
    """Count a bill in the wallet whose session was archived meanwhile: in full, although its hold has lapsed there."""
    late_id = _late_id(end.hold_id)
    if bill.amount and view.hold(late_id) is None:
        facts = {"kind": HoldKind.TOOL, "amount": bill.amount, "tool": ARCHIVED, "deadline": view.now_unix}
        hold = _in_wallet(view, late_id, Nanos(bill.amount), ARCHIVED)
        apply(view, begin(view, hold, facts).id, bill)
        trip_exceeded(view, WALLET)
    return True


def _in_wallet(view: LedgerView, hold_id: str, amount: Nanos, why: str) -> Hold:
    """Return a hold in the wallet itself for what is owed anyway."""
    return Hold(
        id=hold_id,
        node_id=WALLET,
        kind=HoldKind.TOOL,
        amount=amount,
        created_ms=view.now_ms,
        deadline_unix=view.now_unix,
        flying_since_ms=view.now_ms,
        instance="",
        purpose=Purpose(tool=why),
    )


def _enter_bill(view: LedgerView, hold: Hold, end: LateEnd) -> None:
    """Capture a bill; after its hold has ended without evidence, what is above that is owed."""
    bill = end.capture
    if bill is None:
        return
    if hold.state is HoldState.HELD:
        apply(view, hold.id, bill, end.proof)
    elif hold.state is not HoldState.CAPTURED or hold.evidence is not Evidence.ASSUMED:
        return
    elif bill.amount > hold.captured:
        apply(view, hold.id, Correct(bill.amount, bill.evidence))
    if end.trips is not None:
        trip_session(view, hold.node_id, *end.trips)


_AGAIN: Final = "entered again: the ledger's server had lost it"
_COUNTED: Final = frozenset({HoldState.HELD, HoldState.CAPTURED})

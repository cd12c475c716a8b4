"""Decides from rows, never from memory, whether a live hold is in doubt, and whether a purchase is still open.

An open purchase was paid, or may be, and its answer was not handed over. It is never signed anew: the same payment is
presented again, or the caller hears that it was paid.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

from msgspec.structs import replace

from x402guard.errors import ConfigError
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.proofs import ByOwner, PayAgain
from x402guard.kernel.rows import Delivery, Hold, HoldState
from x402guard.kernel.table import FORGIVE
from x402guard.ledger.view import LedgerView

DEFAULT_FLIGHT_S: Final = 270
"""Default of ``flight_s``: seconds after which a request without an answer is in doubt; longer than any is waited for."""

_SILENT_MS: Final = 600_000


def instance_mark(instance: str) -> MarkKey:
    """Return the key of a process instance's mark: its process, and whether it has ended."""
    return "instance", instance


def silent_instances(rows: Mapping[str, Mapping[str, Any]], now_ms: int) -> set[str]:
    """Return the instances that show every minute that they live, and have not done so for ten.

    Their sessions count as ended then, for openings and reports. That frees no hold and makes none doubtful: the process
    may only be cut off. The signs are dated by the ledger's server; *now_ms* is the time here, which may be behind it.
    """
    seen = {key: int(row["seen_ms"]) for key, row in rows.items() if "seen_ms" in row and not row["ended"]}
    newest_ms = max(seen.values(), default=now_ms)
    return {key for key, at_ms in seen.items() if at_ms < max(now_ms, newest_ms) - _SILENT_MS}


def in_doubt(view: LedgerView, hold: Hold, *, flight_ms: int) -> bool:
    """True if the outcome of a live hold is unknown.

    That is so if a note says it, if its request was sent more than *flight_ms* (milliseconds) ago, or if the process
    that sent it is known to have ended. A hold with a claim is not in doubt.
    """
    if hold.state is not HoldState.HELD:
        return False
    if hold.doubt is not None:
        return True
    if hold.claim is not None:
        return False  # its answer came; only the amount is open
    if view.now_ms - hold.flying_since_ms > flight_ms:
        return True
    row = view.mark(instance_mark(hold.instance))
    return row is not None and bool(row["ended"])


_OPEN: Final = frozenset({Delivery.OPEN, Delivery.LOST})

ANSWER: Final = "answer"
"""The event of an answer that was handed over, lost or forgiven: which purchases are open stands in the journal, too."""

DEFAULT_MEMORY_S: Final = 86_400
"""Default of ``purchase_memory_s``: seconds for which a taken payment without an answer keeps its purchase open."""


Presentation = tuple[str, int]
"""One call's use of a payment: the id of its hold, and how often the payment had been presented before."""


def presentation_of(hold: Hold) -> Presentation:
    """Return the presentation of a hold that is under way, or that was the last."""
    return hold.id, hold.presented


def open_purchases(view: LedgerView, *, memory_ms: int) -> list[Hold]:
    """Return the holds in view that keep the purchase of the scope open, oldest first.

    A captured one does so for *memory_ms* (milliseconds) after its capture, or after its answer was lost, which may be
    days later on a machine that slept; and only if something was taken.
    """
    return [
        hold
        for hold in map(view.known_hold, view.purchase)
        if hold.delivery in _OPEN and (hold.state is HoldState.HELD or _is_remembered(view, hold, memory_ms))
    ]


def bought_before(view: LedgerView, *, memory_ms: int) -> Hold | None:
    """Return the last payment for the purchase of the scope whose answer was handed over, or None.

    It is remembered for *memory_ms* (milliseconds) after its capture, or after it was last sent, or as long as it is
    live.
    """
    hold = None if view.bought is None else view.known_hold(view.bought)
    known = hold is not None and (hold.state is HoldState.HELD or _is_remembered(view, hold, memory_ms))
    return hold if known else None


def _is_remembered(view: LedgerView, hold: Hold, memory_ms: int) -> bool:
    since_ms = max(hold.closed_ms, hold.flying_since_ms)
    return hold.state is HoldState.CAPTURED and hold.captured > 0 and view.now_ms - since_ms <= memory_ms


def is_lost(view: LedgerView, hold: Hold, *, instance: str, in_flight: Container[Presentation], flight_ms: int) -> bool:
    """True if nothing more will be handed over for an open purchase.

    That is so if a note says it; if the call that sent the request has ended, because it is one of the caller's own
    *instance* that is not *in_flight*, or of a process that has ended; or if no answer came within *flight_ms*
    (milliseconds). A body of the own instance may be read for longer.
    """
    own = hold.instance == instance
    if hold.delivery is Delivery.LOST or (own and presentation_of(hold) not in in_flight):
        return True
    row = view.mark(instance_mark(hold.instance))
    if row is not None and row["ended"]:
        return True
    is_read = own and hold.claim is not None and not hold.presented
    return not is_read and view.now_ms - hold.flying_since_ms > flight_ms


def is_in_flight_elsewhere(hold: Hold, *, instance: str) -> bool:
    """True for an open purchase of another instance, or one that is being presented again: no reason to sign anew."""
    return hold.instance != instance or hold.presented > 0


def is_on_another_machine(view: LedgerView, hold: Hold, machine: str) -> bool:
    """True if a process of another machine, or container, sends the payment: whether that still lives is not known here."""
    row = view.mark(instance_mark(hold.instance))
    return row is not None and row.get("host", machine) != machine


def take_over(view: LedgerView, hold: Hold, *, instance: str) -> Hold:
    """Make *instance* responsible for a lost purchase. This is a compare-and-set, because this change locks the row.

    The doubt about a live hold stays until a server claims a settlement, so that the chain is asked about it meanwhile.
    """
    live = hold.state is HoldState.HELD
    doubt = hold.doubt or ("no answer came" if hold.claim is None else "its answer was not handed over")
    taken = replace(
        hold,
        instance=instance,
        flying_since_ms=view.now_ms,
        doubt=doubt if live else None,
        presented=hold.presented + 1,
        delivery=Delivery.OPEN,
    )
    view.put_hold(taken)
    view.record(hold.node_id, "represent", hold_id=hold.id, facts={"was_in_doubt": doubt})
    return taken


def hand_over(view: LedgerView, presentation: Presentation) -> Hold:
    """Record that the whole answer to a presentation was handed over. It says nothing about a later presentation.

    One that is lost stays lost: this may be written after what has cut the answer off.
    """
    hold = view.known_hold(presentation[0])
    concerned = presentation_of(hold) == presentation and hold.delivery is Delivery.OPEN
    return _put(view, hold, Delivery.DONE) if concerned else hold


def take_back(view: LedgerView, presentation: Presentation) -> Hold:
    """Record that what was handed over, or lost, was not the end of it: it redirects, and the next hop begins.

    It says nothing about a later presentation.
    """
    hold = view.known_hold(presentation[0])
    concerned = presentation_of(hold) == presentation and hold.delivery in (Delivery.DONE, Delivery.LOST)
    return _put(view, hold, Delivery.OPEN) if concerned else hold


def lose(view: LedgerView, presentation: Presentation) -> Hold:
    """Record that the answer to a presentation did not reach its caller, even if its body was read to the end.

    It says nothing about a later presentation. From now on the purchase is remembered.
    """
    hold = view.known_hold(presentation[0])
    if presentation_of(hold) != presentation or hold.delivery in (Delivery.FORGIVEN, Delivery.LOST):
        return hold
    return _put(view, replace(hold, flying_since_ms=view.now_ms), Delivery.LOST)


def close_purchase(view: LedgerView, hold_id: str, proof: PayAgain | ByOwner) -> Hold:
    """Close an open purchase without its answer, so that the next identical request signs a new payment."""
    after = replace(view.known_hold(hold_id), delivery=Delivery.FORGIVEN)
    view.take_step(FORGIVE, after, proof)
    view.record(after.node_id, ANSWER, hold_id=hold_id, facts={"is": after.delivery})
    return after


def forgive(view: LedgerView, hold_id: str, by: str, *, unsafe_in_flight: bool = False) -> Hold:
    """Close an open purchase for its owner *by*, so that the next identical request signs a new payment.

    The payment itself is unchanged and counts as before. Raises ``ConfigError`` for a hold that keeps no purchase open,
    and for one whose answer is under way, unless *unsafe_in_flight*: that answer and the next one may both come.
    """
    hold = view.hold(hold_id)
    if hold is None or hold.intent is None:
        raise ConfigError(f"hold: {hold_id!r} is no payment in this ledger")
    if hold.delivery not in _OPEN or hold.state not in (HoldState.HELD, HoldState.CAPTURED):
        words = f"hold: {hold_id!r} keeps no purchase open (it is {hold.state}); there is nothing to forgive"
        raise ConfigError(words, public=hold.id)
    if not unsafe_in_flight and not is_lost(view, hold, instance="", in_flight=(), flight_ms=DEFAULT_FLIGHT_S * 1000):
        left_s = DEFAULT_FLIGHT_S - (view.now_ms - hold.flying_since_ms) // 1000
        raise ConfigError(
            f"hold: the answer of {hold_id!r} is under way, in process {hold.instance}: it and that of a new payment "
            f"may both come. Wait until its process has ended, or for {max(1, left_s)} s",
            public=hold.id,
        )
    view.record(hold.node_id, "forgive", hold_id=hold_id, facts={"by": by})
    return close_purchase(view, hold_id, ByOwner(hold.node_id, "forgive", by))


def _put(view: LedgerView, hold: Hold, delivery: Delivery) -> Hold:
    after, before = replace(hold, delivery=delivery), view.known_hold(hold.id)
    if after != before:
        view.put_hold(after)
        if delivery is not before.delivery:
            view.record(hold.node_id, ANSWER, hold_id=hold.id, facts={"is": delivery})
    return after

"""Is anybody still waiting for this hold's answer? Derived from rows, never from memory."""

from __future__ import annotations

import dataclasses
from typing import Final

from x402guard.ledger.model import Hold, HoldState
from x402guard.ledger.view import LedgerView, MarkKey

DEFAULT_FLIGHT_S: Final = 30
"""Seconds after which a request without an answer is in doubt, unless the owner says otherwise."""


def instance_mark(instance: str) -> MarkKey:
    """Return the key of a process instance's row: which process it is, and whether it has ended."""
    return "instance", instance


def in_doubt(view: LedgerView, hold: Hold, *, flight_ms: int) -> bool:
    """True where a live hold's request is over and nobody wrote down how it ended.

    It was noted so, or its request has been out longer than *flight_ms* (milliseconds), or the process that sent it is known
    to have ended.
    """
    if hold.state is not HoldState.HELD:
        return False
    if hold.doubt is not None:
        return True
    if hold.claim is not None:
        return False  # its answer came: what is open is only how much was taken
    if view.now_ms - hold.flying_since_ms > flight_ms:
        return True
    owner = view.mark(instance_mark(hold.owner))
    return owner is not None and bool(owner["ended"])


def take_over(view: LedgerView, hold: Hold, *, instance: str) -> Hold:
    """Make *instance* answer for a hold in doubt, from now on: compare-and-set, since the row is locked by this change.

    The doubt stays until somebody claims a settlement: should this presentation be lost as well, the next one presents the
    same cheque at once.
    """
    doubt = hold.doubt or "no answer came"
    taken = dataclasses.replace(
        hold, owner=instance, flying_since_ms=view.now_ms, doubt=doubt, presented=hold.presented + 1
    )
    view.put_hold(taken)
    view.record(hold.node_id, "represent", hold_id=hold.id, facts={"was_in_doubt": doubt})
    return taken

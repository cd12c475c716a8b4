"""Is anybody still waiting for this hold's answer? Derived from rows, never from memory."""

from __future__ import annotations

import dataclasses
from typing import Final

from x402guard.ledger.model import Hold, HoldState
from x402guard.ledger.view import LedgerView, MarkKey

__all__ = ["DEFAULT_FLIGHT_S", "beat", "in_doubt", "instance_mark", "take_over"]

DEFAULT_FLIGHT_S: Final = 30
"""Seconds after which a request without an answer is in doubt, unless the owner says otherwise."""

BEAT_EVERY_MS: Final = 5_000


def instance_mark(instance: str) -> MarkKey:
    """Return the key of a process instance's heartbeat row."""
    return "instance", instance


def beat(view: LedgerView, instance: str) -> None:
    """Renew the heartbeat of the instance that runs this change, unless it is younger than five seconds."""
    row = view.mark(instance_mark(instance))
    if row is None or row.get("ended") or view.now_ms - int(row["beat_ms"]) >= BEAT_EVERY_MS:
        view.put_mark(instance_mark(instance), {**(row or {}), "beat_ms": view.now_ms, "ended": False})


def in_doubt(view: LedgerView, hold: Hold, *, flight_ms: int) -> bool:
    """True where a live hold's request is over and nobody wrote down how it ended.

    It was noted so, or its request has been out longer than *flight_ms* (milliseconds), or its owner has ended or has not
    been heard of for as long.
    """
    if hold.state is not HoldState.HELD:
        return False
    if hold.doubt is not None or view.now_ms - hold.flying_since_ms > flight_ms:
        return True
    owner = view.mark(instance_mark(hold.owner))
    return owner is not None and (bool(owner["ended"]) or view.now_ms - int(owner["beat_ms"]) > flight_ms)


def take_over(view: LedgerView, hold: Hold, *, instance: str) -> Hold:
    """Make *instance* answer for a hold in doubt, from now on: compare-and-set, since the row is locked by this change."""
    taken = dataclasses.replace(
        hold, owner=instance, flying_since_ms=view.now_ms, doubt=None, presented=hold.presented + 1
    )
    view.put_hold(taken)
    view.record(hold.node_id, "represent", hold_id=hold.id, facts={"was_in_doubt": hold.doubt or "no answer came"})
    return taken

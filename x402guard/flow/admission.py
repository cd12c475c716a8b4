"""What stands before every hold, whatever it is for: an open session, a clock that can be believed, a kill file, a free place."""

from __future__ import annotations

from typing import Final

from x402guard.flow.effects import Flow, enter, killed, transact
from x402guard.flow.ports import Place
from x402guard.flow.terms import Terms
from x402guard.ledger.authorize import TRIPPED, Refusal, check_open, lapse_due
from x402guard.ledger.model import HoldKind
from x402guard.ledger.owner import trip_node
from x402guard.ledger.view import LedgerView, Scope
from x402guard.policy.breakers import slot_of
from x402guard.policy.steps import run_of

BUSY: Final = "bulkhead"
LONGEST_WAIT_S: Final = 300
"""How long a call waits for a place before it is refused, in seconds."""

_MAX_BEHIND_MS: Final = 60_000


def check_standing(view: LedgerView, terms: Terms) -> Refusal | None:
    """Return why nothing may be held for now, or None: the session and all above it are open, and the clock has not jumped.

    What is past its own deadline is ended on the way, where the clock is believed.
    """
    if view.ahead_ms <= terms.max_clock_jump_ms:
        lapse_due(view)
        return check_open(view, terms.node_id)
    reason = (
        f"this machine's clock has jumped {view.ahead_ms // 1000} s ahead since the ledger was opened (max_clock_jump_s is "
        f"{terms.max_clock_jump_ms // 1000}); set it right, or open the guard again where it is right now"
    )
    return Refusal("clock", reason)


def check_clock(view: LedgerView) -> Refusal | None:
    """A ledger that was written by a clock running ahead would date signatures by it, and make them good for too long."""
    if view.behind_ms <= _MAX_BEHIND_MS:
        return None
    seconds = view.behind_ms // 1000
    return Refusal(
        "clock", f"this machine's clock is {seconds} s behind the ledger's last entry; set it right, or wait"
    )


def stopped(terms: Terms) -> Flow[Refusal | None]:
    """Return the refusal of a run that a kill file stops, having latched it; None where there is no such file."""
    if not terms.kill_file or not (yield from killed()):
        return None
    run_id, reason = run_of(terms.node_id), f"there is a kill file, {terms.kill_file}"

    def change(view: LedgerView) -> Refusal | None:
        trip_node(view, run_id, reason)
        return check_open(view, terms.node_id)

    refusal = yield from transact(Scope(nodes=(terms.node_id, run_id), durable=True), change)
    return refusal or Refusal(TRIPPED, reason)


class Seat:
    """A place at a host, or of a tool, while one call is under way; none where the owner's bulkhead needs none.

    Taken before anything is held, and left while a person is asked.
    """

    def __init__(self, kind: HoldKind, name: str) -> None:
        self._kind, self._name = kind, name
        self.place: Place | None = None

    def take(self, terms: Terms) -> Flow[Refusal | None]:
        """Wait for a place; the refusal where none came free in time."""
        slot = slot_of(terms.policy.bulkhead, self._kind, self._name)
        if slot is None:
            return None
        self.leave()
        where, most = slot
        own = f"{run_of(terms.node_id)} {where}" if self._kind is HoldKind.TOOL else where
        self.place = yield from enter(own, most, LONGEST_WAIT_S)
        if self.place is not None:
            return None
        reason = f"{most} calls of {where} are under way, and none ended within {LONGEST_WAIT_S} s (policy.bulkhead)"
        return Refusal(BUSY, reason, retry_after_s=1)

    def leave(self) -> None:
        """Leave it, where it was taken. Leaving twice is fine."""
        if self.place is not None:
            self.place.leave()

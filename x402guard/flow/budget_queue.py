"""Lets a call wait in line while a budget is short only of what other calls under way hold."""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from typing import Any, Final

from msgspec.structs import replace

from x402guard.flow.context import Context
from x402guard.flow.effects import Checkpoint, Compute, Flow, Transact
from x402guard.kernel.rows import Hold, HoldKind
from x402guard.ledger.authorize import BUDGET, Refusal
from x402guard.ledger.budgets import unlent
from x402guard.ledger.purchases import in_doubt
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.25
_MOST_KNOWN: Final = 256

_Begun = tuple[tuple[str, ...], Any, int]
"""The holds that were begun last, those before them in the same form or None, and how many there are in all."""

_BEGUN: Final[ContextVar[_Begun | None]] = ContextVar("x402guard_holds_begun", default=None)
"""The last holds that were begun in this thread or task. They end only after it goes on, so it never waits for them.

A list of links, each of which may belong to several tasks: to add one copies none.
"""


def note_begun(hold_ids: tuple[str, ...]) -> None:
    """Note the holds that this thread or task is about to write."""
    known = _BEGUN.get()
    if known is None or known[0] != hold_ids:  # a call that has waited tries again with the same
        if known is not None and known[2] >= 2 * _MOST_KNOWN:
            known = (_begun(), None, _MOST_KNOWN)  # one link for the last ones; the earlier ones are forgotten
        _BEGUN.set((hold_ids, known, len(hold_ids) + (0 if known is None else known[2])))


def _begun() -> tuple[str, ...]:
    """Return the last holds that were begun here."""
    found, known = list[str](), _BEGUN.get()
    while known is not None and len(found) < _MOST_KNOWN:
        found += known[0]
        known = known[1]
    return tuple(found[:_MOST_KNOWN])


class BudgetQueue:
    """The place of one call in the line for a budget. Those of one process that wait are served in order of arrival.

    A new call that fits at once does not look at the line.

    The first in line asks the ledger again and again, for ``policy.wait_for_budget_s`` seconds in all; the others wait
    behind it, and ask once when their own time is over.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._left_s = float(context.policy.wait_for_budget_s)
        self._pause_s = _FIRST_PAUSE_S
        self._line: deque[object] | None = None
        self._where = ""
        self._asked_last = False

    def wait(self, refusal: Refusal) -> Flow[Refusal | None]:
        """Wait for a moment, and return None if it is worth asking the ledger again; else the refusal to raise."""
        if refusal.rule != BUDGET or not refusal.short_of or self._context.outstanding is None:
            return refusal
        room, others = yield from self._look(refusal.short_of)
        held = sum(hold.amount for hold in others)
        if refusal.needs > room + held:
            return refusal
        if self._left_s <= 0 and room >= refusal.needs and not self._asked_last:
            self._asked_last = True  # it has come free since the ledger was asked
            return None
        if self._left_s <= 0:
            return _later(refusal, held, len(others), self._context.policy.wait_for_budget_s) if others else refusal
        if self._line is None:
            self._where = refusal.short_of
            self._line = self._context.lines.setdefault(self._where, deque())
            self._line.append(self)
        while True:
            pause_s = min(self._pause_s, self._left_s)
            self._left_s -= pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 1.5)
            if (yield Checkpoint(pause_s, others=True)) is False:
                return _later(refusal, held, len(others), 0) if others else refusal
            if self._left_s <= 0 or self._line[0] is self:
                return None

    def leave(self) -> None:
        """Leave the line. May be called twice."""
        if self._line is not None:
            self._line.remove(self)
            if not self._line:
                self._context.lines.pop(self._where, None)
            self._line = None

    def _look(self, node_id: str) -> Flow[tuple[int, list[Hold]]]:
        """Return what is left in a budget, its reserve included, and the holds in it of other calls under way: they end soon, and may free room."""
        outstanding, context, begun = self._context.outstanding, self._context, _begun()
        live: list[Hold] = [] if outstanding is None else (yield Compute(lambda _: list(outstanding()), quick=False))
        others = [hold for hold in live if hold.kind is not HoldKind.TOKENS and hold.id not in begun]

        def look(view: LedgerView) -> tuple[int, list[Hold]]:
            flying = [
                hold
                for hold in view.live(hold.id for hold in others)
                if hold.claim is None and not in_doubt(view, hold, flight_ms=context.flight_ms)
            ]
            inside = [hold for hold in flying if any(node.id == node_id for node in view.path(hold.node_id))]
            return unlent(view, node_id).room or 0, inside

        scope = Scope((node_id,), tuple(hold.id for hold in others))
        found: tuple[int, list[Hold]] = yield Transact(scope, look)
        return found


def _later(refusal: Refusal, held: int, calls: int, waited_s: int) -> Refusal:
    waited = f", for which it has waited {waited_s} s (policy.wait_for_budget_s)" if waited_s else ""
    under_way = "1 call under way holds" if calls == 1 else f"{calls} calls under way hold"
    reason = f"{refusal.reason}; {under_way} ${format_dollars(held)}{waited}"
    advice = "Ask again when a call has ended: its rest comes back."
    return replace(refusal, reason=reason, retry_after_s=max(1, waited_s), advice=advice)

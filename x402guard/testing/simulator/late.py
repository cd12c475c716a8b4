"""A server that is away: what a process cannot write waits in it and in a file, as in ``flow.late_writes``, but no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from x402guard.errors import IllegalTransition, LedgerUnavailable
from x402guard.ledger.lost import LateEnd
from x402guard.testing.simulator.books import Actor, Books
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.machine import SimOutbox
from x402guard.testing.simulator.world import Violation, World

R = TypeVar("R")

_PAUSES_MS: Final = (1_000, 30_000, 600_000)
"""How long the server is away: from a moment to longer than processes live."""

_DIES_MS: Final = (10, 500, 20_000)


@dataclass(frozen=True, slots=True)
class _Write:
    call: Callable[[], Any]
    late: Callable[[Any], object]
    end: LateEnd
    restrains: bool
    actor: Actor


class SimLateWrites:
    """The queue of one process. It ends with the process; its outbox stays.

    Args:
        outbox: the file of the process.
        name: of this start of it, for the draws.
        die: ends the process as by kill -9, if it still lives.
    """

    def __init__(self, world: World, books: Books, outbox: SimOutbox, name: str, die: Callable[[Draws], None]) -> None:
        self._world, self._books, self._outbox, self._name, self._die = world, books, outbox, name, die
        self._added = 0
        self._waiting: deque[_Write] = deque()
        self._is_over = self._is_planned = False

    def write(self, call: Callable[[], R], late: Callable[[R], object], *, end: LateEnd, patient: bool = False) -> R:
        """See ``WritesLate.write``."""
        mine = _Write(call, late, end, patient, self._books.actor)
        if self._waiting and not patient:
            self._add(mine)
            raise LedgerUnavailable("others wait for the simulated server")
        if patient:
            self._outbox.keep(end)
        try:
            result = call()
        except LedgerUnavailable:
            self._add(mine)
            raise
        self._outbox.written(end)
        return result

    def catch_up(self) -> None:
        """See ``WritesLate.catch_up``."""
        if any(each.restrains for each in self._waiting):
            self._run()
        if any(each.restrains for each in self._waiting):
            raise LedgerUnavailable("a bill that may exceed a budget is not in the ledger yet")

    def close(self) -> None:
        """Write what can be written now; the next process writes the rest."""
        self._run()
        self.end()

    def end(self) -> None:
        """End it with its process."""
        self._is_over = True
        self._waiting.clear()

    def _add(self, write: _Write) -> None:
        self._outbox.keep(write.end)
        self._world.coverage.notes["an end waits for the server"] += 1
        if self._is_over:
            return
        self._waiting.append(write)
        self._added += 1
        self._plan()
        draws = self._world.draws("dies", self._name, self._added)
        if self._world.goes_wrong("crash", 0.5, draws):
            self._world.after(draws.pick(_DIES_MS), partial(self._die, draws))

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            draws = self._world.draws("away", self._name, self._added)
            self._world.after(draws.pick(_PAUSES_MS), self._due)

    def _due(self) -> None:
        self._is_planned = False
        self._run()

    def _run(self) -> None:
        """Write what waits, in its order, until the server is away again."""
        while self._waiting and not self._is_over:
            write = self._waiting[0]
            self._books.actor = write.actor
            try:
                result = write.call()
            except LedgerUnavailable:
                self._plan()
                return
            except IllegalTransition as error:
                raise Violation("illegal-transition", f"{write.end}: {error}") from error
            self._waiting.popleft()
            self._outbox.written(write.end)
            self._world.coverage.notes["an end is written later"] += 1
            write.late(result)

"""A server that is away: the queue of ``flow.late_writes`` in simulated time, with events in place of its threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from typing_extensions import override

from x402guard.errors import IllegalTransition
from x402guard.flow.detached import TooLate
from x402guard.flow.late_writes import LateWrite, LateWrites
from x402guard.ledger.lost import LateEnd
from x402guard.testing.simulator.books import Actor, Books
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.machine import SimOutbox
from x402guard.testing.simulator.world import Violation, World

R = TypeVar("R")

_PAUSES_MS: Final = (1_000, 30_000, 600_000)
"""How long the server is away: from a moment to longer than processes live."""

_SLOW_MS: Final = (2_100, 20_000)
_DIES_MS: Final = (10, 500, 20_000)
_OVER: Final = object()


class SimLateWrites(LateWrites):
    """The queue of one process. It ends with the process; its outbox stays.

    Args:
        outbox: the file of the process.
        name: of this start of it, for the draws.
        die: ends the process as by kill -9, if it still lives.
    """

    def __init__(self, world: World, books: Books, outbox: SimOutbox, name: str, die: Callable[[Draws], None]) -> None:
        super().__init__(outbox)
        self._world, self._books, self._name, self._die = world, books, name, die
        self._asked = self._added = 0
        self._left: Iterator[object] = iter(())
        self._is_planned = self._is_dead = False
        self._broken: Violation | None = None

    @override
    def write(self, call: Callable[[], R], late: Callable[[R], object], *, end: LateEnd, patient: bool = False) -> R:
        actor = self._books.actor

        def told(result: R) -> None:
            try:
                self._as(actor, lambda: late(result))
            except Violation as violation:  # the queue logs what fails here
                self._broken = violation

        return super().write(lambda: self._as(actor, call), told, end=end, patient=patient)

    def _as(self, actor: Actor, call: Callable[[], R]) -> R:
        """Return the result of *call*, which may run while another actor waits for it."""
        before, self._books.actor = self._books.actor, actor
        try:
            return call()
        finally:
            self._books.actor = before

    def end(self) -> None:
        """End it with its process."""
        self._is_over = self._is_dead = True
        self._waiting.clear()

    @override
    def _add(self, write: LateWrite, *, first: bool = False) -> None:
        super()._add(write, first=first)
        self._world.coverage.notes["an end waits for the server"] += 1
        if self._is_over:
            return
        self._added += 1
        draws = self._world.draws("dies", self._name, self._added)
        if self._world.goes_wrong("crash", 0.5, draws):
            self._world.after(draws.pick(_DIES_MS), partial(self._die, draws))

    @override
    def _tell(self, write: LateWrite) -> None:
        super()._tell(write)
        error: Any = write.error
        if isinstance(error, IllegalTransition):
            raise Violation("illegal-transition", f"{write.end}: {error}") from error
        broken = error if isinstance(error, Violation) else self._broken
        if broken is not None:
            raise broken
        self._world.coverage.notes["an end is written later"] += error is None

    @override
    def _run_aside(self, call: Callable[[], None]) -> None:
        self._asked += 1
        draws = self._world.draws("aside", self._name, self._asked)
        if not self._world.goes_wrong("away", 0.1, draws):
            call()
            return
        self._world.after(draws.pick(_SLOW_MS), partial(self._end_slowly, call))
        self._world.coverage.notes["an end is slow"] += 1
        raise TooLate

    def _end_slowly(self, call: Callable[[], None]) -> None:
        if not self._is_dead:
            call()
            self._take_turns()  # what waits for it is written at once

    @override
    def _start(self, turns: Iterator[object]) -> None:
        self._left = turns
        self._plan()

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            draws = self._world.draws("away", self._name, self._added)
            self._world.after(draws.pick(_PAUSES_MS), self._due)

    def _due(self) -> None:
        self._is_planned = False
        self._take_turns()

    def _take_turns(self) -> None:
        """Write what waits, until the server is away again."""
        if not self._is_dead and next(self._left, _OVER) is not _OVER:
            self._plan()

    @override
    def _wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        if not holds():
            self._take_turns()
        return holds()

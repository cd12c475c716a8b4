"""The world of one run: true time, the queue of events, what goes wrong, the chain, and the processes on one ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from typing import Final

from x402guard.assets import Asset
from x402guard.testing.simulator.chain import SimChain
from x402guard.testing.simulator.coverage import Coverage
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.endpoints import Endpoint
from x402guard.testing.simulator.machine import Machine, SimProcess, TrueTime

FAULTS: Final = (
    "cancelled", "stalled", "ledger", "disk_full", "power", "crash", "close", "unsent", "lost", "delayed", "doubled", "cut",
    "late", "signer", "slow_chain", "rpc_down", "rpc_lag", "rpc_fork", "rpc_nonsense", "rpc_limit", "rpc_hops", "no_logs",
    "reorg", "twist", "censor", "clock", "wrapped", "cancel_tx", "outside", "owner", "closing", "again", "elsewhere",
    "offers", "away", "rpc_elsewhere", "rpc_lies", "redirects",
)  # fmt: skip
"""Everything that can go wrong or be odd. Each run draws its own mix."""

EventAction = Callable[[], object]
"""Happens at its time. Returns False if it had nothing to do, so that it is no step."""


class Violation(AssertionError):  # noqa: N818 - the word of the field
    """An invariant does not hold. ``kind`` is its name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class BrokenActor(Exception):  # noqa: N818 - a user's seller, not an error of the library
    """An actor of the user's own breaks the protocol of the simulator, which names it."""


@dataclass(slots=True)
class Counts:
    """What one run, or many, have done."""

    steps: int = 0
    payments: int = 0
    """Payments that were signed."""
    settled: int = 0
    """Payments that the chain shows as taken at the end."""
    calls: int = 0
    tools: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of other runs."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(eq=False)
class World:
    """One run. Every actor reads the time and draws from here.

    Attributes:
        seed: what all draws come from.
        time: the true time; ``began_ms`` is its start.
        mix: fault → whether it happens in this run.
        asset: the token that everything is paid with.
        calm: True at the end: nothing goes wrong any more.
        trace: the story of the run, if it is kept.
    """

    seed: int
    time: TrueTime
    mix: Mapping[str, bool]
    asset: Asset
    chain: SimChain
    endpoints: list[Endpoint]
    machines: list[Machine]
    processes: list[SimProcess] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    counts: Counts = field(default_factory=Counts)
    endpoint_changes: int = 0
    calm: bool = False
    trace: list[str] | None = None
    began_ms: int = 0
    busy: int = 0
    """How many events in the queue are more than the next block."""
    _queue: list[tuple[int, int, EventAction, bool]] = field(default_factory=list)
    _serial: int = 0

    def __post_init__(self) -> None:
        self.began_ms = self.time.ms

    def draws(self, *names: str | int) -> Draws:
        """Return the stream of a name."""
        return Draws.named(self.seed, *names)

    def after(self, pause_ms: int, action: EventAction, *, idle: bool = False) -> None:
        """Let *action* happen in *pause_ms* milliseconds. *idle*: a run does not wait for it."""
        self._serial += 1
        self.busy += not idle
        heappush(self._queue, (self.time.ms + pause_ms, self._serial, action, idle))

    @property
    def next_ms(self) -> int:
        """When the next event is due, in true unix milliseconds; now if there is none."""
        return self._queue[0][0] if self._queue else self.time.ms

    def step(self) -> None:
        """Let the next event happen."""
        at_ms, _, action, idle = heappop(self._queue)
        self.busy -= not idle
        self.time.ms = max(self.time.ms, at_ms)
        if action() is not False:
            self.counts.steps += 1

    def goes_wrong(self, fault: str, part: float, draws: Draws) -> bool:
        """Return whether a fault happens here: in *part* of all draws, if it is in this run's mix."""
        if not draws.chance(part) or not self.mix[fault] or self.calm:
            return False
        self.coverage.notes[f"fault {fault}"] += 1
        return True

    def say(self, text: str) -> None:
        """Add a line to the story of the run, if it is kept."""
        if self.trace is not None:
            self.trace.append(f"[{self.counts.steps:5d} {(self.time.ms - self.began_ms) / 1000:10.3f} s] {text}")

    @property
    def alive(self) -> list[SimProcess]:
        """The processes that run now."""
        return [each for each in self.processes if each.is_alive]

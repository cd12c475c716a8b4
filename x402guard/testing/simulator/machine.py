"""Machines with clocks and process ids of their own, and the processes on them: each one a guard on the shared ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from typing_extensions import override

from x402guard.chain.rechecker import FIRST_PAUSE_S
from x402guard.flow.shell import Shell, WritesLate
from x402guard.flow.surroundings import Surroundings, use_surroundings
from x402guard.frozen import replace
from x402guard.guard.guard import Guard
from x402guard.guard.opening import WalletLimit
from x402guard.guard.session import Session
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import Notice
from x402guard.testing.simulator.draws import Draws

R = TypeVar("R")

PIDS: Final = 4
"""How many process ids a machine gives out: few, as in a container, so that a new process gets a dead one's id."""


_FIRST_PAUSE_MS: Final = int(FIRST_PAUSE_S * 1000)


@dataclass(slots=True)
class TrueTime:
    """The time that no machine's clock shows exactly, in unix milliseconds."""

    ms: int

    @property
    def unix(self) -> int:
        """The same in whole seconds."""
        return self.ms // 1000


class SimOutbox:
    """The file of one process on its machine: the ends that it could not write. A reboot leaves it as it is.

    Args:
        owed: gets the bills that have ever waited: hold → nano-dollars.

    Attributes:
        ends: what waits.
    """

    def __init__(self, owed: dict[str, int]) -> None:
        self.ends: list[LateEnd] = []
        self._owed = owed

    def keep(self, end: LateEnd) -> bool:
        """See ``KeepsEnds.keep``."""
        if end not in self.ends:
            self.ends.append(end)
        if end.capture is not None:
            self._owed[end.hold_id] = end.capture.amount
        return True

    def written(self, end: LateEnd) -> None:
        """See ``KeepsEnds.written``."""
        self.ends = [each for each in self.ends if each != end]


class LateQueue(WritesLate, Protocol):
    """The queue of a process for what it writes later."""

    def end(self) -> None:
        """End it with its process."""


class Machine:
    """One machine, or one container: a clock that may be wrong, a steady clock, and its own process ids.

    Args:
        name: its host name.
        time: the true time.
    """

    def __init__(self, name: str, time: TrueTime) -> None:
        self.name, self._time, self._booted_ms = name, time, time.ms
        self.skew_ms, self.boots = 0, 1
        self.running: set[int] = set()
        self.left: list[SimOutbox] = []
        """What ended processes could not write."""
        self._last_pid = 0

    def clock_ms(self) -> int:
        """Return what the clock on its wall shows, in unix milliseconds."""
        return self._time.ms + self.skew_ms

    @property
    def true_ms(self) -> int:
        """The true time, in unix milliseconds."""
        return self._time.ms

    def steady_ms(self) -> int:
        """Return milliseconds since it has booted."""
        return self._time.ms - self._booted_ms

    def reboot(self) -> None:
        """End all of its processes, and start again."""
        self.running.clear()
        self.boots, self._booted_ms, self._last_pid = self.boots + 1, self._time.ms, 0

    def next_pid(self) -> int:
        """Return the id of a new process: the next one that is free."""
        for _ in range(PIDS + 1):
            self._last_pid = self._last_pid % PIDS + 1
            if self._last_pid not in self.running:
                break
        self.running.add(self._last_pid)
        return self._last_pid


class SimSurroundings(Surroundings):
    """What a simulated process learns from its machine."""

    def __init__(self, machine: Machine, pid: int, draws: Draws) -> None:
        self._machine, self._pid, self._draws = machine, pid, draws

    @override
    def hostname(self) -> str:
        return self._machine.name

    @override
    def pid(self) -> int:
        return self._pid

    @override
    def boot_id(self) -> str:
        return f"{self._machine.name}-boot-{self._machine.boots}"

    @override
    def machine(self) -> str:
        return f"{self._machine.name}/{self.boot_id()}"

    @override
    def is_running(self, pid: int) -> bool:
        return pid in self._machine.running

    @override
    def collect_dropped(self) -> None:
        """Do nothing: what a simulated process drops is known at once."""

    @override
    def follow_task(self) -> Callable[[], bool]:
        return lambda: False  # what comes between two hops is played as such

    @override
    def random_bytes(self, count: int) -> bytes:
        return self._draws.octets(count)


class SimGuard(Guard):
    """A guard whose notices and nudges go to the simulation instead of to threads."""

    def __init__(
        self,
        notify: Callable[[Iterable[Notice]], None],
        nudge: Callable[[], None],
        late_writes: LateQueue | None,
        **settings: Any,
    ) -> None:
        self._notify, self._nudge, self._late = notify, nudge, late_writes
        super().__init__(background_checks=False, **settings)

    @override
    def _late_writes(self, store: LedgerStore) -> LateQueue | None:
        return self._late

    @override
    def _open(self, shell: Shell, wallet: WalletLimit, **more: bool) -> None:
        shell = replace(shell, notifier=_Notifier(self._notify))
        super()._open(replace(shell, recheck=self._nudge) if shell.chain is not None else shell, wallet, **more)


class _Notifier:
    def __init__(self, notify: Callable[[Iterable[Notice]], None]) -> None:
        self._notify = notify

    def notify(self, notices: Iterable[Notice]) -> None:
        self._notify(notices)


@dataclass(eq=False)
class Agent:
    """One task of an agent in a process: a session or scope, and the context in which its block is open."""

    process: SimProcess
    session: Session
    context: Context
    leave: Callable[[], object]

    def run(self, call: Callable[[], R]) -> R:
        """Run code inside its block."""
        return self.context.run(call)

    @property
    def is_open(self) -> bool:
        """True until its session or scope has ended."""
        return not self.session.has_ended


@dataclass(eq=False)
class SimProcess:
    """One process: a guard, its agents, and the context that its code runs in.

    Attributes:
        name: of the process, over all of its restarts.
        settings: the arguments of its guard.
        down_until_ms: when it starts again, in true unix milliseconds.
        recheck_ms: when its next background check is due; None while nothing is open.
        pause_ms: the pause before that check.
        is_checking: True while such a check is under way.
        checks: how many it has begun, over all of its restarts.
        late, outbox: its queue of late ends and its file of these; None in a ledger that is never away.
    """

    name: str
    machine: Machine
    settings: Mapping[str, Any]
    guard: SimGuard | None = None
    context: Context = field(default_factory=copy_context)
    agents: list[Agent] = field(default_factory=list)
    pid: int = 0
    starts: int = 0
    down_until_ms: int = 0
    recheck_ms: int | None = None
    pause_ms: int = 0
    is_checking: bool = False
    checks: int = 0
    late: LateQueue | None = None
    outbox: SimOutbox | None = None

    @property
    def is_alive(self) -> bool:
        """True while it runs."""
        return self.guard is not None

    @property
    def reads_chain(self) -> bool:
        """True if its guard has a chain."""
        return self.settings.get("chains") is not None

    def start(
        self, store: LedgerStore, draws: Draws, notify: Callable[[Iterable[Notice]], None], **settings: Any
    ) -> None:
        """Open its guard on *store*, with *settings* besides its own. Raises what ``Guard`` raises."""
        self.pid, self.starts = self.machine.next_pid(), self.starts + 1
        self.context = copy_context()
        self.context.run(use_surroundings, SimSurroundings(self.machine, self.pid, draws))
        self.agents, self.recheck_ms, self.is_checking = [], None, False
        try:
            self.guard = self.context.run(
                lambda: SimGuard(notify, self.nudge, self.late, ledger=store, **{**self.settings, **settings})
            )
        except BaseException:
            self.machine.running.discard(self.pid)
            raise

    def nudge(self) -> None:
        """Ask for a background check soon, as a claim does."""
        soon_ms = self.machine.true_ms + _FIRST_PAUSE_MS
        self.pause_ms = _FIRST_PAUSE_MS
        self.recheck_ms = soon_ms if self.recheck_ms is None else min(self.recheck_ms, soon_ms)

    def end(self) -> None:
        """End at once, as by kill -9: nothing more of it runs."""
        self.guard, self.agents, self.recheck_ms = None, [], None
        if self.late is not None:
            self.late.end()
        if self.outbox is not None and self.outbox.ends:
            self.machine.left.append(self.outbox)
        self.late = self.outbox = None
        self.machine.running.discard(self.pid)

    def open_agents(self) -> list[Agent]:
        """Return its agents whose session or scope is open."""
        self.agents = [agent for agent in self.agents if agent.is_open]
        return self.agents

    def run(self, call: Callable[[], R]) -> R:
        """Run code of this process, in its surroundings."""
        return self.context.run(call)

    def enter(
        self, session: Session, enter: Callable[[], object], leave: Callable[[], object], inside: Context
    ) -> Agent:
        """Enter the block of a session or scope, in a copy of the context *inside*, and return its agent."""
        context = inside.copy()
        context.run(enter)
        agent = Agent(self, session, context, leave)
        self.agents.append(agent)
        return agent

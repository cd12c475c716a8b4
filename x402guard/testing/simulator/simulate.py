"""Plays many runs, and collects what they did, what they reached, and what was wrong."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from x402guard.errors import ConfigError
from x402guard.policy import Policy
from x402guard.testing.both_ways import both_ways
from x402guard.testing.simulator.case import DEFAULT_LENGTH, Case, Flavour, Store
from x402guard.testing.simulator.coverage import Coverage
from x402guard.testing.simulator.ending import Ending
from x402guard.testing.simulator.market import Seller
from x402guard.testing.simulator.play import Play
from x402guard.testing.simulator.world import BrokenActor, Counts, Violation

_LOGS: Final = "x402guard"


@dataclass(frozen=True, slots=True)
class Found:
    """A run that broke an invariant: its case, the invariant's name, the step, and what was seen."""

    case: Case
    kind: str
    step: int
    text: str
    own: tuple[str, ...] = ()
    """Which arguments of ``play`` were the caller's own: ``sellers``, ``policy``."""

    def __str__(self) -> str:
        own = "".join(f", {name}=…" for name in self.own)
        again = f"play({self.case!r}{own})" if own else self.case.command()
        return f"{self.kind} at step {self.step:,}: {self.text}\n  repeat it with: {again}"


@dataclass(slots=True)
class Result:
    """What runs have shown. ``violations`` is empty if every invariant held at every step."""

    runs: int = 0
    counts: Counts = field(default_factory=Counts)
    coverage: Coverage = field(default_factory=Coverage)
    violations: list[Found] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Add other runs."""
        self.runs += other.runs
        self.counts.add(other.counts)
        self.coverage.add(other.coverage)
        self.violations += other.violations

    def summary(self) -> str:
        """Return one line: runs, steps, payments, violations."""
        counts = self.counts
        return (
            f"{self.runs:,} runs, {counts.steps:,} steps, {counts.payments:,} payments signed, {counts.settled:,} taken, "
            f"{counts.calls:,} LLM calls, {counts.tools:,} tools; {len(self.violations):,} violations"
        )


def play(
    case: Case,
    *,
    sellers: Callable[[], Sequence[Seller]] | None = None,
    policy: Policy | None = None,
    trace: list[str] | None = None,
) -> Result:
    """Play one run, and add its story to *trace*, if given.

    A violation is in the result. Raises ``BrokenActor`` for a seller that breaks the protocol.
    """
    shops = () if sellers is None else sellers()
    if sellers is not None and not shops:
        raise ConfigError("sellers: the function returns no seller")
    own = tuple(name for name, given in (("sellers", sellers), ("policy", policy)) if given is not None)
    run = Play(case, sellers=shops, policy=policy, trace=trace)
    # A process that logs every notice spends most of a run on it; the notices themselves are checked.
    log, was_disabled = logging.getLogger(_LOGS), logging.getLogger(_LOGS).disabled
    log.disabled = True
    found = []
    try:
        with both_ways(run.world.coverage.ways):
            run.run(lambda played: Ending(played).play())
    except Violation as violation:
        found.append(Found(case, violation.kind, run.world.counts.steps, str(violation)[:1_000], own))
    except BrokenActor:
        raise
    except Exception as error:  # an error that no flow expects is a finding too
        logging.getLogger(__name__).debug("a run has failed", exc_info=True)
        text = f"{type(error).__name__}: {error}"[:1_000]
        found.append(Found(case, f"error-{type(error).__name__}", run.world.counts.steps, text, own))
    finally:
        log.disabled = was_disabled
    return Result(1, run.world.counts, run.world.coverage, found)


def simulate(
    seeds: Iterable[int],
    *,
    sellers: Callable[[], Sequence[Seller]] | None = None,
    policy: Policy | None = None,
    length: int = DEFAULT_LENGTH,
    store: Store = "memory",
    flavour: Flavour | None = None,
    seconds: float | None = None,
    stop_at: int | None = None,
) -> Result:
    """Play a run for each seed, and return what they have shown.

    Args:
        seeds: whole numbers; each is one run, the same on every machine.
        sellers: returns new sellers for one run, in place of the hostile ones; see ``Seller``.
        policy: the owner's rules, in place of those that each run draws.
        length: how many things happen from outside in a run: requests, crashes, commands.
        store: where the ledger of each run is kept: ``memory``, ``fleet`` or ``sqlite``.
        flavour: what the runs look for; by default each draws it.
        seconds: stop after these.
        stop_at: stop at that many violations.

    Raises ``ConfigError`` naming the argument, ``BrokenActor`` for a seller that breaks the protocol.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigError(f"policy: {policy!r:.100} is not a Policy")
    if sellers is not None and (not callable(sellers) or isinstance(sellers, type)):
        raise ConfigError("sellers: write a function that returns a list of new sellers, such as lambda: [Slow()]")
    result, until = Result(), None if seconds is None else monotonic() + seconds
    with _Unpaused():
        for seed in seeds:
            result.add(play(Case(seed, length, store=store, flavour=flavour), sellers=sellers, policy=policy))
            for generation in (0, 1):  # what a run leaves is young; finalizers keep some of it for one more look
                gc.collect(generation)
            if until is not None and monotonic() >= until:
                break
            if stop_at is not None and len(result.violations) >= stop_at:
                break
    return result


class _Unpaused:
    """A block without the automatic collector, which would look through the rows of a run again and again."""

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_left_by: object) -> None:
        if self._was_on:
            gc.enable()

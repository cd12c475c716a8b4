"""One run as data: its seed, what is left out of it, and the version that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from x402guard.errors import ConfigError
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.world import FAULTS

VERSION: Final = 3
"""Counts the changes that make an old seed another run."""

DEFAULT_LENGTH: Final = 400

Store = Literal["memory", "fleet", "sqlite"]
"""``fleet``: in memory, and sessions keep idle budget, as in a store for many machines (``ledger.budgets``)."""

STIMULI: Final[Mapping[str, int]] = {
    "buys": 300, "calls": 25, "uses_tool": 30, "opens": 8, "nests": 8, "leaves": 12, "counts_tokens": 4, "finalizes": 2,
    "goes_past": 1, "sweeps": 6, "reconciles": 4, "compares": 8, "commands": 10, "resets": 12, "cancels": 5, "crash": 4, "closes": 2,
    "power": 1, "disk_full": 1, "clock": 5, "reorg": 12, "resends": 3, "endpoint": 14, "outside": 3, "reads": 1, "dusk": 1,
}  # fmt: skip
"""What may happen next, and how often."""

Flavour = Literal["mixed", "dense", "midnight", "nodes", "forks", "away", "remainders", "busy"]
"""What a run looks for. Most faults are rare where everything happens.

``dense``: many wants and large budgets; ``midnight``: a small budget a day, as the day ends; ``nodes``: one endpoint that
limits and forgets, and many cancellations; ``forks``: three endpoints that disagree, and many blocks that are undone;
``away``: a ledger that often cannot be written, and processes that end meanwhile; ``remainders``: what an ``upto`` has
left is used before its block is final, as the day ends, and blocks are undone; ``busy``: one ledger that lives long, with
as many payments as it can take. No seed draws that one: it is asked for by its name.
"""

_FLAVOURS: Final[Mapping[Flavour, int]] = {
    "mixed": 16, "dense": 20, "midnight": 18, "nodes": 18, "forks": 14, "away": 14, "remainders": 8, "busy": 0,
}  # fmt: skip
_FORCED: Final[Mapping[Flavour, Mapping[str, bool]]] = {
    "mixed": {},
    "dense": {},
    "midnight": {"reorg": True, "owner": False, "closing": False},
    "nodes": {"no_logs": True, "cancel_tx": True, "rpc_limit": True, "owner": False},
    "forks": {"reorg": True, "rpc_fork": True, "rpc_lag": True, "rpc_hops": True, "outside": True, "rpc_down": False},
    "remainders": {"reorg": True, "twist": True, "owner": False, "closing": False},
    "away": {"away": True, "ledger": True, "disk_full": True, "crash": True, "close": True, "lost": True},
    "busy": {"owner": False, "closing": False, "outside": False, "rpc_lies": False},
}
_MORE: Final[Mapping[Flavour, Mapping[str, int]]] = {
    "mixed": {},
    "dense": {"buys": 6},
    "midnight": {"buys": 3, "reorg": 4, "opens": 2, "dusk": 12},
    "nodes": {"buys": 2, "cancels": 12, "endpoint": 3},
    "forks": {"reorg": 3, "endpoint": 4, "outside": 3, "resends": 4, "compares": 3},
    "away": {"calls": 4, "disk_full": 15, "crash": 4, "closes": 4},
    "remainders": {"buys": 3, "reorg": 8, "resends": 6, "opens": 2, "dusk": 12},
    "busy": {"buys": 30, "resets": 3},
}

_GAPS_MS: Final = (0, 0, 0, 0, 1, 5, 20, 100, 500, 1_000, 3_000, 8_000, 20_000)
_LONG_MS: Final = (120_000, 400_000)
_IDLE_MS: Final = (3_600_000, 20_000_000, 86_400_000, 100_000_000)


@dataclass(frozen=True, slots=True)
class Stimulus:
    """One thing that happens from outside: its number in the run, the pause before it, and what it is."""

    number: int
    pause_ms: int
    what: str


@dataclass(frozen=True)
class Case:
    """One run. A minimised run is the same seed with less in it.

    Attributes:
        seed: a whole number; all draws come from it.
        length: how many stimuli the run is made of.
        off: faults that do not happen in it.
        kept: the numbers of the stimuli that happen; None for all of them.
        store: ``memory``, ``fleet`` or ``sqlite``.
        version: of the simulator that the seed belongs to.
        flavour: what the run looks for; None for what the seed draws.

    Raises ``ConfigError`` that names what is wrong.
    """

    seed: int
    length: int = DEFAULT_LENGTH
    off: frozenset[str] = frozenset()
    kept: tuple[int, ...] | None = None
    store: Store = "memory"
    version: int = VERSION
    flavour: Flavour | None = None

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(
                f"seed: {self.seed} belongs to version {self.version} of the simulator, and this is version {VERSION}: it would "
                "be another run. Run it with the release that found it, or look for a new seed"
            )
        if type(self.seed) is not int or self.seed < 0:
            raise ConfigError(f"seed: {self.seed!r} is not a whole number from 0 on")
        if type(self.length) is not int or not 1 <= self.length <= 1_000_000:
            raise ConfigError(f"length: {self.length!r} is not a number of stimuli from 1 to 1,000,000")
        unknown = sorted(self.off - set(FAULTS))
        if unknown:
            raise ConfigError(f"off: {unknown[0]!r} is not a fault; the faults are {', '.join(FAULTS)}")
        if self.store not in get_args(Store):
            raise ConfigError(f"store: {self.store!r} is not one of {', '.join(get_args(Store))}")
        if self.flavour not in (None, *get_args(Flavour)):
            raise ConfigError(f"flavour: {self.flavour!r} is not one of {', '.join(get_args(Flavour))}")

    @property
    def plays(self) -> Flavour:
        """The flavour of this run: the given one, or what its seed draws."""
        drawn: Flavour = Draws.named(self.seed, "flavour").weighted(_FLAVOURS)
        return drawn if self.flavour is None else self.flavour

    def mix(self) -> dict[str, bool]:
        """Return which faults happen in this run: each in half of all runs, and those of its flavour."""
        draws = Draws.named(self.seed, "mix")
        drawn = {fault: draws.chance(0.5) for fault in FAULTS}
        drawn.update(_FORCED[self.plays])
        return {fault: on and fault not in self.off for fault, on in drawn.items()}

    def schedule(self) -> list[Stimulus]:
        """Return the stimuli of this run, in their order. What is left out changes nothing of the others."""
        draws = Draws.named(self.seed, "schedule")
        weights = {what: 1 + draws.below(2 * weight) for what, weight in STIMULI.items()}
        weights["buys"] += STIMULI["buys"] // 2
        weights |= {what: weights[what] * times for what, times in _MORE[self.plays].items()}
        idle, slow = draws.chance(0.4), draws.chance(0.5)
        if self.plays in ("midnight", "remainders"):
            idle = slow = False
        else:
            del weights["dusk"]
        found = []
        for number in range(self.length):
            pause_ms = draws.pick(_GAPS_MS)
            if draws.chance(0.02) and slow:
                pause_ms = draws.pick(_LONG_MS)
            if draws.chance(0.004) and idle:
                pause_ms = draws.pick(_IDLE_MS)
            found.append(Stimulus(number, pause_ms, draws.weighted(weights)))
        if self.kept is None:
            return found
        kept = set(self.kept)
        return [each if each.number in kept else Stimulus(each.number, each.pause_ms, "") for each in found]

    def command(self) -> str:
        """Return the command that repeats this run."""
        words = [f"python -m x402guard.testing.simulator --seed {self.seed} --version {self.version}"]
        words += [f"--length {self.length}"] if self.length != DEFAULT_LENGTH else []
        words += [f"--off {','.join(sorted(self.off))}"] if self.off else []
        words += [f"--keep {','.join(map(str, self.kept))}"] if self.kept is not None else []
        words += [f"--store {self.store}"] if self.store != "memory" else []
        words += [f"--flavour {self.flavour}"] if self.flavour is not None else []
        return " ".join(words)

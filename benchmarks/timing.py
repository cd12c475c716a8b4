"""Times calls in interleaved rounds, so that noise meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Call = Callable[[int], object]
"""A call to time. It gets a number that no call before it had."""


@dataclass(frozen=True)
class Spread:
    """Times of one call in µs: the minimum, the median, and the spread of the rounds' medians."""

    least: float
    median: float
    noise: float


@dataclass(frozen=True)
class Figure:
    """One figure of a row: its value, what it has to be, and what it is measured against."""

    name: str
    value: float
    unit: str
    goal: str = ""
    peer: str = ""

    def shown(self) -> str:
        """Return the value with its unit, in three digits."""
        digits = 0 if abs(self.value) >= 100 else 1 if abs(self.value) >= 10 else 2
        return f"{self.value:,.{digits}f} {self.unit}"


class Clock:
    """Numbers calls, and times them one by one."""

    def __init__(self) -> None:
        self._number = 0

    def time(self, call: Call) -> float:
        """Return how long one call takes, in µs."""
        self._number += 1
        began = time.perf_counter_ns()
        call(self._number)
        return (time.perf_counter_ns() - began) / 1000


def interleaved(calls: Mapping[str, Call], *, rounds: int = 20, each: int = 20, warm: int = 20) -> dict[str, Spread]:
    """Return the spread of each call over so many rounds of so many calls each."""
    clock = Clock()
    for call in calls.values():
        for _ in range(warm):
            clock.time(call)
    taken: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append([clock.time(call) for _ in range(each)])
    return {name: _spread(found) for name, found in taken.items()}


def _spread(rounds: list[list[float]]) -> Spread:
    medians = [statistics.median(times) for times in rounds]
    every = [time for times in rounds for time in times]
    quartiles = statistics.quantiles(medians, n=4) if len(medians) > 1 else [medians[0]] * 3
    return Spread(min(every), statistics.median(every), quartiles[2] - quartiles[0])

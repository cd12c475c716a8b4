"""Plays runs on many cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count, islice
from time import monotonic
from typing import Any, Final

from x402guard.testing.simulator.case import Case
from x402guard.testing.simulator.simulate import Result, play, simulate

_AT_ONCE: Final = 6

MOST_FOUND: Final = 5
"""After so many violations, no new runs are begun."""


def play_many(first: int, length: int, store: str, *, seconds: float | None, runs: int | None, workers: int) -> Result:
    """Play runs from the seed *first* on, in *workers* processes, for *seconds*, or as many as *runs* says.

    Raises ``ConfigError``; ends early after some violations.
    """
    result, until = Result(), None if seconds is None else monotonic() + seconds
    parts = _parts(first, runs)
    if workers == 1:
        for part in parts:
            result.add(_part(part, length, store, until))
            if until is not None and monotonic() >= until:
                break
        return result
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_part, part, length, store, None) for part in islice(parts, 2 * workers)]
        while waiting:
            result.add(waiting.pop(0).result())
            more = next(parts, None)
            if more is not None and (until is None or monotonic() < until) and len(result.violations) < MOST_FOUND:
                waiting.append(pool.submit(_part, more, length, store, None))
    return result


def _parts(first: int, runs: int | None) -> Iterator[range]:
    for at in count(first, _AT_ONCE):
        end = at + _AT_ONCE if runs is None else min(first + runs, at + _AT_ONCE)
        if at >= end:
            return
        yield range(at, end)


def _part(seeds: range, length: int, store: str, until: float | None) -> Result:
    if store == "memory":
        return simulate(seeds, length=length, seconds=None if until is None else max(0.0, until - monotonic()))
    result = Result()
    given: Any = store
    for seed in seeds:
        result.add(play(Case(seed, length, store=given)))
        if until is not None and monotonic() >= until:
            break
    return result

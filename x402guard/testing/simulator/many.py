"""Plays runs on many cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count, islice
from time import monotonic
from typing import Final

from x402guard.testing.simulator.case import Flavour, Store
from x402guard.testing.simulator.simulate import Result, simulate

_AT_ONCE: Final = 6

MOST_FOUND: Final = 5
"""After so many violations, no new runs are begun."""


def play_many(
    first: int,
    length: int,
    store: Store,
    *,
    flavour: Flavour | None = None,
    seconds: float | None,
    runs: int | None,
    workers: int,
) -> Result:
    """Play runs from the seed *first* on, in *workers* processes, for *seconds*, or as many as *runs* says.

    Raises ``ConfigError``; begins no more after ``MOST_FOUND`` violations.
    """
    result, until = Result(), None if seconds is None else monotonic() + seconds
    parts = _parts(first, runs)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:

        def play_part(seeds: range) -> Future[Result]:
            return pool.submit(simulate, seeds, length=length, store=store, flavour=flavour)

        waiting = [play_part(part) for part in islice(parts, 2 * workers)]
        while waiting:
            result.add(waiting.pop(0).result())
            more = next(parts, None)
            if more is not None and (until is None or monotonic() < until) and len(result.violations) < MOST_FOUND:
                waiting.append(play_part(more))
    return result


def _parts(first: int, runs: int | None) -> Iterator[range]:
    for at in count(first, _AT_ONCE):
        end = at + _AT_ONCE if runs is None else min(first + runs, at + _AT_ONCE)
        if at >= end:
            return
        yield range(at, end)

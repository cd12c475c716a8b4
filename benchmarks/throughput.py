"""Many threads, tasks and processes on one SQLite file."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.paid_request import raw_commit
from benchmarks.scenes import SOLD, async_client, client, on_disk, seller, session
from benchmarks.timing import Figure
from x402guard import Session

_SECONDS = 2.0


def measure() -> Iterator[Figure]:
    """Yield how many payments and charges a second go through, and the longest wait among processes."""
    with raw_commit() as commit:
        raw = _rate(1, lambda _n: commit())
    yield Figure("raw FULL commits", raw, "/s")
    with on_disk() as url, session(url) as payer:
        http = client(payer, seller)
        for count, goal in ((1, ""), (64, "≥ 900")):
            yield Figure(f"payments, {count} threads", _rate(count, lambda n: http.get(f"{SOLD}?n={n}")), "/s", goal)
        for count, goal in ((1, ""), (64, "≥ 0.6 of raw")):
            rate = _rate(count, lambda n: payer.charge(f"tool{n % 200}", "$0.000001", arguments={"n": n}))
            yield Figure(f"charges, {count} threads", rate, "/s", goal, f"{rate / raw:.2f} of raw")
        for count, goal in ((1, ""), (100, "≥ 700")):
            yield Figure(f"payments, {count} tasks", asyncio.run(_tasks(payer, count)), "/s", goal)
    yield from _processes()


def _rate(count: int, call: Callable[[int], object]) -> float:
    until, made = time.perf_counter() + _SECONDS, [0] * count

    def work(which: int) -> None:
        while time.perf_counter() < until:
            call(which * 10_000_000 + made[which])
            made[which] += 1

    threads = [threading.Thread(target=work, args=(which,)) for which in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(made) / _SECONDS


async def _tasks(payer: Session, count: int) -> float:
    http, until, made = async_client(payer, seller), time.perf_counter() + _SECONDS, [0]

    async def work(which: int) -> None:
        number = 0
        while time.perf_counter() < until:
            await http.get(f"{SOLD}?t={which}&n={number}")
            number += 1
            made[0] += 1

    await asyncio.gather(*(work(which) for which in range(count)))
    return made[0] / _SECONDS


def _processes() -> Iterator[Figure]:
    found = {count: _shared(count) for count in (1, 8)}
    for kind, name in ((0, "payments"), (1, "charges")):
        rate = sum(each[kind] for each in found[8]) / sum(each[kind] for each in found[1])
        yield Figure(f"{name}, 8 processes ÷ 1", rate, "×", "≥ 0.9")
    yield Figure("longest wait, 8 processes", max(each[2] for each in found[8]), "ms", "≤ 100")


def _shared(count: int) -> list[list[float]]:
    with on_disk() as url:
        with session(url):
            pass  # the file is there before the first of them opens it
        command = [sys.executable, "-m", "benchmarks.throughput", url]
        root = Path(__file__).parent.parent
        running = [
            subprocess.Popen(  # noqa: S603 - our own
                [*command, str(which)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
            )
            for which in range(count)
        ]
        found: list[list[float]] = [[] for _ in running]
        for _ in range(2):  # each kind of work begins in all of them at once
            for each in running:
                _line(each)
            for each in running:
                _begin(each)
            for each, told in zip(running, found, strict=True):
                told.extend(map(float, _line(each).split()))
        for each in running:
            each.communicate()
        return [[told[0], told[2], max(told[1], told[3])] for told in found]


def _line(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout else ""
    return line or sys.exit("a process has ended; its error is above")


def _begin(process: subprocess.Popen[str]) -> None:
    if process.stdin:
        process.stdin.write("go\n")
        process.stdin.flush()


def _alone(url: str, which: int) -> None:
    """Pay, then charge, each from the word on; print the rate and the longest call in ms."""
    with session(url) as payer:
        http = client(payer, seller)
        for call in (
            lambda n: http.get(f"{SOLD}?p={which}&n={n}"),
            lambda n: payer.charge(f"tool{n % 200}", "$0.000001", arguments={"p": which, "n": n}),
        ):
            for number in range(10):
                call(-number)
            print("ready", flush=True)
            sys.stdin.readline()
            until, made, longest = time.perf_counter() + _SECONDS, 0, 0.0
            while (began := time.perf_counter()) < until:
                made += 1
                call(made)
                longest = max(longest, time.perf_counter() - began)
            print(made / _SECONDS, longest * 1000, flush=True)


if __name__ == "__main__":
    _alone(sys.argv[1], int(sys.argv[2]))

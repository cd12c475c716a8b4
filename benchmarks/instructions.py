"""How many instructions a path takes, by valgrind's cachegrind: they repeat to a thousandth, where times vary by a third.

Each path runs a few and many times, in a process each; the difference is what one takes, without the start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.scenes import session
from benchmarks.timing import Figure
from x402guard import Session

_RUNS: Final = {
    "pass-through": (100, 600), "paid request": (60, 260), "LLM call": (60, 260), "charge": (220, 720),
    "hold + capture": (220, 720), "record_usage": (220, 720), "a step of the simulator": (1, 6),
}  # fmt: skip
"""How often each path runs the first time and the second time; the simulator: whole runs."""


def measure() -> Iterator[Figure]:
    """Yield the thousands of instructions of each path, in memory."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        print("instructions are not counted: valgrind is not installed", file=sys.stderr)
        return
    for name, counts in _RUNS.items():
        with ThreadPoolExecutor(2) as pool:
            few, many = pool.map(lambda count, name=name: _counted(valgrind, name, count), counts)
        each = (many[1] - few[1]) / (many[0] - few[0]) / 1000
        yield Figure(f"instructions, {name}", each, "thousand", "")


def _counted(valgrind: str, name: str, count: int) -> tuple[int, int]:
    """Return how often a path ran, and the instructions of the whole process."""
    tool = [valgrind, "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command = [*tool, sys.executable, "-m", "benchmarks.instructions", name, str(count)]
    usual = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=usual)  # noqa: S603 - constants
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-1_000:]}")
    [line] = [each for each in done.stderr.splitlines() if "I   refs" in each or "I refs" in each]
    return int(done.stdout), int(line.rpartition(":")[2].replace(",", ""))


def _run(name: str, count: int) -> int:
    """Run a path, and return how often: of the simulator, how many steps."""
    if name == "a step of the simulator":
        from x402guard.testing.simulator import simulate

        return simulate(range(7000, 7000 + count)).counts.steps
    with session() as payer:
        call = _ways(payer)[name]
        for number in range(count):
            call(number)
    return count


def _ways(payer: Session) -> dict[str, Callable[[int], object]]:
    from benchmarks import tools
    from tests.test_work import ways

    return {
        **ways(payer),
        "charge": lambda n: tools.charge(payer, n),
        "hold + capture": lambda n: tools.hold(payer, n),
        "record_usage": lambda n: tools.usage(payer, n),
    }


if __name__ == "__main__":
    print(_run(sys.argv[1], int(sys.argv[2])))

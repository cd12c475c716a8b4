"""A paid request over a real connection that is kept alive, beside two plain ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.scenes import on_disk, session
from benchmarks.timing import Figure, interleaved
from x402guard import GuardedTransport


def measure() -> Iterator[Figure]:
    """Yield the ratios in memory and on disk, and what a guard adds to a free request."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "benchmarks.server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as server:  # noqa: S603 - our own
        try:
            yield from _measured(f"http://127.0.0.1:{int(server.stdout.readline())}" if server.stdout else "")
        finally:
            server.terminate()


def _measured(url: str) -> Iterator[Figure]:
    with on_disk() as ledger, session() as memory, session(ledger) as disk, httpx.Client() as free:
        in_memory, on_a_disk = (httpx.Client(transport=GuardedTransport(payer)) for payer in (memory, disk))
        found = interleaved(
            {
                "plain": lambda n: (free.get(f"{url}/free?a={n}"), free.get(f"{url}/free?b={n}")),
                "memory": lambda n: in_memory.get(f"{url}/item?n={n}"),
                "disk": lambda n: on_a_disk.get(f"{url}/item?n={n}"),
                "free": lambda n: in_memory.get(f"{url}/free?n={n}"),
                "one": lambda n: free.get(f"{url}/free?n={n}"),
            }
        )
        for made in (in_memory, on_a_disk):
            made.close()
    two = found["plain"].median
    for where, goal in (("memory", "≤ 1.6"), ("disk", "")):
        one = found[where].median
        yield Figure(f"loopback, paid ÷ two plain, {where}", one / two, "×", goal, f"{one:.0f} ÷ {two:.0f} µs")
    added = found["free"].median - found["one"].median
    yield Figure("loopback, pass-through, added", added, "µs", "", f"to {found['one'].median:.0f}")

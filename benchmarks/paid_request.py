"""One paid request beside two plain ones, over a mock transport."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.scenes import SOLD, async_client, client, on_disk, plain, seller, session, unguarded
from benchmarks.timing import Call, Figure, interleaved


def measure() -> Iterator[Figure]:
    """Yield the ratios in memory and on disk, blocking and asynchronous."""
    with on_disk() as url, session() as memory, session(url) as disk, raw_commit() as commit, asyncio.Runner() as loop:
        free, freed = unguarded(plain), httpx.AsyncClient(transport=httpx.MockTransport(plain))
        in_memory, on_a_disk = client(memory, seller), client(disk, seller)
        found = interleaved(
            {
                "plain": lambda n: (free.get(f"{SOLD}?a={n}"), free.get(f"{SOLD}?b={n}")),
                "plain async": _awaited(loop, freed, 2),
                "memory": lambda n: in_memory.get(f"{SOLD}?n={n}"),
                "memory async": _awaited(loop, async_client(memory, seller), 1),
                "disk": lambda n: on_a_disk.get(f"{SOLD}?n={n}"),
                "disk async": _awaited(loop, async_client(disk, seller), 1),
                "commit": lambda _n: commit(),
            }
        )
    for way in ("", " async"):
        two = found[f"plain{way}"]
        for where, goal in (("memory", "≤ 2.5"), ("disk", "≤ 3.5 + one commit")):
            one = found[f"{where}{way}"]
            peer = f"{one.median:.0f} ÷ {two.median:.0f} µs ± {one.noise:.0f}"
            yield Figure(f"paid ÷ two plain, {where}{way}", one.median / two.median, "×", goal, peer)
    yield Figure("one raw FULL commit", found["commit"].median, "µs", "", f"min {found['commit'].least:.0f}")


def _awaited(loop: asyncio.Runner, http: httpx.AsyncClient, count: int) -> Call:
    async def once(number: int) -> None:
        for part in range(count):
            await http.get(f"{SOLD}?n={number}&p={part}")

    return lambda number: loop.run(once(number))


@contextmanager
def raw_commit() -> Iterator[Callable[[], object]]:
    """A block whose value commits one row under ``synchronous=FULL``, on the disk that the ledgers are on."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path(__file__).parent) as folder:
        file = sqlite3.connect(f"{folder}/raw.db", isolation_level=None, check_same_thread=False)
        for sql in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", "CREATE TABLE t (a)"):
            file.execute(sql)
        try:
            yield lambda: file.execute("INSERT INTO t VALUES (1)")
        finally:
            file.close()

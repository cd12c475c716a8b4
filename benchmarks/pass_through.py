"""What a guard adds to a request that asks for no payment and calls no model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx

from benchmarks.scenes import SOLD, async_client, client, plain, session, unguarded
from benchmarks.timing import Figure, interleaved


def measure() -> Iterator[Figure]:
    """Yield the added time, blocking and asynchronous."""
    with session() as payer, asyncio.Runner() as loop:
        free, guarded = unguarded(plain), client(payer, plain)
        freed, guard = httpx.AsyncClient(transport=httpx.MockTransport(plain)), async_client(payer, plain)
        found = interleaved(
            {
                "plain": lambda n: free.get(f"{SOLD}?n={n}"),
                "guarded": lambda n: guarded.get(f"{SOLD}?n={n}"),
                "plain async": lambda n: loop.run(_get(freed, n)),
                "guarded async": lambda n: loop.run(_get(guard, n)),
            },
            rounds=30,
        )
    for way in ("", " async"):
        before, after = found[f"plain{way}"], found[f"guarded{way}"]
        peer = f"{after.least:.0f} − {before.least:.0f} µs"
        yield Figure(f"pass-through{way}, added", after.least - before.least, "µs", "≤ 10", peer)


async def _get(http: httpx.AsyncClient, number: int) -> None:
    await http.get(f"{SOLD}?n={number}")

"""What metering adds to an LLM call, whole and streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import httpx

from benchmarks.scenes import MODEL, async_client, client, prompt, provider, session, streaming, unguarded
from benchmarks.timing import Figure, interleaved

_CHUNKS = 1000


def measure() -> Iterator[Figure]:
    """Yield what is added to a call by the size of its prompt, to a stream's first chunk, and to each chunk."""
    with session() as payer:
        free, metered = unguarded(provider), client(payer, provider)
        calls = {}
        for size in (1_000, 100_000):
            calls[f"plain {size}"] = _post(free, size)
            calls[f"metered {size}"] = _post(metered, size)
        found = interleaved(calls, rounds=10, each=10)
        for size, goal in ((1_000, "≤ 350"), (100_000, "≤ 2,600")):
            before, after = found[f"plain {size}"], found[f"metered {size}"]
            peer = f"{after.least:.0f} − {before.least:.0f} µs"
            yield Figure(f"LLM call, {size // 1000} kB, added", after.least - before.least, "µs", goal, peer)
        turns = interleaved({"plain": _turn(free), "metered": _turn(metered)}, rounds=10, each=10)
        before, after = turns["plain"], turns["metered"]
        peer = f"{after.least:.0f} − {before.least:.0f} µs"
        yield Figure("LLM call, 100 kB sent before, added", after.least - before.least, "µs", "", peer)
        yield from _streams(payer)


def _post(http: httpx.Client, size: int) -> Callable[[int], object]:
    return lambda number: http.post(MODEL, json=prompt(number, size))


def _turn(http: httpx.Client) -> Callable[[int], object]:
    """Send what an agent sends with each further turn: all that was said before, and one short message more."""
    said = prompt(0, 100_000)
    turns = said["messages"]
    return lambda number: http.post(
        MODEL, json={**said, "messages": [*turns, {"role": "user", "content": f"go on {number}"}]}
    )


def _streams(payer: object) -> Iterator[Figure]:
    handler = streaming(_CHUNKS)
    free, metered = unguarded(handler), client(payer, handler)  # type: ignore[arg-type]
    first: dict[str, list[float]] = {"plain": [], "metered": []}
    whole = interleaved(
        {
            "plain": lambda n: first["plain"].append(_pull(free, n)),
            "metered": lambda n: first["metered"].append(_pull(metered, n)),
        },
        rounds=10,
        each=3,
        warm=3,
    )
    added = min(first["metered"]) - min(first["plain"])
    yield Figure("stream, first chunk later by", added, "µs", "≤ 350 and one commit")
    each = (whole["metered"].least - whole["plain"].least - added) / _CHUNKS
    yield Figure("stream, each chunk", each, "µs", "≤ 3")
    with asyncio.Runner() as loop:
        freed, guard = httpx.AsyncClient(transport=httpx.MockTransport(handler)), async_client(payer, handler)  # type: ignore[arg-type]
        found = interleaved(
            {"plain": lambda n: loop.run(_read(freed, n)), "metered": lambda n: loop.run(_read(guard, n))},
            rounds=10,
            each=3,
            warm=3,
        )
    each = (found["metered"].least - found["plain"].least - added) / _CHUNKS
    yield Figure("stream, each chunk async", each, "µs", "≤ 5")


def _pull(http: httpx.Client, number: int) -> float:
    began, first = time.perf_counter_ns(), 0
    with http.stream("POST", MODEL, json=prompt(number, 200, stream=True)) as answer:
        for _ in answer.iter_raw():
            first = first or time.perf_counter_ns()
    return (first - began) / 1000


async def _read(http: httpx.AsyncClient, number: int) -> None:
    async with http.stream("POST", MODEL, json=prompt(number, 200, stream=True)) as answer:
        async for _ in answer.aiter_raw():
            pass

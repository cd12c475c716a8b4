"""Charges, holds, guarded tools and reported usage, beside agentbudget and beside the rows written raw."""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers import Peer
from benchmarks.scenes import on_disk, session
from benchmarks.timing import Clock, Figure, interleaved
from x402guard import Session

_USAGE = {"input_tokens": 200, "output_tokens": 400}


def measure() -> Iterator[Figure]:
    """Yield the times of each way to spend in memory, and of a hold on disk."""
    with session() as payer, Peer("agentbudget_track") as peer:
        clock, ours, theirs = Clock(), [], []
        peer.round(200)
        for _ in range(250):  # the level of risk of each name is worked out once
            clock.time(lambda n: charge(payer, n))
        for _ in range(20):
            ours += [clock.time(lambda n: charge(payer, n)) for _ in range(50)]
            theirs += peer.round(50)
        ratio = statistics.median(ours) / statistics.median(theirs)
        yield Figure("charge, memory", min(ours), "µs", "≤ 40", f"agentbudget {min(theirs):.1f}, {ratio:.0f} ×")

        @payer.tool(cost="$0.000001")
        def guarded(number: int) -> int:
            return number

        found = interleaved(
            {
                "hold": lambda n: hold(payer, n),
                "tool": guarded,
                "usage": lambda n: usage(payer, n),
            }
        )
        for name, goal in (("hold", "≤ 80"), ("tool", "≤ 100"), ("usage", "≤ 120")):
            title = {"hold": "hold + capture", "tool": "@tool", "usage": "record_usage"}[name]
            yield Figure(f"{title}, memory", found[name].least, "µs", goal, f"median {found[name].median:.0f}")
    with on_disk() as url, session(url) as payer:
        found = interleaved({"charge": lambda n: charge(payer, n), "hold": lambda n: hold(payer, n)})
        for name, title in (("charge", "charge, disk"), ("hold", "hold + capture, disk")):
            yield Figure(title, found[name].median, "µs", "", f"min {found[name].least:.0f}")
    yield _beside_raw()


class _Noting(sqlite3.Connection):
    """A connection that notes what it is told to write."""

    noted: ClassVar[list[tuple[Any, ...]]] = []

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if not sql.startswith(("SELECT", "PRAGMA")):
            _Noting.noted.append((sql, *values))
        return super().execute(sql, *values)


def _beside_raw() -> Figure:
    """Return a hold and its capture beside the same statements run again on a copy, without a disk that has to be waited for."""
    memory = Path("/dev/shm")  # noqa: S108 - the files stand in a new folder of it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path, copied = Path(folder) / "ledger.db", Path(folder) / "copy.db"
        made = sqlite3.connect
        sqlite3.connect = partial(made, factory=_Noting)  # type: ignore[assignment]
        try:
            with session(f"sqlite:///{path}") as payer:
                for number in range(200):
                    hold(payer, number)
                with closing(made(path)) as ledger, closing(made(copied)) as copy:
                    ledger.backup(copy)
                with closing(made(copied, isolation_level=None)) as copy:
                    copy.execute("PRAGMA journal_mode = WAL")
                    ours, raw = zip(*(_twice(payer, number, copy) for number in range(1_000)), strict=True)
        finally:
            sqlite3.connect = made
    both = f"{min(ours):.0f} ÷ {min(raw):.0f} µs"
    return Figure("hold + capture, SQLite ÷ its rows written raw", min(ours) / min(raw), "×", "≤ 3", both)


def _twice(payer: Session, number: int, copy: sqlite3.Connection) -> tuple[float, float]:
    """Return the microseconds of a hold, and of what it has written, written again in the same transactions."""
    _Noting.noted.clear()
    began = time.perf_counter_ns()
    hold(payer, 1_000 + number)
    ended = time.perf_counter_ns()
    for statement in _Noting.noted:
        copy.execute(*statement).fetchall()
    return (ended - began) / 1000, (time.perf_counter_ns() - ended) / 1000


def charge(payer: Session, number: int) -> None:
    """Charge for one of 200 tools; its arguments differ, because calls that are the same are a loop."""
    payer.charge(f"tool{number % 200}", "$0.000001", arguments={"n": number})


def hold(payer: Session, number: int) -> None:
    """Hold for one of 200 tools, and capture it."""
    with payer.hold(f"tool{number % 200}", up_to="$0.000001", arguments={"n": number}) as held:
        held.capture("$0.000001")


def usage(payer: Session, number: int) -> None:
    """Record the usage of a call with messages that no call before it had."""
    payer.record_usage("openai", "gpt-4o-mini", _USAGE, messages=[f"{number}"])

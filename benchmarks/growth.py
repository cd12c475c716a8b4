"""A ledger that has grown: opening it, its report, what is unsettled, its bytes, and a ledger in memory."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.scenes import KEY, SOLD, client, on_disk, seller, session
from benchmarks.timing import Figure
from x402guard import Guard, LocalSigner, Session

_ROWS = 60_000
_PAYMENTS = 2_000
_SESSIONS = 3_000


def measure() -> Iterator[Figure]:
    """Yield how the costs and sizes grow. The rows are charges of a budget that is shared, made by the library itself."""
    with on_disk() as url:
        path = Path(url.removeprefix("sqlite:///"))
        with session(url) as payer:
            http = client(payer, seller)
            before = _size(payer, path)
            for number in range(_PAYMENTS):
                http.get(f"{SOLD}?n={number}")
            yield Figure("SQLite bytes for a payment", (_size(payer, path) - before) / _PAYMENTS, "B", "≤ 2,000")
            for number in range((_ROWS - 5 * _PAYMENTS) // 4):
                payer.charge(f"tool{number % 200}", "$0.000001", arguments={"n": number})
            entries, _nodes = payer.shell.store.size()  # type: ignore[attr-defined]
            yield Figure("journal entries", entries, "")
            yield Figure(f"report() at {entries:,} entries", _ms(payer.report), "ms", "≤ 1,000 at 10⁶")
            now_unix = int(time.time())
            yield Figure("unsettled()", _ms(lambda: payer.shell.store.unsettled(now_unix)), "ms", "≤ 10 at 10⁶")
        yield Figure("opening a guard, nothing checked", _ms(lambda: _open(url)), "ms")
        _check_all(url)
        yield Figure("opening a guard", min(_ms(lambda: _open(url)) for _ in range(5)), "ms", "≤ 20 at 10⁶")
    yield from _beside_sessions()
    yield from _in_memory()


def _beside_sessions() -> Iterator[Figure]:
    """Yield how long an opening takes beside many sessions that are over."""
    with on_disk() as url:
        with Guard(signer=LocalSigner.from_key(KEY), ledger=url, background_checks=False) as guard:
            for number in range(_SESSIONS):
                with guard.session(f"s{number}", budget="$0.05") as one:
                    one.charge("tool", "$0.000001")
        _check_all(url)
        opening = min(_ms(lambda: _open(url)) for _ in range(5))
    yield Figure(f"opening a guard, {_SESSIONS:,} sessions over", opening, "ms")


def _check_all(url: str) -> None:
    """Check the whole ledger, as the background of a guard does."""
    with session(url) as payer:
        while not payer.shell.store.check_on():  # type: ignore[attr-defined]
            pass


def _open(url: str) -> None:
    with session(url):
        pass


def _size(payer: Session, path: Path) -> int:
    payer.shell.store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # type: ignore[attr-defined]
    return path.stat().st_size


def _ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def _in_memory() -> Iterator[Figure]:
    with session() as payer:
        http = client(payer, seller)
        for number in range(200):
            http.get(f"{SOLD}?a={number}")
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(_PAYMENTS):
            http.get(f"{SOLD}?n={number}")
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    yield Figure("memory:// for a payment", (after - before) / _PAYMENTS, "B", "≤ 1,000 and bounded")

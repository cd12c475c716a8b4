"""Counts work, not time: what one payment, one call, one charge and one chunk may take. A figure that grows by a tenth fails.

Time depends on the machine; calls, statements, commits, pages and hashes do not. A figure that has fallen is written
down here, so that it cannot grow again unseen.
"""

import gc
import importlib
import os
import sqlite3
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.__main__ import ROWS as ROWS_OF_THE_TABLE
from benchmarks.scenes import MODEL, SOLD, client, plain, prompt, provider, seller, session, streaming
from tests.support.structure import PACKAGE
from x402guard.flow import short_way
from x402guard.kernel import rows as model
from x402guard.ledger import view
from x402guard.stores import sqlite
from x402guard.testing.both_ways import ONE_WAY


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    """Other tests decide each ordinary step both ways."""
    monkeypatch.setattr(short_way, "decide", ONE_WAY)


CHUNKS = 500
OURS = f"{PACKAGE}{os.sep}"

CALLS = {
    "pass-through": 74, "paid request": 1130, "LLM call": 1074, "chunk": 14, "charge": 273, "hold + capture": 458, "record_usage": 399,
}  # fmt: skip
"""Calls of Python functions of this library, in memory, on Python 3.11; later ones inline some of them."""

ROWS = {
    "paid request": {"statements": 24, "full": 1, "commits": 2, "pages": 21, "hashes": 6},
    "LLM call": {"statements": 22, "full": 1, "commits": 2, "pages": 21, "hashes": 7},
    "charge": {"statements": 10, "full": 1, "commits": 1, "pages": 8, "hashes": 4},
}
"""What one of them takes of an SQLite ledger: statements, commits (those that are synced, and all), pages, and hashes."""


def ways(payer):
    """Each path, as a function of a number that no call before it had."""
    free, paid, metered = client(payer, plain), client(payer, seller), client(payer, provider)
    streamed = client(payer, streaming(CHUNKS))

    def stream(number):
        with streamed.stream("POST", MODEL, json=prompt(number, 200, stream=True)) as answer:
            for _ in answer.iter_raw():
                pass

    def hold(number):
        with payer.hold(f"tool{number % 7}", up_to="$0.000001") as held:
            held.capture("$0.000001")

    usage = {"input_tokens": 200, "output_tokens": 400}
    return {
        "pass-through": lambda n: free.get(f"{SOLD}?n={n}"),
        "paid request": lambda n: paid.get(f"{SOLD}?n={n}"),
        "LLM call": lambda n: metered.post(MODEL, json=prompt(n, 1_000)),
        "stream": stream,
        "charge": lambda n: payer.charge(f"tool{n % 7}", "$0.000001"),
        "hold + capture": hold,
        "record_usage": lambda n: payer.record_usage("openai", "gpt-4o-mini", {**usage, "input_tokens": 200 + n}),
    }


def calls_of(call, number):
    """How often functions of this library are called."""
    count = 0

    def seen(frame, event, _argument):
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            count += 1

    gc.disable()
    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        call(number)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on, Python inlines comprehensions")
def test_no_path_makes_more_calls_than_it_did():
    with session() as payer:
        found = {}
        for name, call in ways(payer).items():
            for number in range(20):
                call(number)
            found[name] = calls_of(call, 100)
        found["chunk"] = (found.pop("stream") - found["LLM call"]) / CHUNKS
    grown = {name: (count, CALLS[name]) for name, count in found.items() if count > 1.1 * CALLS[name]}
    fallen = {name: (count, CALLS[name]) for name, count in found.items() if count < 0.9 * CALLS[name]}
    assert not grown, f"(found, allowed): {grown}"
    assert not fallen, f"(found, written down): {fallen}; write the new figures down"


class Counting(sqlite3.Connection):
    """A connection that counts what is asked of it."""

    counts: dict

    def execute(self, sql, *values):
        if sql == "COMMIT":
            [level] = super().execute("PRAGMA synchronous").fetchone()
            Counting.counts["commits"] += 1
            Counting.counts["full"] += level == 2
        Counting.counts["statements"] += 1
        return super().execute(sql, *values)


def test_no_path_asks_more_of_the_database_than_it_did(tmp_path, monkeypatch):
    made = sqlite3.connect
    monkeypatch.setattr(sqlite.sqlite3, "connect", lambda *args, **more: made(*args, factory=Counting, **more))
    hashes, hashed = 0, model.entry_hash

    def counted(covered):
        nonlocal hashes
        hashes += 1
        return hashed(covered)

    monkeypatch.setattr(view, "entry_hash", counted)
    Counting.counts = dict.fromkeys(("statements", "commits", "full"), 0)
    log = tmp_path / "ledger.db-wal"
    found = {}
    with session(f"sqlite:///{tmp_path / 'ledger.db'}") as payer:
        for name, call in ways(payer).items():
            if name not in ROWS:
                continue
            for number in range(5):
                call(number)
            payer.shell.store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            Counting.counts, hashes = dict.fromkeys(("statements", "commits", "full"), 0), 0
            call(100)
            found[name] = {**Counting.counts, "hashes": hashes, "pages": (log.stat().st_size - 32) // 4120}
    for name, figures in found.items():
        for what, count in figures.items():
            stated = ROWS[name][what]
            assert count <= 1.1 * stated, f"{name}: {count} {what}, {stated} before"
            assert count >= 0.85 * stated, f"{name}: {count} {what} for {stated} before; write the new figure down"


def test_every_row_of_the_benchmark_is_listed_and_can_be_imported():
    files = {path.stem for path in Path(benchmarks.__file__).parent.glob("*.py")}
    assert files == {*ROWS_OF_THE_TABLE, "__init__", "__main__", "scenes", "server", "timing"}
    assert all(callable(importlib.import_module(f"benchmarks.{row}").measure) for row in ROWS_OF_THE_TABLE)

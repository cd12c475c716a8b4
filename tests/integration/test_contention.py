"""Threads, tasks and processes at one ledger: what is allowed is exact, and nobody starves."""

import json
import signal
import threading
import time
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import anyio
import pytest

from tests.support import processes
from tests.support.merchant import Shop, async_client, make_guard
from x402guard import BudgetExhausted, LedgerUnavailable, Policy
from x402guard.ledger.view import Scope
from x402guard.stores import open_store

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("contention")
QUIET = Policy(loop=None, breaker=None)

WORST_WAIT_S, LEAST_SHARE = 0.25, 0.5
ROUNDS = 3
TURNS = (50, 150, 450)


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"


@pytest.fixture(params=["memory", "sqlite"])
def url(request, sqlite_url):
    return "memory://" if request.param == "memory" else sqlite_url


def is_fair(served, waits):
    """No waiter starves: the least served has half of what the most served has, and none waits for long."""
    return min(served) >= LEAST_SHARE * max(served) and max(waits) <= WORST_WAIT_S


def fair_round(measure, rounds=ROUNDS):
    """Return the first fair one of so many rounds, or the last.

    A busy machine or disk stops a process for a quarter of a second all by itself; a lock that starves a waiter does it every time.
    """
    for _ in range(rounds):
        served, waits = measure()
        if is_fair(served, waits):
            break
    return served, waits


@contextmanager
def contender(*args):
    with processes.start("tests.support.charging_fleet", *args, module=True) as process:
        yield process


def fleet(url, processes, *, seconds, calls=10**9):
    with contender("fleet", url, processes, seconds, calls) as process:
        return json.loads(process.communicate(timeout=90)[0])


def rush(count, work):
    """Let so many threads go at once; whatever any of them raises is raised here."""
    barrier, failed = threading.Barrier(count), []

    def run(number):
        try:
            barrier.wait(30)
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []


def test_64_threads_are_allowed_exactly_what_fits(url):
    allowed, refused = [], []
    with make_guard(url, policy=QUIET) as guard, guard.session("fleet", budget="$3.00") as session:

        def work(number):
            for _ in range(10):
                try:
                    session.charge("serp", "$0.01")
                    allowed.append(number)
                except BudgetExhausted:
                    refused.append(number)

        rush(64, work)
        assert (len(allowed), len(refused)) == (300, 340)
        assert (session.spent, session.held, session.remaining) == (Decimal(3), 0, 0)


def test_64_threads_are_served_alike(url):
    """The longer the more alike, as each waits for its turn; of those that a lock starves the share gets no better."""

    def served(turns):
        counts = [0] * 64
        with make_guard(url, policy=QUIET) as guard, guard.session("fleet", budget="$1000") as session:

            def work(number):
                while sum(counts) < 64 * turns:  # counted, not timed: as many where the machine is busy
                    session.charge("serp", "$0.0001")
                    counts[number] += 1

            rush(64, work)
        return sorted(counts)

    counts = next((each for each in map(served, TURNS) if each[0] >= LEAST_SHARE * each[-1]), None)
    assert counts, f"none of {TURNS} turns each was enough"


@pytest.mark.long
def test_64_threads_are_served_alike_within_three_seconds(url):
    def measure():
        counts = [0] * 64
        with make_guard(url, policy=QUIET) as guard, guard.session("fleet", budget="$1000") as session:
            until = time.monotonic() + 3

            def work(number):
                while time.monotonic() < until:
                    session.charge("serp", "$0.0001")
                    counts[number] += 1

            rush(64, work)
        return counts, [0.0]

    served, _ = fair_round(measure, rounds=10)  # by time and not by turns: other workers take a share of it
    assert min(served) >= LEAST_SHARE * max(served), sorted(served)


@pytest.mark.parametrize("count", [500, pytest.param(2_000, marks=[pytest.mark.long, pytest.mark.large])])
@pytest.mark.parametrize(("where", "backend"), [("memory", "asyncio"), ("sqlite", "asyncio"), ("sqlite", "trio")])
def test_as_many_tasks_are_allowed_as_fit(where, backend, count, sqlite_url):
    shop, refused, fits = Shop(), [], count // 20

    async def main(session):
        async with async_client(session, shop) as http, anyio.create_task_group() as tasks:

            async def buy(number):
                try:
                    await http.get(f"https://courts.example/{number}")
                except BudgetExhausted:
                    refused.append(number)

            for number in range(count):
                tasks.start_soon(buy, number)

    ledger = "memory://" if where == "memory" else sqlite_url
    with make_guard(ledger, policy=QUIET) as guard, guard.session("fleet", budget=Decimal(fits) / 100) as session:
        anyio.run(main, session, backend=backend)
        assert (session.spent, session.held, session.remaining) == (Decimal(fits) / 100, 0, 0)
    assert (len(shop.nonces), len(shop.payments), len(refused)) == (fits, fits, count - fits)
    assert shop.signed == fits * 10_000  # overshoot $0.00


def test_8_processes_are_allowed_exactly_what_fits(sqlite_url):
    with make_guard(sqlite_url) as guard, guard.session("fleet", budget="$0.0250", id="fleet") as session:
        done = fleet(sqlite_url, 8, seconds=60, calls=60)
        assert sum(each["served"] for each in done) == 250
        assert sum(each["refused"] for each in done) == 8 * 60 - 250
        assert (session.spent, session.held, session.remaining) == (Decimal("0.025"), 0, 0)


@pytest.mark.parametrize(("seconds", "rounds"), [(3, 5), pytest.param(10, ROUNDS, marks=pytest.mark.long)])
def test_8_processes_are_served_alike_and_none_waits_for_long(sqlite_url, seconds, rounds):
    with make_guard(sqlite_url) as guard, guard.session("fleet", budget="$1000", id="fleet") as session:

        def measure():
            done = fleet(sqlite_url, 8, seconds=seconds)
            assert sum(each["refused"] for each in done) == 0
            sums.append(sum(each["served"] for each in done))
            return [each["served"] for each in done], [each["worst_s"] for each in done]

        sums = []
        served, waits = fair_round(measure, rounds)
        assert session.spent == Decimal("0.0001") * sum(sums)
    assert min(served) >= LEAST_SHARE * max(served), served
    assert max(waits) <= WORST_WAIT_S, waits


@pytest.fixture
def stopped(sqlite_url, monkeypatch):
    """A store, and a process that has stopped with the turn to write in its hands."""
    monkeypatch.setattr("x402guard.stores.group_commit.GroupCommit._busy_s", 0.4)
    store = open_store(sqlite_url)
    with contender("stop", sqlite_url) as process:
        assert process.stdout.readline() == "in\n"
        yield store, process
    store.close()


def note(store, name="mine"):
    return store.transact(Scope(marks=(("test", name),)), lambda view: view.put_mark(("test", name), {"was": True}))


def marks(store):
    return set(store.marks("test", ""))


def test_a_process_that_is_stopped_with_the_turn_hangs_nobody_beyond_the_bound(stopped):
    store, process = stopped
    took = []

    def wait(_):
        began = time.monotonic()
        with pytest.raises(LedgerUnavailable, match="has been writing the ledger"):
            note(store)
        took.append(time.monotonic() - began)

    wait(0)
    rush(8, wait)
    assert len(took) == 9
    assert min(took) > 0.3
    assert max(took) < 0.4 * 2 + 2  # in line, then among the processes; and some for a busy machine
    assert marks(store) == set(), "reading goes on"
    process.send_signal(signal.SIGCONT)
    assert process.stdout.readline() == "out\n"
    note(store)
    assert marks(store) == {"mine", "stopped"}


def test_the_turn_of_a_process_that_is_killed_is_free_at_once(stopped):
    store, process = stopped

    killer = threading.Timer(0.1, process.kill)  # while somebody waits for it
    killer.start()
    note(store)  # within the bound, or it raises
    killer.join()
    assert marks(store) == {"mine"}, "what was not committed is not there"

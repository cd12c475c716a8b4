"""Awaited changes that wait together: one transaction, one wake-up of each loop, and each its own outcome."""

import asyncio
import threading

import pytest

from x402guard.errors import LedgerUnavailable
from x402guard.flow.change_queue import MOST_AT_ONCE, change_in_queue
from x402guard.ledger.view import Scope
from x402guard.stores import open_store


def put(n):
    def change(view):
        view.put_mark(("count", str(n)), {"n": n})
        return n

    return change


def fails(view):
    view.put_mark(("count", "never"), {"n": 0})
    raise ValueError("the change")


class Blocked:
    """Occupies the thread of a ledger until the block ends."""

    def __init__(self, store):
        self._store, self._inside, self._go = store, threading.Event(), threading.Event()

    async def __aenter__(self):
        self.task = asyncio.create_task(asked(self._store, self._wait))
        await asyncio.to_thread(self._inside.wait, 10)
        return self

    def _wait(self, view):
        self._inside.set()
        assert self._go.wait(10)

    async def __aexit__(self, *_):
        self._go.set()
        await self.task


def asked(store, change, scope=None, late=lambda _: None):
    return change_in_queue(store, scope or Scope(), change, late, may_drop=True)


def scope_of(n):
    return Scope(marks=(("count", str(n)),))


@pytest.fixture
def store(tmp_path):
    found = open_store(f"sqlite:///{tmp_path / 'l.db'}")
    yield found
    found.close()


def commits(store):
    """The number of commits that a ledger's file has seen."""
    seen = []
    store._writer.set_trace_callback(lambda sql: seen.append(sql) if sql == "COMMIT" else None)
    return seen


def test_all_that_wait_share_a_transaction(store):
    seen, many = commits(store), 3 * MOST_AT_ONCE

    async def main():
        async with Blocked(store):
            tasks = [asyncio.create_task(asked(store, put(n), scope_of(n))) for n in range(many)]
            await asyncio.sleep(0.05)
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [*range(many)]
    assert len(store.marks("count", "")) == many
    assert len(seen) <= 3 + 1


def test_a_change_that_fails_fails_alone(store):
    async def main():
        async with Blocked(store):
            tasks = [asyncio.create_task(asked(store, fails if n == 5 else put(n), scope_of(n))) for n in range(10)]
            await asyncio.sleep(0.05)
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(main())
    assert [str(each) for each in found] == [str(n) if n != 5 else "the change" for n in range(10)]
    assert {*store.marks("count", "")} == {str(n) for n in range(10) if n != 5}


def test_a_ledger_that_cannot_be_written_fails_each_with_an_error_of_its_own(store):
    async def main():
        async with Blocked(store):
            tasks = [asyncio.create_task(asked(store, put(n), scope_of(n))) for n in range(4)]
            await asyncio.sleep(0.05)
            store._check_place = lambda: (_ for _ in ()).throw(LedgerUnavailable("the disk is away"))
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(main())
    assert [str(each).partition(";")[0] for each in found] == ["the disk is away"] * 4
    assert len({id(each) for each in found}) == 4
    del store._check_place
    assert store.marks("count", "") == {}


def test_a_closed_ledger_says_so(store):
    store.close()
    with pytest.raises(LedgerUnavailable, match="has been closed"):
        asyncio.run(asked(store, put(1), scope_of(1)))


def test_a_task_that_is_cancelled_before_its_change_is_begun_writes_nothing(store):
    async def main():
        async with Blocked(store):
            task = asyncio.create_task(asked(store, put(1), scope_of(1)))
            other = asyncio.create_task(asked(store, put(2), scope_of(2)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await other

    assert asyncio.run(main()) == 2
    assert {*store.marks("count", "")} == {"2"}


def test_a_task_that_is_cancelled_after_it_hands_its_result_on(store):
    inside, go, late = threading.Event(), threading.Event(), []

    def slow(view):
        inside.set()
        assert go.wait(10)
        return put(1)(view)

    async def main():
        task = asyncio.create_task(asked(store, slow, scope_of(1), late.append))
        await asyncio.to_thread(inside.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (late, {*store.marks("count", "")}) == ([1], {"1"})


def test_two_loops_share_the_thread(store):
    found = []

    def loop(n):
        async def main():
            return await asyncio.gather(*(asked(store, put(100 * n + k), scope_of(100 * n + k)) for k in range(20)))

        found.append(asyncio.run(main()))

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert sorted(found) == [[100 * n + k for k in range(20)] for n in range(4)]
    assert len(store.marks("count", "")) == 80


def test_a_blocking_change_in_between_has_its_turn(store):
    async def main():
        tasks = [asyncio.create_task(asked(store, put(n), scope_of(n))) for n in range(50)]
        blocking = asyncio.to_thread(store.transact, scope_of(99), put(99))
        return await asyncio.gather(blocking, *tasks)

    assert asyncio.run(main()) == [99, *range(50)]


def test_on_trio():
    trio = pytest.importorskip("trio")
    store = open_store("memory://")

    async def main():
        return await asked(store, put(1), scope_of(1))

    assert trio.run(main) == 1


@pytest.mark.parametrize("many", [1, 5])
def test_a_change_into_a_file_that_is_gone_is_not_told_as_written(tmp_path, many):
    path = tmp_path / "l.db"
    store = open_store(f"sqlite:///{path}")

    async def main():
        await asked(store, put(99), scope_of(99))
        for each in ("", "-wal", "-shm"):
            (tmp_path / f"l.db{each}").unlink()
        return await asyncio.gather(*(asked(store, put(n), scope_of(n)) for n in range(many)), return_exceptions=True)

    assert [type(each) for each in asyncio.run(main())] == [LedgerUnavailable] * many

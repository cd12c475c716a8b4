"""Places: first come, first served, for threads and tasks of any loop; none is ever lost, none given twice."""

import asyncio
import gc
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from x402guard.flow.bulkheads import Slots, around, carry_around

LONG_S = 20
LOOPS = ["asyncio", "trio"]
every_loop = pytest.mark.parametrize("loop", LOOPS)


def until(true, seconds=10):
    """Wait until something holds, at most so long."""
    ends_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends_s, "it never came to that"
        time.sleep(0.002)


def waiting(places, where="host a"):
    return len(places._lines.get(where, ()))


def is_free(places):
    return (places._taken, places._lines) == ({}, {})


class Queue:
    """Threads and loops that wait in one line, and note when it is their turn."""

    def __init__(self, places, most=1):
        self.places, self.most, self.turns, self.threads = places, most, [], []

    def stand(self, name, kind):
        before = waiting(self.places)
        target = self._block if kind == "thread" else self._await
        thread = threading.Thread(target=target, args=(name, kind), daemon=True)
        thread.start()
        self.threads.append(thread)
        until(lambda: waiting(self.places) == before + 1)

    def _block(self, name, _kind):
        place = self.places.enter("host a", self.most, LONG_S)
        self.turns.append(name)
        place.leave()

    def _await(self, name, kind):
        async def go():
            place = await self.places.enter_async("host a", self.most, LONG_S)
            self.turns.append(name)
            place.leave()

        anyio.run(go, backend=kind)

    def end(self):
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("order", [["thread", "asyncio", "trio"] * 3, ["trio", "trio", "thread", "asyncio"] * 2])
def test_threads_and_tasks_of_any_loop_stand_in_one_line(order):
    places = Slots()
    first = places.enter("host a", 1, 0)
    queue = Queue(places)
    for number, kind in enumerate(order):
        queue.stand(number, kind)
    assert queue.turns == []
    first.leave()
    queue.end()
    assert queue.turns == list(range(len(order)))
    assert is_free(places)


def test_so_many_are_let_in_at_once_and_none_of_another_place_waits():
    places = Slots()
    taken = [places.enter("host a", 3, 0) for _ in range(3)]
    assert places.enter("host a", 3, 0.01) is None
    assert places.enter("host b", 3, 0) is not None
    taken.pop().leave()
    assert places.enter("host a", 3, 0.01) is not None


def test_leaving_twice_gives_one_place():
    places = Slots()
    first, _second = (places.enter("host a", 2, 0) for _ in range(2))
    first.leave()
    first.leave()
    kept = places.enter("host a", 2, 0)
    assert kept is not None
    assert places.enter("host a", 2, 0.01) is None


def test_nobody_who_comes_later_goes_before_those_in_line():
    places = Slots()
    first = places.enter("host a", 1, 0)
    queue = Queue(places)
    queue.stand("in line", "thread")
    first.leave()
    late = places.enter("host a", 1, 5)
    assert queue.turns == ["in line"]
    late.leave()
    queue.end()


def test_a_wait_of_no_time_and_a_wait_that_is_over_stand_in_line_no_more():
    places = Slots()
    first = places.enter("host a", 1, 0)
    for wait_s in (0, 0.01):
        assert places.enter("host a", 1, wait_s) is None
    assert waiting(places) == 0
    first.leave()
    assert is_free(places)


@every_loop
def test_a_task_whose_wait_is_over_stands_in_line_no_more(loop):
    places = Slots()
    first = places.enter("host a", 1, 0)
    assert anyio.run(places.enter_async, "host a", 1, 0.01, backend=loop) is None
    first.leave()
    assert is_free(places)


@every_loop
def test_a_task_that_is_cancelled_while_it_waits_keeps_nothing(loop):
    places = Slots()
    first = places.enter("host a", 1, 0)

    async def go():
        async with anyio.create_task_group() as group:
            group.start_soon(places.enter_async, "host a", 1, LONG_S)
            await anyio.wait_all_tasks_blocked()
            assert waiting(places) == 1
            group.cancel_scope.cancel()

    anyio.run(go, backend=loop)
    assert waiting(places) == 0
    first.leave()
    assert is_free(places)


@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_place_that_is_given_to_a_task_just_cancelled_goes_to_the_next(leaves_first):
    places = Slots()

    async def go():
        first = places.enter("host a", 1, 0)
        waits = asyncio.create_task(places.enter_async("host a", 1, LONG_S))
        following = asyncio.create_task(places.enter_async("host a", 1, LONG_S))
        await asyncio.sleep(0.01)
        for act in (first.leave, waits.cancel) if leaves_first else (waits.cancel, first.leave):
            act()
        got = await asyncio.wait_for(following, 5)
        assert got is not None
        assert (await asyncio.gather(waits, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        got.leave()

    asyncio.run(go())
    assert is_free(places)


def test_a_loop_that_is_closed_over_those_who_wait_keeps_no_place():
    places = Slots()
    first = places.enter("host a", 1, 0)

    async def go():
        task = asyncio.create_task(places.enter_async("host a", 1, LONG_S))
        await asyncio.sleep(0.01)
        return task

    asyncio.run(go())
    first.leave()
    assert places.enter("host a", 1, 0.01) is not None


def test_a_coroutine_that_is_thrown_away_keeps_no_place():
    places = Slots()
    first = places.enter("host a", 1, 0)
    loop = asyncio.new_event_loop()
    try:

        async def go():
            held.append(places.enter_async("host a", 1, LONG_S))
            await held[0]

        held = []
        task = loop.create_task(go())
        loop.run_until_complete(asyncio.sleep(0.01))
        assert waiting(places) == 1
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    finally:
        loop.close()
    first.leave()
    assert is_free(places)


def test_ctrl_c_while_waiting_keeps_nothing():
    places = Slots()
    first = places.enter("host a", 1, 0)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        places.enter("host a", 1, LONG_S)
    timer.join()
    assert waiting(places) == 0
    first.leave()
    assert is_free(places)


def test_a_place_that_nobody_holds_any_more_is_free_and_wakes_who_waits():
    places = Slots()
    kept = [places.enter("host a", 1, 0)]
    kept.append(kept)  # only the collector finds it
    queue = Queue(places)
    queue.stand("next", "thread")
    del kept
    gc.collect()
    queue.end()
    assert queue.turns == ["next"]
    assert is_free(places)


def _drop_a_cycle(places, where):
    cycle = [places.enter(where, 2, 0)]
    cycle.append(cycle)


def test_the_collector_may_come_at_any_moment_and_no_place_is_lost_or_given_twice():
    """It may leave a place in the middle of giving another one."""
    places, before = Slots(), gc.get_threshold()
    gc.collect()
    gc.freeze()  # what stands already is not looked at again and again
    try:
        for turn in range(3_000):
            gc.disable()
            _drop_a_cycle(places, "host a")
            kept = places.enter("host a", 2, 0)
            gc.set_threshold(1 + turn % 40, 1, 1)
            gc.enable()
            second = places.enter("host a", 2, 0)  # the dropped one's, or after it
            gc.set_threshold(*before)
            gc.collect()
            second = second or places.enter("host a", 2, 0)
            assert second is not None, f"a place was lost in turn {turn}"
            assert places._taken == {"host a": 2}, f"in turn {turn}"
            kept.leave()
            second.leave()
            assert is_free(places), f"in turn {turn}"
    finally:
        gc.set_threshold(*before)
        gc.enable()


@given(st.integers(1, 3), st.lists(st.sampled_from(["enter", "leave", "twice", "drop"]), max_size=60))
@settings(max_examples=examples(200))
def test_there_are_never_more_than_so_many_and_never_fewer(most, verbs):
    places, taken = Slots(), []
    for verb in verbs:
        if verb == "enter":
            place = places.enter("host a", most, 0)
            assert (place is None) is (len(taken) == most)
            if place is not None:
                taken.append(place)
            del place
        elif taken and verb == "drop":
            taken.pop(0)
        elif taken:
            left = taken.pop()
            for _ in range(1 if verb == "leave" else 2):
                left.leave()
    places._collect()
    assert places._taken.get("host a", 0) == len(taken)


def _crowd_of_threads(places, most, seen, stop):
    rolls = random.Random(threading.get_ident())
    for _ in range(150):
        place = places.enter("host a", most, rolls.choice([0, 0.001, 5]))
        if place is not None:
            seen.append(places._taken["host a"])
            if rolls.random() < 0.2:
                time.sleep(0.0005)
            place.leave()
        if stop.is_set():
            return


async def _crowd_of_tasks(places, most, seen):
    rolls = random.Random(7)

    async def one():
        for _ in range(20):
            with anyio.move_on_after(rolls.choice([0.0001, 0.001, 5])):
                place = await places.enter_async("host a", most, 5)
                if place is not None:
                    seen.append(places._taken["host a"])
                    try:
                        await anyio.sleep(rolls.choice([0, 0.0005]))
                    finally:
                        place.leave()

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(one)


def test_in_a_crowd_of_threads_and_cancelled_tasks_no_place_is_lost_or_given_twice():
    places, seen, stop, failed = Slots(), [], threading.Event(), []

    def guarded(target, *args):
        try:
            target(*args)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(_crowd_of_threads, places, 3, seen, stop)) for _ in range(6)]
    threads += [
        threading.Thread(target=guarded, args=(lambda loop: anyio.run(_crowd_of_tasks, places, 3, seen, backend=loop), loop))
        for loop in LOOPS
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []
    assert max(seen) == 3
    gc.collect()
    assert is_free(places)


class Nested:
    """Calls inside calls at a few places, in threads or tasks, and how many of each place do more than wait."""

    MOST = {"host a": 1, "host b": 2, "tool c": 3}

    def __init__(self, *names):
        self.places, self.names, self.lock = Slots(), names or list(self.MOST), threading.Lock()
        self.busy, self.over, self.refused, self.kept = dict.fromkeys(self.MOST, 0), [], [], []

    def note(self, where, change):
        if where is not None:
            with self.lock:
                self.busy[where] += change
                if self.busy[where] > self.MOST[where]:
                    self.over.append((where, self.busy[where]))

    def taken(self, where, slot):
        if slot is None:
            self.refused.append(where)
        else:
            self.kept.append(slot)

    def call(self, rolls, depth, outer=None):
        where = rolls.choice(self.names)
        self.note(outer, -1)
        slot = self.places.enter(where, self.MOST[where], LONG_S)
        self.taken(where, slot)
        self.note(where, 1)
        with around(slot):
            time.sleep(rolls.choice([0, 0.0005]))
            for _ in range(rolls.randrange(depth + 1)):
                self.call(rolls, depth - 1, where)
        self.note(where, -1)
        slot.leave()
        self.note(outer, 1)

    async def acall(self, rolls, depth, outer=None):
        where = rolls.choice(self.names)
        self.note(outer, -1)
        slot = await self.places.enter_async(where, self.MOST[where], LONG_S)
        self.taken(where, slot)
        self.note(where, 1)
        with around(slot):
            await anyio.sleep(rolls.choice([0, 0.0005]))
            for _ in range(rolls.randrange(depth + 1)):
                if rolls.random() < 0.2:
                    with anyio.move_on_after(rolls.choice([0, 0.001])):  # one that is cancelled wherever it waits
                        await self.places.enter_async(where, self.MOST[where], LONG_S)
                await self.acall(rolls, depth - 1, where)
        self.note(where, -1)
        slot.leave()
        self.note(outer, 1)

    def ended(self):
        gc.collect()
        self.places._collect()
        assert is_free(self.places)
        assert self.places._extra == {}
        assert [(slot.waits, slot.waits_for) for slot in self.kept if slot.waits or slot.waits_for] == []
        assert self.refused == []


@pytest.mark.parametrize(
    "names", [["host a"], ["host b"], ["tool c"], []], ids=["one", "two", "three", "several places"]
)
@pytest.mark.parametrize("seed", range(3))
def test_calls_inside_calls_never_stop_each_other_and_no_more_than_the_number_work(seed, names):
    """At one place. At several, one that waited works again when what it waited for is over, beside what was let in."""
    nested = Nested(*names)
    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(nested.call, random.Random(f"{seed} {n}"), 3) for n in range(24)]:
            each.result(60)
    nested.ended()
    assert nested.over == [] or not names


@pytest.mark.parametrize("seed", range(6))
@every_loop
def test_tasks_inside_tasks_never_stop_each_other_and_cancelled_ones_keep_nothing(seed, loop):
    nested = Nested()

    async def go():
        async with anyio.create_task_group() as group:
            for n in range(24):
                group.start_soon(nested.acall, random.Random(f"{seed} {n}"), 3)

    anyio.run(go, backend=loop)
    nested.ended()


def test_a_call_that_is_carried_into_a_thread_counts_once():
    places = Slots()
    outer = places.enter("tool a", 1, 0)
    with around(outer):
        carry_around(lambda: places.enter("tool a", 1, 0))().leave()
        assert (outer.waits, outer.waits_for) == (0, [])
    outer.leave()
    assert is_free(places)


def test_a_slot_above_the_number_that_is_forgotten_lets_its_outer_call_work_again():
    places = Slots()
    outer = places.enter("tool a", 1, 0)
    with around(outer):
        inner = places.enter("tool a", 1, 0)
        assert (outer.waits, places._extra) == (1, {"tool a": 1})
        del inner
        gc.collect()
        places._collect()
    assert (outer.waits, places._extra, places._taken) == (0, {}, {"tool a": 1})
    outer.leave()
    assert is_free(places)


def test_a_generator_that_the_collector_closes_inside_the_lock_waits_for_nothing():
    """What leaves a slot may be the end of a generator in a cycle: the collector comes in the middle of any allocation."""
    places, before, inside = Slots(), gc.get_threshold(), []
    gc.callbacks.append(lambda phase, _info: inside.append(phase) if places._lock.locked() else None)

    def reads(slot):
        try:
            yield 1
        finally:
            slot.leave()

    try:
        for turn in range(300):
            gc.disable()
            answer = [reads(places.enter("host a", 2, 0))]
            next(answer[0])
            answer.append(answer)
            del answer
            gc.set_threshold(1 + turn % 30, 1, 1)
            gc.enable()
            kept = places.enter("host b", 1, 0)
            kept.leave()
            gc.set_threshold(*before)
            gc.collect()
            assert is_free(places), f"in turn {turn}"
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*before)
        gc.enable()
    assert inside, "it never came inside"

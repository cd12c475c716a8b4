"""The two turns to write: a line among threads, and lock files among processes. Nobody is passed over, nothing waits for ever."""

import fcntl
import os
import signal
import sys
import threading
import time
from collections import deque

import pytest

from x402guard import LedgerUnavailable
from x402guard.ledger.view import Scope
from x402guard.stores import file_lock as file_turn
from x402guard.stores import group_commit, open_store, sqlite
from x402guard.stores import group_commit as line
from x402guard.stores.file_lock import FileTurn
from x402guard.stores.group_commit import Line

WAIT_S = 10


class InLine:
    """A thread that joins a line, says whether it got the turn, and leaves when it is told to."""

    def __init__(self, made, timeout_s=60):
        self.got, self.go_on, self.answered = None, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(made, timeout_s), daemon=True)
        self.thread.start()

    def _run(self, made, timeout_s):
        self.got = made.join(timeout_s)
        self.answered.set()
        self.go_on.wait(WAIT_S)
        made.leave()

    def end(self):
        self.go_on.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def until(true):
    """Wait for something that another thread does; fail where it does not."""
    give_up = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def queued(made, count, **more):
    """Put so many threads in line, one after the other."""
    threads = []
    for _ in range(count):
        before = len(made._line)
        threads.append(InLine(made, **more))
        until(lambda seen=before: len(made._line) > seen)
    return threads


def test_the_turn_goes_round_in_the_order_of_arrival():
    made = Line()
    assert made.join(0)
    threads = queued(made, 12)
    assert not any(each.answered.is_set() for each in threads)
    made.leave()
    for number, each in enumerate(threads):
        assert each.answered.wait(WAIT_S)
        assert each.got is True
        assert not any(later.answered.is_set() for later in threads[number + 1 :])
        each.end()
    assert made.join(0)


def test_whoever_gives_up_is_passed_over_and_the_next_still_comes():
    made = Line()
    assert made.join(0)
    [hasty] = queued(made, 1, timeout_s=0.05)
    [patient] = queued(made, 1)
    assert hasty.answered.wait(WAIT_S)
    assert hasty.got is False
    hasty.end()
    assert not patient.answered.is_set()
    made.leave()
    assert patient.answered.wait(WAIT_S)
    assert patient.got is True
    patient.end()


def test_a_wait_for_the_turn_ends_when_it_was_told_to():
    made = Line()
    assert made.join(0)
    began = time.monotonic()
    [late] = queued(made, 1, timeout_s=0.3)
    assert late.answered.wait(WAIT_S)
    assert 0.25 < time.monotonic() - began < 3
    assert late.got is False
    late.end()
    assert made.is_mine


def test_a_thread_stands_in_line_once_and_leaves_as_often_as_it_likes():
    made = Line()
    made.leave()
    assert not made.is_mine
    assert made.join(0)
    with pytest.raises(RuntimeError, match="already in the queue"):
        made.join(0)
    assert made.is_mine
    made.leave()
    made.leave()
    assert not made.is_mine
    assert (list(made._line), made._wake) == ([], {})


def test_the_next_is_woken_and_does_not_wait_for_its_look(monkeypatch):
    monkeypatch.setattr(line, "_LOOK_S", 60.0)
    made = Line()
    assert made.join(0)
    threads = queued(made, 3)
    made.leave()
    for each in threads:
        assert each.answered.wait(WAIT_S)
        each.end()


def test_a_thread_that_nobody_woke_looks_for_itself():
    """Ctrl-C between leaving and waking: the next one finds out a moment later."""
    made = Line()
    assert made.join(0)
    [waiting] = queued(made, 1)
    made._line.popleft()
    assert waiting.answered.wait(WAIT_S)
    assert waiting.got is True
    waiting.end()


LINES = ("call", "line")
CALLS = ("call",)
"""Where the interpreter really looks for signals: a function's first instruction."""


def steps_of(call, files, events=LINES):
    """Return how many steps *call* has, a step being a line or a call in one of *files*."""
    count = 0

    def trace(frame, event, _arg):
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += event in events
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def interrupted_at(step, call, files, events=LINES):
    """Run *call* with Ctrl-C right before one of its steps; True where it came."""
    count = 0

    def trace(frame, event, _arg):
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        if event in events:
            count += 1
            if count == step:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


FILES = {line.__file__, file_turn.__file__}


def test_ctrl_c_at_any_step_of_a_line_blocks_nobody_for_good():
    def turn(made):
        try:
            made.join(0)
        finally:
            made.leave()

    fresh = Line()
    steps = steps_of(lambda: turn(fresh), FILES)
    assert steps > 15
    for step in range(1, steps + 1):
        made = Line()
        assert interrupted_at(step, lambda made=made: turn(made), FILES)
        made.leave()  # whoever was interrupted while leaving leaves again
        [other] = queued(made, 1)
        assert other.answered.wait(WAIT_S), step
        assert other.got is True
        other.end()
        assert made.join(0)
        made.leave()


# ---- among processes ----


@pytest.fixture
def path(tmp_path):
    return tmp_path / "spend.db"


@pytest.fixture
def turns(path):
    made = [FileTurn(path) for _ in range(3)]
    yield made
    for each in made:
        each.close()


def test_one_has_the_turn_until_it_is_given_back(turns):
    first, second, _ = turns
    assert first.take(0)
    assert not second.take(0.05)
    first.give()
    assert second.take(0)
    second.give()
    second.give()


def test_a_first_waiter_that_is_stopped_keeps_no_other_from_the_turn(turns):
    holder, stopped, other = turns
    assert holder.take(0)
    assert file_turn.locks(stopped._queue)  # it was stopped as the first in the queue
    waits = threading.Thread(target=lambda: got.append(other.take(5)))
    got = []
    waits.start()
    time.sleep(0.05)
    holder.give()
    waits.join(WAIT_S)
    assert got == [True]


def test_a_wait_for_the_turn_among_processes_ends_when_it_was_told_to(turns):
    first, second, _ = turns
    assert first.take(0)
    began = time.monotonic()
    assert not second.take(0.3)
    assert 0.25 < time.monotonic() - began < 3
    first.give()
    assert second.take(0)


def test_who_had_the_turn_while_others_waited_steps_back(turns):
    """Someone who takes it again at once leaves a waiter the time to look."""
    first, second, _ = turns
    got = []
    assert first.take(0)
    waiter = threading.Thread(target=lambda: got.append(second.take(WAIT_S)), daemon=True)
    waiter.start()
    until(lambda: not free(first._queue))
    rounds = 0
    while not got and rounds < 200:
        first.give()
        assert first._owes or got
        rounds += 1
        if first.take(0.5):
            continue
        break
    waiter.join(WAIT_S)
    assert got == [True]
    assert rounds < 100


def free(descriptor):
    """Would the queue's lock be ours alone?"""
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR) if os.path.exists("/proc/self/fd") else os.dup(descriptor)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(other)
    return True


def test_nobody_waits_behind_a_process_that_was_stopped_while_it_gave_the_turn_back(turns):
    """SIGSTOP between the two system calls of ``give``: it holds the queue alone, and no turn."""
    first, second, stopped = turns
    fcntl.flock(stopped._queue, fcntl.LOCK_EX)
    assert first.take(0)
    got = []
    waiter = threading.Thread(target=lambda: got.append(second.take(0.3)), daemon=True)
    waiter.start()
    waiter.join(WAIT_S)
    fcntl.flock(stopped._queue, fcntl.LOCK_UN)
    assert got == [False], "it has to say within the bound that there is no turn"
    first.give()
    assert second.take(0)


def test_the_turn_of_a_process_that_is_killed_is_free_although_a_fork_of_it_lives(path):
    """A lock belongs to an open file, and a fork has the same: it must not keep the turn of a parent who is no more."""
    ready, told = os.pipe()
    parent = os.fork()
    if parent == 0:
        turn = FileTurn(path)
        turn.take(0)
        child = os.fork()
        if child == 0:
            os.write(told, f"{os.getpid()}\n".encode())
            signal.pause()
            os._exit(0)
        signal.pause()
        os._exit(0)
    orphan = int(os.read(ready, 20))
    os.close(ready)
    os.close(told)
    other = FileTurn(path)
    try:
        assert not other.take(0.05)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert other.take(2)
    finally:
        os.kill(orphan, signal.SIGKILL)
        other.close()


def test_ctrl_c_at_any_step_of_a_turn_among_processes_blocks_nobody(path):
    def turn(mine):
        try:
            mine.take(0)
        finally:
            mine.give()

    mine, other = FileTurn(path), FileTurn(path)
    try:
        steps = steps_of(lambda: turn(mine), FILES)
        assert steps > 8
        for step in range(1, steps + 1):
            assert interrupted_at(step, lambda: turn(mine), FILES)
            mine.give()  # whoever was interrupted while giving gives again
            assert other.take(0.5), step
            assert not mine.take(0)
            other.give()
    finally:
        mine.close()
        other.close()


def test_files_that_were_not_there_are_taken_away_again_and_no_others(path):
    FileTurn(path).close()
    again = FileTurn(path)
    again.remove_fresh()
    assert sorted(each.name for each in path.parent.iterdir()) == ["spend.db-lock", "spend.db-queue"]
    again.close()
    for each in path.parent.iterdir():
        each.unlink()
    fresh = FileTurn(path)
    fresh.remove_fresh()
    assert list(path.parent.iterdir()) == []
    fresh.close()


def written(store, key):
    store.transact(Scope(marks=(("test", key),)), lambda view: view.put_mark(("test", key), {"was": True}))


def is_blocked(url, step):
    """Write with Ctrl-C at a step; True where the process itself, or another one, cannot write afterwards."""
    store, other = open_store(url), open_store(url)
    try:
        assert interrupted_at(
            step, lambda: written(store, f"cut-{step}"), {*FILES, sqlite.__file__, group_commit.__file__}, CALLS
        ), step
        written(other, "other")
        written(store, "same")
    except LedgerUnavailable:
        return True
    finally:
        store._line.leave()  # so that it can be closed
        store.close()
        other.close()
    return False


def test_ctrl_c_at_any_step_of_a_transaction_leaves_the_ledger_to_everybody(path, monkeypatch):
    monkeypatch.setattr("x402guard.stores.group_commit.GroupCommit._busy_s", 0.2)
    url = f"sqlite:///{path}"
    store = open_store(url)
    steps = steps_of(lambda: written(store, "whole"), {*FILES, sqlite.__file__, group_commit.__file__}, CALLS)
    store.close()
    assert steps > 20
    blocked = [step for step in range(1, steps + 1) if is_blocked(url, step)]
    assert not blocked, blocked


def test_the_last_thread_leaves_while_another_one_asks_whether_the_turn_is_its_own():
    class Left(deque):
        def __bool__(self):
            return True  # as it was a moment before

    queue = Line()
    queue._line = Left()
    assert not queue.is_mine

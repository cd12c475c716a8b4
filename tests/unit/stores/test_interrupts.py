"""Ctrl-C and signal handlers in the midst of the books' own bookkeeping: nobody may wait for ever behind them."""

import fcntl
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.ledger import a_hold
from x402guard import LedgerUnavailable
from x402guard.flow import singleflight as asking_module
from x402guard.flow.ports import HoldStatus
from x402guard.flow.singleflight import SingleFlight
from x402guard.ledger.findings import Unused, proven
from x402guard.ledger.sessions import ensure_wallet
from x402guard.ledger.view import Scope
from x402guard.stores import file_lock as file_turn
from x402guard.stores import group_commit, sqlite
from x402guard.stores import group_commit as line
from x402guard.stores.sqlite import SqliteStore

WALLET = Scope(nodes=("wallet",), durable=True)
OURS = {module.__file__ for module in (sqlite, group_commit, line, file_turn)}
MOST_PLACES = 400


def opened(path):
    store = SqliteStore(path)
    store.transact(WALLET, lambda view: ensure_wallet(view, None))
    return store


def interrupted_at(files, number, work):
    """Run *work*, with Ctrl-C before the line of that number that it runs in *files*; return where, or None where it has no such line."""
    seen, before = [], sys.gettrace()

    def each(frame, event, _arg):
        if event == "line":
            seen.append((Path(frame.f_code.co_filename).name, frame.f_lineno))
            if len(seen) == number:
                sys.settrace(before)
                raise KeyboardInterrupt
        return each

    sys.settrace(lambda frame, _event, _arg: each if frame.f_code.co_filename in files else None)
    try:
        with suppress(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(before)
    return seen[number - 1] if len(seen) >= number else None


def in_a_thread(work):
    said = []

    def told():
        try:
            said.append(work())
        except LedgerUnavailable as error:
            said.append(error)

    thread = threading.Thread(target=told, daemon=True)
    thread.start()
    thread.join(10)
    return said


def is_free(path):
    """Could another process take its turn now?"""
    turn = file_turn.FileTurn(path)
    try:
        return [_is_free(each) for each in (turn._queue, turn._turn)] == [True, True]
    finally:
        turn.close()


def _is_free(descriptor):
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def test_ctrl_c_anywhere_in_a_transaction_leaves_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr("x402guard.stores.group_commit.GroupCommit._busy_s", 0.5)
    store, path, places = opened(tmp_path / "spend.db"), tmp_path / "spend.db", []
    for number in range(1, MOST_PLACES):
        place = interrupted_at(OURS, number, lambda: store.transact(WALLET, lambda view: None))
        if place is None:
            break
        places.append(place)
        assert is_free(path), f"Ctrl-C at {place} locks every other process out"
        assert in_a_thread(lambda: store.transact(WALLET, lambda view: 1)) == [1], (
            f"Ctrl-C at {place} locks every thread out"
        )
        assert store.transact(WALLET, lambda view: 2) == 2
    assert {name for name, _ in places} == {"sqlite.py", "group_commit.py", "file_lock.py"}
    assert len(places) > 50
    store.close()


@pytest.mark.parametrize("what", ["transact", "close"])
def test_a_signal_handler_is_told_no_and_who_waits_goes_on_waiting(tmp_path, what):
    store = opened(tmp_path / "spend.db")
    working, done, said = threading.Event(), threading.Event(), []

    def slow(_view):
        working.set()
        done.wait(10)

    def handler(*_):
        try:
            store.close() if what == "close" else store.transact(WALLET, lambda view: None)
        except LedgerUnavailable as error:
            said.append(str(error))
        done.set()

    other = threading.Thread(target=store.transact, args=(WALLET, slow))
    other.start()
    assert working.wait(10)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert store.transact(WALLET, lambda view: 3) == 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    other.join(10)
    assert ["signal handler" in each for each in said] == [True]
    store.close()


def test_ctrl_c_while_closing_leaves_nobody_waiting(tmp_path, monkeypatch):
    """The first Ctrl-C ends the run, the second comes while the guard waits for its background thread."""
    store = opened(tmp_path / "spend.db")
    working, done = threading.Event(), threading.Event()

    def slow(_view):
        working.set()
        done.wait(10)

    other = threading.Thread(target=store.transact, args=(WALLET, slow))
    other.start()
    assert working.wait(10)
    monkeypatch.setattr(store._line, "join", _interrupted(store._line.join))
    with pytest.raises(KeyboardInterrupt):
        store.close()
    monkeypatch.undo()
    done.set()
    other.join(10)
    assert in_a_thread(lambda: store.transact(WALLET, lambda view: 1)) == [1]
    store.close()


def _interrupted(join):
    def joined(_timeout_s):
        join(0.05)
        raise KeyboardInterrupt

    return joined


class Answers:
    """A chain that answers at once."""

    networks = frozenset()

    def read(self, hold):
        return Unused(hold.deadline_unix)


def test_ctrl_c_anywhere_in_a_question_leaves_nobody_waiting_for_its_answer():
    asking, question, places = SingleFlight(), HoldStatus(a_hold()), []
    for number in range(1, MOST_PLACES):
        place = interrupted_at({asking_module.__file__}, number, lambda: asking.ask(question, Answers()))
        if place is None:
            break
        places.append(place)
        assert not asking._under_way, f"Ctrl-C at {place}: what was answered then is the answer for ever"
        answers = in_a_thread(lambda: asking.ask(question, Answers()))
        assert answers == [proven(question.hold.payment(), Unused(question.hold.deadline_unix))], (
            f"Ctrl-C at {place} keeps everybody waiting who asks the same"
        )
    assert len(places) > 10

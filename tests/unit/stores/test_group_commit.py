"""Changes that wait share one transaction, and each keeps its own outcome."""

import contextlib
import contextvars
import sqlite3
import threading
import time

import pytest

from tests.support.ledger import Books, usd
from x402guard import LedgerUnavailable
from x402guard.errors import IllegalTransition
from x402guard.kernel.rows import Evidence
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.events import Capture
from x402guard.ledger.view import Scope
from x402guard.stores import checking, open_store
from x402guard.stores.group_commit import MOST_TOGETHER

WAIT_S = 10


def mark(key):
    return ("test", key)


def put(key, more=lambda view: None):
    def change(view):
        more(view)
        view.put_mark(mark(key), {"by": threading.current_thread().name})
        return key

    return Scope(marks=(mark(key),)), change


class Crowd:
    """One thread inside its change, and others that wait behind it; ``go`` lets all of them run together."""

    def __init__(self, store):
        self.store, self.inside, self.go_on = store, threading.Event(), threading.Event()
        self.outcomes, self.batches = {}, []
        commit = store._commit

        def counted(batch):
            self.batches.append(len(batch))
            commit(batch)

        store._commit = counted
        self.threads = [self._start("first", *put("first", lambda view: (self.inside.set(), self.go_on.wait(WAIT_S))))]
        assert self.inside.wait(WAIT_S)

    def _start(self, name, scope, change):
        def run():
            try:
                self.outcomes[name] = self.store.transact(scope, change)
            except BaseException as error:
                self.outcomes[name] = error

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def add(self, name, scope, change):
        before = len(self.store._requests._waiting)
        self.threads.append(self._start(name, scope, change))
        give_up = time.monotonic() + WAIT_S
        while len(self.store._requests._waiting) == before:
            assert time.monotonic() < give_up
            time.sleep(0.001)

    def go(self):
        self.go_on.set()
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        return self.outcomes


@pytest.fixture
def store(tmp_path):
    made = open_store(f"sqlite:///{tmp_path / 'spend.db'}")
    yield made
    made.close()


def test_changes_that_wait_share_a_transaction_and_each_gets_its_own_result(store):
    crowd = Crowd(store)
    for n in range(30):
        crowd.add(f"t{n}", *put(f"k{n}"))
    outcomes = crowd.go()
    assert {name: key for name, key in outcomes.items() if name != "first"} == {f"t{n}": f"k{n}" for n in range(30)}
    assert crowd.batches == [1, 30]
    assert set(store.marks("test", "k")) == {f"k{n}" for n in range(30)}


def test_no_more_than_so_many_share_one(store):
    crowd = Crowd(store)
    for n in range(MOST_TOGETHER + 20):
        crowd.add(f"t{n}", *put(f"k{n}"))
    assert len(crowd.go()) == MOST_TOGETHER + 21
    assert crowd.batches == [1, MOST_TOGETHER, 20]


def test_each_sees_what_those_before_it_have_written(store):
    def add_one(view):
        found = (view.mark(mark("sum")) or {"n": 0})["n"] + 1
        view.put_mark(mark("sum"), {"n": found})
        return found

    crowd = Crowd(store)
    for n in range(40):
        crowd.add(f"t{n}", Scope(marks=(mark("sum"),)), add_one)
    outcomes = crowd.go()
    assert sorted(outcomes[f"t{n}"] for n in range(40)) == list(range(1, 41))
    assert store.marks("test", "sum") == {"sum": {"n": 40}}


def test_one_that_fails_fails_alone_and_nothing_of_it_is_written(store):
    def fails(view):
        view.put_mark(mark("k1"), {"never": True})
        raise IllegalTransition("this one")

    crowd = Crowd(store)
    crowd.add("t0", *put("k0"))
    crowd.add("t1", Scope(marks=(mark("k1"),)), fails)
    crowd.add("t2", *put("k2"))
    outcomes = crowd.go()
    assert str(outcomes.pop("t1")) == "this one"
    assert outcomes == {"first": "first", "t0": "k0", "t2": "k2"}
    assert set(store.marks("test", "")) == {"first", "k0", "k2"}


def test_one_that_the_database_refuses_fails_alone_too(store):
    def too_large(view):
        view.put_mark(mark("k1"), {"text": "\ud800"})  # no file can store it

    crowd = Crowd(store)
    crowd.add("t0", *put("k0"))
    crowd.add("t1", Scope(marks=(mark("k1"),)), too_large)
    crowd.add("t2", *put("k2"))
    outcomes = crowd.go()
    assert isinstance(outcomes.pop("t1"), UnicodeEncodeError)
    assert outcomes == {"first": "first", "t0": "k0", "t2": "k2"}
    assert set(store.marks("test", "")) == {"first", "k0", "k2"}


class Full:
    """A connection whose disk is full at the commit; everything else is the real one's."""

    def __init__(self, connection):
        self._connection = connection

    def execute(self, sql, *values):
        if sql == "COMMIT":
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._connection.execute(sql, *values)

    def __getattr__(self, name):
        return getattr(self._connection, name)


def test_a_commit_that_fails_fails_all_in_it_and_nothing_is_written(store):
    crowd = Crowd(store)
    for n in range(10):
        crowd.add(f"t{n}", *put(f"k{n}"))
    store._writer = Full(store._writer)
    outcomes = crowd.go()
    assert {type(outcome) for outcome in outcomes.values()} == {LedgerUnavailable}
    assert len({id(outcome) for outcome in outcomes.values()}) == 11  # each thread raises an error of its own
    assert all("disk is full" in outcome.advice and outcome.retry == "later" for outcome in outcomes.values())
    store._writer = store._writer._connection
    assert store.marks("test", "") == {}
    assert store.transact(*put("again")) == "again"


def test_each_runs_in_the_context_of_its_own_thread(store):
    who = contextvars.ContextVar("who", default="")

    def named(name):
        who.set(name)
        return store.transact(Scope(marks=(mark(name),)), lambda view: (who.get(), view.put_mark(mark(name), {}))[0])

    crowd = Crowd(store)
    found = []
    threads = [threading.Thread(target=lambda name=name: found.append((name, named(name)))) for name in "abc"]
    for thread in threads:
        thread.start()
    while len(store._requests._waiting) < 3:
        time.sleep(0.001)
    crowd.go()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(found) == [(name, name) for name in "abc"]


def test_ctrl_c_in_the_thread_that_runs_them_leaves_the_others_to_another_thread(store):
    def interrupted(view):
        raise KeyboardInterrupt

    crowd = Crowd(store)
    crowd.add("t0", Scope(marks=(mark("t0"),)), interrupted)
    for n in range(1, 10):
        crowd.add(f"t{n}", *put(f"k{n}"))
    outcomes = crowd.go()
    assert isinstance(outcomes.pop("t0"), KeyboardInterrupt)
    assert outcomes == {"first": "first", **{f"t{n}": f"k{n}" for n in range(1, 10)}}
    assert len(store.marks("test", "k")) == 9


def test_ctrl_c_while_another_thread_runs_it_waits_for_its_end(store, monkeypatch):
    """The flow then reads in the ledger what was written."""
    crowd = Crowd(store)
    mine = threading.Event()

    def slow(view):
        mine.set()
        time.sleep(0.2)

    crowd.add("t0", *put("k0", slow))
    join = store._line.join
    seen = []

    def interrupted(timeout_s, over=lambda: False):
        if threading.current_thread().name != "t1":
            return join(timeout_s, over)
        crowd.go_on.set()
        assert mine.wait(WAIT_S)  # t0 runs both
        seen.append(set(store.marks("test", "k")))
        raise KeyboardInterrupt

    monkeypatch.setattr(store._line, "join", interrupted)
    crowd.add("t1", *put("k1"))
    outcomes = crowd.go()
    assert isinstance(outcomes["t1"], KeyboardInterrupt)
    assert seen == [set()]
    assert set(store.marks("test", "k")) == {"k0", "k1"}


def test_payments_of_sixty_threads_never_pass_a_limit(tmp_path):
    books = Books(f"sqlite:///{tmp_path / 'spend.db'}", session="$0.50")
    sold, lock = [], threading.Lock()

    def buy(n):
        held = books.hold(f"h{n}", "$0.01")
        with lock:
            sold.append(type(held).__name__)

    threads = [threading.Thread(target=buy, args=(n,)) for n in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (sold.count("Hold"), sold.count("Refusal")) == (50, 10)
    assert not books.store.audit()
    books.close()


def test_a_thread_that_waits_too_long_takes_its_change_back(store, monkeypatch):
    monkeypatch.setattr("x402guard.stores.group_commit.GroupCommit._busy_s", 0.1)
    crowd = Crowd(store)
    with pytest.raises(LedgerUnavailable, match="another thread has been writing"):
        store.transact(*put("late"))
    crowd.go()
    assert set(store.marks("test", "")) == {"first"}


def paid(books, name, times=3):
    """Open a session, and pay in it so many times, exactly what is held."""
    assert not isinstance(books.open(name, "$1.00"), Refusal)
    for number in range(times):
        hold = f"{name}-{number}"
        assert not isinstance(books.hold(hold, "$0.01", node=name), Refusal)
        books.step(hold, Capture(usd("$0.01"), Evidence.ESTIMATE))


@pytest.mark.parametrize("beside", ["nothing", "writes", "openings"])
def test_threads_that_open_sessions_and_pay_in_them_leave_books_that_add_up(tmp_path, beside, monkeypatch):
    """A change that opens a session reads rows that are not known; those of the batch that wait to be written stay.

    Each opening of the ledger beside them checks what has come, and notes up to where.
    """
    monkeypatch.setattr(checking, "WORTH_NOTING", 1)
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    books, errors, ended = Books(url, wallet=None, session=None), [], threading.Event()

    def work(which):
        try:
            for number in range(8):
                paid(books, f"s{which}-{number}")
        except Exception as error:
            errors.append(repr(error)[-200:])

    def write_beside():
        with contextlib.closing(open_store(url)) as other:
            number = 0
            while not ended.wait(0.001):
                number += 1
                other.transact(*put(f"beside{number % 5}"))

    def open_beside():
        while not ended.wait(0.001):
            try:
                open_store(url).close()
            except Exception as error:
                errors.append(repr(error)[-200:])

    threads = [threading.Thread(target=work, args=(which,)) for which in range(6)]
    others = {"nothing": [], "writes": [write_beside], "openings": [open_beside, open_beside]}[beside]
    threads += [threading.Thread(target=other) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads[:6]:
        thread.join(60)
    ended.set()
    for thread in threads[6:]:
        thread.join(WAIT_S)
    assert errors == []
    assert not books.store.audit()
    assert books.store.marks("checked", "") or beside != "openings"
    open_store(url).close()
    assert books.node("wallet").granted_out == 6 * 8 * 3 * usd("$0.01")
    books.close()


def counted(view):
    view.put_mark(mark("n"), {"n": (view.mark(mark("n")) or {"n": 0})["n"] + 1})


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
@pytest.mark.parametrize("moment", ["the commit returns", "the file is looked at"])
def test_what_was_committed_never_runs_again_whatever_a_signal_raises_then(store, signal, moment):
    scope = Scope(marks=(mark("n"),), durable=True)
    crowd = Crowd(store)
    for name in ("t0", "t1", "t2"):
        crowd.add(name, scope, counted)
    once = [signal("a signal")]

    class Signalled(Full):
        def execute(self, sql, *values):
            done = self._connection.execute(sql, *values)
            if sql == "COMMIT" and store.batches_seen() and once and moment == "the commit returns":
                raise once.pop()
            return done

    store.batches_seen = lambda: len(crowd.batches) > 1
    look = store._check_file

    def looked():
        after = threading.current_thread().name == "t0" and store.batches_seen() and not store._writer.in_transaction
        look()
        if after and once and moment == "the file is looked at":
            raise once.pop()

    store._writer, store._check_file = Signalled(store._writer), looked
    outcomes = crowd.go()
    store._writer = store._writer._connection
    assert not once
    raised = [name for name, outcome in outcomes.items() if isinstance(outcome, signal)]
    assert len(raised) == 1
    assert store.marks("test", "n") == {"n": {"n": 3}}
    assert store.transact(*put("later")) == "later"
    assert store.marks("test", "n") == {"n": {"n": 3}}


def test_what_was_rolled_back_by_the_database_itself_is_not_written_later(store):
    store.transact(Scope(marks=(mark("n"),)), counted)
    flush, roll_back = store._rows.flush, store._roll_back

    def full():
        store._writer.execute("ROLLBACK")  # as SQLite does on some errors
        raise sqlite3.OperationalError("database or disk is full")

    def interrupted():
        store._roll_back = roll_back
        raise KeyboardInterrupt

    store._rows.flush, store._roll_back = full, interrupted
    with pytest.raises(KeyboardInterrupt):
        store.transact(Scope(marks=(mark("n"),)), counted)
    store._rows.flush = flush
    store.transact(*put("another"))
    assert store.marks("test", "n") == {"n": {"n": 1}}

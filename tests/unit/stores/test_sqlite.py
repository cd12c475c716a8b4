"""What only a file can do: survive, be shared, be protected, be somebody else's."""

import os
import sqlite3
import stat
import textwrap

import pytest

from tests.support import processes
from tests.support.ledger import Books, a_hold, an_id, usd
from x402guard.errors import ConfigError, IllegalTransition, LedgerUnavailable
from x402guard.kernel.rows import Evidence
from x402guard.ledger.authorize import Refusal, authorize
from x402guard.ledger.events import Capture
from x402guard.stores import open_store
from x402guard.stores.sqlite import SqliteStore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


def test_the_books_survive_closing_and_opening(path):
    books = Books(f"sqlite:///{path}", wallet="$5.00")
    books.hold("h1", "$0.10")
    books.hold("h2", "$0.20")
    books.step("h1", Capture(usd("$0.10"), Evidence.CLAIMED))
    wanted = (books.balances("s"), books.balances("wallet"), books.stored("h2"), books.store.entries("wallet"))
    books.close()
    again = Books(f"sqlite:///{path}", wallet="$5.00", session=None)
    assert (
        again.balances("s"),
        again.balances("wallet"),
        again.stored("h2"),
        again.store.entries("wallet"),
    ) == wanted
    again.close()


def test_only_its_owner_can_read_the_file(path):
    books = Books(f"sqlite:///{path}")
    books.hold("h", "$0.10")
    files = sorted(p.name for p in path.parent.iterdir())
    assert "ledger.db-wal" in files
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    books.close()


def test_the_journal_is_append_only_for_everybody(path):
    books = Books(f"sqlite:///{path}")
    books.hold("h", "$0.10")
    books.close()
    raw = sqlite3.connect(path)
    for statement in ("UPDATE entries SET held = 0", "DELETE FROM entries"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            raw.execute(statement)
    raw.close()


def test_a_file_of_something_else_is_refused_and_left_alone(path):
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE photos (name TEXT)")
    raw.commit()
    raw.close()
    before = path.read_bytes()
    with pytest.raises(LedgerUnavailable, match="another program"):
        open_store(f"sqlite:///{path}")
    assert path.read_bytes()[100:] == before[100:]  # the header alone may say that it was opened
    path.write_bytes(b"not a database at all, just text " * 100)
    with pytest.raises(LedgerUnavailable):
        open_store(f"sqlite:///{path}")


def test_a_newer_ledger_is_refused(path):
    open_store(f"sqlite:///{path}").close()
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(LedgerUnavailable, match="newer"):
        open_store(f"sqlite:///{path}")


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"folder .*missing does not exist"):
        open_store(f"sqlite:///{tmp_path / 'missing' / 'ledger.db'}")
    with pytest.raises(ConfigError, match="is a folder"):
        open_store(f"sqlite:///{tmp_path}")
    with pytest.raises(ConfigError, match="memory://"):
        open_store("sqlite:///:memory:")
    with pytest.raises(ConfigError, match="query"):
        open_store(f"sqlite:///{tmp_path / 'ledger.db'}?mode=ro")


def test_a_ledger_that_is_deleted_while_open_is_noticed(path):
    books = Books(f"sqlite:///{path}")
    path.unlink()
    with pytest.raises(LedgerUnavailable, match="removed or replaced"):
        books.hold("h", "$0.10")
    with pytest.raises(LedgerUnavailable, match="existed here and is missing"):
        Books(f"sqlite:///{path}")
    path.with_name(f"{path.name}-lock").unlink()
    Books(f"sqlite:///{path}").close()
    with pytest.raises(LedgerUnavailable, match="removed or replaced"):
        books.hold("h", "$0.10")
    books.close()


def test_a_damaged_row_is_a_ledger_that_cannot_be_read(path):
    books = Books(f"sqlite:///{path}")
    books.hold("h", "$0.10")
    raw = sqlite3.connect(path)
    raw.execute("UPDATE holds SET intent = '{}'")
    raw.execute("INSERT INTO marks VALUES ('origin', 'x', 'not json')")
    raw.commit()
    raw.close()
    for read in (
        lambda: books.store.hold(an_id("h")),
        books.store.outstanding,
        lambda: books.step("h", Capture(0, Evidence.CLAIMED)),
        lambda: books.store.marks("origin", ""),
        lambda: books.change(lambda view: None, marks=(("origin", "x"),)),
    ):
        with pytest.raises(LedgerUnavailable, match="cannot be read"):
            read()
    books.close()


@pytest.mark.parametrize("value", ["[]", '""', "null", "0", "[1]", "true"])
def test_a_mark_that_is_no_object_is_no_mark_that_says_nothing(path, value):
    """Read as one, it would let a limit begin anew."""
    books = Books(f"sqlite:///{path}")
    raw = sqlite3.connect(path)
    raw.execute("INSERT INTO marks VALUES ('calls', 's search', ?)", (value,))
    raw.commit()
    raw.close()
    for read in (
        lambda: books.store.marks("calls", ""),
        lambda: books.change(lambda view: None, marks=(("calls", "s search"),)),
    ):
        with pytest.raises(LedgerUnavailable, match="a mark is an object, not"):
            read()
    books.close()


def test_ctrl_c_in_a_transaction_does_not_lock_the_ledger(path):
    books = Books(f"sqlite:///{path}")
    books.store._writer.execute("BEGIN IMMEDIATE")  # as Ctrl-C right behind it would leave it
    assert not isinstance(books.hold("h", "$0.10"), Refusal)
    other = Books(f"sqlite:///{path}", session=None)
    assert not isinstance(other.hold("h2", "$0.10"), Refusal)
    other.close()
    books.close()


OPENS = textwrap.dedent("""
    import sys
    from x402guard.stores import open_store
    sys.stdin.readline()
    open_store("sqlite:///" + sys.argv[1]).close()
    print("opened", flush=True)
""")


def test_many_processes_may_open_a_new_ledger_at_once(path):
    workers = [processes.start(OPENS, path) for _ in range(8)]
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = [worker.communicate(timeout=60)[0] for worker in workers]
    assert answers == ["opened\n"] * 8


@pytest.mark.parametrize("url", ["", "sqlite://", "sqlite:///", "mysql://x", "spend", "memory:///x"])
def test_an_unknown_ledger_url_is_a_config_error(url):
    with pytest.raises(ConfigError, match="is not a ledger"):
        open_store(url)


@pytest.mark.parametrize("url", ["spend.db;", " spend.db", "./spend.db # ours", "sqlite:///spend.db;", "spend\0"])
def test_what_is_left_in_a_ledger_is_named(url):
    with pytest.raises(ConfigError, match="a quote or ; at an end"):
        open_store(url)
    with pytest.raises(ConfigError, match="a URL of 'agent' has a blank") as caught:
        open_store("agent:hunter2@db;")
    assert "hunter2" not in str(caught.value)


def test_a_closed_ledger_says_so(path):
    store = SqliteStore(path)
    store.close()
    with pytest.raises(LedgerUnavailable, match="closed"):
        store.hold("h")  # a signer asks this
    assert store.nodes() == [], "a report can be read after the end"
    with pytest.raises(LedgerUnavailable, match="closed"):
        store.transact(None, lambda view: None)


def test_what_restrains_is_synced_and_what_frees_need_not_be(path, monkeypatch):
    books = Books(f"sqlite:///{path}")

    def level():
        return books.store._writer.execute("PRAGMA synchronous").fetchone()[0]

    books.hold("h", "$0.10")
    assert level() == 2  # FULL
    books.change(lambda view: None, nodes=("s",), durable=False)
    assert level() == 1  # NORMAL
    books.close()


WORKER = textwrap.dedent("""
    import sys
    from tests.support.ledger import Books
    from x402guard.ledger.authorize import Refusal, authorize
    books = Books("sqlite:///" + sys.argv[1], session=None)
    print("ready", flush=True)
    sys.stdin.readline()
    books.clock.now_ms += int(sys.argv[2])
    made = sum(not isinstance(books.hold(f"{sys.argv[2]}-{n}", "$0.01"), Refusal) for n in range(40))
    print(made, flush=True)
    books.close()
""")


def test_processes_share_one_file_and_sell_each_cent_once(path):
    books = Books(f"sqlite:///{path}", wallet="$0.50", session="$0.50")
    workers = [processes.start(WORKER, path, n) for n in range(4)]
    try:
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        sold = [int(worker.stdout.readline()) for worker in workers]
    finally:
        for worker in workers:
            worker.communicate(timeout=30)
    assert sum(sold) == 50
    assert books.balances() == (0, usd("$0.50"), usd("$0.50"), 0)
    assert isinstance(books.hold("one more", "$0.01"), Refusal)
    books.close()


def test_a_process_killed_in_a_transaction_leaves_the_books_as_they_were(path):
    books = Books(f"sqlite:///{path}")
    script = textwrap.dedent("""
        import os, signal, sys
        from tests.support.ledger import Books, a_hold
        from x402guard.ledger.authorize import authorize
        books = Books("sqlite:///" + sys.argv[1], session=None)
        def die(view):
            authorize(view, a_hold("h"), {})
            books.store._rows.add(view.change_set(durable=True))
            books.store._rows.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        books.change(die, nodes=("s",), holds=("h",))
    """)
    done = processes.run(script, path)
    assert done.returncode == -9
    assert books.balances() == (0, 0, 0, 0)
    assert not isinstance(books.hold("h", "$0.10"), Refusal)
    books.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_ledger_that_cannot_be_written_refuses(path):
    open_store(f"sqlite:///{path}").close()
    path.chmod(0o400)
    with pytest.raises(LedgerUnavailable):
        open_store(f"sqlite:///{path}")


def test_after_a_fork_the_ledger_has_to_be_opened_anew(path):
    books = Books(f"sqlite:///{path}")
    books.store._pid += 1  # as a child would see it
    with pytest.raises(LedgerUnavailable, match="fork"):
        books.hold("h", "$0.10")
    books.store._pid -= 1
    books.close()


def test_what_another_connection_writes_is_seen_by_the_next_change(path):
    """Rows that a connection knows are known until another one, of any program, has written."""
    one, other = Books(f"sqlite:///{path}"), Books(f"sqlite:///{path}", session=None)
    key = ("test", "shared")

    def count(view):
        found = (view.mark(key) or {"n": 0})["n"] + 1
        view.put_mark(key, {"n": found})
        return found

    counted = [books.change(count, marks=(key,)) for books in (one, one, other, one, other, other, one)]
    assert counted == list(range(1, 8))
    held = [books.hold(f"h{n}", "$0.20") for n, books in enumerate((one, other, one, other, one, other))]
    assert [isinstance(each, Refusal) for each in held] == [False] * 5 + [True]
    raw = sqlite3.connect(path)
    raw.execute("UPDATE marks SET value = '{\"n\":40}' WHERE kind = 'test'")
    raw.commit()
    raw.close()
    assert [books.change(count, marks=(key,)) for books in (one, other)] == [41, 42]
    one.close()
    other.close()


def test_a_change_that_fails_leaves_no_row_known_that_was_not_written(path):
    books, key = Books(f"sqlite:///{path}"), ("test", "k")

    def fails(view):
        view.put_mark(key, {"n": 1})
        authorize(view, a_hold("h"), {})
        raise IllegalTransition("after it has written")

    with pytest.raises(IllegalTransition):
        books.change(fails, nodes=("s",), holds=("h",), marks=(key,))
    assert books.change(
        lambda view: (view.mark(key), view.hold("h"), view.node("s").held), nodes=("s",), holds=("h",), marks=(key,)
    ) == (None, None, 0)
    books.close()


@pytest.mark.parametrize("grants", [True, False])
def test_the_journal_of_one_session_is_read_without_the_rest_of_it(tmp_path, grants):
    """A report of a session of ten entries took 0.1 s beside a million others."""
    store = open_store(f"sqlite:///{tmp_path / 'l.db'}")
    asked = []
    store._reader.set_trace_callback(asked.append)
    store.entries("s", grants=grants)
    store._reader.set_trace_callback(None)
    plans = [row[3] for sql in asked for row in store._reader.execute(f"EXPLAIN QUERY PLAN {sql}")]
    store.close()
    assert "SEARCH entries USING PRIMARY KEY (node_id=?)" in plans
    assert not [plan for plan in plans if plan.startswith(("SCAN entries", "USE TEMP"))]

"""Which files are a ledger of this library: not those of before the first release, and not those of a next version.

A next version is invented here, because there is none yet.
"""

import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.support.command_line import typed
from tests.support.merchant import make_guard
from x402guard import LedgerUnavailable, __version__
from x402guard.kernel.rows import WALLET
from x402guard.stores import open_store, sqlite_schema
from x402guard.stores.moving import move_to_postgres
from x402guard.stores.read_only import ReadOnlyStore
from x402guard.stores.rows import packed, unpacked
from x402guard.stores.sqlite_schema import APPLICATION_ID, MIGRATIONS, MOVED, newest

THIS = newest()
NEXT = "CREATE TABLE next (n INTEGER); INSERT INTO next SELECT count(*) FROM entries;"


@pytest.fixture
def books(tmp_path):
    path = tmp_path / "spend.db"
    with make_guard(f"sqlite:///{path}") as guard, guard.session("s", budget="$1.00") as session:
        session.charge("serp", "$0.01")
        yield path, session


@pytest.fixture
def closed(tmp_path):
    path = tmp_path / "closed.db"
    with make_guard(f"sqlite:///{path}") as guard, guard.session("s", budget="$1.00", id="s") as session:
        session.charge("serp", "$0.01")
    return path


def say(path, *statements):
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        return [raw.execute(each).fetchall() for each in statements][-1]


def version(path):
    return say(path, "PRAGMA user_version")[0][0]


def without_locks(path):
    for name in ("lock", "queue"):
        path.with_name(f"{path.name}-{name}").unlink()


UNRELEASED = {
    "its first version": (0x78343032, 1),
    "the version that this one has": (0x78343032, newest()),
    "its last version": (0x78343032, 8),
    "one that was moved": (0x78343032, MOVED),
    "one that a full disk has cut off": (0, 0),
}


@pytest.mark.parametrize("kind", UNRELEASED)
@pytest.mark.parametrize(
    "command", ["verify", "report s", "sessions", "budget set wallet 5", "ledger move postgresql://h/d"]
)
def test_a_ledger_of_before_the_first_release_is_refused_in_words_and_left_as_it_is(closed, kind, command, tmp_path):
    number, user_version = UNRELEASED[kind]
    say(closed, f"PRAGMA application_id = {number}", f"PRAGMA user_version = {user_version}")
    without_locks(closed)
    before = closed.read_bytes()
    done = typed(*command.split(), "--ledger", f"sqlite:///{closed}", cwd=tmp_path)
    said, advice = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert said == (
        f"x402guard: {closed} has the ledger of an earlier x402guard, which was never released; this one does not read it"
    )
    assert "Keep that file, and read it with the version that made it. Name another file for a new ledger" in advice
    assert closed.read_bytes() == before
    assert list(tmp_path.iterdir()) == [closed]


def test_doctor_names_a_ledger_of_before_the_first_release(closed, tmp_path):
    say(closed, "PRAGMA application_id = 0x78343032")
    done = typed("doctor", "--ledger", f"sqlite:///{closed}", cwd=tmp_path)
    [found] = [line for line in done.stdout.splitlines() if "which was never released" in line]
    assert (done.returncode, found.startswith("PROBLEM  ledger")) == (1, True)


@pytest.mark.parametrize("number", [0, 7])
def test_a_file_of_another_program_is_none_of_before(tmp_path, number):
    path = tmp_path / "photos.db"
    say(path, "CREATE TABLE nodes (name TEXT)", "CREATE TABLE entries (name TEXT)", f"PRAGMA application_id = {number}")
    for opens in (lambda: open_store(f"sqlite:///{path}"), lambda: ReadOnlyStore(path)):
        with pytest.raises(LedgerUnavailable, match="is a database of another program"):
            opens()


def test_a_ledger_is_taken_to_a_next_version_by_its_owner_alone_whole_and_once(closed, monkeypatch):
    was, url = version(closed), f"sqlite:///{closed}"
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT, "UPDATE next SET n = n + 1;"))
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda _: open_store(url), range(4)))
    for command in ("verify", "sessions", "report s", "holds", "reconcile"):
        typed(*command.split(), "--ledger", url, cwd=closed.parent)
    with make_guard(url) as guard, guard.session("u", budget="$1.00") as session:
        session.charge("serp", "$0.01")
    assert version(closed) == was, "whoever opens it writes it as it is"
    done = typed("ledger", "upgrade", "--ledger", url, cwd=closed.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "To go back: end every process, put it back in place of the ledger" in done.stdout
    [copy] = closed.parent.glob("closed.db.version-*[0-9]")
    assert version(copy) == was
    for store in stores:  # open meanwhile, and able to read it
        assert (store.audit(), store.nodes()[0].id) == ([], WALLET)
        with make_guard(store) as guard, guard.session("v", budget="$1.00") as session:
            session.charge("serp", "$0.01")
        store.close()
    assert version(closed) == was + 2 == newest()
    assert say(closed, "PRAGMA application_id") == [(APPLICATION_ID,)]
    assert "has ledger version" in typed("ledger", "upgrade", "--ledger", url, cwd=closed.parent).stdout
    monkeypatch.undo()
    for opens in (lambda: open_store(url), lambda: ReadOnlyStore(closed)):
        with pytest.raises(LedgerUnavailable, match=rf"was written by a newer x402guard \(ledger version {was + 2}\)"):
            opens()
    ReadOnlyStore(copy).close()  # the way back


def test_an_upgrade_names_the_processes_that_could_not_go_on(closed, monkeypatch):
    url = f"sqlite:///{closed}"
    guard = make_guard(url)
    with closing(guard.shell.store):
        session = guard.session("s", id="s")
        monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT))
        done = typed("ledger", "upgrade", "--ledger", url, cwd=closed.parent)
        assert done.returncode == 2
        assert f"1 of the processes that use it do not read version {THIS + 1}" in done.stderr
        assert f"{guard.instance}: x402guard {__version__}, reads ledger version {THIS}" in done.stderr
        assert version(closed) == THIS
        monkeypatch.undo()
        session.charge("serp", "$0.01")  # as if nothing had been asked
        monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT))
        assert typed("ledger", "upgrade", "--force", "--ledger", url, cwd=closed.parent).returncode == 0
        monkeypatch.undo()
        with pytest.raises(LedgerUnavailable, match="was changed by a newer x402guard"):
            session.charge("serp", "$0.01")


def test_a_new_ledger_has_the_next_version_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT))
    open_store(f"sqlite:///{tmp_path / 'l.db'}").close()
    assert (version(tmp_path / "l.db"), say(tmp_path / "l.db", "SELECT n FROM next")) == (THIS + 1, [(0,)])


@pytest.mark.parametrize("begun", [0, THIS])
def test_steps_of_which_one_fails_are_all_undone(tmp_path, monkeypatch, begun):
    path = tmp_path / "l.db"
    if begun:
        open_store(f"sqlite:///{path}").close()
    say(path, "PRAGMA journal_mode = WAL")
    tables = say(path, "SELECT count(*) FROM sqlite_master")
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT, "SELECT no_such_function();"))
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        with pytest.raises(sqlite3.OperationalError, match="no such function"):
            sqlite_schema.migrate(raw, begun)
        assert not raw.in_transaction
    assert (version(path), say(path, "SELECT count(*) FROM sqlite_master")) == (begun, tables)
    monkeypatch.undo()
    if not begun:
        with pytest.raises(LedgerUnavailable, match="was begun and not made") as refused:
            ReadOnlyStore(path)
        assert "--new" in refused.value.advice
    open_store(f"sqlite:///{path}").close()


def test_a_backup_that_was_put_back_by_mistake_is_refused_before_it_is_taken_to_a_next_version(
    books, tmp_path, monkeypatch
):
    path, session = books
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(tmp_path / "old.db")) as backup:
        source.backup(backup)
    session.charge("serp", "$0.01")
    for name in ("lock", "queue"):
        shutil.copy(f"{path}-{name}", tmp_path / f"old.db-{name}")
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT))
    with pytest.raises(LedgerUnavailable, match="is older than the one that was here: 1 durable commits"):
        open_store(f"sqlite:///{tmp_path / 'old.db'}")
    assert version(tmp_path / "old.db") == THIS
    monkeypatch.undo()


def test_one_of_a_version_that_is_too_old_is_told_how_it_is_brought_to_this_one(closed, monkeypatch):
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT))
    for room in ("sqlite", "read_only", "moving"):
        monkeypatch.setattr(f"x402guard.stores.{room}.OLDEST", newest())
    url = f"sqlite:///{closed}"
    for opens in (
        lambda: open_store(url),
        lambda: ReadOnlyStore(closed),
        lambda: move_to_postgres(closed, "postgresql://h/d"),
    ):
        with pytest.raises(
            LedgerUnavailable, match=f"has ledger version {THIS}, and this installation reads"
        ) as refused:
            opens()
        assert refused.value.retry == "after_change"
        assert f"run `x402guard ledger upgrade --ledger {closed}`" in refused.value.advice


def test_a_library_that_has_it_open_stops_once_a_newer_one_has_changed_it(books):
    path, session = books
    reader, opened = ReadOnlyStore(path), session.shell.store
    say(path, f"PRAGMA user_version = {newest() + 1}")
    with pytest.raises(LedgerUnavailable, match="was changed by a newer x402guard"):
        session.charge("serp", "$0.01")
    for use in (session.report, reader.audit, reader.nodes, opened.nodes, lambda: opened.hold("h")):
        with pytest.raises(LedgerUnavailable, match="was changed by a newer x402guard") as refused:
            use()
        assert "Update x402guard here" in refused.value.advice
        assert refused.value.retry == "after_change"
    with pytest.raises(LedgerUnavailable, match="was written by a newer x402guard"):
        ReadOnlyStore(path)
    say(path, f"PRAGMA user_version = {newest()}")
    session.charge("serp", "$0.01")


def test_an_earlier_version_in_place_of_an_open_one_is_named(books):
    path, session = books
    say(path, f"PRAGMA user_version = {newest() - 1}")
    said = f"has ledger version {newest() - 1} now, an earlier one"
    with pytest.raises(LedgerUnavailable, match=said):
        session.charge("serp", "$0.01")
    with pytest.raises(LedgerUnavailable, match=said) as refused:
        session.report()
    assert "Put the newer file back" in refused.value.advice
    say(path, f"PRAGMA user_version = {newest()}")


def test_an_entry_of_no_budget_is_named_at_each_opening(closed):
    columns = "seq, at_ms, event, hold_id, captured, held, granted_in, granted_out, data, previous, hash"
    say(closed, f"INSERT INTO entries SELECT 'stray', {columns} FROM entries WHERE node_id = 's' AND seq = 1")
    for _ in range(2):
        with pytest.raises(LedgerUnavailable, match="budget 'stray': it has journal entries but no row"):
            open_store(f"sqlite:///{closed}")


@pytest.mark.parametrize("column", ["hold_id", "previous", "hash"])
@pytest.mark.parametrize("value", [7, 1.5])
def test_a_number_in_place_of_a_hash_is_a_ledger_that_cannot_be_read(closed, column, value):
    [(trigger,)] = say(closed, "SELECT sql FROM sqlite_master WHERE name = 'entries_are_never_changed'")
    say(
        closed,
        "DROP TRIGGER entries_are_never_changed",
        f"UPDATE entries SET {column} = {value} WHERE event = 'authorize'",
        trigger,
    )
    with pytest.raises(LedgerUnavailable, match="cannot be read: a hash or the id of its hold"):
        open_store(f"sqlite:///{closed}")


def test_hashes_are_stored_as_bytes(closed):
    assert say(closed, "SELECT DISTINCT typeof(hash), length(hash) FROM entries") == [("blob", 32)]
    assert say(closed, "SELECT DISTINCT typeof(previous) FROM entries WHERE seq = 1") == [("text",)]


@pytest.mark.parametrize(
    "value", ["", "h1", "f" * 63, "F" * 64, " " + "f" * 63, "g" * 64, "f" * 66, "é" * 64, "٣" * 64]
)
def test_what_is_no_hash_stays_as_it_is(value):
    assert packed(value) == value
    assert unpacked(packed(value)) == value


def test_a_hash_takes_half_of_its_letters():
    text = "0123456789abcdef" * 4
    assert len(packed(text)) == 32
    assert unpacked(bytes(packed(text))) == text


def test_a_ledger_of_version_1_is_used_as_it_is_and_upgraded_to_what_a_new_one_is(tmp_path, monkeypatch):
    path = tmp_path / "l.db"
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", ())
    sqlite_schema._ours.cache_clear()
    with make_guard(f"sqlite:///{path}") as guard, guard.session("s", budget="$1.00", id="s") as session:
        session.charge("serp", "$0.01")
    monkeypatch.undo()
    sqlite_schema._ours.cache_clear()
    assert version(path) == 1
    indexes = "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    before = say(path, indexes)
    with make_guard(f"sqlite:///{path}") as guard, guard.session("t", budget="$1.00") as session:
        session.charge("serp", "$0.01")
        assert guard.shell.store.audit() == []
    assert (version(path), say(path, indexes)) == (1, before)
    assert typed("ledger", "upgrade", "--ledger", f"sqlite:///{path}", cwd=tmp_path).returncode == 0
    open_store(f"sqlite:///{tmp_path / 'new.db'}").close()
    parts = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
    assert (version(path), say(path, parts)) == (newest(), say(tmp_path / "new.db", parts))
    with make_guard(f"sqlite:///{path}") as guard, guard.session("u", budget="$1.00") as session:
        session.charge("serp", "$0.01")
        assert guard.shell.store.audit() == []


def test_what_was_moved_while_an_upgrade_began_stays_moved(closed, monkeypatch):
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT))
    with closing(open_store(f"sqlite:///{closed}")) as store:
        say(
            closed,
            "CREATE TABLE moved (url TEXT NOT NULL, is_copied INTEGER NOT NULL) STRICT",
            "INSERT INTO moved VALUES ('postgresql:///x', 1)",
            f"PRAGMA user_version = {MOVED}",
        )
        with pytest.raises(LedgerUnavailable, match="was moved to postgresql:///x"):
            store.upgrade()
    assert version(closed) == MOVED


def test_two_upgrades_at_once_take_each_step_once(closed, monkeypatch):
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT, "UPDATE next SET n = n + 1;"))
    stores = [open_store(f"sqlite:///{closed}") for _ in range(2)]
    for store in stores:
        store.upgrade()
        store.close()
    assert version(closed) == THIS + 2
    assert say(closed, "SELECT count(*) FROM next") == [(1,)]

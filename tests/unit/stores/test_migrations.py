"""A ledger of an earlier version is taken over whole; one that a newer library has opened is written by no older one."""

import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import pytest

from tests.support.merchant import make_guard
from x402guard import LedgerUnavailable
from x402guard.frozen import replace
from x402guard.stores import migrations, open_store
from x402guard.stores.migrations import APPLICATION_ID, MIGRATIONS
from x402guard.stores.read_only import ReadOnlyStore
from x402guard.stores.rows import ENTRY_COLUMNS, entry_record, packed, to_entry, unpacked
from x402guard.stores.sql_reads import ENTRIES


@pytest.fixture
def books(tmp_path):
    path = tmp_path / "spend.db"
    with make_guard(f"sqlite:///{path}") as guard, guard.session("s", budget="$1.00") as session:
        session.charge("serp", "$0.01")
        yield path, session


def test_a_library_that_knows_less_of_a_budget_cannot_write_it(books):
    path, session = books
    with sqlite3.connect(path) as old:
        with pytest.raises(sqlite3.IntegrityError, match="a newer x402guard has opened this ledger"):
            old.execute("UPDATE nodes SET held = held + 5, seq = seq + 1 WHERE id = ?", (session.id,))
    old.close()
    session.charge("serp", "$0.01")


def test_a_library_that_has_it_open_stops_once_a_newer_one_has_changed_it(books):
    path, session = books
    with sqlite3.connect(path) as newer:
        newer.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    newer.close()
    with pytest.raises(LedgerUnavailable, match="was changed by a newer x402guard"):
        session.charge("serp", "$0.01")
    with sqlite3.connect(path) as newer:
        newer.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    newer.close()
    session.charge("serp", "$0.01")


TEXTS = 7
"""The last version whose journal has its hashes as text."""


def all_entries(path):
    with sqlite3.connect(path) as read:
        found = [to_entry(row) for row in read.execute(f"{ENTRIES} ORDER BY node_id, seq")]
    read.close()
    return found


def as_before(path, old_path):
    """Write a ledger again as the last version did that had hashes as text."""
    old = sqlite3.connect(old_path)
    for migration in MIGRATIONS[:TEXTS]:
        old.executescript(migration)
    old.execute(f"ATTACH '{path}' AS new")
    for table in ("nodes", "holds", "marks", "generation"):
        names = ", ".join(row[1] for row in old.execute(f"PRAGMA new.table_info({table})"))
        old.execute(f"DELETE FROM main.{table}")
        old.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM new.{table}")
    places = ", ".join("?" * len(ENTRY_COLUMNS))
    old.executemany(f"INSERT INTO main.entries VALUES ({places})", map(entry_record, all_entries(path)))
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    old.execute(f"PRAGMA user_version = {TEXTS}")
    old.commit()
    assert {len(row[0]) for row in old.execute("SELECT hash FROM main.entries")} == {64}
    old.close()


def test_a_journal_with_hashes_as_text_is_taken_over_to_the_last_letter(books, tmp_path):
    path, session = books
    with make_guard(f"sqlite:///{path}") as guard, guard.session("t", budget="$1.00") as other:
        other.charge("serp", "$0.02")
    entries = all_entries(path)
    assert {entry.event for entry in entries} >= {"open", "grant", "authorize", "capture"}
    as_before(path, tmp_path / "old.db")

    store = open_store(f"sqlite:///{tmp_path / 'old.db'}")
    assert all_entries(tmp_path / "old.db") == entries
    assert store.entries(session.id) == [entry for entry in entries if entry.node_id == session.id]
    assert store.audit() == []
    store.close()
    new = sqlite3.connect(tmp_path / "old.db")
    assert {(type(row[0]), len(row[0])) for row in new.execute("SELECT hash FROM entries")} == {(bytes, 32)}
    firsts = "SELECT DISTINCT typeof(previous), length(previous) FROM entries WHERE seq = 1"
    assert new.execute(firsts).fetchall() == [("text", 0)]
    for statement in ("UPDATE entries SET held = 0", "DELETE FROM entries"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            new.execute(statement)
    new.close()


OWN = {
    "view": "CREATE VIEW mine AS SELECT count(*) AS n FROM entries",
    "trigger": "CREATE TRIGGER mine AFTER INSERT ON holds BEGIN SELECT count(*) FROM entries; END",
    "trigger on it": "CREATE TRIGGER mine AFTER INSERT ON entries BEGIN UPDATE fed SET n = n + 1; END",
    "trigger on it, otherwise spelled": "CREATE TRIGGER mine AFTER INSERT ON [Entries] BEGIN UPDATE fed SET n = n + 1; END",
    "index on it": "CREATE INDEX mine ON entries (event)",
    "table": "CREATE TABLE mine (n INTEGER)",
}


@pytest.mark.parametrize("kind", OWN)
def test_what_an_owner_has_added_goes_on(books, tmp_path, kind):
    path, _ = books
    as_before(path, old := tmp_path / "old.db")
    with sqlite3.connect(old) as raw:
        raw.execute("CREATE TABLE fed (n INTEGER)")
        raw.execute("INSERT INTO fed VALUES (0)")
        raw.execute(OWN[kind])
    raw.close()
    with make_guard(f"sqlite:///{old}") as guard, guard.session("t", budget="$1.00") as again:
        again.charge("serp", "$0.01")
    with sqlite3.connect(old) as raw:
        [[sql]] = raw.execute("SELECT sql FROM sqlite_master WHERE name = 'mine'")
        assert sql == OWN[kind]
        assert kind != "view" or raw.execute("SELECT n FROM mine").fetchone()[0] > 8
        fed = raw.execute("SELECT n FROM fed").fetchone()[0]
        assert 0 < fed < 12 if kind.startswith("trigger on it") else fed == 0  # of new ones alone
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    raw.close()


@pytest.mark.parametrize("kind", ["note TEXT", "payee TEXT AS (json_extract(data, '$.payee'))"])
def test_a_column_that_an_owner_has_added_to_the_journal_is_named_and_not_lost(books, tmp_path, kind):
    path, _ = books
    as_before(path, old := tmp_path / "old.db")
    with sqlite3.connect(old) as raw:
        raw.execute(f"ALTER TABLE entries ADD COLUMN {kind}")
    with pytest.raises(
        LedgerUnavailable, match=r"entries has a column '(note|payee)' that x402guard has not"
    ) as caught:
        open_store(f"sqlite:///{old}")
    assert caught.value.retry == "after_change"
    assert raw.execute("PRAGMA user_version").fetchone() == (TEXTS,)
    raw.execute(re.search("ALTER TABLE [^;]*? in sqlite3", str(caught.value.advice))[0].removesuffix(" in sqlite3"))
    raw.close()
    open_store(f"sqlite:///{old}").close()


def test_an_entry_that_is_not_utf8_is_taken_over_as_it_is_and_named_by_the_audit(books, tmp_path):
    path, session = books
    as_before(path, old := tmp_path / "old.db")
    raw = sqlite3.connect(old, isolation_level=None)
    for [name] in raw.execute(
        "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'entries'"
    ).fetchall():
        raw.execute(f"DROP TRIGGER {name}")
    for column, n in (("data", 1), ("hash", 2)):
        raw.execute(
            f"UPDATE entries SET {column} = CAST(x'ff7b7d' AS TEXT) WHERE node_id = ? AND seq = {n}", (session.id,)
        )
    migrations.migrate(raw, TEXTS)
    raw.text_factory = bytes
    [found] = raw.execute("SELECT data, typeof(data) FROM entries WHERE node_id = ? AND seq = 1", (session.id,))
    assert found == (b"\xff{}", b"text")
    raw.close()
    with pytest.raises(LedgerUnavailable, match=r"cannot read|UTF-8|inconsistent"):
        open_store(f"sqlite:///{old}")


def test_an_entry_of_no_budget_is_named_whatever_version_the_ledger_has(books, tmp_path):
    path, _ = books
    as_before(path, old := tmp_path / "old.db")
    stray = replace(all_entries(path)[-1], node_id="stray", seq=1)
    with sqlite3.connect(old) as raw:
        raw.execute(f"INSERT INTO entries VALUES ({', '.join('?' * len(ENTRY_COLUMNS))})", entry_record(stray))
    raw.close()
    for _ in range(2):
        with pytest.raises(LedgerUnavailable, match="budget 'stray': it has journal entries but no row"):
            open_store(f"sqlite:///{old}")


def test_ctrl_c_while_a_ledger_is_taken_over_is_ctrl_c_and_leaves_it_whole(books, tmp_path):
    """A real signal, at many moments: wherever it comes, it is no error of the ledger."""
    path, session = books
    for number in range(300):
        session.charge("serp", "$0.000001", arguments={"n": number})
    as_before(path, old := tmp_path / "old.db")
    entries, ends = all_entries(old), Counter()

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(40):
            shutil.copy(old, copy := tmp_path / f"{number}.db")
            raw = sqlite3.connect(copy, isolation_level=None)
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.0004 * (number + 1))
                migrations.migrate(raw, TEXTS)
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            ends[raw.execute("PRAGMA user_version").fetchone()[0]] += 1
            raw.close()
            assert all_entries(copy) == entries
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ends[TEXTS] >= 3, ends  # or it came too late each time


def test_a_step_that_fails_is_undone_and_the_connection_is_as_before(books, tmp_path, monkeypatch):
    path, _ = books
    as_before(path, old := tmp_path / "old.db")
    monkeypatch.setattr(migrations, "MIGRATIONS", (*MIGRATIONS, "CREATE TABLE half (x); SELECT no_such_function();"))
    raw = sqlite3.connect(old, isolation_level=None)
    with pytest.raises(sqlite3.OperationalError, match="no such function"):
        migrations.migrate(raw, TEXTS)
    assert raw.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)  # the step before is made
    assert raw.execute("SELECT count(*) FROM sqlite_master WHERE name = 'half'").fetchone() == (0,)
    assert raw.execute("PRAGMA foreign_keys").fetchone() == (1,)
    assert raw.execute("PRAGMA legacy_alter_table").fetchone() == (0,)
    raw.close()


def test_an_older_ledger_is_refused_before_it_is_taken_over(books, tmp_path):
    """A backup that was put back by mistake stays what it was."""
    path, session = books
    as_before(path, backup := tmp_path / "old.db")
    before = backup.read_bytes()
    session.charge("serp", "$0.01")
    for name in ("lock", "queue"):
        shutil.copy(f"{path}-{name}", f"{backup}-{name}")
    with pytest.raises(LedgerUnavailable, match="is older than the one that was here: 1 durable commits"):
        open_store(f"sqlite:///{backup}")
    assert backup.read_bytes()[100:] == before[100:]


@pytest.mark.parametrize("version", [2, 3])
def test_a_backup_from_before_commits_were_counted_is_refused_before_it_is_changed(books, tmp_path, version):
    path, _ = books
    for name in ("lock", "queue"):
        shutil.copy(f"{path}-{name}", tmp_path / f"old.db-{name}")
    with sqlite3.connect(tmp_path / "old.db") as raw:
        for step in MIGRATIONS[:version]:
            raw.executescript(step)
        raw.execute(f"PRAGMA application_id = {migrations.APPLICATION_ID}")
        raw.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(LedgerUnavailable, match="is older than the one that was here"):
        open_store(f"sqlite:///{tmp_path / 'old.db'}")
    assert raw.execute("PRAGMA user_version").fetchone() == (version,)
    raw.close()


def test_who_may_only_look_at_an_earlier_ledger_is_told_how_it_is_brought_to_this_version(books, tmp_path):
    path, _ = books
    as_before(path, old := tmp_path / "my old.db")
    with pytest.raises(LedgerUnavailable, match=f"has ledger version {TEXTS}, and this installation reads") as refused:
        ReadOnlyStore(old)
    assert refused.value.retry == "after_change"
    words = shlex.split(re.search("`(.*)`", refused.value.advice)[1])
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True, timeout=60)
    ReadOnlyStore(old).close()


def test_an_earlier_ledger_in_place_of_an_open_one_is_named(books):
    path, session = books
    with sqlite3.connect(path) as raw:
        raw.execute(f"PRAGMA user_version = {TEXTS}")
    with pytest.raises(LedgerUnavailable, match=f"has ledger version {TEXTS} now, an earlier one"):
        session.charge("serp", "$0.01")
    with pytest.raises(LedgerUnavailable, match=f"has ledger version {TEXTS} now, an earlier one") as refused:
        session.report()
    assert "Put the newer file back" in refused.value.advice
    raw.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    raw.close()


@pytest.mark.parametrize("column", ["hold_id", "previous", "hash"])
@pytest.mark.parametrize("value", [7, 1.5])
def test_a_number_in_place_of_a_hash_is_a_ledger_that_cannot_be_read(books, column, value):
    path, _ = books
    with sqlite3.connect(path) as raw:
        raw.execute("DROP TRIGGER entries_are_never_changed")
        raw.execute(f"UPDATE entries SET {column} = ? WHERE event = 'authorize'", (value,))
    raw.close()
    with pytest.raises(LedgerUnavailable, match="cannot be read: a hash or the id of its hold"):
        open_store(f"sqlite:///{path}")


def test_a_process_of_before_does_not_take_a_newer_ledger_for_a_changed_one(books):
    path, session = books
    reader = ReadOnlyStore(path)
    with sqlite3.connect(path) as newer:
        newer.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    newer.close()
    opened = session.shell.store
    for look in (session.report, reader.audit, lambda: reader.nodes(), opened.nodes, lambda: opened.hold("h")):
        with pytest.raises(LedgerUnavailable, match="was changed by a newer x402guard") as refused:
            look()
        assert "Update x402guard here" in refused.value.advice
        assert refused.value.retry == "after_change"
    with pytest.raises(LedgerUnavailable, match="was written by a newer x402guard"):
        ReadOnlyStore(path)
    with sqlite3.connect(path) as newer:
        newer.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    newer.close()


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


def test_a_new_ledger_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    """A full disk left the first five of eight steps, which was taken for a ledger of an older installation."""
    monkeypatch.setattr(migrations, "MIGRATIONS", (*MIGRATIONS[:-1], "SELECT no_such_function();"))
    raw = sqlite3.connect(tmp_path / "l.db", isolation_level=None)
    raw.execute("PRAGMA journal_mode = WAL")
    with pytest.raises(sqlite3.OperationalError, match="no such function"):
        migrations.migrate(raw, 0)
    assert raw.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    raw.close()
    with pytest.raises(LedgerUnavailable, match="was begun and not made") as refused:
        ReadOnlyStore(tmp_path / "l.db")
    assert "--new" in refused.value.advice
    monkeypatch.undo()
    open_store(f"sqlite:///{tmp_path / 'l.db'}").close()

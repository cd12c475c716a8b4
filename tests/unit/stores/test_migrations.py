"""A ledger of an earlier version is taken over whole; one that a newer library has opened is written by no older one."""

import sqlite3

import pytest

from tests.support.merchant import make_guard
from x402guard import LedgerUnavailable
from x402guard.stores import open_store
from x402guard.stores.migrations import MIGRATIONS
from x402guard.stores.rows import ENTRY_COLUMNS, entry_record, packed, to_entry, unpacked
from x402guard.stores.sql_reads import ENTRIES
from x402guard.stores.sqlite import APPLICATION_ID


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
    for statement in ("UPDATE entries SET held = 0", "DELETE FROM entries"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            new.execute(statement)
    new.close()


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

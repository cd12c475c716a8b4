"""A ledger that a newer library has opened is written by no older one, be it open already or opened again."""

import sqlite3

import pytest

from tests.support.merchant import make_guard
from x402guard import LedgerUnavailable
from x402guard.stores.migrations import MIGRATIONS


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

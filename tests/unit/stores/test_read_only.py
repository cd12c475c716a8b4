"""A reader meets a ledger that another process is making, or one that it must not read."""

import sqlite3
from contextlib import closing

import pytest

from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.stores import check_ledger_url, file_errors, open_store, postgres_server
from x402guard.stores.read_only import ReadOnlyStore


@pytest.mark.parametrize("seen", ["a file of one page", "a file beside its -wal"])
def test_a_ledger_that_is_made_while_it_is_looked_at_is_nothing_else(tmp_path, monkeypatch, seen):
    path, made, stores = tmp_path / "ledger.db", [], []

    class Slow(sqlite3.Connection):
        """A connection of a reader: the ledger is made between its first two questions."""

        def execute(self, sql, *values):
            found = super().execute(sql, *values)
            if sql == "PRAGMA application_id" and not made:
                made.append(found.fetchone())
                stores.append(open_store(f"sqlite:///{path}"))
                return Answer(made[0])
            return found

    class Answer:
        def __init__(self, row):
            self.fetchone = lambda: row

    real = sqlite3.connect
    with closing(real(path, isolation_level=None)) as beside:
        beside.execute("PRAGMA journal_mode = WAL")
        if seen == "a file beside its -wal":
            beside.execute("BEGIN IMMEDIATE")
            beside.execute("CREATE TABLE t (x)")
            beside.execute("DROP TABLE t")
            beside.execute("COMMIT")
        else:
            beside.close()
        monkeypatch.setattr(
            "x402guard.stores.read_only.sqlite3.connect",
            lambda *args, **more: real(*args, **more, **({"factory": Slow} if "mode=ro" in str(args[0]) else {})),
        )
        with pytest.raises(LedgerUnavailable) as caught:
            ReadOnlyStore(path)
    assert made == [(0,)]
    words = {"a file of one page": "look again", "a file beside its -wal": "was begun and not made"}
    assert words[seen] in str(caught.value)
    assert caught.value.advice.startswith("Nothing was paid. ")
    monkeypatch.undo()
    stores[0].close()
    ReadOnlyStore(path).close()


def test_a_path_that_leads_nowhere_is_a_mistake_in_the_setting(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="a is a link that leads back to itself"):
        check_ledger_url(f"sqlite:///{tmp_path / 'a'}")
    with pytest.raises(ConfigError, match="'~no-such-user' is no user's home folder"):
        check_ledger_url("sqlite:///~no-such-user/spend.db")
    with pytest.raises(LedgerUnavailable, match="cannot be looked at: File name too long") as caught:
        check_ledger_url(f"sqlite:///{tmp_path / ('x' * 300)}.db")
    assert caught.value.advice == "Nothing was paid. Name another ledger."


def test_what_does_not_pass_by_itself_is_not_to_be_repeated(tmp_path):
    path = tmp_path / "ledger.db"
    for error in (
        file_errors.unsound(path, "why"), file_errors.changed(path), file_errors.gone(path), file_errors.foreign(path),
        postgres_server.rolled_back("postgresql://h/d"),
    ):  # fmt: skip
        assert error.retry == "after_change", error
        assert "Make the ledger writable" not in error.advice, error

"""A64: what acts by itself on a ledger's tables, and is not the ledger's own, refuses it."""

import sqlite3
from contextlib import closing, contextmanager

import psycopg
import pytest

from tests.support.command_line import typed
from tests.support.merchant import make_guard
from x402guard import LedgerUnavailable, Owner

FORGETS = (
    "CREATE TRIGGER evil AFTER UPDATE ON nodes WHEN NEW.captured > 0 BEGIN "
    "UPDATE nodes SET captured = 0, held = 0, live = 0, granted_out = 0 WHERE id = NEW.id; END"
)
STRANGE = {
    "a trigger": (FORGETS, "it has a trigger 'evil'"),
    "a trigger of marks": (
        "CREATE TRIGGER evil AFTER INSERT ON marks BEGIN DELETE FROM marks WHERE kind = NEW.kind; END",
        "it has a trigger 'evil'",
    ),
    "a view": ("CREATE VIEW evil AS SELECT * FROM nodes", "it has a view 'evil'"),
    "one that is gone": (
        "DROP TRIGGER what_the_wallet_has_spent_never_falls",
        "its trigger 'what_the_wallet_has_spent_never_falls' is gone, or another one",
    ),
    "one that is another": (
        """DROP TRIGGER entries_are_never_changed;
        CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries BEGIN SELECT 1; END""",
        "it has a trigger 'entries_are_never_changed'",
    ),
    "a table without its checks": (
        "CREATE TABLE other AS SELECT * FROM holds; PRAGMA foreign_keys = OFF; DROP TABLE holds; ALTER TABLE other RENAME TO holds",
        "its index 'by_purchase' is gone, or another one",
    ),
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "spend.db"
    with make_guard(f"sqlite:///{path}") as guard, guard.session("run", budget="$1.00") as session:
        session.charge("search", "$0.01")
    return path


def change(path, sql):
    with closing(sqlite3.connect(path)) as file:
        file.executescript(sql)


@pytest.mark.parametrize("name", STRANGE)
def test_a64_a_file_that_acts_by_itself_is_refused_and_verify_says_so(path, name):
    sql, says = STRANGE[name]
    change(path, sql)
    with pytest.raises(LedgerUnavailable, match=says):
        make_guard(f"sqlite:///{path}")
    with pytest.raises(LedgerUnavailable, match=says):
        Owner(path, read_only=True)
    done = typed("verify", "--ledger", path, cwd=path.parent)
    assert done.returncode == 1
    assert says in done.stdout + done.stderr


def test_a64_the_type_of_a_part_is_read_in_any_case_by_sqlite_alone(path):
    sql = "CREATE TRIGGER evil AFTER INSERT ON marks BEGIN DELETE FROM marks WHERE kind = NEW.kind; END"
    change(
        path,
        "PRAGMA writable_schema = ON; INSERT INTO sqlite_master (type, name, tbl_name, rootpage, sql) "
        f"VALUES ('Trigger', 'evil', 'marks', 0, '{sql}')",
    )
    with pytest.raises(LedgerUnavailable, match="it has a Trigger 'evil'"):
        make_guard(f"sqlite:///{path}")


def test_a64_an_index_or_a_table_of_its_owner_stays(path):
    change(path, "CREATE INDEX mine ON entries (at_ms); CREATE TABLE notes (text TEXT)")
    with make_guard(f"sqlite:///{path}") as guard, guard.session("run", budget="$1.00") as session:
        session.charge("search", "$0.01")
    with Owner(path) as owner:
        assert owner.verify() == []
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('mine', 'notes')").fetchone() == (2,)


ON_A_SERVER = {
    "a trigger": (
        """CREATE FUNCTION x402guard.evil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
        CREATE TRIGGER evil BEFORE INSERT ON x402guard.holds FOR EACH ROW EXECUTE FUNCTION x402guard.evil()""",
        "DROP TRIGGER evil ON x402guard.holds; DROP FUNCTION x402guard.evil()",
        "it has a function 'evil', which is not the ledger's",
    ),
    "a rule": (
        "CREATE RULE evil AS ON DELETE TO x402guard.marks DO INSTEAD NOTHING", "DROP RULE evil ON x402guard.marks",
        "it has a rule 'marks.evil', which is not the ledger's",
    ),
    "a view": (
        "CREATE VIEW x402guard.evil AS SELECT 1", "DROP VIEW x402guard.evil",
        "it has a rule 'evil._RETURN', which is not the ledger's",
    ),
    "one that runs another function": (
        """CREATE FUNCTION x402guard.evil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
        DROP TRIGGER entries_are_never_changed ON x402guard.entries;
        CREATE TRIGGER entries_are_never_changed BEFORE UPDATE OR DELETE ON x402guard.entries
        FOR EACH ROW EXECUTE FUNCTION x402guard.evil()""",
        """DROP TRIGGER entries_are_never_changed ON x402guard.entries;
        CREATE TRIGGER entries_are_never_changed BEFORE UPDATE OR DELETE ON x402guard.entries
        FOR EACH ROW EXECUTE FUNCTION x402guard.refuse_change(); DROP FUNCTION x402guard.evil()""",
        "it has a function 'evil', which is not the ledger's",
    ),
    "row security": (
        "ALTER TABLE x402guard.marks ENABLE ROW LEVEL SECURITY", "ALTER TABLE x402guard.marks DISABLE ROW LEVEL SECURITY",
        "it has a row security 'marks', which is not the ledger's",
    ),
    "one that is off": (
        "ALTER TABLE x402guard.entries DISABLE TRIGGER entries_are_never_changed",
        "ALTER TABLE x402guard.entries ENABLE TRIGGER entries_are_never_changed",
        "it has a trigger 'entries.entries_are_never_changed', which is not the ledger's",
    ),
}  # fmt: skip


@contextmanager
def changed(url, sql, back):
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql)
        try:
            yield
        finally:
            connection.execute(back)


@pytest.mark.xdist_group("postgres")
@pytest.mark.parametrize("name", ON_A_SERVER)
def test_a64_a_server_that_acts_by_itself_is_refused_and_verify_says_so(url, name):
    with make_guard(url) as guard, guard.session("run", budget="$1.00") as session:
        session.charge("search", "$0.01")
    sql, back, says = ON_A_SERVER[name]
    with Owner(url, read_only=True) as owner, changed(url, sql, back):
        assert says in owner.verify()
        with pytest.raises(LedgerUnavailable, match=says):
            make_guard(url)
    make_guard(url).close()


@pytest.mark.xdist_group("postgres")
def test_a64_the_body_of_a_function_is_the_ledgers(url):
    make_guard(url).close()
    with psycopg.connect(url, autocommit=True) as connection:
        [(made,)] = connection.execute("SELECT pg_get_functiondef('x402guard.refuse_change'::regproc)").fetchall()
        connection.execute(
            "CREATE OR REPLACE FUNCTION x402guard.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$"
        )
        try:
            with pytest.raises(LedgerUnavailable, match="it has a function 'refuse_change', which is not the ledger's"):
                make_guard(url)
        finally:
            connection.execute(made)
    make_guard(url).close()

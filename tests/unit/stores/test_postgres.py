"""What is particular to a ledger in PostgreSQL: where it may be, who may use it, and what is said where it cannot be used."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from tests.support import postgres, processes
from tests.support.command_line import typed
from tests.support.ledger import Books, usd
from tests.support.merchant import Shop, client, make_guard
from x402guard import ConfigError, Guard, LedgerUnavailable
from x402guard.guard.owner import Owner
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.token_budget import open_tokens, tokens_node
from x402guard.ledger.view import Scope
from x402guard.stores import ledger_exists, open_store, postgres_schema, postgres_server
from x402guard.stores.moving import upgrade_postgres
from x402guard.stores.postgres_schema import MIGRATIONS, TABLES, VERSION, functions
from x402guard.stores.postgres_server import as_unavailable
from x402guard.stores.rows import NODE_COLUMNS

pytestmark = pytest.mark.xdist_group("postgres")


@pytest.fixture
def fresh():
    """A database of its own, which has never had a ledger; and what is said in it as its owner."""
    folder, name = postgres.server(), f"fresh{os.getpid()}"
    with psycopg.connect(postgres.url(folder, "postgres"), autocommit=True) as server:
        server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        server.execute(f"CREATE DATABASE {name}")
        with psycopg.connect(postgres.url(folder, name), autocommit=True) as inside:
            yield postgres.url(folder, name), inside.execute
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


SAYS = {
    "a password": ("postgresql://agent:hunter2@db.example/spend", "holds a password", ConfigError),
    "a password as an option": (
        "postgresql://agent@db.example/spend?password=hunter2",
        "holds a password",
        ConfigError,
    ),
    "a password with a slash": (
        "postgresql://agent:hun/ter2@db.example/spend",
        "holds a password|cannot read",
        ConfigError,
    ),
    "a password with a question mark": (
        "postgresql://agent:hun?ter2@db.example/spend",
        "holds a password|cannot read",
        ConfigError,
    ),
    "a password with a hash": (
        "postgresql://agent:hun#ter2@db.example/spend",
        "holds a password|cannot read",
        ConfigError,
    ),
    "an escaped name": (
        "postgresql://agent@db.example/spend?pass%77ord=hunter2",
        "holds a password|cannot read",
        ConfigError,
    ),
    "an unknown option": ("postgresql://agent@db.example/spend?Password=hunter2", "cannot read", ConfigError),
    "a bracket": ("postgresql://agent@[db.example/spend", "cannot read", ConfigError),
    "no database": ("postgresql://agent@db.example", "names no database", ConfigError),
    "no server": ("postgresql:///spend?host=/nowhere", "/nowhere", LedgerUnavailable),
}


@pytest.mark.parametrize("what", SAYS)
def test_a_url_that_cannot_be_used_says_why_and_shows_no_password(what):
    url, says, kind = SAYS[what]
    with pytest.raises(kind, match=says) as caught:
        open_store(url)
    said = str(caught.value) + repr(caught.value) + str(caught.value.__cause__)
    assert "hun" not in said
    assert "ter2" not in said


def test_a_database_that_does_not_exist_is_named_with_its_fix(url):
    with pytest.raises(LedgerUnavailable, match='database "nothing" does not exist') as caught:
        open_store(postgres.url(postgres.server(), "nothing"))
    assert (caught.value.retry, caught.value.advice) == (
        "after_change", "Nothing was paid. Create the database once, with createdb."
    )  # fmt: skip


SAYS_AT_ONCE = {
    "the database system is starting up": ("later", "Bring the ledger's server back"),
    "the database system is shutting down": ("later", "Bring the ledger's server back"),
    "the database system is in recovery mode": ("later", "Bring the ledger's server back"),
    "the database system is not yet accepting connections": ("later", "Bring the ledger's server back"),
    'database "spend" is not currently accepting connections': ("later", "Bring the ledger's server back"),
    'too many connections for database "spend"': ("later", "max_connections"),
    'too many connections for role "agents"': ("later", "max_connections"),
    "sorry, too many clients already": ("later", "max_connections"),
    "remaining connection slots are reserved for roles with the SUPERUSER attribute": ("later", "max_connections"),
    'password authentication failed for user "agents"': ("after_change", "password"),
    'no pg_hba.conf entry for host "10.0.0.1", user "agents"': ("after_change", "pg_hba.conf"),
    'role "agents" does not exist': ("after_change", "CREATE ROLE agents LOGIN"),
    'role "agents" is not permitted to log in': ("after_change", "CREATE ROLE agents LOGIN"),
    'permission denied for database "spend"': ("after_change", "grants this role"),
    'database "spend" does not exist': ("after_change", "createdb"),
    "no such database: spend": ("after_change", "createdb"),
    'die Datenbank "spend" existiert nicht': ("later", "Bring the ledger's server back"),
}


@pytest.mark.parametrize("said", SAYS_AT_ONCE)
def test_a_refused_connection_says_whether_it_ends_by_itself(said):
    before = 'connection failed: connection to server at "db.example", port 5432 failed: FATAL:  '
    error = as_unavailable(
        "cannot open the ledger", "postgresql://db.example/spend", psycopg.OperationalError(before + said)
    )
    assert error.retry == SAYS_AT_ONCE[said][0]
    assert SAYS_AT_ONCE[said][1] in error.advice


def test_the_environment_says_nothing_about_how_text_is_sent(url, monkeypatch):
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    store = open_store(url)
    key = ("test", "名前 ✓")
    store.transact(Scope(marks=(key,)), lambda view: view.put_mark(key, {"said": "été ✓"}))
    assert store.marks("test", "") == {"名前 ✓": {"said": "été ✓"}}
    store.close()


def test_a_replica_that_restarts_is_one_by_its_slot_and_a_backup_is_none(url):
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("SELECT pg_create_physical_replication_slot('standby')")
        try:
            store = open_store(url)
            assert store.may_lose_commits
            store.close()
        finally:
            owner.execute("SELECT pg_drop_replication_slot('standby')")
    store = open_store(url)
    assert not store.may_lose_commits
    store.close()


def test_a_ledger_is_made_once_by_all_who_open_it_at_the_same_time(fresh):
    url, say = fresh
    assert not ledger_exists(url)
    opens = "import sys; from x402guard.stores import open_store; open_store(sys.argv[1]).close()"
    started = [processes.start(opens, url) for _ in range(6)]
    assert [each.communicate()[1] for each in started] == [""] * 6
    assert ledger_exists(url)
    assert say("SELECT count(*), max(version) FROM x402guard.about").fetchone() == (1, VERSION)


def test_who_waits_while_another_makes_the_ledger_sees_that_it_is_made(fresh):
    url, say = fresh
    with psycopg.connect(url) as other, ThreadPoolExecutor() as pool:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('x402guard migrations', 0))")
        opens = pool.submit(lambda: open_store(url).close())
        waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        while not opens.done() and say(waits).fetchone() == (0,):
            time.sleep(0.01)
        other.execute(f"{TABLES} UPDATE x402guard.about SET version = {VERSION}; {functions(VERSION)}")
        other.commit()
        opens.result()
    assert say("SELECT version FROM x402guard.about").fetchone() == (VERSION,)


def test_a_ledger_is_taken_to_a_next_version_once_by_its_owner_with_the_functions_of_that_one(
    fresh, monkeypatch, tmp_path
):
    url, say = fresh
    books = Books(url)
    books.hold("h", "$0.01")
    before = books.store.entries("s")
    monkeypatch.setattr(postgres_server, "MIGRATIONS", (*MIGRATIONS, "CREATE TABLE x402guard.next (n integer);"))
    for room in (postgres_server, postgres_schema):
        monkeypatch.setattr(room, "VERSION", VERSION + 1)
    with pytest.raises(LedgerUnavailable, match="its owner upgrades it") as caught:
        open_store(url)
    assert "x402guard ledger upgrade" in caught.value.advice
    with make_guard(books.store):  # one of before, that lives
        refused = typed("ledger", "upgrade", "--ledger", url, cwd=tmp_path)
        assert (refused.returncode, "do not read version" in refused.stderr) == (2, True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: upgrade_postgres(url), range(3)))
    assert (
        f"has ledger version {VERSION + 1} already" in typed("ledger", "upgrade", "--ledger", url, cwd=tmp_path).stdout
    )
    store = open_store(url)
    assert (store.entries("s"), store.audit()) == (before, [])
    store.close()
    assert say("SELECT version, to_regclass('x402guard.next') IS NOT NULL FROM x402guard.about").fetchone() == (
        VERSION + 1,
        True,
    )
    made = (
        "SELECT proname FROM pg_proc WHERE pronamespace = 'x402guard'::regnamespace AND proname ~ '_[0-9]+$' ORDER BY 1"
    )
    assert [name for [name] in say(made)] == [f"{name}_{VERSION + 1}" for name in ("is_written", "load", "write")]
    monkeypatch.undo()
    with pytest.raises(LedgerUnavailable, match=f"(load|write)_{VERSION}") as caught:  # by who has had it open
        books.hold("h2", "$0.01")
    assert "Update this installation" in caught.value.advice
    books.close()
    with pytest.raises(LedgerUnavailable, match=f"was written by a newer x402guard \\(ledger version {VERSION + 1}\\)"):
        open_store(url)


@pytest.mark.parametrize("command", ["verify", "report s", "sessions", "budget set wallet 5"])
def test_a_ledger_of_before_the_first_release_is_refused_in_words_and_left_as_it_is(fresh, command, tmp_path):
    url, say = fresh
    say("CREATE SCHEMA x402guard; CREATE TABLE x402guard.ledger (version integer)")
    done = typed(*command.split(), "--ledger", url, cwd=tmp_path)
    said, advice = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert said == (
        f"x402guard: {url} has the ledger of an earlier x402guard, which was never released; this one does not read it"
    )
    assert "Keep that database, and read it with the version that made it. Name another database" in advice
    doctor = typed("doctor", "--ledger", url, cwd=tmp_path)
    [found] = [line for line in doctor.stdout.splitlines() if "which was never released" in line]
    assert (doctor.returncode, found.startswith("PROBLEM  ledger")) == (1, True)
    assert say("SELECT count(*) FROM pg_tables WHERE schemaname = 'x402guard'").fetchone() == (1,)


def test_a_schema_of_another_program_is_left_alone(fresh):
    url, say = fresh
    say("CREATE SCHEMA x402guard; CREATE TABLE x402guard.photos (name text)")
    with pytest.raises(LedgerUnavailable, match="a schema x402guard that is no ledger"):
        open_store(url)
    assert say("SELECT count(*) FROM pg_tables WHERE schemaname = 'x402guard'").fetchone() == (1,)


def test_a_ledger_that_was_replaced_while_it_was_open_is_refused(fresh):
    url, say = fresh
    books = Books(url)
    say("DROP SCHEMA x402guard CASCADE")
    open_store(url).close()
    with pytest.raises(LedgerUnavailable, match="is another ledger than the one that was opened") as caught:
        books.hold("h", "$0.01")
    assert caught.value.retry == "after_change"
    with pytest.raises(LedgerUnavailable, match="is another ledger"):
        books.store._reader.close(), books.store.nodes()
    books.close()


def test_a_server_that_takes_no_writes_refuses_and_pays_afterwards(fresh):
    url, say = fresh
    books = Books(url)
    [name] = say("SELECT current_database()").fetchone()
    say(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    books.store._writer.close()
    with pytest.raises(LedgerUnavailable, match="read-only transaction") as caught:
        books.hold("h", "$0.01")
    assert "primary server" in caught.value.advice
    say(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    books.store._writer.close()
    assert not isinstance(books.hold("h", "$0.01"), Refusal)
    books.close()


def test_a_role_without_rights_is_refused_and_one_that_reads_can_report_and_change_nothing(fresh):
    url, say = fresh
    Books(url).close()
    say("DROP ROLE IF EXISTS reporter; CREATE ROLE reporter LOGIN")
    try:
        theirs = url.replace("owner@", "reporter@")
        with pytest.raises(LedgerUnavailable, match="permission denied") as caught:
            open_store(theirs)
        assert "grants this role the schema x402guard" in caught.value.advice
        say("GRANT USAGE ON SCHEMA x402guard TO reporter; GRANT SELECT ON ALL TABLES IN SCHEMA x402guard TO reporter")
        store = open_store(theirs, read_only=True)
        assert [node.id for node in store.nodes()] == ["wallet", "s"]
        assert store.audit() == []
        with pytest.raises(LedgerUnavailable, match="read only"):
            Books.change(_Of(store), lambda view: None)
        store.close()
        books = open_store(theirs)
        with pytest.raises(LedgerUnavailable, match="permission denied"):
            Books.change(_Of(books), lambda view: view.put_mark(("test", "x"), {}), marks=(("test", "x"),))
        books.close()
    finally:
        say("DROP OWNED BY reporter; DROP ROLE reporter")


_COLUMNS = ", ".join(NODE_COLUMNS).replace("window", '"window"')
_COPIED = f"INSERT INTO x402guard.nodes ({_COLUMNS}) SELECT {_COLUMNS} FROM x402guard.nodes WHERE id = 'a'"
_AS_B = _COPIED.replace("SELECT id, parent_id", "SELECT 'b', 'c'")
REBUILT = (
    "UPDATE x402guard.nodes SET parent_id = NULL WHERE id = 'a'",
    "UPDATE x402guard.nodes SET parent_id = 'a/tokens' WHERE id = 'a'",
    "UPDATE x402guard.nodes SET kind = 'tokens' WHERE id = 'a'",
    "UPDATE x402guard.nodes SET id = 'gone' WHERE id = 'a'",
    "UPDATE x402guard.nodes SET name = 'gone' WHERE id = 'a'",
    "UPDATE x402guard.nodes SET past = 9000000000 WHERE id = 'wallet'",
    'UPDATE x402guard.nodes SET "window" = \'["day", "UTC"]\', past = 9000000000 WHERE id = \'wallet\'',
    _COPIED.replace("SELECT id, parent_id", "SELECT 'b', NULL"),
    _COPIED.replace("SELECT id, parent_id", "SELECT 'b', 'b'"),
    _COPIED.replace("SELECT id, parent_id", "SELECT 'b', 'a/tokens'"),
    _COPIED.replace("SELECT id, parent_id, kind", "SELECT 'wallet2', NULL, 'wallet'"),
    f"WITH b AS ({_AS_B}) " + _COPIED.replace("SELECT id, parent_id", "SELECT 'c', 'b'"),
)
"""Ways by which a session would spend what is not the wallet's, or the wallet more than its limit."""


@pytest.mark.parametrize("read_only", [False, True])
def test_who_may_not_bring_a_ledger_to_this_version_is_told_who_does(fresh, read_only):
    url, say = fresh
    Books(url).close()
    say("DROP ROLE IF EXISTS agents; CREATE ROLE agents LOGIN; GRANT USAGE ON SCHEMA x402guard TO agents")
    say("GRANT SELECT ON ALL TABLES IN SCHEMA x402guard TO agents; UPDATE x402guard.about SET version = version - 1")
    try:
        with pytest.raises(
            LedgerUnavailable, match=f"has ledger version {VERSION - 1}, .* its owner upgrades it"
        ) as told:
            open_store(url.replace("owner@", "agents@"), read_only=read_only)
        assert "The role that made the ledger runs `x402guard ledger upgrade`" in told.value.advice
    finally:
        say("DROP OWNED BY agents; DROP ROLE agents")


def test_agents_pay_and_alter_no_limit_by_whatever_way(fresh):
    """With the rights of the page about a fleet, as they stand there."""
    url, say = fresh
    Guard(ledger=url, budget="$5.00").close()
    page = (Path(__file__).parents[3] / "docs/how-to/a-fleet.md").read_text()
    [rights] = [block for block in re.findall(r"```sql\n(.*?)```", page, re.DOTALL) if "GRANT" in block]
    say("DROP ROLE IF EXISTS agents")
    say(rights)
    say("ALTER ROLE agents LOGIN")
    theirs = url.replace("owner@", "agents@")
    try:
        with (
            make_guard(theirs) as guard,
            guard.session("a", budget="$1.00", id="a") as session,
            client(session, Shop()) as http,
        ):
            http.get("https://courts.example/1")
            assert session.spent > 0
        with (
            Owner(theirs) as owner,
            pytest.raises(LedgerUnavailable, match="only the owner of the ledger raises a limit"),
        ):
            owner.set_budget("wallet", "$50.00")
        with psycopg.connect(theirs, autocommit=True) as agent:
            agent.execute(
                "CREATE TEMP TABLE pg_namespace AS SELECT 'x402guard'::name AS nspname, oid AS nspowner FROM pg_roles "
                "WHERE rolname = current_user; CREATE TEMP TABLE nodes AS SELECT * FROM x402guard.nodes"
            )
            for attempt in (
                *REBUILT,
                "UPDATE x402guard.nodes SET max_nanos = max_nanos * 2 WHERE id = 'wallet'",
                "UPDATE x402guard.nodes SET max_nanos = NULL WHERE id = 'wallet'",
                "DELETE FROM x402guard.nodes WHERE id = 'wallet'",
                "UPDATE x402guard.entries SET held = 0",
                "INSERT INTO x402guard.archived VALUES ('wallet', 1, 'file', '{}', 0)",
                "ALTER TABLE x402guard.nodes DISABLE TRIGGER ALL",
                "SET session_replication_role = replica",
                "CREATE OR REPLACE FUNCTION x402guard.refuse_limit() RETURNS trigger LANGUAGE sql AS 'SELECT NULL'",
                "DROP TABLE x402guard.nodes",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    agent.execute(attempt)
        with Owner(url) as owner:
            owner.set_budget("wallet", "$50.00")
            assert owner.verify() == []
    finally:
        say("DROP OWNED BY agents; DROP ROLE agents")


class _Of:
    def __init__(self, store):
        self.store = store


def test_the_journal_takes_no_change_and_verify_finds_a_changed_row(url, capsys):
    books = Books(url)
    books.hold("h", "$0.10")
    with psycopg.connect(url, autocommit=True) as say:
        for change in (
            "UPDATE x402guard.entries SET held = 0",
            "DELETE FROM x402guard.entries",
            "TRUNCATE x402guard.entries",
        ):
            with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
                say.execute(change)
        with Owner(url) as owner:
            assert owner.verify() == []
            say.execute("UPDATE x402guard.nodes SET held = 0 WHERE id = 's'")
            [problem, *_] = owner.verify()
    assert "s" in problem
    books.close()


def test_a_number_that_a_column_does_not_take_fails_alone(url):
    books, much, tokens = Books(url, session=None), 2**62, tokens_node("t")
    books.change(lambda view: open_tokens(view, tokens, 1_000, "t"), nodes=(tokens,))
    with pytest.raises(LedgerUnavailable, match="out of range"):
        books.change(lambda view: [view.record(tokens, "test", captured=much) for _ in range(2)], nodes=(tokens,))
    books.open("s", "$1.00")
    assert books.node().limit == usd("$1.00")
    books.close()


def test_the_command_line_and_the_guard_work_on_it(fresh, tmp_path):
    url, _ = fresh

    def x402guard(*given):
        return typed(*given, cwd=tmp_path, X402GUARD_LEDGER=url)

    nothing = x402guard("sessions")
    assert (nothing.returncode, f"no ledger yet at {url}" in nothing.stderr) == (2, True), nothing
    assert x402guard("budget", "set", "wallet", "20.00", "--new").returncode == 0
    with Guard(ledger=url) as guard, guard.session("research", budget="$5.00") as session:
        session.charge("search", "$0.10")
    for command in (("sessions",), ("verify",), ("report", "research"), ("doctor",)):
        done = x402guard(*command)
        assert done.returncode == 0, done
    again = x402guard("budget", "set", "wallet", "20.00", "--new")
    assert (again.returncode, "already exists" in again.stderr) == (2, True), again


def test_whose_clock_is_accepted_is_said(url, tmp_path):
    Books(url).close()
    said = typed("ledger", "clock", "--ledger", url, cwd=tmp_path).stdout
    assert said.startswith("the ledger's server: ")
    assert "\nthis machine: " in said
    assert (
        "the clock of the ledger's server is accepted"
        in typed("ledger", "clock", "--accept", "--ledger", url, cwd=tmp_path).stdout
    )


def test_rows_that_another_connection_has_locked_are_told_as_that(url, tmp_path):
    Books(url).close()
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE x402guard.nodes")
        done = typed("sessions", "--ledger", url, cwd=tmp_path)
    assert (done.returncode, "Another connection has locked a part of the ledger" in done.stderr) == (2, True), done


def test_an_id_that_no_hold_can_have_is_refused(url):
    Books(url).close()
    for odd in ("\udcff\udc00", "ｈ1", "é"):
        with Owner(url) as owner, pytest.raises(ConfigError, match="is no id of a hold"):
            owner.forgive(odd)

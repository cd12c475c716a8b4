"""A PostgreSQL server for the whole test run, started by the first test that asks, as an ordinary user, on a socket of its own."""

import fcntl
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

FOLDER = "TEST_POSTGRES_FOLDER"
DEBIANS = Path("/usr/lib/postgresql")
SETTINGS = {
    "listen_addresses": "",
    "max_connections": "300",
    "shared_buffers": "128MB",
    "fsync": "off",  # what a power cut leaves is not shown here
    "full_page_writes": "off",
    "log_min_messages": "fatal",
}


def programs():
    """The folder with initdb and postgres, or None."""
    found = sorted(DEBIANS.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else (Path(on_path).parent if on_path else None)


def make_folder():
    """Called once, by the process that runs the whole: the place of a server that has not been started yet."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="pg-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        return True
    return False


def remove_folder():
    folder = Path(os.environ.pop(FOLDER))
    if (folder / "data/postmaster.pid").exists():
        stop(folder, "immediate")
    shutil.rmtree(folder, ignore_errors=True)


def as_user():
    """Arguments for a process as an ordinary user: the server refuses root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise LookupError("no ordinary user to start PostgreSQL as")


def make_cluster(folder):
    owner = as_user()
    if owner:
        os.chown(folder, owner["user"], owner["group"])
    command = [
        "initdb",
        "-D",
        folder / "data",
        "-U",
        "owner",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--locale=C.UTF-8",
        "--no-sync",
    ]
    subprocess.run(
        [programs() / command[0], *command[1:]], check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=60, **owner
    )


def start(folder, **more):
    """Start the server of a folder, and wait until it answers."""
    folder.chmod(0o711)
    given = [
        f"-c {name}={value or repr(value)}"
        for name, value in {**SETTINGS, "unix_socket_directories": folder, **more}.items()
    ]
    _control(folder, "start", "-w", "-l", folder / "data/log", "-o", " ".join(given))


def stop(folder, how="fast"):
    """End the server; ``immediate`` is as if it had crashed."""
    _control(folder, "stop", "-w", "-m", how)


def _control(folder, *given):
    done = subprocess.run(
        [programs() / "pg_ctl", "-D", folder / "data", *given],
        check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, timeout=60, **as_user(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@contextmanager
def a_folder():
    """A folder that another user may enter; pytest takes that right from its own ones, whenever another run begins."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy(folder, to):
    """Make a streaming replica of the server of a folder."""
    owner = as_user()
    if owner:
        os.chown(to, owner["user"], owner["group"])
    command = ["pg_basebackup", "-h", folder, "-U", "owner", "-D", to / "data", "-R", "-c", "fast", "--no-sync"]
    subprocess.run([programs() / command[0], *command[1:]], check=True, cwd=to, timeout=60, **owner)


def say(folder, sql, until=None):
    """Say one statement to a server; with *until*, again until that is its answer."""
    with psycopg.connect(url(folder, "postgres"), autocommit=True) as connection:
        for _ in range(400):
            cursor = connection.execute(sql)
            found = cursor.fetchone() if cursor.description else None
            if until is None or found == until:
                return found
            time.sleep(0.02)
    raise TimeoutError(f"{sql}: {found}")


def catch_up(second, first):
    """Wait until a replica has played all that its primary server has written so far."""
    (written,) = say(first, "SELECT pg_current_wal_lsn()")
    say(second, f"SELECT pg_last_wal_replay_lsn() >= '{written}'", until=(True,))


@contextmanager
def _locked(folder):
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def server():
    """The folder of the running server of this test run; skips where there is none to be had."""
    if programs() is None:
        if os.environ.get("REQUIRE_POSTGRES"):
            pytest.fail("REQUIRE_POSTGRES is set, and there is no PostgreSQL server: apt-get install postgresql")
        pytest.skip("no PostgreSQL server is installed: apt-get install postgresql")
    folder = Path(os.environ[FOLDER])
    with _locked(folder):
        if not (folder / "data").exists():
            make_cluster(folder)
            start(folder)
    return folder


def url(folder, database):
    return f"postgresql://owner@/{database}?host={folder}"


# Ten times as fast as to drop the schema and to make it anew. A replica's role, because the journal is append-only.
EMPTY = "SET session_replication_role = replica; " + "".join(
    f"DELETE FROM x402guard.{table}; " for table in ("nodes", "holds", "entries", "marks", "archived")
)


def empty_database():
    """The URL of this process's database, whose ledger is empty."""
    folder = server()
    name = f"w{os.getpid()}"
    with psycopg.connect(url(folder, "postgres"), autocommit=True) as connection:
        if connection.execute("SELECT FROM pg_database WHERE datname = %s", (name,)).fetchone() is None:
            connection.execute(f"CREATE DATABASE {name}")
    with psycopg.connect(url(folder, name), autocommit=True) as connection:
        if connection.execute("SELECT to_regclass('x402guard.about') IS NOT NULL").fetchone()[0]:
            connection.execute(EMPTY)
    return url(folder, name)


TABLES = ("nodes", "holds", "entries", "marks", "archived")


@contextmanager
def _as_replica(url):
    with psycopg.connect(url) as connection:
        connection.execute("SET session_replication_role = replica")
        yield connection


def cut(url):
    """End each connection to the ledger, as a restart does."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'x402guard' "
            "AND datname = current_database()"
        )


def keep_copy(url, name="older"):
    """Keep what the ledger of a database has now, for ``lose_since``."""
    with _as_replica(url) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE; CREATE SCHEMA {name}")
        for table in TABLES:
            connection.execute(f"CREATE TABLE {name}.{table} AS TABLE x402guard.{table}")


def lose_since(url, name="older"):
    """Let the ledger be as it was at ``keep_copy``, as on a replica that takes over without what came since."""
    with _as_replica(url) as connection:
        for table in TABLES:
            connection.execute(
                f"DELETE FROM x402guard.{table}; "
                f"INSERT INTO x402guard.{table} OVERRIDING SYSTEM VALUE SELECT * FROM {name}.{table}"
            )

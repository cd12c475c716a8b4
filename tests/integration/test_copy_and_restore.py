"""A ledger in a file is copied whole while it is used; one that is lost is restored from any copy, an empty one too."""

import json
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from decimal import Decimal

import pytest

from tests.support.command_line import typed
from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, ConfigError, LedgerUnavailable, Owner, SessionTripped
from x402guard.stores.file_lock import noted_generation
from x402guard.stores.read_only import ReadOnlyStore

_AGENT = """
import os, sys, time
from x402guard import Guard
guard = Guard(ledger=sys.argv[1])
session = guard.session("a", budget="$1.00", id="job-1")
for n in range(5):
    session.charge("x", "$0.10", arguments={"n": n})
print("ready", flush=True)
sys.stdin.read()
os._exit(9)
"""


@pytest.fixture
def lost(tmp_path):
    """A ledger that an agent had used for half a dollar when its machine failed, and the copy that `cp` has made of it."""
    path, copy = tmp_path / "spend.db", tmp_path / "cp.db"
    command = [sys.executable, "-c", _AGENT, f"sqlite:///{path}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as agent:
        assert agent.stdout.readline() == b"ready\n"
        shutil.copy(path, copy)
        agent.stdin.close()
    return path, copy


def remove_database(path):
    for name in ("", "-wal", "-shm"):
        path.with_name(f"{path.name}{name}").unlink(missing_ok=True)


def test_an_empty_copy_is_a_finding_and_stays_as_it_is(lost, tmp_path):
    _, copy = lost
    before = copy.read_bytes()
    for more in ((), ("--json",)):
        done = typed("verify", "--ledger", f"sqlite:///{copy}", *more, cwd=tmp_path)
        assert (done.returncode, "copy without its -wal file" in done.stdout) == (1, True)
    for command in ("sessions", "report wallet"):
        done = typed(*command.split(), "--ledger", f"sqlite:///{copy}", cwd=tmp_path)
        assert (done.returncode, "x402guard ledger copy FILE" in done.stderr) == (2, True)
    assert copy.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("cp.db")} == {"cp.db"}


def test_a_ledger_is_restored_from_an_empty_copy_in_words(lost, tmp_path):
    path, copy = lost
    url = f"sqlite:///{path}"
    remove_database(path)
    shutil.copy(copy, path)
    refused = typed("sessions", "--ledger", url, cwd=tmp_path)
    assert (refused.returncode, "ledger restore --accept-older" in refused.stderr) == (2, True)
    with pytest.raises(LedgerUnavailable, match="has nothing in it, and one was here"):
        make_guard(url)
    done = typed("ledger", "restore", "--accept-older", "--ledger", url, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "$0.50 are captured in the wallet" in done.stdout
    assert "the wallet has no room until you set its limit: x402guard budget set wallet AMOUNT" in done.stdout
    with Owner(path) as owner:
        [wallet] = owner.sessions()
        assert (wallet.spent, wallet.budget, wallet.remaining) == (Decimal("0.5"), Decimal("0.5"), 0)
        assert owner.verify() == []
    with make_guard(url) as guard, guard.session("a", budget="$1.00") as session:
        with pytest.raises(BudgetExhausted):
            session.charge("x", "$0.000001")
        with Owner(path) as owner:
            owner.set_budget("wallet", "$0.60")
        session.charge("x", "$0.10")


def test_a_copy_is_whole_while_agents_write_and_has_the_counters_of_the_lock(tmp_path):
    path = tmp_path / "spend.db"
    stop = threading.Event()
    with make_guard(f"sqlite:///{path}", budget="$50.00") as guard, guard.session("a", budget="$50.00") as session:
        session.charge("x", "$0.01")

        def spend():
            n = 0
            while not stop.is_set():
                n += 1
                session.charge("x", "$0.01", arguments={"n": n})

        spending = threading.Thread(target=spend)
        spending.start()
        try:
            copies = [tmp_path / f"copy-{n}.db" for n in range(3)]
            for copy in copies:
                done = typed("ledger", "copy", copy, "--ledger", f"sqlite:///{path}", "--json", cwd=tmp_path)
                assert done.returncode == 0, done.stderr
                assert json.loads(done.stdout)["budgets"] == 3
        finally:
            stop.set()
            spending.join()
    for copy in copies:
        assert typed("verify", "--ledger", f"sqlite:///{copy}", cwd=tmp_path).returncode == 0
        with closing(ReadOnlyStore(copy)) as store:
            [wallet] = store.path("wallet")
        with closing(sqlite3.connect(copy)) as raw:
            [(n, _)] = raw.execute("SELECT n, spent FROM generation")
        noted = noted_generation(copy)
        assert (noted.n, noted.used) == (n, wallet.used)
        assert oct(copy.stat().st_mode)[-3:] == "600"


def test_a_whole_copy_is_put_back_and_counts_what_was_used_since(tmp_path):
    path, copy = tmp_path / "spend.db", tmp_path / "copy.db"
    url = f"sqlite:///{path}"
    with make_guard(url, budget="$5.00") as guard, guard.session("a", budget="$5.00", id="a") as session:
        session.charge("x", "$0.10")
        assert typed("ledger", "copy", copy, "--ledger", url, cwd=tmp_path).returncode == 0
        session.charge("x", "$0.20")
    remove_database(path)
    shutil.copy(copy, path)
    done = typed("ledger", "restore", "--accept-older", "--ledger", url, cwd=tmp_path)
    assert "$0.20 are captured in the wallet, and 1 sessions and budgets are tripped" in done.stdout
    with Owner(path) as owner:
        assert owner.budget("wallet").spent == Decimal("0.3")
    with make_guard(url) as guard, guard.session("a", id="a") as session, pytest.raises(SessionTripped):
        session.charge("x", "$0.01")


def test_a_file_that_comes_in_between_is_nobody_elses_to_remove(tmp_path, monkeypatch):
    path, target = tmp_path / "spend.db", tmp_path / "copy.db"
    with make_guard(f"sqlite:///{path}", budget="$5.00"):
        pass
    with closing(ReadOnlyStore(path)) as store:
        monkeypatch.setattr("x402guard.stores.read_only.was_used", lambda _: not target.write_bytes(b"theirs"))
        with pytest.raises(LedgerUnavailable, match="cannot write the copy"):
            store.copy_to(target)
    assert target.read_bytes() == b"theirs"


def test_a_copy_replaces_nothing(tmp_path):
    path = tmp_path / "spend.db"
    with make_guard(f"sqlite:///{path}", budget="$5.00"):
        pass
    (tmp_path / "there.db").write_bytes(b"mine")
    done = typed("ledger", "copy", "there.db", "--ledger", f"sqlite:///{path}", cwd=tmp_path)
    assert (done.returncode, "is there already" in done.stderr) == (2, True)
    assert (tmp_path / "there.db").read_bytes() == b"mine"
    with closing(ReadOnlyStore(path)) as store:
        with pytest.raises(ConfigError, match="is there already, or was a ledger"):
            store.copy_to(path)
        with pytest.raises(LedgerUnavailable, match="cannot write the copy"):
            store.copy_to(tmp_path / "nowhere" / "copy.db")


# -- copies that somebody opens --------------------------------------------------------------------------------------------


def spent_by(path, budget="$0.10"):
    """How many cents an agent gets out of a ledger."""
    with make_guard(f"sqlite:///{path}", budget=budget) as guard, guard.session("s", budget=budget) as session:
        for n in range(20):
            try:
                session.charge("x", "$0.01", arguments={"n": n})
            except BudgetExhausted:
                return n
    return 20


@pytest.fixture
def copied(tmp_path):
    """A ledger for ten cents of which two are spent, and a copy of its file elsewhere."""
    first, second = tmp_path / "a" / "spend.db", tmp_path / "b" / "spend.db"
    for path in (first, second):
        path.parent.mkdir()
    with make_guard(f"sqlite:///{first}", budget="$0.10") as guard, guard.session("s", budget="$0.10") as session:
        for n in range(2):
            session.charge("x", "$0.01", arguments={"n": n})
    shutil.copy(first, second)
    return first, second


@pytest.mark.parametrize("with_locks", [False, True])
def test_of_two_copies_one_pays_and_the_other_is_for_looking(copied, tmp_path, with_locks):
    first, second = copied
    if with_locks:
        for name in ("lock", "queue"):
            shutil.copy(f"{first}-{name}", f"{second}-{name}")
    with pytest.raises(LedgerUnavailable, match="is a copy, and the first one may be in use") as refused:
        spent_by(second)
    assert f"x402guard ledger file --accept --ledger {second}" in refused.value.advice
    with pytest.raises(LedgerUnavailable, match="is a copy"):
        Owner(second)
    url = f"sqlite:///{second}"
    for command in ("sessions", "report wallet", "verify", "holds", "ledger file"):
        assert typed(*command.split(), "--ledger", url, cwd=tmp_path).returncode == 0, command
    assert spent_by(first) == 8
    with pytest.raises(LedgerUnavailable, match="is a copy"):
        spent_by(second)
    not_one = typed("ledger", "restore", "--accept-older", "--ledger", url, cwd=tmp_path)
    assert (not_one.returncode, "there is nothing to restore" in not_one.stderr) == (2, True)
    with pytest.raises(LedgerUnavailable, match="is a copy"):
        spent_by(second)


def test_its_owner_moves_a_ledger_to_another_place_by_a_command(copied, tmp_path):
    first, second = copied
    first.unlink()
    url = f"sqlite:///{second}"
    asked = typed("ledger", "file", "--ledger", url, cwd=tmp_path)
    assert "if it is the ledger now, repeat it with --accept" in asked.stdout
    done = typed("ledger", "file", "--accept", "--ledger", url, "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {"file": str(second), "noted": False, "accepted": True}
    assert spent_by(second) == 8
    again = typed("ledger", "file", "--accept", "--ledger", url, cwd=tmp_path)
    assert "is the file that the ledger notes" in again.stdout
    moved = tmp_path / "c.db"
    second.rename(moved)  # a name is no other file
    assert spent_by(moved) == 0


def test_a_copy_by_the_command_is_a_copy_and_a_restored_one_is_the_ledger(copied, tmp_path):
    first, _ = copied
    copy, url = tmp_path / "copy.db", f"sqlite:///{first}"
    assert typed("ledger", "copy", copy, "--ledger", url, cwd=tmp_path).returncode == 0
    with pytest.raises(LedgerUnavailable, match="is a copy"):
        spent_by(copy)
    assert spent_by(first) == 8
    remove_database(first)
    shutil.copy(copy, first)
    done = typed("ledger", "restore", "--accept-older", "--ledger", url, cwd=tmp_path)
    assert "$0.08 are captured in the wallet" in done.stdout, done.stderr
    assert spent_by(first) == 0


def test_a_copy_is_not_moved_to_a_server(copied, url, tmp_path):
    first, second = copied
    refused = typed("ledger", "move", url, "--ledger", f"sqlite:///{second}", cwd=tmp_path)
    assert (refused.returncode, "it is a copy, and the first one may be in use" in refused.stderr) == (2, True)
    assert typed("ledger", "move", url, "--ledger", f"sqlite:///{first}", cwd=tmp_path).returncode == 0
    for path in copied:
        with pytest.raises(LedgerUnavailable, match=r"is a copy|was moved to"):
            spent_by(path)
    with make_guard(url) as guard, guard.session("s", budget="$0.50") as session:
        session.charge("x", "$0.08")
        with pytest.raises(BudgetExhausted):
            session.charge("x", "$0.01")


def test_a_ledger_of_before_notes_its_file_at_its_next_opening(copied):
    first, second = copied
    with closing(sqlite3.connect(second)) as raw:
        raw.execute("DELETE FROM marks WHERE kind = 'file'")
        raw.commit()
    shutil.copy(second, first.parent / "third.db")
    assert spent_by(second) == 8
    shutil.copy(second, first.parent / "fourth.db")
    with pytest.raises(LedgerUnavailable, match="is a copy"):
        spent_by(first.parent / "fourth.db")

"""The files beside the ledger's file are removed while it is open, or an older copy is put back."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from decimal import Decimal

import httpx
import pytest
from typer.testing import CliRunner

from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import BudgetExhausted, LedgerUnavailable, Owner, SessionTripped
from x402guard.cli import app
from x402guard.stores import open_store

NICKEL = "$0.05"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "spend.db"


def buy(session, shop, number):
    with client(session, shop) as http:
        return http.get(f"{URL}/{number}")


def copied(path, to):
    """A copy of the database with its -wal, as a backup takes it."""
    to.mkdir()
    for name in ("", "-wal"):
        source = path.with_name(path.name + name)
        if source.exists():
            shutil.copy(source, to / source.name)


def put_back(path, source):
    for name in ("", "-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)
    for kept in source.iterdir():
        shutil.copy(kept, path.parent / kept.name)


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-lock"])
@pytest.mark.parametrize("linked", [False, True], ids=["a file", "a link"])
def test_a59_a_file_removed_under_an_open_ledger_is_noticed_before_anything_is_signed(path, suffix, linked, tmp_path):
    shop = Shop()
    if linked:  # SQLite keeps the other files beside the link's target
        (tmp_path / "shared").mkdir()
        target = tmp_path / "shared" / "spend.db"
        path.symlink_to(target)
        path, link = target, path
    else:
        link = path
    with (
        pytest.raises(LedgerUnavailable, match="removed or replaced"),
        make_guard(f"sqlite:///{link}", budget=NICKEL) as guard,
    ):
        with guard.session("s", budget=NICKEL, id="s") as session:
            for number in range(2):
                buy(session, shop, number)
            path.with_name(path.name + suffix).unlink()
            with pytest.raises(LedgerUnavailable, match="was removed or replaced"):
                buy(session, shop, 2)
    assert len(shop.payments) == 2


def test_a59_what_a_removed_wal_held_is_no_new_budget(path):
    """The removed file holds the payments; another process that opens the rest would see none of them."""
    shop = Shop()
    guard = make_guard(f"sqlite:///{path}", budget=NICKEL)
    session = guard.session("s", budget=NICKEL, id="s")
    for number in range(5):
        buy(session, shop, number)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink()
    opens = f"from tests.support.merchant import make_guard; make_guard('sqlite:///{path}', budget='{NICKEL}')"
    other = subprocess.run([sys.executable, "-c", opens], capture_output=True, text=True, timeout=60, check=False)
    assert other.returncode == 1
    assert re.search(
        r"(LedgerUnavailable|InconsistentLedger): .*(is older than the one that was here|has nothing in it, and one was here)",
        other.stderr,
    )
    with pytest.raises(LedgerUnavailable):
        buy(session, shop, 9)
    assert len(shop.payments) == 5


def test_a59_a_file_that_goes_between_check_and_commit_is_noticed_after_it(path, monkeypatch):
    shop = Shop()
    guard = make_guard(f"sqlite:///{path}", budget=NICKEL)
    session = guard.session("s", budget=NICKEL, id="s")
    store, real = guard.shell.store, type(guard.shell.store)._next_generation

    def removes(self):
        path.with_name(f"{path.name}-wal").unlink(missing_ok=True)
        return real(self)

    monkeypatch.setattr(type(store), "_next_generation", removes)
    with pytest.raises(LedgerUnavailable, match="removed or replaced"):
        buy(session, shop, 1)
    assert shop.payments == []


@pytest.mark.parametrize("in_place", [False, True])
def test_a59_an_older_copy_under_an_open_ledger_is_noticed(path, tmp_path, in_place):
    shop = Shop()
    with make_guard(f"sqlite:///{path}", budget=NICKEL) as guard:
        guard.session("s", budget=NICKEL, id="s")
    copied(path, tmp_path / "backup")
    guard = make_guard(f"sqlite:///{path}", budget=NICKEL)
    session = guard.session("s", budget=NICKEL, id="s")
    for number in range(5):
        buy(session, shop, number)
    if in_place:
        guard.shell.store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        path.write_bytes((tmp_path / "backup" / path.name).read_bytes())
    else:
        put_back(path, tmp_path / "backup")
    with pytest.raises((LedgerUnavailable, BudgetExhausted)):
        buy(session, shop, 9)
    with pytest.raises(LedgerUnavailable):
        make_guard(f"sqlite:///{path}", budget=NICKEL)
    assert len(shop.payments) == 5


def test_a59_an_older_copy_written_into_an_open_ledger_by_sqlite_itself_is_noticed(path, tmp_path):
    """Every file stays the same one, and SQLite's own locks are kept."""
    shop = Shop()
    guard = make_guard(f"sqlite:///{path}", budget=NICKEL)
    session = guard.session("s", budget=NICKEL, id="s")
    with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(tmp_path / "backup.db")) as kept:
        live.backup(kept)
        for number in range(5):
            buy(session, shop, number)
        kept.backup(live)
    with pytest.raises(LedgerUnavailable, match="is older than the one that was here"):
        buy(session, shop, 9)
    assert len(shop.payments) == 5


@pytest.fixture
def restored(path, tmp_path):
    """Five cents are spent after the copy, which is then put back."""
    shop = Shop()
    with make_guard(f"sqlite:///{path}", budget="$0.08") as guard, guard.session("s", budget=NICKEL, id="s") as session:
        buy(session, shop, 0)
        guard.budget("customer", "$1.00")
    copied(path, tmp_path / "backup")
    with make_guard(f"sqlite:///{path}", budget="$0.08") as guard, guard.session("s", id="s") as session:
        for number in range(1, 4):
            buy(session, shop, number)
        shop.paid = lambda *_: httpx.Response(500)
        buy(session, shop, 4)  # held
    put_back(path, tmp_path / "backup")
    return shop


def test_a59_an_older_copy_is_refused_at_opening_with_what_to_do(path, restored):
    for open_it in (lambda: make_guard(f"sqlite:///{path}"), lambda: open_store(f"sqlite:///{path}")):
        with pytest.raises(LedgerUnavailable, match="is older than the one that was here") as caught:
            open_it()
        assert "x402guard ledger restore --accept-older" in caught.value.advice
    assert len(restored.payments) == 5


def test_a59_who_only_looks_is_shown_no_older_copy(path, tmp_path):
    """What is left by it is spent: an owner who sees that room would leave the agent on."""
    with make_guard(f"sqlite:///{path}", budget=NICKEL) as guard:
        guard.session("s", budget=NICKEL, id="s")
    copied(path, tmp_path / "backup")
    with make_guard(f"sqlite:///{path}", budget=NICKEL) as guard, guard.session("s", id="s") as session:
        session.charge("search", "$0.03")
    with Owner(f"sqlite:///{path}", read_only=True) as owner:
        assert owner.report("wallet").to_dict()["spent"] == "0.03"
        put_back(path, tmp_path / "backup")
        for look in (lambda: owner.report("wallet"), owner.live, owner.sessions):
            with pytest.raises(LedgerUnavailable, match="is older than the one that was here"):
                look()
    for words in (("watch", "--once"), ("report", "wallet"), ("sessions",), ("report", "wallet", "--format", "csv")):
        said = run(path, *words)
        assert (said.exit_code, said.stdout) == (1, ""), words
    path.with_name(f"{path.name}-lock").chmod(0)  # another user's: it is then compared by who writes it alone
    if os.geteuid() != 0:
        assert run(path, "sessions").exit_code == 0


def test_a59_what_was_given_back_and_spent_again_counts_although_the_sum_is_the_same(path, tmp_path):
    with (
        make_guard(f"sqlite:///{path}", budget="$1.00") as guard,
        guard.session("s", budget="$1.00", id="s") as session,
    ):
        with session.hold("search", up_to="$0.40") as held:
            copied(path, tmp_path / "backup")
            held.void("nothing was found")
        session.charge("other", "$0.40")
    put_back(path, tmp_path / "backup")
    said = run(path, "ledger", "restore", "--accept-older")
    assert "$0.40 are captured in the wallet" in said.output


def run(path, *words):
    return CliRunner().invoke(app, [*words, "--ledger", f"sqlite:///{path}"])


def test_a59_the_owner_takes_an_older_copy_and_all_that_may_be_out_counts(path, restored):
    refused = run(path, "ledger", "restore")
    assert "cannot be undone" in str(refused.exception)
    said = run(path, "ledger", "restore", "--accept-older")
    assert said.exit_code == 0, said.exception
    assert "$0.04 are captured in the wallet, and 2 sessions and budgets are tripped" in said.output
    assert run(path, "verify").exit_code == 0
    shop = Shop()
    with make_guard(f"sqlite:///{path}", budget="$0.08") as guard:
        session = guard.session("s", id="s")
        with pytest.raises(SessionTripped, match="restored from an older copy"):
            buy(session, shop, 9)
        assert run(path, "reset", "s").exit_code == 0
        for number in range(3):  # a cent and four lost ones are spent of eight
            buy(session, shop, 10 + number)
        with pytest.raises(BudgetExhausted, match=r"the wallet has \$0.00 left"):
            buy(session, shop, 20)
        assert session.spent == Decimal("0.04")
    again = run(path, "ledger", "restore", "--accept-older")
    assert "nothing to restore" in str(again.exception)


def test_a59_a_ledger_that_is_not_older_has_nothing_to_restore(path, tmp_path):
    with make_guard(f"sqlite:///{path}") as guard:
        guard.session("s", budget=NICKEL)
    assert "nothing to restore" in str(run(path, "ledger", "restore", "--accept-older").exception)
    missing = CliRunner().invoke(
        app, ["ledger", "restore", "--accept-older", "--ledger", f"sqlite:///{tmp_path}/none.db"]
    )
    assert "no ledger yet at" in str(missing.exception)


def test_a59_a_ledger_moved_with_all_its_files_opens(path, tmp_path):
    with make_guard(f"sqlite:///{path}", budget=NICKEL) as guard, guard.session("s", budget=NICKEL) as session:
        buy(session, Shop(), 1)
    there = tmp_path / "there"
    there.mkdir()
    for file in list(tmp_path.glob("spend.db*")):
        shutil.move(file, there / file.name)
    with closing(open_store(f"sqlite:///{there}/spend.db")) as store:
        assert store.audit() == []


def two_names(path, other):
    other.hardlink_to(path)


def mounted_alone(path, other):
    other.touch()
    subprocess.run(["mount", "--bind", path, other], check=True)


@pytest.mark.parametrize("second", [two_names, mounted_alone], ids=["hard link", "mount"])
def test_a59_one_file_on_two_paths_is_no_second_budget(path, tmp_path, second):
    folder = tmp_path / "a container's"
    folder.mkdir()
    other = folder / "spend.db"
    make_guard(f"sqlite:///{path}", budget=NICKEL).close()
    try:
        second(path, other)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this user may not mount a file")
    try:
        with pytest.raises(LedgerUnavailable, match=r"its -wal and -lock files are beside one path alone") as caught:
            make_guard(f"sqlite:///{other}", budget=NICKEL)
        assert "mount the folder" in str(caught.value.advice)
        assert [each.name for each in folder.iterdir()] == ["spend.db"]
    finally:
        if second is mounted_alone:
            subprocess.run(["umount", other], check=True)
    other.unlink()
    make_guard(f"sqlite:///{path}", budget=NICKEL).close()

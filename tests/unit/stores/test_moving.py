"""A ledger moves from a file to PostgreSQL whole, and the file is never a second budget."""

import shutil
import sqlite3
from contextlib import closing
from decimal import Decimal

import psycopg
import pytest

from tests.support import postgres
from tests.support.command_line import typed
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import LedgerUnavailable
from x402guard.guard.owner import Owner
from x402guard.stores import moving

pytestmark = pytest.mark.xdist_group("postgres")


@pytest.fixture
def spent(tmp_path):
    """A ledger in a file: a payment, an LLM's hold that is out, a child, a tripped session, a named budget."""
    ledger = f"sqlite:///{tmp_path / 'spend.db'}"
    with make_guard(ledger, budget="$5.00") as guard:
        with guard.session("research", budget="$1.00", id="run-1") as session, client(session, Shop()) as http:
            http.get(URL)
            session.charge("search", "$0.25", arguments={"q": "50 % of ?"})
            with session.child("reader", budget="$0.10") as child:
                child.charge("read", "$0.02")
        with guard.budget("customer-7", "$2.00").session("other", budget="$1.00", id="run-2") as other:
            other.charge("lookup", "$0.50")
            other.trip("enough")
    return ledger


def books(ledger):
    with Owner(ledger) as owner:
        return {node.id: (node.captured, node.held, node.state, node.head) for node in owner._store.nodes()}


def move(ledger, url, tmp_path):
    return typed("ledger", "move", url, "--ledger", ledger, cwd=tmp_path)


def test_all_of_it_is_there_and_the_agent_goes_on(spent, url, tmp_path):
    before = books(spent)
    done = move(spent, url, tmp_path)
    assert (done.returncode, f"of {len(before)} budgets are in {url} now" in done.stdout) == (0, True), done
    assert books(url) == before
    with Owner(url) as owner:
        assert owner.verify() == []
    with make_guard(url) as guard, guard.session("research", budget="$1.00", id="run-1") as session:
        assert session.spent == Decimal("0.28")
        session.charge("search", "$0.25")
        assert session.remaining == Decimal("0.47")


def test_the_environment_says_nothing_about_how_text_is_sent(spent, url, tmp_path):
    with make_guard(spent) as guard, guard.session("名前 été", budget="$1.00", id="run-3") as session:
        session.charge("search", "$0.25", arguments={"q": "✓"})
    before = books(spent)
    done = typed("ledger", "move", url, "--ledger", spent, cwd=tmp_path, PGCLIENTENCODING="LATIN1")
    assert (done.returncode, books(url)) == (0, before), done


def test_the_file_is_refused_from_then_on_by_all_and_names_the_other_place(spent, url, tmp_path):
    with (
        pytest.raises(LedgerUnavailable, match="was moved to postgresql"),  # its end cannot be written either
        make_guard(spent) as guard,
        guard.session("late", budget="$1.00") as session,
    ):
        assert move(spent, url, tmp_path).returncode == 0
        with pytest.raises(LedgerUnavailable, match="was moved to postgresql"):
            session.charge("search", "$0.10")
    for command in (("sessions",), ("verify",), ("report", "run-1")):
        done = typed(*command, "--ledger", spent, cwd=tmp_path)
        assert (done.returncode, url in done.stdout + done.stderr) == (2, True), done


def test_a_copy_of_the_file_from_before_is_no_second_budget(spent, url, tmp_path):
    path = tmp_path / "spend.db"
    shutil.copy(path, tmp_path / "before.db")
    assert move(spent, url, tmp_path).returncode == 0
    shutil.copy(tmp_path / "before.db", path)
    with pytest.raises(LedgerUnavailable, match="was moved to postgresql"):
        make_guard(spent)
    restored = typed("ledger", "restore", "--accept-older", "--ledger", spent, cwd=tmp_path)
    assert (restored.returncode, "was moved to postgresql" in restored.stderr) == (2, True), restored
    with pytest.raises(LedgerUnavailable, match="was moved to postgresql"):
        moving.move_to_postgres(path, url)


def test_a_database_with_a_ledger_and_a_server_that_is_away_leave_the_file_as_it_was(spent, url, tmp_path):
    make_guard(url).close()
    for to, says in (
        (url, "has a ledger already"),
        (url.replace("owner@/w", "owner@/x"), "does not exist"),
        (url.replace("owner@", "o:p@"), "password"),
    ):
        done = move(spent, to, tmp_path)
        assert (done.returncode, says in done.stderr) == (2, True), done
        with make_guard(spent) as guard, guard.session("research", budget="$1.00", id="run-1") as session:
            assert session.spent == Decimal("0.28")


def test_what_is_no_file_and_what_is_no_database_is_told_apart(spent, url, tmp_path):
    make_guard(url).close()
    assert "name the file with --ledger" in move(url, url, tmp_path).stderr
    assert "write postgresql://" in move(spent, spent, tmp_path).stderr


def interrupted(work):
    """A step of the move, behind which Ctrl-C comes."""

    def step(*given):
        work(*given)
        raise KeyboardInterrupt

    return step


def is_open(ledger):
    try:
        make_guard(ledger).close()
    except LedgerUnavailable as refused:
        assert "was moved to" in str(refused) or "being moved to" in str(refused)
        return False
    return True


STEPS = {"_announce": (True, False), "_copy": (True, False), "_close": (False, False)}


@pytest.mark.parametrize("step", STEPS)
def test_interrupted_anywhere_at_most_one_of_the_two_can_be_used_and_the_next_one_ends_it(
    spent, url, tmp_path, monkeypatch, step
):
    before = books(spent)
    with monkeypatch.context() as patched:
        patched.setattr(moving, step, interrupted(getattr(moving, step)))
        with pytest.raises(KeyboardInterrupt):
            moving.move_to_postgres(tmp_path / "spend.db", url)
    assert (is_open(spent), is_open(url)) == STEPS[step]
    if not STEPS[step][0]:
        assert moving.move_to_postgres(tmp_path / "spend.db", url)[1] == len(before)
        assert books(url) == before
        assert (is_open(spent), is_open(url)) == (False, True)
        return
    after = books(spent)  # an agent has used it meanwhile
    moving.move_to_postgres(tmp_path / "spend.db", url)
    assert books(url) == after
    assert not is_open(spent)


def test_a_commit_whose_answer_is_lost_is_not_made_twice(spent, url, tmp_path):
    moving.move_to_postgres(tmp_path / "spend.db", url)
    with make_guard(url) as guard, guard.session("research", budget="$1.00", id="run-1") as session:
        session.charge("search", "$0.25")
    with closing(sqlite3.connect(tmp_path / "spend.db")) as raw, raw:
        raw.execute("UPDATE moved SET is_copied = 0")  # as it stands until the answer has come
    moving.move_to_postgres(tmp_path / "spend.db", url)
    with make_guard(url) as guard, guard.session("research", budget="$1.00", id="run-1") as session:
        assert session.spent == Decimal("0.53")


def test_a_database_that_has_lost_what_was_moved_there_gets_no_old_copy(spent, url, tmp_path):
    moving.move_to_postgres(tmp_path / "spend.db", url)
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(postgres.EMPTY)
    with pytest.raises(LedgerUnavailable, match="has lost the ledger that was moved there"):
        moving.move_to_postgres(tmp_path / "spend.db", url)


def test_an_older_copy_is_not_moved_and_a_link_is_the_file_that_it_leads_to(spent, url, tmp_path):
    path, link = tmp_path / "spend.db", tmp_path / "link.db"
    link.symlink_to(path)
    shutil.copy(path, tmp_path / "before.db")
    with make_guard(spent) as guard, guard.session("more", budget="$1.00") as session:
        session.charge("search", "$0.25")
    newest = path.read_bytes()
    shutil.copy(tmp_path / "before.db", path)
    with pytest.raises(LedgerUnavailable, match="older than the one that was here"):
        moving.move_to_postgres(link, url)
    path.write_bytes(newest)
    moving.move_to_postgres(link, url)
    shutil.copy(tmp_path / "before.db", path)
    with pytest.raises(LedgerUnavailable, match="was moved to"):
        make_guard(spent)


def test_a_copy_that_cannot_be_written_leaves_the_file_in_use(spent, url, tmp_path):
    make_guard(url).close()
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(postgres.EMPTY)
        server.execute("ALTER TABLE x402guard.marks ADD CONSTRAINT never CHECK (false) NOT VALID")
        try:
            with pytest.raises(LedgerUnavailable, match="never"):
                moving.move_to_postgres(tmp_path / "spend.db", url)
        finally:
            server.execute("ALTER TABLE x402guard.marks DROP CONSTRAINT never")
    assert (is_open(spent), is_open(url)) == (True, False)
    moving.move_to_postgres(tmp_path / "spend.db", url)
    assert (is_open(spent), is_open(url)) == (False, True)


def test_a_ledger_that_is_unsound_is_not_moved(spent, url, tmp_path):
    with sqlite3.connect(tmp_path / "spend.db") as raw:
        raw.execute("UPDATE nodes SET held = held + 1 WHERE id = 'wallet'")
    raw.close()
    with pytest.raises(LedgerUnavailable, match="is inconsistent"):
        moving.move_to_postgres(tmp_path / "spend.db", url)
    with psycopg.connect(url) as server:
        assert server.execute("SELECT count(*) FROM x402guard.nodes").fetchone() == (0,)

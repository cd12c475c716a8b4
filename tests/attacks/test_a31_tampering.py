"""Row 31: whoever edits, cuts or deletes the ledger gets no budget by it, only a ledger that refuses."""

import json
import sqlite3
from contextlib import closing

import pytest
from typer.testing import CliRunner

from tests.support.merchant import URL, Shop, make_guard
from tests.support.refusals import fetch
from x402guard import ConfigError, LedgerUnavailable
from x402guard.cli import app
from x402guard.ledger.verify import verify_windows
from x402guard.ledger.view import Scope
from x402guard.stores import checking, open_store
from x402guard.stores.checking import AT_OPENING, check_since


@pytest.fixture
def path(tmp_path):
    """A ledger with a payment that was captured, one that is held, a child, a tripped session and a lowered limit."""
    path = tmp_path / "spend.db"
    with make_guard(f"sqlite:///{path}", budget="$1.00") as guard:
        with guard.session("run", budget="$0.50", id="run") as session:
            fetch("sync", session, Shop())
            for number in (2, 3):  # two that stay live
                fetch("sync", session, Shop(paid=lambda *_: __import__("httpx").Response(500)), url=f"{URL}/{number}")
            session.child("inner", budget="$0.10").charge("search", "$0.02")
        guard.session("stopped", budget="$0.10", id="stopped").trip("for the test")
        guard.session("run", budget="$0.40", id="run")
        guard.session("idle", budget="$0.05", id="idle")
    return path


EDITS = {
    "less was captured": "UPDATE nodes SET captured = 0 WHERE id = 'run'",
    "nothing is held": "UPDATE nodes SET held = 0 WHERE id = 'run'",
    "nothing is live": "UPDATE nodes SET live = 0 WHERE id = 'wallet'",
    "nothing was drawn": "UPDATE nodes SET granted_out = 0 WHERE id = 'wallet'",
    "a higher limit": "UPDATE nodes SET max_nanos = 900000000000 WHERE id = 'run'",
    "no limit": "UPDATE nodes SET max_nanos = NULL WHERE id = 'wallet'",
    "open again": "UPDATE nodes SET state = 'open', terminated_by = NULL WHERE id = 'stopped'",
    "another head": "UPDATE nodes SET head = 'ff' WHERE id = 'run'",
    "fewer entries": "UPDATE nodes SET seq = seq - 1 WHERE id = 'run'",
    "a hold that is gone": "DELETE FROM holds WHERE state = 'held'",
    "a capture that is gone": "DELETE FROM holds WHERE state = 'captured'",
    "a smaller hold": "UPDATE holds SET amount = 1 WHERE state = 'held'",
    "a smaller capture": "UPDATE holds SET captured = 1 WHERE state = 'captured'",
    "voided by hand": "UPDATE holds SET state = 'voided' WHERE state = 'held'",
    "a hold moved elsewhere": "UPDATE holds SET node_id = 'stopped' WHERE state = 'captured'",
    "a hold out of nowhere": "UPDATE holds SET id = 'other' WHERE rowid = (SELECT min(rowid) FROM holds WHERE state = 'captured')",
    "an entry that is gone": "DELETE FROM entries WHERE event = 'capture'",
    "the last entry that is gone": "DELETE FROM entries WHERE seq = (SELECT max(seq) FROM entries WHERE node_id = 'wallet')",
    "all entries gone": "DELETE FROM entries",
    "an entry of another amount": "UPDATE entries SET captured = 1 WHERE event = 'capture'",
    "an entry of another day": "UPDATE entries SET at_ms = at_ms - 86400000 WHERE event = 'capture'",
    "an entry with other words": "UPDATE entries SET data = replace(data, 'claimed', 'chain') WHERE event = 'capture'",
    "an entry rehashed alone": "UPDATE entries SET hash = 'ff' WHERE seq = 2",
    "entry and balance together": (
        "UPDATE entries SET captured = 1 WHERE event = 'capture' AND node_id = 'run';"
        "UPDATE nodes SET captured = 1 WHERE id = 'run'"
    ),
    "two entries exchanged": (
        "UPDATE entries SET seq = -1 WHERE node_id = 'run' AND seq = 2; UPDATE entries SET seq = 2 WHERE node_id = 'run' "
        "AND seq = 3; UPDATE entries SET seq = 3 WHERE node_id = 'run' AND seq = -1"
    ),
    "a session below no budget": "UPDATE nodes SET parent_id = NULL WHERE id = 'idle'",
    "a session below another one": "UPDATE nodes SET parent_id = 'run' WHERE id = 'idle'",
    "a session below itself": "UPDATE nodes SET parent_id = id WHERE id = 'idle'",
    "a session below its tokens": "UPDATE nodes SET parent_id = 'idle/tokens' WHERE id = 'idle'",
    "a second wallet": "UPDATE nodes SET kind = 'wallet', parent_id = NULL WHERE id = 'idle'",
    "a row that no entry has opened": (
        "CREATE TEMP TABLE t AS SELECT * FROM nodes WHERE id = 'idle/tokens';"
        "UPDATE t SET id = 'other', seq = 0, head = ''; INSERT INTO nodes SELECT * FROM t; UPDATE nodes SET id = id"
    ),
    "less than nothing is kept": "UPDATE nodes SET reserve = -100000000000 WHERE id = 'wallet'",
    "facts of a note that cannot be read": "UPDATE entries SET data = '[]' WHERE event = 'note'",
    "a session that is a child": "UPDATE nodes SET kind = 'scope' WHERE id = 'idle'",
    "more is past where nothing passes": "UPDATE nodes SET past = 9000000000 WHERE id = 'wallet'",
    "a payment is worthless sooner": "UPDATE holds SET deadline_unix = deadline_unix - 30 WHERE kind = 'payment'",
    "a payment is a tool": "UPDATE holds SET kind = 'tool' WHERE kind = 'payment'",
    "facts that cannot be read": "UPDATE entries SET data = '{' WHERE node_id = 'run' AND seq = 1",
    "facts that are no object": "UPDATE entries SET data = '[]' WHERE node_id = 'run' AND seq = 1",
    "a session that is gone": "PRAGMA foreign_keys = OFF; DELETE FROM nodes WHERE id = 'run'",
}


def edit(path, sql):
    """Edit the file as somebody who has it would: without the triggers that forbid it, which are there again afterwards."""
    with closing(sqlite3.connect(path)) as raw:
        triggers = raw.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            raw.execute(f"DROP TRIGGER {name}")
        before = raw.total_changes
        raw.executescript(sql)
        raw.commit()
        assert raw.total_changes > before, "the edit changed nothing"
        for _, made in triggers:
            raw.execute(made)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("what", EDITS)
def test_a31_an_edited_ledger_is_refused(path, what):
    edit(path, EDITS[what])
    with pytest.raises(LedgerUnavailable, match="is inconsistent") as caught:
        make_guard(f"sqlite:///{path}")
    assert "x402guard verify" in caught.value.advice
    assert not caught.value.money_may_have_moved
    found = CliRunner().invoke(app, ["verify", "--ledger", f"sqlite:///{path}", "--json"])
    assert found.exit_code == 1
    assert json.loads(found.output)["problems"]


def test_a31_a_ledger_that_nobody_touched_adds_up(path):
    store = open_store(f"sqlite:///{path}")
    assert list(store.audit()) == []
    for most in (0, 7, 10_000):
        problems, journals, read, *_ = check_since(store._reader.execute, AT_OPENING._replace(entries=most))
        assert not problems
        assert sum(said.seq for said in journals.values()) == read <= min(most, store.size()[0])
        assert read > min(most, store.size()[0]) - 7  # whole journals, if more than one fits
    store.close()
    found = CliRunner().invoke(app, ["verify", "--ledger", f"sqlite:///{path}"])
    assert (found.exit_code, "the ledger is consistent" in found.output) == (0, True)


def test_a31_the_sums_of_a_long_ledger_are_looked_at_when_it_is_opened(path):
    edit(path, EDITS["less was captured"])
    store = open_store(f"sqlite:///{path}", verified=False)
    assert any(
        "captured" in problem for problem in check_since(store._reader.execute, AT_OPENING._replace(entries=0)).problems
    )
    store.close()


@pytest.fixture
def long(path, monkeypatch):
    """The same ledger, checked up to its end when it was opened, and then a little longer."""
    monkeypatch.setattr(checking, "WORTH_NOTING", 1)
    with make_guard(f"sqlite:///{path}") as guard, guard.session("later", budget="$0.10", id="later") as session:
        session.charge("search", "$0.01")
    with closing(sqlite3.connect(path)) as raw:
        checked = dict(raw.execute("SELECT key, json_extract(value, '$.seq') FROM marks WHERE kind = 'checked'"))
        grown = dict(raw.execute("SELECT id, seq FROM nodes"))
    assert set(checked) < set(grown)  # the session came after it
    assert 0 < checked["wallet"] < grown["wallet"]
    return path


SINCE = {
    "an entry of another amount": "UPDATE entries SET captured = 1 WHERE event = 'capture' AND node_id = 'later'",
    "an entry of another day": "UPDATE entries SET at_ms = at_ms - 86400000 WHERE node_id = 'later' AND event = 'capture'",
    "an entry that is gone": "DELETE FROM entries WHERE node_id = 'later' AND event = 'capture'",
    "a smaller capture": "UPDATE holds SET captured = 1 WHERE state = 'captured' AND node_id = 'later'",
    "a capture that is gone": "DELETE FROM holds WHERE state = 'captured' AND node_id = 'later'",
    "a mark that skips what came": (
        "UPDATE marks SET value = json_set(value, '$.seq', (SELECT seq FROM nodes WHERE id = 'wallet')) "
        "WHERE kind = 'checked' AND key = 'wallet'"
    ),
    "an older hold made smaller and another one larger": (
        "UPDATE holds SET amount = amount - 1 WHERE id = (SELECT min(id) FROM holds WHERE state = 'held');"
        "UPDATE holds SET amount = amount + 1 WHERE id = (SELECT max(id) FROM holds WHERE state = 'held')"
    ),
    "a live hold out of nowhere": "UPDATE holds SET id = 'other' WHERE id = (SELECT min(id) FROM holds WHERE state = 'held')",
    "a mark with other sums": (
        "UPDATE marks SET value = json_set(value, '$.captured', 1) WHERE kind = 'checked' AND key = 'run'"
    ),
    "a mark of another head": "UPDATE marks SET value = json_set(value, '$.head', 'ff') WHERE kind = 'checked'",
}


@pytest.mark.parametrize("what", SINCE)
def test_a31_what_came_since_the_last_check_is_read_when_a_ledger_is_opened(long, what):
    edit(long, SINCE[what])
    with pytest.raises(LedgerUnavailable, match="is inconsistent"):
        make_guard(f"sqlite:///{long}")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("what", EDITS)
def test_a31_every_edit_of_a_row_that_counts_is_still_refused_and_verify_finds_all(long, what):
    """What was checked before is not read again at each opening, but the rows that decide are compared with it."""
    edit(long, EDITS[what])
    try:
        make_guard(f"sqlite:///{long}").close()
    except LedgerUnavailable as error:
        assert "is inconsistent" in str(error)
    else:
        assert "UPDATE nodes" not in EDITS[what]
        assert "state = 'held'" not in EDITS[what]
    found = CliRunner().invoke(app, ["verify", "--ledger", f"sqlite:///{long}", "--json"])
    assert found.exit_code == 1
    assert json.loads(found.output)["problems"]


WINDOWS = {
    "all of it before": (
        "UPDATE nodes SET past = captured + granted_out - live WHERE name = 'daily'",
        "counts 0 in its window",
    ),
    "a part of it before": ("UPDATE nodes SET past = 1 WHERE name = 'daily'", "counts 19999999 in its window"),
    "a window that is over": ("UPDATE nodes SET since_ms = 0 WHERE name = 'daily'", "counts 0 in its window"),
    "a window of another year": (
        "UPDATE nodes SET since_ms = since_ms + 40000000000, past = captured + granted_out WHERE name = 'daily'",
        "a window that begins in ",
    ),
    "more windows": ("UPDATE nodes SET window = 'day UTC' WHERE name = 'monthly'", "its journal says ('month', 'UTC')"),
    "a window where none was": (
        "UPDATE nodes SET window = 'day UTC' WHERE id = 'run'",
        "its journal says (None, None)",
    ),
}


@pytest.mark.parametrize("what", WINDOWS)
def test_a31_an_edit_that_gives_a_window_again_is_found_by_verify(path, what):
    with make_guard(f"sqlite:///{path}") as guard:
        guard.budget("monthly", "$0.10", per="month")
        guard.budget("daily", "$0.10", per="day").session("later", budget="$0.05").charge("search", "$0.02")
    verify = ["verify", "--ledger", f"sqlite:///{path}"]
    assert CliRunner().invoke(app, verify).exit_code == 0
    sql, said = WINDOWS[what]
    edit(path, sql)
    found = CliRunner().invoke(app, verify)
    assert (found.exit_code, said in found.output) == (1, True), found.output


@pytest.mark.parametrize(
    ("event", "data"),
    [
        ("note", {"claim": 1}),
        ("note", {"claim": {"transaction": 1}}),
        ("capture", {"usage": [1]}),
        ("capture", {"usage": {"input_tokens": "x"}}),
        ("event", {"name": "clock_accepted", "ahead_ms": "x"}),
        ("event", {"name": "clock_accepted"}),
    ],
)
def test_a31_facts_of_another_shape_are_named_where_a_window_depends_on_them(tmp_path, event, data):
    """As somebody writes them who writes the whole chain anew: the audit of the chain does not come to them."""
    with make_guard(f"sqlite:///{tmp_path / 'l.db'}", budget="$1.00") as guard:
        daily = guard.budget("daily", "$0.50", per="day")
        with daily.session("run", budget="$0.20", id="run") as session:
            fetch("sync", session, Shop())
    store = open_store(f"sqlite:///{tmp_path / 'l.db'}")
    assert verify_windows(store) == []

    def forge(view):
        [hold] = {entry.hold_id for entry in store.entries("run") if entry.hold_id is not None}
        where, of = ("wallet", None) if event == "event" else ("run", hold)
        view.record(where, event, hold_id=of, facts=data)
        view.put_mark(("clock", "accepted"), {})

    store.transact(Scope(nodes=("run",), marks=(("clock", "accepted"),), durable=True), forge)
    [problem] = verify_windows(store)
    assert "'budget:daily'" in problem
    assert "cannot be read" in problem
    store.close()


def test_a31_a_second_opening_in_a_journal_moves_no_budget(path):
    store = open_store(f"sqlite:///{path}")
    facts = {"kind": "session", "name": "idle", "limit": 50_000_000, "parent": None}
    store.transact(Scope(nodes=("idle",), durable=True), lambda view: view.record("idle", "open", facts=facts))
    assert list(store.audit()) == []
    store.close()
    edit(path, "PRAGMA foreign_keys = OFF; UPDATE nodes SET parent_id = 'stopped' WHERE id = 'idle'")
    with closing(open_store(f"sqlite:///{path}", verified=False)) as store:
        assert any("its row has parent = stopped, but its journal says wallet" in problem for problem in store.audit())


def test_a31_an_opening_reads_only_what_was_not_checked_before(long):
    with closing(open_store(f"sqlite:///{long}", verified=False)) as store:
        problems, journals, *_ = check_since(store._reader.execute)
        assert not problems
        assert set(journals) == {"wallet", "later", "later/tokens"}
    make_guard(f"sqlite:///{long}").close()
    with closing(open_store(f"sqlite:///{long}", verified=False)) as store:
        assert check_since(store._reader.execute)[:3] == ((), {}, 0)


@pytest.mark.parametrize("part", [0.05, 0.5, 0.9])
def test_a31_a_ledger_cut_short_is_refused(path, part):
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * part)])
    with pytest.raises(LedgerUnavailable):
        make_guard(f"sqlite:///{path}")


def test_a31_an_emptied_ledger_is_refused(path):
    path.write_bytes(b"")
    with pytest.raises(LedgerUnavailable, match="has nothing in it, and one was here"):
        make_guard(f"sqlite:///{path}")


def test_a31_a_deleted_ledger_is_no_new_budget(path):
    path.unlink()
    with pytest.raises(LedgerUnavailable, match="existed here and is missing") as caught:
        make_guard(f"sqlite:///{path}")
    assert "-lock" in caught.value.advice
    assert not path.exists()


def test_a31_a_ledger_deleted_with_all_beside_it_is_refused_where_it_must_exist(path):
    for each in path.parent.glob("spend.db*"):
        each.unlink()
    with pytest.raises(LedgerUnavailable, match="does not exist") as caught:
        make_guard(f"sqlite:///{path}", ledger_must_exist=True)
    assert "--new" in caught.value.advice
    assert not path.exists()
    made = CliRunner().invoke(app, ["budget", "set", "wallet", "$2.00", "--new", "--ledger", f"sqlite:///{path}"])
    assert (made.exit_code, "$2.00" in made.output) == (0, True), made.output
    with make_guard(f"sqlite:///{path}", ledger_must_exist=True) as guard:
        assert guard.shell.store.nodes()[0].limit == 2_000_000_000


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.xdist_group("postgres"))])
def unmade(request, tmp_path):
    """The URL of a ledger of which the tables were made, and its maker was killed before its wallet was."""
    url = f"sqlite:///{tmp_path / 'unmade.db'}" if request.param == "sqlite" else request.getfixturevalue("url")
    open_store(url).close()
    return url


def test_a31_a_ledger_whose_making_was_killed_is_made_to_its_end_and_is_no_budget_without_a_limit(unmade):
    with pytest.raises(LedgerUnavailable, match="has no wallet") as caught:
        make_guard(unmade, ledger_must_exist=True)
    assert "--new" in caught.value.advice
    said = CliRunner().invoke(app, ["budget", "set", "wallet", "2.00", "--ledger", unmade])
    assert "--new" in str(said.exception)
    made = CliRunner().invoke(app, ["budget", "set", "wallet", "2.00", "--new", "--ledger", unmade])
    assert (made.exit_code, "$2.00" in made.output) == (0, True), made.output
    with make_guard(unmade, ledger_must_exist=True) as guard:
        assert guard.shell.store.nodes()[0].limit == 2_000_000_000
    again = CliRunner().invoke(app, ["budget", "set", "wallet", "9.00", "--new", "--ledger", unmade])
    assert "already exists; leave out --new" in str(again.exception or again.output)


def test_a31_the_owners_limit_stands_outside_the_ledger_as_well(path):
    with pytest.raises(ConfigError, match="budget"):
        make_guard(f"sqlite:///{path}", budget="$5.00")


def test_a31_a_ledger_in_memory_cannot_have_been_there(path):
    with pytest.raises(LedgerUnavailable, match="does not exist"):
        make_guard("memory://", ledger_must_exist=True)

"""Budgets that seldom change are not read one by one at each opening, and an edit of one is found as before."""

import json
import sqlite3
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.merchant import URL, Shop, make_guard
from tests.support.refusals import fetch
from x402guard import LedgerUnavailable
from x402guard.stores import audit, open_store
from x402guard.stores.audit import audit_since
from x402guard.stores.read_only import ReadOnlyStore
from x402guard.stores.rows import NODE_COLUMNS, UnreadableRecord


@pytest.fixture(scope="module")
def few():
    """As if a ledger of a few budgets were worth a note."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "_FEWEST_QUIET", 1)
        yield patch


@pytest.fixture(scope="module")
def path(few, tmp_path_factory):
    """A ledger with sessions that have ended, one that is open, one that was tripped, and a hold that is live."""
    path = tmp_path_factory.mktemp("quiet") / "spend.db"
    with make_guard(f"sqlite:///{path}", budget="$9.00") as guard:
        for number in range(4):
            with guard.session(f"over{number}", budget="$0.50", id=f"over{number}") as session:
                session.charge("search", f"$0.0{number + 1}")
                fetch("sync", session, Shop(), url=f"{URL}/{number}")
                with session.child("inner", budget="$0.10") as child:
                    child.charge("search", "$0.02")
        guard.session("stopped", budget="$0.10", id="stopped").trip("for the test")
        guard.session("open", budget="$0.50", id="open").charge("search", "$0.02")
        with guard.session("lost", budget="$0.50", id="lost") as session:
            fetch("sync", session, Shop(paid=lambda *_: __import__("httpx").Response(500)), url=f"{URL}/lost")
    open_store(f"sqlite:///{path}").close()
    return path


def copied(path):
    raw = sqlite3.connect(path)
    copy = sqlite3.connect(":memory:", isolation_level=None)
    raw.backup(copy)
    raw.close()
    for (name,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        copy.execute(f"DROP TRIGGER {name}")
    copy.execute("PRAGMA ignore_check_constraints = ON")
    return copy


def noted(connection):
    [row] = connection.execute("SELECT value FROM marks WHERE kind = 'quiet'").fetchall()
    return json.loads(row[0])


def test_sessions_that_are_over_are_not_read_again(path):
    with closing(copied(path)) as ledger:
        others = noted(ledger)["others"]
        assert others.keys() >= {"wallet", "stopped", "open", "lost"}
        assert not {f"over{n}" for n in range(4)} & others.keys()
        assert others["wallet"] == sum(
            row[0] for row in ledger.execute("SELECT granted_in FROM nodes WHERE id LIKE 'over_'")
        )
        read = []
        found = audit_since(lambda sql, values: read.extend(rows := ledger.execute(sql, values).fetchall()) or rows)
        assert (found.problems, found.is_worth_noting) == ((), False)
        assert not [
            row for row in read if {*row[:2]} & {f"over{n}{tokens}" for n in range(4) for tokens in ("", "/tokens")}
        ]


UNREADABLE = "a row cannot be read"
LOOKED_AT = {
    "id", "parent_id", "kind", "state", "max_nanos", "seq", "head", "captured", "held", "granted_in", "granted_out", "live",
}  # fmt: skip
WORDS = {*NODE_COLUMNS} - LOOKED_AT
IDS = ["wallet", "over0", "over0/tokens", "over1", "over2", "stopped", "open", "lost", "no such budget"]
EDIT = st.one_of(
    st.tuples(
        st.sampled_from([name for name in NODE_COLUMNS if name != "id"]),
        st.sampled_from(IDS),
        st.sampled_from(
            ["0", "1", "NULL", "'open'", "'closed'", "'tripped'", "'wallet'", "'over1'", "{0} + 1", "{0} - 1"]
        ),
    ).map(lambda edit: f"UPDATE nodes SET {edit[0]} = {edit[2].format(edit[0])} WHERE id = '{edit[1]}'"),
    st.sampled_from(IDS).map(lambda one: f"DELETE FROM nodes WHERE id = '{one}'"),
    st.sampled_from(IDS).map(lambda one: f"DELETE FROM holds WHERE node_id = '{one}'"),
    st.sampled_from(IDS).map(lambda one: f"UPDATE holds SET state = 'held' WHERE node_id = '{one}'"),
    st.sampled_from(IDS).map(lambda one: f"UPDATE holds SET node_id = '{one}' WHERE state = 'held'"),
    st.sampled_from(IDS).map(lambda one: f"DELETE FROM entries WHERE node_id = '{one}' AND seq > 2"),
    st.sampled_from(IDS[:-1]).map(
        lambda one: f"UPDATE marks SET key = '{one}' WHERE kind = 'checked' AND key = 'over1'"
    ),
    st.just("UPDATE nodes SET captured = captured + iif(id = 'over1', 1, -1) WHERE id IN ('over1', 'over2')"),
    st.sampled_from(
        [
            "UPDATE nodes SET rowid = 1000 WHERE id = 'over1'",
            "UPDATE nodes SET rowid = -1 WHERE id = 'over1'",
            "UPDATE nodes SET head = head || char(0) || 'x' WHERE id = 'over1'",
            "UPDATE nodes SET state = state || char(0) || 'x' WHERE id = 'over1'",
            "UPDATE nodes SET id = 'over1 x' WHERE id = 'over1'",
            "INSERT INTO archived VALUES ('over1', 3, 'none.gz', 'd', 'x', 1)",
            "INSERT INTO archived VALUES ('over1', 30, 'none.gz', 'd', '{\"seq\": 30, \"captured\": 7}', 1)",
            "UPDATE nodes SET head = cast(x'ff' AS TEXT) WHERE id = 'over1'",
        ]
    ),
)


@settings(max_examples=200)
@given(edits=st.lists(EDIT, min_size=1, max_size=3))
def test_an_edit_is_found_as_if_nothing_had_been_noted(path, edits):
    with closing(copied(path)) as ledger:
        for edit in edits:
            try:
                ledger.execute(edit)
            except sqlite3.IntegrityError:  # of the wrong type, or two of one id
                continue
        found = _problems(ledger)
        ledger.execute("DELETE FROM marks WHERE kind = 'quiet'")
        expected = _problems(ledger)
        if expected == UNREADABLE and any(f"UPDATE nodes SET {name} " in edit for name in WORDS for edit in edits):
            return  # words of a budget that is over, which are found when it is read
        assert found == expected


def _problems(ledger):
    try:
        return sorted(audit_since(ledger.execute).problems)
    except (UnreadableRecord, sqlite3.OperationalError):
        return UNREADABLE
    except LedgerUnavailable:
        return "a budget is below itself"


@pytest.mark.parametrize("of", ["", "AND key = 'wallet'", "AND key = 'over1'"])
def test_a_sound_ledger_without_its_marks_is_sound(path, of):
    with closing(copied(path)) as ledger:
        ledger.execute(f"DELETE FROM marks WHERE kind = 'checked' {of}")
        assert _problems(ledger) == []


def test_a_row_that_is_gone_is_found_by_its_mark(path):
    """One that drew nothing and came after the note: no sum has it."""
    with closing(copied(path)) as ledger:
        ledger.execute("UPDATE nodes SET id = 'new' WHERE id = 'lost/tokens'")
        ledger.execute("UPDATE entries SET node_id = 'new' WHERE node_id = 'lost/tokens'")
        assert "budget 'lost/tokens': it has journal entries but no row" in _problems(ledger)


def test_a_note_that_cannot_be_read_is_none(path):
    with closing(copied(path)) as ledger:
        far, many = 2**63, json.dumps({f"s{n}": 0 for n in range(100)})
        for value in (
            "{}", '{"last": "x"}', '{"last": 3, "digest": "", "others": {}}', "[]", "x", "null",
            f'{{"last": {far}, "digest": "", "others": {{}}}}', f'{{"last": {far - 1}, "digest": "", "others": {many}}}',
        ):  # fmt: skip
            ledger.execute("UPDATE marks SET value = ? WHERE kind = 'quiet'", (value,))
            found = audit_since(ledger.execute)
            assert (found.problems, found.is_worth_noting) == ((), True)


def test_a_session_that_goes_on_is_read_again_and_noted_anew(few, path, tmp_path):
    with closing(sqlite3.connect(path)) as raw, closing(sqlite3.connect(tmp_path / "l.db")) as copy:
        raw.backup(copy)
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard, guard.session("over1", budget="$0.50", id="over1") as session:
        session.charge("search", "$0.01")
        with make_guard(url):
            with closing(sqlite3.connect(tmp_path / "l.db")) as raw:
                assert "over1" in noted(raw)["others"]
    few.setattr(audit, "_MOST_NEWER", 0)
    for name, others in (
        ("a", {"a", "over1"}),
        ("b", {"a", "b"}),
    ):  # it has gone on since it was checked, and then no more
        with make_guard(url) as guard:
            guard.session(name, budget="$0.10", id=name).charge("search", "$0.01")
        open_store(url).close()
        with closing(sqlite3.connect(tmp_path / "l.db")) as raw:
            assert {"a", "b", "over1"} & noted(raw)["others"].keys() == others
    ReadOnlyStore(tmp_path / "l.db").close()


def test_a_small_ledger_has_no_note(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "WORTH_NOTING", 1)
        patch.setattr(audit, "_FEWEST_QUIET", 500)
        url = f"sqlite:///{tmp_path / 'l.db'}"
        with make_guard(url) as guard, guard.session("s", budget="$0.10") as session:
            session.charge("search", "$0.01")
        open_store(url).close()
    with closing(sqlite3.connect(tmp_path / "l.db")) as raw:
        assert dict(
            raw.execute("SELECT kind, count(*) FROM marks WHERE kind IN ('checked', 'quiet') GROUP BY kind")
        ).keys() == {"checked"}

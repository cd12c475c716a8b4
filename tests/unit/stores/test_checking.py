"""Budgets that have ended are not read one by one at each opening, and an edit of one is found all the same."""

import json
import sqlite3
import threading
from contextlib import closing, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from tests.support.ledger import usd
from tests.support.merchant import URL, Shop, make_guard
from tests.support.refusals import fetch
from x402guard import LedgerUnavailable
from x402guard.flow import heartbeat
from x402guard.guard import opening
from x402guard.kernel.rows import Evidence
from x402guard.ledger.events import Correct
from x402guard.ledger.transitions import apply
from x402guard.ledger.view import Scope
from x402guard.stores import checking, open_store
from x402guard.stores.checking import AT_OPENING, EVERYTHING, Checks, check_since, checked_mark, part_mark
from x402guard.stores.read_only import ReadOnlyStore
from x402guard.stores.rows import NODE_COLUMNS, UnreadableRecord


@pytest.fixture(scope="module")
def few():
    """As if a part were four budgets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "PART", 4)
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
    """The parts that are noted."""
    return [
        json.loads(row[0]) for row in connection.execute("SELECT value FROM marks WHERE kind = 'part' ORDER BY key")
    ]


def others_of(connection):
    """The budgets that are in a part and not quiet."""
    return {each for part in noted(connection) for each in part["others"]}


def test_sessions_that_are_over_are_not_read_again(path):
    with closing(copied(path)) as ledger:
        parts, rows = noted(ledger), ledger.execute("SELECT count(*) FROM nodes").fetchone()[0]
        assert [part["last"] for part in parts] == [4 * (number + 1) for number in range(rows // 4)]
        assert others_of(ledger) >= {"wallet", "stopped"}
        assert not {f"over{n}" for n in range(4)} & others_of(ledger)
        quiet = "SELECT sum(granted_in) FROM nodes WHERE parent_id = 'wallet' AND closed_ms IS NOT NULL AND rowid <= ?"
        assert sum(part["drawn"].get("wallet", 0) for part in parts) == sum(
            row[0] for row in ledger.execute(f"{quiet} AND live = 0", (parts[-1]["last"],))
        )
        read = []
        found = check_since(lambda sql, values: read.extend(rows := ledger.execute(sql, values).fetchall()) or rows)
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
        ledger.execute("DELETE FROM marks WHERE kind = 'part'")
        expected = _problems(ledger)
        if expected == UNREADABLE and any(f"UPDATE nodes SET {name} " in edit for name in WORDS for edit in edits):
            return  # words of a budget that is over, which are found when it is read
        assert found == expected


def _problems(ledger):
    try:
        return sorted(check_since(ledger.execute, EVERYTHING).problems)
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
    far = 2**63
    with closing(copied(path)) as ledger:
        [last] = ledger.execute("SELECT max(key) FROM marks WHERE kind = 'part'").fetchone()
        for value in (
            "{}", '{"first": "x"}', "[]", "x", "null",
            '{"first": 3, "last": 2, "digest": "", "others": [], "drawn": {}}',
            '{"first": 0, "last": 2, "digest": "", "others": [], "drawn": {}}',
            f'{{"first": 0, "last": {far}, "digest": "", "others": [], "drawn": {{}}}}',
        ):  # fmt: skip
            ledger.execute("UPDATE marks SET value = ? WHERE kind = 'part' AND key = ?", (value, last))
            found = check_since(ledger.execute)
            assert (found.problems, found.is_worth_noting) == ((), True)
            assert [part.last for part in found.parts][-1] == ledger.execute(
                "SELECT count(*) / 4 * 4 FROM nodes"
            ).fetchone()[0]


def test_a_session_that_goes_on_is_read_again_and_noted_anew(few, path, tmp_path):
    with closing(sqlite3.connect(path)) as raw, closing(sqlite3.connect(tmp_path / "l.db")) as copy:
        raw.backup(copy)
        copy.execute("DELETE FROM marks WHERE kind = 'file'")  # as if it were the first
        copy.commit()
    url = f"sqlite:///{tmp_path / 'l.db'}"

    def others():
        open_store(url).close()
        with closing(sqlite3.connect(tmp_path / "l.db")) as raw:
            return others_of(raw)

    with make_guard(url) as guard:
        assert "over1" not in others()
        with guard.session("over1", budget="$0.50", id="over1") as session:
            session.charge("search", "$0.01")
            assert "over1" in others()
        assert "over1" in others()  # it is read with the others, as long as its part is as it was noted
    ReadOnlyStore(tmp_path / "l.db").close()


def test_a_late_correction_in_a_session_that_is_over_is_no_edit(path, tmp_path):
    """Its row is another one than the one that was noted, and its journal says why."""
    with closing(sqlite3.connect(path)) as raw, closing(sqlite3.connect(tmp_path / "l.db")) as copy:
        raw.backup(copy)
        copy.execute("DELETE FROM marks WHERE kind = 'file'")  # as if it were the first
        copy.commit()
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with closing(open_store(url)) as store:
        hold_id = next(e.hold_id for e in store.entries("over2") if e.event == "capture" and e.captured == usd("$0.03"))
        event = Correct(usd("$0.04"), Evidence.PROVIDER_USAGE)
        scope = Scope(nodes=("over2",), holds=(hold_id,), durable=True)
        store.transact(scope, lambda view: apply(view, hold_id, event))
    store = open_store(url)
    assert store.audit() == []
    with store.one_moment() as query:
        assert check_since(query, EVERYTHING).problems == ()
    store.close()


FEW = AT_OPENING._replace(entries=5, summed=5, budgets=5, parts=1)


def checked_in_pieces(ledger, checks, most=200):
    """All that the background finds, piece by piece, each noted as the store notes it."""
    for pieces in range(1, most):
        found = checks.go_on(ledger.execute)
        if found.problems:
            return found.problems, pieces
        for node_id, said in found.journals.items():
            put(ledger, checked_mark(node_id), said)
        for part in found.parts:
            put(ledger, part_mark(part.first), part)
        if found.is_over:
            return (), pieces
    raise AssertionError("it does not come to an end")


def put(ledger, key, said):
    ledger.execute("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", (*key, json.dumps(to_builtins(said))))


@pytest.fixture
def unchecked(path, monkeypatch):
    """The ledger without a note, and with more in it than an opening reads."""
    monkeypatch.setattr(checking, "WORTH_NOTING", 5)
    with closing(copied(path)) as ledger:
        ledger.execute("DELETE FROM marks WHERE kind IN ('part', 'checked')")
        yield ledger


def test_an_opening_of_a_long_ledger_reads_a_piece(unchecked):
    found = check_since(unchecked.execute, FEW)
    assert (found.problems, found.is_over) == ((), False)
    assert found.read <= 5


def test_the_background_comes_to_the_end_and_notes_all_parts(unchecked):
    problems, pieces = checked_in_pieces(unchecked, Checks(is_whole=False))
    assert problems == ()
    assert pieces > 10
    rows = unchecked.execute("SELECT count(*) FROM nodes").fetchone()[0]
    assert len(noted(unchecked)) == rows // 4
    assert not {f"over{n}" for n in range(4)} & others_of(unchecked)
    found = check_since(unchecked.execute)
    assert (found.problems, found.read, found.is_over) == ((), 0, True)
    assert checked_in_pieces(unchecked, Checks(is_whole=False)) == ((), len(noted(unchecked)) + 2)


EDITS = {
    "what a session that is over has captured": "UPDATE nodes SET captured = captured + 1 WHERE id = 'over1'",
    "what the wallet has granted": "UPDATE nodes SET granted_out = granted_out - 1 WHERE id = 'wallet'",
    "what a session has drawn": "UPDATE nodes SET granted_in = granted_in - 1 WHERE id = 'over2'",
    "an entry": "UPDATE entries SET at_ms = at_ms + 1 WHERE node_id = 'over3' AND seq = 2",
    "an entry of the wallet": "UPDATE entries SET at_ms = at_ms + 1 WHERE node_id = 'wallet' AND seq = 9",
    "a limit": "UPDATE nodes SET max_nanos = max_nanos + 1 WHERE id = 'over1'",
    "a hold that is live": "UPDATE holds SET amount = amount - 1 WHERE state = 'held'",
    "a parent": "UPDATE nodes SET parent_id = 'stopped' WHERE id = 'over1'",
    "a row that is gone": "DELETE FROM nodes WHERE id = 'over3/tokens'",
}


@pytest.mark.parametrize("what", EDITS)
@pytest.mark.parametrize("when", ["before it was checked", "after it was checked"])
def test_the_background_finds_what_an_opening_left(unchecked, what, when):
    if when == "after it was checked":
        assert checked_in_pieces(unchecked, Checks(is_whole=False))[0] == ()
        if "entry" in what:
            return  # what was checked once is not read again: `verify` reads it
    elif "gone" in what:
        return  # nothing has noted it: `verify` finds its entries
    unchecked.execute("PRAGMA foreign_keys = OFF")
    unchecked.execute(EDITS[what])
    problems, _ = checked_in_pieces(unchecked, Checks(is_whole=False))
    assert problems


def test_a_guard_checks_on_and_stops_what_it_finds(path, tmp_path, monkeypatch):
    with closing(sqlite3.connect(path)) as raw, closing(sqlite3.connect(tmp_path / "l.db")) as copy:
        raw.backup(copy)
        copy.execute("DELETE FROM marks WHERE kind = 'file'")  # as if it were the first
        copy.commit()
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    monkeypatch.setattr(opening, "_PAUSE_S", 0.0)
    told, notices = threading.Event(), []

    def on_notice(notice):
        if notice.kind == "ledger_inconsistent":
            notices.append(notice)
            told.set()

    with (
        pytest.raises(LedgerUnavailable, match="is inconsistent"),  # so this instance cannot note that it has ended
        make_guard(f"sqlite:///{tmp_path / 'l.db'}", on_notice=on_notice, background_checks=True) as guard,
    ):
        session = guard.session("s", budget="$0.10")
        session.charge("search", "$0.01")
        with closing(sqlite3.connect(tmp_path / "l.db")) as raw:
            raw.execute("UPDATE nodes SET captured = captured + 1 WHERE id = 'over1'")
            raw.commit()
        guard.shell.store._checks = Checks(is_whole=True)  # as if its part had not had its turn at the opening
        assert told.wait(10)
        assert "budget 'over1': its row has captured" in notices[0].message
        assert notices[0].severity == "critical"
        with pytest.raises(LedgerUnavailable, match="is inconsistent: budget 'over1'"):
            session.charge("search", "$0.01")
    assert len(notices) == 1


def test_a_small_ledger_has_no_part(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "WORTH_NOTING", 1)
        patch.setattr(checking, "PART", 1_000)
        url = f"sqlite:///{tmp_path / 'l.db'}"
        with make_guard(url) as guard, guard.session("s", budget="$0.10") as session:
            session.charge("search", "$0.01")
        open_store(url).close()
    with closing(sqlite3.connect(tmp_path / "l.db")) as raw:
        assert dict(
            raw.execute("SELECT kind, count(*) FROM marks WHERE kind IN ('checked', 'part') GROUP BY kind")
        ).keys() == {"checked"}


def in_the_background(url, most=400):
    """What the background of one instance finds in the end."""
    store = open_store(url)
    try:
        for _ in range(most):
            if store.check_on():
                return None
    except LedgerUnavailable as error:
        return str(error)
    finally:
        with suppress(LedgerUnavailable):
            store.close()
    raise AssertionError("it never ends")


def forty_cents_less(path, node_id):
    """Edit a budget and what is above it, so that no balance differs."""
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(
            "UPDATE nodes SET captured = captured - 40000000, granted_in = granted_in - 40000000 WHERE id = ?",
            (node_id,),
        )
        raw.execute("UPDATE nodes SET granted_out = granted_out - 40000000 WHERE id = 'wallet'")


def test_more_open_budgets_than_an_opening_reads_are_compared_in_the_background(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "PART", 4)
        patch.setattr(check_since, "__defaults__", (AT_OPENING._replace(budgets=12),))
        with make_guard(url, budget="$9.00") as guard:
            for number in range(16):
                guard.session(f"s{number}", budget="$0.10", id=f"s{number}").charge("search", "$0.05")
        for _ in range(12):
            assert in_the_background(url) is None
        forty_cents_less(tmp_path / "l.db", "s3")
        found = [in_the_background(url) for _ in range(2)]
    assert any(each is not None and "is inconsistent: budget" in each for each in found), found


def test_a_number_in_a_row_that_promises_more_entries_hides_nothing(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url, budget="$1.00") as guard:
        for number in range(4):
            guard.session(f"s{number}", budget="$0.10", id=f"s{number}").charge("search", "$0.05")
        with guard.session("old", budget="$0.10", id="old") as old:
            old.charge("search", "$0.01")
    with closing(sqlite3.connect(tmp_path / "l.db")) as raw, raw:
        raw.execute("UPDATE nodes SET seq = seq + 60000 WHERE id = 'old'")
    forty_cents_less(tmp_path / "l.db", "s3")
    with pytest.raises(LedgerUnavailable, match="is inconsistent: budget"):
        raise LedgerUnavailable(in_the_background(url) or "nothing is found")


def test_a_row_that_cannot_be_read_is_found_in_the_background(unchecked):
    assert checked_in_pieces(unchecked, Checks(is_whole=False))[0] == ()
    unchecked.execute("UPDATE nodes SET kind = 'zz' WHERE id = 'over2'")
    assert checked_in_pieces(unchecked, Checks(is_whole=True))[0]


def test_a_part_without_rows_is_found(unchecked):
    assert checked_in_pieces(unchecked, Checks(is_whole=False))[0] == ()
    part = noted(unchecked)[0]
    unchecked.execute("PRAGMA foreign_keys = OFF")
    unchecked.execute("DELETE FROM nodes WHERE rowid > ? AND rowid <= ?", (part["first"], part["last"]))
    assert checked_in_pieces(unchecked, Checks(is_whole=True))[0]

"""What a process knows of a file it asks no more, until another one has written: holds that it wrote, and when the next is due."""

import pytest

from tests.support.ledger import Books, Clock, a_hold, an_id, usd
from x402guard.errors import IllegalTransition
from x402guard.kernel.rows import Evidence, HoldKind, HoldState
from x402guard.ledger.authorize import lapse_due
from x402guard.ledger.events import Capture, Void
from x402guard.ledger.transitions import apply, begin
from x402guard.stores.sqlite_rows import SqliteRows

TOOL = {"kind": HoldKind.TOOL}
ENDED = Capture(usd("$0.05"), Evidence.ESTIMATE)


@pytest.fixture
def both(tmp_path):
    """Two processes on one ledger, as far as SQLite knows: two stores, each with connections of its own."""
    clock = Clock()
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    one, other = Books(url, clock=clock), Books(url, clock=clock, session=None)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def reads(monkeypatch):
    """The ids of the holds that were read from the file."""
    found = []
    original = SqliteRows.get_holds

    def seen(rows, hold_ids):
        ids = tuple(hold_ids)
        before = rows._writer.total_changes, len(statements)
        result = original(rows, ids)
        found.extend(ids if len(statements) > before[1] else ())
        return result

    statements = []
    begin = SqliteRows.begin

    def begun(rows):
        rows._writer.set_trace_callback(
            lambda text: statements.append(text) if "FROM holds WHERE id IN" in text else None
        )
        begin(rows)

    monkeypatch.setattr(SqliteRows, "get_holds", seen)
    monkeypatch.setattr(SqliteRows, "begin", begun)
    return found


def test_a_live_hold_that_this_process_has_written_is_not_read_again(both, reads):
    (one, _), name = both, an_id("h")
    one.hold(name, **TOOL)
    reads.clear()
    assert one.step(name, ENDED).state is HoldState.CAPTURED
    assert reads == []
    assert one.step(name, ENDED).state is HoldState.CAPTURED  # it has ended, so it is known no longer
    assert reads == [name]


def test_what_another_process_has_made_of_a_hold_is_seen(both):
    one, other = both
    one.hold("h", **TOOL)
    other.step("h", Void("the tool was not called"))
    with pytest.raises(IllegalTransition, match="hold h is voided"):
        one.step("h", ENDED)
    assert one.balances() == (0, 0, 0, 0)


def test_a_change_that_fails_leaves_nothing_known(both):
    one, _ = both
    one.hold("h", **TOOL)

    def fails(view):
        apply(view, "h", ENDED)
        raise RuntimeError("after it")

    with pytest.raises(RuntimeError):
        one.change(fails, holds=("h",))
    assert one.store.hold("h").state is HoldState.HELD
    assert one.step("h", Void("not called")).state is HoldState.VOIDED


def due(books):
    return books.change(lambda view: view.due, nodes=("s",))


@pytest.mark.parametrize("known", [False, True], ids=["nothing known", "known that none is due"])
@pytest.mark.parametrize("who", ["own", "of another process"])
def test_the_next_hold_that_is_due_is_found_whoever_wrote_it_and_whenever(both, who, known):
    one, other = both
    one.hold("late", deadline_s=100, **TOOL)
    if known:
        assert due(one) == ()
    (one if who == "own" else other).hold("early", deadline_s=70, **TOOL)
    one.clock.now_ms += 70_000
    assert due(one) == ()  # until its last second
    one.clock.now_ms += 1_000
    assert due(one) == ("early",)
    assert due(one) == ("early",)  # nothing has ended it
    one.clock.now_ms += 100_000
    assert due(one) == ("early", "late")
    (one if who == "own" else other).step("early", ENDED)
    assert due(one) == ("late",)
    one.change(lapse_due, nodes=("s",))
    assert due(one) == ()
    assert [one.store.hold(each).captured for each in ("early", "late")] == [usd("$0.05"), usd("$0.10")]


def test_a_hold_of_a_change_that_failed_is_never_due(both):
    one, _ = both
    one.hold("late", deadline_s=100, **TOOL)

    def fails(view):
        begin(view, a_hold("early", deadline_s=50, now_ms=one.clock.now_ms, **TOOL), {})
        raise RuntimeError("after it")

    with pytest.raises(RuntimeError):
        one.change(fails, nodes=("s",), holds=("early",))
    one.clock.now_ms += 60_000
    assert due(one) == ()
    one.clock.now_ms += 41_000
    assert due(one) == ("late",)


def test_a_hold_that_a_chain_can_prove_is_never_due(both):
    one, _ = both
    assert due(one) == ()
    one.hold("paid", deadline_s=50, chain_evidence=True)
    one.clock.now_ms += 60_000
    assert due(one) == ()

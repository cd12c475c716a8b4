"""A session without an id is written with its first hold, or as soon as somebody reads it; one with an id at its opening."""

import asyncio
import gc
import signal
import sys
import threading
import time
from contextlib import suppress
from decimal import Decimal

import pytest

from tests.support.merchant import make_guard
from x402guard import ConfigError, LedgerUnavailable, SessionTripped
from x402guard.kernel.rows import WALLET
from x402guard.ledger.owner import trip_node
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.views.books import books_of


@pytest.fixture
def store(ledger_url):
    found = open_store(ledger_url)
    yield found
    found.close()


@pytest.fixture
def guard(store):
    with make_guard(store, budget="$9.00") as made:
        yield made


@pytest.fixture
def written(store):
    """The ids of the sessions that are written: by rows, without a look that would write the others."""

    def ids():
        kept, store._openings = store._openings, {}
        try:
            return [node.id for node in store.nodes() if node.kind == "session"]
        finally:
            store._openings = kept

    return ids


def seen_by(store, monkeypatch):
    """The change sets that are written from now on."""
    seen, usual = [], type(store).commit

    def commit(self, scope, propose, **more):
        def noted(loaded):
            change_set = propose(loaded)
            seen.append([entry.event for entry in change_set.entries])
            return change_set

        return usual(self, scope, noted, **more)

    monkeypatch.setattr(type(store), "commit", commit)
    return seen


def test_a_new_session_is_written_with_its_first_hold(guard, store, written, monkeypatch):
    session = guard.session("s", budget="$1.00")
    assert written() == []
    seen = seen_by(store, monkeypatch)
    session.charge("serp", "$0.01")
    assert written() == [session.id]
    assert [each for each in seen if each] == [["open", "open", "authorize", "grant", "grant", "capture"]]
    session.charge("serp", "$0.02")
    assert session.spent == Decimal("0.03")


def test_one_with_an_id_is_written_at_its_opening(guard, written):
    guard.session("s", budget="$1.00", id="order-1")
    assert written() == ["order-1"]


def test_one_that_is_never_used_is_written_with_its_end(guard, written):
    with guard.session("s", budget="$1.00") as session:
        assert written() == []
    assert written() == [session.id]
    assert guard.shell.store.path(session.id)[0].state == "closed"


def at_one_moment(store):
    with store.at_one_moment() as ledger:
        return ledger.nodes()


@pytest.mark.parametrize(
    "read",
    [
        lambda guard, session: session.spent,
        lambda guard, session: session.remaining,
        lambda guard, session: session.report(),
        lambda guard, session: guard.shell.store.nodes(),
        lambda guard, session: guard.shell.store.nodes(WALLET),
        lambda guard, session: guard.shell.store.entries(WALLET),
        lambda guard, session: guard.shell.store.path(session._node_id),
        lambda guard, session: session.id,
        lambda guard, session: guard.shell.store.current(0),
        lambda guard, session: guard.shell.store.newest(1),
        lambda guard, session: guard.shell.store.named("s", 1),
        lambda guard, session: guard.shell.store.fitting("s", 1),
        lambda guard, session: guard.shell.store.tally(),
        lambda guard, session: guard.shell.store.marks("named", ""),
        lambda guard, session: at_one_moment(guard.shell.store),
        lambda guard, session: session.child("c", budget="$0.10"),
        lambda guard, session: session.trip("enough"),
    ],
)
def test_who_reads_it_finds_it(guard, written, read):
    session = guard.session("s", budget="$1.00")
    read(guard, session)
    assert session._node_id in written()


def test_what_reads_another_budget_writes_nothing(guard, written, store):
    guard.session("s", budget="$1.00")
    other = guard.session("t", budget="$1.00")
    other.charge("serp", "$0.01")
    assert (other.spent, store.path(WALLET)[0].id) == (Decimal("0.01"), WALLET)
    assert store.outstanding() == []
    assert written() == [other.id]


def test_a_guard_that_ends_writes_those_that_are_left(ledger_url):
    with make_guard(ledger_url) as guard:
        session = guard.session("s", budget="$1.00")
    store = guard.shell.store if ledger_url == "memory://" else open_store(ledger_url)
    assert session.id in [node.id for node in store.nodes()]
    store.close()


def test_what_is_wrong_is_said_at_the_opening(guard, written):
    with pytest.raises(ConfigError, match="budget: there is no session"):
        guard.session("s")
    with pytest.raises(ConfigError, match="name:"):
        guard.session("", budget="$1.00")
    assert written() == []


def test_a_wallet_that_is_stopped_meanwhile_refuses_the_first_hold(guard, store, written):
    session = guard.session("s", budget="$1.00")
    store.transact(Scope(nodes=(WALLET,), durable=True), lambda view: trip_node(view, WALLET, "enough", by="me"))
    with pytest.raises(SessionTripped, match="enough"):
        session.charge("serp", "$0.01")
    assert store.outstanding() == []
    assert session.spent == 0


def test_first_holds_at_once_open_it_once(guard, store):
    for _ in range(10):
        session, barrier, errors = guard.session("s", budget="$1.00"), threading.Barrier(6), []

        def work(session=session, barrier=barrier, errors=errors):
            barrier.wait(10)
            try:
                session.charge("serp", "$0.01")
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(20)
        assert errors == []
        opened = [entry for entry in store.entries(session.id) if entry.event in ("open", "resume")]
        assert [entry.event for entry in opened] == ["open"]
        assert session.spent == Decimal("0.06")


def test_first_holds_of_tasks_open_it_once(guard, store):
    async def main():
        session = guard.session("s", budget="$1.00")
        await asyncio.gather(*(session.acharge("serp", "$0.01", arguments={"n": n}) for n in range(8)))
        return session

    session = asyncio.run(main())
    assert [entry.event for entry in store.entries(session.id) if entry.event in ("open", "resume")] == ["open"]
    assert session.spent == Decimal("0.08")


def test_a_change_that_fails_leaves_it_for_the_next_one(guard, store, written):
    session = guard.session("s", budget="$1.00")

    def fails(view):
        raise ValueError("the change")

    with pytest.raises(ValueError, match="the change"):
        store.transact(Scope(nodes=(session._node_id,), durable=True), fails)
    assert written() == []
    session.charge("serp", "$0.01")
    assert written() == [session.id]


def test_an_id_that_is_the_name_of_one_that_is_not_written_is_refused(guard, written):
    session = guard.session("customer-7", budget="$1.00")
    with pytest.raises(ConfigError, match="id: 'customer-7' is the name of another budget"):
        guard.session("decoy", budget="$0.01", id="customer-7")
    guard.session("customer-7", budget="$0.01")  # names may repeat
    guard.session("t", budget="$0.01", id="t")
    assert written() == ["t"]
    session.charge("serp", "$0.01")
    assert written() == ["t", session.id]


def test_a_session_that_nobody_can_use_any_more_is_never_written(store, written, monkeypatch):
    # A slow machine needs more than a second for this, and after one second the guard shows each session to others.
    monkeypatch.setattr("x402guard.guard.guard._SEEN_S", 3600.0)
    with make_guard(store, budget="$9.00") as guard:
        for _ in range(20):
            guard.session("s", budget="$1.00")
        gc.collect()
        assert store._openings == {}
        assert written() == []


def test_the_report_of_a_session_writes_no_other_one(guard, written):
    used = guard.session("used", budget="$1.00")
    used.charge("serp", "$0.01")
    kept = guard.session("not used", budget="$1.00")
    used.report()
    assert written() == [used.id]
    books_of(guard.shell.store, WALLET)
    assert written() == [used.id, kept.id]


def test_many_unused_sessions_slow_no_change_down(guard, store, monkeypatch):
    session = guard.session("s", budget="$1.00")
    session.charge("serp", "$0.01")
    kept = [guard.session(f"s{n}", budget="$1.00") for n in range(50)]

    class Counted(dict):
        looks = 0

        def __iter__(self):
            Counted.looks += 1
            return super().__iter__()

        def items(self):
            Counted.looks += 1
            return super().items()

    monkeypatch.setattr(store, "_openings", Counted(store._openings))
    session.charge("serp", "$0.02")
    assert (Counted.looks, len(store._openings)) == (0, len(kept))


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="signals of Unix")
@pytest.mark.parametrize("at", ["decided", "change"])
@pytest.mark.parametrize("then", ["spent", "close", "session"])
def test_a_signal_handler_may_use_the_guard_while_a_session_is_opened(guard, at, then):
    session, seen = guard.session("a", budget="$1.00"), []
    session.charge("serp", "$0.01")

    def handler(*_):
        acts = {
            "spent": lambda: session.spent,
            "close": guard.close,
            "session": lambda: guard.session("in", budget="$1"),
        }
        try:
            acts[then]()
            seen.append("done")
        except LedgerUnavailable:
            seen.append("refused")

    def traced(frame, *_):
        if frame.f_code.co_name == at and not raised:
            raised.append(at)
            signal.raise_signal(signal.SIGUSR1)

    raised, usual, tracing = [], signal.signal(signal.SIGUSR1, handler), sys.gettrace()
    sys.settrace(traced)
    try:
        with suppress(LedgerUnavailable):  # the guard was closed meanwhile
            guard.session("b", budget="$1.00")
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGUSR1, usual)
    assert len(seen) == len(raised)


def test_another_process_sees_a_session_a_second_later(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url, budget="$9.00") as guard:
        session = guard.session("s", budget="$1.00")
        until_s = time.monotonic() + 20
        while True:
            other = open_store(url)
            seen = [node.name for node in other.nodes() if node.kind == "session"]
            other.close()
            if seen:
                break
            assert time.monotonic() < until_s
            time.sleep(0.1)
        assert session.spent == 0


def test_an_id_that_is_given_to_another_process_can_be_opened_there(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url, budget="$9.00") as guard, make_guard(url) as other:
        session = guard.session("s", budget="$1.00")
        other.session("s", id=session.id).charge("serp", "$0.01")
        assert session.spent == Decimal("0.01")


def test_those_that_are_old_are_written_together_and_one_that_cannot_be_opened_stops_no_other(
    guard, store, monkeypatch
):
    kept = [guard.session(f"s{n}", budget="$0.01") for n in range(120)]
    bad = store._openings[kept[60]._node_id]

    def refused(view):
        raise ConfigError("budget: it does not fit any more")

    store._openings[kept[60]._node_id] = bad._replace(change=refused)
    store.write_openings(older_s=60.0)
    assert len(store._openings) == 120
    seen = seen_by(store, monkeypatch)
    store.write_openings(older_s=0.0)
    assert len(seen) == 2 + 49  # the fifty of which one fails are written one by one
    assert [*store._openings] == [kept[60]._node_id]
    written = {node.name for node in store.nodes() if node.kind == "session"}
    assert written == {f"s{n}" for n in range(120) if n != 60}


def test_one_that_cannot_be_opened_any_more_says_so_to_who_uses_it(guard, store, written):
    session = guard.session("s", budget="$1.00")

    def refused(view):
        raise ConfigError("budget: it does not fit any more")

    store._openings[session._node_id] = store._openings[session._node_id]._replace(change=refused)
    assert store.nodes(WALLET)
    assert session.id not in written()
    for use in (lambda: session.charge("serp", "$0.01"), lambda: session.spent, session.report, session.close):
        with pytest.raises(ConfigError, match="budget: it does not fit any more"):
            use()
    assert guard.session("t", budget="$1.00").charge("serp", "$0.01").amount == Decimal("0.01")

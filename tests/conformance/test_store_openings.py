"""A session without an id is written with its first hold, or as soon as somebody reads it; one with an id at its opening."""

import asyncio
import threading
from decimal import Decimal

import pytest

from tests.support.merchant import make_guard
from x402guard import ConfigError, SessionTripped
from x402guard.kernel.rows import WALLET
from x402guard.ledger.owner import trip_node
from x402guard.ledger.view import Scope
from x402guard.stores import open_store


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
        lambda guard, session: guard.shell.store.path(session.id),
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
    assert session.id in written()


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
        store.transact(Scope(nodes=(session.id,), durable=True), fails)
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

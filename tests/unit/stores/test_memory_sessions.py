"""A ledger in memory keeps the last sessions that have ended, and of the others what they captured, above them."""

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, make_guard
from tests.support.refusals import fetch
from x402guard import ConfigError, Guard
from x402guard.kernel.rows import WALLET
from x402guard.ledger.view import Scope
from x402guard.stores import memory, open_store
from x402guard.views.books import books_of
from x402guard.views.report import Report

MOST = 5


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(memory, "_AT_ONCE", 1)
    monkeypatch.setattr(memory, "_GRANTS_KEPT", 10)


@pytest.fixture
def guard():
    with make_guard("memory://", budget="$9.00", memory_sessions=MOST) as made:
        yield made


def ended(guard, name, amount="$0.01", **more):
    with guard.session(name, budget="$0.50", **more) as session:
        session.charge("serp", amount)
    return session


def names(guard):
    return [node.name for node in guard.shell.store.newest(1_000) if node.kind == "session"]


def test_the_last_ones_stay_and_all_that_was_captured_counts(guard):
    for number in range(20):
        ended(guard, f"s{number}")
    assert names(guard) == [f"s{number}" for number in range(15, 20)]
    [wallet] = guard.shell.store.path(WALLET)
    assert (wallet.granted_out, wallet.spent, wallet.live) == (2 * 10**8, 2 * 10**8, 0)
    assert guard.shell.store.tally() == (20, 0)
    assert guard.shell.store.forgotten() == {WALLET: (15, 15 * 10**7)}


def test_the_limit_of_the_wallet_counts_what_is_forgotten():
    with make_guard("memory://", budget="$0.10", memory_sessions=1) as guard:
        for number in range(10):
            ended(guard, f"s{number}")
        with guard.session("late", budget="$0.10") as late, pytest.raises(Exception, match="does not fit"):
            late.charge("serp", "$0.01")


def test_an_id_that_is_forgotten_is_refused_and_never_opened_afresh(guard):
    first = ended(guard, "first", id="order-1")
    for number in range(10):
        ended(guard, f"s{number}")
    for use in (
        lambda: guard.session("first", budget="$0.50", id="order-1"),
        first.report,
        lambda: first.spent,
        lambda: guard.shell.store.entries("order-1"),
    ):
        with pytest.raises(ConfigError, match=r"'order-1' has ended and is forgotten.*memory_sessions"):
            use()
    assert guard.session("other", budget="$0.50", id="order-2").id == "order-2"


def test_a_session_that_goes_on_stays(guard):
    ended(guard, "first", id="order-1")
    with guard.session("first", budget="$0.50", id="order-1") as again:
        for number in range(10):
            ended(guard, f"s{number}")
        again.charge("serp", "$0.01")
    assert again.spent * 100 == 2


def test_what_is_open_below_a_session_keeps_it(guard):
    parent = guard.session("parent", budget="$1.00")
    child = parent.child("child", budget="$0.10")
    parent.close()
    for number in range(10):
        ended(guard, f"s{number}")
    assert {"parent", "child"} <= {*names(guard)}
    child.close()
    for number in range(10):
        ended(guard, f"t{number}")
    assert "parent" not in names(guard)
    assert "child" not in names(guard)


@pytest.mark.parametrize("chains", [None, MockChain()], ids=["without a chain", "with one"])
def test_a_live_hold_an_unproven_payment_and_a_lost_answer_keep_their_session(chains):
    with make_guard("memory://", budget="$9.00", memory_sessions=MOST, chains=chains) as guard:
        _keep(guard, asks=chains is not None)


def _keep(guard, *, asks):
    with guard.session("held", budget="$0.50") as session:
        hold = session.hold("render", up_to="$0.20")
        hold.__enter__()
    with guard.session("paid", budget="$0.50") as session:
        fetch("sync", session, Shop(), url=URL)
    with guard.session("lost", budget="$0.50") as session:
        fetch("sync", session, Shop(paid=lambda *_: httpx.Response(500)), url=f"{URL}/lost")
    for number in range(20):
        ended(guard, f"s{number}")
    assert {"held", "lost", *(["paid"] if asks else [])} <= {*names(guard)}
    hold.__exit__(None, None, None)
    for number in range(20):
        ended(guard, f"t{number}")
    assert "held" not in names(guard)
    assert "lost" in names(guard)
    assert ("paid" in names(guard)) is asks  # without a chain nothing can show more than what it counts


def test_the_report_says_what_is_in_no_list(guard):
    budget = guard.budget("customer", "$5.00")
    for number in range(10):
        ended(budget, f"s{number}")
    for report in (budget.report(), Report.of(books_of(guard.shell.store, WALLET))):
        text = report.to_text()
        assert "5 sessions that have ended are forgotten (memory_sessions); the $0.05 that they captured" in " ".join(
            text.split()
        )


@pytest.mark.parametrize("bad", [0, -1, 1.5, "many", True, None])
def test_a_number_that_is_none_is_refused(bad):
    with pytest.raises(ConfigError, match="memory_sessions"):
        Guard(ledger="memory://", memory_sessions=bad)


def test_an_hour_of_traffic_adds_nothing(guard):
    """Nodes, holds, marks, entries and what finds them: after the first sessions none of them grows."""

    def sizes():
        rows = guard.shell.store._rows
        held = rows.ended
        return (
            len(rows.nodes), len(rows.holds), len(rows.live), len(rows.marks), len(rows.journal),
            sum(map(len, rows.journal.values())), len(held._ended), len(held._kept), len(held._marks),
        )  # fmt: skip

    budget = guard.budget("customer", "$5.00")
    for number in range(60):
        ended(budget, "request", f"$0.00{number % 9 + 1}")
    before = sizes()
    for number in range(300):
        ended(budget, "request", f"$0.00{number % 9 + 1}")
    after = sizes()
    assert all(new <= old + 25 for old, new in zip(before, after, strict=True)), (before, after)


def test_a_receipt_of_a_forgotten_payment_is_no_other_ones(guard):
    """Its transaction was shown for it once; which payment that was is forgotten, and that it was one is not."""
    with guard.session("paid", budget="$0.50") as session:
        fetch("sync", session, Shop(), url=URL)
    [mark] = [key for key in guard.shell.store._rows.marks if key[0] == "receipt"]
    for number in range(20):
        ended(guard, f"s{number}")
    assert mark not in guard.shell.store._rows.marks
    read = guard.shell.store.transact(Scope(marks=(mark, ("receipt", "eip155:1/0x01"))), lambda view: view.mark(mark))
    assert read == {"hold": "forgotten"}


def test_a_named_purchase_keeps_its_session_for_as_long_as_it_is_remembered():
    clock = Clock()
    store = open_store("memory://", clock_ms=clock, memory_sessions=MOST)
    with make_guard(store, budget="$9.00") as guard:
        with guard.session("paid", budget="$0.50") as session:
            fetch("sync", session, Shop(), url=URL, extensions={"purchase": "report 7"})
        for number in range(20):
            ended(guard, f"s{number}")
        assert "paid" in names(guard)
        clock.tick(86_401)
        for number in range(20):
            ended(guard, f"t{number}")
        assert "paid" not in names(guard)


def test_the_marks_of_a_host_are_no_sessions(guard):
    """An id may be the name of a host; what is known of the host outlasts the session."""
    fetch_in(guard, "courts.example")
    of_host = {key for key in guard.shell.store._rows.marks if key[1].partition(" ")[0] == "courts.example"}
    assert of_host
    for number in range(20):
        ended(guard, f"s{number}")
    assert "courts.example" not in {node.id for node in guard.shell.store.newest(1_000)}
    left = {key for key in guard.shell.store._rows.marks if key in of_host}
    assert {key[0] for key in of_host - left} <= memory._OF_RUN


def fetch_in(guard, session_id):
    with guard.session("s", budget="$0.50", id=session_id) as session:
        fetch("sync", session, Shop(), url=URL)


def test_an_hour_of_names_and_payments_adds_a_payment_and_its_host_alone(guard):
    """What a payment leaves is its transaction and its purchase; other marks and indexes go with their session."""

    def sizes():
        rows = guard.shell.store._rows
        held = rows.ended
        marks = [key for key in rows.marks if key[0] not in memory._SHOWN]
        return len(marks), len(rows.nodes), len(rows.holds), len(held._below), len(held._shown), len(held._marks)

    def some(first, count):
        for number in range(first, first + count):
            with guard.session(f"request-{number}", budget="$0.10") as session:
                session.charge("serp", "$0.001")
                with session.child("part", budget="$0.01"):
                    pass
                fetch("sync", session, Shop(), url=f"{URL}?n={number}")

    some(0, 30)
    before = sizes()
    some(100, 60)
    assert all(new <= old + 25 for old, new in zip(before, sizes(), strict=True)), (before, sizes())


def test_sessions_that_stay_do_not_slow_the_others_down(guard):
    looked = 0
    usual = memory.EndedSessions._tree

    def tree(self, session):
        nonlocal looked
        for node in usual(self, session):
            looked += 1
            yield node

    memory.EndedSessions._tree = tree
    try:
        left = []
        for number in range(200):
            with guard.session(f"s{number}", budget="$0.01") as session:
                left.append(session.child("never closed", budget="$0.001"))
    finally:
        memory.EndedSessions._tree = usual
    assert looked < 200 * 2 * 3


def test_a_late_end_of_a_hold_that_lapsed_is_counted():
    clock = Clock()
    store = open_store("memory://", clock_ms=clock, memory_sessions=MOST)
    with make_guard(store, budget="$9.00") as guard:
        session = guard.session("held", budget="$0.50")
        hold = session.hold("render", up_to="$0.20")
        hold.__enter__()
        session.close()
        clock.tick(1_000)
        for number in range(20):
            ended(guard, f"s{number}")
        assert "held" in names(guard)
        hold.__exit__(None, None, None)
        assert guard.shell.store.outstanding() == []


def test_closing_again_what_is_forgotten_does_nothing(guard):
    session = ended(guard, "first")
    for number in range(20):
        ended(guard, f"s{number}")
    session.close()
    session.__exit__(None, None, None)


def test_a_receipt_of_a_forgotten_payment_is_known_to_who_reads_it(guard):
    fetch_in(guard, "paid")
    [(kind, transaction)] = [key for key in guard.shell.store._rows.marks if key[0] == "receipt"]
    for number in range(20):
        ended(guard, f"s{number}")
    assert guard.shell.store.marks(kind, transaction) == {transaction: {"hold": "forgotten"}}
    assert guard.shell.store.marks(kind, f"{transaction}0") == {}

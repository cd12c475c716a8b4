"""What a watchdog takes for stuck, and what it does not: a slow call, a person who thinks, a run that has ended."""

import pytest

from tests.support.ledger import START_MS, Books, usd
from x402guard.frozen import replace
from x402guard.kernel.rows import NodeState
from x402guard.ledger.events import Void
from x402guard.ledger.owner import trip_node
from x402guard.ledger.watch import Limits, open_runs, seen_of, trip_stuck, why_stuck

LIMITS = Limits(silence_s=300, run_s=7_200, states=5)


@pytest.fixture
def books():
    made = Books(session="$1.00")
    yield made
    made.close()


def seen(books, *, questions=(), states=None):
    nodes = books.store.nodes()
    [run] = open_runs(nodes, ())
    holds = books.store.outstanding()
    return seen_of(run, nodes, books.store.now_ms(), holds=holds, questions=questions, states=states or {}, waits=())


def why(books, **more):
    return why_stuck(seen(books, **more), LIMITS, books.store.now_ms())


def test_a_run_is_silent_after_its_seconds_and_not_before(books):
    books.clock.tick(299)
    assert why(books) is None
    books.clock.tick(1)
    assert why(books) == "it is silent for 300 s"


def test_a_child_that_goes_on_is_a_run_that_goes_on(books):
    books.clock.tick(200)
    books.open("s/session-1", "$0.10", parent="s")
    books.clock.tick(200)
    assert why(books) is None
    books.clock.tick(100)
    assert why(books) == "it is silent for 300 s"


def test_a_call_under_way_is_no_silence_until_its_deadline(books):
    books.hold("h1", "$0.10", deadline_s=900)
    books.clock.tick(899)
    assert why(books) is None
    books.clock.tick(2)
    assert why(books) == "it is silent for 901 s"


def test_a_question_to_a_person_is_no_silence_until_its_end(books):
    asked = {"session": "s", "until_ms": START_MS + 600_000, "taken": False, "said": {}, "approvers": 1, "number": 1}
    books.clock.tick(500)
    assert why(books, questions=[asked]) is None
    assert why(books, questions=[{**asked, "session": "another"}]) == "it is silent for 500 s"
    books.clock.tick(101)
    assert why(books, questions=[asked]) == "it is silent for 601 s"


def test_a_run_may_be_open_so_long_and_no_longer_whatever_it_does(books):
    for _ in range(72):
        books.clock.tick(100)
        books.hold(f"h{books.clock.now_ms}", "$0.001")
    assert why(books) is None
    books.clock.tick(1)
    assert why(books) == "it is open for 7201 s, and may be for 7200"
    assert why_stuck(seen(books), replace(LIMITS, run_s=None), books.store.now_ms()) is None


def test_the_same_state_so_often_is_stuck(books):
    states = {"s aaa": {"count": 4}, "s bbb": {"count": 1}, "other aaa": {"count": 9}}
    assert why(books, states=states) is None
    assert why(books, states={**states, "s aaa": {"count": 5}}) == "it has reported the same state 5 times"


def test_processes_that_are_stopped_are_named(books):
    one = replace(seen(books), stopped=(7,))
    assert why_stuck(one, LIMITS, START_MS) == "its process 7 is stopped"
    assert why_stuck(replace(one, stopped=(7, 8)), LIMITS, START_MS) == "its processes 7, 8 are stopped"


def tripped(books, looked, reason="it is silent for 300 s"):
    return books.change(lambda view: trip_stuck(view, looked, reason), nodes=looked.inside)


def test_a_stuck_run_is_tripped_with_its_word_and_its_reason(books):
    looked = seen(books)
    assert tripped(books, looked)
    node = books.node("s")
    assert (node.state, node.terminated_by, node.trip_reason) == ("tripped", "watchdog", "it is silent for 300 s")
    assert open_runs(books.store.nodes(), ()) == []
    assert not tripped(books, looked)


def test_a_run_that_has_gone_on_meanwhile_is_left_alone(books):
    looked = seen(books)
    books.clock.tick(1)
    books.hold("h1", "$0.10")
    assert not tripped(books, looked)
    assert books.node("s").state is NodeState.OPEN


def test_one_whose_processes_are_stopped_is_tripped_whatever_was_written_since(books):
    looked = replace(seen(books), stopped=(7,))
    books.clock.tick(1)
    books.hold("h1", "$0.10")
    books.step("h1", Void("not sent"))
    assert tripped(books, looked)
    assert books.balances("s") == (0, 0, 0, 0)


def test_one_that_its_owner_has_tripped_keeps_its_word(books):
    looked = seen(books)
    books.change(lambda view: trip_node(view, "s", "by its owner"), nodes=("s",))
    assert not tripped(books, looked)
    assert books.node("s").terminated_by == "kill_switch"
    assert usd("$1.00") == books.node("s").limit

"""Giving and answering a task does the same awaited as it does blocking."""

from contextlib import contextmanager

import pytest

from tests.support.awaited import call, each_way
from tests.support.delegations import asked
from x402guard import ConfigError, LedgerUnavailable, SessionClosed, TaskResult


def a_result(task, **changes):
    said = {"status": "completed", "output": {"found": 3}, "cost": "$0.10", "tokens": 0, "confidence": 0.9}
    return TaskResult(request_id=task.request.request_id, responder_id="worker", **{**said, **changes})


@pytest.fixture
def task(planner):
    return planner.delegate(asked(request_id="r1", structured_output=True))


@pytest.fixture
def worker(task, workers):
    with workers.redeem(task.token) as session:
        session.charge("search", "$0.10")
        yield session


@pytest.fixture
def ledger_away(books, monkeypatch):
    """A block in which each change of the ledger fails."""

    def away(*_, **__):
        raise LedgerUnavailable("the disk is full")

    @contextmanager
    def block():
        with monkeypatch.context() as broken:
            for name in ("transact", "transact_all"):
                broken.setattr(type(books.store), name, away, raising=name == "transact")
            yield

    return block


# -- submit -------------------------------------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("written", [lambda result: result, TaskResult.to_json, TaskResult.to_dict, None])
def test_a_whole_result_is_taken_however_it_is_written(way, task, worker, written):
    given = a_result(task)
    said = given.to_json().encode() if written is None else written(given)
    assert call(way, worker.task, "submit", said) == given
    assert task.result() == given


@each_way
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cost": "$0.41"}, "cost: .*more than the budget"),
        ({"cost": "$0.09"}, "cost: .*less than the .*0.10 in the ledger"),
        ({"output": [1]}, "output: the request asks for a JSON object"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_task_goes_on(way, task, worker, changes, why):
    with pytest.raises(ConfigError, match=f"^{why}"):
        call(way, worker.task, "submit", a_result(task, **changes))
    with pytest.raises(ConfigError, match=r"^responder_id: it is missing"):
        call(way, worker.task, "submit", {"request_id": "r1"})
    with pytest.raises(TimeoutError):
        task.result(timeout_s=0)
    call(way, worker.task, "submit", a_result(task))
    assert task.result().status == "completed"


@each_way
def test_it_is_answered_once(way, task, worker):
    call(way, worker.task, "submit", a_result(task))
    with pytest.raises(ConfigError, match="is answered already"):
        call(way, worker.task, "submit", a_result(task))


@each_way
@pytest.mark.parametrize(
    ("changes", "end"),
    [({}, "completed"), ({"status": "failed", "output": None, "error": "no source was found"}, "not_verified")],
)
def test_the_session_ends_as_the_result_says(way, task, worker, changes, end):
    call(way, worker.task, "submit", a_result(task, **changes))
    worker.close()
    assert worker.report().to_dict()["terminated_by"] == end


@each_way
def test_a_ledger_that_is_away_raises_and_the_result_can_be_given_later(way, task, worker, ledger_away):
    with ledger_away(), pytest.raises(LedgerUnavailable, match="the disk is full"):
        call(way, worker.task, "submit", a_result(task))
    assert call(way, worker.task, "submit", a_result(task)) == task.result()


# -- delegated ----------------------------------------------------------------------------------------------------------------


@each_way
def test_a_planner_that_starts_again_finds_its_task(way, books, workers):
    first = books.guard().session("planner", budget="$1.00", id="plan")
    task = first.delegate(asked(request_id="r1"))
    first.close()
    with books.guard().session("planner", id="plan") as again:
        found = call(way, again, "delegated", "r1")
        assert (found.request, found.session_id) == (task.request, task.session_id)
        assert found.token not in ("", task.token)
        with workers.redeem(found.token) as worker:
            worker.task.answer("done", confidence=0.9)
        assert found.result().output == "done"
        assert call(way, again, "delegated", "r1").token == ""
        assert call(way, again, "delegated", "r2") is None
        assert call(way, again, "delegated", "\ud800") is None


@each_way
def test_what_another_session_has_delegated_is_none_of_ones_own(way, books, planner, task):
    with books.guard().session("other", budget="$1.00") as other:
        assert call(way, other, "delegated", "r1") is None
    assert call(way, planner, "delegated", "r1").session_id == task.session_id


@each_way
def test_a_session_that_has_ended_finds_nothing(way, books):
    session = books.guard().session("planner", budget="$1.00")
    session.delegate(asked(request_id="r1"))
    session.close()
    with pytest.raises(SessionClosed):
        call(way, session, "delegated", "r1")


@each_way
def test_a_ledger_that_is_away_raises_and_the_task_can_be_found_later(way, books, planner, task, ledger_away):
    with ledger_away(), pytest.raises(LedgerUnavailable, match="the disk is full"):
        call(way, planner, "delegated", "r1")
    assert call(way, planner, "delegated", "r1").session_id == task.session_id

"""What a worker answers is compared with the request and with the ledger; a person reviews what the worker is not sure of."""

from decimal import Decimal

import pytest
from rich.pretty import pretty_repr

from tests.support.delegations import SOON, asked, world
from x402guard import ApprovalDenied, ConfigError, NeedsReview, Owner, Policy, SessionClosed, SessionTripped, TaskResult
from x402guard.delegation.token import read_token
from x402guard.ledger.owner import trip_node
from x402guard.ledger.view import Scope


def stop(session):
    """Trip one session, as its owner does; ``session.trip`` trips the whole run."""
    scope = Scope(nodes=(session.id,), durable=True)
    session.shell.store.transact(scope, lambda view: trip_node(view, session.id, "enough"))


def a_result(task, **changes):
    fields = {
        "request_id": task.request.request_id,
        "responder_id": "worker",
        "status": "completed",
        "output": {"found": 3},
        "cost": "$0.10",
        "tokens": 0,
        "confidence": 0.9,
    }
    return TaskResult(**{**fields, **changes})


@pytest.fixture
def task(planner):
    return planner.delegate(asked(structured_output=True, token_budget=500))


@pytest.fixture
def worker(task, workers):
    with workers.redeem(task.token) as session:
        session.charge("search", "$0.10")
        yield session


def test_a_result_is_handed_over_each_time(task, worker):
    given = worker.task.answer({"found": 3}, confidence=0.7)
    assert (given.cost, given.tokens) == (Decimal("0.10"), 0)
    assert task.result() == given
    assert task.result() == given


def test_a_whole_result_is_taken_also_as_json(task, worker):
    worker.task.submit(a_result(task).to_json())
    assert task.result() == a_result(task)


WRONG = {
    "request_id": ({"request_id": "t_other"}, "request_id: 't_other' is not"),
    "too dear": ({"cost": "$0.41"}, "cost: .*more than the budget"),
    "too cheap": ({"cost": "$0.09"}, "cost: .*less than the .*0.10 in the ledger"),
    "too many tokens": ({"tokens": 501}, "tokens: 501 are more than the 500"),
    "no object": ({"output": [1]}, "output: the request asks for a JSON object"),
    "a part, no object": ({"output": "x", "status": "partial"}, "output: the request asks for a JSON object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_and_the_task_goes_on(task, worker, name):
    changes, why = WRONG[name]
    with pytest.raises(ConfigError, match=f"^{why}"):
        worker.task.submit(a_result(task, **changes))
    with pytest.raises(TimeoutError, match="no result after 0 s"):
        task.result(timeout_s=0)
    worker.task.submit(a_result(task))
    assert task.result().status == "completed"


def test_a_missing_field_is_refused(task, worker):
    fields = a_result(task).to_dict()
    for name in fields:
        with pytest.raises(ConfigError, match=f"^{name}: it is missing"):
            worker.task.submit({key: value for key, value in fields.items() if key != name})


def test_tokens_below_those_of_the_ledger_are_refused(task, worker):
    worker.tokens.record_usage(100)
    with pytest.raises(ConfigError, match=r"^tokens: 99 are less than the 100 in the ledger"):
        worker.task.submit(a_result(task, tokens=99))
    assert worker.task.answer({}, confidence=1).tokens == 100


def test_it_is_answered_once(task, worker):
    worker.task.answer({"found": 3}, confidence=1)
    with pytest.raises(ConfigError, match="is answered already"):
        worker.task.answer({"found": 4}, confidence=1)


def test_a_worker_that_has_failed_says_so(task, worker):
    worker.task.answer(status="failed", error="no source")
    result = task.result()
    assert (result.status, result.error, result.cost) == ("failed", "no source", Decimal("0.10"))


def test_a_worker_without_an_answer_has_failed(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token):
        pass
    assert task.result().error == "the worker has ended without an answer"
    crashed = planner.delegate(asked())
    with pytest.raises(KeyError), workers.redeem(crashed.token):
        raise KeyError("a secret")
    assert crashed.result().error == "the worker has ended by KeyError"


def test_a_tripped_worker_has_failed(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        stop(worker)
        with pytest.raises(SessionTripped):
            worker.task.answer("x", confidence=1)
    assert task.result().error == "the worker has ended without an answer"
    stopped = planner.delegate(asked())
    worker = workers.redeem(stopped.token)
    stop(worker)
    assert "is tripped (kill_switch" in stopped.result().error
    worker.close()


def test_the_word_of_the_workers_end_is_that_of_its_answer(planner, workers):
    words = []
    for status, error in (("completed", None), ("partial", "half"), ("failed", "none")):
        task = planner.delegate(asked())
        with workers.redeem(task.token) as worker:
            worker.task.answer(None if status == "failed" else "x", status=status, error=error, confidence=1)
        words.append(worker.report().to_dict()["terminated_by"])
    assert words == ["completed", "not_verified", "not_verified"]


def test_nothing_is_spent_after_the_answer(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker, worker.child("inner", budget="$0.10") as inner:
        worker.charge("a", "$0.02")
        worker.task.answer("done", confidence=1)
        for session in (worker, inner):
            with pytest.raises(SessionClosed, match="the end of its task"):
                session.bind(session.charge)("a", "$0.01")
    assert task.result().cost == worker.spent == Decimal("0.02")


def test_a_failure_that_was_taken_is_final(tmp_path):
    with world(f"sqlite:///{tmp_path / 'spend.db'}") as books, books.guard().session("p", budget="$1.00") as planner:
        task = planner.delegate(asked())
        with books.guard().redeem(task.token) as worker, Owner(f"sqlite:///{tmp_path / 'spend.db'}") as owner:
            stop(worker)
            failed = task.result()
            owner.reset(worker.id)
            with pytest.raises(SessionClosed):
                worker.charge("a", "$0.01")
        assert task.result() == failed
        assert failed.status == "failed"


def test_a_result_made_past_its_checks_is_refused(task, worker):
    for changes in ({"confidence": 7.0}, {"responder_id": ""}, {"status": "done"}, {"cost": "x"}):
        with pytest.raises(ConfigError):
            worker.task.submit(a_result(task).model_copy(update=changes))
    worker.task.answer({}, confidence=1)
    assert task.result().status == "completed"


def test_a_result_that_cannot_be_read_is_a_failure(books, task, worker):
    worker.task.answer({}, confidence=1)
    key = ("delegation", task.session_id)

    def damage(view):
        row = view.mark(key)
        view.put_mark(key, {**row, "result": {**row["result"], "confidence": 7}})

    books.store.transact(Scope(marks=(key,)), damage)
    assert task.result().error.startswith("its result cannot be read: confidence: 7")


def test_a_budget_that_its_owner_has_raised_counts(tmp_path):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    with world(url) as books, books.guard().session("planner", budget="$1.00") as planner:
        task = planner.delegate(asked())
        with books.guard().redeem(task.token) as worker, Owner(url) as owner:
            owner.set_budget(task.session_id, "$0.80")
            worker.charge("a", "$0.60")
            assert worker.task.answer("done", confidence=1).cost == Decimal("0.60")


def test_a_worker_that_leaves_after_its_question_was_answered_has_failed(planner, workers):
    task = planner.delegate(asked())
    with pytest.raises(KeyError), workers.redeem(task.token) as worker:
        worker.task.answer("which year?", status="needs_clarification")
        task.reply(1912)
        assert worker.task.ask("which year?") == 1912
        raise KeyError
    assert task.result(timeout_s=0).error == "the worker has ended by KeyError"


@pytest.mark.parametrize("over", ["left", "followed", "late", "tripped"])
def test_a_worker_that_is_over_answers_no_more(books, workers, over):
    with books.guard().session("planner", budget="$1.00", id="plan") as planner:
        task = planner.delegate(asked())
        with workers.redeem(task.token) as worker:
            worker.task.answer("which year?", status="needs_clarification")
        if over == "followed":
            books.guard().redeem(task.token)
        elif over == "late":
            books.forward(SOON)
        elif over == "tripped":
            planner.trip("enough")
        with pytest.raises(ConfigError, match=r"^token: this opening of the session has ended"):
            worker.task.answer("late", confidence=1)


def test_a_planner_that_ended_for_good_takes_no_answer_after_the_deadline(books, workers):
    first = books.guard().session("planner", budget="$1.00", id="plan")
    task = first.delegate(asked())
    with workers.redeem(task.token) as worker:
        first.close()
        books.forward(SOON)
        with pytest.raises(SessionClosed, match="the end of its task"):
            worker.task.answer("late", confidence=1)


def test_what_was_said_of_a_revoked_task_stays(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        hold = worker.hold("render", up_to="$0.10")
        hold.__enter__()
        task.revoke("enough")
        first = task.result()
        hold.__exit__(None, None, None)
        assert task.result() == first


def test_what_a_terminal_shows_has_no_payload_and_no_signature(books, planner):
    task = planner.delegate(asked(payload="a secret"))
    token = read_token(task.token)
    with pytest.raises(TimeoutError):
        planner.child("c", budget="$0.01").ask(planner.id, "a secret", timeout_s=0)
    shown = "".join(map(pretty_repr, (task, task._delegation, task.request, token, planner.inputs()[0])))
    assert "secret" not in shown
    assert token.signature.hex() not in shown
    assert repr(token.signature) not in shown


def test_a_worker_answers_and_does_not_finish(task, worker):
    with pytest.raises(ConfigError, match=r"^finish: a delegated task ends with session.task.answer"):
        worker.finish("done")
    worker.task.answer({}, confidence=1)


@pytest.mark.parametrize("by", ["id", "request"])
def test_a_planner_that_starts_again_takes_its_result(books, workers, by):
    request = asked(request_id="r1")
    first = books.guard().session("planner", budget="$1.00", id="plan")
    task = first.delegate(request)
    with workers.redeem(task.token) as worker:
        first.close()
        worker.task.answer("done", confidence=0.9)
    with books.guard().session("planner", id="plan") as again:
        found = again.delegated("r1") if by == "id" else again.delegate(request)
        assert (found.token, found.request, found.session_id) == ("", task.request, task.session_id)
        assert again.delegated("\ud800") is None
        assert found.result().output == "done"
        assert again.delegated("r2") is None


# -- reviews ------------------------------------------------------------------------------------------------------------

UNSURE = pytest.mark.parametrize("confidence", [None, 0, 0.69])


@pytest.fixture
def file(tmp_path):
    with world(f"sqlite:///{tmp_path / 'spend.db'}") as made:
        yield made


def answered(books, confidence, policy=None, **changes):
    guard = books.guard() if policy is None else books.guard(policy=policy)
    planner = guard.session("planner", budget="$1.00")
    task = planner.delegate(asked(**changes))
    with books.guard().redeem(task.token) as worker:
        worker.task.answer({"found": "[red]secret[/]\x1b"}, confidence=confidence)
    return planner, task


def held_back(task):
    with pytest.raises(NeedsReview) as error:
        task.result()
    assert "secret" not in str(error.value)
    assert "x402guard approvals allow" in error.value.advice
    return str(error.value)


@UNSURE
def test_an_unsure_result_waits_for_a_person(file, tmp_path, confidence):
    _, task = answered(file, confidence)
    said = held_back(task)
    assert ("no confidence" if confidence is None else f"a confidence of {confidence:g}") in said
    held_back(task)
    with Owner(f"sqlite:///{tmp_path / 'spend.db'}", by="ada") as owner:
        [question] = owner.approvals()
        assert '{"found": "[red]secret[/]' in question.words
        assert "\x1b" not in question.words
        held_back(task)
        owner.allow(question.id)
        assert task.result().output == {"found": "[red]secret[/]\x1b"}
        assert task.result().output == {"found": "[red]secret[/]\x1b"}
        assert owner.approvals() == []
    [approval] = [each for each in file.events(task._payer) if each["name"] == "approval"]
    assert (approval["allowed"], approval["by"], approval["rule"]) == (True, ["ada"], "review")
    assert all("secret" not in row["words"] for row in file.store.marks("approval", "").values())


def test_a_denied_result_is_never_handed_over(file, tmp_path):
    _, task = answered(file, 0.1)
    held_back(task)
    with Owner(f"sqlite:///{tmp_path / 'spend.db'}", by="ada") as owner:
        owner.deny(owner.approvals()[0].id)
        [row] = owner.delegations()
        for _ in range(2):
            with pytest.raises(ApprovalDenied, match="by ada"):
                task.result()
        assert [row.state for row in owner.delegations()] == ["denied"]
    assert row.state == "answered"


def test_a_review_that_is_not_given_in_time_is_asked_again(books):
    _, task = answered(books, None, deadline=SOON + 30 * 86_400)
    for number in (1, 1, 2):
        held_back(task)
        [row] = books.store.marks("approval", "").values()
        assert (row["number"], row["taken"]) == (number, False)
        books.forward(4 * 86_400)


def test_an_answer_counts_however_late_the_result_is_taken(file, tmp_path):
    for yes in (True, False):
        _, task = answered(file, None, deadline=SOON + 30 * 86_400)
        held_back(task)
        with Owner(f"sqlite:///{tmp_path / 'spend.db'}", by="ada") as owner:
            (owner.allow if yes else owner.deny)(owner.approvals()[0].id)
        file.forward(8 * 86_400)
        if yes:
            assert task.result().status == "completed"
        else:
            with pytest.raises(ApprovalDenied, match="by ada"):
                task.result()


def test_the_owner_sets_what_is_sure(file):
    strict = Policy(min_confidence=0.95, loop=None, breaker=None)
    held_back(answered(file, 0.9, policy=strict)[1])
    lenient = Policy(min_confidence=0.5, loop=None, breaker=None)
    assert answered(file, 0.5, policy=lenient)[1].result().status == "completed"


def test_a_part_is_reviewed_too_and_a_failure_is_not(planner, workers):
    part, failed = planner.delegate(asked()), planner.delegate(asked())
    with workers.redeem(part.token) as worker:
        worker.task.answer("half", status="partial", error="the rest is missing")
    with workers.redeem(failed.token) as worker:
        worker.task.answer(status="failed", error="no source")
    held_back(part)
    assert failed.result().status == "failed"


def test_a_planner_that_is_tripped_gets_nothing(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        worker.task.answer("done", confidence=1)
    planner.trip("enough")
    with pytest.raises(SessionTripped):
        task.result()


@pytest.mark.parametrize("wrong", [-1, "5", True, float("nan"), 10**12], ids=str)
def test_a_time_that_is_none_is_refused(planner, wrong):
    task = planner.delegate(asked())
    with pytest.raises(ConfigError, match=r"^timeout_s: "):
        task.result(timeout_s=wrong)


def test_what_was_delegated_is_listed(file, tmp_path):
    with file.guard().session("planner", budget="$1.00", id="plan") as planner:
        offered, working, tripped = (planner.delegate(asked()) for _ in range(3))
        with file.guard().redeem(working.token) as worker:
            worker.charge("a", "$0.10")
            stop(file.guard().redeem(tripped.token))
            with Owner(f"sqlite:///{tmp_path / 'spend.db'}", read_only=True) as owner:
                rows = {row.request_id: row for row in owner.delegations("plan")}
                assert owner.delegations("id=plan") == owner.delegations() == list(rows.values())
    states = [rows[task.request.request_id].state for task in (offered, working, tripped)]
    with Owner(f"sqlite:///{tmp_path / 'spend.db'}", read_only=True) as owner:
        assert owner.report().to_dict()["id"] == "plan"  # the last run, not the last task
    assert states == ["offered", "working", "tripped"]
    row = rows[working.request.request_id].to_dict()
    assert (row["spent"], row["budget"], row["issuer"], row["task_type"]) == ("0.10", "0.40", "plan", "research")


def test_a_worker_that_has_ended_is_listed_by_how_it_ended(file, tmp_path):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    with file.guard().session("planner", budget="$1.00", id="plan") as planner:
        asking, abandoned = (planner.delegate(asked()) for _ in range(2))
        with file.guard().redeem(asking.token) as worker:
            worker.task.answer("which year?", status="needs_clarification")
        crashed = file.guard()
        crashed.redeem(abandoned.token)
        crashed.close()
        with Owner(url, read_only=True) as owner:
            states = {row.request_id: row.state for row in owner.delegations()}
    assert (states[asking.request.request_id], states[abandoned.request.request_id]) == ("asking", "abandoned")

"""A delegated session has at most what the session around it has: budget, tokens, deadline, tools, hosts, payees, prices."""

from decimal import Decimal
from fnmatch import fnmatchcase

import pytest

from tests.support.delegations import NOW_S, SOON, asked
from tests.support.merchant import PAYEE, URL, Shop, client
from x402guard import (
    BudgetExhausted,
    ConfigError,
    Policy,
    PolicyDenied,
    SessionClosed,
    SessionTripped,
    TaskRequest,
    TokenBudget,
    TokensExhausted,
)

OTHER = "0x857b06519E91e3A54538791bDbb0E22373e36b66"


def narrowed(books, session):
    [event] = [each for each in books.events(session) if each["name"] == "delegation_scope_narrowed"]
    return event


def test_an_equal_scope_is_granted_whole(books, workers):
    policy = Policy(hosts={"courts.example"}, payees={PAYEE}, loop=None, breaker=None)
    guard = books.guard(policy=policy)
    with guard.session("planner", budget="$1.00", tools={"search"}, tokens=5_000) as planner:
        whole = asked(
            budget="$1.00",
            token_budget=5_000,
            allowed_tools=["search"],
            allowed_hosts=["courts.example"],
            allowed_payees=[PAYEE],
        )
        task = planner.delegate(whole)
        assert task.removed == {}
        assert task.request == whole.model_copy(update={"issuer_id": planner.id})
        assert narrowed(books, planner)["removed"] == {}
        with workers.redeem(task.token) as worker:
            assert client(worker, Shop()).get(URL).status_code == 200
            worker.charge("search", "$0.50")
            worker.task.answer("done", confidence=1)


def test_what_the_parent_does_not_have_is_removed_and_told(books):
    guard = books.guard(policy=Policy(hosts={"*.example"}, loop=None, breaker=None))
    with guard.session("planner", budget="$1.00", tools={"search_*", "sum"}, payees={PAYEE}, tokens=5_000) as planner:
        task = planner.delegate(
            asked(
                budget="$5.00",
                token_budget=9_000,
                allowed_tools=["search_web", "delete", "sum*"],
                allowed_hosts=["courts.example", "evil.test", "*.courts.example"],
                allowed_payees=[PAYEE, OTHER],
            )
        )
        removed = {
            "budget": "4.00",
            "token_budget": 4_000,
            "allowed_tools": ["delete"],
            "allowed_hosts": ["evil.test"],
            "allowed_payees": [OTHER],
        }
        assert task.removed == removed
        assert task.request.budget == Decimal("1.00")
        assert task.request.token_budget == 5_000
        assert task.request.allowed_tools == ("search_web", "sum*")
        assert task.request.allowed_hosts == ("*.courts.example", "courts.example")
        event = narrowed(books, planner)
        assert event["removed"] == removed
        assert event["granted"] == {
            name: value for name, value in task.request.to_dict().items() if name not in ("payload", "withheld")
        }


@pytest.mark.parametrize(
    "wide",
    [{"allowed_tools": ["delete"]}, {"allowed_hosts": ["evil.test", "*.test"]}, {"allowed_payees": [OTHER]}],
    ids=lambda each: next(iter(each)),
)
def test_a_scope_of_which_nothing_is_left_is_refused(books, wide):
    policy = Policy(hosts={"courts.example"}, payees={PAYEE}, loop=None, breaker=None)
    with books.guard(policy=policy).session("planner", budget="$1.00", tools={"search"}) as planner:
        [field] = wide
        with pytest.raises(ConfigError, match=f"^{field}: .*none of them itself"):
            planner.delegate(asked(**wide))
        assert books.store.marks("delegation", "") == {}
        assert [node.id for node in books.store.nodes(planner.id) if node.id.startswith(f"{planner.id}/session")] == []


def test_an_empty_list_allows_nothing(planner, workers):
    task = planner.delegate(asked(allowed_tools=[], allowed_hosts=[]))
    with workers.redeem(task.token) as worker:
        with pytest.raises(PolicyDenied, match="tools"):
            worker.charge("search", "$0.01")
        with pytest.raises(PolicyDenied, match="hosts"):
            client(worker, Shop()).get(URL)


def test_the_worker_is_held_to_what_its_planner_may_use_too(books, workers):
    """A pattern that is granted may reach further than the parent's: both are asked at each use."""
    with books.guard().session("planner", budget="$1.00", tools={"search_*"}) as planner:
        planner.expect("GET courts.example/*", "$0.005")
        task = planner.delegate(asked(allowed_tools=["*_web"]))
        with workers.redeem(task.token) as worker:
            worker.charge("search_web", "$0.01")
            with pytest.raises(PolicyDenied, match="delete_web"):
                worker.charge("delete_web", "$0.01")
            with pytest.raises(PolicyDenied, match="quote"):
                client(worker, Shop()).get(URL)


OPEN = {"policy": Policy(loop=None, breaker=None)}


@pytest.mark.parametrize(
    ("hosts", "wanted", "granted"),
    [
        ({"tides.example"}, None, ("tides.example",)),
        ({"tides.example"}, ["*.example"], ("tides.example",)),
        ({"*.tides.example"}, ["*.example", "x.example"], ("*.tides.example",)),
        ({"tides.example:8443"}, ["tides.example"], ("tides.example:8443",)),
    ],
    ids=lambda each: str(sorted(each or ())),
)
def test_the_policy_of_who_delegates_holds_for_the_worker(books, hosts, wanted, granted):
    policy = Policy(hosts=hosts, loop=None, breaker=None)
    with books.guard(policy=policy).session("planner", budget="$1.00") as planner:
        task = planner.delegate(asked(allowed_hosts=wanted))
        assert task.request.allowed_hosts == granted
        with books.guard(**OPEN).redeem(task.token) as worker, pytest.raises(PolicyDenied, match="hosts"):
            client(worker, Shop()).get(URL)


def test_a_pattern_around_one_name_is_that_name(books):
    policy = Policy(hosts={"courts.example"}, loop=None, breaker=None)
    with books.guard(policy=policy).session("planner", budget="$1.00", tools={"search"}) as planner:
        task = planner.delegate(asked(allowed_tools=["*"]))
        assert (task.request.allowed_tools, task.removed) == (("search",), {"allowed_tools": ["*"]})
        with pytest.raises(ConfigError, match=r"^allowed_hosts: \*\.courts\.example: this session may use none"):
            planner.delegate(asked(allowed_hosts=["*.courts.example"]))


@pytest.mark.parametrize(
    ("have", "wanted", "granted"),
    [
        ({"search_*"}, ["search_web", "delete_*"], ("search_web",)),
        ({"*_web", "search_maps"}, ["search_*"], ("search_*",)),
        ({"search_*", "sum"}, ["*"], ("search_*", "sum")),
        ({f"tool_{number}" for number in range(201)}, ["*"], ("*",)),
        ({"two\u200bwords", "search"}, None, None),
        ({"search"}, None, ("search",)),
    ],
    ids=lambda each: str(sorted(each or ()))[:30],
)
def test_tools_are_those_on_both_lists(books, workers, have, wanted, granted):
    with books.guard().session("planner", budget="$1.00", tools=have) as planner:
        task = planner.delegate(asked(allowed_tools=wanted))
        assert task.request.allowed_tools == granted
        with workers.redeem(task.token) as worker:
            for tool in ("search_web", "search_maps", "delete_all", "sum"):
                allowed = []
                for session in (planner, worker):
                    try:
                        session.bind(session.charge)(tool, "$0.01")
                        allowed.append(True)
                    except PolicyDenied:
                        allowed.append(False)
                asked_for = wanted is None or any(fnmatchcase(tool, each) for each in wanted)
                assert allowed[1] is (allowed[0] and asked_for), tool
    with books.guard().session("planner", budget="$1.00", tools={"search_*"}) as planner, pytest.raises(ConfigError):
        planner.delegate(asked(allowed_tools=["delete_*"]))


@pytest.mark.parametrize(
    "change",
    [
        {"task_type": "a\n\x1b"}, {"budget": -5}, {"budget": 0.1}, {"deadline": "x"}, {"payload": {"customer": 1}},
        {"allowed_tools": "search"}, {"token_budget": 0}, {"request_id": None}, {"withheld": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_request_that_was_changed_past_its_checks_delegates_nothing(books, planner, change):
    request = asked(withheld=["customer"]).model_copy(update=change)
    with pytest.raises(ConfigError):
        planner.delegate(request)
    assert books.store.marks("delegation", "") == {}


def test_delegations_may_nest_deeply(books, workers):
    with books.guard().session("planner", budget="$1.00", id="p" * 100) as session:
        inside, opened = session, []
        for _ in range(12):
            task = inside.delegate(asked(budget="$0.10"))
            inside = workers.redeem(task.token).__enter__()
            opened.append(inside)
        inside.charge("a", "$0.01")
        for each in reversed(opened):
            each.task.answer("done", confidence=1)
            each.__exit__(None, None, None)
        assert str(session.spent) == "0.01"


def test_the_budget_is_a_ceiling_and_siblings_share_their_parents(planner, workers):
    tasks = [planner.delegate(asked(budget="$0.60")) for _ in range(2)]
    with workers.redeem(tasks[0].token) as one:
        one.charge("a", "$0.60")
    with workers.redeem(tasks[1].token) as other:
        with pytest.raises(BudgetExhausted, match="planner"):
            other.charge("b", "$0.41")
        other.charge("b", "$0.40")
        with pytest.raises(BudgetExhausted):
            other.charge("b", "$0.01")
    assert planner.spent == Decimal("1.00")


def test_nothing_left_delegates_nothing(books, planner):
    planner.charge("all", "$1.00")
    with pytest.raises(BudgetExhausted, match="a delegated task needs a budget"):
        planner.delegate(asked())
    assert books.store.marks("delegation", "") == {}
    free = planner.delegate(asked(budget=0))
    assert free.request.budget == 0


def test_the_deadline_ends_all_paying(books, planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        worker.charge("a", "$0.01")
        inner = worker.child("inner", budget="$0.10")
        books.forward(SOON - NOW_S)
        for session in (worker, inner):
            with pytest.raises(SessionClosed, match="had until"):
                session.charge("a", "$0.01")
        with pytest.raises(SessionClosed):
            worker.task.answer("late", confidence=1)
    planner.charge("a", "$0.01")
    assert task.result(timeout_s=0).status == "failed"


def test_a_deadline_beyond_the_parents_is_cut(books, planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        inner = worker.delegate(asked(deadline=SOON + 60, budget="$0.10"))
        assert inner.request.deadline == SOON
        assert inner.removed == {"deadline": 60}
        books.forward(599)
        with workers.redeem(inner.token) as deepest:
            deepest.charge("a", "$0.01")
        books.forward(1)
        with pytest.raises(ConfigError, match="token: "):
            workers.redeem(inner.token)


def test_a_deadline_that_is_over_is_refused(books, planner):
    with pytest.raises(ConfigError, match=r"^deadline: .* is over"):
        planner.delegate(asked(deadline=NOW_S))


def test_the_tokens_of_a_task_are_a_hard_limit(books, workers):
    with books.guard().session("planner", budget="$1.00", tokens=5_000) as planner:
        small, whole = planner.delegate(asked(token_budget=1_000)), planner.delegate(asked())
        with workers.redeem(small.token) as worker:
            assert (worker.tokens.total, worker.tokens.hard) == (1_000, True)
            worker.tokens.record_usage(1_000)
            with pytest.raises(TokensExhausted):
                worker.tokens.allocate(10)
        with workers.redeem(whole.token) as worker:
            assert (worker.tokens.total, worker.tokens.hard) == (5_000, False)


def test_a_scope_around_the_delegation_narrows_it(planner, workers):
    with planner.scope("$0.05", tools={"search"}):
        task = planner.delegate(asked(allowed_tools=["search", "sum"]))
        assert task.removed == {"budget": "0.35", "allowed_tools": ["sum"]}
        with workers.redeem(task.token) as worker, pytest.raises(PolicyDenied):
            worker.charge("sum", "$0.01")
        assert task.result(timeout_s=0).status == "failed"


def test_the_same_request_is_the_same_task(books, planner, workers):
    request = asked(request_id="r1")
    first, again = planner.delegate(request), planner.delegate(request)
    assert (again.session_id, again.request) == (first.session_id, first.request)
    assert len(books.store.marks("delegation", "")) == 1
    crashed = books.guard()
    crashed.redeem(first.token)
    crashed.close()
    workers.redeem(again.token).close()
    with pytest.raises(ConfigError, match=r"^request_id: 'r1' is another request"):
        planner.delegate(asked(request_id="r1", budget="$0.41"))
    granted = planner.delegate(first.request)  # as it was granted, it is the same as well
    assert granted.session_id == first.session_id
    ended = planner.delegate(request)
    assert (ended.token, ended.result().status) == ("", "failed")


def test_a_planner_that_was_tripped_or_has_ended_delegates_nothing(books, planner):
    planner.trip("enough")
    with pytest.raises(SessionTripped):
        planner.delegate(asked())
    ended = books.guard().session("other", budget="$1.00")
    ended.close()
    with pytest.raises(SessionClosed):
        ended.delegate(asked())
    assert books.store.marks("delegation", "") == {}


@pytest.mark.parametrize("wrong", [None, {}, "research", TaskRequest], ids=str)
def test_only_a_request_is_delegated(planner, wrong):
    with pytest.raises(ConfigError, match=r"^request: .* is no TaskRequest"):
        planner.delegate(wrong)


def test_the_report_shows_the_tree(planner, workers):
    task = planner.delegate(asked(task_type="research"))
    with workers.redeem(task.token) as worker:
        worker.charge("search", "$0.10")
        inner = worker.delegate(asked(task_type="check", budget="$0.05"))
        with workers.redeem(inner.token) as deepest:
            deepest.charge("sum", "$0.05")
            deepest.task.answer(1, confidence=1)
        worker.task.answer(2, confidence=1)
    text = planner.report().to_text()
    lines = text[text.index("BY AGENT") :].splitlines()[1:4]
    assert [line[:6] for line in lines] == ["  plan", "  └ re", "    └ "]
    assert [line.split()[-4:-2] for line in lines[1:]] == [["1", "$0.10"], ["1", "$0.05"]]
    assert [line.split()[-1] for line in lines[1:]] == ["completed", "completed"]


def test_no_child_of_a_worker_has_tokens_beside_those_of_its_task(books):
    with books.guard().session("planner", budget="$1.00", tokens=5_000) as planner:
        task, free = planner.delegate(asked(token_budget=1_000)), planner.delegate(asked(budget="$0.1"))
        with books.guard().redeem(task.token) as worker:
            for nest in (
                worker,
                worker.child("a", budget="$0.1"),
                worker.child("b", budget="$0.1").child("c", budget="$0.1"),
            ):
                for tokens in (1_000, TokenBudget(10)):
                    with pytest.raises(ConfigError, match="the token_budget of a task is for all of it"):
                        nest.child("own", budget="$0.01", tokens=tokens)
                for tokens in (None, worker.tokens):
                    assert nest.child("shares", budget="$0.01", tokens=tokens).tokens is worker.tokens
        with books.guard().redeem(free.token) as worker:
            assert worker.child("own", budget="$0.01", tokens=100).tokens.total == 100


@pytest.mark.parametrize("then", ["nothing", "a charge", "a smaller task"])
def test_a_refused_task_ends_no_run_that_does_the_work_another_way(books, planner, then):
    """A run that ends short of budget has its actions undone: that is for one that could not do its work."""
    with planner.child("reader", budget="$1.00") as reader:
        reader.charge("search", "$0.90")
        with planner.scope("$0.001") as scope:
            scope.charge("search", "$0.001")
            with pytest.raises(BudgetExhausted):
                scope.delegate(asked())
    if then == "a charge":
        planner.charge("search", "$0.01")
    elif then == "a smaller task":
        planner.delegate(asked(budget="$0.01"))
    planner.close()
    [node] = [node for node in books.store.nodes() if node.id == "plan"]
    assert node.terminated_by == ("budget_exhausted" if then == "nothing" else None)

"""The report by model, tool and agent: calls, tokens, dollars and refusals, and why a session can spend no more."""

import pytest

from tests.support.llm_provider import SYNC, Answer, Provider, ask, completion, metered
from tests.support.llm_replies import used
from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from x402guard import BudgetExhausted, Policy, PolicyDenied


def refused(session, amount="$9.00", tool="render"):
    with pytest.raises((BudgetExhausted, PolicyDenied)):
        session.charge(tool, amount)


def row(amount, calls, into=0, out=0, refusals=0):
    return {"amount": amount, "calls": calls, "tokens_in": into, "tokens_out": out, "refusals": refusals}


def test_models_tools_and_agents_have_calls_tokens_dollars_and_refusals():
    with metered(budget="$2") as session:
        SYNC.post(session, Provider(session, Answer.of(completion(used(20, 5)))), ask())
        with session.child("reader", budget="$1") as child:
            SYNC.post(
                child,
                Provider(child, Answer.of(completion(used(10, 1), model="gpt-4o-mini"))),
                ask(model="gpt-4o-mini"),
            )
            child.charge("serp", "$0.02")
            refused(child)
            with child.scope("$0.10") as scope:
                scope.charge("serp", "$0.01")
                with pytest.raises(BudgetExhausted):
                    SYNC.post(scope, Provider(scope), ask(max_completion_tokens=16_000))
        refused(session)
        report = session.report().to_dict()
        assert report["llm"]["by_model"] == {
            "gpt-4o": row("0.0001", 1, 20, 5, 1), "gpt-4o-mini": row("0.0000021", 1, 10, 1)}  # fmt: skip
        assert report["tools"]["by_tool"] == {"render": row("0.00", 0, refusals=2), "serp": row("0.03", 2)}
        assert report["by_agent"] == {
            session.id: {"name": "s", "state": "open", "terminated_by": "budget_exhausted", **row("0.0001", 1, 20, 5, 1)},
            child.id: {"name": "reader", "state": "closed", "terminated_by": "budget_exhausted",
                       **row("0.0300021", 3, 10, 1, 2)},
        }  # fmt: skip
        assert child.report().to_dict()["by_agent"] == {child.id: report["by_agent"][child.id]}
        assert (report["terminated_by"], report["state"]) == ("budget_exhausted", "open")
        assert report["why"].startswith("$9.00 does not fit")
        assert report["why"] in " ".join(session.report().to_text().split())


def test_a_trip_says_why_while_the_session_is_open_and_one_that_goes_on_says_nothing():
    with metered(budget="$2") as session:
        session.charge("serp", "$0.01")
        report = session.report().to_dict()
        assert (report["terminated_by"], report["why"]) == (None, None)
        refused(session)
        assert session.report().to_dict()["terminated_by"] == "budget_exhausted"
        client(session, Shop()).get(URL)  # a payment that fits goes on
        assert (session.report().to_dict()["terminated_by"], session.report().to_dict()["why"]) == (None, None)
        session.trip("it looks wrong")
        report = session.report().to_dict()
        assert (report["terminated_by"], report["why"]) == ("kill_switch", "it looks wrong")


def test_a_session_whose_children_have_exhausted_its_budget_says_so():
    with make_guard() as guard:
        with guard.session("p", budget="$1.00") as planner, planner.scope("$1.00"):
            with planner.child("a", budget="$0.90") as one:
                one.charge("search", "$0.90")
            with planner.child("b", budget="$0.90") as other, pytest.raises(BudgetExhausted):
                other.charge("search", "$0.20")
        report = planner.report().to_dict()
        assert (report["terminated_by"], report["why"]) == (
            "budget_exhausted", "$0.20 does not fit: session 'p' has $0.10 left of $1.00 ($0.90 with sub-budgets)",
        )  # fmt: skip
        assert [each["terminated_by"] for each in report["by_agent"].values()] == [
            "budget_exhausted",
            None,
            "budget_exhausted",
        ]


def test_a_session_whose_child_has_exhausted_its_own_budget_has_not_ended_so():
    with make_guard() as guard:
        with guard.session("p", budget="$1.00") as planner:
            with planner.child("a", budget="$0.10") as one, pytest.raises(BudgetExhausted):
                one.charge("search", "$0.20")
            assert planner.report().to_dict()["terminated_by"] is None
        report = planner.report().to_dict()
        assert (report["terminated_by"], report["why"]) == (None, None)


def test_a_payment_that_fits_again_ends_the_lack_of_all_sessions_above():
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("p", budget="$0.05") as planner:
        with planner.child("a", budget="$0.10") as one:
            with pytest.raises(BudgetExhausted):
                client(one, Shop(lambda request: required(accept(60_000), url=str(request.url)))).get(URL)
            planner_short = planner.report().to_dict()["terminated_by"]
            client(one, Shop()).get(URL)
        assert planner.report().to_dict()["terminated_by"] is None
    assert planner_short == "budget_exhausted"


def test_the_totals_say_what_is_still_out():
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with session.hold("render", up_to="$0.50"):
            report = session.report()
            tools = report.to_dict()["tools"]
            assert (tools["total"], tools["out"], tools["calls"]) == ("0.00", "0.50", 0)
            assert "// still out $0.50" in report.to_text()
        tools = session.report().to_dict()["tools"]
        assert (tools["total"], tools["out"], tools["calls"]) == ("0.50", "0.00", 1)

"""The report by model, tool and agent: calls, tokens, dollars and refusals, and why a session can spend no more."""

import pytest

from tests.support.llm_provider import SYNC, Answer, Provider, ask, completion, metered
from tests.support.llm_replies import used
from tests.support.merchant import URL, Shop, client
from x402guard import BudgetExhausted, PolicyDenied


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
        assert report["why"] in session.report().to_text()


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

"""A rule of the owner that names a tool of an MCP server holds for its price as well, which its server says later."""

import pytest

from tests.behaviour.adapters.test_mcp_answers import Server, call, said
from tests.support.merchant import PAYEE, make_guard, receipt
from x402guard import ApprovalDenied, PaymentRefused, Policy, PolicyDenied, Rule

PAID = {"_meta": {"x402/payment-response": receipt()}}
NAMES = ("weather/forecast", "forecast", "weather.*", "WEATHER/Forecast")
OTHER = ("weather/history", "news/forecast")
ABOUT_THE_PRICE = {
    "above": {"above": "$0.009"},
    "payees": {"payees": [PAYEE]},
    "payments": {"kinds": ["payment"]},
    "payments above": {"kinds": ["payment"], "above": "$0.009"},
    "tools above": {"kinds": ["tool"], "above": "$0.009"},
}
NOT_REACHED = {
    "above": {"above": "$0.01"},
    "payees": {"payees": ["0x" + "99" * 20]},
    "models": {"kinds": ["llm"]},
    "tools below": {"kinds": ["tool"], "above": "$0.01"},
}


def bought(rule, approver=None):
    """Call the paid tool under a rule; return what it raises, how often a payment was sent, and what counts."""
    server = Server(said(**PAID))
    with make_guard(policy=Policy(rules=[rule], breaker=None), approver=approver) as guard:
        with guard.session("s", budget="$1.00") as session:
            error = None
            try:
                call(server, session)
            except PaymentRefused as refused:
                error = refused
            return error, sum(meta is not None for _, _, meta in server.asked), str(session.spent + session.held)


@pytest.mark.parametrize("conditions", ABOUT_THE_PRICE)
@pytest.mark.parametrize("name", NAMES)
def test_a_rule_denies_the_price_of_a_tool(name, conditions):
    error, paid, counted = bought(Rule(name="dear", action="deny", match=name, **ABOUT_THE_PRICE[conditions]))
    assert isinstance(error, PolicyDenied)
    assert (error.rule, paid, counted) == ("dear", 0, "0.00")


@pytest.mark.parametrize("conditions", NOT_REACHED)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_rule_does_not_reach_is_paid(name, conditions):
    assert bought(Rule(name="dear", action="deny", match=name, **NOT_REACHED[conditions])) == (None, 1, "0.01")


@pytest.mark.parametrize("name", OTHER)
def test_a_rule_for_another_tool_says_nothing(name):
    assert bought(Rule(name="dear", action="deny", match=name, above="$0.009")) == (None, 1, "0.01")


def test_a_ceiling_refuses_a_dearer_tool():
    error, paid, counted = bought(Rule(name="cheap", action="narrow", match="weather/forecast", ceiling="$0.009"))
    assert (error.rule, paid, counted) == ("cheap", 0, "0.00")
    assert bought(Rule(name="cheap", action="narrow", match="weather/forecast", ceiling="$0.01")) == (None, 1, "0.01")


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("conditions", [{"above": "$0.009"}, {"kinds": ["payment"]}])
def test_an_approver_is_asked_once(answer, conditions):
    asked = []
    error, paid, _ = bought(
        Rule(name="ask", action="ask", match="weather/forecast", **conditions),
        lambda request: asked.append(request) or answer,
    )
    assert len(asked) == 1
    assert (paid, isinstance(error, ApprovalDenied)) == (int(answer), not answer)


def test_a_rule_removes_an_argument_that_cannot_be_sent():
    server, rule = Server(said(**PAID)), Rule(name="no-bcc", action="narrow", match="*forecast", remove=["bcc"])
    with make_guard(policy=Policy(rules=[rule], breaker=None)) as guard, guard.session("s", budget="$1.00") as session:
        call(server, session, {"city": "Bonn", "bcc": object()})
        assert [arguments for _, arguments, _ in server.asked] == [{"city": "Bonn"}] * 2
        assert str(session.spent + session.held) == "0.01"


def test_the_journal_says_nothing_was_removed_from_what_is_sent_already():
    server = Server(said(**PAID))
    rule = Rule(name="no-bcc", action="narrow", match="weather/forecast", above="$0.005", remove=["bcc"])
    with make_guard(policy=Policy(rules=[rule], breaker=None)) as guard, guard.session("s", budget="$1.00") as session:
        call(server, session, {"bcc": "eve"})
        assert [entry for entry in guard.shell.store.entries(session.id) if "no-bcc" in str(entry)] == []

"""A72: a yes covers what was asked: a free call of a tool is not what its server asks for it later."""

import pytest

from tests.behaviour.adapters.test_mcp_answers import Server, call, said
from tests.behaviour.adapters.test_rules_about_paid_tools import PAID
from tests.support.merchant import PAYEE, make_guard
from x402guard import Answer, ApprovalDenied, PaymentRefused, Policy, Risk, Rule

BEFORE_A_PRICE = {
    "a rule": {"rules": [Rule(name="ask", action="ask", match="weather/forecast")]},
    "two approvers": {"rules": [Rule(name="ask", action="ask", match="weather/*", approvers=2)]},
    "a level": {"risk": Risk(levels={"forecast": "HIGH"})},
    "a level of two": {"risk": Risk(levels={"forecast": "CRITICAL"}, approvers=2)},
    "what a function says": {"risk": Risk(classify=lambda tool, arguments: "HIGH")},
}


@pytest.mark.parametrize("says", [(True, True), (True, False), (False,)])
@pytest.mark.parametrize("name", BEFORE_A_PRICE)
def test_a72_a_yes_to_a_call_without_a_price_covers_nothing(name, says):
    """The server of a tool that was allowed for $0.00 then asks for money: that is another question, with both figures."""
    asked, server = [], Server(said(**PAID))

    def answers(request):
        asked.append(request)
        return Answer(allowed=says[len(asked) - 1], by=("ada", "bob"))

    policy = Policy(breaker=None, **BEFORE_A_PRICE[name])
    with make_guard(policy=policy, approver=answers) as guard, guard.session("s", budget="$1.00") as session:
        error = None
        try:
            call(server, session)
        except PaymentRefused as refused:
            error = refused
        counted = str(session.spent + session.held)
    assert isinstance(error, ApprovalDenied) is (not says[-1])
    assert counted == ("0.01" if says[-1] else "0.00")
    shown = [(str(request.amount), request.payee) for request in asked]
    assert shown == [("0.00", ""), ("0.01", PAYEE)][: len(says)]
    assert ("it was asked about for $0.00, and costs $0.01 now" in asked[-1].reason) is (len(says) == 2)

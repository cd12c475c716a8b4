"""A72: a yes covers what was asked: a free call of a tool is not what its server asks for it later."""

import threading
import time

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


def test_a72_the_questions_of_one_run_do_not_keep_others_from_asking():
    """Also not those of its children, which are the same run; and all runs together have an end."""
    waits, asked, denied = threading.Event(), [], []

    def person(request):
        asked.append(request)
        waits.wait(60)
        return False

    def ask(session, number):
        try:
            session.charge("serp", "$0.01", arguments={"n": number})
        except ApprovalDenied as error:
            denied.append(str(error))

    policy = Policy(rules=[Rule(name="ask", action="ask")], bulkhead=None, breaker=None, loop=None, velocity=None)
    with make_guard(policy=policy, approver=person) as guard:
        threads = []

        def flood(session, questions, open_then, denied_then):
            for number in range(questions):
                threads.append(threading.Thread(target=session.bind(ask), args=(session, number)))
                threads[-1].start()
            end = time.monotonic() + 60
            while (len(asked), len(denied)) != (open_then, denied_then) and time.monotonic() < end:
                time.sleep(0.01)
            assert (len(asked), len(denied)) == (open_then, denied_then)

        with guard.session("flood", budget="$2.00") as session:
            flood(session, 30, 20, 10)
            with session.child("more", budget="$0.50") as child:
                flood(child, 5, 20, 15)
            for number in range(11):
                with guard.session(f"honest-{number}", budget="$0.10") as other:
                    flood(other, 3, min(40, 22 + 2 * number), 16 + number + (2 if number == 10 else 0))
            assert "40 other questions are open already" in denied[-1]
            waits.set()
            for thread in threads:
                thread.join(10)
            assert session.spent == 0

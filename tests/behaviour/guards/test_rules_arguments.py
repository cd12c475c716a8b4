"""Arguments of a decorated tool that a rule removes: they are neither given nor shown, however they were named."""

import pytest

from tests.support.merchant import make_guard
from x402guard import Policy, PolicyDenied, Rule


def narrow(**terms):
    return Rule(name="less", action="narrow", **terms)


def policy(*rules, **more):
    return Policy(rules=rules, breaker=None, **more)


def test_arguments_that_a_rule_removes_do_not_reach_the_tool(ledger_url):
    given = []
    with make_guard(ledger_url, policy=policy(narrow(remove=["bcc"]))) as guard:
        with guard.session("s", budget="$1") as session:

            @session.tool(cost="$0.01")
            def post(to, bcc="nobody", subject="", **more):
                given.append((to, bcc, subject, more))

            post("me", "everybody", "hello", tag=1)
            post(to="me", bcc="everybody")
            assert given == [("me", "nobody", "hello", {"tag": 1}), ("me", "nobody", "", {})]


def test_the_rest_of_the_arguments_can_be_removed():
    given = []
    with make_guard(policy=policy(narrow(remove=["rest"]))) as guard, guard.session("s", budget="$1") as session:

        @session.tool(cost="$0.01")
        def count(to, *rest, end=None):
            given.append((to, rest, end))

        count("me", 1, 2, end=3)
    assert given == [("me", (), 3)]


def test_what_is_removed_among_named_extras_is_neither_given_nor_shown():
    shown, given = [], []
    rules = narrow(remove=["bcc", "more"]), Rule(name="ask", action="ask")
    with make_guard(policy=policy(*rules), approver=lambda asked: not shown.append(asked.arguments)) as guard:
        with guard.session("s", budget="$1") as session:

            @session.tool(cost="$0.01")
            def post(to, **more):
                given.append((to, more))

            post("me", bcc="everybody", tag=1)
    assert "everybody" not in str(given)
    assert "everybody" not in str(shown)
    assert ("tag" in str(given)) is ("tag" in str(shown)), "a person is shown what is given"


def test_an_argument_that_cannot_be_left_out_refuses_the_call(ledger_url):
    with (
        make_guard(ledger_url, policy=policy(narrow(remove=["to"]))) as guard,
        guard.session("s", budget="$1") as session,
    ):
        ran = []
        post = session.tool(cost="$0.01")(lambda to: ran.append(to))
        with pytest.raises(PolicyDenied, match="'to'"):
            post("me")
        assert ran == []
        assert (session.spent, session.held) == (0, 0)

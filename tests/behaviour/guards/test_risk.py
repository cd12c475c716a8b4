"""Risk levels: what runs in silence, what is logged and runs, what wants a person, and what never runs."""

import logging
from decimal import Decimal

import pytest

from tests.support.llm_provider import SYNC, Provider, metered
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import Answer, NeedsReview, PaymentRefused, Policy, PolicyDenied, Risk


def held(session):
    return [event for event in session.report().to_dict()["events"] if event["event"] == "authorize"]


def unspent(session):
    assert (session.spent, session.held, held(session)) == (0, 0, [])


@pytest.mark.parametrize("cost", ["$0.01", "$0", None], ids=str)
def test_medium_is_logged_and_runs_low_runs_in_silence(ledger_url, caplog, cost):
    caplog.set_level(logging.INFO, logger="x402guard")
    shown = {"mode": "raw", "render": lambda result, _mode: str(result)}
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:
        for name in ("get_page", "post_webhook"):
            use = session.tool(cost=cost, name=name, **shown)(lambda: "done")
            assert use() == "done"
    said = [record.getMessage() for record in caplog.records if "risk" in record.getMessage()]
    assert ["post_webhook" in text for text in said] == [True]


@pytest.mark.parametrize(
    ("name", "rule"), [("delete_user", "needs_review"), ("send_sms", "needs_review"), ("drop_table", "risk")]
)
def test_what_wants_a_person_is_denied_where_there_is_none(ledger_url, name, rule):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:
        for use in (lambda: session.charge(name, "$0.01"), lambda: session.tool(cost="$0", name=name)(lambda: 1)()):
            with pytest.raises(PaymentRefused, match=name) as caught:
                use()
            assert caught.value.rule == rule
            assert isinstance(caught.value, NeedsReview) is (rule == "needs_review")
        unspent(session)


def test_the_hook_sees_what_a_tool_is_given_and_raises_its_level(ledger_url):
    def classify(_tool, arguments):
        return "CRITICAL" if arguments and arguments.get("every") else None

    with make_guard(ledger_url, policy=Policy(risk=Risk(classify=classify))) as guard:
        with guard.session("s", budget="$1") as session:
            get = session.tool(cost="$0.01", name="get_rows")(lambda every=False: "rows")
            assert get() == "rows"
            with pytest.raises(PolicyDenied, match="CRITICAL"):
                get(every=True)
            assert session.spent == Decimal("0.01")


@pytest.mark.parametrize(("level", "rule"), [("HIGH", "needs_review"), ("CRITICAL", "risk")])
def test_a_payment_and_a_model_that_the_owner_names_are_refused_unsent(ledger_url, level, rule):
    risk = Risk(levels={"GET courts.example/*": level, "gpt-4*": level})
    with metered(ledger_url, guard={"policy": Policy(risk=risk)}) as session:
        shop, provider = Shop(), Provider(session)
        for use in (lambda: client(session, shop).get(URL), lambda: SYNC.post(session, provider)):
            with pytest.raises(PaymentRefused) as caught:
                use()
            assert caught.value.rule == rule
        assert (shop.payments, provider.requests) == ([], [])
        unspent(session)


@pytest.mark.parametrize(("people", "ran"), [(["ann"], False), (["ann", "Ann"], False), (["ann", "bob"], True)])
def test_what_is_critical_runs_where_two_people_say_so(ledger_url, people, ran):
    approver = [lambda _, name=name: Answer(True, (name,)) for name in people]
    policy, done = Policy(risk=Risk(approvers=2)), []
    with make_guard(ledger_url, policy=policy, approver=approver) as guard, guard.session("s", budget="$1") as session:
        drop = session.tool(cost="$0.01", name="drop_table")(lambda: done.append(1))
        try:
            drop()
        except PaymentRefused as error:
            assert error.rule == "approval"
        assert (done == [1]) is ran
        assert session.spent == (Decimal("0.01") if ran else 0)

"""``Policy.repeat``: a request that this run has bought and been given."""

import threading
from decimal import Decimal

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, b64, make_guard, receipt
from tests.support.refusals import events, fetch
from x402guard import Answer, ApprovalDenied, ConfigError, NeedsReview, Policy, PolicyDenied, SettlementUncertain
from x402guard.flow.drivers import run
from x402guard.ledger.findings import Unused
from x402guard.stores import open_store
from x402guard.x402.delivery import note_answer_end
from x402guard.x402.settlement import ask_chain

CENT = Decimal("0.01")
MODES = pytest.mark.parametrize("mode", ["sync", "async"])


@MODES
def test_a_request_that_was_bought_and_given_is_refused_for_that_call_alone(mode, ledger_url):
    shop = Shop()
    with make_guard(ledger_url, policy=Policy(repeat="refuse")) as guard:
        with guard.session("s", budget="$1.00") as session:
            fetch(mode, session, shop)
            for _ in range(2):
                with pytest.raises(PolicyDenied, match=r"bought the same request before.*policy\.repeat") as caught:
                    fetch(mode, session, shop)
                assert (caught.value.rule, caught.value.money_may_have_moved) == ("repeat", False)
                assert "pay_again" in caught.value.advice
            assert fetch(mode, session, shop, url=f"{URL}/2").status_code == 200
            assert fetch(mode, session, shop, url=f"{URL}?page=2").status_code == 200  # another URL
            assert fetch(mode, session, shop, method="POST", content=b"x").status_code == 200
            assert fetch(mode, session, shop, method="POST", content=b"y").status_code == 200
            assert fetch(mode, session, shop, extensions={"pay_again": True}).status_code == 200
            assert fetch(mode, session, shop, extensions={"purchase": "another"}).status_code == 200
            assert session.spent == 7 * CENT
            with pytest.raises(PolicyDenied, match="bought the same"):
                fetch(mode, session.child("c", budget="$0.10"), shop)  # of the same run
        with guard.session("another run", budget="$1.00") as session:
            assert fetch(mode, session, shop).status_code == 200


def test_requests_at_once_are_one_purchase():
    shop, first, go, outcomes = Shop(), threading.Event(), threading.Event(), []

    def slow(_request, _shop):
        first.set()
        go.wait(10)
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())})

    shop.paid = slow
    with make_guard(policy=Policy(repeat="refuse")) as guard, guard.session("s", budget="$1.00") as session:

        def ask():
            try:
                outcomes.append(str(fetch("sync", session, shop).status_code))
            except PolicyDenied as error:
                outcomes.append(error.rule)

        threads = [threading.Thread(target=session.bind(ask)) for _ in range(4)]
        threads[0].start()
        assert first.wait(10)
        for thread in threads[1:]:
            thread.start()
        go.set()
        for thread in threads:
            thread.join(30)
        assert (sorted(outcomes), len(shop.nonces)) == (["200", "repeat", "repeat", "repeat"], 1)


@MODES
def test_it_is_remembered_by_the_next_process_of_the_run(mode, tmp_path):
    shop, ledger = Shop(), f"sqlite:///{tmp_path}/l.db"
    for number in range(2):
        with make_guard(ledger, policy=Policy(repeat="refuse")) as guard:
            with guard.session("s", budget="$1.00", id="run") as session:
                if number == 0:
                    fetch(mode, session, shop)
                else:
                    with pytest.raises(PolicyDenied, match="bought the same"):
                        fetch(mode, session, shop)
    assert len(shop.payments) == 1


def test_what_was_paid_and_not_given_is_no_repeat():
    clock = Clock()
    answers = [httpx.ReadError("lost"), httpx.ReadError("lost")]

    def paid(_request, _shop):
        if answers:
            raise answers.pop()
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, text="the goods")

    shop = Shop(paid=paid)
    store = open_store("memory://", clock_ms=clock)
    with (
        make_guard(store, policy=Policy(repeat="refuse", breaker=None)) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        for _ in range(2):
            with pytest.raises(SettlementUncertain):
                fetch("sync", session, shop)
        assert fetch("sync", session, shop).text == "the goods"  # the same payment, presented again
        with pytest.raises(PolicyDenied, match="bought the same"):
            fetch("sync", session, shop)
        assert (len(shop.nonces), session.spent) == (1, CENT)


@MODES
@pytest.mark.parametrize("allowed", [True, False])
def test_an_approver_is_asked(mode, allowed):
    asked, shop = [], Shop()

    def approver(request):
        asked.append((request.rule, request.reason))
        return Answer(allowed, ("owner",))

    with (
        make_guard(policy=Policy(repeat="ask"), approver=approver) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        fetch(mode, session, shop)
        assert asked == []
        if allowed:
            assert fetch(mode, session, shop).status_code == 200
        else:
            with pytest.raises(ApprovalDenied, match="bought the same request before"):
                fetch(mode, session, shop)
        assert [rule for rule, _ in asked] == ["repeat"]
        assert session.spent == (2 if allowed else 1) * CENT
        assert len(events(session, "approval")) == 1


def test_without_an_approver_the_answer_is_no():
    shop = Shop()
    with make_guard(policy=Policy(repeat="ask")) as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop)
        with pytest.raises(NeedsReview, match="this guard has no approver") as caught:
            fetch("sync", session, shop)
        assert (caught.value.rule, len(shop.payments)) == ("needs_review", 1)


def test_by_default_a_run_may_buy_as_often_as_it_wants():
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        for _ in range(3):
            fetch("sync", session, shop)
        assert session.spent == 3 * CENT


@pytest.mark.parametrize("choice", ["", "deny", None, True])
def test_the_choice_is_one_of_three(choice):
    with pytest.raises(ConfigError, match=r"^policy\.repeat: "):
        Policy(repeat=choice)


@MODES
@pytest.mark.parametrize("writes", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_an_answer_that_was_cut_off_and_never_taken_was_not_bought(mode, earlier, writes):
    """Its caller never had it, and its payment expires: the next request buys it, unless an earlier one has."""
    clock, shop = Clock(), Shop()
    store = open_store("memory://", clock_ms=clock)
    chain = MockChain(lambda _hold: Unused(clock() // 1000))
    policy = Policy(repeat="refuse", breaker=None, loop=None)
    with make_guard(store, policy=policy, chains=chain) as guard, guard.session("s", budget="$1.00") as session:
        for _ in range(earlier):
            fetch(mode, session, shop, extensions={"pay_again": True})
        hold_id = fetch(mode, session, shop, extensions={"pay_again": True}).extensions["x402guard"].hold_id
        for _ in range(writes):
            run(note_answer_end(session.context, (hold_id, 0), "cut"), guard.shell)
        clock.tick(100_000)
        assert run(ask_chain(session.context, store.hold(hold_id)), guard.shell).captured == 0
        if not earlier:
            assert fetch(mode, session, shop).status_code == 200
        with pytest.raises(PolicyDenied, match="bought the same"):
            fetch(mode, session, shop)
        assert session.spent == max(1, earlier) * CENT

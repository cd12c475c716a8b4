"""What every way to buy does alike: over HTTP, by hand, over MCP and A2A, and by the official SDK's own transports."""

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import mcp_types as types
import pytest
from a2a.types import TaskState

from tests.support.buyers import KINDS, SOLD, ByHand, BySDK, BySDKAwaited, OverA2A, OverHTTP, OverHTTPAwaited, OverMCP
from tests.support.merchant import make_guard
from tests.support.refusals import events
from x402guard import (
    ApprovalDenied,
    Approvals,
    BudgetExhausted,
    LoopDetected,
    PaidNotDelivered,
    PaymentRefused,
    Policy,
    PolicyDenied,
    SessionTripped,
    SettlementUncertain,
)

CENT = Decimal("0.01")
ANSWERS = {
    OverHTTP: [ConnectionError("gone"), 503],
    OverHTTPAwaited: [ConnectionError("gone"), 503],
    ByHand: [None],
    OverMCP: [ConnectionError("gone"), types.CallToolResult(content=[], is_error=True)],
    OverA2A: [ConnectionError("gone"), TaskState.TASK_STATE_FAILED],
    BySDK: [None, 503],
    BySDKAwaited: [None, 503],
}
"""How each way loses the answer to a payment."""

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture
def seller(kind):
    return kind()


@pytest.fixture
def run_of(ledger_url):
    """Open guards and sessions of one ledger, closed after the test."""
    opened = []

    def run(budget="$1.00", policy=None, **more):
        guard = make_guard(ledger_url, policy=policy or Policy(breaker=None), **more)
        session = guard.session("s", budget=budget)
        opened.extend([guard, session])
        return session

    yield run
    for each in reversed(opened):
        each.close()


def outcome_of(buy):
    try:
        buy()
    except (PaymentRefused, SettlementUncertain, PaidNotDelivered) as no:
        return type(no).__name__
    return SOLD


def test_a_purchase_is_held_before_it_is_signed_and_captured_with_its_receipt(seller, run_of):
    session = run_of()
    seller.buy(session)
    assert (session.spent, session.held, len(seller.nonces)) == (CENT, 0, 1)
    assert [len(events(session, name)) for name in ("authorize", "capture")] == [1, 1]


def test_a_budget_for_three_buys_three(seller, run_of):
    session = run_of("$0.03")
    found = [outcome_of(lambda what=what: seller.buy(session, str(what))) for what in range(5)]
    assert found == [SOLD] * 3 + ["BudgetExhausted"] * 2
    assert (session.spent, len(set(seller.nonces))) == (3 * CENT, 3)


def test_threads_on_a_budget_for_five_buy_five(seller, run_of):
    session = run_of("$0.05")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda what: outcome_of(lambda: seller.buy(session, str(what))), range(16)))
    assert sorted(found) == ["BudgetExhausted"] * 11 + [SOLD] * 5
    assert (session.spent, session.held, len(set(seller.nonces))) == (5 * CENT, 0, 5)


def test_a_lost_answer_is_presented_again_and_bought_once(kind, run_of):
    for number, lost in enumerate(ANSWERS[kind]):
        seller, session = kind(lost), run_of()
        for _ in range(2):
            assert outcome_of(lambda s=seller, r=session, n=number: s.buy(r, str(n))) in (SOLD, "SettlementUncertain")
            assert (session.held, session.spent) == (CENT, 0)
        seller.answer = SOLD
        seller.buy(session, str(number))
        assert (session.spent, session.held) == (CENT, 0)
        assert (len(seller.nonces), len(set(seller.nonces))) == (3, 1)


def test_what_was_bought_and_given_is_refused_if_the_owner_says_so(seller, run_of):
    session = run_of(policy=Policy(breaker=None, repeat="refuse"))
    seller.buy(session)
    with pytest.raises(PolicyDenied) as no:
        seller.buy(session)
    assert (no.value.rule, len(seller.nonces)) == ("repeat", 1)
    seller.buy(session, "43")
    assert session.spent == 2 * CENT


def test_a_loop_is_stopped(seller, run_of):
    session = run_of("$5.00")
    with pytest.raises((LoopDetected, SessionTripped)):
        for _ in range(40):
            seller.buy(session)
    assert len(seller.nonces) < 40
    assert session.spent == len(seller.nonces) * CENT


def test_a_person_is_asked_and_says_no(seller, run_of):
    asked = []
    policy = Policy(breaker=None, approvals=Approvals(above="$0.005"))
    session = run_of(policy=policy, approver=lambda request: asked.append(request) or False)
    with pytest.raises(ApprovalDenied):
        seller.buy(session)
    assert (len(asked), seller.nonces, session.spent + session.held) == (1, [], 0)


def test_the_cap_of_one_payment_holds(kind, run_of):
    seller, session = kind(price=2_000_000), run_of("$5.00")
    with pytest.raises(PolicyDenied) as no:
        seller.buy(session)
    assert (no.value.rule, seller.nonces, session.spent + session.held) == ("per_payment_cap", [], 0)


def test_a_session_that_is_tripped_signs_nothing_more(seller, run_of):
    session = run_of()
    seller.buy(session)
    session.trip("enough")
    with pytest.raises(SessionTripped):
        seller.buy(session, "43")
    assert (len(seller.nonces), session.spent) == (1, CENT)


def test_a_refusal_for_the_budget_is_in_the_report(seller, run_of):
    session = run_of("$0.005")
    with pytest.raises(BudgetExhausted) as no:
        seller.buy(session)
    assert (no.value.requested, no.value.available) == (CENT, Decimal("0.005"))
    assert [refusal["rule"] for refusal in session.report().to_dict()["refusals"]] == ["budget"]
    assert not events(session, "authorize")

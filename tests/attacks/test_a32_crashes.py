"""Row 32: a process that dies holding a live signature leaves it in the books, in full, for whoever opens them next."""

import signal
import threading
from decimal import Decimal

import pytest

from tests.support import processes
from tests.support.merchant import URL, Shop, make_guard
from tests.support.refusals import events, fetch
from x402guard import BudgetExhausted, PolicyDenied, SettlementUncertain

CENT = Decimal("0.01")
STAGES = ["authorized", "signed", "sent", "answered", "booked"]
LOST = [(stage, "kill") for stage in STAGES[:-1]] + [("authorized", "exit"), ("sent", "exit")]


@pytest.fixture
def crashed(ledger, request):
    """A ledger left behind by a process that died at a stage, with what the merchant had received by then."""
    stage, how = request.param
    child = processes.start("tests.support.dying_buyer", ledger, stage, how, module=True, strict=True)
    try:
        told, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == (-signal.SIGKILL if how == "kill" else 9)
    assert "end" not in told
    received = {int(line, 16) for line in told.split()}
    assert len(received) == (0 if stage in ("authorized", "signed") else 1)
    return stage, ledger, received


@pytest.mark.parametrize("crashed", LOST, indirect=True, ids="-".join)
def test_a32_crash_leaves_the_hold_counted_in_full_and_a_retry_presents_the_same(crashed):
    _, ledger, received = crashed
    with make_guard(ledger, budget="$1.00") as guard:
        [hold] = guard.shell.store.outstanding()
        with guard.session("run", id="run") as session:
            assert (session.held, session.spent, session.remaining) == (CENT, 0, Decimal("0.04"))
            assert len(events(session, "authorize")) == 1
            shop = Shop()
            response = fetch("sync", session, shop)
            assert response.extensions["x402guard"].represented
            assert (session.held, session.spent, session.remaining) == (0, CENT, Decimal("0.04"))
            assert len(events(session, "authorize")) == 1
    assert shop.nonces | received == {int(hold.id, 16)}


@pytest.mark.parametrize("crashed", [("booked", "kill")], indirect=True, ids="-".join)
def test_a32_crash_after_the_answer_was_handed_over_leaves_the_payment_counted_and_the_purchase_closed(crashed):
    _, ledger, received = crashed
    shop = Shop()
    with make_guard(ledger, budget="$1.00") as guard, guard.session("run", id="run") as session:
        assert (session.held, session.spent) == (CENT, 0)  # it came without a receipt
        assert not fetch("sync", session, shop).extensions["x402guard"].represented
        assert (session.held, session.spent) == (CENT, CENT)
    assert len(shop.nonces | received) == 2


@pytest.mark.parametrize("crashed", [("sent", "kill")], indirect=True, ids="-".join)
def test_a32_crash_does_not_give_the_budget_back(crashed):
    _, ledger, _ = crashed
    shop = Shop()
    with make_guard(ledger, budget="$1.00") as guard, guard.session("run", id="run") as session:
        for number in range(4):
            fetch("sync", session, shop, url=f"{URL}/{number}")
        with pytest.raises(BudgetExhausted) as caught:
            fetch("sync", session, shop, url=f"{URL}/5")
        assert caught.value.available == 0
        assert (session.held, session.spent) == (CENT, Decimal("0.04"))
    assert len(shop.payments) == 4


@pytest.mark.parametrize("crashed", [("sent", "kill")], indirect=True, ids="-".join)
def test_a32_crash_is_taken_over_by_one_of_many(crashed):
    """Several who come after ask for the same at once: each cheque is one of the holds, and all are counted."""
    _, ledger, received = crashed
    shop, barrier, uncertain = Shop(), threading.Barrier(4), []
    with make_guard(ledger, budget="$1.00") as guard, guard.session("run", id="run") as session:

        def retry():
            barrier.wait(30)
            try:
                fetch("sync", session, shop)
            except SettlementUncertain as error:  # another one took the hold over while this one's was signed
                uncertain.append(error)
            except PolicyDenied as error:  # another one has its answer and reads it
                assert error.rule == "in_flight"
                uncertain.append(error)

        threads = [threading.Thread(target=retry) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert received <= shop.nonces
        assert session.held + session.spent == CENT * len(shop.nonces | received)
    assert len(shop.payments) + len(uncertain) == 4
    assert shop.payments

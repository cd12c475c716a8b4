"""What an agent can be led into: ghost paywalls, splitting, floods of questions, transfers, planning anew, and a stranger who settles."""

import threading
import time
from decimal import Decimal

import httpx
import pytest

from tests.support.contract_seller import Wild, any_hash
from tests.support.ledger import Clock
from tests.support.merchant import OTHER_PAYEE, URL, Shop, accept, make_guard, required
from tests.support.refusals import events, fetch
from x402guard import (
    AlreadyPaid,
    Answer,
    ApprovalDenied,
    Approvals,
    LocalSigner,
    NeedsReview,
    PaidNotDelivered,
    Policy,
    PolicyDenied,
    Rule,
    SettlementUncertain,
    SignerError,
    Velocity,
)
from x402guard.stores import open_store
from x402guard.testing import Testnet

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
NEARLY_HALF = accept(490_000)


def wide(**policy):
    """A policy without what would stop these attacks earlier."""
    return Policy(breaker=None, velocity=None, loop=None, spike=None, **policy)


@MODES
def test_a44_a_pixel_on_another_host_is_not_paid(mode):
    """A page that was paid for embeds a picture that asks for money, and the agent fetches all of a page."""
    page, pixel = Shop(), Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00", hosts={"courts.example"}) as session:
        fetch(mode, session, page, url="https://courts.example/opinion/42")
        for number in range(20):
            with pytest.raises(PolicyDenied, match="hosts"):
                fetch(mode, session, pixel, url=f"https://pixel.example/{number}.gif")
        assert (len(page.payments), pixel.payments) == (1, [])


@MODES
def test_a44_without_the_owners_list_new_payees_run_out(mode):
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        paid = 0
        for number in range(30):
            url = f"https://pixel-{number}.example/1.gif"
            shop = Shop(required(accept(payTo=f"0x{number + 1:040x}"), url=url))
            try:
                fetch(mode, session, shop, url=url)
            except Exception as error:
                assert getattr(error, "rule", "") == "new_payees_per_day"
            paid += len(shop.payments)
        assert paid == 10


@MODES
def test_a47_half_dollars_that_stay_under_the_threshold_ask_from_the_second_on(mode):
    asked = []

    def person(request):
        asked.append(request.reason)
        return Answer(len(asked) < 3, ("owner",))

    policy = wide(approvals=Approvals(above="$0.50"))
    shop = Shop(required(NEARLY_HALF))
    with make_guard(policy=policy, approver=person) as guard, guard.session("s", budget="$20.00") as session:
        for number in range(3):  # one free, one asked, one free
            fetch(mode, session, shop, url=f"{URL}/{number}")
        fetch(mode, session, Shop(required(accept(490_000, payTo=OTHER_PAYEE))), url=f"{URL}/other")  # has its own sum
        assert len(asked) == 1
        fetch(mode, session, shop, url=f"{URL}/3")
        assert len(asked) == 2
        assert all("within the window are above policy.approvals.above ($0.50)" in reason for reason in asked)
        fetch(mode, session, shop, url=f"{URL}/5")
        with pytest.raises(ApprovalDenied):
            fetch(mode, session.child("c", budget="$1.00"), shop, url=f"{URL}/6")  # of the same run
        assert len(asked) == 3
        assert [event["allowed"] for event in events(session, "approval")] == [True, True, False]


def test_a47_the_sum_of_a_payee_begins_again_when_its_window_is_over():
    asked, clock = [], Clock()
    store = open_store("memory://", clock_ms=clock)
    policy = wide(approvals=Approvals(above="$0.50", window_s=3_600))
    with make_guard(store, policy=policy, approver=lambda request: asked.append(request) or True) as guard:
        with guard.session("s", budget="$20.00") as session:
            shop = Shop(required(NEARLY_HALF))
            for number in range(4):  # one each hour and a second
                fetch("sync", session, shop, url=f"{URL}/{number}")
                clock.tick(3_601)
            assert asked == []
            fetch("sync", session, shop, url=f"{URL}/4")
            clock.tick(3_599)
            fetch("sync", session, shop, url=f"{URL}/5")
            assert len(asked) == 1
    store.close()


def test_a47_without_an_approver_the_second_is_refused():
    shop = Shop(required(NEARLY_HALF))
    with make_guard(policy=wide(approvals=Approvals(above="$0.50"))) as guard:
        with guard.session("s", budget="$20.00") as session:
            fetch("sync", session, shop)
            for number in range(20):
                with pytest.raises(NeedsReview, match=r"\$0\.98 to 0x.* no approver"):
                    fetch("sync", session, shop, url=f"{URL}/{number}")
            assert (len(shop.payments), session.spent) == (1, Decimal("0.49"))
        with guard.session("another", budget="$20.00") as session:
            fetch("sync", session, shop)


def test_a47_a_payment_that_was_never_sent_does_not_count():
    """The signer refuses twice; then an honest payment is the first one."""

    class Refuses(LocalSigner):
        left = 2

        def sign(self, hold):
            if self.left:
                self.left -= 1
                raise SignerError("not now")
            return super().sign(hold)

    shop = Shop(required(NEARLY_HALF))
    signer = Refuses.from_key("0x" + "11" * 32)
    with make_guard(policy=wide(approvals=Approvals(above="$0.50")), signer=signer) as guard:
        with guard.session("s", budget="$20.00") as session:
            for _ in range(2):
                with pytest.raises(SignerError):
                    fetch("sync", session, shop)
            fetch("sync", session, shop)
            with pytest.raises(NeedsReview):
                fetch("sync", session, shop, url=f"{URL}/2")


def test_a48_a_hundred_questions_at_once_are_not_a_hundred_clicks():
    waits, open_now, most = threading.Event(), [], []

    def person(request):
        open_now.append(request)
        most.append(len(open_now))
        waits.wait(60)
        return False

    policy = wide(rules=[Rule(name="ask", action="ask")], bulkhead=None)
    denied = []
    with make_guard(policy=policy, approver=person) as guard, guard.session("s", budget="$20.00") as session:

        def ask(number):
            try:
                session.charge("serp", "$0.01", arguments={"n": number})
            except ApprovalDenied as error:
                denied.append(str(error))

        threads = [threading.Thread(target=session.bind(ask), args=(number,)) for number in range(100)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while len(denied) < 80 and time.monotonic() < deadline:
            time.sleep(0.01)
        waits.set()
        for thread in threads:
            thread.join(10)
        assert len(open_now) == max(most) == 20
        assert sum("20 other questions are open already" in words for words in denied) == 80
        assert session.spent == 0


@pytest.mark.parametrize(
    "tool", ["transfer_usdc", "transferFunds", "withdraw_all", "send_money", "wallet.send_payment", "send_tokens"]
)
def test_a49_a_tool_that_sends_money_to_an_address_needs_a_person(tool):
    """Payees of payments come from the 402 of the origin that was asked; an address out of a page needs such a tool."""
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        with pytest.raises(NeedsReview):
            session.charge(tool, "$0.01", arguments={"to": OTHER_PAYEE})
        assert session.spent == 0
    with make_guard(approver=lambda _request: True) as guard, guard.session("s", budget="$5.00") as session:
        session.charge(tool, "$0.01", arguments={"to": OTHER_PAYEE})


@MODES
def test_a49_the_payee_is_the_offers_whatever_the_request_says(mode):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        fetch(mode, session, shop, method="POST", json={"payTo": OTHER_PAYEE}, headers={"x-pay-to": OTHER_PAYEE})
        assert [payee for _, _, payee in shop.payments] != [OTHER_PAYEE]


@MODES
def test_a50_a_purchase_that_is_planned_anew_under_its_name_is_paid_once(mode):
    """The model writes the same order again, with other bytes; the caller gave the order a name."""
    shop = Shop()
    with make_guard(policy=Policy(velocity=Velocity())) as guard, guard.session("s", budget="$1.00") as session:
        named = {"extensions": {"purchase": "report for March"}}
        fetch(mode, session, shop, method="POST", json={"month": "March"}, **named)
        for body in ({"month": "march"}, {"month": "March", "try": 2}):
            with pytest.raises(AlreadyPaid):
                fetch(mode, session, shop, method="POST", json=body, **named)
        assert len(shop.payments) == 1


@MODES
def test_a50_the_same_route_with_another_body_is_paid_and_told_while_a_payment_for_it_is_in_doubt(mode):
    shop = Shop(paid=httpx.ReadError("the answer was lost"))
    with make_guard(policy=wide()) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(SettlementUncertain) as lost:
            fetch(mode, session, shop, method="POST", json={"month": "March"})
        del shop.paid
        fetch(mode, session, shop, method="POST", json={"month": "march"})
        [event] = events(session, "like_purchase_in_doubt")
        assert (event["in_doubt"], event["place"]) == (lost.value.hold_id, "POST courts.example/opinion/42")
        fetch(mode, session, shop, method="POST", json={"month": "March"})  # the first again, and its answer
        fetch(mode, session, shop, method="POST", json={"month": "MARCH"})
        assert len(events(session, "like_purchase_in_doubt")) == 1
        assert len(shop.nonces) == 3
        with guard.session("another run", budget="$1.00") as other:
            fetch(mode, other, shop, method="POST", json={"month": "april"})
            assert events(other, "like_purchase_in_doubt") == []


@pytest.mark.chain
@pytest.mark.xdist_group("reviewed_chain")
@pytest.mark.parametrize("method", ["eip3009", "permit2"])
def test_a51_a_stranger_who_settles_first_takes_nothing_twice(tmp_path, method):
    """A stranger reads the payment and sends it; then the seller's own settlement fails: "the nonce is used"."""
    with Testnet() as net, Wild(net, tmp_path, method, policy=Policy(breaker=None)) as wild:
        before = net.balance(net.payer)

        def front_run(payload):
            to, data = wild.call_for(payload)
            wild.send(to, data)
            raise httpx.ReadError("the nonce is used")

        wild.take = front_run
        with pytest.raises(SettlementUncertain):
            wild.buy()
        wild.take = lambda payload: any_hash()  # the seller still has no transaction of its own
        for _ in range(2):
            try:
                assert wild.buy().status_code == 200
                break
            except PaidNotDelivered:
                pass
        wild.guard.reconcile()
        assert before - net.balance(net.payer) == 100_000
        assert (wild.session.spent, wild.session.held) == (Decimal("0.10"), 0)

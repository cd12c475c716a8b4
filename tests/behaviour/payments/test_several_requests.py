"""One call of the caller's over several requests: redirects, credentials asked for, answers that get lost on the way."""

from decimal import Decimal

import httpx
import pytest

from tests.behaviour.payments.test_failing_books import Breaking, Chain, Faulty
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt, required, upto
from x402guard import LedgerUnavailable, PaidNotDelivered, PolicyDenied, ProtocolError, SettlementUncertain
from x402guard.ledger.evidence import Settled, Used
from x402guard.stores import open_store

CENT = Decimal("0.01")
PAID = {"PAYMENT-RESPONSE": b64(receipt())}


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        yield session


def test_credentials_asked_for_behind_a_payment_do_not_buy_it_twice(session):
    challenge = 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'

    def paid(request, shop):
        return httpx.Response(401, headers={**PAID, "www-authenticate": challenge})

    shop = Shop(paid=paid)
    with pytest.raises(PolicyDenied, match="one_payment_per_request") as caught:
        client(session, shop).get(URL, auth=httpx.DigestAuth("me", "secret"))
    assert caught.value.money_may_have_moved
    assert len(shop.nonces) == 1
    assert session.spent == CENT


def hop(after):
    """Pays on /opinion, is redirected to /after, and meets *after* there."""

    def terms(request):
        if request.url.path != "/after":
            return required()
        if isinstance(after, Exception):
            raise after
        return after

    return Shop(terms, paid=lambda request, shop: httpx.Response(302, headers={**PAID, "location": "/after"}))


def test_a_lost_answer_behind_a_paid_hop_is_no_plain_network_error(session):
    with pytest.raises(SettlementUncertain, match="later hop") as caught:
        client(session, hop(httpx.ReadTimeout("slow")), follow_redirects=True).get(URL)
    assert (caught.value.retry, caught.value.money_may_have_moved) == ("no", True)
    assert caught.value.hold_id == session.report().to_dict()["events"][0]["hold_id"]
    assert caught.value.deadline > 0


def test_a_malformed_offer_behind_a_paid_hop_says_that_money_moved(session):
    bad = httpx.Response(402, headers={"PAYMENT-REQUIRED": "!"})
    with pytest.raises(ProtocolError) as caught:
        client(session, hop(bad), follow_redirects=True).get(URL)
    assert caught.value.money_may_have_moved
    assert "was paid" in caught.value.advice


def test_a_presentation_that_is_lost_again_presents_the_same_cheque_again():
    store = Faulty(open_store("memory://"))
    shop = Shop(paid=httpx.ReadError("gone"))
    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(SettlementUncertain):
            client(session, shop).get(URL)
        store.fail(1, LedgerUnavailable("answer lost"), committed=True)
        with pytest.raises(LedgerUnavailable):
            client(session, shop).get(URL)
        shop.paid = None
        assert client(session, shop).get(URL).extensions["x402guard"].represented
        assert len(shop.nonces) == 1
        assert session.held == 0


def test_a_refusal_is_not_masked_by_a_connection_that_breaks(session):
    def terms(request):
        return httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(required(upto(2_000_000)))}, stream=Breaking())

    with pytest.raises(PolicyDenied, match="per_payment_cap"):
        client(session, Shop(terms)).get(URL)


def test_paid_not_delivered_is_not_masked_by_a_connection_that_breaks():
    shop = Shop(paid=httpx.ReadError("gone"))
    with make_guard(chains=Chain(Used(final=True))) as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(SettlementUncertain):
            client(session, shop).get(URL)
        shop.paid = lambda request, shop: httpx.Response(402, stream=Breaking())
        with pytest.raises(PaidNotDelivered):
            client(session, shop).get(URL)
        assert session.spent == CENT


def test_a_block_that_can_be_undone_frees_nothing():
    clock = Clock()
    chain = Chain(Settled(1, "0x" + "ab" * 32, 0, final=False))
    shop = Shop(
        required(upto()),
        paid=lambda request, shop: httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="1"))}),
    )
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session = guard.session("s", budget="$0.05")
        client(session, shop).get(URL)
        guard.sweep()
        assert (session.held, session.spent) == (Decimal("0.05"), 0)
        chain.finding = Settled(50_000, "0x" + "cd" * 32, 0, final=True)  # the reorg took it all
        clock.tick(3)
        guard.sweep()
        assert (session.held, session.spent) == (0, Decimal("0.05"))


def test_what_is_captured_on_a_word_is_asked_about_until_it_is_proven():
    clock = Clock()
    chain = Chain(Used(final=False))
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session = guard.session("s", budget="$1")
        hold_id = client(session, Shop()).get(URL).extensions["x402guard"].hold_id
        guard.sweep()
        assert str(guard.shell.store.hold(hold_id).evidence) == "chain_head"
        chain.finding = Used(final=True)
        for _ in range(3):
            clock.tick(3)
            guard.sweep()
        assert str(guard.shell.store.hold(hold_id).evidence) == "chain"
        assert chain.reads == 2  # and then no more


def test_a_session_that_two_tasks_enter_leaves_each_its_own_context():
    import anyio

    from x402guard.guard.session import current_session

    async def main():
        with make_guard() as guard:
            one, two = guard.session("one", budget="$1"), guard.session("two", budget="$1")
            both_in, first_out = anyio.Event(), anyio.Event()

            async def first():
                async with one:
                    await both_in.wait()
                assert current_session() is None
                first_out.set()

            async def second():
                async with two:
                    async with one:
                        both_in.set()
                        await first_out.wait()
                        assert current_session() is one
                    assert current_session() is two

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first)
                tasks.start_soon(second)

    anyio.run(main)


def test_a_hung_signer_holds_up_nobody_else():
    import threading
    import time

    import anyio

    from tests.support.merchant import KEY, async_client
    from x402guard import LocalSigner

    release = threading.Event()

    class Remote:
        inline = False

        def __init__(self):
            self._signer = LocalSigner.from_key(KEY)
            self.address = self._signer.address
            self.bind = self._signer.bind

        def sign(self, hold):
            release.wait(20)
            return self._signer.sign(hold)

    async def main():
        with make_guard(signer=Remote()) as guard:
            session = guard.session("s", budget="$1")
            async with async_client(session, Shop()) as http:
                start = time.monotonic()
                with anyio.move_on_after(0.2):
                    async with anyio.create_task_group() as tasks:
                        for number in range(4):
                            tasks.start_soon(http.get, f"{URL}/{number}")
                assert time.monotonic() - start < 5
                assert session.held == 4 * CENT  # each may have been signed
                assert all(hold.doubt for hold in guard.shell.store.outstanding())
            release.set()

    anyio.run(main)


@pytest.mark.parametrize("status", [402, 500, 200])
def test_a_failure_that_names_a_transaction_is_settled_by_that_transaction(status):
    seen = []

    def finding(hold):
        seen.append(hold.claim.transaction)
        return Settled(12_345, hold.claim.transaction, 0, final=True)

    pending = b64(receipt(success=False, errorReason="settlement_pending"))
    shop = Shop(
        required(upto()),
        paid=lambda request, shop: httpx.Response(status, headers={"PAYMENT-RESPONSE": pending}),
    )
    with make_guard(chains=Chain(finding)) as guard:
        session = guard.session("s", budget="$1")
        paid = client(session, shop).get(URL).extensions["x402guard"]
        assert (paid.state, paid.in_doubt) == ("held", True)
        guard.sweep()
        assert (session.spent, session.held) == (Decimal("0.012345"), 0)
        assert seen == ["0x" + "ab" * 32]


def test_a_failure_that_names_a_transaction_stays_a_doubt_until_the_chain_has_it():
    from x402guard.ledger.evidence import Unreadable

    pending = b64(receipt(success=False, errorReason="settlement_pending"))
    shop = Shop(paid=lambda request, shop: httpx.Response(402, headers={"PAYMENT-RESPONSE": pending}))
    with make_guard(chains=Chain(Unreadable("not to be seen yet"))) as guard:
        session = guard.session("s", budget="$1")
        paid = client(session, shop).get(URL).extensions["x402guard"]
        guard.sweep()
        assert (paid.state, paid.in_doubt, session.held) == ("held", True, CENT)
        assert client(session, shop).get(URL).extensions["x402guard"].represented
        assert len(shop.nonces) == 1


def test_an_answer_ends_the_doubt_also_where_it_names_what_the_failure_named():
    pending = b64(receipt(success=False, errorReason="settlement_pending"))
    shop = Shop(required(upto()), paid=lambda request, shop: httpx.Response(402, headers={"PAYMENT-RESPONSE": pending}))
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        assert client(session, shop).get(URL).extensions["x402guard"].in_doubt
        shop.paid = lambda request, shop: httpx.Response(
            200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="50000"))}
        )
        answered = client(session, shop).get(URL).extensions["x402guard"]
        assert (answered.represented, answered.in_doubt) == (True, False)

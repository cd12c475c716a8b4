"""What goes wrong around a payment that is out: takeovers, books that fail, interruptions, clocks, forks."""

import asyncio
import threading
from decimal import Decimal

import httpx
import pytest

from tests.support.ledger import START_MS, Clock
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import (
    KEY,
    NETWORK,
    URL,
    Shop,
    async_client,
    b64,
    client,
    make_guard,
    receipt,
    required,
    upto,
)
from x402guard import (
    GuardedTransport,
    LedgerUnavailable,
    LocalSigner,
    Policy,
    PolicyDenied,
    SettlementUncertain,
    SignerError,
)
from x402guard.flow.ports import Funds
from x402guard.ledger.evidence import Settled, Unused, Used
from x402guard.stores import open_store

CENT = Decimal("0.01")


class Faulty:
    """A store that fails where it is told to: before or after the n-th transaction from now on."""

    inline = True

    def __init__(self, store):
        self._store = store
        self.countdown, self.error, self.committed = None, None, False

    def __getattr__(self, name):
        return getattr(self._store, name)

    def fail(self, n, error, *, committed=False):
        self.countdown, self.error, self.committed = n, error, committed

    def transact(self, scope, change):
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown == 0:
                self.countdown = None
                if self.committed:
                    self._store.transact(scope, change)
                raise self.error
        return self._store.transact(scope, change)


class Stalling:
    """A signer that lets somebody else act between the commit and the signature."""

    inline = True

    def __init__(self, meanwhile):
        self._signer = LocalSigner.from_key(KEY)
        self.address = self._signer.address
        self._meanwhile = [meanwhile]

    def bind(self, lookup):
        self._signer.bind(lookup)

    def sign(self, hold):
        while self._meanwhile:
            self._meanwhile.pop()()
        return self._signer.sign(hold)


def test_a_request_that_stalled_does_not_void_what_another_has_presented_meanwhile():
    clock, shop = Clock(), Shop(paid=lambda request, shop: httpx.Response(500))

    def meanwhile():
        clock.tick(31)
        assert client(session, shop).get(URL).extensions["x402guard"].represented

    with make_guard(open_store("memory://", clock_ms=clock), signer=Stalling(meanwhile)) as guard:
        session = guard.session("s", budget="$0.01")
        with pytest.raises(SettlementUncertain, match="may be out") as caught:
            client(session, shop).get(URL)
        assert isinstance(caught.value.__cause__, SignerError)
        assert (session.held, shop.signed) == (CENT, 10_000)


def test_a_connection_that_fails_late_does_not_void_what_another_has_presented_meanwhile():
    clock, shop = Clock(), Shop(paid=lambda request, shop: httpx.Response(500))

    class Late(httpx.HTTPTransport):
        """A stock transport as far as the guard can see; its first paid connection takes longer than a flight."""

        def handle_request(self, request):
            if "payment-signature" in request.headers and not shop.payments:
                clock.tick(31)
                client(session, shop).get(URL)
                raise httpx.ConnectTimeout("too slow")
            return shop(request)

    import x402guard.http.transport as module

    with make_guard(open_store("memory://", clock_ms=clock)) as guard:
        session = guard.session("s", budget="$0.01")
        transport = GuardedTransport(session, Late())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.httpx, "HTTPTransport", Late)
            with httpx.Client(transport=transport) as http, pytest.raises(SettlementUncertain):
                http.get(URL)
        assert (session.held, shop.signed) == (CENT, 10_000)


@pytest.mark.parametrize("committed", [False, True], ids=["not written", "answer lost"])
@pytest.mark.parametrize("status", [200, 500])
def test_books_that_fail_after_the_payment_do_not_take_the_answer_away(status, committed):
    store = Faulty(open_store("memory://"))
    headers = {"PAYMENT-RESPONSE": b64(receipt())} if status == 200 else {}
    shop = Shop(paid=lambda request, shop: httpx.Response(status, headers=headers, content=b"bought"))
    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        store.fail(2, LedgerUnavailable("disk full"), committed=committed)
        response = client(session, shop).get(URL)
        assert (response.status_code, response.content) == (status, b"bought")
        assert response.extensions["x402guard"].in_doubt
        assert session.spent + session.held == CENT


@pytest.mark.parametrize("committed", [False, True], ids=["not written", "answer lost"])
def test_books_that_fail_before_the_signature_leave_nothing_held(committed):
    store, shop = Faulty(open_store("memory://")), Shop()
    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        store.fail(1, LedgerUnavailable("disk full"), committed=committed)
        with pytest.raises(LedgerUnavailable) as caught:
            client(session, shop).get(URL)
        assert caught.value.money_may_have_moved is False
        assert (session.held, shop.payments) == (0, [])


class Breaking(httpx.SyncByteStream):
    """A 402's body whose connection breaks when it is closed."""

    def __iter__(self):
        yield b""

    def close(self):
        raise httpx.CloseError("broken")


def test_a_connection_that_breaks_when_it_is_closed_is_no_reason_to_sign_twice():
    answers = iter([Breaking(), httpx.ByteStream(b"")])

    def terms(request):
        return httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(required())}, stream=next(answers))

    shop = Shop(terms)
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(SettlementUncertain) as caught:
            client(session, shop).get(URL)
        response = client(session, shop).get(URL)
        assert response.extensions["x402guard"].hold_id == caught.value.hold_id
        assert len(shop.nonces) == 1


@pytest.mark.parametrize("error", [RuntimeError("a transport's own"), httpx.ReadTimeout("slow"), OSError("reset")])
def test_whatever_a_transport_raises_the_payment_is_uncertain(error):
    shop = Shop(paid=error)
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(SettlementUncertain) as caught:
            client(session, shop).get(URL)
        assert caught.value.__cause__ is error
        assert session.held == CENT


def test_native_cancellation_waits_for_the_ledger_and_leaves_nothing_behind(tmp_path):
    """`asyncio.wait_for` cancels by task.cancel(), which no shield of anyio's keeps out."""
    store, shop = open_store(f"sqlite:///{tmp_path / 'l.db'}"), Shop()
    inside, go_on, committed = threading.Event(), threading.Event(), threading.Event()
    transact = store.transact

    def slow(scope, change):
        if scope.purchase is not None:
            inside.set()
            assert go_on.wait(10)
            result = transact(scope, change)
            committed.set()
            return result
        return transact(scope, change)

    async def main():
        async with async_client(session, shop) as http:
            task = asyncio.ensure_future(http.get(URL))
            await asyncio.to_thread(inside.wait, 10)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()  # and again, while it waits
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        store.transact = slow
        asyncio.run(main())
        assert committed.wait(10)
        assert (session.held, session.spent, shop.payments) == (0, 0, [])
    store.close()


def test_native_cancellation_after_the_payment_is_a_doubt(tmp_path):
    shop = Shop()

    async def main():
        async with async_client(session, shop) as http:
            task = asyncio.current_task()
            answer = httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())})
            shop.paid = lambda request, shop: (task.cancel(), answer)[1]
            await http.get(URL)

    with make_guard(f"sqlite:///{tmp_path / 'l.db'}") as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
        assert session.spent + session.held == CENT
        shop.paid = None
        live = guard.shell.store.outstanding()
        assert all(hold.doubt for hold in live)
        if live:
            assert client(session, shop).get(URL).extensions["x402guard"].represented
            assert len(shop.nonces) == 1


class Chain:
    """A chain that says what it is told to."""

    networks = frozenset({NETWORK})

    def __init__(self, finding):
        self.finding, self.reads = finding, 0

    def read(self, hold):
        self.reads += 1
        return self.finding(hold) if callable(self.finding) else self.finding

    def funds(self, network, token, owner):
        return Funds(10**12, 10**12)

    def close(self):
        pass


def test_a_sweep_leaves_alone_what_is_still_under_way():
    chain = Chain(lambda hold: Settled(12_345, "0x" + "ab" * 32, 0, final=True) if hold.claim else Used(final=True))
    shop = Shop(required(upto()))

    def paid(request, shop):
        guard.sweep()  # somebody else's refusal, while this answer is on its way
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="12345"))})

    shop.paid = paid
    with make_guard(chains=chain) as guard:
        session = guard.session("s", budget="$1")
        receipt_ = client(session, shop).get(URL).extensions["x402guard"]
        assert (receipt_.amount, receipt_.state) == (Decimal("0.05"), "held")
        guard.sweep()
        assert (session.spent, session.held) == (Decimal("0.012345"), 0)


def test_a_claim_that_comes_late_still_brings_the_ceiling_down():
    clock = Clock()
    chain = Chain(lambda hold: Settled(12_345, "0x" + "ab" * 32, 0, final=True) if hold.claim else Used(final=True))
    shop = Shop(required(upto()))

    def paid(request, shop):
        clock.tick(31)
        guard.sweep()
        assert session.spent == Decimal("0.05")  # used, and nobody had said by what
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="12345"))})

    shop.paid = paid
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session = guard.session("s", budget="$1")
        client(session, shop).get(URL)
        assert session.spent == Decimal("0.012345")


def test_a_chain_out_of_reach_is_asked_once_a_sweep_and_not_by_every_refusal():
    from x402guard.ledger.evidence import Unreadable

    chain = Chain(Unreadable("down"))
    shop = Shop(paid=httpx.ReadError("gone"))
    with make_guard(chains=chain, policy=Policy(loop=None, breaker=None)) as guard:
        session = guard.session("s", budget="$0.05")
        for number in range(5):
            with pytest.raises(SettlementUncertain):
                client(session, shop).get(f"{URL}/{number}")
        from x402guard import BudgetExhausted

        for number in range(10):
            with pytest.raises(BudgetExhausted):
                client(session, shop).get(f"{URL}/more/{number}")
        assert chain.reads == 1


@pytest.mark.parametrize("kind", ["tool", "call"])
def test_before_a_tool_or_a_call_is_refused_the_chain_is_asked_what_it_can_free(kind):
    clock = Clock()
    chain = Chain(lambda hold: Unused(clock() // 1000))
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session = guard.session("s", budget="$0.01")
        with pytest.raises(SettlementUncertain):
            client(session, Shop(paid=httpx.ReadError("gone"))).get(URL)
        clock.tick(61)  # nobody can take it any more, and nobody has asked
        assert session.remaining == 0
        if kind == "tool":
            session.charge("serp", "$0.01")
            assert (session.spent, session.held) == (CENT, 0)
        else:
            http = client(session, lambda _request: httpx.Response(200, json=completion()))
            assert http.post(CHAT, json=ask()).status_code == 200


def test_a_clock_that_once_ran_ahead_dates_no_signature():
    clock, shop = Clock(START_MS + 10 * 365 * 86_400_000), Shop()
    with make_guard(open_store("memory://", clock_ms=clock)) as guard:
        session = guard.session("s", budget="$1")
        clock.now_ms = START_MS
        with pytest.raises(PolicyDenied, match=r"clock: .* behind the ledger"):
            client(session, shop).get(URL)
        assert shop.payments == []


def test_a_claim_that_the_chain_never_settled_is_taken_back_when_it_no_longer_can():
    clock = Clock()
    chain = Chain(lambda hold: Unused(clock() // 1000))
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session = guard.session("s", budget="$1")
        paid = client(session, Shop()).get(URL).extensions["x402guard"]
        assert (session.spent, paid.evidence) == (CENT, "claimed")
        clock.tick(61)
        from x402guard.flow.drivers import run
        from x402guard.x402.settlement import ask_chain

        hold = run(ask_chain(guard.shell.store.hold(paid.hold_id)), guard.shell)
        assert (hold.captured, str(hold.evidence), session.spent) == (0, "chain", 0)
        events = [event["event"] for event in session.report().to_dict()["events"]]
        assert "claim_contradicted" in events

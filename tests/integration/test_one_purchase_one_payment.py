"""A paid answer is lost, its settlement is found by one actor or another, and the agent asks again: one transfer, always."""

import itertools
import json
import time

import anyio
import httpx
import pytest

from tests.support.command_line import forked
from tests.support.ledger import Clock
from tests.support.refusals import Chunks
from x402guard import (
    AsyncGuardedTransport,
    Guard,
    GuardedTransport,
    LocalSigner,
    PaidNotDelivered,
    Policy,
    SettlementUncertain,
)
from x402guard.flow.drivers import run
from x402guard.kernel.rows import HoldState
from x402guard.stores import open_store
from x402guard.x402.settlement import sweep

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("one purchase")]

ROUTES = {
    "exact": ("GET", "/documents/{}"),
    "v1": ("GET", "/v1/documents/{}"),
    "permit2": ("GET", "/permit2/{}"),
    "upto": ("POST", "/llm"),
}
PAID = ("payment-signature", "x-payment")
numbers = itertools.count()


def cut():
    """A body that breaks after its first bytes."""
    return Chunks(b"{", error=lambda: httpx.RemoteProtocolError("the body was cut"))


class Cancelled(BaseException):
    """What a task is cancelled with, in both kinds of client."""


class Interrupting:
    """A store whose caller is cancelled as its second transaction, the claim's, is written."""

    inline = True

    def __init__(self, store):
        self._store, self.left = store, None

    def __getattr__(self, name):
        return getattr(self._store, name)

    def transact(self, scope, change):
        result = self._store.transact(scope, change)
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise Cancelled
        return result


def never(_response):
    raise httpx.ReadError("the answer was lost")


SHORT = {"content-length": "7"}

LOSSES = {
    "answer lost": never,
    "402 again": lambda response: httpx.Response(402, headers={"payment-required": ""}, json=response.json()),
    "5xx": lambda _response: httpx.Response(502),
    "5xx with its receipt": lambda response: httpx.Response(500, headers=receipt_of(response)),
    "404 with its receipt": lambda response: httpx.Response(404, headers=receipt_of(response)),
    "body cut": lambda response: httpx.Response(200, headers=receipt_of(response), stream=cut()),
    "short body cut": lambda response: httpx.Response(200, headers=receipt_of(response) | SHORT, stream=cut()),
    "body cut, no receipt": lambda _response: httpx.Response(200, stream=cut()),
    "cancelled in the claim": lambda response: response,
}


def receipt_of(response):
    return {name: value for name, value in response.headers.items() if name.endswith("payment-response")}


class Losing(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Carries requests to the merchant, which settles; the answer of the first paid one is lost in the way told."""

    def __init__(self, loses):
        self.loses, self.paid = loses, 0

    def handle_request(self, request):
        with httpx.HTTPTransport() as inner:
            response = inner.handle_request(request)
            response.read()
        return self.handed(request, response)

    async def handle_async_request(self, request):
        async with httpx.AsyncHTTPTransport() as inner:
            response = await inner.handle_async_request(request)
            await response.aread()
        return self.handed(request, response)

    def handed(self, request, response):
        # A new response: the connection of the one that was read is closed.
        response = httpx.Response(response.status_code, headers=response.headers, content=response.content)
        if not any(name in request.headers for name in PAID):
            return response
        self.paid += 1
        if self.paid > 1:
            return response
        assert response.status_code == 200, "the merchant did not deliver"
        return self.loses(response)


class Buyer:
    """One agent with its guard, its session and a way to lose the first paid answer."""

    def __init__(self, net, tmp_path, loses, kind, *, clock=None, chains=True):
        number = next(numbers)
        self.net, self.folder, self.url = net, tmp_path, f"sqlite:///{tmp_path / f'spend{number}.db'}"
        self.store = Interrupting(open_store(self.url, clock_ms=clock))
        self.guard = Guard(
            signer=LocalSigner.from_key(net.payer_key),
            ledger=self.store,
            chains={net.network: net.rpc} if chains else None,
            policy=Policy(breaker=None, loop=None),
            background_checks=False,
        )
        self.session = self.guard.session("s", budget="$1.00", id="run")
        self.inner = Losing(LOSSES[loses])
        self.method, path = ROUTES[kind]
        self.path = path.format(number)
        self.before = len(net.transfers())
        self.cancels = loses == "cancelled in the claim"

    def ask(self, mode, **more):
        more |= {"json": {"text": "the motion"}} if self.method == "POST" else {}
        at = {"base_url": self.net.merchant.url, "timeout": 30}
        if mode == "sync":
            with httpx.Client(transport=GuardedTransport(self.session, self.inner), **at) as http:
                return http.request(self.method, self.path, **more)

        async def main():
            async with httpx.AsyncClient(transport=AsyncGuardedTransport(self.session, self.inner), **at) as http:
                return await http.request(self.method, self.path, **more)

        return anyio.run(main)

    def lose(self, mode):
        """Buy once; the answer does not arrive."""
        self.store.left = 2 if self.cancels else None
        try:
            response = self.ask(mode)
        except (SettlementUncertain, httpx.RemoteProtocolError, Cancelled):
            pass
        else:
            assert response.status_code >= 400
        self.store.left = None
        assert self.transfers == 1

    @property
    def transfers(self):
        return len(self.net.transfers()) - self.before

    @property
    def hold(self):
        [hold] = [hold for hold in map(self.store.hold, self.store.unsettled(0)) if hold is not None]
        return hold

    def close(self):
        self.guard.close()
        self.store.close()


@pytest.fixture
def buyer(net, tmp_path):
    made = []

    def make(*arguments, **more):
        made.append(Buyer(net, tmp_path, *arguments, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def reconciled_by_command(buyer):
    chains = json.dumps({buyer.net.network: buyer.net.rpc})
    done = forked("reconcile", cwd=buyer.folder, X402GUARD_LEDGER=buyer.url, X402GUARD_CHAINS=chains)
    assert "asked about 1" in done.stdout, done.stderr


def reconciled_by_another_guard(buyer):
    with Guard(ledger=buyer.url, chains={buyer.net.network: buyer.net.rpc}, background_checks=False) as other:
        other.reconcile()


FINDERS = {
    "retry first": lambda _buyer: None,
    "session.reconcile first": lambda buyer: buyer.session.reconcile(),
    "guard.reconcile first": lambda buyer: buyer.guard.reconcile(),
    "background first": lambda buyer: run(sweep(buyer.guard.context), buyer.guard.shell),
    "another guard first": reconciled_by_another_guard,
    "a command first": reconciled_by_command,
}


ALL = [*itertools.product(LOSSES, FINDERS, ROUTES, ("sync", "async"))]
PAIRS = [
    row for row in ALL if (row[1] == "retry first") + (row[2] == "exact") + (row[3] == "sync") >= 2
]  # a loss, and each of the others


@pytest.mark.parametrize(("loses", "found", "kind", "mode"), PAIRS)
def test_whoever_finds_the_settlement_the_retry_signs_no_second_payment(buyer, loses, found, kind, mode):
    bought_once(buyer, loses, found, kind, mode)


@pytest.mark.long
@pytest.mark.one_in(3)
@pytest.mark.parametrize("engine", ["eth-tester"], indirect=True)
@pytest.mark.parametrize(("loses", "found", "kind", "mode"), [row for row in ALL if row not in PAIRS])
def test_it_signs_none_in_any_other_order(buyer, loses, found, kind, mode):
    bought_once(buyer, loses, found, kind, mode)


def bought_once(buyer, loses, found, kind, mode):
    agent = buyer(loses, kind)
    agent.lose(mode)
    FINDERS[found](agent)
    for _ in range(3):
        try:
            delivered = agent.ask(mode).status_code == 200
        except PaidNotDelivered as error:
            assert (error.hold_id, error.payee) == (agent.hold.id, agent.hold.payment().payee)
            assert error.amount == agent.session.spent + agent.session.held
            assert error.transaction in (agent.hold.proof or "")
            delivered = False
        assert not delivered
        assert agent.transfers == 1
    assert agent.inner.paid == 4  # the same payment was presented each time
    assert agent.hold.state is HoldState.CAPTURED


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ROUTES)
def test_a_payment_that_lapsed_without_a_chain_is_not_bought_again(buyer, kind, mode):
    clock = Clock(int(time.time() * 1000))
    agent = buyer("answer lost", kind, clock=clock, chains=False)
    agent.lose(mode)
    clock.tick(4_000)
    for _ in range(3):
        with pytest.raises(SettlementUncertain, match="in doubt"):
            agent.ask(mode)
    assert (agent.transfers, agent.inner.paid) == (1, 1)
    assert agent.session.held == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_answer_to_a_payment_presented_again_is_handed_over_with_or_without_a_receipt(buyer, mode):
    agent = buyer("answer lost", "exact")
    agent.lose(mode)
    handed = agent.inner.handed
    agent.inner.handed = lambda request, response: (
        httpx.Response(200, text="the goods") if PAID[0] in request.headers else handed(request, response)
    )
    assert agent.ask(mode).text == "the goods"
    assert agent.transfers == 1
    del agent.inner.handed
    assert agent.ask(mode).status_code == 200  # the purchase is closed: this is the next one
    assert agent.transfers == 2


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ROUTES)
def test_pay_again_signs_another_payment_and_closes_the_purchase_that_was_lost(buyer, kind, mode):
    agent = buyer("5xx with its receipt", kind)
    agent.lose(mode)
    agent.guard.reconcile()
    assert agent.ask(mode, extensions={"pay_again": True}).status_code == 200
    assert agent.transfers == 2
    assert agent.ask(mode).status_code == 200
    assert agent.transfers == 3


def test_the_same_purchase_signs_again_after_its_memory(buyer):
    clock = Clock(int(time.time() * 1000))
    agent = buyer("body cut", "exact", clock=clock, chains=False)
    agent.lose("sync")
    for hours, signs in ((0, False), (23, False), (2, True)):
        clock.tick(hours * 3600)
        if not signs:
            with pytest.raises(SettlementUncertain):
                agent.ask("sync")
    # The chain's own clock has not moved, so the merchant refuses a payment that is not valid yet: it was signed.
    agent.ask("sync")
    assert len({hold.id for hold in map(agent.store.hold, agent.store.unsettled(0))}) == 2


def test_the_owner_forgives_a_purchase_by_command(buyer, tmp_path):
    agent = buyer("body cut", "exact")
    agent.lose("sync")
    agent.guard.reconcile()
    with pytest.raises(PaidNotDelivered):
        for _ in range(2):
            agent.ask("sync")
    done = forked("holds", "forgive", agent.hold.id[:12], "--ledger", agent.url, cwd=tmp_path)
    assert (done.returncode, "signs a new payment now" in done.stdout) == (0, True), done.stderr
    assert agent.ask("sync").status_code == 200
    assert agent.transfers == 2

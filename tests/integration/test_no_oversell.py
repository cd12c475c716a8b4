"""Real HTTP, real threads and tasks: the number of signatures is exact, and not one more."""

import threading
from contextlib import AsyncExitStack
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.merchant import KEY
from x402guard import AsyncGuardedTransport, BudgetExhausted, Guard, GuardedTransport, LocalSigner, Policy, Timeouts
from x402guard.testing import Merchant, SignatureSettler, Testnet

pytestmark = pytest.mark.xdist_group("oversell")

CENT = 10_000
WORKERS = 32


@pytest.fixture
def merchant():
    """A merchant that recovers each signer and keeps what it was paid."""
    shop = Merchant(settler=SignatureSettler(), payee="0x209693Bc6afc0C5328bA36FaF03C514EF312287C")
    shop.start()
    yield shop
    shop.close()


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.long), "sqlite"])
def guard(request, tmp_path):
    ledger = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'spend.db'}"
    policy = Policy(timeouts=Timeouts(payment_s=100))  # a machine with other work may be slow to answer 1,600 at once
    with Guard(signer=LocalSigner.from_key(KEY), ledger=ledger, policy=policy, budget="$5.00") as guard:
        yield guard


@pytest.fixture(params=[320, pytest.param(1_600, marks=[pytest.mark.long, pytest.mark.large])])
def calls(request):
    return request.param


@pytest.fixture
def fits(calls):
    return calls * 5 // 16


@pytest.fixture
def session(guard, fits):
    with guard.session("fleet", budget=Decimal(fits) / 100) as session:
        yield session


def check(merchant, session, paid, *, calls, fits):
    payments = merchant.settler.payments
    assert len({payment.nonce for payment in payments}) == len(payments) == fits
    assert sum(payment.amount for payment in payments) == fits * CENT  # overshoot $0.00
    assert paid == fits
    assert session.spent * 10**6 == fits * CENT
    assert session.held == session.remaining == 0
    [refusals] = session.report().to_dict()["refusals"]
    assert (refusals["rule"], refusals["count"]) == ("budget", calls - fits)


def test_32_threads_buy_exactly_what_fits(merchant, session, calls, fits):
    barrier, paid, each = threading.Barrier(WORKERS), [], calls // WORKERS

    def work(thread):
        with httpx.Client(transport=GuardedTransport(session), base_url=merchant.url, timeout=60) as http:
            barrier.wait()
            for number in range(each):
                try:
                    assert http.get(f"/cents/{thread * each + number}").status_code == 200
                    paid.append(number)
                except BudgetExhausted:
                    pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(merchant, session, len(paid), calls=calls, fits=fits)


def test_as_many_tasks_buy_exactly_what_fits(merchant, session, calls, fits):
    """All tasks at once on one loop; 32 clients, because a pool of one client is quadratic in the requests that wait."""
    paid = []

    async def buy(http, number):
        try:
            assert (await http.get(f"/cents/{number}")).status_code == 200
            paid.append(number)
        except BudgetExhausted:
            pass

    def new_client():
        inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=4))
        return httpx.AsyncClient(transport=AsyncGuardedTransport(session, inner), base_url=merchant.url, timeout=60)

    async def main():
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(new_client()) for _ in range(WORKERS)]
            async with anyio.create_task_group() as tasks:
                for number in range(calls):
                    tasks.start_soon(buy, clients[number % WORKERS], number)

    anyio.run(main)
    check(merchant, session, len(paid), calls=calls, fits=fits)


@pytest.mark.chain
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wanted", [400, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.large])])
def test_an_agent_gets_fifty_documents_however_many_it_wants(tmp_path, wanted):
    with Testnet() as net:
        signer = LocalSigner.from_key(net.payer_key)
        with Guard(signer=signer, ledger=f"sqlite:///{tmp_path / 'spend.db'}", chains={net.network: net.rpc}) as guard:
            with guard.session("court-research", budget="$5.00") as session:
                got = refused = 0
                with httpx.Client(transport=GuardedTransport(session), base_url=net.merchant.url, timeout=30) as http:
                    for number in range(wanted):
                        try:
                            got += http.get(f"/documents/{number}").status_code == 200
                        except BudgetExhausted:
                            refused += 1
                assert (got, refused) == (50, wanted - 50)
                assert session.report().to_dict()["payments"]["calls"] == 50
                transfers = net.transfers()
                assert [t.amount for t in transfers] == [100_000] * 50
                assert sum(entry.event == "authorize" for entry in guard.shell.store.entries(session.id)) == 50
            assert guard.session("next", budget="$5.00").spent == 0

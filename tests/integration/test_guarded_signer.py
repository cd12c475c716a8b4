"""Clients of the official SDK with the guard behind them, against the official server, on a chain."""

import asyncio
from decimal import Decimal

import httpx
import pytest
from x402 import x402Client, x402ClientSync
from x402.http.clients.httpx import x402AsyncTransport, x402HttpxClient
from x402.http.clients.requests import x402_requests

from tests.support import official_sdk
from tests.support.chain import MockChain
from x402guard import BudgetExhausted, ConfigError, Guard, GuardedSigner, LocalSigner, Policy, PolicyDenied
from x402guard.testing import Server

pytestmark = [pytest.mark.chain]
PAYEE = "0x857b06519E91e3A54538791bDbb0E22373e36b66"
DIME = Decimal("0.1")


@pytest.fixture(scope="module")
def shop(net):
    app = official_sdk.merchant_app(facilitator_url=net.facilitator, network=net.network, payee=PAYEE, token=net.token)
    with Server(app) as server:
        yield server


@pytest.fixture
def guarded(net, tmp_path):
    def make(**more):
        more = {"policy": Policy(breaker=None, loop=None), "background_checks": False, **more}
        url = f"sqlite:///{tmp_path / 'spend.db'}"
        return Guard(signer=LocalSigner.from_key(net.payer_key), ledger=url, chains={net.network: net.rpc}, **more)

    return make


def causes(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("sale", ["GET /documents/1", "GET /permit2/1", "POST /llm"])
def test_the_async_client_pays_by_every_scheme(net, shop, guarded, sale):
    method, path = sale.split()
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:
        client = GuardedSigner(session).register(x402Client())

        async def go():
            transport = x402AsyncTransport(client)
            async with httpx.AsyncClient(transport=transport, timeout=30, trust_env=False) as http:
                return await http.request(method, shop.url + path)

        answer = asyncio.run(go())
        assert answer.status_code == 200, answer.text
        session.reconcile()
        assert (session.spent, session.held) == (Decimal(before - net.balance(net.payer)) / 10**6, 0)
        assert session.spent > 0


def test_the_httpx_client_and_requests_pay(net, shop, guarded):
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def go():
            async with x402HttpxClient(GuardedSigner(session).register(x402Client()), timeout=30) as http:
                return await http.get(f"{shop.url}/documents/2")

        assert asyncio.run(go()).status_code == 200
        with x402_requests(GuardedSigner(session).register(x402ClientSync())) as http:
            http.trust_env = False
            assert http.get(f"{shop.url}/documents/3", timeout=30).status_code == 200
            assert http.get(f"{shop.url}/free", timeout=30).status_code == 200
        assert (session.spent, session.held) == (2 * DIME, 0)
    assert before - net.balance(net.payer) == 200_000


def test_32_calls_at_once_on_a_budget_for_ten_buy_exactly_ten(net, shop, guarded):
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:
        client = GuardedSigner(session).register(x402Client())
        bought, refused = [], []

        async def one(http, number):
            try:
                answer = await http.get(f"{shop.url}/documents/{number}")
                bought.append(answer.status_code)
            except Exception as error:
                assert any(isinstance(each, BudgetExhausted) for each in causes(error)), error
                refused.append(number)

        async def go():
            limits = httpx.Limits(max_connections=8)
            async with httpx.AsyncClient(
                transport=x402AsyncTransport(client, transport=httpx.AsyncHTTPTransport(limits=limits)),
                timeout=120, trust_env=False,
            ) as http:  # fmt: skip
                await asyncio.gather(*(one(http, number) for number in range(32)))

        asyncio.run(go())
        assert (bought, len(refused)) == ([200] * 10, 22)
        session.reconcile()
        assert (session.spent, session.held) == (Decimal("1.0"), 0)
    assert before - net.balance(net.payer) == 1_000_000


def test_the_policy_refuses_before_anything_is_signed(net, shop, guarded):
    with guarded(policy=Policy(per_payment_cap="$0.05", breaker=None)) as guard:
        with guard.session("s", budget="$1.00") as session:
            client = GuardedSigner(session).register(x402Client())

            async def go():
                async with httpx.AsyncClient(transport=x402AsyncTransport(client), trust_env=False) as http:
                    await http.get(f"{shop.url}/documents/4")

            with pytest.raises(Exception) as caught:
                asyncio.run(go())
            [refusal] = {each for each in causes(caught.value) if isinstance(each, PolicyDenied)}
            assert refusal.rule == "per_payment_cap"
            assert (session.spent, session.held) == (0, 0)


def test_what_cannot_be_guarded_is_refused_by_name():
    with Guard(ledger="memory://") as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(ConfigError, match=r"session: .* is neither a Session nor a Guard"):
            GuardedSigner(MockChain())
        with pytest.raises(ConfigError, match="client: a Client is no client of the package x402"):
            GuardedSigner(session).register(httpx.Client())

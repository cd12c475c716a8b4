"""Our client against the official SDK: its FastAPI server, with its facilitator and with ours, on our chain."""

from decimal import Decimal

import anyio
import httpx
import pytest
from eth_account import Account

from tests.support import official_sdk
from x402guard import AsyncGuardedTransport, BudgetExhausted, Guard, GuardedTransport, LocalSigner
from x402guard.testing import Server, Testnet

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("official")]

PAYEE = "0x857b06519E91e3A54538791bDbb0E22373e36b66"
FACILITATOR_KEY = "0x" + "55" * 32
SALES = {"GET /documents/3": 100_000, "GET /permit2/3": 100_000, "POST /llm": 12_345, "POST /idle": 0}


@pytest.fixture(scope="module")
def net(make_engine):
    with Testnet(make_engine=make_engine) as net:
        net.fund(Account.from_key(FACILITATOR_KEY).address, wei=10**19)
        yield net


@pytest.fixture(scope="module", params=["theirs", "ours"])
def shop(request, net):
    """The official server, behind the official facilitator or behind our own."""
    if request.param == "ours":
        with Server(
            official_sdk.merchant_app(
                facilitator_url=net.facilitator, network=net.network, payee=PAYEE, token=net.token
            )
        ) as server:
            yield server
        return
    app = official_sdk.facilitator_app(rpc_url=net.rpc, key=FACILITATOR_KEY, network=net.network)
    with Server(app) as facilitator:
        app = official_sdk.merchant_app(
            facilitator_url=facilitator.url, network=net.network, payee=PAYEE, token=net.token
        )
        with Server(app) as server:
            yield server


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("sale", sorted(SALES))
def test_our_client_pays_the_official_server(net, shop, tmp_path, kind, sale):
    method, path = sale.split()
    before = net.balance(net.payer)
    signer = LocalSigner.from_key(net.payer_key)
    with Guard(signer=signer, ledger=f"sqlite:///{tmp_path / 's.db'}", chains={net.network: net.rpc}) as guard:
        with guard.session("agent", budget="$1.00") as session:
            response = ask(kind, session, shop.url, method, path)
            assert response.status_code == 200, response.text
            assert before - net.balance(net.payer) == SALES[sale]
            receipt = response.extensions["x402guard"]
            if sale == "POST /idle":
                # Settled at zero: no transaction, so the ceiling stays held until the chain can no longer take it.
                assert (receipt.state, receipt.transaction) == ("held", "")
                assert session.spent == 0 < session.held
            else:
                assert session.reconcile().still_open == 0
                assert session.spent * 10**6 == SALES[sale]
                assert session.held == 0


def ask(kind, session, url, method, path):
    if kind == "sync":
        with httpx.Client(transport=GuardedTransport(session), base_url=url, timeout=60) as http:
            return http.request(method, path)

    async def main():
        async with httpx.AsyncClient(transport=AsyncGuardedTransport(session), base_url=url, timeout=60) as http:
            return await http.request(method, path)

    return anyio.run(main)


def test_the_budget_holds_against_the_official_server(net, shop, tmp_path):
    before = net.balance(net.payer)
    signer = LocalSigner.from_key(net.payer_key)
    with Guard(signer=signer, ledger=f"sqlite:///{tmp_path / 's.db'}", chains={net.network: net.rpc}) as guard:
        with guard.session("agent", budget="$0.25") as session:
            for number in range(2):
                assert ask("sync", session, shop.url, "GET", f"/documents/{number}").status_code == 200
            with pytest.raises(BudgetExhausted):
                ask("sync", session, shop.url, "GET", "/documents/3")
            assert session.spent == Decimal("0.20")
    assert before - net.balance(net.payer) == 200_000


def test_the_official_client_pays_our_merchant(net):
    before = net.balance(net.payer)
    response, _ = official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/documents/1")
    assert response.status_code == 200
    assert before - net.balance(net.payer) == 100_000

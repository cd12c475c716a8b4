"""Paid tasks of an agent by the official A2A package on both ends, bought through the guard on a chain."""

import asyncio
from contextlib import aclosing
from decimal import Decimal

import httpx
import pytest
from a2a.client import ClientConfig, ClientFactory
from a2a.helpers.proto_helpers import get_message_text, new_text_message
from a2a.types import Role, SendMessageRequest
from starlette.applications import Starlette

from tests.support import a2a_seller
from x402guard import (
    AsyncGuardedTransport,
    BudgetExhausted,
    ConfigError,
    Guard,
    GuardedA2AClient,
    Policy,
    PolicyDenied,
    SettlementUncertain,
)
from x402guard.testing import Server

pytestmark = pytest.mark.chain
DIME = Decimal("0.1")


@pytest.fixture(params=[True, False], ids=["streams", "waits"])
def painter(net, request):
    painter = a2a_seller.Painter(net.facilitator, net.network, net.payee, net.token)
    app = Starlette(lifespan=painter.lifespan)
    with Server(app) as server:
        painter.url = server.url
        app.router.routes.extend(a2a_seller.routes(painter, f"{server.url}/", streams=request.param))
        yield painter


def ask(text):
    return SendMessageRequest(message=new_text_message(text, role=Role.ROLE_USER))


def using(painter, session, work, **more):
    async def go():
        headers = {"X-A2A-Extensions": a2a_seller.EXTENSION}
        inner = more.pop("transport", None)
        async with httpx.AsyncClient(headers=headers, timeout=more.pop("timeout", 30), transport=inner) as http:
            client = await ClientFactory(ClientConfig(httpx_client=http)).create_from_url(painter.url)
            return await work(GuardedA2AClient(client, session, agent=more.pop("agent", "painter"), **more))

    return asyncio.run(go())


async def said(client, text, **more):
    """The last words of a task."""
    words = ""
    async with aclosing(client.send_message(ask(text), **more)) as events:
        async for event in events:
            status = event.task.status if event.HasField("task") else event.status_update.status
            words = get_message_text(status.message) or words
    return words


def test_a_paid_task_is_bought_and_a_free_one_is_not(painter, guarded, net):
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def work(client):
            return await said(client, "free"), await said(client, "a boat"), await said(client, "a tree")

        assert using(painter, session, work) == ("nothing to pay", "painted a boat", "painted a tree")
        assert (session.spent, session.held) == (2 * DIME, 0)
    assert before - net.balance(net.payer) == 200_000


def test_tasks_at_once_buy_what_the_budget_pays_for(painter, guarded, net):
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$0.30") as session:

        async def work(client):
            return await asyncio.gather(*(said(client, f"n{n}") for n in range(8)), return_exceptions=True)

        found = using(painter, session, work)
        assert sum(isinstance(each, str) for each in found) == 3
        assert all(isinstance(each, (str, BudgetExhausted)) for each in found), found
        assert len(painter.painted) == 3
    assert before - net.balance(net.payer) == 300_000


def test_a_lost_answer_presents_the_same_payment_again(painter, guarded):
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def work(client):
            for _ in range(2):
                with pytest.raises(SettlementUncertain):
                    await said(client, "hangs")

        using(painter, session, work, timeout=3)
        assert len(painter.signatures) == 2
        assert len(set(painter.signatures)) == 1
        assert session.held == DIME


@pytest.mark.parametrize("wanted", ["again", "fails"])
def test_a_task_that_is_paid_and_gives_nothing_denies_no_payment(painter, guarded, wanted):
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def work(client):
            return await asyncio.gather(said(client, wanted), return_exceptions=True)

        [found] = using(painter, session, work)
        assert isinstance(found, SettlementUncertain) or found == "no colours left"
        assert session.spent + session.held == DIME
        [again] = using(painter, session, work)
        assert len(set(painter.signatures)) == 1
        assert session.spent + session.held == DIME, again


def test_an_end_without_a_receipt_stays_in_doubt_until_the_chain_says(painter, guarded):
    with guarded() as guard, guard.session("s", budget="$1.00") as session:
        assert using(painter, session, lambda client: said(client, "quiet")) == "painted quiet"
        assert session.spent + session.held == DIME
        session.reconcile()
        assert (session.spent, session.held) == (DIME, 0)


def test_the_rules_judge_the_agent_and_the_price(painter, guarded):
    with (
        guarded(policy=Policy(per_payment_cap="$0.05", breaker=None)) as guard,
        guard.session("s", budget="$1.00") as s,
    ):
        with pytest.raises(PolicyDenied, match="per_payment_cap"):
            using(painter, s, lambda client: said(client, "a boat"))
    with (
        guarded(policy=Policy(hosts={"painter.example"}, breaker=None)) as guard,
        guard.session("t", budget="$1.00") as s,
    ):
        with pytest.raises(PolicyDenied, match="hosts"):  # the agent's own word of its place is none
            using(painter, s, lambda client: said(client, "a boat"), agent="https://other.example")
        assert painter.signatures == []


def test_a_guarded_transport_below_knows_the_payment_and_no_other(painter, guarded):
    with guarded() as guard, guard.session("s", budget="$1.00") as session:
        below = AsyncGuardedTransport(session)
        assert using(painter, session, lambda client: said(client, "a boat"), transport=below) == "painted a boat"
        assert (session.spent, session.held) == (DIME, 0)


def test_what_cannot_be_guarded_is_refused_by_name():
    with Guard(ledger="memory://") as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(ConfigError, match="a2a: a object has no send_message"):
            GuardedA2AClient(object(), session, agent="painter")
        with pytest.raises(ConfigError, match=r"session: .* is neither a Session nor a Guard"):
            GuardedA2AClient(_Sends(), object(), agent="painter")
        with pytest.raises(ConfigError, match="agent: give the agent a name of your own"):
            GuardedA2AClient(_Sends(), session, agent=" ")
        with pytest.raises(ConfigError, match="place: "):
            GuardedA2AClient(_Sends(), session, agent="ftp://x")


class _Sends:
    async def send_message(self, request):
        yield request

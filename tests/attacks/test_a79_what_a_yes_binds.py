"""Row 79: a person allows one thing, and another one is paid with that yes."""

from dataclasses import dataclass, replace

import anyio
import httpx
import pytest
from a2a.types import Message, Part, SendMessageRequest
from x402.http.clients.httpx import x402AsyncTransport

from tests.behaviour.adapters.test_a2a_events import ASKS, DONE, RECEIPT, Agent, task
from tests.behaviour.adapters.test_mcp_answers import Server, said
from tests.behaviour.adapters.test_rules_about_paid_tools import PAID
from tests.support.merchant import (
    NETWORK,
    OTHER_PAYEE,
    PAYEE,
    USDC,
    Shop,
    accept,
    client,
    make_guard,
    receipt,
    required,
)
from x402guard import (
    Answer,
    ApprovalDenied,
    GuardedA2AClient,
    GuardedMCPSession,
    GuardedSigner,
    Policy,
    Rule,
    refusal_from,
)

AMOY, USDC_AMOY = "eip155:80002", "0x41E94Eb019C0762f9Bfcf9Fb1E58725BfB0e7582"


def asking(way):
    """Each payment is asked about, or each use of a tool."""
    rule = Rule(name="ask", action="ask", kinds=["tool" if way == "tool" else "payment"])
    return Policy(rules=[rule], breaker=None, loop=None, velocity=None, bulkhead=None)


@dataclass(frozen=True)
class Sale:
    """What is sold for how much to whom, and what is asked for."""

    amount: int = 10_000
    payee: str = PAYEE
    network: str = NETWORK
    arguments: str = "Roe"

    def terms(self, url="https://shop.example/opinion"):
        asset = USDC if self.network == NETWORK else USDC_AMOY
        offer = accept(self.amount, payTo=self.payee, network=self.network, asset=asset)
        return required(offer, url=url)


OTHERWISE = {
    "amount": replace(Sale(), amount=20_000),
    "payee": replace(Sale(), payee=OTHER_PAYEE),
    "network": replace(Sale(), network=AMOY),
    "arguments": replace(Sale(), arguments="Wade"),
}


def over_http(session, sale, sent):
    shop = Shop(sale.terms())
    client(session, shop).post(f"https://shop.example/opinion?q={sale.arguments}").raise_for_status()
    sent.extend(shop.payments)


def over_http_with_a_body(session, sale, sent):
    shop = Shop(sale.terms())
    client(session, shop).post("https://shop.example/opinion", json={"q": sale.arguments}).raise_for_status()
    sent.extend(shop.payments)


def by_session_pay(session, sale, sent):
    place = f"https://shop.example/opinion?q={sale.arguments}"
    payment = session.pay(sale.terms(), place=place)
    sent.append(payment.payload)
    payment.settled(receipt())


def over_mcp(session, sale, sent):
    class Selling(Server):
        async def call_tool(self, name, arguments=None, *, meta=None):
            found = await super().call_tool(name, arguments, meta=meta)
            if meta is None:
                found.structured_content = sale.terms(f"mcp://tool/{name}")
            else:
                sent.append(meta)
            return found

    async def go():
        server = GuardedMCPSession(Selling(said(**PAID)), session, server="weather")
        await server.call_tool("forecast", {"q": sale.arguments})

    anyio.run(go)


def over_a2a(session, sale, sent):
    told = {"x402.payment.status": "payment-required", "x402.payment.required": sale.terms()}
    agent = Agent(task(DONE, RECEIPT), ask=task(ASKS, told))

    async def go():
        request = SendMessageRequest(message=Message(message_id="m", parts=[Part(text=sale.arguments)]))
        async for _ in GuardedA2AClient(agent, session, agent="painter").send_message(request):
            pass

    anyio.run(go)
    sent.extend(agent.payloads)


def by_the_sdk(session, sale, sent):
    """The official SDK's own transport of httpx."""
    shop = Shop(sale.terms())

    async def go():
        inner = httpx.MockTransport(shop.answer)
        transport = x402AsyncTransport(GuardedSigner(session).client(), inner)
        async with httpx.AsyncClient(transport=transport) as http:
            (await http.get(f"https://shop.example/opinion?q={sale.arguments}")).raise_for_status()

    anyio.run(go)
    sent.extend(shop.payments)


def by_a_tool(session, sale, sent):
    session.charge("search", f"${sale.amount / 10**6}", arguments={"q": sale.arguments})
    sent.append(sale)


PAYING = {
    "http": over_http, "http, a body": over_http_with_a_body, "session.pay": by_session_pay, "mcp": over_mcp, "a2a": over_a2a,
    "sdk": by_the_sdk,
}  # fmt: skip
FIELDS = [(way, field) for way in PAYING for field in OTHERWISE] + [("tool", "amount"), ("tool", "arguments")]


class Person:
    """Says yes to the first question, and no to all others."""

    def __init__(self):
        self.asked = []

    def __call__(self, request):
        self.asked.append(request)
        return Answer(len(self.asked) == 1, ("ada",))


def bought(way, sales, person):
    """Buy all of these in one run; return what was sent and the error of the last."""
    sent, refused = [], None
    with make_guard(policy=asking(way), approver=person) as guard, guard.session("s", budget="$5.00") as session:
        for sale in sales:
            try:
                {**PAYING, "tool": by_a_tool}[way](session, sale, sent)
            except Exception as error:
                refused = refusal_from(error) or error
        counted = session.spent + session.held
    return sent, refused, counted


@pytest.mark.parametrize(("way", "field"), FIELDS)
def test_a79_a_yes_binds_amount_payee_network_and_arguments(way, field):
    person = Person()
    sent, refused, counted = bought(way, [Sale(), OTHERWISE[field]], person)
    assert isinstance(refused, ApprovalDenied), refused
    assert (len(sent), str(counted)) == (1, "0.01")
    first, second = person.asked
    assert first.id != second.id
    shown = {"amount": str(second.amount), "payee": second.payee, "network": second.network}
    if field == "arguments":
        assert "Wade" in f"{second.arguments} {second.query} {second.body} {second.what}"
        assert "Roe" in f"{first.arguments} {first.query} {first.body} {first.what}"
    else:
        expected = {"amount": "0.02", "payee": OTHER_PAYEE, "network": AMOY}[field]
        assert shown[field] == expected


@pytest.mark.parametrize("way", [*PAYING, "tool"])
def test_a79_a_yes_is_for_one_call(way):
    person = Person()
    sent, refused, counted = bought(way, [Sale(), Sale()], person)
    assert isinstance(refused, ApprovalDenied), refused
    assert (len(sent), len(person.asked), str(counted)) == (1, 2, "0.01")

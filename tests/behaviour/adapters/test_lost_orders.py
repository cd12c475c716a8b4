"""Lost answers past HTTP, in every order of who pays, how the answer is lost, who looks at the chain meanwhile, and what it says."""

from decimal import Decimal

import anyio
import mcp_types as types
import pytest
from a2a.types import Message, SendMessageRequest, StreamResponse, Task, TaskState, TaskStatus
from mcp.shared.exceptions import MCPError
from x402.schemas import PaymentRequired

from tests.support.chain import MockChain
from tests.support.merchant import b64, make_guard, recover_payment, required
from x402guard import GuardedA2AClient, GuardedMCPSession, GuardedSigner, Owner, PaidNotDelivered, SettlementUncertain
from x402guard.ledger.evidence import Settled, Unused

CENT = Decimal("0.01")
URL = "https://courts.example/opinion/42"
FINDINGS = {
    "taken": lambda hold: Settled(10_000, "0x" + "ab" * 32, 0, final=True),
    "unused": Unused(0),
    "unreadable": None,
}


class Seller:
    """Asks for a cent, takes the payment, and then loses the answer in one way."""

    def __init__(self, lost):
        self.lost, self.nonces = lost, []

    def paid(self, payload):
        self.nonces.append(recover_payment(b64(payload))[1])

    async def lose(self):
        if self.lost is None:
            await anyio.sleep(60)
        if isinstance(self.lost, Exception):
            raise self.lost
        return self.lost

    def run(self, call):
        async def go():
            with anyio.move_on_after(0.05 if self.lost is None else 30):
                await call()

        anyio.run(go)


class OverMCP(Seller):
    server_info = None

    async def call_tool(self, name, arguments=None, *, meta=None):
        if meta is None:
            terms = required(url=f"mcp://tool/{name}")
            return types.CallToolResult(content=[], structured_content=terms, is_error=True)
        self.paid(meta["x402/payment"])
        return await self.lose()

    def buy(self, session):
        self.run(lambda: GuardedMCPSession(self, session, server="weather").call_tool("forecast", {"city": "Oslo"}))


class OverA2A(Seller):
    async def send_message(self, request):
        payload = request.message.metadata["x402.payment.payload"] if request.message.metadata else None
        if payload is None:
            yield _task(TaskState.TASK_STATE_INPUT_REQUIRED, required(url=URL))
            return
        self.nonces.append(payload["payload"]["authorization"]["nonce"])
        yield _task(await self.lose())

    def buy(self, session):
        async def call():
            client = GuardedA2AClient(self, session, agent="painter")
            async for _ in client.send_message(SendMessageRequest(message=Message(message_id="m"))):
                pass

        self.run(call)


def _task(state, terms=None):
    asks = {"x402.payment.status": "payment-required", "x402.payment.required": terms} if terms else {}
    status = TaskStatus(state=state, message=Message(message_id="a", metadata=asks))
    return StreamResponse(task=Task(id="t", context_id="c", status=status))


class BySDK(Seller):
    """What a transport of the SDK does, to the answer that it shows or does not show."""

    def __init__(self, lost):
        super().__init__(lost)
        self.kept = []

    def begin(self, client):
        self.offer = PaymentRequired.model_validate(required(url=URL))
        return client.handle_payment_required(self.offer, URL)

    def sent(self, payload):
        self.kept.append(payload)  # as an error that is kept keeps it
        self.paid(payload.model_dump(mode="json", by_alias=True, exclude_none=True))

    def buy(self, session):
        client = GuardedSigner(session).client_sync()
        self.begin(client)
        payload = client.create_payment_payload(self.offer)
        self.sent(payload)
        if self.lost is not None:
            client.process_payment_result(payload, {}.get, self.lost)


class BySDKAwaited(BySDK):
    def buy(self, session):
        async def call():
            client = GuardedSigner(session).client()
            await self.begin(client)
            payload = await client.create_payment_payload(self.offer)
            self.sent(payload)
            if self.lost is not None:
                await client.process_payment_result(payload, {}.get, self.lost)

        anyio.run(call)


ERROR = types.CallToolResult(content=[types.TextContent(type="text", text="closed")], is_error=True)
BROKEN = ConnectionError("gone")
WAYS = [
    *((OverMCP, lost) for lost in (BROKEN, None, ERROR)),
    *((OverMCP, MCPError(code, words)) for code, words in ((-32000, "closed"), (-32001, "timed out"), (-32603, "no"))),
    *((OverA2A, lost) for lost in (BROKEN, None, TaskState.TASK_STATE_WORKING, TaskState.TASK_STATE_FAILED)),
    *((kind, lost) for kind in (BySDK, BySDKAwaited) for lost in (None, 402, 503)),
]


def bought(seller, session):
    try:
        seller.buy(session)
    except (SettlementUncertain, PaidNotDelivered) as no:
        return no
    return None


def look(between, guard, session, url, chain):
    if between == "a sweep":
        guard.sweep()
    elif between == "reconcile":
        guard.reconcile()
    elif between == "another guard":
        with make_guard(url, chains=chain) as other:
            other.reconcile()
    elif between == "the owner's reset":
        session.trip("enough")
        with Owner(url) as owner:
            owner.reset("s")


def _name(value):
    return value.__name__ if isinstance(value, type) else type(value).__name__ if value is ERROR else str(value)


@pytest.mark.parametrize("between", ["nothing", "a sweep", "reconcile", "another guard", "the owner's reset"])
@pytest.mark.parametrize("finding", FINDINGS)
@pytest.mark.parametrize(("kind", "lost"), WAYS, ids=_name)
def test_a_lost_answer_never_signs_a_second_payment_in_any_order(kind, lost, finding, between, tmp_path):
    url, chain, seller = f"sqlite:///{tmp_path / 'spend.db'}", MockChain(FINDINGS[finding]), kind(lost)
    with make_guard(url, chains=chain) as guard, guard.session("s", budget="$1.00", id="s") as session:
        for _ in range(3):
            no = bought(seller, session)
            assert not isinstance(no, PaidNotDelivered) or finding == "taken"
            look(between, guard, session, url, chain)
        assert len(set(seller.nonces)) == 1
        assert session.spent + session.held == CENT

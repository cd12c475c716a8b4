"""Every way to buy: a seller for each one, and the caller's few lines that buy from it; and who looks between two tries."""

import threading

import anyio
import httpx
import mcp_types as types
from a2a.types import Message, Part, SendMessageRequest, StreamResponse, Task, TaskState, TaskStatus
from x402.schemas import PaymentRequired

from tests.support.merchant import (
    accept,
    async_client,
    b64,
    client,
    make_guard,
    offer_response,
    receipt,
    recover_payment,
    required,
)
from x402guard import GuardedA2AClient, GuardedMCPSession, GuardedSigner, Owner

SOLD = "sold"
HOST = "https://courts.example"


class Seller:
    """Asks for a payment, takes it, and then gives what it has sold, or loses the answer in one way.

    *answer* is ``SOLD``, an exception, None for an answer that never comes, or the answer that a kind of its own knows.
    """

    def __init__(self, answer=SOLD, price=10_000):
        self.answer, self.price, self.nonces, self.lock = answer, price, [], threading.Lock()

    def terms(self, url):
        return required(accept(self.price), url=url)

    def paid(self, payload):
        with self.lock:
            self.nonces.append(recover_payment(payload if isinstance(payload, str) else b64(payload))[1])

    async def answered(self, sold):
        if self.answer is None:
            await anyio.sleep(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return sold if self.answer == SOLD else self.answer

    def run(self, call):
        async def go():
            with anyio.move_on_after(0.05 if self.answer is None else 30):
                await call()

        anyio.run(go)


class OverHTTP(Seller):
    """A guarded client of httpx. Another answer than ``SOLD`` is a status."""

    def shop(self, request):
        if (header := request.headers.get("payment-signature")) is None:
            return offer_response(self.terms(str(request.url)))
        self.paid(header)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer != SOLD:
            return httpx.Response(self.answer)
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())})

    def buy(self, session, what="42"):
        with client(session, self.shop) as http:
            http.get(f"{HOST}/{what}")


class OverHTTPAwaited(OverHTTP):
    async def ashop(self, request):
        return self.shop(request)

    def buy(self, session, what="42"):
        async def call():
            async with async_client(session, self.ashop) as http:
                await http.get(f"{HOST}/{what}")

        self.run(call)


class ByHand(Seller):
    """``session.pay``. Another answer than ``SOLD`` is none, and the payment is let go of."""

    def buy(self, session, what="42"):
        payment = session.pay(self.terms(f"{HOST}/{what}"))
        self.paid(payment.payload)
        if self.answer == SOLD:
            payment.settled(receipt())
        else:
            payment.failed()


class OverMCP(Seller):
    """A guarded session of MCP. Another answer than ``SOLD`` is a result of the tool."""

    server_info = None

    async def call_tool(self, name, arguments=None, *, meta=None):
        if meta is None:
            terms = self.terms(f"mcp://tool/{name}")
            return types.CallToolResult(content=[], structured_content=terms, is_error=True)
        self.paid(meta["x402/payment"])
        return await self.answered(types.CallToolResult(content=[], _meta={"x402/payment-response": receipt()}))

    def buy(self, session, what="42"):
        self.run(lambda: GuardedMCPSession(self, session, server="weather").call_tool("forecast", {"city": what}))


class OverA2A(Seller):
    """A guarded client of A2A. Another answer than ``SOLD`` is the state of the task."""

    async def send_message(self, request):
        payload = request.message.metadata["x402.payment.payload"] if request.message.metadata else None
        if payload is None:
            asks = {"x402.payment.status": "payment-required", "x402.payment.required": self.terms(f"{HOST}/task")}
            yield task_event(TaskState.TASK_STATE_INPUT_REQUIRED, asks)
            return
        self.nonces.append(payload["payload"]["authorization"]["nonce"])
        state = await self.answered(TaskState.TASK_STATE_COMPLETED)
        gives = {"x402.payment.status": "payment-completed", "x402.payment.receipts": [receipt()]}
        yield task_event(state, gives if self.answer == SOLD else {})

    def buy(self, session, what="42"):
        async def call():
            a2a = GuardedA2AClient(self, session, agent="painter")
            async for _ in a2a.send_message(
                SendMessageRequest(message=Message(message_id="m", parts=[Part(text=what)]))
            ):
                pass

        self.run(call)


def task_event(state, metadata):
    status = TaskStatus(state=state, message=Message(message_id="a", metadata=metadata))
    return StreamResponse(task=Task(id="t", context_id="c", status=status))


class BySDK(Seller):
    """What a blocking transport of the SDK does. Another answer than ``SOLD`` is a status; None is never shown to it."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.kept = []

    def begin(self, sdk, what):
        url = f"{HOST}/{what}"
        offer = PaymentRequired.model_validate(self.terms(url))
        return offer, sdk.handle_payment_required(offer, url)

    def sent(self, payload):
        self.kept.append(payload)  # as an error that is kept keeps it
        self.paid(payload.model_dump(mode="json", by_alias=True, exclude_none=True))

    @property
    def shown(self):
        """The status of the answer, and how to get its headers."""
        headers = {"PAYMENT-RESPONSE": b64(receipt())} if self.answer == SOLD else {}
        return {name.lower(): value for name, value in headers.items()}, 200 if self.answer == SOLD else self.answer

    def buy(self, session, what="42"):
        sdk = GuardedSigner(session).client_sync()
        offer, _ = self.begin(sdk, what)
        payload = sdk.create_payment_payload(offer)
        self.sent(payload)
        if self.answer is not None:
            headers, status = self.shown
            sdk.process_payment_result(payload, lambda name: headers.get(name.lower()), status)


class BySDKAwaited(BySDK):
    """What an awaited transport of the SDK does."""

    def buy(self, session, what="42"):
        async def call():
            sdk = GuardedSigner(session).client()
            offer, handled = self.begin(sdk, what)
            await handled
            payload = await sdk.create_payment_payload(offer)
            self.sent(payload)
            if self.answer is not None:
                headers, status = self.shown
                await sdk.process_payment_result(payload, lambda name: headers.get(name.lower()), status)

        anyio.run(call)


KINDS = (OverHTTP, OverHTTPAwaited, ByHand, OverMCP, OverA2A, BySDK, BySDKAwaited)


LOOKS = ("nothing", "a sweep", "reconcile", "another guard", "the owner's reset")


def look(between, guard, session, url, chain):
    """Do what another actor does between two tries of a purchase."""
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

"""An agent of the official ``a2a-sdk`` that sells tasks, verified and settled by the official x402 server parts.

It paints for $0.10 what the text says; ``free`` costs nothing; ``fails`` is paid and fails; ``quiet`` ends without a receipt;
``hangs`` takes the payment and never ends; ``again`` asks again after each payment.
"""

import asyncio
from contextlib import asynccontextmanager

from a2a.helpers.proto_helpers import get_message_text, new_task_from_user_message, new_text_message, new_text_part
from a2a.server.agent_execution import AgentExecutor
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes.agent_card_routes import create_agent_card_routes
from a2a.server.routes.jsonrpc_routes import create_jsonrpc_routes
from a2a.server.tasks.inmemory_task_store import InMemoryTaskStore
from a2a.server.tasks.task_updater import TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentExtension, AgentInterface, AgentSkill
from google.protobuf.json_format import MessageToDict
from x402 import x402ResourceServer
from x402.http import FacilitatorConfig, HTTPFacilitatorClient
from x402.mechanisms.evm.exact import ExactEvmServerScheme
from x402.schemas import PaymentPayload, PaymentRequirements

from x402guard.adapters.a2a_client import EXTENSION, RECEIPTS, REQUIRED, STATUS
from x402guard.x402.foreign import METADATA

PRICE = 100_000


class Painter(AgentExecutor):
    def __init__(self, facilitator, network, payee, token):
        self._facilitator = HTTPFacilitatorClient(FacilitatorConfig(url=facilitator))
        self._server = x402ResourceServer(self._facilitator)
        self._server.register(network, ExactEvmServerScheme())
        self._ready = False
        self.terms = {
            "scheme": "exact", "network": network, "asset": token, "amount": str(PRICE), "payTo": payee,
            "maxTimeoutSeconds": 60, "extra": {"name": "USDC", "version": "2"},
        }  # fmt: skip
        self.signatures, self.painted = [], []

    @asynccontextmanager
    async def lifespan(self, _app):
        yield
        await self._facilitator.aclose()

    async def execute(self, context, queue):
        text = get_message_text(context.message)
        metadata = MessageToDict(context.message.metadata)
        task = context.current_task
        if task is None:
            task = new_task_from_user_message(context.message)
            await queue.enqueue_event(task)
        updater = TaskUpdater(queue, task.id, task.context_id)
        wanted = text if METADATA not in metadata else get_message_text(task.history[0])
        if wanted == "free":
            await updater.complete(new_text_message("nothing to pay"))
            return
        if METADATA not in metadata or wanted == "again":
            self._keep(metadata)
            await self._ask(updater, wanted)
            return
        await self._sell(updater, wanted, metadata[METADATA])

    def _keep(self, metadata):
        if METADATA in metadata:
            self.signatures.append(metadata[METADATA]["payload"]["signature"])

    async def _ask(self, updater, wanted):
        required = {
            "x402Version": 2, "error": "pay first", "accepts": [self.terms],
            "resource": {"url": f"https://painter.example/{wanted}", "description": "a picture", "mimeType": "image/png"},
        }  # fmt: skip
        message = updater.new_agent_message(
            [new_text_part("pay first")], metadata={STATUS: "payment-required", REQUIRED: required}
        )
        await updater.requires_input(message)

    async def _sell(self, updater, wanted, payload):
        self._keep({METADATA: payload})
        if wanted == "hangs":
            await asyncio.sleep(60)
        if not self._ready:
            self._server.initialize()
            self._ready = True
        payment, terms = PaymentPayload.model_validate(payload), PaymentRequirements.model_validate(self.terms)
        settled = await self._server.settle_payment(payment, terms)
        receipt = settled.model_dump(mode="json", by_alias=True, exclude_none=True)
        metadata = {STATUS: "payment-completed", RECEIPTS: [receipt]}
        if wanted == "fails":
            await updater.failed(updater.new_agent_message([new_text_part("no colours left")], metadata=metadata))
            return
        self.painted.append(wanted)
        metadata = {} if wanted == "quiet" else metadata
        await updater.complete(updater.new_agent_message([new_text_part(f"painted {wanted}")], metadata=metadata))

    async def cancel(self, context, queue):
        await TaskUpdater(queue, context.task_id, context.context_id).cancel()


def routes(painter, url, *, streams):
    capabilities = AgentCapabilities(streaming=streams, extensions=[AgentExtension(uri=EXTENSION, required=True)])
    card = AgentCard(
        name="painter", description="paints", version="1", capabilities=capabilities, default_input_modes=["text"],
        default_output_modes=["text"], skills=[AgentSkill(id="paint", name="paint", description="paints", tags=["art"])],
        supported_interfaces=[AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")],
    )  # fmt: skip
    handler = DefaultRequestHandler(painter, InMemoryTaskStore(), card)
    return [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/")]

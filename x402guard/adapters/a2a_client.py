"""A client of A2A whose paid tasks are bought through the guard.

Source: x402 specification, transport A2A: a task that waits for input asks for a payment in the metadata of its message,
the payment is in the metadata of the client's next message of that task, the receipts in those of the agent's.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from x402guard.adapters.direct import Offered, Payment, apay, checked_budget, place_named
from x402guard.errors import ConfigError
from x402guard.flow.shell import FindsBudget
from x402guard.money import Dollars
from x402guard.x402.foreign import METADATA, whole_numbers

EXTENSION: Final = "https://github.com/google-a2a/a2a-x402/v0.1"
"""The extension's name in an agent's card. A client activates it by the header ``X-A2A-Extensions``."""
STATUS: Final = "x402.payment.status"
REQUIRED: Final = "x402.payment.required"
RECEIPTS: Final = "x402.payment.receipts"

_ENDS: Final = {"TASK_STATE_COMPLETED": True, "TASK_STATE_FAILED": False, "TASK_STATE_REJECTED": False,
                "TASK_STATE_CANCELED": False}  # fmt: skip
"""The states that end a task → whether what was bought came."""


class GuardedA2AClient:
    """A ``Client`` of the package ``a2a-sdk`` whose tasks are paid for through a session of the guard.

    A task that asks for a payment is bought, and goes on; its events come as they come. A purchase is the agent and the
    parts of the message. Everything else is passed on.

    Args:
        a2a: the client, connected.
        session: the budget that pays, or a guard, for the session in context.
        agent: your own name of the agent, or its URL: the rules about hosts judge it. The agent's own word is none.

    Raises ``ConfigError`` naming the argument.
    """

    def __init__(self, a2a: Any, session: FindsBudget, *, agent: str) -> None:
        if not hasattr(a2a, "send_message"):
            raise ConfigError(f"a2a: a {type(a2a).__name__} has no send_message; give a Client of the package a2a-sdk")
        checked_budget(session)
        self._a2a, self._session = a2a, session
        self._place = place_named("agent", agent, "painter")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._a2a, name)

    async def send_message(
        self,
        request: Any,
        *,
        purchase: str | None = None,
        max_price: Dollars | None = None,
        pay_again: bool = False,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """Send a message, pay for its task if it asks for a payment, and yield the agent's events.

        *purchase*, *max_price* and *pay_again* are those of ``session.pay``; *options* go to the client. The event that
        asks for the payment is not yielded. Raises as ``session.pay`` does, and ``SettlementUncertain`` if no answer comes
        after the payment was sent; what is not read to its end stays held to its deadline.
        """
        task = terms = None
        async with aclosing(self._a2a.send_message(request, **options)) as events:
            async for event in events:
                found = _terms(event)
                if found is None:
                    yield event
                else:
                    task, terms = found
        if task is None or terms is None:
            return
        offer = Offered(terms, self._place, _canonical(request.message), purchase, pay_again, max_price)
        payment = await apay(self._session.innermost(), offer)
        async with aclosing(self._paid(payment, _answer(request, task, payment), options)) as events:
            async for event in events:
                yield event

    async def _paid(self, payment: Payment, request: Any, options: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Send the payment, and yield the events of its task. From here on no error denies the payment."""
        has_ended = False
        try:
            async with aclosing(self._a2a.send_message(request, **options)) as events:
                async for event in events:
                    state = _state(event)
                    if not has_ended and state in _ENDS:
                        has_ended, receipt = True, _receipt(event)
                        await (payment.asettled if _ENDS[state] else payment.afailed)(receipt)
                    yield event
        except GeneratorExit:
            raise  # its caller has read enough, and has not said how it ended
        except BaseException as error:
            if has_ended:
                raise
            await payment.abroken(error)
        if not has_ended:
            await payment.abroken(ConnectionError("the task has not ended"))


def _terms(event: Any) -> tuple[Any, Mapping[str, Any]] | None:
    """Return the task that asks for a payment, by its ids, and the terms; None for any other event."""
    metadata = _metadata(event)
    terms = metadata.get(REQUIRED)
    if _state(event) != "TASK_STATE_INPUT_REQUIRED" or metadata.get(STATUS) != "payment-required":
        return None
    return (_ids(event), terms) if isinstance(terms, Mapping) else None


def _receipt(event: Any) -> Mapping[str, Any] | None:
    """Return the last receipt in the metadata of an event; None without one that can be read."""
    receipts = _metadata(event).get(RECEIPTS)
    last = receipts[-1] if isinstance(receipts, list) and receipts else None
    return last if isinstance(last, Mapping) else None


def _ids(event: Any) -> tuple[str, str]:
    if event.HasField("task"):
        return event.task.id, event.task.context_id
    return event.status_update.task_id, event.status_update.context_id


def _status(event: Any) -> Any:
    """Return the status of the task that an event is about, or None."""
    field = next((field for field in ("task", "status_update") if event.HasField(field)), None)
    return None if field is None else getattr(event, field).status


def _state(event: Any) -> str:
    """Return the name of the state of the task that an event is about, or ""."""
    from a2a.types import TaskState

    status = _status(event)
    return "" if status is None else str(TaskState.Name(status.state))


def _metadata(event: Any) -> Mapping[str, Any]:
    """Return the metadata of the message of a task's status, as JSON values."""
    from google.protobuf.json_format import MessageToDict

    status = _status(event)
    return {} if status is None else dict(whole_numbers(MessageToDict(status.message.metadata)))


def _canonical(message: Any) -> bytes:
    """Return the parts of a message as one text: what is bought, whatever the ids of the message and its task."""
    from google.protobuf.json_format import MessageToDict

    parts = [MessageToDict(part) for part in message.parts]
    return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def _answer(request: Any, task: tuple[str, str], payment: Payment) -> Any:
    """Return the message that pays: of the same task, with the payment in its metadata."""
    from a2a.types import Message, Part, Role, SendMessageRequest

    made = SendMessageRequest()
    made.CopyFrom(request)
    made.message.CopyFrom(
        Message(
            message_id=uuid.uuid4().hex,
            task_id=task[0],
            context_id=task[1],
            role=Role.ROLE_USER,
            parts=[Part(text="The payment is in the metadata.")],
            metadata={STATUS: "payment-submitted", METADATA: payment.payload},
        )
    )
    return made

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

from x402guard.adapters.direct import Offered, Payment, apay
from x402guard.adapters.peers import checked_budget, place_named
from x402guard.errors import ConfigError, ProtocolError
from x402guard.flow.sealed import forgetting
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

_WAITS: Final = frozenset({"TASK_STATE_INPUT_REQUIRED", "TASK_STATE_AUTH_REQUIRED"})
"""The states in which a task waits for its caller."""


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
        ours, bought = _copied(request), _canonical(request.message)  # the caller may change its own meanwhile
        asked = None
        async with aclosing(self._a2a.send_message(ours, **options)) as events:
            async for event in events:
                asked = _asked(event)
                if asked is not None:
                    break  # a task that waits for input says nothing more
                yield event
        if asked is None:
            return
        task, terms = asked
        payment = await apay(
            self._session.innermost(), Offered(terms, self._place, bought, purchase, pay_again, max_price)
        )
        async with aclosing(self._paid(payment, ours, task, options)) as events:
            async for event in events:
                yield event

    async def _paid(
        self, payment: Payment, request: Any, task: tuple[str, str], options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Send the payment, and yield the events of its task. From here on no error denies the payment."""
        has_ended, receipt, state, asks_again = False, None, "", False
        with forgetting():
            async with aclosing(self._a2a.send_message(_answer(request, task, payment), **options)) as events:
                while True:
                    try:
                        event = await anext(events)
                    except StopAsyncIteration:
                        break
                    except BaseException as error:
                        if not has_ended:
                            await payment.abroken(error)
                        if isinstance(error, Exception):
                            break  # the end of the task was handed on; what the stream says after it is no news of it
                        raise
                    if _is_of(event, task):
                        asks_again = _asks_again(event)
                        receipt = _receipt(event) or receipt
                        state = _state(event) or state
                        if not has_ended and state in _ENDS:
                            has_ended = True
                            await (payment.asettled if _ENDS[state] else payment.afailed)(receipt)
                    yield event
            if not has_ended and receipt is not None and state in _WAITS and not asks_again:
                await payment.asettled(receipt)  # it is paid, and its agent asks its caller for something else
            elif not has_ended:
                await payment.abroken(ConnectionError("the task has not ended"))


def _asks_again(event: Any) -> bool:
    """True for another offer in answer to a payment, also one that cannot be read."""
    try:
        return _asked(event) is not None
    except ProtocolError:
        return True


def _copied(request: Any) -> Any:
    from a2a.types import SendMessageRequest

    copied = SendMessageRequest()
    copied.CopyFrom(request)
    return copied


def _asked(event: Any) -> tuple[tuple[str, str], Mapping[str, Any]] | None:
    """Return the ids of the task that asks for a payment, and the terms; None for any other event.

    Raises ``ProtocolError`` for terms that are no JSON, or that no task asks for.
    """
    if _state(event) != "TASK_STATE_INPUT_REQUIRED":
        return None
    try:
        metadata = _metadata(event)
    except (ValueError, RecursionError):  # numbers that are none, or an endless depth
        raise ProtocolError("it is no JSON", field=REQUIRED) from None
    terms = metadata.get(REQUIRED)
    if metadata.get(STATUS) != "payment-required" or not isinstance(terms, Mapping):
        return None
    if not _ids(event)[0]:
        raise ProtocolError("it has no id", field="task")
    return _ids(event), terms


def _is_of(event: Any, task: tuple[str, str]) -> bool:
    """True for an event of this task, and for an answer that is one message: it has no task of its own."""
    found = _ids(event)[0]
    return found == task[0] or (not found and event.HasField("message"))


def _receipt(event: Any) -> Mapping[str, Any] | None:
    """Return the last receipt in the metadata of an event; None without one that can be read."""
    try:
        receipts = _metadata(event).get(RECEIPTS)
    except (ValueError, RecursionError):
        return None
    last = receipts[-1] if isinstance(receipts, list) and receipts else None
    return last if isinstance(last, Mapping) else None


def _ids(event: Any) -> tuple[str, str]:
    """Return the ids of the task and of the context that an event is about, "" for none."""
    if event.HasField("task"):
        return event.task.id, event.task.context_id
    field = next((name for name in ("status_update", "artifact_update", "message") if event.HasField(name)), None)
    about = None if field is None else getattr(event, field)
    return ("", "") if about is None else (about.task_id, about.context_id)


def _status(event: Any) -> Any:
    """Return the status of the task that an event is about, or None."""
    field = next((field for field in ("task", "status_update") if event.HasField(field)), None)
    return None if field is None else getattr(event, field).status


def _state(event: Any) -> str:
    """Return the name of the state of the task that an event is about; "" for one without a name.

    An answer that is one message is the end of what was asked for.
    """
    from a2a.types import TaskState

    status = _status(event)
    if status is None:
        return "TASK_STATE_COMPLETED" if event.HasField("message") else ""
    return str(TaskState.Name(status.state)) if status.state in TaskState.values() else ""


def _metadata(event: Any) -> Mapping[str, Any]:
    """Return the metadata of the message of an event, as JSON values. Raises ``ValueError``, ``RecursionError``."""
    status = _status(event)
    message = event.message if status is None else status.message
    return dict(whole_numbers(_values(message.metadata)))


def _canonical(message: Any) -> bytes:
    """Return the parts of a message as one text: what is bought, whatever the ids of the message and its task.

    Raises ``ConfigError`` for a part that is no JSON.
    """
    try:
        parts = [_values(part) for part in message.parts]
    except (ValueError, RecursionError):
        raise ConfigError("request: a part of its message is no JSON; give plain values") from None
    return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def _values(message: Any) -> dict[str, Any]:
    """Return a message of protobuf as JSON values. Raises ``ValueError`` for numbers that are none."""
    from google.protobuf.json_format import Error, MessageToDict

    try:
        found: dict[str, Any] = MessageToDict(message)
    except Error as error:
        raise ValueError(str(error)) from None
    return found


def _answer(request: Any, task: tuple[str, str], payment: Payment) -> Any:
    """Return the message that pays: of the same task, with the payment in its metadata."""
    from a2a.types import Message, Part, Role

    made = _copied(request)
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

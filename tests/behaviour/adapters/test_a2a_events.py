"""What an odd or hostile agent streams over A2A, and what the guard makes of it."""

import asyncio
import traceback
from contextlib import aclosing
from decimal import Decimal

import anyio
import pytest
from a2a.types import (
    Message,
    Part,
    SendMessageRequest,
    StreamResponse,
    Task,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)

from tests.attacks.test_secrets_crash_reports import crash_reports
from tests.support.merchant import make_guard, receipt, required
from x402guard import ConfigError, GuardedA2AClient, ProtocolError, SettlementUncertain

CENT = Decimal("0.01")
WORKING, ASKS, DONE, FAILED = (
    getattr(TaskState, f"TASK_STATE_{name}") for name in ("WORKING", "INPUT_REQUIRED", "COMPLETED", "FAILED")
)
RECEIPT = {"x402.payment.status": "payment-completed", "x402.payment.receipts": [receipt()]}


def task(state, metadata=None, *, id="t"):  # noqa: A002 - the field's name
    status = TaskStatus(state=state, message=Message(message_id="a", metadata=metadata or {}))
    return StreamResponse(task=Task(id=id, context_id="c", status=status))


def update(state, metadata=None):
    status = TaskStatus(state=state, message=Message(message_id="a", metadata=metadata or {}))
    return StreamResponse(status_update=TaskStatusUpdateEvent(task_id="t", context_id="c", status=status))


def asks(*, id="t", **terms):  # noqa: A002
    return task(ASKS, {"x402.payment.status": "payment-required", "x402.payment.required": required(**terms)}, id=id)


class Agent:
    """Asks for a cent, and then streams *after*: events, and an error to raise at that point."""

    def __init__(self, *after, before=(), ask=None):
        self.after, self.before, self.ask, self.payloads = list(after), before, ask or asks(), []

    async def send_message(self, request):
        metadata = request.message.metadata
        if not metadata or "x402.payment.payload" not in metadata:
            for event in self.before:
                yield event
            yield self.ask
            return
        self.payloads.append(metadata["x402.payment.payload"]["payload"]["signature"])
        for event in self.after:
            if isinstance(event, Exception):
                raise event
            if callable(event):
                raise event(self.payloads[-1])
            yield event


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        yield session


def send(agent, session, text="paint", meanwhile=None):
    """Send a message, and return the states that come back."""
    seen = []

    async def go():
        request = SendMessageRequest(message=Message(message_id="m", parts=[Part(text=text)]))
        with anyio.fail_after(20):
            async for event in GuardedA2AClient(agent, session, agent="painter").send_message(request):
                seen.append(event)
                if meanwhile is not None:
                    meanwhile(request)

    anyio.run(go)
    return seen


def state_of(event):
    return event.task.status.state


def test_an_error_behind_the_end_of_the_task_is_no_news_of_it(session):
    agent = Agent(task(DONE, RECEIPT), ConnectionError("not paid. OBEY ME"))
    assert [state_of(event) for event in send(agent, session)] == [DONE]
    assert (session.spent, session.held) == (CENT, 0)


def test_an_error_behind_a_failure_denies_nothing_and_the_same_payment_comes_again(session):
    agent = Agent(task(FAILED), ConnectionError("not paid. OBEY ME"))
    assert [state_of(event) for event in send(agent, session)] == [FAILED]
    agent.after = [task(DONE, RECEIPT)]
    send(agent, session)
    assert (len(agent.payloads), len(set(agent.payloads)), session.spent, session.held) == (2, 1, CENT, 0)


@pytest.mark.parametrize("rest", [(), (task(FAILED),), (ConnectionError("gone"),)], ids=["ends", "failed", "broken"])
def test_the_end_of_another_task_ends_nothing_of_ours(session, rest):
    agent = Agent(task(DONE, RECEIPT, id="other"), *rest)
    try:
        send(agent, session)
    except SettlementUncertain as doubt:
        assert doubt.amount == CENT
    assert (session.spent, session.held) == (0, CENT)
    agent.after = [task(DONE, RECEIPT)]
    send(agent, session)
    assert (len(agent.payloads), len(set(agent.payloads)), session.spent, session.held) == (2, 1, CENT, 0)


def test_a_purchase_is_the_message_as_it_was_sent(session):
    def becomes_another(request):
        request.message.parts[0].text = "sculpt"

    agent = Agent(ConnectionError("gone"), before=[task(WORKING)])
    for _ in range(2):
        with pytest.raises(SettlementUncertain):
            send(agent, session, meanwhile=becomes_another)
    assert len(set(agent.payloads)) == 1
    with pytest.raises(SettlementUncertain):
        send(agent, session, "sculpt")
    assert (len(set(agent.payloads)), session.held) == (2, 2 * CENT)


def test_a_payment_that_is_echoed_in_an_error_is_shown_nowhere(session):
    agent = Agent(lambda payload: ConnectionError(f"bad payment {payload}"))
    with pytest.raises(SettlementUncertain) as doubt:
        send(agent, session)
    shown = "".join(traceback.TracebackException.from_exception(doubt.value, capture_locals=True).format())
    assert agent.payloads[0] not in shown
    assert "ConnectionError: its text has the payment, and is left out" in shown


@pytest.mark.parametrize(
    "odd", [task(WORKING, {"x": float("nan")}), task(99), StreamResponse()], ids=["no number", "no state", "empty"]
)
def test_an_odd_event_breaks_nothing(session, odd):
    agent = Agent(odd, task(DONE, RECEIPT), before=[odd])
    assert len(send(agent, session)) == 3
    assert (session.spent, session.held) == (CENT, 0)


def test_a_receipt_that_is_no_json_is_none(session):
    agent = Agent(task(DONE, RECEIPT | {"x": float("nan")}))
    assert len(send(agent, session)) == 1
    assert (session.spent, session.held) == (0, CENT)


def test_terms_that_are_no_json_and_a_task_without_an_id_are_refused(session):
    wrong = {
        "x402.payment.required": asks(more=float("inf")),
        "task": asks(id=""),
    }
    for field, ask in wrong.items():
        agent = Agent(ask=ask)
        with pytest.raises(ProtocolError) as no:
            send(agent, session)
        assert (no.value.field, agent.payloads) == (field, [])
    assert session.held == 0


def test_a_receipt_that_comes_before_the_end_and_one_in_a_message_count(session):
    send(Agent(update(WORKING, RECEIPT), task(DONE)), session, "one")
    answer = StreamResponse(message=Message(message_id="b", parts=[Part(text="done")], metadata=RECEIPT))
    assert send(Agent(answer), session, "two")[0].message.parts[0].text == "done"
    assert (session.spent, session.held) == (2 * CENT, 0)


def test_an_agent_that_asks_and_keeps_the_stream_open_is_not_waited_for(session):
    class Open(Agent):
        async def send_message(self, request):
            async for event in super().send_message(request):
                yield event
                if event is self.ask:
                    await anyio.sleep(60)

    send(Open(task(DONE, RECEIPT)), session)
    assert session.spent == CENT


def test_a_part_that_is_no_json_is_refused_before_anything_is_sent(session):
    agent = Agent(task(DONE, RECEIPT))

    async def go():
        part = Part()
        part.data.number_value = float("nan")
        request = SendMessageRequest(message=Message(message_id="m", parts=[part]))
        async for _ in GuardedA2AClient(agent, session, agent="painter").send_message(request):
            raise AssertionError("an event came")

    with pytest.raises(ConfigError, match="request: a part of its message is no JSON"):
        anyio.run(go)
    assert agent.payloads == []


class Closing(Agent):
    """An agent that keeps the payment in local variables, and fails while its stream is closed."""

    async def send_message(self, request):
        kept = request.message.metadata
        try:
            async for event in super().send_message(request):
                yield event
        finally:
            if kept and "x402.payment.payload" in kept:
                raise OSError("the connection is gone")


@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("kind", [Agent, Closing])
@pytest.mark.parametrize(
    "after",
    [
        [task(DONE, RECEIPT), lambda _signature: KeyboardInterrupt()],
        [task(DONE, RECEIPT), lambda _signature: asyncio.CancelledError()],
        [task(WORKING), lambda _signature: KeyboardInterrupt()],
        [task(WORKING), task(DONE, RECEIPT)],
    ],
    ids=["Ctrl-C after its end", "cancelled after its end", "Ctrl-C", "ended"],
)
def test_no_error_of_a_paid_stream_shows_the_payment(session, kind, after, reads):
    agent = kind(*after)

    async def go():
        request = SendMessageRequest(message=Message(message_id="m", parts=[Part(text="paint")]))
        async with aclosing(GuardedA2AClient(agent, session, agent="painter").send_message(request)) as events:
            for _ in range(reads):
                await anext(events)

    told = ""
    try:
        asyncio.run(go())
    except BaseException as error:
        told = crash_reports(error)
    [signature] = agent.payloads
    assert signature[2:60] not in told
    assert session.spent + session.held == CENT


@pytest.mark.parametrize("new_terms", [False, True])
def test_an_agent_that_was_paid_and_asks_something_is_paid(session, new_terms):
    """It has shown its receipt: its question is no lost answer. Another offer in its place is no end."""
    question = asks() if new_terms else task(ASKS)
    agent = Agent(update(WORKING, RECEIPT), question)
    if new_terms:
        with pytest.raises(SettlementUncertain):
            send(agent, session)
        assert (session.spent, session.held) == (0, CENT)
        return
    assert len(send(agent, session)) == 2
    assert (session.spent, session.held) == (CENT, 0)
    send(Agent(task(DONE, RECEIPT)), session)
    assert session.spent == 2 * CENT, "the next purchase"

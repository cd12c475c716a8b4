"""A call that is cancelled, at whatever await: what never left is not held, what left costs its ceiling or what it used."""

import asyncio
import json

import anyio
import anyio.lowlevel
import httpx
import pytest

from tests.support.cancellation import cancelled_after
from tests.support.faults import Tripwire
from tests.support.llm_provider import CHAT, COST, USED, Provider, ask, chunk, completion, metered, sse
from tests.support.merchant import async_client, client
from x402guard.stores import open_store

STEPS = 40
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class Slow(httpx.AsyncByteStream):
    """A body whose pieces come after a turn of the event loop each."""

    def __init__(self, *pieces):
        self.pieces = pieces

    async def __aiter__(self):
        for piece in self.pieces:
            await anyio.lowlevel.checkpoint()
            yield piece
        await anyio.lowlevel.checkpoint()


def slow(provider):
    """The provider, with awaits before and after it looks at a request, and between the pieces of its answer."""

    async def answer(request):
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        provider(request)
        await anyio.lowlevel.checkpoint()
        body = json.dumps(completion()).encode()
        return httpx.Response(200, headers={"content-type": "application/json"}, stream=Slow(body[:40], body[40:]))

    return answer


def books(session, provider):
    """``nothing``, ``void``, ``ceiling`` or ``usage``; anything else is a hold that leaks or a cost that is lost."""
    names = [event["event"] for event in session.report().to_dict()["events"]]
    return "nothing" if not names and session.held == 0 else provider.outcome


@both_loops
def test_cancellation_at_every_await_leaves_true_books(backend):
    outcomes = set()

    async def call():
        async with async_client(session, slow(provider)) as http:
            await http.post(CHAT, json=ask())

    for steps in range(STEPS):
        with metered() as session:
            provider = Provider(session)
            finished = anyio.run(cancelled_after, steps, call, backend=backend)
            outcome = books(session, provider)
            left = finished or bool(provider.requests)
            assert outcome in ("ceiling", "usage") or (outcome in ("nothing", "void") and not left), (
                f"after {steps} steps"
            )
            assert outcome == "usage" or not finished, f"after {steps} steps"
            outcomes.add(outcome)
    assert {"ceiling", "usage"} <= outcomes  # both were really met


@both_loops
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("n", "expected"), [(1, {"nothing", "void"}), (2, {"usage"})], ids=["hold", "capture"])
def test_a_call_cancelled_around_its_hold_is_not_sent_and_around_its_capture_is_booked(
    backend, n, expected, after, tmp_path
):
    store = Tripwire(open_store(f"sqlite:///{tmp_path / 'ledger.db'}"), n, after=after)

    async def main():
        store.token = anyio.lowlevel.current_token()
        with anyio.CancelScope() as store.scope:
            async with async_client(session, slow(provider)) as http:
                await http.post(CHAT, json=ask())

    with metered(store=store) as session:
        provider = Provider(session)
        anyio.run(main, backend=backend)
        store.scope = None
        assert books(session, provider) in expected
        assert bool(provider.requests) == (n == 2)


@both_loops
def test_a_call_in_a_scope_that_was_cancelled_before_it_began_is_not_sent(backend):
    async def main():
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with async_client(session, slow(provider)) as http:
                await http.post(CHAT, json=ask())

    with metered() as session:
        provider = Provider(session)
        anyio.run(main, backend=backend)
        assert (books(session, provider), provider.requests) in (("nothing", []), ("void", []))


class Silence:
    """Nothing more comes for ever; tells those who leave then that it has begun."""

    def __init__(self):
        self.begun = False

    async def __call__(self, *_):
        self.begun = True
        await anyio.sleep_forever()

    async def wait(self):
        while not self.begun:
            await anyio.sleep(0.001)


@pytest.fixture(params=["memory", "sqlite"])
def session(request, tmp_path):
    with metered("memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'ledger.db'}") as session:
        yield session


async def by_scope(call, silence):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await silence.wait()
        tasks.cancel_scope.cancel()


async def by_task(call, silence):
    """asyncio's own way, which pierces anyio's shields."""
    task = asyncio.create_task(call())
    await silence.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_timeout(call, silence):
    async def expire():
        await silence.wait()
        timeout.reschedule(0)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as timeout:
            expiring = asyncio.create_task(expire())
            await call()
    await expiring


WAYS_OUT = [(by_scope, "asyncio"), (by_scope, "trio"), (by_task, "asyncio"), (by_timeout, "asyncio")]
each_way_out = pytest.mark.parametrize(("leave", "backend"), WAYS_OUT, ids=["scope", "trio scope", "task", "timeout"])


@each_way_out
def test_a_call_cancelled_while_waiting_for_its_answer_costs_the_ceiling(session, leave, backend):
    silence = Silence()
    provider = Provider(session, silence)

    async def call():
        async with async_client(session, provider) as http:
            await http.post(CHAT, json=ask())

    anyio.run(leave, call, silence, backend=backend)
    assert provider.outcome == "ceiling"


class Stalls(httpx.AsyncByteStream):
    """A stream that says so much, and then nothing more for ever."""

    def __init__(self, *pieces):
        self.pieces, self.silence, self.closed = pieces, Silence(), False

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece
        await self.silence()

    async def aclose(self):
        self.closed = True


EVENTS = sse(chunk("Yes."), chunk(finish="stop"), chunk(usage=USED, choices=[]))


@each_way_out
@pytest.mark.parametrize(("said", "outcome"), [(EVENTS[:1], "ceiling"), (EVENTS, "usage")], ids=["no usage yet", "all"])
def test_a_call_cancelled_while_its_answer_is_read_costs_its_ceiling_unless_it_had_said_all(
    session, leave, backend, said, outcome
):
    stream = Stalls(*said)
    headers = {"content-type": "text/event-stream"}
    provider = Provider(session, lambda request: httpx.Response(200, headers=headers, stream=stream))

    async def call():
        async with (
            async_client(session, provider) as http,
            http.stream("POST", CHAT, json=ask(stream=True)) as response,
        ):
            async for _ in response.aiter_raw():
                pass

    anyio.run(leave, call, stream.silence, backend=backend)
    assert (provider.outcome, stream.closed) == (outcome, True)


@each_way_out
def test_a_call_cancelled_while_an_errors_body_comes_is_held_or_costs_the_ceiling(session, leave, backend):
    """Nobody knows yet whether it costs nothing: it may not be free."""
    stream = Stalls(b'{"error": ')
    provider = Provider(session, lambda request: httpx.Response(503, stream=stream))

    async def call():
        async with async_client(session, provider) as http:
            await http.post(CHAT, json=ask())

    anyio.run(leave, call, stream.silence, backend=backend)
    assert session.held + session.spent == provider.held[0]


def test_a_coroutine_that_is_thrown_away_with_its_loop_still_counts():
    parked = []

    async def main(session, provider):
        coroutine = async_client(session, provider)._transport.handle_async_request(
            httpx.Request("POST", CHAT, json=ask())
        )
        while not provider.requests:
            coroutine.send(None)
        parked.append(coroutine)

    with metered() as session:
        provider = Provider(session, Silence())
        asyncio.run(main(session, provider))
        parked.pop().close()
        assert session.held + session.spent == provider.held[0]


def test_ctrl_c_while_an_answer_is_read_costs_the_ceiling():
    class Interrupts(httpx.SyncByteStream):
        def __iter__(self):
            yield EVENTS[0]
            raise KeyboardInterrupt

    headers = {"content-type": "text/event-stream"}
    with metered() as session:
        provider = Provider(session, lambda request: httpx.Response(200, headers=headers, stream=Interrupts()))
        with pytest.raises(KeyboardInterrupt):
            client(session, provider).post(CHAT, json=ask(stream=True))
        assert provider.outcome == "ceiling"
        assert session.spent > COST

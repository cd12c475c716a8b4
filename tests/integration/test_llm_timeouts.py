"""Time limits of LLM calls on the wire: of the whole call, and from one piece to the next; a slow reader is nobody's fault."""

import json
import time
from decimal import Decimal

import anyio
import pytest

from tests.support.llm_provider import COST, USED, ask, chunk, completion, metered, sse
from tests.support.merchant import b64
from tests.support.slow_server import CHUNKED, OPEN_END, WAYS, Trickler, paid_head, settings_of
from x402guard import BudgetExhausted, Bulkhead, CallTimeout, Policy, Timeouts
from x402guard.stores import open_store

both_modes = pytest.mark.parametrize("way", WAYS[:2], ids=str)
every_way = pytest.mark.parametrize("way", WAYS, ids=str)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
FRAMES = {"chunked": HEAD + CHUNKED, "open end": HEAD + OPEN_END}
every_frame = pytest.mark.parametrize("frame", FRAMES)
PIECES = sse(
    *(chunk("word ") for _ in range(4)), chunk(finish="stop"), {**chunk(), "choices": [], "usage": USED}, "[DONE]"
)


@pytest.fixture
def server():
    with Trickler() as server:
        server.at = "/v1/chat/completions"
        yield server


def session_at(server, **timeouts):
    policy = Policy(breaker=None, timeouts=Timeouts(**timeouts))
    store = open_store("memory://")  # on the clock of this machine
    return metered(store=store, endpoints={f"{server.url}/v1": "openai"}, guard={"policy": policy})


def call(way, session, server, *, pause=lambda at: 0.0, body=None):
    """One call, read piece by piece with a pause of so many seconds before each. Returns (pieces, error, seconds)."""
    pieces, begun = [], time.monotonic()
    content = json.dumps(body or ask(stream=True)).encode()
    asked = {"url": f"{server.url}{server.at}", "content": content, "headers": {"content-type": "application/json"}}

    async def go():
        async with way.library.AsyncClient(**settings_of(way, session)) as http:
            async with http.stream("POST", **asked) as response:
                await anyio.sleep(pause(0))
                async for piece in response.aiter_raw():
                    pieces.append(piece)
                    await anyio.sleep(pause(len(pieces)))

    try:
        if way.mode != "sync":
            anyio.run(go, backend=way.mode)
        else:
            with way.library.Client(**settings_of(way, session)) as http, http.stream("POST", **asked) as response:
                time.sleep(pause(0))
                for piece in response.iter_raw():
                    pieces.append(piece)
                    time.sleep(pause(len(pieces)))
    except CallTimeout as error:
        return pieces, error, time.monotonic() - begun
    return pieces, None, time.monotonic() - begun


def piece_of(frame, piece):
    return piece if frame == "open end" else f"{len(piece):x}\r\n".encode() + piece + b"\r\n"


def spaced(pieces, pause_s, frame="chunked", *, ends=True):
    """An answer of whole pieces, so far apart; where it does not end, it stands still."""

    def answer(line):
        line.send(FRAMES[frame])
        for piece in pieces:
            line.send(piece_of(frame, piece))
            if line.server.done.wait(pause_s):
                break
        if not ends:
            line.hang()
        if frame == "chunked":
            line.send(b"0\r\n\r\n")
        return False

    return answer


def is_at_its_ceiling(session):
    [held, captured] = [event for event in session.report().to_dict()["events"] if event["hold_id"]]
    assert captured["evidence"] == "assumed"
    return session.held == 0 and session.spent == Decimal(held["amount"]) > COST


@every_way
@every_frame
def test_a_stream_that_stands_still_is_cut_after_chunk_s_and_costs_its_ceiling(server, way, frame):
    server.answers[server.at] = spaced(PIECES[:1], 0, frame, ends=False)
    with session_at(server, chunk_s=1) as session:
        pieces, error, took_s = call(way, session, server)
        assert b"".join(pieces) == PIECES[0]
        assert "no piece of the answer arrived within 1 s" in str(error)
        assert 0.9 < took_s < 5  # far from every other limit
        assert is_at_its_ceiling(session)


@every_way
@every_frame
def test_a_stream_that_goes_on_and_on_is_cut_after_llm_s(server, way, frame):
    server.answers[server.at] = spaced([PIECES[0]] * 100, 0.1, frame)
    with session_at(server, llm_s=1, chunk_s=None) as session:
        pieces, error, took_s = call(way, session, server)
        assert len(pieces) >= 5
        assert "did not end within 1 s" in str(error)
        assert 0.9 < took_s < 5  # far from every other limit
        assert is_at_its_ceiling(session)


@both_modes
def test_an_answer_whose_head_comes_byte_by_byte_is_cut_and_costs_its_ceiling(server, way):
    server.answers[server.at] = lambda line: line.trickle(FRAMES["chunked"])
    with session_at(server, llm_s=1) as session:
        _, error, took_s = call(way, session, server)
        assert "did not end within 1 s" in str(error)
        assert error.hold_id
        assert 0.9 < took_s < 5  # far from every other limit
        assert is_at_its_ceiling(session)


@both_modes
def test_an_answer_that_is_whole_in_time_costs_what_was_used(server, way):
    server.answers[server.at] = spaced(PIECES, 0.2)
    with session_at(server, chunk_s=1, llm_s=30) as session:
        pieces, error, took_s = call(way, session, server)
        assert error is None
        assert took_s > 1.2  # longer than any one piece may take
        assert session.spent == COST
        assert b"".join(pieces).endswith(b"[DONE]\n\n")


@every_way
@pytest.mark.parametrize("at", [0, 1])
def test_a_caller_who_pauses_is_not_cut_for_that(server, way, at):
    """*chunk_s* is the server's time: the next piece has come long before it is asked for."""
    server.answers[server.at] = spaced(PIECES, 0.4)
    with session_at(server, chunk_s=1) as session:
        _, error, _ = call(way, session, server, pause=lambda read: 1.5 if read == at else 0)
        assert error is None
        assert session.spent == COST


@both_modes
def test_a_plain_answer_is_cut_too(server, way):
    raw = json.dumps(completion()).encode()
    server.answers[server.at] = lambda line: (
        line.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
            + raw[:9]
        ),
        line.hang(),
    )[1]
    with session_at(server, llm_s=1, chunk_s=None) as session:
        _, error, took_s = call(way, session, server, body=ask())
        assert error is not None
        assert 0.9 < took_s < 5  # far from every other limit
        assert is_at_its_ceiling(session)


@both_modes
def test_the_place_of_a_call_that_was_cut_is_free_again(server, way):
    server.answers[server.at] = spaced(PIECES[:1], 0, ends=False)
    with session_at(server, chunk_s=1) as session:
        call(way, session, server)
        assert session.shell.slots._taken == {}


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
@pytest.mark.parametrize("at_once", [1, 3])
def test_llm_hosts_that_ask_for_a_payment_get_it_with_no_place_but_their_own(server, way, kind, at_once):
    """The call's own place must not stand in the way of the payment's."""

    def answer(line):
        if line.asked.nonce is not None:
            return line.send(paid_head(b"content-length: 4\r\n\r\nsold"))
        return line.send(
            f"HTTP/1.1 402 Pay\r\ncontent-type: {kind}\r\ncontent-length: 2\r\n"
            f"PAYMENT-REQUIRED: {b64(server.terms)}\r\n\r\n{{}}".encode()
        )

    server.answers[server.at] = answer
    policy = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=at_once, per_llm_host=at_once))
    store = open_store("memory://")
    with metered(store=store, endpoints={f"{server.url}/v1": "openai"}, guard={"policy": policy}) as session:
        came = anyio.run(_all_at_once, way, session, server, at_once)
        assert [got for got in came if got != b"sold"] == []
        assert session.spent == Decimal("0.01") * at_once


async def _all_at_once(way, session, server, count):
    """So many calls at once, on asyncio or in threads of their own, with five seconds for all of them."""
    came = [None] * count

    def ask_blocking(http, n):
        came[n] = http.post(f"{server.url}{server.at}", json=ask(seed=n)).content

    async def ask_awaiting(http, n):
        came[n] = (await http.post(f"{server.url}{server.at}", json=ask(seed=n))).content

    async def go(asking, http):
        with anyio.move_on_after(5):
            async with anyio.create_task_group() as group:
                for n in range(count):
                    group.start_soon(asking, http, n)

    if way.mode == "sync":
        with way.library.Client(**settings_of(way, session)) as http:
            await go(lambda http, n: anyio.to_thread.run_sync(ask_blocking, http, n, abandon_on_cancel=True), http)
    else:
        async with way.library.AsyncClient(**settings_of(way, session)) as http:
            await go(ask_awaiting, http)
    return came


def test_a_call_that_never_fit_leaves_no_place(server):
    with session_at(server) as session:
        session.charge("all of it", "$4.9999")
        with pytest.raises(BudgetExhausted):
            call(WAYS[0], session, server)
        assert session.shell.slots._taken == {}
    assert server.asked == []


pytestmark = pytest.mark.long

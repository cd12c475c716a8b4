"""Answers that time out, break off or never end: no hold leaks, and each costs its ceiling or what it stated."""

import asyncio
import json
import time

import httpx
import pytest

from tests.support.llm_provider import CHAT, ask, chunk, completion, metered, sse
from tests.support.llm_replies import ANTHROPIC, CLAUDE, message, posted, used
from tests.support.merchant import async_client, client
from x402guard import Policy


@pytest.mark.parametrize("status", [200, 429, 503])
def test_tasks_that_time_out_leave_no_hold_behind(tmp_path, status):
    answer = completion() if status == 200 else {"error": {"message": "busy"}}

    async def slow(request):
        await asyncio.sleep(0.05)
        return httpx.Response(status, headers={"content-type": "application/json"}, content=json.dumps(answer).encode())

    async def main(session):
        async with async_client(session, slow) as http:

            async def call(number):
                try:
                    async with asyncio.timeout(0.02 + number % 50 * 0.008):
                        await http.post(CHAT, json=ask())
                except TimeoutError:
                    return

            await asyncio.gather(*(call(number) for number in range(150)))

    every = {"policy": Policy(loop=None, breaker=None)}  # they all ask the same
    with metered(f"sqlite:///{tmp_path / 'l.db'}", budget="$500", guard=every) as session:
        asyncio.run(main(session))
        assert session.held == 0


def test_sixteen_megabytes_without_an_event_are_read_in_no_time():
    from x402guard.llm.answer import AnswerReader

    reader = AnswerReader("chat", "text/event-stream", "", hides_usage=True, keeps_text=False)
    began = time.process_time()
    for _ in range(15_000):
        reader.feed(b"x" * 1_000)
    assert time.process_time() - began < 3


def test_a_stream_that_breaks_off_in_the_middle_costs_the_ceiling_though_it_stated_usage_so_far():
    body = b"".join(sse(chunk("Yes", usage=used(20, 1)), chunk(" and", usage=used(20, 2))))
    with metered(budget="$5") as session:
        _, report = posted(session, CHAT, ask(stream=True), body, kind="text/event-stream")
    assert report["evidence"]["assumed"] == report["spent"]


ENDS = {
    "chat": (
        CHAT,
        ask(stream=True),
        [chunk("Yes."), chunk(finish="stop"), {"choices": [], "usage": used(20, 5)}, "[DONE]"],
    ),
    "messages": (
        ANTHROPIC,
        CLAUDE | {"stream": True},
        [
            {"type": "message_start", "message": message(input_tokens=20, output_tokens=1)},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
            {"type": "message_stop"},
        ],
    ),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_stream_has_ended_by_its_providers_word_for_those_who_never_close_it(name, mode):
    url, request, events = ENDS[name]
    pieces = sse(*events)

    class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self):
            yield from pieces
            raise AssertionError("nobody reads on")

        async def __aiter__(self):
            for piece in pieces:
                yield piece
            raise AssertionError("nobody reads on")

    def answer(sent):
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body())

    async def answers(sent):
        return answer(sent)

    async def awaiting(session):
        http = async_client(session, answers)
        response = await http.send(http.build_request("POST", url, json=request), stream=True)
        source = response.stream.__aiter__()
        for _ in pieces[: len(pieces) - (name == "chat")]:  # the usage chunk was our wish, and is not handed on
            await source.__anext__()
        return response, source, session.held

    with metered(budget="$5") as session:
        if mode == "async":
            assert asyncio.run(awaiting(session))[2] == 0
        else:
            http = client(session, answer)
            response = http.send(http.build_request("POST", url, json=request), stream=True)
            source = iter(response.stream)
            for _ in pieces[: len(pieces) - (name == "chat")]:
                next(source)
            assert session.held == 0
        assert session.report().to_dict()["evidence"]["provider_usage"] == str(session.spent)

"""What a reviewer found: holds that leaked, costs that were lost, disputes of honest answers. Each was red once."""

import asyncio
import json
import time

import httpx
import pytest

from tests.support.llm_provider import CHAT, ask, chunk, completion, metered, sse
from tests.support.merchant import async_client, client
from x402guard import ConfigError, Guard, Metering, ModelPrice, Policy
from x402guard.http import refusal_from

ANTHROPIC = "https://api.anthropic.com/v1/messages"
CLAUDE = {"model": "claude-sonnet-4-5", "max_tokens": 4_000, "messages": [{"role": "user", "content": "hi " * 20}]}


def replies(body, status=200, kind="application/json"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda request: httpx.Response(status, headers={"content-type": kind}, content=content)


def posted(session, url, request, body, **more):
    response = client(session, replies(body, **more)).post(url, json=request)
    return response, session.report().to_dict()


def message(**usage):
    return {"type": "message", "model": "claude-sonnet-4-5", "content": [], "stop_reason": "end_turn", "usage": usage}


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


def test_a_compaction_is_billed_with_the_answer_and_needs_an_allowance():
    edits = {"context_management": {"edits": [{"type": "compact_20260112"}]}}
    first = {"type": "compaction", "input_tokens": 50_000, "output_tokens": 3_500}
    usage = message(
        input_tokens=3_000,
        output_tokens=500,
        iterations=[first, {"type": "message", "input_tokens": 3_000, "output_tokens": 500}],
    )
    with metered(budget="$5") as session, pytest.raises(Exception, match=r"context_management: .*stored_conversation"):
        posted(session, ANTHROPIC, CLAUDE | edits, usage)
    with metered(budget="$5", allowances={"stored_conversation": "$1"}) as session:
        _, report = posted(session, ANTHROPIC, CLAUDE | edits, usage)
    assert report["spent"] == "0.219"  # 53,000 x 3,000 + 4,000 x 15,000 nano-dollars
    assert report["state"] == "open"


def test_a_document_under_an_allowance_is_no_lie_when_it_is_long():
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    request = CLAUDE | {"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]}
    with metered(budget="$5", allowances={"document": "$0.50"}) as session:
        _, report = posted(session, ANTHROPIC, request, message(input_tokens=3_000, output_tokens=10))
    assert (report["spent"], report["state"]) == ("0.00915", "open")


def test_a_limit_that_its_provider_does_not_read_is_none():
    request = ask(model="deepseek-chat", max_completion_tokens=5)
    with metered(budget="$5") as session:
        _, report = posted(
            session, "https://api.deepseek.com/chat/completions", request, completion({**_used(20, 760)})
        )
        assert (report["state"], session.spent > 0) == ("open", True)
    assert report["events"][0]["ceiling"]["output_tokens"] > 100_000


def _used(into, out):
    return {"prompt_tokens": into, "completion_tokens": out}


@pytest.mark.parametrize("count", [1, 100_000])
def test_a_search_that_was_never_offered_is_disputed_and_drains_nobody(count):
    usage = message(input_tokens=20, output_tokens=5, server_tool_use={"web_search_requests": count})
    with metered(budget="$50") as parent, parent.child("c", budget="$1") as child:
        posted(child, ANTHROPIC, CLAUDE, usage)
        assert child.report().to_dict()["terminated_by"] == "disputed_usage"
        assert parent.report().to_dict()["state"] == "open"
        assert parent.spent < 1


def test_sixteen_megabytes_without_an_event_are_read_in_no_time():
    from x402guard.llm.answer import AnswerReader

    reader = AnswerReader("chat", "text/event-stream", "", hides_usage=True, keeps_text=False)
    began = time.process_time()
    for _ in range(15_000):
        reader.feed(b"x" * 1_000)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(("asked", "said", "cost"), [("flex", None, "0.0001"), ("flex", "flex", "0.00005")])
def test_a_cheaper_tier_is_believed_on_the_answers_word_alone(asked, said, cost):
    usage = completion({"prompt_tokens": 40, "completion_tokens": 5}, **({"service_tier": said} if said else {}))
    request = ask(model="gpt-5", service_tier=asked, messages=[{"role": "user", "content": "hi " * 40}])
    with metered(budget="$5") as session:
        _, report = posted(session, CHAT, request, usage)
    assert report["spent"] == cost  # 40 x 1,250 + 5 x 10,000 nano-dollars, and half of it


def test_a_stream_that_breaks_off_in_the_middle_costs_the_ceiling_though_it_stated_usage_so_far():
    body = b"".join(sse(chunk("Yes", usage=_used(20, 1)), chunk(" and", usage=_used(20, 2))))
    with metered(budget="$5") as session:
        _, report = posted(session, CHAT, ask(stream=True), body, kind="text/event-stream")
    assert report["evidence"]["assumed"] == report["spent"]


def test_a_maximum_that_somebody_names_is_made_true():
    sent = []

    def answer(request):
        sent.append(json.loads(request.content))
        return httpx.Response(200, json=completion(_used(20, 5)))

    metering = Metering(models={"mine": ModelPrice(input="$1", output="$2", max_output=512)})
    with Guard(ledger="memory://", metering=metering) as guard, guard.session("s", budget="$5") as session:
        client(session, answer).post(CHAT, json=ask(model="mine", max_completion_tokens=None))
        assert (sent[0]["max_completion_tokens"], str(session.spent)) == (512, "0.00003")


def test_bodies_that_only_look_like_refusals_are_none_to_fall_over():
    class StrangeError(Exception):
        body = {"type": "urn:x402guard:x", "requested": "abc", "available": "Infinity"}

    assert refusal_from(StrangeError()).requested is None
    with pytest.raises(ConfigError):
        Metering(price_context={"processing": "bath"})


ENDS = {
    "chat": (
        CHAT,
        ask(stream=True),
        [chunk("Yes."), chunk(finish="stop"), {"choices": [], "usage": _used(20, 5)}, "[DONE]"],
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

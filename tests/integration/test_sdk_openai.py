"""OpenAI's own package, unmodified, on httpx and on httpx2: every way of asking, and what each costs in the ledger."""

import gc
import time

import anyio
import openai
import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI

from tests.support import sdks
from tests.support.sdks import DOCKET, FAMILIES, HI, LARGE, LIMITED, MINI, TEXT, TROUBLES, dollars, then, trouble
from x402guard import Unpriced
from x402guard.http.refusal_from import refusal_from
from x402guard.http.streams import EXTENSION
from x402guard.testing import Completion, ToolCall

running, server, till, poor = sdks.running, sdks.server, sdks.till, sdks.poor

pytestmark = pytest.mark.xdist_group("sdk-openai")

TOOL = {"type": "function", "function": {"name": "docket", "parameters": DOCKET}}
AZURE = "2025-04-01-preview"


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def connect(server, family):
    """Make a client of the SDK for a till; which one, and with what, is the test's."""

    def connect(till, kind=OpenAI, *, http=None, on_refusal=None, **more):
        transport = {} if on_refusal is None else {"on_refusal": on_refusal}
        if kind in (AzureOpenAI, AsyncAzureOpenAI):
            more |= {"azure_endpoint": server.base("azure"), "api_version": AZURE}
        else:
            more |= {"base_url": server.base("openai") + "/v1"}
        return kind(api_key="k", http_client=http or till.http(family, **transport), **more)

    return connect


@pytest.fixture
def in_async(till, family, connect):
    """Run a coroutine function with an asynchronous client, and return what it returns."""

    def run(ask, kind=AsyncOpenAI, till=till, **more):
        transport = {"on_refusal": more.pop("on_refusal")} if "on_refusal" in more else {}

        async def main():
            async with till.async_http(family, **transport) as http:
                return await ask(connect(till, kind, http=http, **more))

        return anyio.run(main)

    return run


# ---- every way of asking ----


def test_chat(till, connect):
    answer = connect(till).chat.completions.create(**LIMITED)
    assert (answer.choices[0].message.content, answer.model) == (TEXT, "gpt-4o-mini")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (20, 18)
    till.settled(MINI)


def test_chat_async(till, in_async):
    async def ask(client):
        return await client.chat.completions.create(**LIMITED | {"model": "gpt-4o"})

    assert in_async(ask).choices[0].message.content == TEXT
    till.settled(LARGE)


def words(chunks):
    assert all(len(chunk.choices) == 1 for chunk in chunks), "a chunk without a choice breaks callers"
    assert all(chunk.usage is None for chunk in chunks)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_a_stream_costs_what_it_used_and_the_caller_sees_no_usage_that_was_not_asked_for(till, server, connect):
    with connect(till).chat.completions.create(**LIMITED, stream=True) as stream:
        chunks = list(stream)
    assert (words(chunks), chunks[-1].choices[0].finish_reason) == (TEXT, "stop")
    assert server.calls[0].body["stream_options"] == {"include_usage": True}
    till.settled(MINI)


def test_a_stream_async(till, in_async):
    async def ask(client):
        return [chunk async for chunk in await client.chat.completions.create(**LIMITED, stream=True)]

    assert words(in_async(ask)) == TEXT
    till.settled(MINI)


def test_a_stream_whose_caller_asked_for_usage_has_it(till, connect):
    asked = {"stream_options": {"include_usage": True}}
    *chunks, last = connect(till).chat.completions.create(**LIMITED, **asked, stream=True)
    assert words(chunks) == TEXT
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 20, 18)
    till.settled(MINI)


def test_the_sdks_own_stream_manager(till, connect):
    with connect(till).chat.completions.stream(**LIMITED) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == TEXT
    assert stream.get_final_completion().choices[0].message.content == TEXT
    till.settled(MINI)


def test_with_raw_response(till, connect):
    raw = connect(till).chat.completions.with_raw_response.create(**LIMITED)
    assert raw.parse().choices[0].message.content == TEXT
    assert raw.headers["x-request-id"].startswith("req_")
    receipt = raw.http_response.extensions[EXTENSION]
    assert (receipt.model, receipt.usage) == ("gpt-4o-mini", {"input_tokens": 20, "output_tokens": 18})
    till.settled(MINI)


def test_with_raw_response_of_a_stream(till, connect):
    raw = connect(till).chat.completions.with_raw_response.create(**LIMITED, stream=True)
    assert words(list(raw.parse())) == TEXT
    till.settled(MINI)


def test_with_streaming_response(till, connect):
    with connect(till).chat.completions.with_streaming_response.create(**LIMITED) as response:
        assert response.parse().choices[0].message.content == TEXT
    till.settled(MINI)


def test_with_streaming_response_line_by_line(till, connect):
    with connect(till).chat.completions.with_streaming_response.create(**LIMITED, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"usage"' not in "".join(lines).replace('"usage":null', "")
    till.settled(MINI)


def test_with_raw_and_streaming_response_async(till, in_async):
    async def ask(client):
        raw = await client.chat.completions.with_raw_response.create(**LIMITED)
        async with client.chat.completions.with_streaming_response.create(**LIMITED) as response:
            return raw.parse(), await response.parse()

    assert [answer.choices[0].message.content for answer in in_async(ask)] == [TEXT, TEXT]
    till.settled(2 * MINI, calls=2)


def test_responses(till, server, connect):
    server.reply = Completion(input_tokens=100, cached_tokens=64, output_tokens=18, reasoning_tokens=5)
    answer = connect(till).responses.create(model="gpt-4o", input="x" * 400, max_output_tokens=100)
    assert (answer.output_text, answer.usage.total_tokens) == (TEXT, 118)
    # cached tokens lie inside the input, reasoning inside the output: 36 × 2.50 + 64 × 1.25 + 18 × 10 = 350 millionths
    till.settled(dollars((36, "2.50"), (64, "1.25"), (18, "10")))


def test_a_stream_of_responses(till, connect):
    with connect(till).responses.create(model="gpt-4o", input="hi", max_output_tokens=100, stream=True) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert (events[-1].type, events[-1].response.usage.output_tokens) == ("response.completed", 18)
    till.settled(LARGE)


def test_responses_async_and_their_stream_manager(till, in_async):
    async def ask(client):
        whole = await client.responses.create(model="gpt-4o", input="hi", max_output_tokens=100)
        async with client.responses.stream(model="gpt-4o", input="hi", max_output_tokens=100) as stream:
            return whole, await stream.get_final_response()

    assert [answer.output_text for answer in in_async(ask)] == [TEXT, TEXT]
    till.settled(2 * LARGE, calls=2)


def test_embeddings(till, connect):
    answer = connect(till).embeddings.create(model="text-embedding-3-small", input=["a motion", "an opinion"])
    assert [len(item.embedding) for item in answer.data] == [8, 8]
    till.settled(dollars((20, "0.02")))  # 0.4 millionths


def test_embeddings_async(till, in_async):
    async def ask(client):
        return await client.embeddings.create(model="text-embedding-3-large", input="a motion")

    assert len(in_async(ask).data[0].embedding) == 8
    till.settled(dollars((20, "0.13")))  # 2.6 millionths


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools(till, server, connect, stream):
    server.reply = Completion("", tool_calls=(ToolCall("docket", {"n": 42}),), input_tokens=60, output_tokens=15)
    asked = {**LIMITED, "tools": [TOOL], "stream": stream}
    answer = connect(till).chat.completions.create(**asked)
    if stream:
        calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(call.function.name or "" for call in calls) == "docket"
        assert "".join(call.function.arguments or "" for call in calls) == '{"n":42}'
    else:
        [call] = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("docket", '{"n":42}')
    till.settled(dollars((60, "0.15"), (15, "0.60")))  # 9 + 9 = 18 millionths


def test_azure(till, server, connect):
    client = connect(till, AzureOpenAI)
    assert client.chat.completions.create(**LIMITED).choices[0].message.content == TEXT
    chunks = list(client.chat.completions.create(**LIMITED, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert [len(chunk.choices) for chunk in chunks].count(0) == 1  # Azure's own first, about the prompt
    assert [chunk.usage for chunk in chunks if chunk.usage] == []
    assert [call.path for call in server.calls] == ["/openai/deployments/gpt-4o-mini/chat/completions"] * 2
    till.settled(2 * MINI, calls=2)


def test_azure_async(till, in_async):
    async def ask(client):
        embedded = await client.embeddings.create(model="text-embedding-3-small", input="a motion")
        return embedded, await client.chat.completions.create(**LIMITED)

    embedded, answer = in_async(ask, AsyncAzureOpenAI)
    assert (len(embedded.data), answer.choices[0].message.content) == (1, TEXT)
    till.settled(MINI + dollars((20, "0.02")), calls=2)


def test_attribution_by_model(till, server, connect):
    client, counts = connect(till), [(20, 18), (20, 18), (21, 18), (24, 18), (100, 160), (100, 160)]
    for index, (into, out) in enumerate(counts):
        server.reply = Completion(input_tokens=into, output_tokens=out)
        model = "gpt-4o-mini" if index < 4 else "gpt-4o"
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 100}])
    # (20 + 20 + 21 + 24) × 0.15 + 72 × 0.60 = 12.75 + 43.2, and 200 × 2.50 + 320 × 10 = 500 + 3,200 millionths
    llm = till.session.report().to_dict()["llm"]
    assert (llm["total"], llm["calls"]) == ("0.00375595", 6)
    assert llm["by_model"] == {
        "gpt-4o": {"amount": "0.0037", "calls": 2, "tokens_in": 200, "tokens_out": 320, "refusals": 0},
        "gpt-4o-mini": {"amount": "0.00005595", "calls": 4, "tokens_in": 85, "tokens_out": 72, "refusals": 0},
    }
    till.settled(dollars((85, "0.15"), (72, "0.60")) + dollars((200, "2.50"), (320, "10")), calls=6)


# ---- what nobody states ----


def test_a_stream_that_is_left_half_way_costs_its_ceiling(till, connect):
    with connect(till).chat.completions.create(**LIMITED, stream=True) as stream:
        first = [next(stream).choices[0].delta.content for _ in range(2)]
    assert first == ["", "The"]
    till.settled(till.ceiling("0.15", "0.60"), evidence="assumed")


def test_a_stream_that_nobody_closes_costs_its_ceiling_once_it_is_thrown_away(till, connect):
    stream = connect(till).chat.completions.create(**LIMITED, stream=True)
    for chunk in stream:
        assert chunk.choices
        break
    del stream
    until_s = time.monotonic() + 10
    while till.session.held:  # a thread of another test may hold a frame of it for a moment
        assert time.monotonic() < until_s
        gc.collect()
        time.sleep(0.01)
    till.settled(till.ceiling("0.15", "0.60"), evidence="assumed")


def test_a_stream_that_is_left_half_way_costs_its_ceiling_async(till, in_async):
    async def ask(client):
        async with await client.chat.completions.create(**LIMITED, stream=True) as stream:
            async for _ in stream:
                break

    in_async(ask)
    till.settled(till.ceiling("0.15", "0.60"), evidence="assumed")


def test_a_stream_that_is_cut_costs_its_ceiling(till, server, family, connect):
    server.reply = Completion(cut_after=3)
    seen = []
    with pytest.raises(openai.APIConnectionError) as caught:
        for chunk in connect(till).chat.completions.create(**LIMITED, stream=True):
            seen.append(chunk.choices[0].delta.content)
    assert (seen, refusal_from(caught.value)) == (["", "The", " motion"], None)
    till.settled(till.ceiling("0.15", "0.60"), evidence="assumed")


def test_a_stream_of_responses_that_is_cut_costs_its_ceiling(till, server, in_async):
    server.reply = Completion(cut_after=5)

    async def ask(client):
        stream = await client.responses.create(model="gpt-4o", input="hi", max_output_tokens=100, stream=True)
        with pytest.raises(openai.APIConnectionError):
            async for _ in stream:
                pass

    in_async(ask)
    till.settled(till.ceiling("2.50", "10"), evidence="assumed")


def test_an_answer_that_is_cut_costs_its_ceiling(till, server, connect):
    server.reply = Completion(cut_after=1)
    with pytest.raises(openai.APIConnectionError):
        connect(till, max_retries=0).chat.completions.create(**LIMITED)
    till.settled(till.ceiling("0.15", "0.60"), evidence="assumed")


# ---- retries and refusals ----


@pytest.mark.parametrize("status", TROUBLES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_each_retry_has_a_hold_of_its_own_and_only_the_served_one_costs(till, server, connect, status, stream):
    server.reply = then(trouble(status))
    answer = connect(till).chat.completions.create(**LIMITED, stream=stream)
    assert (words(list(answer)) if stream else answer.choices[0].message.content) == TEXT
    assert [event for event, _ in till.events] == ["authorize", "void", "authorize", "capture"]
    till.settled(MINI, tries=2)


@pytest.mark.parametrize("status", TROUBLES)
def test_retries_async(till, server, in_async, status):
    server.reply = then(trouble(status))

    async def ask(client):
        return await client.responses.create(model="gpt-4o", input="hi", max_output_tokens=100)

    assert in_async(ask).output_text == TEXT
    till.settled(LARGE, tries=2)


ASKS = {
    "chat": lambda client: client.chat.completions.create(**LIMITED),
    "stream": lambda client: client.chat.completions.create(**LIMITED, stream=True),
    "raw": lambda client: client.chat.completions.with_raw_response.create(**LIMITED),
    "unlimited": lambda client: client.chat.completions.create(model="gpt-4o", messages=HI),
    "responses": lambda client: client.responses.create(model="gpt-4o", input="hi", max_output_tokens=100),
}


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_budget_that_is_too_small_is_told_once_and_typed(poor, connect, in_async, ask, on_refusal):
    with pytest.raises(Exception, match="budget: ") as caught:
        ask(connect(poor, on_refusal=on_refusal))
    poor.exhausted(caught.value)
    if on_refusal == "respond":
        assert isinstance(caught.value, openai.APIStatusError)
        assert caught.value.status_code == 402

    async def again(client):
        await ask(client)

    with pytest.raises(Exception, match="budget: ") as caught:
        in_async(again, till=poor, on_refusal=on_refusal)
    poor.exhausted(caught.value, tries=2)


def test_the_amounts_of_a_refusal(poor, connect):
    with pytest.raises(openai.APIStatusError) as caught:
        connect(poor, on_refusal="respond").chat.completions.create(**LIMITED)
    refusal = poor.exhausted(caught.value)
    # some 45 tokens in × 0.15 and 100 out × 0.60: 60 millionths and the input
    assert dollars((100, "0.60")) < refusal.requested < dollars((100, "0.15"), (100, "0.60"))
    assert refusal.amounts() == {"requested": f"{refusal.requested:f}", "available": "0.000001"}


def test_the_amounts_of_a_refusal_are_decimal_strings_however_small(poor, connect):
    with pytest.raises(openai.APIStatusError) as caught:
        connect(poor, on_refusal="respond").chat.completions.create(model="gpt-4o", messages=HI)
    refusal = poor.exhausted(caught.value)
    # as docs and docstring have it: "decimal dollar strings"
    assert refusal.amounts()["available"] == "0.000001"
    assert caught.value.response.json()["available"] == "0.000001"


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
@pytest.mark.parametrize("model", ["gpt-99", "gpt-4ooo"])
def test_a_model_without_a_price_is_refused_by_name(till, connect, model, on_refusal):
    with pytest.raises(Exception, match="has no price") as caught:
        connect(till, on_refusal=on_refusal).chat.completions.create(**LIMITED | {"model": model})
    refusal = till.refused(caught.value, Unpriced)
    assert f"Metering(models={{'{model}': ModelPrice(like=" in str(refusal)
    assert (refusal.requested, refusal.available) == (None, None)

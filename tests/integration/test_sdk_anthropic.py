"""Anthropic's own package, unmodified, on httpx2: messages and streams, sync and async, and what each costs in the ledger."""

import anthropic
import anyio
import httpx
import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.support import sdks
from tests.support.sdks import DOCKET, HI, TEXT, TROUBLES, dollars, then, trouble
from x402guard import BudgetExhausted, GuardedTransport, Unpriced
from x402guard.http.refusal_from import refusal_from
from x402guard.http.streams import EXTENSION
from x402guard.testing import Completion, Failure, ToolCall

running, server, till, poor = sdks.running, sdks.server, sdks.till, sdks.poor

pytestmark = [
    pytest.mark.xdist_group("sdk-anthropic"),
    # The package says so of the model whose prices the tests are written with.
    pytest.mark.filterwarnings("ignore:The model 'claude-sonnet-4-5' is deprecated:DeprecationWarning"),
]

SONNET = dollars((20, "3"), (18, "15"))  # 60 + 270 = 330 millionths
ASKED = {"model": "claude-sonnet-4-5", "messages": HI, "max_tokens": 100}
RICH = Completion(input_tokens=20, cached_tokens=64, cache_write_tokens=9, cache_write_1h_tokens=4, output_tokens=18)
# Anthropic's cache counts lie outside of the input: 20 × 3 + 64 × 0.30 + 5 × 3.75 (five minutes) + 4 × 6 (an hour) + 18 × 15
RICH_COST = dollars((20, "3"), (64, "0.30"), (5, "3.75"), (4, "6"), (18, "15"))  # 391.95 millionths
PROMPT = "The motion to suppress. " * 100  # long enough for what RICH says that it holds


@pytest.fixture
def connect(server):
    """Make a client of the SDK for a till; which one, and with what, is the test's."""

    def connect(till, kind=Anthropic, *, http=None, **more):
        transport = {"on_refusal": more.pop("on_refusal")} if "on_refusal" in more else {}
        http = http or till.http("httpx2", **transport)
        return kind(api_key="k", base_url=server.base("anthropic"), http_client=http, **more)

    return connect


@pytest.fixture
def in_async(till, connect):
    """Run a coroutine function with an asynchronous client, and return what it returns."""

    def run(ask, till=till):
        async def main():
            async with till.async_http("httpx2") as http:
                return await ask(connect(till, AsyncAnthropic, http=http))

        return anyio.run(main)

    return run


def said(events):
    return "".join(event.delta.text for event in events if event.type == "content_block_delta")


def test_the_constants_are_what_the_provider_would_bill():
    assert (f"{SONNET:f}", f"{RICH_COST:f}") == ("0.00033", "0.00039195")


# ---- every way of asking ----


def test_messages(till, connect):
    answer = connect(till).messages.create(**ASKED)
    assert (answer.content[0].text, answer.stop_reason) == (TEXT, "end_turn")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (20, 18)
    till.settled(SONNET)


def test_messages_async(till, in_async):
    async def ask(client):
        return await client.messages.create(**ASKED)

    assert in_async(ask).content[0].text == TEXT
    till.settled(SONNET)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_cache_is_priced_beside_the_input(till, server, connect, stream):
    server.reply = RICH
    block = {"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    asked = {**ASKED, "messages": [{"role": "user", "content": [block]}], "stream": stream}
    answer = connect(till).messages.create(**asked)
    assert (said(list(answer)) if stream else answer.content[0].text) == TEXT
    till.settled(RICH_COST)


def test_a_stream(till, connect):
    with connect(till).messages.create(**ASKED, stream=True) as stream:
        events = list(stream)
    assert (said(events), events[-2].usage.output_tokens, events[-1].type) == (TEXT, 18, "message_stop")
    till.settled(SONNET)


def test_a_stream_async(till, in_async):
    async def ask(client):
        return [event async for event in await client.messages.create(**ASKED, stream=True)]

    assert said(in_async(ask)) == TEXT
    till.settled(SONNET)


def test_the_sdks_own_stream_manager(till, connect):
    with connect(till).messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().usage.output_tokens == 18
    till.settled(SONNET)


def test_the_sdks_own_stream_manager_async(till, in_async):
    async def ask(client):
        async with client.messages.stream(**ASKED) as stream:
            return "".join([text async for text in stream.text_stream])

    assert in_async(ask) == TEXT
    till.settled(SONNET)


def test_only_the_final_message_of_a_stream(till, in_async):
    async def ask(client):
        async with client.messages.stream(**ASKED) as stream:
            return await stream.get_final_message()

    assert in_async(ask).content[0].text == TEXT
    till.settled(SONNET)


def test_raw_and_streaming_response(till, connect):
    client = connect(till)
    raw = client.messages.with_raw_response.create(**ASKED)
    assert raw.parse().content[0].text == TEXT
    assert raw.http_response.extensions[EXTENSION].usage == {"input_tokens": 20, "output_tokens": 18}
    with client.messages.with_streaming_response.create(**ASKED) as response:
        assert response.parse().content[0].text == TEXT
    till.settled(2 * SONNET, calls=2)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools(till, server, connect, stream):
    server.reply = Completion("", tool_calls=(ToolCall("docket", {"n": 42}),), input_tokens=600, output_tokens=30)
    tools = [{"name": "docket", "description": "Find a docket.", "input_schema": DOCKET}]
    client = connect(till)
    if stream:
        with client.messages.stream(**ASKED, tools=tools) as answering:
            answer = answering.get_final_message()
    else:
        answer = client.messages.create(**ASKED, tools=tools)
    [call] = answer.content
    assert (call.name, call.input, answer.stop_reason) == ("docket", {"n": 42}, "tool_use")
    till.settled(dollars((600, "3"), (30, "15")))  # 1,800 + 450 = 2,250 millionths


def test_counting_tokens_costs_nothing(till, server, connect):
    assert connect(till).messages.count_tokens(model="claude-sonnet-4-5", messages=HI).input_tokens == 20
    assert len(server.calls) == 1
    assert till.session.report().to_dict()["events"] == []


# ---- what nobody states ----


@pytest.mark.parametrize("manager", [False, True], ids=["stream=True", "messages.stream"])
def test_a_stream_that_is_left_half_way_costs_its_ceiling(till, connect, manager):
    messages = connect(till).messages
    with messages.stream(**ASKED) if manager else messages.create(**ASKED, stream=True) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
    till.settled(till.ceiling("3", "15"), evidence="assumed")


def test_a_stream_that_is_left_half_way_costs_its_ceiling_async(till, in_async):
    async def ask(client):
        async with client.messages.stream(**ASKED) as stream:
            async for text in stream.text_stream:
                return text

    assert in_async(ask) == "The"
    till.settled(till.ceiling("3", "15"), evidence="assumed")


def test_a_stream_that_is_cut_costs_its_ceiling(till, server, connect):
    server.reply = Completion(cut_after=5)
    with pytest.raises(httpx2.RemoteProtocolError) as caught:
        list(connect(till).messages.create(**ASKED, stream=True))
    assert refusal_from(caught.value) is None
    till.settled(till.ceiling("3", "15"), evidence="assumed")


def test_a_stream_that_is_cut_costs_its_ceiling_async(till, server, in_async):
    server.reply = Completion(cut_after=5)

    async def ask(client):
        async with client.messages.stream(**ASKED) as stream:
            await stream.get_final_message()

    with pytest.raises(httpx2.RemoteProtocolError):
        in_async(ask)
    till.settled(till.ceiling("3", "15"), evidence="assumed")


# ---- retries and refusals ----


@pytest.mark.parametrize("status", [*TROUBLES, 529])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_each_retry_has_a_hold_of_its_own_and_only_the_served_one_costs(till, server, connect, status, stream):
    server.reply = then(trouble(status))
    answer = connect(till).messages.create(**ASKED, stream=stream)
    assert (said(list(answer)) if stream else answer.content[0].text) == TEXT
    assert [event for event, _ in till.events] == ["authorize", "void", "authorize", "capture"]
    till.settled(SONNET, tries=2)


def test_an_overloaded_provider_costs_nothing_however_often_it_is_asked(till, server, in_async):
    server.reply = Failure(529, sdks.SOON)

    async def ask(client):
        return await client.messages.create(**ASKED)

    with pytest.raises(anthropic.InternalServerError):
        in_async(ask)
    assert [event for event, _ in till.events] == ["authorize", "void"] * 3
    assert (till.session.spent, till.session.held, len(server.calls)) == (0, 0, 3)


def managed(client):
    with client.messages.stream(**ASKED) as stream:
        return stream.get_final_message()


ASKS = {
    "messages": lambda client: client.messages.create(**ASKED),
    "stream": lambda client: client.messages.create(**ASKED, stream=True),
    "raw": lambda client: client.messages.with_raw_response.create(**ASKED),
    "messages.stream": managed,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_budget_that_is_too_small_is_told_once_and_typed(poor, connect, ask):
    with pytest.raises(anthropic.APIStatusError, match="budget: ") as caught:
        ask(connect(poor))
    assert caught.value.status_code == 402
    refusal = poor.exhausted(caught.value)
    # the output alone is 100 × 15 = 1,500 millionths
    assert dollars((100, "15")) < refusal.requested < dollars((1000, "3.75"), (100, "15"))


def test_a_budget_that_is_too_small_is_told_once_and_typed_async(poor, in_async):
    async def ask(client):
        await client.messages.create(**ASKED)

    async def stream(client):
        async with client.messages.stream(**ASKED) as stream:
            await stream.get_final_message()

    for tries, asking in enumerate((ask, stream), start=1):
        with pytest.raises(anthropic.APIStatusError, match="budget: ") as caught:
            in_async(asking, till=poor)
        poor.exhausted(caught.value, tries=tries)


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_refusal_that_is_raised_is_hidden_by_the_sdk_and_found_all_the_same(poor, connect, ask):
    """The package takes whatever a transport raises for a lost connection; so the transports of httpx2 respond by default."""
    with pytest.raises(anthropic.APIConnectionError) as caught:
        ask(connect(poor, on_refusal="raise", max_retries=0))
    poor.exhausted(caught.value)
    assert isinstance(refusal_from(caught.value), BudgetExhausted)


def test_a_refusal_that_is_raised_is_asked_for_again_and_never_sent(poor, connect):
    with pytest.raises(anthropic.APIConnectionError) as caught:
        connect(poor, on_refusal="raise", max_retries=1).messages.create(**ASKED)
    poor.exhausted(caught.value, tries=2)


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
def test_a_model_without_a_price_is_refused_by_name(till, connect, on_refusal):
    with pytest.raises(anthropic.APIError) as caught:
        connect(till, on_refusal=on_refusal, max_retries=0).messages.create(**ASKED | {"model": "claude-sonnet-99"})
    refusal = till.refused(caught.value, Unpriced)
    assert "anthropic has no price for 'claude-sonnet-99'; did you mean 'claude-sonnet-" in str(refusal)


def test_a_client_of_httpx_is_refused_by_the_package_itself(till, connect):
    with httpx.Client(transport=GuardedTransport(till.session)) as http, pytest.raises(TypeError, match="httpx2"):
        connect(till, http=http)

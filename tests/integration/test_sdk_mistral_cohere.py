"""Mistral's and Cohere's own packages, unmodified, on httpx2 and httpx: chats, streams, embeddings, and what each costs."""

import anyio
import cohere
import httpx
import httpx2
import pytest
from cohere.core.api_error import ApiError
from mistralai.client import Mistral
from mistralai.client.errors import SDKError
from mistralai.client.utils import BackoffStrategy, RetryConfig

from tests.support import sdks
from tests.support.sdks import DOCKET, HI, TEXT, TROUBLES, dollars, then, trouble
from x402guard import Unpriced
from x402guard.http.refusal_from import refusal_from
from x402guard.testing import Completion, ToolCall

running, server, till, poor = sdks.running, sdks.server, sdks.till, sdks.poor

pytestmark = pytest.mark.xdist_group("sdk-mistral-cohere")

SMALL = dollars((20, "0.15"), (18, "0.60"))  # mistral-small-latest: 3.0 + 10.8 = 13.8 millionths
COMMAND = dollars((20, "2.50"), (18, "10"))  # command-a: 50 + 180 = 230 millionths; its template's 71 tokens are free
PRICES = {"mistral": ("0.15", "0.60"), "cohere": ("2.50", "10")}
PROMPT = "The motion to suppress. " * 100
TOOL = {"type": "function", "function": {"name": "docket", "description": "Find it.", "parameters": DOCKET}}
CALLS_TOOL = Completion("", tool_calls=(ToolCall("docket", {"n": 42}),), input_tokens=60, output_tokens=15)


class OfMistral:
    """Mistral's client, asked in words that both packages share."""

    family, cost, lost = "httpx2", SMALL, httpx2.RemoteProtocolError
    asked = {"model": "mistral-small-latest", "messages": HI, "max_tokens": 100}
    refusal = SDKError

    def __init__(self, url):
        self.url = url + "/mistral"

    def make(self, till, http, *, asynchronous=False):
        backoff = BackoffStrategy(initial_interval=1, max_interval=1, exponent=1, max_elapsed_time=5_000, jitter_ms=0)
        retries = RetryConfig("backoff", backoff, retry_connection_errors=True)
        clients = {"client": till.http("httpx2"), "async_client": http} if asynchronous else {"client": http}
        return Mistral(api_key="k", server_url=self.url, retry_config=retries, **clients)

    def chat(self, client, **more):
        return client.chat.complete(**self.asked | more)

    def chat_async(self, client, **more):
        return client.chat.complete_async(**self.asked | more)

    def stream(self, client, **more):
        return client.chat.stream(**self.asked | more)

    async def stream_async(self, client, **more):
        return await client.chat.stream_async(**self.asked | more)

    def embed(self, client, text="a motion"):
        return client.embeddings.create(model="mistral-embed", inputs=[text]).data[0].embedding

    def text(self, answer):
        return answer.choices[0].message.content

    def piece(self, event):
        return event.data.choices[0].delta.content or ""

    def tool(self, answer):
        return answer.choices[0].message.tool_calls[0].function

    embedding_cost = dollars((20, "0.10"))  # 2 millionths


class OfCohere:
    """Cohere's, in the same words."""

    family, cost, lost = "httpx", COMMAND, httpx.RemoteProtocolError
    asked = {"model": "command-a-03-2025", "messages": HI, "max_tokens": 100}
    refusal = ApiError

    def __init__(self, url):
        self.url = url + "/cohere"

    def make(self, till, http, *, asynchronous=False):
        kind = cohere.AsyncClientV2 if asynchronous else cohere.ClientV2
        return kind(api_key="k", base_url=self.url, httpx_client=http)

    def chat(self, client, **more):
        return client.chat(**self.asked | more)

    chat_async = chat

    def stream(self, client, **more):
        return client.chat_stream(**self.asked | more)

    async def stream_async(self, client, **more):
        return client.chat_stream(**self.asked | more)

    def embed(self, client, text="a motion"):
        asked = {"model": "embed-v4.0", "input_type": "search_document", "embedding_types": ["float"]}
        return client.embed(**asked, texts=[text]).embeddings.float_[0]

    def text(self, answer):
        return answer.message.content[0].text

    def piece(self, event):
        return event.delta.message.content.text if event.type == "content-delta" else ""

    def tool(self, answer):
        return answer.message.tool_calls[0].function

    embedding_cost = dollars((20, "0.12"))  # 2.4 millionths


@pytest.fixture(params=[OfMistral, OfCohere], ids=["mistral", "cohere"])
def sdk(server, request):
    return request.param(server.url)


@pytest.fixture
def connect(sdk):
    return lambda till, on_refusal="respond": sdk.make(till, till.http(sdk.family, on_refusal=on_refusal))


@pytest.fixture
def in_async(till, sdk):
    """Run a coroutine function with an asynchronous client, and return what it returns."""

    def run(ask, till=till, on_refusal="respond"):
        async def main():
            async with till.async_http(sdk.family, on_refusal=on_refusal) as http:
                return await ask(sdk.make(till, http, asynchronous=True))

        return anyio.run(main)

    return run


@pytest.fixture
def prices(sdk):
    return PRICES["mistral" if isinstance(sdk, OfMistral) else "cohere"]


def test_the_constants_are_what_the_providers_would_bill():
    assert (f"{SMALL:f}", f"{COMMAND:f}") == ("0.0000138", "0.00023")


# ---- every way of asking ----


def test_chat(till, sdk, connect):
    assert sdk.text(sdk.chat(connect(till))) == TEXT
    till.settled(sdk.cost)


def test_chat_async(till, sdk, in_async):
    assert sdk.text(in_async(sdk.chat_async)) == TEXT
    till.settled(sdk.cost)


def test_a_stream(till, sdk, connect):
    assert "".join(map(sdk.piece, sdk.stream(connect(till)))) == TEXT
    till.settled(sdk.cost)


def test_a_stream_async(till, sdk, in_async):
    async def ask(client):
        return [sdk.piece(event) async for event in await sdk.stream_async(client)]

    assert "".join(in_async(ask)) == TEXT
    till.settled(sdk.cost)


def test_tools(till, server, sdk, connect):
    server.reply = CALLS_TOOL
    call = sdk.tool(sdk.chat(connect(till), tools=[TOOL]))
    assert (call.name, call.arguments) == ("docket", '{"n":42}')
    into, out = ("0.15", "0.60") if isinstance(sdk, OfMistral) else ("2.50", "10")
    till.settled(dollars((60, into), (15, out)))  # 9 + 9 = 18, or 150 + 150 = 300 millionths


def test_embeddings(till, sdk, connect):
    assert len(sdk.embed(connect(till))) == 8
    till.settled(sdk.embedding_cost)


def test_mistrals_cached_tokens_lie_within_the_input(till, server):
    server.reply = Completion(input_tokens=100, cached_tokens=64, output_tokens=18)
    client = OfMistral(server.url).make(till, till.http())
    client.chat.complete(**OfMistral.asked | {"messages": [{"role": "user", "content": PROMPT}]})
    till.settled(dollars((36, "0.15"), (64, "0.015"), (18, "0.60")))  # 5.4 + 0.96 + 10.8 = 17.16 millionths


# ---- what nobody states ----


def test_a_stream_that_is_left_half_way_costs_its_ceiling(till, sdk, connect, prices):
    stream = sdk.stream(connect(till))
    events = iter(stream)
    while not sdk.piece(next(events)):
        pass
    # Mistral's stream is a context, Cohere's a generator.
    stream.__exit__(None, None, None) if isinstance(sdk, OfMistral) else stream.close()
    till.settled(till.ceiling(*prices), evidence="assumed")


def test_a_stream_that_is_cut_costs_its_ceiling(till, server, sdk, connect, prices):
    server.reply = Completion(cut_after=3)
    with pytest.raises(sdk.lost) as caught:
        list(sdk.stream(connect(till)))
    assert refusal_from(caught.value) is None
    till.settled(till.ceiling(*prices), evidence="assumed")


def test_a_stream_that_is_cut_costs_its_ceiling_async(till, server, sdk, in_async, prices):
    server.reply = Completion(cut_after=3)

    async def ask(client):
        return [event async for event in await sdk.stream_async(client)]

    with pytest.raises(sdk.lost):
        in_async(ask)
    till.settled(till.ceiling(*prices), evidence="assumed")


# ---- retries and refusals ----


@pytest.mark.parametrize("status", TROUBLES)
def test_each_retry_has_a_hold_of_its_own_and_only_the_served_one_costs(till, server, sdk, connect, status):
    server.reply = then(trouble(status))
    assert sdk.text(sdk.chat(connect(till))) == TEXT
    assert [event for event, _ in till.events] == ["authorize", "void", "authorize", "capture"]
    till.settled(sdk.cost, tries=2)


@pytest.mark.parametrize("status", TROUBLES)
def test_retries_async(till, server, sdk, in_async, status):
    server.reply = then(trouble(status))
    assert sdk.text(in_async(sdk.chat_async)) == TEXT
    till.settled(sdk.cost, tries=2)


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
@pytest.mark.parametrize("way", ["chat", "stream", "embed"])
def test_a_budget_that_is_too_small_is_told_once_and_typed(poor, sdk, connect, way, on_refusal):
    client = connect(poor, on_refusal)
    ways = {
        "chat": lambda: sdk.chat(client),
        "stream": lambda: list(sdk.stream(client)),
        "embed": lambda: sdk.embed(client, PROMPT),
    }
    with pytest.raises(Exception, match="budget: ") as caught:
        ways[way]()
    poor.exhausted(caught.value)
    if on_refusal == "respond":
        assert isinstance(caught.value, sdk.refusal)
        assert caught.value.status_code == 402


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
def test_a_budget_that_is_too_small_is_told_once_and_typed_async(poor, sdk, in_async, prices, on_refusal):
    async def stream(client):
        return [event async for event in await sdk.stream_async(client)]

    for tries, ask in enumerate((sdk.chat_async, stream), start=1):
        with pytest.raises(Exception, match="budget: ") as caught:
            in_async(ask, till=poor, on_refusal=on_refusal)
        refusal = poor.exhausted(caught.value, tries=tries)
        into, out = prices
        assert dollars((100, out)) < refusal.requested < dollars((100, into), (100, out))


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
def test_a_model_without_a_price_is_refused_by_name(till, sdk, connect, on_refusal):
    with pytest.raises(Exception, match="has no price") as caught:
        sdk.chat(connect(till, on_refusal), model="no-such-model")
    refusal = till.refused(caught.value, Unpriced)
    assert "for 'no-such-model'. A newer price book may have it" in str(refusal)

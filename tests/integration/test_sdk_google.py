"""Google's own package, unmodified, on httpx2: content, its stream and embeddings, sync and async, and what each costs."""

import anyio
import httpx2
import pytest
from google import genai
from google.genai import errors, types

from tests.support import sdks
from tests.support.sdks import DOCKET, TEXT, TROUBLES, dollars, then, trouble
from x402guard import Unpriced
from x402guard.http.refusal_from import refusal_from
from x402guard.testing import Completion, ToolCall

running, server, till, poor = sdks.running, sdks.server, sdks.till, sdks.poor

pytestmark = pytest.mark.xdist_group("sdk-google")

FLASH = dollars((20, "0.30"), (18, "2.50"))  # 6 + 45 = 51 millionths
LIMITED = types.GenerateContentConfig(max_output_tokens=100)
ASKED = {"model": "gemini-2.5-flash", "contents": "hi", "config": LIMITED}
THINKING = Completion(input_tokens=100, cached_tokens=64, output_tokens=18, thoughts_tokens=40)
# cached tokens lie inside the prompt, thoughts come on top of the candidates: 36 × 0.30 + 64 × 0.03 + (18 + 40) × 2.50
THINKING_COST = dollars((36, "0.30"), (64, "0.03"), (58, "2.50"))  # 157.72 millionths
PROMPT = "The motion to suppress. " * 100


class Clients:
    """The package's client for a till, with a guarded client of httpx2's for either way of asking."""

    def __init__(self, server):
        self._server = server

    def options(self, **more):
        return types.HttpOptions(base_url=self._server.base("google"), **more)

    def sync(self, till, *, on_refusal="respond", **more):
        http = till.http("httpx2", on_refusal=on_refusal)
        return genai.Client(api_key="k", http_options=self.options(httpx_client=http, **more))

    def run(self, till, ask, *, on_refusal="respond", **more):
        """Run a coroutine function with an asynchronous client, and return what it returns."""

        async def main():
            async with till.async_http("httpx2", on_refusal=on_refusal) as http:
                options = self.options(httpx_async_client=http, httpx_client=till.http(), **more)
                return await ask(genai.Client(api_key="k", http_options=options).aio)

        return anyio.run(main)


@pytest.fixture
def clients(server):
    return Clients(server)


def said(chunks):
    return "".join(chunk.text or "" for chunk in chunks)


def test_the_constants_are_what_the_provider_would_bill():
    assert (f"{FLASH:f}", f"{THINKING_COST:f}") == ("0.000051", "0.00015772")


# ---- every way of asking ----


def test_content(till, clients):
    answer = clients.sync(till).models.generate_content(**ASKED)
    assert (answer.text, answer.usage_metadata.prompt_token_count) == (TEXT, 20)
    assert answer.usage_metadata.candidates_token_count == 18
    till.settled(FLASH)


def test_content_async(till, clients):
    async def ask(client):
        return await client.models.generate_content(**ASKED)

    assert clients.run(till, ask).text == TEXT
    till.settled(FLASH)


def test_content_without_an_output_limit(till, clients):
    answer = clients.sync(till).models.generate_content(model="gemini-2.5-flash", contents="hi")
    assert answer.text == TEXT
    till.settled(FLASH)


def test_a_stream(till, server, clients):
    chunks = list(clients.sync(till).models.generate_content_stream(**ASKED))
    assert (said(chunks), chunks[-1].usage_metadata.candidates_token_count) == (TEXT, 18)
    assert server.calls[0].query["alt"] == "sse"
    till.settled(FLASH)


def test_a_stream_async(till, clients):
    async def ask(client):
        return [chunk async for chunk in await client.models.generate_content_stream(**ASKED)]

    assert said(clients.run(till, ask)) == TEXT
    till.settled(FLASH)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_thoughts_are_billed_on_top_and_the_cache_within(till, server, clients, stream):
    server.reply = THINKING
    models = clients.sync(till).models
    asked = {**ASKED, "contents": PROMPT}
    answers = list(models.generate_content_stream(**asked)) if stream else [models.generate_content(**asked)]
    assert (said(answers), answers[-1].usage_metadata.thoughts_token_count) == (TEXT, 40)
    till.settled(THINKING_COST)


def test_a_chat_of_two_turns(till, server, clients):
    chat = clients.sync(till).chats.create(model="gemini-2.5-flash", config=LIMITED)
    assert [chat.send_message(text).text for text in ("hi", "and then?")] == [TEXT, TEXT]
    assert [len(call.body["contents"]) for call in server.calls] == [1, 3]
    till.settled(2 * FLASH, calls=2)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools(till, server, clients, stream):
    server.reply = Completion("", tool_calls=(ToolCall("docket", {"n": 42}),), input_tokens=60, output_tokens=15)
    declared = types.FunctionDeclaration(name="docket", description="Find it.", parameters_json_schema=DOCKET)
    config = types.GenerateContentConfig(max_output_tokens=100, tools=[types.Tool(function_declarations=[declared])])
    models, asked = clients.sync(till).models, {**ASKED, "config": config}
    answer = list(models.generate_content_stream(**asked))[-1] if stream else models.generate_content(**asked)
    [call] = answer.function_calls
    assert (call.name, call.args) == ("docket", {"n": 42})
    till.settled(dollars((60, "0.30"), (15, "2.50")))  # 18 + 37.5 = 55.5 millionths


def test_embeddings(till, clients):
    answer = clients.sync(till).models.embed_content(model="gemini-embedding-001", contents=["a motion", "an opinion"])
    assert [len(embedding.values) for embedding in answer.embeddings] == [8, 8]
    till.settled(dollars((20, "0.15")))  # 3 millionths


def test_embeddings_async(till, clients):
    async def ask(client):
        return await client.models.embed_content(model="gemini-embedding-001", contents="a motion")

    assert len(clients.run(till, ask).embeddings) == 1
    till.settled(dollars((20, "0.15")))


def test_counting_tokens_costs_nothing(till, server, clients):
    assert clients.sync(till).models.count_tokens(model="gemini-2.5-flash", contents="hi").total_tokens == 20
    assert len(server.calls) == 1
    assert till.session.report().to_dict()["events"] == []


# ---- what nobody states ----


def test_a_stream_that_is_left_half_way_costs_its_ceiling(till, clients):
    stream = clients.sync(till).models.generate_content_stream(**ASKED)
    assert next(stream).text == "The"
    stream.close()
    till.settled(till.ceiling("0.30", "2.50"), evidence="assumed")


def test_a_stream_that_is_left_half_way_costs_its_ceiling_async(till, clients):
    async def ask(client):
        stream = await client.models.generate_content_stream(**ASKED)
        first = await anext(stream)
        await stream.aclose()
        return first

    assert clients.run(till, ask).text == "The"
    till.settled(till.ceiling("0.30", "2.50"), evidence="assumed")


def test_a_stream_that_is_cut_costs_its_ceiling(till, server, clients):
    server.reply = Completion(cut_after=3)
    with pytest.raises(httpx2.RemoteProtocolError) as caught:
        list(clients.sync(till).models.generate_content_stream(**ASKED))
    assert refusal_from(caught.value) is None
    till.settled(till.ceiling("0.30", "2.50"), evidence="assumed")


def test_a_stream_that_is_cut_costs_its_ceiling_async(till, server, clients):
    server.reply = Completion(cut_after=3)

    async def ask(client):
        return [chunk async for chunk in await client.models.generate_content_stream(**ASKED)]

    with pytest.raises(httpx2.RemoteProtocolError):
        clients.run(till, ask)
    till.settled(till.ceiling("0.30", "2.50"), evidence="assumed")


# ---- retries and refusals ----

RETRIES = {"retry_options": types.HttpRetryOptions(attempts=3, initial_delay=0.001, max_delay=0.001, jitter=0)}


@pytest.mark.parametrize("status", TROUBLES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_each_retry_has_a_hold_of_its_own_and_only_the_served_one_costs(till, server, clients, status, stream):
    server.reply = then(trouble(status))
    models = clients.sync(till, **RETRIES).models
    answers = models.generate_content_stream(**ASKED) if stream else [models.generate_content(**ASKED)]
    assert said(answers) == TEXT
    assert [event for event, _ in till.events] == ["authorize", "void", "authorize", "capture"]
    till.settled(FLASH, tries=2)


@pytest.mark.parametrize("status", TROUBLES)
def test_retries_async(till, server, clients, status):
    server.reply = then(trouble(status))

    async def ask(client):
        return await client.models.generate_content(**ASKED)

    assert clients.run(till, ask, **RETRIES).text == TEXT
    till.settled(FLASH, tries=2)


ASKS = {
    "content": lambda models: models.generate_content(**ASKED),
    "stream": lambda models: list(models.generate_content_stream(**ASKED)),
    "unlimited": lambda models: models.generate_content(model="gemini-2.5-flash", contents="hi"),
    "embed": lambda models: models.embed_content(model="gemini-embedding-001", contents=PROMPT),
}


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_budget_that_is_too_small_is_told_once_and_typed(poor, clients, ask, on_refusal):
    with pytest.raises(Exception, match="budget: ") as caught:
        ask(clients.sync(poor, on_refusal=on_refusal, **RETRIES).models)
    poor.exhausted(caught.value)
    if on_refusal == "respond":
        assert isinstance(caught.value, errors.ClientError)
        assert caught.value.code == 402


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_budget_that_is_too_small_is_told_once_and_typed_async(poor, clients, stream, on_refusal):
    async def ask(client):
        if not stream:
            return await client.models.generate_content(**ASKED)
        return [chunk async for chunk in await client.models.generate_content_stream(**ASKED)]

    with pytest.raises(Exception, match="budget: ") as caught:
        clients.run(poor, ask, on_refusal=on_refusal, **RETRIES)
    refusal = poor.exhausted(caught.value)
    # the output alone is 100 × 2.50 = 250 millionths
    assert dollars((100, "2.50")) < refusal.requested < dollars((100, "0.30"), (100, "2.50"))


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
def test_a_model_without_a_price_is_refused_by_name(till, clients, on_refusal):
    with pytest.raises(Exception, match="has no price") as caught:
        clients.sync(till, on_refusal=on_refusal).models.generate_content(**ASKED | {"model": "gemini-99"})
    refusal = till.refused(caught.value, Unpriced)
    assert "google has no price for 'gemini-99'" in str(refusal)
    assert "Metering(models={'gemini-99': ModelPrice(like=" in str(refusal)


def test_what_a_path_without_a_price_costs_is_not_guessed(till, clients):
    with pytest.raises(errors.ClientError, match="the price of this path") as caught:
        clients.sync(till).caches.create(
            model="gemini-3.5-flash", config=types.CreateCachedContentConfig(contents="hi", ttl="3600s")
        )
    till.refused(caught.value, Unpriced)

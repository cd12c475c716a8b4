"""LangChain's ChatOpenAI, unmodified: invoke and stream, sync and async, with tools, and what each costs in the ledger."""

import anyio
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.support import sdks
from tests.support.sdks import FAMILIES, MINI, TEXT, TROUBLES, dollars, then, trouble
from x402guard import Unpriced
from x402guard.testing import Completion, ToolCall

running, server, till, poor = sdks.running, sdks.server, sdks.till, sdks.poor

pytestmark = pytest.mark.xdist_group("sdk-langchain")

WITH_TOOL = dollars((60, "0.15"), (15, "0.60"))  # 9 + 9 = 18 millionths
ASKS_TOOL = Completion("", tool_calls=(ToolCall("docket", {"n": 42}),), input_tokens=60, output_tokens=15)


@tool
def docket(n: int) -> str:
    """Find a docket by its number."""
    return f"docket {n}"


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


class Models:
    """ChatOpenAI for a till, with a guarded client for either way of asking."""

    def __init__(self, server, family):
        self.url, self.family = server.base("openai") + "/v1", family

    def sync(self, till, *, on_refusal="respond", **more):
        http = till.http(self.family, on_refusal=on_refusal)
        return ChatOpenAI(**{"model": "gpt-4o-mini", "api_key": "k", "base_url": self.url, "http_client": http} | more)

    def run(self, till, ask, *, on_refusal="respond", **more):
        async def main():
            async with till.async_http(self.family, on_refusal=on_refusal) as http:
                return await ask(self.sync(till, http_async_client=http, **more))

        return anyio.run(main)


@pytest.fixture
def models(server, family):
    return Models(server, family)


def said(chunks):
    return "".join(chunk.content for chunk in chunks)


# ---- every way of asking ----


def test_invoke(till, models):
    answer = models.sync(till, max_tokens=100).invoke("hi")
    assert (answer.content, answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == (
        TEXT, 20, 18
    )  # fmt: skip
    till.settled(MINI)


def test_invoke_without_an_output_limit(till, models):
    assert models.sync(till).invoke("hi").content == TEXT
    till.settled(MINI)


def test_ainvoke(till, models):
    async def ask(model):
        return await model.ainvoke("hi")

    assert models.run(till, ask).content == TEXT
    till.settled(MINI)


@pytest.mark.parametrize("stream_usage", [True, False])
def test_stream(till, server, models, stream_usage):
    chunks = list(models.sync(till, stream_usage=stream_usage).stream("hi"))
    assert said(chunks) == TEXT
    counted = [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata]
    assert counted == ([18] if stream_usage else [])
    assert server.calls[0].body["stream_options"] == {"include_usage": True}
    till.settled(MINI)


@pytest.mark.parametrize("stream_usage", [True, False])
def test_astream(till, models, stream_usage):
    async def ask(model):
        return [chunk async for chunk in model.astream("hi")]

    chunks = models.run(till, ask, stream_usage=stream_usage)
    assert said(chunks) == TEXT
    assert any(chunk.usage_metadata for chunk in chunks) is stream_usage
    till.settled(MINI)


def test_a_batch_is_a_hold_for_each(till, models):
    answers = models.sync(till).batch(["hi"] * 4)
    assert [answer.content for answer in answers] == [TEXT] * 4
    till.settled(4 * MINI, calls=4)  # 55.2 millionths


def test_an_agents_turn_with_tools(till, server, models):
    server.reply = then(ASKS_TOOL)
    model = models.sync(till, max_tokens=100).bind_tools([docket])
    turns = [HumanMessage("Which docket is 42?"), model.invoke("Which docket is 42?")]
    [call] = turns[-1].tool_calls
    assert (call["name"], call["args"]) == ("docket", {"n": 42})
    turns.append(ToolMessage(docket.invoke(call["args"]), tool_call_id=call["id"]))
    assert model.invoke(turns).content == TEXT
    till.settled(WITH_TOOL + MINI, calls=2)  # 18 + 13.8 = 31.8 millionths


def test_tools_in_a_stream_async(till, server, models):
    server.reply = ASKS_TOOL

    async def ask(model):
        whole = None
        async for chunk in model.bind_tools([docket]).astream("Which docket is 42?"):
            whole = chunk if whole is None else whole + chunk
        return whole

    [call] = models.run(till, ask).tool_calls
    assert (call["name"], call["args"]) == ("docket", {"n": 42})
    till.settled(WITH_TOOL)


def test_the_responses_api(till, models):
    model = models.sync(till, model="gpt-4o", use_responses_api=True, max_tokens=100)
    assert model.invoke("hi").text == TEXT
    till.settled(dollars((20, "2.50"), (18, "10")))  # 50 + 180 = 230 millionths


def test_embeddings(till, models, family):
    embedder = OpenAIEmbeddings(
        model="text-embedding-3-small", api_key="k", base_url=models.url, http_client=till.http(family),
        check_embedding_ctx_length=False,
    )  # fmt: skip
    assert len(embedder.embed_query("a motion")) == 8
    till.settled(dollars((20, "0.02")))  # 0.4 millionths


# ---- what nobody states, retries and refusals ----


def test_a_stream_that_is_left_half_way_costs_its_ceiling(till, models):
    stream = models.sync(till, max_tokens=100).stream("hi")
    assert [next(stream).content for _ in range(2)] == ["", "The"]
    stream.close()
    till.settled(till.ceiling("0.15", "0.60"), evidence="assumed")


def test_a_stream_that_is_left_half_way_costs_its_ceiling_async(till, models):
    async def ask(model):
        stream = model.astream("hi")
        await anext(stream)
        await stream.aclose()

    models.run(till, ask, max_tokens=100)
    till.settled(till.ceiling("0.15", "0.60"), evidence="assumed")


def test_a_stream_that_is_cut_costs_its_ceiling(till, server, models):
    server.reply = Completion(cut_after=3)
    with pytest.raises(openai.APIConnectionError):
        list(models.sync(till, max_tokens=100).stream("hi"))
    till.settled(till.ceiling("0.15", "0.60"), evidence="assumed")


@pytest.mark.parametrize("status", TROUBLES)
def test_each_retry_has_a_hold_of_its_own_and_only_the_served_one_costs(till, server, models, status):
    server.reply = then(trouble(status))
    assert said(models.sync(till).stream("hi")) == TEXT
    assert [event for event, _ in till.events] == ["authorize", "void", "authorize", "capture"]
    till.settled(MINI, tries=2)


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
def test_a_budget_that_is_too_small_is_told_once_and_typed(poor, models, on_refusal):
    async def ask(model):
        return await model.ainvoke("hi")

    async def stream(model):
        return [chunk async for chunk in model.astream("hi")]

    more = {"on_refusal": on_refusal, "max_tokens": 100}
    ways = [
        lambda: models.sync(poor, **more).invoke("hi"),
        lambda: list(models.sync(poor, **more).stream("hi")),
        lambda: models.run(poor, ask, **more),
        lambda: models.run(poor, stream, **more),
    ]
    for tries, way in enumerate(ways, start=1):
        with pytest.raises(Exception, match="budget: ") as caught:
            way()
        refusal = poor.exhausted(caught.value, tries=tries)
        assert dollars((100, "0.60")) < refusal.requested < dollars((100, "0.15"), (100, "0.60"))


@pytest.mark.parametrize("on_refusal", ["respond", "raise"])
def test_a_model_without_a_price_is_refused_by_name(till, models, on_refusal):
    with pytest.raises(Exception, match="has no price") as caught:
        models.sync(till, model="gpt-99", on_refusal=on_refusal).invoke("hi")
    till.refused(caught.value, Unpriced)

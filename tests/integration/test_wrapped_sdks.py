"""What the vendors' own packages answer with, handed to ``wrap``: it costs what the same call costs over the guarded transport."""

import json
import secrets
import sys
import time
import types as kinds
import warnings
from dataclasses import dataclass

import anthropic
import anyio
import cohere
import httpx
import httpx2
import openai
import pydantic
import pytest
from google import genai
from google.genai import types
from mistralai.client import Mistral

from tests.support import sdks
from tests.support.sdks import HI, MINI, dollars
from x402guard import ConfigError, SessionTripped, Unpriced
from x402guard.testing import Completion

running, server, till, poor = sdks.running, sdks.server, sdks.till, sdks.poor

pytestmark = [
    pytest.mark.xdist_group("sdk-wrapped"),
    pytest.mark.filterwarnings("ignore:The model 'claude-sonnet-4-5' is deprecated:DeprecationWarning"),
]

PROMPT = "The motion to suppress. " * 100  # long enough for what the answers say that it holds
LONG = [{"role": "user", "content": PROMPT}]
KEPT = [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
PLAIN = Completion()
RICH = Completion(input_tokens=100, cached_tokens=64, output_tokens=18, reasoning_tokens=5)
WRITTEN = Completion(input_tokens=20, cached_tokens=64, cache_write_tokens=9, cache_write_1h_tokens=4, output_tokens=18)
THOUGHT = Completion(input_tokens=100, cached_tokens=64, output_tokens=18, thoughts_tokens=40)
CHARGED = Completion(input_tokens=20, output_tokens=18, cost=0.0123)


class Docket(pydantic.BaseModel):
    n: int


PARSED = Completion('{"n": 42}')


def of_openai(server, http, provider="openai", path="/v1"):
    return openai.OpenAI(api_key="k", base_url=server.base(provider) + path, http_client=http)


def of_anthropic(server, http):
    return anthropic.Anthropic(api_key="k", base_url=server.base("anthropic"), http_client=http)


def of_google(server, http):
    options = types.HttpOptions(base_url=server.base("google"), httpx_client=http)
    return genai.Client(api_key="k", http_options=options).models


def of_mistral(server, http):
    return Mistral(api_key="k", server_url=server.base("mistral"), client=http)


def of_cohere(server, http):
    return cohere.ClientV2(api_key="k", base_url=server.base("cohere"), httpx_client=http)


def of_groq(server, http):
    return of_openai(server, http, "groq", "/openai/v1")


def of_openrouter(server, http):
    return of_openai(server, http, "openrouter", "/api/v1")


def streamed_by_openai(client):
    with client.chat.completions.stream(
        model="gpt-4o-mini", messages=HI, max_completion_tokens=100, stream_options={"include_usage": True}
    ) as stream:
        return stream.get_final_completion()


def streamed_by_anthropic(client):
    with client.messages.stream(model="claude-sonnet-4-5", messages=HI, max_tokens=100) as stream:
        return stream.get_final_message()


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a package: how it is made, what is answered, what ``wrap`` has to be told, and what it costs by hand."""

    connect: object
    ask: object
    reply: Completion = PLAIN
    named: tuple = ()
    cost: object = MINI


def chat(model, **more):
    return lambda client: client.chat.completions.create(
        model=model, messages=LONG, max_completion_tokens=100, **more
    )  # fmt: skip


def limited(**more):
    return types.GenerateContentConfig(max_output_tokens=100, **more)


def named(provider=None, model=None):
    return tuple((key, value) for key, value in (("provider", provider), ("model", model)) if value)


GEMINI, COMMAND = "gemini-2.5-flash", "command-a-03-2025"
EMBEDS = {"model": "embed-v4.0", "input_type": "search_document", "embedding_types": ["float"], "texts": ["a motion"]}
CALLS = {  # dollars a million tokens, of `x402guard prices list`; MINI and its like are 20 tokens in and 18 out
    "chat": Call(connect=of_openai, ask=chat("gpt-4o-mini")),
    # 36 x 2.50 + 64 cached x 1.25 + 18 x 10; reasoning lies inside
    "chat-rich": Call(connect=of_openai, ask=chat("gpt-4o"), reply=RICH, cost=dollars((36, "2.50"), (64, "1.25"), (18, "10"))),
    "chat-priority": Call(connect=of_openai, ask=chat("gpt-4o", service_tier="auto"), reply=Completion(service_tier="priority"),
                          cost=dollars((20, "4.25"), (18, "17"))),
    "chat-parsed": Call(connect=of_openai, ask=lambda client: client.chat.completions.parse(
        model="gpt-4o-mini", messages=LONG, max_completion_tokens=100, response_format=Docket), reply=PARSED),
    "chat-streamed": Call(connect=of_openai, ask=streamed_by_openai),
    "responses": Call(connect=of_openai, ask=lambda client: client.responses.create(
        model="gpt-4o", input=PROMPT, max_output_tokens=100), reply=RICH, cost=dollars((36, "2.50"), (64, "1.25"), (18, "10"))),
    "responses-parsed": Call(connect=of_openai, ask=lambda client: client.responses.parse(
        model="gpt-4o-mini", input=PROMPT, max_output_tokens=100, text_format=Docket), reply=PARSED),
    "embeddings": Call(connect=of_openai, ask=lambda client: client.embeddings.create(
        model="text-embedding-3-small", input=["a motion"]), cost=dollars((20, "0.02"))),
    # beside 20 x 3: 64 read x 0.30, 5 written x 3.75, 4 for an hour x 6; 18 x 15
    "messages": Call(connect=of_anthropic, ask=lambda client: client.messages.create(
        model="claude-sonnet-4-5", messages=[{"role": "user", "content": KEPT}], max_tokens=100), reply=WRITTEN,
        cost=dollars((20, "3"), (64, "0.30"), (5, "3.75"), (4, "6"), (18, "15"))),
    "messages-streamed": Call(connect=of_anthropic, ask=streamed_by_anthropic, cost=dollars((20, "3"), (18, "15"))),
    # 36 x 0.30 + 64 cached x 0.03 + (18 + 40 thoughts) x 2.50
    "gemini": Call(connect=of_google, ask=lambda client: client.generate_content(
        model=GEMINI, contents=PROMPT, config=limited()), reply=THOUGHT, cost=dollars((36, "0.30"), (64, "0.03"), (58, "2.50"))),
    "gemini-parsed": Call(connect=of_google, ask=lambda client: client.generate_content(
        model=GEMINI, contents=PROMPT, config=limited(response_schema=Docket, response_mime_type="application/json")),
        reply=PARSED, cost=dollars((20, "0.30"), (18, "2.50"))),
    "gemini-last-chunk": Call(connect=of_google, ask=lambda client: list(client.generate_content_stream(
        model=GEMINI, contents=PROMPT, config=limited()))[-1], reply=THOUGHT, cost=dollars((36, "0.30"), (64, "0.03"), (58, "2.50"))),
    "gemini-embeddings": Call(connect=of_google, ask=lambda client: client.embed_content(
        model="gemini-embedding-001", contents="a motion"), named=named(model="gemini-embedding-001"), cost=dollars((20, "0.15"))),
    "mistral": Call(connect=of_mistral, ask=lambda client: client.chat.complete(
        model="mistral-small-latest", messages=LONG, max_tokens=100), named=named("mistral"), cost=dollars((20, "0.15"), (18, "0.60"))),
    "mistral-embeddings": Call(connect=of_mistral, ask=lambda client: client.embeddings.create(
        model="mistral-embed", inputs=["a motion"]), named=named("mistral"), cost=dollars((20, "0.10"))),
    "cohere": Call(connect=of_cohere, ask=lambda client: client.chat(model=COMMAND, messages=LONG, max_tokens=100),
                   named=named(model=COMMAND), cost=dollars((20, "2.50"), (18, "10"))),
    "cohere-embeddings": Call(connect=of_cohere, ask=lambda client: client.embed(**EMBEDS), named=named(model="embed-v4.0"),
                              cost=dollars((20, "0.12"))),
    "groq": Call(connect=of_groq, ask=chat("openai/gpt-oss-120b"), named=named("groq"), cost=dollars((20, "0.15"), (18, "0.60"))),
    "openrouter": Call(connect=of_openrouter, ask=chat("openai/gpt-4o-mini"), reply=CHARGED, named=named("openrouter"),
                       cost=dollars((12_300, "1"))),  # it says itself: $0.0123
}  # fmt: skip
HTTPX = (of_cohere,)
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def answered(till, call):
    """What the package returns over a client that no guard sees."""
    till.server.reply = call.reply
    client = httpx.Client if call.connect in HTTPX else httpx2.Client
    return call.ask(call.connect(till.server, till.keep(client(trust_env=False))))


@each_call
def test_an_answer_costs_what_the_same_call_costs_over_the_transport(till, call):
    answer = answered(till, call)
    assert till.session.spent == 0
    with till.session.child("wrapped", budget="$1") as wrapped:
        assert wrapped.wrap(answer, **dict(call.named)) is answer
    with till.session.child("guarded", budget="$1") as guarded:
        family = "httpx" if call.connect in HTTPX else "httpx2"
        call.ask(call.connect(till.server, till.http(family)))
    assert (wrapped.spent, guarded.spent) == (call.cost, call.cost)
    for paid in (wrapped, guarded):
        report = paid.report().to_dict()
        assert (report["llm"]["calls"], report["held"], report["refusals"]) == (1, "0.00", [])
        assert report["evidence"]["provider_usage"] == report["spent"]
    used = [event["usage"] for event in till.session.report().to_dict()["events"] if event["event"] == "capture"]
    assert used[0] == used[1]


@pytest.mark.parametrize("name", ["chat", "responses", "messages", "gemini", "mistral", "cohere"])
def test_an_answer_is_wrapped_in_async_code_as_well(till, name):
    call = CALLS[name]
    answer = answered(till, call)

    async def main():
        return await till.session.awrap(answer, **dict(call.named))

    assert anyio.run(main) is answer
    assert till.session.spent == call.cost


def test_the_guarded_clients_answer_is_not_to_be_wrapped_again_and_would_count_twice(till):
    call = CALLS["chat"]
    till.session.wrap(call.ask(call.connect(till.server, till.http())))
    assert till.session.spent == 2 * MINI, "wrap books what it is given: it cannot know that the transport saw it"


def test_a_budget_that_is_too_small_is_overshot_and_tripped(poor):
    answer = answered(poor, CALLS["chat"])
    assert poor.session.wrap(answer) is answer
    with pytest.raises(SessionTripped, match="this call is in the ledger"):
        poor.session.wrap(answer)
    report = poor.session.report().to_dict()
    assert (poor.session.spent, report["terminated_by"]) == (2 * MINI, "overshoot")


# ---- answers of no package here: Bedrock's, protocol buffers, what looks like them ----

NOVA = "amazon.nova-lite-v1:0"  # 0.06 in, 0.015 read from a cache, 0.24 out
CONVERSED = {
    "ResponseMetadata": {"RequestId": "5a1b", "HTTPStatusCode": 200, "HTTPHeaders": {}, "RetryAttempts": 0},
    "output": {"message": {"role": "assistant", "content": [{"text": "Yes."}]}},
    "stopReason": "end_turn",
    "usage": {"inputTokens": 20, "outputTokens": 18, "totalTokens": 98, "cacheReadInputTokens": 60,
              "cacheWriteInputTokens": 0, "cacheDetails": []},
    "metrics": {"latencyMs": 551},
}  # fmt: skip


def test_an_answer_of_bedrock_costs_what_its_model_costs(till):
    assert till.session.wrap(CONVERSED, model=NOVA) is CONVERSED
    assert till.session.spent == dollars((20, "0.06"), (60, "0.015"), (18, "0.24"))
    with pytest.raises(ValueError, match=r'^model: .*write session\.wrap\(response, model="'):
        till.session.wrap(CONVERSED)
    with pytest.raises(Unpriced, match=f"openai has no price for '{NOVA}'"):
        till.session.wrap(CONVERSED, model=NOVA, provider="openai")
    assert till.session.report().to_dict()["llm"]["calls"] == 1


def protobuf_answer():
    """A message like Vertex AI's, of a descriptor made here."""
    pool = pytest.importorskip("google.protobuf.descriptor_pool", reason="no google.protobuf: no gRPC client either")
    from google.protobuf import descriptor_pb2, message_factory

    file = descriptor_pb2.FileDescriptorProto(name=f"{secrets.token_hex(4)}.proto", package="x402", syntax="proto3")
    usage = file.message_type.add(name="UsageMetadata")
    for number, field in enumerate(("prompt_token_count", "candidates_token_count", "thoughts_token_count"), 1):
        usage.field.add(name=field, number=number, type=5, label=1)  # an optional int32
    answer = file.message_type.add(name="GenerateContentResponse")
    answer.field.add(name="model_version", number=1, type=9, label=1)
    answer.field.add(name="usage_metadata", number=2, type=11, label=1, type_name=".x402.UsageMetadata")
    made = pool.DescriptorPool()
    made.Add(file)
    kind = message_factory.GetMessageClass(made.FindMessageTypeByName("x402.GenerateContentResponse"))
    counts = {"prompt_token_count": 100, "candidates_token_count": 18, "thoughts_token_count": 40}
    return kind(model_version=GEMINI, usage_metadata=counts)


class _Pb(type):
    def pb(cls, message):
        return message.inner


class ProtoPlus(metaclass=_Pb):
    """What proto-plus makes of a message: it hands out the one within by its class."""

    def __init__(self, inner):
        self.inner = inner


@pytest.mark.parametrize("wrapped", [lambda message: message, ProtoPlus], ids=["message", "proto-plus"])
def test_a_message_of_protocol_buffers_costs_what_it_says(till, wrapped):
    till.session.wrap(wrapped(protobuf_answer()))
    assert till.session.spent == dollars((100, "0.30"), (58, "2.50"))


class Aliased(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(alias_generator=pydantic.alias_generators.to_camel, populate_by_name=True)
    prompt_token_count: int = 100
    candidates_token_count: int = 18
    thoughts_token_count: int | None = None


class OfAliased(pydantic.BaseModel):
    counted: Aliased | None = pydantic.Field(default=None, alias="usageMetadata")
    model: str = GEMINI


@dataclass
class OfParts:
    model: str
    usage: object


class WithToDict:
    def to_dict(self):
        return {"model": "gpt-4o-mini", "usage": {"prompt_tokens": 20, "completion_tokens": 18}}


def chat_of(**more):
    return {"model": "gpt-4o-mini", "usage": COUNTS, **more}


COUNTS = {"prompt_tokens": 20, "completion_tokens": 18}
MESSAGE = {"type": "message", "model": "claude-sonnet-4-5"}
SHAPES = {
    "aliases": (OfAliased(usageMetadata=Aliased()), dollars((100, "0.30"), (18, "2.50"))),
    "dataclass": (OfParts("gpt-4o-mini", COUNTS), MINI),
    "to-dict": (WithToDict(), MINI),
    "message": ({**MESSAGE, "usage": {"input_tokens": 20, "output_tokens": 18}}, dollars((20, "3"), (18, "15"))),
    "parts": ({"model": "gpt-4o-mini", "usage": openai.types.CompletionUsage(**COUNTS, total_tokens=38)}, MINI),
    "mapping": (kinds.MappingProxyType({"model": "gpt-4o-mini", "usage": kinds.MappingProxyType(COUNTS)}), MINI),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "cost"), SHAPES.values(), ids=SHAPES)
def test_what_can_be_taken_apart_is(till, answer, cost):
    assert till.session.wrap(answer) is answer
    assert till.session.spent == cost


def test_a_usage_object_of_a_package_is_reported_as_it_is(till):
    for name, model in (("chat-rich", "gpt-4o"), ("responses", "gpt-4o"), ("messages", "claude-sonnet-4-5")):
        before = till.session.spent
        provider = "anthropic" if name == "messages" else "openai"
        till.session.record_usage(provider, model, answered(till, CALLS[name]).usage)
        assert till.session.spent - before == CALLS[name].cost
    before = till.session.spent
    till.session.record_usage("google", GEMINI, answered(till, CALLS["gemini"]).usage_metadata)
    assert till.session.spent - before == CALLS["gemini"].cost


def test_a_package_whose_dump_warns_of_a_field_beside_the_usage_is_booked_all_the_same(till):
    answer = answered(till, CALLS["chat"])
    answer.system_fingerprint = (
        5  # as a compatible server answers: pydantic warns that it is no text, once it is dumped
    )
    with pytest.warns(UserWarning, match="serialized value may not be as expected"):
        answer.model_dump()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        till.session.wrap(answer)
    assert (till.session.spent, [str(warning.message) for warning in caught]) == (MINI, [])


def test_however_deep_it_is_what_lies_beside_the_usage_loses_no_call(till):
    outer = inner = {}
    for _ in range(2_000):
        inner["x"] = inner = {}
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000)
    try:
        till.session.wrap(chat_of(x=outer))
    finally:
        sys.setrecursionlimit(before)
    assert till.session.spent == MINI


# ---- what cannot be wrapped ----


STREAM = {"model": "gpt-4o-mini", "messages": HI, "stream": True}
CANNOT = {
    "text": (lambda till: "Yes.", TypeError, "a value of type str"), "none": (lambda till: None, TypeError, "a value of type NoneType"),
    "generator": (lambda till: (x for x in ()), TypeError, "a value of type generator"), "list": (lambda till: [], TypeError, "a value of type list"),
    "http": (lambda till: httpx.Response(200, json=chat_of()), TypeError, "a value of type Response"),
    "bytes": (lambda till: json.dumps(chat_of()).encode(), TypeError, "a value of type bytes"),
    "class": (lambda till: Aliased, TypeError, "a value of type "), "namespace": (lambda till: kinds.SimpleNamespace(), TypeError, "a value of type Simple"),
    "stream": (lambda till: of_openai(till.server, till.keep(httpx2.Client())).chat.completions.create(**STREAM),
               TypeError, "a value of type Stream"),
    "raw": (lambda till: of_openai(till.server, till.keep(httpx2.Client())).chat.completions.with_raw_response.create(
        model="gpt-4o-mini", messages=HI), TypeError, "a value of type LegacyAPIResponse"),
    "empty": (lambda till: {}, ValueError, "it states no readable usage"),
    "null": (lambda till: chat_of(usage=None), ValueError, "it states no readable usage"),
    "usage-list": (lambda till: chat_of(usage=[COUNTS]), ValueError, "it states no readable usage"),
    "silent-chat": (lambda till: answered(till, Call(connect=of_openai, ask=chat("gpt-4o-mini"), reply=Completion(omit_usage=True))),
                    ValueError, "it states no readable usage"),
    "silent-gemini": (lambda till: answered(till, Call(connect=of_google, ask=CALLS["gemini"].ask, reply=Completion(omit_usage=True))),
                      ValueError, "it states no readable usage"),
    "null-aliased": (lambda till: OfAliased(), ValueError, "it states no readable usage"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "why"), CANNOT.values(), ids=CANNOT)
def test_what_states_no_usage_is_refused_by_name_and_books_nothing(till, make, error, why):
    answer, begun = make(till), time.monotonic()
    with pytest.raises(error, match=rf"^response: {why}.*session\.record_usage\(provider, model, usage\)"):
        till.session.wrap(answer)
    assert time.monotonic() - begun < 2
    report = till.session.report().to_dict()
    assert (till.session.spent, till.session.held, report["events"], report["refusals"]) == (0, 0, [], [])


@pytest.mark.parametrize("given", ["", "  ", 5, b"openai", ["openai"]], ids=repr)
@pytest.mark.parametrize("field", ["provider", "model"])
def test_a_provider_and_a_model_are_named_by_text_here_too(till, field, given):
    with pytest.raises((ConfigError, ValueError), match=rf"^{field}: .*write "):
        till.session.wrap(chat_of(), **{field: given})
    assert till.session.report().to_dict()["events"] == []

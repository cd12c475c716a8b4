"""What a request asks for: model, limit, choices; and every text in it is counted, wherever it stands."""

import base64
import json
import struct
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from x402guard import Metering
from x402guard.ledger.authorize import Refusal
from x402guard.llm.ceiling import find_ceiling
from x402guard.llm.request import Call, ask_for_usage, read_call, write_limit
from x402guard.vendors.prices import PricedModel
from x402guard.vendors.routes import find_endpoint, find_route

PATHS = {
    "chat": ("api.openai.com", "/v1/chat/completions"),
    "completions": ("api.openai.com", "/v1/completions"),
    "responses": ("api.openai.com", "/v1/responses"),
    "embeddings": ("api.openai.com", "/v1/embeddings"),
    "messages": ("api.anthropic.com", "/v1/messages"),
    "gemini": ("generativelanguage.googleapis.com", "/v1beta/models/gemini-2.5-pro:generateContent"),
    "gemini_embed": ("generativelanguage.googleapis.com", "/v1beta/models/gemini-embedding-001:batchEmbedContents"),
    "gemini_stream": ("generativelanguage.googleapis.com", "/v1beta/models/gemini-2.5-pro:streamGenerateContent"),
    "mistral": ("api.mistral.ai", "/v1/chat/completions"),
    "cohere": ("api.cohere.com", "/v2/chat"),
    "cohere_embed": ("api.cohere.com", "/v2/embed"),
    "azure": ("r.openai.azure.com", "/openai/deployments/my-gpt/chat/completions"),
    "x-ai": ("api.x.ai", "/v1/chat/completions"),
    "openrouter": ("openrouter.ai", "/api/v1/chat/completions"),
    "groq": ("api.groq.com", "/openai/v1/chat/completions"),
}  # fmt: skip
PIXELS = base64.b64encode(b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 640, 480) + bytes(5)).decode()


def route(place):
    host, path = PATHS[place]
    return find_route(find_endpoint(host, path, ()), path)


def read(place, body, **more):
    raw = body if isinstance(body, bytes) else json.dumps({"model": "some-model", **body}).encode()
    return read_call(route(place), raw, **more)


class OneDollar:
    """A dollar a million tokens, in or out."""

    def find(self, provider, model, at_unix):
        units = frozenset({"input_tokens", "output_tokens", "input_audio_tokens"})
        return PricedModel(provider, model, at_unix, "test", "1", None, units)

    def cost(self, priced, usage, context):
        return Decimal(usage.get("input_tokens", 0) + usage.get("output_tokens", 0)) / 10**6


class Letters:
    def count(self, text, *, provider, model):
        return len(text)


def tokens(place, body):
    """Input tokens held for, every letter counted as one; None where the call is refused."""
    call = read(place, body)
    ceiling = call if isinstance(call, Refusal) else find_ceiling(call, Metering(), OneDollar(), Letters(), 0)
    return None if isinstance(ceiling, Refusal) else ceiling.input_tokens


# Model, limit, choices.


@pytest.mark.parametrize(
    ("place", "body", "limit"),
    [
        ("chat", {}, None), ("chat", {"max_completion_tokens": 7}, 7), ("chat", {"max_tokens": 7}, 7),
        ("chat", {"max_tokens": 7, "max_completion_tokens": 9}, 9), ("chat", {"max_tokens": None}, None),
        ("chat", {"max_output_tokens": 7}, None), ("azure", {"max_completion_tokens": 7}, 7),
        ("mistral", {"max_tokens": 7}, 7), ("completions", {"max_tokens": 7}, 7), ("cohere", {"max_tokens": 7}, 7),
        ("responses", {"max_output_tokens": 7}, 7), ("responses", {"max_tokens": 7}, None),
        ("messages", {"max_tokens": 7}, 7), ("embeddings", {"input": "x"}, 0), ("gemini_embed", {"requests": []}, 0),
        ("cohere_embed", {"texts": ["x"]}, 0), ("gemini", {"maxOutputTokens": 7}, None),
        ("gemini", {"generationConfig": {"maxOutputTokens": 7}}, 7),
        ("gemini", {"generationConfig": {"max_output_tokens": 7}}, 7),
        ("gemini", {"generation_config": {"max_output_tokens": 7}}, 7),
        ("gemini", {"generationConfig": {"maxOutputTokens": 7}, "generation_config": {"max_output_tokens": 9}}, 9),
    ],
)  # fmt: skip
def test_the_output_limit_stands_where_its_provider_reads_it(place, body, limit):
    assert read(place, body).limit == limit


@pytest.mark.parametrize(
    ("place", "body", "choices"),
    [
        ("chat", {}, 1), ("chat", {"n": 3}, 3), ("chat", {"n": None}, 1), ("mistral", {"n": 3}, 3),
        ("responses", {"n": 3}, 1), ("completions", {"n": 2, "best_of": 5}, 5),
        ("completions", {"prompt": "one"}, 1), ("completions", {"prompt": [1, 2, 3]}, 1),
        ("completions", {"prompt": ["one", "two", "three"]}, 3), ("completions", {"prompt": [[1, 2], [3]], "n": 4}, 8),
        ("gemini", {"generationConfig": {"candidateCount": 3}}, 3),
        ("gemini", {"generation_config": {"candidate_count": 3}}, 3),
    ],
)  # fmt: skip
def test_answers_are_as_many_as_the_provider_writes(place, body, choices):
    assert read(place, body).choices == choices


@pytest.mark.parametrize("value", [0, -1, 7.0, 7.5, True, "7", [7], {}, 10**13])
@pytest.mark.parametrize(
    ("place", "field"),
    [("chat", "max_tokens"), ("chat", "max_completion_tokens"), ("chat", "n"), ("responses", "max_output_tokens"),
     ("messages", "max_tokens"), ("completions", "best_of"), ("cohere", "max_tokens"),
     ("gemini", "generationConfig.maxOutputTokens"), ("gemini", "generation_config.candidate_count")],
)  # fmt: skip
def test_a_limit_that_is_no_number_is_refused_by_its_name(place, field, value):
    value = -2 if (place, value) == ("messages", 0) else value  # 0 fills the cache there
    body = value
    for key in reversed(field.split(".")):
        body = {key: body}
    refusal = read(place, body)
    assert isinstance(refusal, Refusal)
    assert refusal.rule == "unreadable_request"
    assert refusal.reason.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (None, "body: it streams past max_body_bytes"),
        (b"", "body: not JSON"),
        (b"model=gpt-4o", "body: not JSON"),
        (b"[]", "body: a JSON list"),
        (b'{"model": "a", "model": "b"}', "body: a key appears twice in one object ('model')"),
        (
            b'{"model": "a", "messages": [{"content": "x", "content": "y"}]}',
            "body: a key appears twice in one object ('content')",
        ),
        (b'{"model": "a", "temperature": NaN}', "body: NaN is not a JSON number"),
        (b'{"model": "a", "n": ' + b"9" * 500 + b"}", "body: a number with hundreds of digits"),
        (b'{"model": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body: nested too deeply"),
        (b'{"model": "\xff"}', "body: not JSON"),
        (b"{}", "model: the request names no model"),
        (b'{"model": " "}', "model: "),
        (b'{"model": 5}', "model: "),
        (json.dumps({"model": "x" * 301}).encode(), "model: "),
    ],
)
def test_what_cannot_be_read_is_refused_and_says_why(raw, says):
    refusal = read_call(route("chat"), raw)
    assert refusal.rule == "unreadable_request"
    assert says in refusal.reason


@pytest.mark.parametrize("key", ["messages", "parameters"])
def test_no_depth_of_nesting_breaks_the_reader(key):
    for depth in range(20, 1100):
        body = f'{{"model":"m","{key}":{"[" * depth}{"]" * depth}}}'
        assert isinstance(read_call(route("chat"), body.encode()), (Call, Refusal))


def test_a_packed_body_is_refused_by_its_header():
    assert "content-encoding: a gzip body" in read("chat", {}, content_encoding="gzip").reason
    assert read("chat", {}, content_encoding="Identity ").model == "some-model"


def test_the_path_names_the_model_where_it_does_and_the_body_elsewhere():
    assert read("chat", {"model": "gpt-4o"}).model == "gpt-4o"
    assert read("azure", {"model": "cheap"}).model == "my-gpt"
    assert read("gemini", {"model": "cheap"}).model == "gemini-2.5-pro"
    assert read("chat", {"model": "models/gemini-2.5-pro"}).model == "gemini-2.5-pro"


def test_what_a_call_asks_for_beside_its_text():
    asked = read("chat", {"stream": True, "service_tier": "priority", "modalities": ["text", "audio"]})
    assert (asked.streams, asked.speaks, asked.context) == (True, True, {"service_tier": "priority"})
    assert (read("chat", {"stream": "yes"}).streams, read("gemini_stream", {}).streams) == (False, True)
    fast = read("messages", {"speed": "fast", "inference_geo": "us", "max_tokens": 5})
    assert (fast.context, fast.us_only, fast.caches) == ({"speed": "fast"}, True, False)
    marked = {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}
    assert read("messages", marked).caches


# What is written into a request of a caller who did not say.


@pytest.mark.parametrize(
    ("place", "body", "field"),
    [
        ("chat", {"max_tokens": None}, "max_completion_tokens"),
        ("azure", {}, "max_completion_tokens"),
        ("mistral", {}, "max_tokens"),
        ("groq", {}, "max_tokens"),
        ("completions", {}, "max_tokens"),
        ("responses", {}, "max_output_tokens"),
        ("messages", {}, "max_tokens"),
        ("cohere", {}, "max_tokens"),
        ("gemini", {"generationConfig": {"temperature": 1}}, "maxOutputTokens"),
        ("gemini", {"generation_config": {"temperature": 1}}, "maxOutputTokens"),
        ("gemini", {}, "maxOutputTokens"),
    ],
)
def test_a_limit_is_written_where_it_is_read_and_nothing_else_changes(place, body, field):
    before = read(place, {**body, "x": [1, {"y": "z"}]})
    written = write_limit(before, 1_234)
    after = read(place, written)
    assert (before.limit, after.limit) == (None, 1_234)
    assert field in json.dumps(written)
    assert written["x"] == [1, {"y": "z"}]
    assert "1234" not in json.dumps(before.body), "the caller's own body is not touched"


def test_usage_is_asked_for_and_other_stream_options_stay():
    body = {"stream": True, "stream_options": {"include_obfuscation": False}}
    asked = ask_for_usage(body)
    assert asked["stream_options"] == {"include_obfuscation": False, "include_usage": True}
    assert body["stream_options"] == {"include_obfuscation": False}
    assert read("chat", asked).asked_for_usage
    assert not read("chat", {**body, "stream_options": {"include_usage": False}}).asked_for_usage


# Text: all of it is counted, wherever it stands and whatever it looks like.

OWN = {"note": "d"}
"""Stands for an object whose keys are the caller's own: what a tool is called with, a document, metadata."""

LINKS = {"image_url": "https://a/b.png", "file_id": "file-1", "source": {"type": "url", "url": "https://a/b.pdf"},
         "image": {"type": "base64", "media_type": "image/png", "data": PIXELS}, "fileUri": "gs://a/b", "n": 1.5}  # fmt: skip
SCHEMA = {"type": "object", "properties": OWN}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": json.dumps(LINKS)}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "description": "d", "schema": SCHEMA}}

BODIES = {
    "chat": {
        "messages": [
            {"role": "developer", "content": "be brief", "name": "boss"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": None, "refusal": "no", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        ],
        "tools": [FUNCTION, {"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "definition": "x"}}}],
        "functions": [{"name": "f", "parameters": SCHEMA}], "response_format": FORMAT, "stop": ["end"],
        "prediction": {"type": "content", "content": "guess"}, "metadata": OWN, "max_tokens": 5,
    },
    "completions": {"prompt": ["once", "twice"], "suffix": "end", "max_tokens": 5},
    "responses": {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps(LINKS)},
            {"type": "function_call_output", "call_id": "c", "output": json.dumps(LINKS)},
            {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "code"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thought"}], "encrypted_content": "gAAA"},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}],
        "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, "max_output_tokens": 5,
    },
    "embeddings": {"input": ["one", "two"]},
    "messages": {
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "document", "title": "t", "context": "c",
             "source": {"type": "text", "media_type": "text/plain", "data": "a document"}}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
             {"type": "tool_use", "id": "t", "name": "f", "input": OWN}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
             {"type": "text", "text": "sunny"}, {"type": "search_result", "source": "https://a/b", "title": "t",
              "content": [{"type": "text", "text": "found"}]}]}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "input_examples": [OWN]}], "max_tokens": 5,
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": "be brief"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hello"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": OWN}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": OWN}}]},
            {"role": "model", "parts": [{"executableCode": {"language": "PYTHON", "code": "1"}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "description": "d", "parameters": SCHEMA}]}],
        "generationConfig": {"maxOutputTokens": 5, "responseSchema": SCHEMA, "stopSequences": ["end"]},
    },
    "gemini_stream": {
        "system_instruction": {"parts": [{"text": "be brief"}]},
        "contents": [{"parts": [{"function_call": {"name": "f", "args": OWN}}, {"text": "hello"},
                                {"function_response": {"name": "f", "response": OWN}}]}],
        "tools": [{"function_declarations": [{"name": "f", "parameters_json_schema": SCHEMA}]}],
        "generation_config": {"max_output_tokens": 5, "response_json_schema": SCHEMA},
    },
    "gemini_embed": {"requests": [{"content": {"parts": [{"text": "hello"}]}, "title": "t"}]},
    "mistral": {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"},
                     {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": OWN}}]}],
        "tools": [FUNCTION], "response_format": FORMAT, "max_tokens": 5,
    },
    "cohere": {
        "messages": [{"role": "user", "content": "hello"},
                     {"role": "assistant", "tool_plan": "plan", "tool_calls": [CALLED]},
                     {"role": "tool", "tool_call_id": "c", "content": [{"type": "document", "document": {"data": OWN}}]}],
        "documents": ["a text", {"id": "d", "data": OWN}], "tools": [FUNCTION], "max_tokens": 5,
        "response_format": {"type": "json_object", "json_schema": SCHEMA},
    },
    "cohere_embed": {"texts": ["one", "two"]},
}  # fmt: skip

SECRET = "geheim " * 300
DISGUISES = {
    "plain": "",
    "a picture": f"data:image/png;base64,{PIXELS}",
    "a document": "data:text/plain;base64,",
    "a link": "https://a.example/b.png?q=",
    "a stored file": "files/",
    "an id": "file-",
}


def texts(value, path=()):
    """The path of every text in a body, but for those that say what kind of thing stands there."""
    if isinstance(value, str):
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key not in ("type", "role"):
            yield from texts(item, (*path, key))


def own_objects(value, path=()):
    """The path of every ``OWN`` in a body."""
    if value == OWN:
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from own_objects(item, (*path, key))


def at(body, path):
    for key in path:
        body = body[key]
    return body


def changed(body, path, value):
    """A copy of *body* in which *value* stands at *path*."""
    copy = json.loads(json.dumps(body))
    at(copy, path[:-1])[path[-1]] = value
    return copy


@pytest.mark.parametrize("place", BODIES)
def test_a_real_request_is_text_alone(place):
    call = read(place, BODIES[place])
    assert (call.media, call.unbounded) == ((), ())
    assert tokens(place, BODIES[place]) >= sum(len(at(BODIES[place], path)) for path in texts(BODIES[place]))


@pytest.mark.parametrize("place", [place for place in BODIES if [*own_objects(BODIES[place])]])
def test_what_is_the_callers_own_is_text_even_where_it_looks_like_media_or_links(place):
    taken = []
    for path in own_objects(BODIES[place]):
        call = read(place, changed(BODIES[place], path, LINKS))
        taken.extend(part.field for part in (*call.media, *call.unbounded))
    assert taken == []


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("place", BODIES)
def test_a_long_text_anywhere_in_a_body_is_counted(place, disguise):
    before, leaks = tokens(place, BODIES[place]), []
    for path in texts(BODIES[place]):
        after = tokens(place, changed(BODIES[place], path, DISGUISES[disguise] + SECRET))
        if after is not None and after < before + len(SECRET) - len(at(BODIES[place], path)):
            leaks.append(path)
    assert leaks == []


@pytest.mark.parametrize("place", [place for place in BODIES if [*own_objects(BODIES[place])]])
def test_long_names_and_numbers_are_counted_where_a_body_has_its_callers_own(place):
    before, leaks = tokens(place, BODIES[place]), []
    for path in own_objects(BODIES[place]):
        if path == ("metadata",):
            continue  # no model sees it
        for hidden in ({SECRET: "x"}, {"x": int("123456789" * 40)}, {"x": [True] * 2_000}):
            after = tokens(place, changed(BODIES[place], path, hidden))
            if after is not None and after < before + 100:
                leaks.append((path, str(hidden)[:12]))
    assert leaks == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    place=st.sampled_from(sorted(BODIES)), around=JSON, where=st.sampled_from(["messages", "input", "contents", "x"])
)
def test_a_long_text_within_any_json_is_counted_or_refused(place, around, where):
    before = tokens(place, {**BODIES[place], where: [around, {"x": [around, ""]}]})
    after = tokens(place, {**BODIES[place], where: [around, {"x": [around, SECRET]}]})
    assert after is None or after >= before + len(SECRET)

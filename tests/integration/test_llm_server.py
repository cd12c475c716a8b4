"""The LLM server's wire formats, read with nothing but httpx: every route, and every stream."""

import base64
import json
import struct

import pytest

from tests.support import llm_server
from x402guard.testing import Completion, ToolCall
from x402guard.testing.llm_cohere import TEMPLATE_TOKENS

TEXT = "The motion was granted in part."
ASKED = {"model": "some-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
USAGE = {"stream_options": {"include_usage": True}}
TOOLS = (ToolCall("docket", {"n": 42}), ToolCall("clock"))
RICH = Completion(
    TEXT, input_tokens=100, output_tokens=18, cached_tokens=64, cache_write_tokens=9, reasoning_tokens=5, cost=0.00125
)
CHAT = {
    "openai": "/v1/chat/completions",
    "azure": "/openai/deployments/some-model/chat/completions?api-version=2025-04-01-preview",
    "mistral": "/v1/chat/completions",
    "groq": "/openai/v1/chat/completions",
    "deepseek": "/chat/completions",
    "openrouter": "/api/v1/chat/completions",
}
GEMINI = "/v1beta/models/some-model"


running, server = llm_server.running, llm_server.server


@pytest.fixture
def post(running, server):
    def post(provider, path, **body):
        return running[1].post(server.base(provider) + path, json=body)

    return post


def events(response):
    """The (name, content) of every server-sent event; the content is JSON, but for [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in response.text.replace("\r\n", "\n").removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.split("\n") if not line.startswith(":"))
        if lines:
            data = lines["data"]
            found.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


def chunks(response):
    *found, (_, done) = events(response)
    assert done == "[DONE]"
    assert {name for name, _ in found} == {None}
    return [content for _, content in found]


def said(found):
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


# ---- chat completions ----


@pytest.mark.parametrize("provider", CHAT)
def test_a_chat_completion_echoes_the_model_and_reports_what_the_test_says(server, post, provider):
    server.reply = RICH
    content = post(provider, CHAT[provider], **ASKED).json()
    assert (content["object"], content["model"]) == ("chat.completion", "some-model")
    [choice] = content["choices"]
    assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", TEXT)
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    usage = content["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (100, 18, 118)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 64
    if provider != "mistral":
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 5
    if provider in ("openai", "azure", "openrouter"):
        assert usage["prompt_tokens_details"]["cache_write_tokens"] == 9


@pytest.mark.parametrize("provider", ["openai", "azure"])
def test_openai_streams_usage_only_if_asked_and_then_null_before(server, post, provider):
    silent = chunks(post(provider, CHAT[provider], **ASKED, stream=True))
    assert said(silent) == TEXT
    assert [chunk for chunk in silent if "usage" in chunk] == []
    assert silent[-1]["choices"][0]["finish_reason"] == "stop"
    found = chunks(post(provider, CHAT[provider], **ASKED, **USAGE, stream=True))
    *before, last = found[1:] if provider == "azure" else found
    assert [chunk["usage"] for chunk in before] == [None] * len(before)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 38)
    assert len({chunk["id"] for chunk in before}) == 1


def test_azure_begins_with_what_its_filter_found(post):
    found = chunks(post("azure", CHAT["azure"], messages=[], stream=True))
    assert (found[0]["choices"], found[0]["model"]) == ([], "")
    assert "prompt_filter_results" in found[0]
    assert found[1]["choices"][0]["content_filter_results"]["violence"] == {"filtered": False, "severity": "safe"}


@pytest.mark.parametrize("provider", ["mistral", "deepseek"])
@pytest.mark.parametrize("options", [{}, USAGE], ids=["plain", "include_usage"])
def test_mistral_and_deepseek_finish_with_usage_whether_asked_or_not(post, provider, options):
    *before, last = chunks(post(provider, CHAT[provider], **ASKED, **options, stream=True))
    assert said([*before, last]) == TEXT
    assert (last["choices"][0]["finish_reason"], last["usage"]["total_tokens"]) == ("stop", 38)
    nulls = [None] * len(before) if provider == "deepseek" and options else []
    assert [chunk["usage"] for chunk in before if "usage" in chunk] == nulls


def test_deepseek_says_what_was_in_the_cache_under_both_paths(server, post):
    server.reply = RICH
    for path in ("/chat/completions", "/v1/chat/completions"):
        usage = post("deepseek", path, **ASKED).json()["usage"]
        assert (usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"]) == (64, 36)


def test_groq_reports_under_its_own_name_and_twice_more_if_asked(post):
    *before, last = chunks(post("groq", CHAT["groq"], **ASKED, stream=True))
    assert (last["x_groq"]["usage"]["total_tokens"], "usage" in last) == (38, False)
    assert [chunk for chunk in before if "usage" in chunk] == []
    *_, finish, last = chunks(post("groq", CHAT["groq"], **ASKED, **USAGE, stream=True))
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish["usage"] == finish["x_groq"]["usage"] == last["usage"]
    assert last["choices"] == []


def test_openrouter_says_the_cost_as_a_number_at_the_very_end(server, post):
    server.reply = RICH
    response = post("openrouter", CHAT["openrouter"], **ASKED, stream=True)
    assert response.text.startswith(": OPENROUTER PROCESSING\n\ndata: ")
    *before, last = chunks(response)
    assert '"cost":0.00125,' in response.text
    assert last["usage"]["cost_details"]["upstream_inference_cost"] == 0.00125
    assert last["choices"][0]["finish_reason"] == before[-1]["choices"][0]["finish_reason"] == "stop"
    assert [chunk for chunk in before if "usage" in chunk] == []
    assert post("openrouter", CHAT["openrouter"], **ASKED).json()["usage"]["cost"] == 0.00125


@pytest.mark.parametrize("provider", CHAT)
def test_chat_completions_call_tools(server, post, provider):
    server.reply = Completion("", tool_calls=TOOLS)
    [choice] = post(provider, CHAT[provider], **ASKED).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["docket", "clock"]
    written = {0: "", 1: ""}
    for chunk in chunks(post(provider, CHAT[provider], **ASKED, stream=True)):
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls", []):
                written[call["index"]] += call["function"]["arguments"]
    assert [json.loads(arguments) for arguments in written.values()] == [{"n": 42}, {}]


def test_several_choices_come_one_after_the_other_and_share_the_usage(server, post):
    server.reply = Completion(output_tokens=54)
    assert len(post("openai", CHAT["openai"], **ASKED, n=3).json()["choices"]) == 3
    found = chunks(post("openai", CHAT["openai"], **ASKED, **USAGE, n=3, stream=True))
    assert said(found) == TEXT * 3
    assert [
        chunk["choices"][0]["index"] for chunk in found if chunk["choices"] and chunk["choices"][0]["finish_reason"]
    ] == [0, 1, 2]
    assert found[-1]["usage"]["completion_tokens"] == 54
    few = post("openai", CHAT["openai"], model="m", messages=[], n=3, max_completion_tokens=10).json()
    assert (few["usage"]["completion_tokens"], few["choices"][2]["finish_reason"]) == (30, "length")


# ---- OpenAI's other routes ----


def test_a_response_and_its_events(server, post):
    server.reply = RICH
    content = post("openai", "/v1/responses", model="m", input="hi").json()
    assert (content["status"], content["output"][0]["content"][0]["text"]) == ("completed", TEXT)
    assert content["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 9},
        "output_tokens": 18,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 118,
    }
    found = events(post("openai", "/v1/responses", model="m", input="hi", stream=True))
    assert [name for name, _ in found] == [content["type"] for _, content in found]
    assert [content["sequence_number"] for _, content in found] == list(range(len(found)))
    kinds = list(dict.fromkeys(name.removeprefix("response.") for name, _ in found))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(content.get("delta", "") for _, content in found) == TEXT
    assert found[0][1]["response"]["usage"] is None
    assert found[-1][1]["response"]["usage"] == content["usage"]


def test_a_response_that_is_cut_short_is_incomplete(post):
    found = events(post("openai", "/v1/responses", model="m", input="hi", stream=True, max_output_tokens=7))
    name, content = found[-1]
    assert (name, content["response"]["status"]) == ("response.incomplete", "incomplete")
    assert content["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert content["response"]["usage"]["output_tokens"] == 7


def test_a_response_calls_tools(server, post):
    server.reply = Completion("", tool_calls=TOOLS)
    found = [content for _, content in events(post("openai", "/v1/responses", model="m", input="hi", stream=True))]
    assert [item["name"] for item in found[-1]["response"]["output"]] == ["docket", "clock"]
    done = [content["arguments"] for content in found if content["type"] == "response.function_call_arguments.done"]
    assert [json.loads(arguments) for arguments in done] == [{"n": 42}, {}]


@pytest.mark.parametrize("provider", ["openai", "mistral"])
def test_embeddings_are_the_same_in_numbers_and_in_base64(post, provider):
    numbers = post(provider, "/v1/embeddings", model="e", input=["a", "b"], dimensions=16).json()
    packed = post(
        provider, "/v1/embeddings", model="e", input=["a", "b"], dimensions=16, encoding_format="base64"
    ).json()
    for number, each in zip(numbers["data"], packed["data"], strict=True):
        assert struct.unpack("<16f", base64.b64decode(each["embedding"])) == tuple(number["embedding"])
    assert numbers["data"][0]["embedding"] != numbers["data"][1]["embedding"]
    assert (numbers["usage"]["prompt_tokens"], numbers["usage"]["total_tokens"]) == (20, 20)
    assert len(post(provider, "/v1/embeddings", model="e", input=[1, 2, 3]).json()["data"]) == 1
    assert len(post(provider, "/v1/embeddings", model="e", input=[[1, 2], [3]]).json()["data"]) == 2


def test_images_and_models(running, server, post):
    content = post("openai", "/v1/images/generations", model="gpt-image-1", prompt="a court", n=2).json()
    assert [base64.b64decode(image["b64_json"])[:4] for image in content["data"]] == [b"\x89PNG"] * 2
    assert content["usage"]["total_tokens"] == 38
    for path in ("openai/v1", "mistral/v1", "groq/openai/v1", "deepseek", "openrouter/api/v1"):
        listed = running[1].get(f"{server.url}/{path}/models").json()
        assert {model["object"] for model in listed["data"]} == {"model"}


# ---- Anthropic ----


def test_a_message_and_its_events(server, post):
    server.reply = Completion(TEXT, cached_tokens=64, cache_write_tokens=9, cache_write_1h_tokens=4, reasoning_tokens=5)
    content = post("anthropic", "/v1/messages", **ASKED).json()
    assert (content["content"], content["stop_reason"]) == ([{"type": "text", "text": TEXT}], "end_turn")
    usage = content["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["cache_read_input_tokens"]) == (20, 18, 64)
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 5, "ephemeral_1h_input_tokens": 4}
    assert usage["output_tokens_details"] == {"thinking_tokens": 5}
    found = events(post("anthropic", "/v1/messages", **ASKED, stream=True))
    assert [name for name, _ in found] == [content["type"] for _, content in found]
    assert list(dict.fromkeys(name for name, _ in found)) == [
        "message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    begun, stopped = found[0][1]["message"]["usage"], found[-2][1]["usage"]
    assert (begun["input_tokens"], begun["output_tokens"], begun["cache_read_input_tokens"]) == (20, 1, 64)
    assert (begun["cache_creation_input_tokens"], begun["service_tier"]) == (9, "standard")
    assert (stopped["output_tokens"], stopped["cache_creation_input_tokens"]) == (18, 9)
    assert "".join(content["delta"].get("text", "") for name, content in found if name == "content_block_delta") == TEXT


def test_a_message_calls_tools_and_its_tokens_are_counted(server, post):
    server.reply = Completion("Wait.", tool_calls=TOOLS)
    found = [content for _, content in events(post("anthropic", "/v1/messages", **ASKED, stream=True))]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    written = {1: "", 2: ""}
    for content in found:
        if content["type"] == "content_block_delta" and content["index"]:
            written[content["index"]] += content["delta"]["partial_json"]
    assert [json.loads(arguments) for arguments in written.values()] == [{"n": 42}, {}]
    assert post("anthropic", "/v1/messages/count_tokens", model="m", messages=[]).json() == {"input_tokens": 20}


# ---- Gemini ----


@pytest.mark.parametrize("version", ["v1", "v1beta"])
def test_gemini_in_one_piece_and_in_two_kinds_of_stream(server, post, version):
    server.reply = Completion(TEXT, cached_tokens=8, thoughts_tokens=7)
    path, asked = f"/{version}/models/some-model", {"contents": [{"parts": [{"text": "hi"}]}]}
    whole = post("google", f"{path}:generateContent", **asked).json()
    assert whole["modelVersion"] == "some-model"
    assert whole["candidates"][0]["content"] == {"parts": [{"text": TEXT}], "role": "model"}
    used = {"promptTokenCount": 20, "candidatesTokenCount": 18, "thoughtsTokenCount": 7, "totalTokenCount": 45}
    assert whole["usageMetadata"] | used == whole["usageMetadata"]
    assert whole["usageMetadata"]["cachedContentTokenCount"] == 8
    named = events(post("google", f"{path}:streamGenerateContent?alt=sse", **asked))
    array = post("google", f"{path}:streamGenerateContent", **asked)
    assert array.headers["content-type"].startswith("application/json")
    for found in ([content for _, content in named], array.json()):
        assert len(found) == 6
        assert "".join(chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in found) == TEXT
        assert [chunk["usageMetadata"]["candidatesTokenCount"] for chunk in found] == [3, 6, 9, 12, 15, 18]
        assert ["finishReason" in chunk["candidates"][0] for chunk in found] == [False] * 5 + [True]
        assert found[-1]["usageMetadata"] == whole["usageMetadata"]


def test_gemini_calls_tools_counts_and_embeds(server, post):
    server.reply = Completion("", tool_calls=TOOLS)
    [candidate] = post("google", f"{GEMINI}:generateContent", contents=[]).json()["candidates"]
    assert candidate["content"]["parts"][0] == {"functionCall": {"name": "docket", "args": {"n": 42}}}
    assert post("google", f"{GEMINI}:countTokens", contents=[]).json()["totalTokens"] == 20
    asked = {"content": {"parts": [{"text": "a"}]}, "outputDimensionality": 4}
    one = post("google", f"{GEMINI}:embedContent", **asked).json()
    two = post("google", f"{GEMINI}:batchEmbedContents", requests=[asked, {"content": {}}]).json()
    assert len(one["embedding"]["values"]) == 4
    assert (two["embeddings"][0], len(two["embeddings"])) == (one["embedding"], 2)
    assert two["usageMetadata"]["promptTokenCount"] == 20
    assert (
        len(
            post("google", f"{GEMINI}:generateContent", contents=[], generationConfig={"candidateCount": 2}).json()[
                "candidates"
            ]
        )
        == 2
    )


# ---- Cohere ----


def test_cohere_bills_less_than_it_counts(server, post):
    server.reply = Completion(TEXT, cached_tokens=3)
    content = post("cohere", "/v2/chat", **ASKED).json()
    assert (content["message"]["content"], content["finish_reason"]) == ([{"type": "text", "text": TEXT}], "COMPLETE")
    assert content["usage"] == {
        "billed_units": {"input_tokens": 20, "output_tokens": 18},
        "tokens": {"input_tokens": 20 + TEMPLATE_TOKENS, "output_tokens": 18},
        "cached_tokens": 3,
    }
    *found, done = events(post("cohere", "/v2/chat", **ASKED, stream=True))
    assert done == (None, "[DONE]")
    assert list(dict.fromkeys(content["type"] for _, content in found)) == [
        "message-start", "content-start", "content-delta", "content-end", "message-end",
    ]  # fmt: skip
    assert found[-1][1]["delta"] == {"finish_reason": "COMPLETE", "usage": content["usage"]}
    server.reply = Completion("", tool_calls=TOOLS)
    assert post("cohere", "/v2/chat", **ASKED).json()["finish_reason"] == "TOOL_CALL"
    assert ("tool-call-end", {"type": "tool-call-end", "index": 1}) in events(
        post("cohere", "/v2/chat", **ASKED, stream=True)
    )
    embedded = post("cohere", "/v2/embed", model="e", input_type="search_query", texts=["a", "b"]).json()
    assert (len(embedded["embeddings"]["float"]), embedded["meta"]["billed_units"]) == (2, {"input_tokens": 20})

"""The LLM server when something is off: limits, lies, failures, broken connections, patience and unknown paths."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support import llm_server
from x402guard.testing import Completion, Failure, LlmServer
from x402guard.testing.llm import PROVIDERS

ASKED = {"model": "some-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
CHAT = {
    "openai": "/v1/chat/completions",
    "azure": "/openai/deployments/some-model/chat/completions",
    "mistral": "/v1/chat/completions",
    "groq": "/openai/v1/chat/completions",
    "deepseek": "/v1/chat/completions",
    "openrouter": "/api/v1/chat/completions",
    "anthropic": "/v1/messages",
    "cohere": "/v2/chat",
}
GEMINI = "/v1beta/models/some-model:"
USAGE = {"google": "usageMetadata"}


running, server = llm_server.running, llm_server.server


@pytest.fixture
def ask(running, server):
    """Ask a provider for a completion, as it wants to be asked."""

    def ask(provider, *, stream=False, limit=100, **more):
        if provider == "google":
            path = GEMINI + ("streamGenerateContent?alt=sse" if stream else "generateContent")
            body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": limit}}
        else:
            path, body = CHAT[provider], {**ASKED, "max_tokens": limit} | ({"stream": True} if stream else {})
        return running[1].post(server.base(provider) + path, json=body | more)

    return ask


def contents(response):
    """The events of a stream, or the one document."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def found(content, name):
    """Every value under `name`, however deep."""
    if isinstance(content, dict):
        yield from ([content[name]] if name in content else [])
    for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from found(part, name)


OUTPUT = {"anthropic": "output_tokens", "cohere": "output_tokens", "google": "candidatesTokenCount"}
FINISH = {
    "anthropic": ("stop_reason", "max_tokens", "end_turn"),
    "cohere": ("finish_reason", "MAX_TOKENS", "COMPLETE"),
    "google": ("finishReason", "MAX_TOKENS", "STOP"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_requests_limit_is_reported_and_is_why_it_ends(ask, provider, stream):
    name, short, full = FINISH.get(provider, ("finish_reason", "length", "stop"))
    more = {"stream_options": {"include_usage": True}} if provider in ("openai", "azure", "groq") else {}
    for limit, output, reason in ((7, 7, short), (18, 18, full), (100, 18, full)):
        answer = contents(ask(provider, stream=stream, limit=limit, **more))
        assert list(found(answer, OUTPUT.get(provider, "completion_tokens")))[-1] == output
        assert [each for each in found(answer, name) if each][-1] == reason


def test_geminis_limit_holds_for_thoughts_first(server, ask):
    server.reply = Completion(thoughts_tokens=10, output_tokens=18)
    for limit, thoughts, output in ((100, 10, 18), (15, 10, 5), (6, 6, 0)):
        usage = ask("google", limit=limit).json()["usageMetadata"]
        assert (usage["thoughtsTokenCount"], usage["candidatesTokenCount"]) == (thoughts, output)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_usage_can_be_a_lie_or_left_out(server, ask, provider, stream):
    lie = {"completion_tokens": -1, "nonsense": [None, "x"]}
    more = {"stream_options": {"include_usage": True}} if provider in CHAT else {}
    name = USAGE.get(provider, "usage")
    server.reply = Completion(usage=lie)
    told = [each for each in found(contents(ask(provider, stream=stream, **more)), name) if each is not None]
    assert told
    assert told == [lie] * len(told)
    server.reply = Completion(omit_usage=True)
    assert not any(found(contents(ask(provider, stream=stream, **more)), name))


def test_tier_and_model_are_what_was_asked_for_unless_the_test_says_otherwise(server, ask):
    tiers = {"openai": "default", "groq": "on_demand", "openrouter": None}
    for provider, usual in tiers.items():
        assert ask(provider).json()["service_tier"] == usual
        assert ask(provider, service_tier="flex").json()["service_tier"] == "flex"
        assert ask(provider, service_tier="auto").json()["service_tier"] == usual
    server.reply = Completion(service_tier="priority", model="another-model")
    for provider in ("openai", "azure", "groq", "openrouter"):
        content = ask(provider, service_tier="flex").json()
        assert (content["service_tier"], content["model"]) == ("priority", "another-model")
    assert ask("anthropic").json()["usage"]["service_tier"] == "priority"
    assert ask("google").json()["usageMetadata"]["serviceTier"] == "priority"
    assert ask("google").json()["modelVersion"] == "another-model"


# ---- failures ----

ERRORS = {
    "openai": {
        "error": {"message": "slow down", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    },
    "azure": {"error": {"code": "429", "message": "slow down"}},
    "anthropic": {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}},
    "google": {"error": {"code": 429, "message": "slow down", "status": "RESOURCE_EXHAUSTED"}},
    "mistral": {"object": "error", "message": "slow down", "type": "rate_limited", "raw_status_code": 429},
    "cohere": {"message": "slow down"},
    "openrouter": {"error": {"message": "slow down", "code": 429}},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_failure_has_the_providers_own_shape(server, ask, provider, stream):
    server.reply = Failure(429, {"Retry-After": "3"}, message="slow down")
    response = ask(provider, stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.headers["content-type"] == "application/json"
    expected = ERRORS.get(provider, ERRORS["openai"])
    assert response.json() | expected == response.json()
    server.reply = Failure(529)
    assert ask(provider, stream=stream).status_code == 529


def test_a_gemini_stream_that_is_an_array_fails_in_an_array(running, server):
    server.reply = Failure(503)
    response = running[1].post(f"{server.base('google')}{GEMINI}streamGenerateContent", json={"contents": []})
    assert [error["error"]["status"] for error in response.json()] == ["UNAVAILABLE"]


@pytest.mark.parametrize("provider", CHAT)
def test_what_a_request_must_have(running, server, provider):
    for body in (b"", b"[]", b"no json", b'{"model": "m"}'):
        response = running[1].post(server.base(provider) + CHAT[provider], content=body)
        assert (response.status_code, "field required" in response.text) == (400, True)
    assert len(server.calls) == 4


def test_a_body_that_makes_no_sense_is_the_clients_fault(running, server):
    response = running[1].post(f"{server.base('google')}{GEMINI}batchEmbedContents", json={"requests": 7})
    assert response.status_code == 400


# ---- broken connections ----


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stream_breaks_after_so_many_events(running, server, ask, provider):
    whole = [
        event
        for event in ask(provider, stream=True).text.replace("\r\n", "\n").split("\n\n")
        if event[:1] not in ("", ":")
    ]
    for cut in (0, 3, len(whole)):
        server.reply = Completion(cut_after=cut)
        came = b""
        path = f"{GEMINI}streamGenerateContent?alt=sse" if provider == "google" else CHAT[provider]
        body = {"contents": []} if provider == "google" else ASKED | {"stream": True}
        with running[1].stream("POST", server.base(provider) + path, json=body) as response:
            assert response.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                for part in response.iter_raw():
                    came += part
        assert came.count(b"data: ") == cut
    server.reply = Completion(cut_after=len(whole) + 1)
    assert ask(provider, stream=True).status_code == 200


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_document_breaks_in_the_middle(server, ask, provider):
    server.reply = Completion(cut_after=1)
    with pytest.raises(httpx.RemoteProtocolError, match=r"received [0-9]+ bytes, expected [0-9]+"):
        ask(provider)


# ---- patience ----


def test_an_answer_and_its_events_can_be_slow(server, ask):
    server.reply = Completion(delay_s=0.1)
    started = time.monotonic()
    ask("openai")
    assert time.monotonic() - started >= 0.1
    server.reply = Completion("one two three", gap_s=0.02)
    started = time.monotonic()
    assert len(contents(ask("openai", stream=True))) == 5
    assert time.monotonic() - started >= 5 * 0.02
    server.reply = Failure(500, delay_s=0.1)
    started = time.monotonic()
    ask("openai")
    assert time.monotonic() - started >= 0.1


def test_nobody_waits_for_an_answer_that_nobody_waits_for():
    with LlmServer(Completion(delay_s=60)) as server, httpx.Client(trust_env=False, timeout=0.1) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post(server.base("openai") + CHAT["openai"], json=ASKED)
        started = time.monotonic()
    assert time.monotonic() - started < 10


# ---- what arrived ----


def test_the_reply_is_made_of_the_call(server, ask):
    def reply(call):
        assert call.provider != "mistral", "mistral is not for sale"
        return Failure(402) if call.body.get("max_tokens") == 5 else Completion(f"{call.model} at {call.path}")

    server.reply = reply
    assert ask("groq").json()["choices"][0]["message"]["content"] == f"some-model at {CHAT['groq']}"
    assert ask("groq", limit=5).status_code == 402
    failed = ask("mistral")
    assert (failed.status_code, "mistral is not for sale" in failed.text) == (500, True)


def test_calls_are_kept_in_order_with_what_they_brought(running, server, ask):
    running[1].post(
        f"{server.base('azure')}{CHAT['azure']}?api-version=1", json={"messages": []}, headers={"API-Key": "k"}
    )
    ask("google", stream=True)
    ask("openai", stream=True)
    azure, google, openai = server.calls
    assert (azure.provider, azure.path, azure.model) == ("azure", CHAT["azure"], "some-model")
    assert (azure.headers["api-key"], azure.query, azure.streams) == ("k", {"api-version": "1"}, False)
    assert (google.path, google.model, google.streams) == (f"{GEMINI}streamGenerateContent", "some-model", True)
    assert (openai.body["messages"], openai.streams) == (ASKED["messages"], True)
    server.forget()
    assert server.calls == []


def test_many_threads_may_ask_at_once(server, ask):
    together = threading.Barrier(8, timeout=10)

    def reply(call):
        together.wait()
        return Completion(call.body["user"])

    server.reply = reply
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: ask("openai", user=f"user {n}").json(), range(24)))
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [f"user {n}" for n in range(24)]
    assert sorted(call.body["user"] for call in server.calls) == sorted(f"user {n}" for n in range(24))


def test_a_path_that_no_provider_has_is_a_404_and_is_counted(running, server):
    http = running[1]
    for url, provider in ((f"{server.base('openai')}/v1/audio/speech", "openai"), (f"{server.url}/admin", "")):
        assert http.post(url, content=b"--boundary").status_code == 404
        assert http.get(url).status_code == 404
        assert [(call.provider, call.body) for call in server.calls[-2:]] == [(provider, {})] * 2
    assert http.get(server.base("openai") + CHAT["openai"]).status_code == 404


def test_providers_have_a_base_and_some_need_none(running, server):
    assert {server.base(provider) for provider in PROVIDERS} == {f"{server.url}/{provider}" for provider in PROVIDERS}
    with pytest.raises(ValueError, match="no provider 'skynet'"):
        server.base("skynet")
    with pytest.raises(RuntimeError):
        LlmServer().base("openai")
    for path in (CHAT["openai"], CHAT["azure"], CHAT["anthropic"], f"{GEMINI}generateContent"):
        assert running[1].post(server.url + path, json=ASKED | {"contents": []}).status_code == 200
    assert [call.provider for call in server.calls] == ["openai", "azure", "anthropic", "google"]

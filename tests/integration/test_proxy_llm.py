"""LLM calls through the proxy: by the vendors' own clients, byte for byte, with whose key."""

import json

import anthropic
import cohere
import httpx
import openai
import pytest
from google import genai
from mistralai.client import Mistral

from tests.support import llm_server, proxy
from tests.support.proxy import Proxied, asked, books, needs_node, node
from tests.support.slow_server import CHUNKED, HEAD
from x402guard.http.refusal_from import refusal_from
from x402guard.testing import Completion

OWNED = {"provider": "openai", "key": "OPENAI_API_KEY"}
pytestmark = pytest.mark.chain
proxied, shop = proxy.proxied, proxy.shop
running, server = llm_server.running, llm_server.server


@pytest.fixture
def metered(tmp_path, running):
    base = running[0].base("openai")
    settings = {"X402GUARD_METERING": json.dumps({"endpoints": {f"{base}/v1": OWNED}}), "OPENAI_API_KEY": "sk-owner"}
    with Proxied(tmp_path, "--budget", "0.01", **settings) as proxy:
        yield proxy


def test_the_vendors_python_client_is_metered_by_its_base_url(metered, server, tmp_path):
    server.reply = Completion("Yes.", input_tokens=100, output_tokens=50)
    ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 100}
    with openai.OpenAI(base_url=f"{metered.url}openai", api_key=metered.token) as client:
        assert client.chat.completions.create(**ask).choices[0].message.content == "Yes."
        assert [call.headers["authorization"] for call in server.calls] == ["Bearer sk-owner"]
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(**{**ask, "max_completion_tokens": 16_000})
    assert refused.value.status_code == 402
    found = refusal_from(refused.value)
    assert (found.code, found.rule) == ("budget_exhausted", "budget")
    assert len(server.calls) == 1
    assert books(tmp_path) == {"proxy": ("0.00075", "0.00")}


def test_a_callers_own_key_is_kept(metered, server):
    ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 10}
    answer = asked(
        metered, "openai/chat/completions", method="POST", json=ask, headers={"Authorization": "Bearer sk-mine"}
    )
    assert answer.status_code == 200
    assert [call.headers["authorization"] for call in server.calls] == ["Bearer sk-mine"]


def test_without_a_key_of_the_api_it_says_which_one_is_missing(proxied):
    answer = asked(proxied, "anthropic/v1/messages", method="POST", json={})
    assert answer.status_code == 401
    assert answer.json()["detail"].startswith("ANTHROPIC_API_KEY: the proxy has no key for this API; set it where ")


@needs_node
def test_the_vendors_javascript_client_is_metered_streamed_and_refused(metered, server, tmp_path):
    server.reply = Completion("It was granted in part.", input_tokens=100, output_tokens=50)
    said = node("openai.mjs", OPENAI_BASE_URL=f"{metered.url}openai", OPENAI_API_KEY=metered.token)
    assert said[0] == "It was granted in part."
    assert len(said[1]) > 2
    assert "".join(said[1]) == "It was granted in part."
    assert said[2] == "left"
    assert (said[3]["status"], "[urn:x402guard:budget_exhausted:budget]" in said[3]["message"]) == (402, True)
    spent, held = books(tmp_path)["proxy"]
    assert (float(spent) >= 0.0015, held) == (True, "0.00")


def test_a_stream_through_the_proxy_is_that_of_the_provider_byte_for_byte(tmp_path, shop):
    events = [
        f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'choices': [{'index': 0, 'delta': {'content': text}, 'finish_reason': None}]}, ensure_ascii=False)}\n\n".encode()
        for text in ("né", "🌍", " ")
    ]
    usage = {
        "id": "c",
        "object": "chat.completion.chunk",
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
    }
    events += [f"data: {json.dumps(usage)}\n\n".encode(), b"data: [DONE]\n\n"]

    def stream(line):
        line.send(HEAD.replace(b"text/plain", b"text/event-stream") + CHUNKED)
        for event in events:
            line.send(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        line.send(b"0\r\n\r\n")

    shop.answers["/v1/chat/completions"] = stream
    settings = {
        "X402GUARD_METERING": json.dumps({"endpoints": {f"{shop.url}/v1": OWNED}}),
        "OPENAI_API_KEY": "sk-owner",
    }
    ask = {
        "model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 10, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with Proxied(tmp_path, "--budget", "0.01", **settings) as proxy:
        through = asked(proxy, "openai/chat/completions", method="POST", json=ask)
        by_url = asked(proxy, f"{shop.url}/v1/chat/completions", method="POST", json=ask)
    direct = httpx.post(f"{shop.url}/v1/chat/completions", json=ask)
    assert through.content == by_url.content == direct.content == b"".join(events)
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert [request.header("authorization") for request in shop.asked[:2]] == ["Bearer sk-owner", None]
    assert books(tmp_path) == {"proxy": ("0.000105", "0.00")}


def test_a_stream_of_a_stated_length_from_which_a_piece_is_kept_comes_whole(tmp_path, shop):
    """The guard asks for the usage itself, and does not hand it on: the provider's length is too long then."""
    event = b'data: {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\n'
    usage = b'data: {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\n'
    whole = event + usage + b"data: [DONE]\n\n"
    head = HEAD.replace(b"text/plain", b"text/event-stream") + f"content-length: {len(whole)}\r\n\r\n".encode()
    shop.answers["/v1/chat/completions"] = lambda line: line.send(head + whole)
    settings = {
        "X402GUARD_METERING": json.dumps({"endpoints": {f"{shop.url}/v1": OWNED}}),
        "OPENAI_API_KEY": "sk-owner",
    }
    ask = {
        "model": "gpt-4o",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 10,
        "stream": True,
    }
    with Proxied(tmp_path, "--budget", "0.01", **settings) as proxy:
        answer = asked(proxy, "openai/chat/completions", method="POST", json=ask)
    assert answer.content == event + b"data: [DONE]\n\n"
    assert books(tmp_path) == {"proxy": ("0.0000525", "0.00")}


def _anthropic(url, token):
    with anthropic.Anthropic(base_url=f"{url}anthropic", api_key=token) as client:
        asked = {"model": "claude-haiku-4-5", "max_tokens": 50, "messages": HI}
        return client.messages.create(**asked).content[0].text


def _google(url, token):
    with genai.Client(api_key=token, http_options={"base_url": f"{url}google"}) as client:
        config = {"max_output_tokens": 50}
        return client.models.generate_content(model="gemini-2.5-flash", contents="hi", config=config).text


def _mistral(url, token):
    with Mistral(api_key=token, server_url=f"{url}mistral") as client:
        asked = {"model": "mistral-small-latest", "max_tokens": 50, "messages": HI}
        return client.chat.complete(**asked).choices[0].message.content


def _cohere(url, token):
    with httpx.Client() as http:  # its own is never closed
        client = cohere.ClientV2(api_key=token, base_url=f"{url}cohere", httpx_client=http)
        return client.chat(model="command-r-08-2024", max_tokens=50, messages=HI).message.content[0].text


HI = [{"role": "user", "content": "hi"}]
VENDORS = {
    "anthropic": (_anthropic, "ANTHROPIC_API_KEY", "x-api-key"),
    "google": (_google, "GEMINI_API_KEY", "x-goog-api-key"),
    "mistral": (_mistral, "MISTRAL_API_KEY", "authorization"),
    "cohere": (_cohere, "CO_API_KEY", "authorization"),
}


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_vendors_client_speaks_through_its_name_with_the_token_as_its_key(tmp_path, running, server, vendor):
    ask, key, header = VENDORS[vendor]
    settings = {
        "X402GUARD_METERING": json.dumps({"endpoints": {server.base(vendor): {"provider": vendor, "key": key}}}),
        key: "the-owners-key",
    }
    server.reply = Completion("Yes.", input_tokens=10, output_tokens=5)
    with Proxied(tmp_path, "--budget", "0.10", **settings) as proxy:
        assert ask(proxy.url, proxy.token) == "Yes."
    [call] = server.calls
    assert call.headers[header].removeprefix("Bearer ") == "the-owners-key"
    assert proxy.token not in json.dumps(call.headers)
    spent, held = books(tmp_path)["proxy"]
    assert (float(spent) > 0, held) == (True, "0.00")

"""The vendors' SDKs, unmodified, with their switches for a region: metered, held, booked, and refused at the limit."""

import base64
import json
import zlib

import httpx
import httpx2
import pytest

import x402guard.httpx2
from tests.support.merchant import make_guard
from x402guard import GuardedTransport, Policy

HI = [{"role": "user", "content": "hi"}]
CHATTED = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 300, "completion_tokens": 90, "total_tokens": 390},
}  # fmt: skip
CLAUDE = {
    "id": "m", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5", "stop_reason": "end_turn",
    "content": [{"type": "text", "text": "hi"}], "usage": {"input_tokens": 300, "output_tokens": 90},
}  # fmt: skip
GEMINI = {
    "candidates": [{"content": {"parts": [{"text": "hi"}], "role": "model"}, "finishReason": "STOP"}],
    "usageMetadata": {"promptTokenCount": 400, "candidatesTokenCount": 50, "totalTokenCount": 450},
}  # fmt: skip


class Vendor:
    """Answers as one; keeps the hosts and paths that were asked."""

    def __init__(self, answer, kind="application/json"):
        self.answer, self.kind, self.asked = answer, kind, []

    def __call__(self, request):
        self.asked.append(f"{request.url.host}{request.url.path}")
        content = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        library = httpx if isinstance(request, httpx.Request) else httpx2
        return library.Response(200, headers={"content-type": self.kind}, content=content)


def of_httpx(session, vendor):
    return httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(vendor)))


def of_httpx2(session, vendor):
    return httpx2.Client(transport=x402guard.httpx2.GuardedTransport(session, httpx2.MockTransport(vendor)))


def mistral_eu(session, vendor):
    from mistralai.client import Mistral

    sdk = Mistral(api_key="k", server="eu", client=of_httpx(session, vendor))
    return lambda: sdk.chat.complete(model="mistral-large-latest", messages=HI, max_tokens=100)


def openai_eu(session, vendor):
    import openai

    sdk = openai.OpenAI(
        api_key="k", base_url="https://eu.api.openai.com/v1", http_client=of_httpx2(session, vendor), max_retries=0
    )
    return lambda: sdk.chat.completions.create(model="gpt-6-sol", messages=HI, max_completion_tokens=100)


def vertex_claude(session, vendor):
    from anthropic import AnthropicVertex

    sdk = AnthropicVertex(
        region="europe-west1", project_id="p", access_token="t", http_client=of_httpx2(session, vendor), max_retries=0
    )
    return lambda: sdk.messages.create(model="claude-sonnet-4-5@20250929", messages=HI, max_tokens=100)


def vertex_gemini(session, vendor):
    from google import genai
    from google.genai.types import GenerateContentConfig, HttpOptions
    from google.oauth2.credentials import Credentials

    options = HttpOptions(httpx_client=of_httpx(session, vendor))
    sdk = genai.Client(
        vertexai=True, project="p", location="europe-west4", credentials=Credentials("t"), http_options=options
    )
    asked = GenerateContentConfig(max_output_tokens=100)
    return lambda: sdk.models.generate_content(model="gemini-3.5-flash", contents="hi", config=asked)


def gateway(base_url, model):
    def made(session, vendor):
        import anthropic

        sdk = anthropic.Anthropic(api_key="k", base_url=base_url, http_client=of_httpx2(session, vendor), max_retries=0)
        return lambda: sdk.messages.create(model=model, messages=HI, max_tokens=100)

    return made


SONNET = 300 * 3_000 + 90 * 15_000
GATEWAYS = {
    "deepseek": ("https://api.deepseek.com/anthropic", "deepseek-v4-pro"),
    "moonshot": ("https://api.moonshot.ai/anthropic", "kimi-k2.6"),
    "zai": ("https://api.z.ai/api/anthropic", "glm-5.3"),
    "openrouter": ("https://openrouter.ai/api", "anthropic/claude-sonnet-4.5"),
    "x-ai": ("https://api.x.ai", "grok-4.3"),
}
SDKS = {
    "mistral server=eu": (mistral_eu, CHATTED, None),
    "openai base_url": (openai_eu, CHATTED, 1_650_000),
    "claude on vertex": (vertex_claude, CLAUDE, SONNET * 11 // 10),
    "gemini location=": (vertex_gemini, GEMINI, 1_155_000),
    **{
        f"anthropic at {name}": (gateway(*where), CLAUDE, SONNET if name == "openrouter" else None)
        for name, where in GATEWAYS.items()
    },
}


@pytest.mark.parametrize(("sdk", "answer", "bill"), SDKS.values(), ids=SDKS)
def test_a_region_or_a_gateway_is_metered_held_booked_and_refused_at_the_limit(sdk, answer, bill):
    vendor = Vendor(answer)
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("s", budget="$5.00") as session:
        sdk(session, vendor)()
        spent = int(session.spent * 10**9)
        assert spent > 0
        assert session.report().to_dict()["evidence"]["provider_usage"] is not None
        assert bill is None or spent == bill
        assert not [e for e in session.report().to_dict()["events"] if e["event"] == "unmetered"]
    with make_guard() as guard, guard.session("tiny", budget="$0.000001") as session:
        vendor.asked.clear()
        with pytest.raises(Exception, match=r"(?i)budget|402|payment"):
            sdk(session, vendor)()
        assert (vendor.asked, session.held, session.spent) == ([], 0, 0)


def frame(payload, kind):
    """One frame of Amazon's event stream."""
    named = {":event-type": kind, ":content-type": "application/json", ":message-type": "event"}
    headers = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + len(value).to_bytes(2) + value.encode()
        for name, value in named.items()
    )
    prelude = (16 + len(headers) + len(payload)).to_bytes(4) + len(headers).to_bytes(4)
    prelude += zlib.crc32(prelude).to_bytes(4)
    whole = prelude + headers + payload
    return whole + zlib.crc32(whole).to_bytes(4)


EVENTS = [
    {
        "type": "message_start",
        "message": {**CLAUDE, "content": [], "stop_reason": None, "usage": {"input_tokens": 300, "output_tokens": 1}},
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 90}},
    {"type": "message_stop", "amazon-bedrock-invocationMetrics": {"inputTokenCount": 300, "outputTokenCount": 90}},
]
FRAMES = b"".join(
    frame(json.dumps({"bytes": base64.b64encode(json.dumps(event).encode()).decode()}).encode(), "chunk")
    for event in EVENTS
)
KIND = "application/vnd.amazon.eventstream"
ON_BEDROCK = "us.anthropic.claude-sonnet-4-5-20250929-v1:0"


def bedrock(session, vendor):
    from anthropic import AnthropicBedrock

    return AnthropicBedrock(
        api_key="k", aws_region="us-east-1", http_client=of_httpx2(session, vendor), max_retries=0
    )  # fmt: skip


def test_claude_on_bedrock_is_booked_from_its_frames():
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        vendor = Vendor(FRAMES, KIND)
        with bedrock(session, vendor).messages.stream(model=ON_BEDROCK, messages=HI, max_tokens=100) as stream:
            assert stream.get_final_text() == "hi"
        assert session.spent * 10**9 == SONNET * 11 // 10


def test_frames_whose_words_were_changed_on_their_way_cost_the_ceiling():
    place = FRAMES.index(b"chunk")  # in a header of the first frame: its JSON can still be read
    changed = FRAMES[:place] + b"chump" + FRAMES[place + 5 :]
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        held = []

        def vendor(_request):
            held.append(session.held)
            return httpx.Response(200, content=changed, headers={"content-type": KIND})

        said = {"anthropic_version": "bedrock-2023-05-31", "messages": HI, "max_tokens": 100}
        with httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(vendor))) as http:
            http.post(INVOKE, json=said)
        assert (session.spent, session.held) == (held[0], 0)


INVOKE = f"https://bedrock-runtime.us-east-1.amazonaws.com/model/{ON_BEDROCK}/invoke-with-response-stream"
ASKED = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 100, "messages": HI}


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
def test_frames_are_read_however_they_are_cut(size):
    pieces = [FRAMES[at : at + size] for at in range(0, len(FRAMES), size)]
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        answer = httpx.MockTransport(
            lambda _: httpx.Response(200, headers={"content-type": KIND}, content=iter(pieces))
        )
        with httpx.Client(transport=GuardedTransport(session, answer)) as http:
            assert http.post(INVOKE, json=ASKED).content == FRAMES
        assert session.spent * 10**9 == SONNET * 11 // 10


@pytest.mark.parametrize(
    "broken", [FRAMES[:40] + b"x" + FRAMES[41:], b"\xff" * 64, FRAMES[: len(FRAMES) // 2]], ids=len
)
def test_a_stream_of_broken_frames_costs_its_ceiling_and_is_handed_over(broken):
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        answer = httpx.MockTransport(lambda _: httpx.Response(200, headers={"content-type": KIND}, content=broken))
        with httpx.Client(transport=GuardedTransport(session, answer)) as http:
            assert http.post(INVOKE, json=ASKED).content == broken
        assert session.report().to_dict()["evidence"]["assumed"] == str(session.spent)


def test_converse_streams_its_usage_in_its_last_frame():
    usage = {"inputTokens": 300, "outputTokens": 90, "totalTokens": 390}
    content = frame(b'{"role": "assistant"}', "messageStart") + frame(
        json.dumps({"usage": usage, "metrics": {"latencyMs": 9}}).encode(), "metadata"
    )
    url = INVOKE.replace("invoke-with-response-stream", "converse-stream")
    asked = {"messages": [{"role": "user", "content": [{"text": "hi"}]}], "inferenceConfig": {"maxTokens": 100}}
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        answer = httpx.MockTransport(lambda _: httpx.Response(200, headers={"content-type": KIND}, content=content))
        with httpx.Client(transport=GuardedTransport(session, answer)) as http:
            http.post(url, json=asked)
        assert session.spent * 10**9 == SONNET * 11 // 10

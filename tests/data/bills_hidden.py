"""What the request does not show: a prompt the server adds, tools that were not offered, another tier, region or model.

What the provider states is charged in full, up to what the model can take at all. A tier that is dearer than the
standard one, and that the price list does not know, costs twice the standard price, and counts as an estimate.
"""

from typing import Any

from tests.data import bills_anthropic, bills_anthropic_streams, bills_openai, bills_openai_streams, bills_openrouter
from tests.data.bills_compatible import GROQ, groq_times, total, whole
from tests.data.bills_google import FLASH, MODELS, PRO, answer, usage
from tests.data.bills_google import JSON as GOOGLE_JSON
from tests.data.bills_google import SSE as GOOGLE_SSE
from tests.data.bills_openai import AZURE, CHAT
from tests.data.bills_responses import URL as RESPONSES
from tests.data.bills_responses import looked_up, message, response, searched
from tests.data.bills_responses import usage as responses_usage
from tests.data.bills_shape import SSE, Bill, sse

HI = [{"role": "user", "content": "hi"}]
CLAUDE = bills_anthropic.URL
NEWEST = "Which opinions are the newest?"
TTS = f"{MODELS}/gemini-3.8-flash-tts:generateContent"


def hi(model: str, limit: int, **more: Any) -> dict[str, Any]:
    """A request of one word, as OpenAI and OpenRouter take it."""
    return {"model": model, "messages": HI, "max_completion_tokens": limit, **more}


def hello(model: str, limit: int, **more: Any) -> dict[str, Any]:
    """A request of one word, as Anthropic takes it."""
    return {"model": model, "max_tokens": limit, "messages": HI, **more}


def gemini(limit: int, said: str = "hi") -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": said}]}], "generationConfig": {"maxOutputTokens": limit}}


def respond(model: str, limit: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "input": NEWEST, "max_output_tokens": limit, **more}


def silent(completion: dict[str, Any]) -> dict[str, Any]:
    """A completion that does not say which tier it came from."""
    return {key: value for key, value in completion.items() if key != "service_tier"}


def grounded(model: str, used: dict[str, Any], *queries: str) -> dict[str, Any]:
    """An answer of Gemini that searched the web for *queries*."""
    whole_answer = answer(model, used)
    web = {"uri": "https://vertexaisearch.cloud.google.com/grounding-api-redirect/AUZIYQ", "title": "courts.example"}
    whole_answer["candidates"][0]["groundingMetadata"] = {
        "searchEntryPoint": {"renderedContent": "<div>newest opinions</div>"},
        "groundingChunks": [{"web": web}],
        "groundingSupports": [{"segment": {"endIndex": 5, "text": "Grüße"}, "groundingChunkIndices": [0]}],
        "webSearchQueries": list(queries),
    }
    return whole_answer


def traffic(used: dict[str, Any], kind: str) -> dict[str, Any]:
    return {**used, "trafficType": kind}


_QUERY = {"type": "search", "query": "newest opinions", "queries": ["newest opinions"], "sources": None}
_SPEECH = {"inlineData": {"mimeType": "audio/L16;codec=pcm;rate=24000", "data": "AAABAAIA" * 20}}
_SPOKEN = {
    "candidates": [{"content": {"parts": [_SPEECH], "role": "model"}, "finishReason": "STOP", "index": 0}],
    "usageMetadata": {
        **traffic(usage(50, 400), "ON_DEMAND_PRIORITY"),
        "candidatesTokensDetails": [{"modality": "AUDIO", "tokenCount": 400}],
    },
    "modelVersion": "gemini-3.8-flash-tts",
    "responseId": "wKohadbPGOqR1dkPw9qtyQF",
}
_SPEAK = {
    "contents": [{"role": "user", "parts": [{"text": "Say cheerfully: have a wonderful day, and come back soon."}]}],
    "generationConfig": {
        "maxOutputTokens": 1_000,
        "responseModalities": ["AUDIO"],
        "speechConfig": {"voiceConfig": {"prebuiltVoiceConfig": {"voiceName": "Kore"}}},
    },
}
_SEARCHED = (
    {"type": "server_tool_use", "id": "srvtoolu_02", "name": "web_search", "input": {"query": "newest opinions"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_02", "content": []},
    bills_anthropic.said(),
)

HIDDEN: list[Bill] = [
    # More tokens than the request can have caused.
    Bill(
        name="hidden-prompt-groq",
        url=GROQ,
        request=hi("openai/gpt-oss-20b", 100),
        answer=whole(
            "openai/gpt-oss-20b", groq_times(total(72, 30)), x_groq={"id": "req_01"}, service_tier="on_demand"
        ),
        nanos=14_400,
        arithmetic="72 in x 75 + 30 out x 300 = 14,400",
    ),
    Bill(
        name="hidden-prompt-openai",
        beyond=True,
        url=CHAT,
        request=hi("gpt-4o", 50),
        answer=bills_openai.completion("gpt-4o-2024-08-06", bills_openai.usage(2_000, 20)),
        nanos=5_200_000,
        arithmetic="2,000 in x 2,500 + 20 out x 10,000 = 5,200,000",
    ),
    Bill(
        name="hidden-prompt-openai-stream",
        beyond=True,
        url=CHAT,
        request=hi("gpt-4o-mini", 50, stream=True, stream_options={"include_usage": True}),
        stream=bills_openai_streams.chunks("gpt-4o-mini-2024-07-18", bills_openai.usage(1_500, 18, cached=1_024)),
        content_type=SSE,
        nanos=159_000,
        arithmetic="476 in x 150 + 1,024 cached x 75 + 18 out x 600 = 159,000",
    ),
    Bill(
        name="hidden-prompt-azure",
        beyond=True,
        url=AZURE,
        request={"messages": HI, "max_tokens": 60},
        answer=silent(bills_openai.completion("gpt-4o-2024-11-20", bills_openai.usage(1_800, 40))),
        nanos=4_900_000,
        arithmetic="1,800 in x 2,500 + 40 out x 10,000 = 4,900,000",
    ),
    Bill(
        name="hidden-prompt-anthropic",
        beyond=True,
        url=CLAUDE,
        request=hello("claude-haiku-4-5", 64),
        answer=bills_anthropic.message(
            "claude-haiku-4-5-20251001", bills_anthropic.usage(3_000, 12, geo="not_available")
        ),
        nanos=3_060_000,
        arithmetic="3,000 in x 1,000 + 12 out x 5,000 = 3,060,000",
    ),
    Bill(
        name="hidden-prompt-gemini-stream",
        url=f"{MODELS}/gemini-2.5-flash:streamGenerateContent?alt=sse",
        request=gemini(100),
        stream=sse(
            answer("gemini-2.5-flash", usage(500, 15), "Grü", None),
            answer("gemini-2.5-flash", usage(500, 40), "ße, 世界 🌍"),
            end="\r\n",
        ),
        content_type=GOOGLE_SSE,
        nanos=250_000,
        arithmetic="500 in x 300 + 40 out x 2,500 = 250,000",
    ),
    Bill(
        name="hidden-output-above-its-limit",
        url=CHAT,
        request=hi("gpt-4o-mini", 100),
        answer=bills_openai.completion("gpt-4o-mini-2024-07-18", bills_openai.usage(20, 150)),
        nanos=93_000,
        arithmetic="20 in x 150 + 150 out x 600 = 93,000",
    ),
    Bill(
        name="hidden-thoughts-above-the-limit",
        beyond=True,
        url=PRO,
        request=gemini(100),
        answer=answer("gemini-2.5-pro", usage(12, 50, thoughts=400)),
        content_type=GOOGLE_JSON,
        nanos=4_515_000,
        arithmetic="12 in x 1,250 + 50 out x 10,000 + 400 thought x 10,000 = 4,515,000",
    ),
    Bill(
        name="hidden-claim-above-the-most-of-openai",
        beyond=True,
        url=CHAT,
        request=hi("gpt-4o", 100),
        answer=bills_openai.completion("gpt-4o-2024-08-06", bills_openai.usage(20, 1_000_000_000)),
        nanos=822_528_000,
        arithmetic="128,000 in at priority x 4,250 + 16,384 out at priority x 17,000 = 822,528,000",
        genai="takes every claim: 20 x 2,500 + 1,000,000,000 x 10,000",
    ),
    Bill(
        name="hidden-claim-above-the-most-of-anthropic",
        beyond=True,
        url=CLAUDE,
        request=hello("claude-haiku-4-5", 100),
        answer=bills_anthropic.message(
            "claude-haiku-4-5-20251001", bills_anthropic.usage(20, 1_000_000_000, geo="not_available")
        ),
        nanos=720_000_000,
        arithmetic="200,000 for an hour x 2,000 + 64,000 out x 5,000 = 720,000,000",
        genai="takes every claim: 20 x 1,000 + 1,000,000,000 x 5,000",
    ),
    # Tools that were not offered.
    Bill(
        name="hidden-searches-anthropic",
        beyond=True,
        url=CLAUDE,
        request=hello("claude-sonnet-4-5", 1_024),
        answer=bills_anthropic.message(
            "claude-sonnet-4-5-20250929",
            bills_anthropic.usage(8_000, 300, geo="not_available", **bills_anthropic.searches(3)),
            *_SEARCHED,
        ),
        nanos=58_500_000,
        arithmetic="8,000 in x 3,000 + 300 out x 15,000 + 3 searches x 10,000,000 = 58,500,000",
    ),
    Bill(
        name="hidden-searches-responses",
        beyond=True,
        url=RESPONSES,
        request=respond("gpt-4o", 500),
        answer=response(
            "gpt-4o-2024-08-06", responses_usage(2_000, 150), searched(**_QUERY), searched(**_QUERY), message()
        ),
        nanos=26_500_000,
        arithmetic="2,000 in x 2,500 + 150 out x 10,000 + 2 searches x 10,000,000 = 26,500,000",
        genai="counts no web searches in a response",
    ),
    Bill(
        name="hidden-file-search-responses",
        url=RESPONSES,
        request=respond("gpt-4o", 500),
        answer=response("gpt-4o-2024-08-06", responses_usage(1_500, 100), looked_up("fees"), message()),
        nanos=7_250_000,
        arithmetic="1,500 in x 2,500 + 100 out x 10,000 + 1 file search x 2,500,000 = 7,250,000",
        genai="counts no file searches in a response",
    ),
    Bill(
        name="hidden-search-tools-as-one-object",
        url=RESPONSES,
        request=respond("gpt-4o", 500, tools={"type": "web_search"}),
        answer=response("gpt-4o-2024-08-06", responses_usage(1_000, 100), searched(**_QUERY), message()),
        nanos=13_500_000,
        arithmetic="1,000 in x 2,500 + 100 out x 10,000 + 1 search x 10,000,000 = 13,500,000",
        genai="counts no web searches in a response",
    ),
    Bill(
        name="hidden-grounding-gemini-2-5-per-answer",
        beyond=True,
        url=FLASH,
        request=gemini(200, NEWEST),
        answer=grounded("gemini-2.5-flash", usage(20, 100), "newest opinions", "opinions this week"),
        content_type=GOOGLE_JSON,
        nanos=35_256_000,
        arithmetic="20 in x 300 + 100 out x 2,500 + 1 grounded answer x 35,000,000 = 35,256,000",
        genai="counts no grounded answers",
    ),
    Bill(
        name="hidden-grounding-gemini-3-per-query",
        beyond=True,
        url=f"{MODELS}/gemini-3-flash-preview:generateContent",
        request=gemini(400, NEWEST),
        answer=grounded("gemini-3-flash-preview", usage(20, 100, thoughts=60), "newest opinions", "opinions this week"),
        content_type=GOOGLE_JSON,
        nanos=28_490_000,
        arithmetic="20 in x 500 + 100 out x 3,000 + 60 thought x 3,000 + 2 queries x 14,000,000 = 28,490,000",
        genai="counts no queries",
    ),
    # The tier that the answer names.
    Bill(
        name="hidden-tier-priority",
        url=CHAT,
        request=bills_openai.ask("gpt-4.1", 1_000, limit=200),
        answer=bills_openai.completion(
            "gpt-4.1-2025-04-14", bills_openai.usage(1_000, 100, cached=200), tier="priority"
        ),
        nanos=4_375_000,
        arithmetic="800 in x 3,500 + 200 cached x 875 + 100 out x 14,000 = 4,375,000",
        genai="takes the tier from its caller, not from the answer: priority",
    ),
    Bill(
        name="hidden-tier-flex",
        url=CHAT,
        request=bills_openai.ask("o4-mini", 1_000, limit=1_000),
        answer=bills_openai.completion(
            "o4-mini-2025-04-16", bills_openai.usage(1_000, 500, reasoning=448), tier="flex"
        ),
        nanos=1_650_000,
        arithmetic="1,000 in x 550 + 500 out x 2,200 = 1,650,000",
        genai="takes the tier from its caller, not from the answer: flex",
    ),
    Bill(
        name="hidden-tier-flex-became-default",
        url=CHAT,
        request=bills_openai.ask("gpt-5", 1_000, limit=500, service_tier="flex"),
        answer=bills_openai.completion("gpt-5-2025-08-07", bills_openai.usage(1_000, 200, reasoning=128)),
        nanos=3_250_000,
        arithmetic="1,000 in x 1,250 + 200 out x 10,000 = 3,250,000",
    ),
    Bill(
        name="hidden-tier-not-named",
        url=CHAT,
        request=bills_openai.ask("gpt-5-mini", 1_000, limit=200, service_tier="priority"),
        answer=silent(bills_openai.completion("gpt-5-mini-2025-08-07", bills_openai.usage(1_000, 100))),
        nanos=810_000,  # the dearer tier was asked for, and nothing says that it was not given
        arithmetic="1,000 in x 450 + 100 out x 3,600 = 810,000",
        genai="takes the tier from its caller: priority",
    ),
    Bill(
        name="hidden-input-above-the-window-of-the-book",
        beyond=True,
        url=CLAUDE,
        request=hello("claude-sonnet-4-5", 200),
        answer=bills_anthropic.message("claude-sonnet-4-5", bills_anthropic.usage(500_000, 100)),
        nanos=3_002_250_000,
        arithmetic="500,000 in x 6,000 + 100 out x 22,500 = 3,002,250,000",
    ),
    Bill(
        name="hidden-speed-anthropic-fast",
        url=CLAUDE,
        request=bills_anthropic.ask("claude-opus-4-8", 500, limit=200),
        answer=bills_anthropic.message("claude-opus-4-8", bills_anthropic.usage(500, 100, speed="fast")),
        nanos=10_000_000,
        arithmetic="500 in x 10,000 + 100 out x 50,000 = 10,000,000",
        genai="takes the speed from its caller, not from the answer: fast",
    ),
    Bill(
        name="hidden-tier-gemini-priority",
        url=TTS,
        request=_SPEAK,
        answer=_SPOKEN,
        content_type=GOOGLE_JSON,
        nanos=6_525_000,
        arithmetic="50 in x 900 + 400 out x 16,200 = 6,525,000",
        genai="takes the tier from its caller, not from the answer: priority",
    ),
    Bill(
        name="hidden-tier-gemini-priority-without-a-price",
        beyond=True,
        url=FLASH,
        request=gemini(100),
        answer=answer("gemini-2.5-flash", traffic(usage(100, 50), "ON_DEMAND_PRIORITY")),
        content_type=GOOGLE_JSON,
        nanos=310_000,
        arithmetic="100 in twice x 600 + 50 out twice x 5,000 = 310,000",
        genai="knows no priority of this model, and takes the plain rate",
        evidence="estimate",
    ),
    Bill(
        name="hidden-tier-anthropic-priority-without-a-price",
        url=CLAUDE,
        request=bills_anthropic.ask("claude-sonnet-4-5", 1_000, limit=200),
        answer=bills_anthropic.message(
            "claude-sonnet-4-5-20250929",
            bills_anthropic.usage(1_000, 100, geo="not_available") | {"service_tier": "priority"},
        ),
        nanos=9_000_000,
        arithmetic="1,000 in twice x 6,000 + 100 out twice x 30,000 = 9,000,000",
        genai="knows no priority of Anthropic, and takes the plain rate",
        evidence="estimate",
    ),
    Bill(
        name="hidden-tier-unknown",
        url=GROQ,
        request=bills_openai.ask("llama-3.3-70b-versatile", 100, limit=100),
        answer=whole(
            "llama-3.3-70b-versatile", groq_times(total(100, 40)), x_groq={"id": "req_01"}, service_tier="turbo"
        ),
        nanos=181_200,
        arithmetic="100 in twice x 1,180 + 40 out twice x 1,580 = 181,200",
        genai="reads no tier, and takes the plain rate",
        evidence="estimate",
    ),
    Bill(
        name="hidden-tier-flex-without-a-price",
        url=GROQ,
        request=bills_openai.ask("openai/gpt-oss-120b", 100, limit=100),
        answer=whole("openai/gpt-oss-120b", groq_times(total(100, 50)), x_groq={"id": "req_01"}, service_tier="flex"),
        nanos=45_000,
        arithmetic="100 in x 150 + 50 out x 600 = 45,000",
    ),
    Bill(
        name="hidden-tier-gemini-provisioned",
        url=f"{MODELS}/gemini-2.5-flash-lite:generateContent",
        request=gemini(100),
        answer=answer("gemini-2.5-flash-lite", traffic(usage(200, 50), "PROVISIONED_THROUGHPUT")),
        content_type=GOOGLE_JSON,
        nanos=40_000,
        arithmetic="200 in x 100 + 50 out x 400 = 40,000",
    ),
    # The region that the answer names.
    Bill(
        name="hidden-region-us-with-a-search",
        beyond=True,
        url=CLAUDE,
        request=hello("claude-opus-4-6", 400),
        answer=bills_anthropic.message(
            "claude-opus-4-6", bills_anthropic.usage(1_000, 200, geo="us", **bills_anthropic.searches(1)), *_SEARCHED
        ),
        nanos=21_000_000,
        arithmetic="1,000 in x 5,500 + 200 out x 27,500 + 1 search x 10,000,000 = 21,000,000",
        genai="knows no inference_geo",
    ),
    Bill(
        name="hidden-region-unknown",
        url=CLAUDE,
        request=bills_anthropic.ask("claude-sonnet-4-6", 1_001, limit=200),
        answer=bills_anthropic.message("claude-sonnet-4-6", bills_anthropic.usage(1_001, 101, geo="eu")),
        nanos=4_969_800,
        arithmetic="1,001 in x 3,300 + 101 out x 16,500 = 4,969,800",
        genai="knows no inference_geo",
    ),
    # The model that the answer names.
    Bill(
        name="hidden-dearer-model-openai",
        beyond=True,
        url=CHAT,
        request=bills_openai.ask("gpt-4o-mini", 100, limit=50),
        answer=bills_openai.completion("gpt-4o-2024-08-06", bills_openai.usage(100, 20)),
        nanos=450_000,
        arithmetic="100 in x 2,500 + 20 out x 10,000 = 450,000",
    ),
    Bill(
        name="hidden-dearer-model-anthropic-stream",
        beyond=True,
        url=CLAUDE,
        request=bills_anthropic.ask("claude-haiku-4-5", 100, limit=64, stream=True),
        stream=bills_anthropic_streams.streamed(
            bills_anthropic_streams.start(
                "claude-opus-4-5-20251101", bills_anthropic.usage(100, 1, geo="not_available")
            ),
            *bills_anthropic_streams.words(),
            bills_anthropic_streams.so_far(output_tokens=40),
        ),
        content_type=SSE,
        nanos=1_500_000,
        arithmetic="100 in x 5,000 + 40 out x 25,000 = 1,500,000",
    ),
    Bill(
        name="hidden-dearer-model-openrouter",
        beyond=True,
        url=bills_openrouter.URL,
        request=bills_openrouter.ask("openai/gpt-4o-mini", 100, limit=50),
        answer=bills_openrouter.answer("openai/gpt-4o", "OpenAI", total(100, 20)),
        nanos=450_000,
        arithmetic="100 in x 2,500 + 20 out x 10,000 = 450,000",
    ),
    Bill(
        name="hidden-cheaper-model",
        url=CHAT,
        request=bills_openai.ask("gpt-4o", 100, limit=50),
        answer=bills_openai.completion("gpt-4o-mini-2024-07-18", bills_openai.usage(100, 20)),
        nanos=450_000,
        arithmetic="100 in x 2,500 + 20 out x 10,000 = 450,000",
        genai="takes the model of the answer: 100 x 150 + 20 x 600 = 27,000",
    ),
    Bill(
        name="hidden-cost-above-the-tokens-openrouter",
        beyond=True,
        url=bills_openrouter.URL,
        request=bills_openrouter.ask("openai/gpt-4o-mini", 10, limit=50),
        answer=bills_openrouter.answer("openai/gpt-4o-mini", "OpenAI", bills_openrouter.usage(10, 4, 0.0123)),
        nanos=12_300_000,
        arithmetic="0.0123 dollars x 1,000,000,000 = 12,300,000",
        genai="counts tokens: 10 x 150 + 4 x 600 = 3,900",
    ),
]

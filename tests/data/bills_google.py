"""Gemini: thoughts come on top of candidates, what a tool read on top of the prompt; cached and heard lie inside the prompt.

Above 200,000 prompt tokens 2.5 Pro has another rate. Every chunk of a stream has the usage so far; the last one counts.
"""

from typing import Any

from tests.data.bills_shape import CEILING, Bill, cut, sse, text

MODELS = "https://generativelanguage.googleapis.com/v1beta/models"
PRO = f"{MODELS}/gemini-2.5-pro:generateContent"
FLASH = f"{MODELS}/gemini-2.5-flash:generateContent"
STREAM = f"{MODELS}/gemini-2.5-pro:streamGenerateContent?alt=sse"
JSON = "application/json; charset=UTF-8"
SSE = "text/event-stream"


def ask(words: int, limit: int, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"maxOutputTokens": limit, **more.pop("config", {})}
    contents = [{"role": "user", "parts": [{"text": text(words)}, *parts]}]
    return {"contents": contents, "generationConfig": config, **more}


def usage(
    prompt: int,
    candidates: int | None,
    *,
    thoughts: int | None = None,
    cached: int | None = None,
    tool: int | None = None,
    heard: int = 0,
) -> dict[str, Any]:
    total = sum(part or 0 for part in (prompt, candidates, thoughts, tool))
    kinds = [("TEXT", prompt - heard), *([("AUDIO", heard)] if heard else [])]
    counts = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": candidates,
        "totalTokenCount": total,
        "cachedContentTokenCount": cached,
        "promptTokensDetails": [{"modality": kind, "tokenCount": count} for kind, count in kinds],
        "cacheTokensDetails": cached and [{"modality": "TEXT", "tokenCount": cached}],
        "toolUsePromptTokenCount": tool,
        "toolUsePromptTokensDetails": tool and [{"modality": "TEXT", "tokenCount": tool}],
        "thoughtsTokenCount": thoughts,
    }
    return {key: value for key, value in counts.items() if value is not None}


def answer(
    model: str, used: dict[str, Any], said: str = "Grüße, 世界 🌍", finish: str | None = "STOP", candidates: int = 1
) -> dict[str, Any]:
    end = {} if finish is None else {"finishReason": finish}
    return {
        "candidates": [
            {"content": {"parts": [{"text": said}], "role": "model"}, **end, "index": index}
            for index in range(candidates)
        ],
        "usageMetadata": used,
        "modelVersion": model,
        "responseId": "wKohadbPGOqR1dkPw9qtyQE",
    }


_CHUNKS = sse(
    *(
        answer("gemini-2.5-pro", usage(12, candidates, thoughts=300), said, finish)
        for candidates, said, finish in ((None, "Grü", None), (70, "ße, 世", None), (150, "界 🌍", "STOP"))
    ),
    end="\r\n",
)

GOOGLE: list[Bill] = [
    Bill(
        name="gemini-thoughts-come-on-top",
        url=PRO,
        request=ask(10, 2_000),
        answer=answer("gemini-2.5-pro", usage(10, 20, thoughts=1_000)),
        content_type=JSON,
        nanos=10_212_500,
        arithmetic="10 in x 1,250 + 20 out x 10,000 + 1,000 thought x 10,000 = 10,212,500",
    ),
    Bill(
        name="gemini-cached-lies-inside-the-prompt",
        url=FLASH,
        request=ask(5_000, 200, config={"thinkingConfig": {"thinkingBudget": 0}}),
        answer=answer("gemini-2.5-flash", usage(5_000, 100, cached=4_096)),
        content_type=JSON,
        nanos=644_080,
        arithmetic="904 in x 300 + 4,096 cached x 30 + 100 out x 2,500 = 644,080",
    ),
    Bill(
        name="gemini-what-a-tool-read-comes-on-top",
        url=PRO,
        request=ask(1_050, 1_000, tools=[{"codeExecution": {}}]),
        answer=answer("gemini-2.5-pro", usage(1_000, 100, thoughts=400, tool=50)),
        content_type=JSON,
        nanos=6_312_500,
        arithmetic="1,000 in x 1,250 + 50 read x 1,250 + 100 out x 10,000 + 400 thought x 10,000 = 6,312,500",
    ),
    Bill(
        name="gemini-heard-lies-inside-the-prompt",
        url=FLASH,
        request=ask(1_100, 200, {"inlineData": {"mimeType": "audio/wav", "data": "UklGRiQA" * 100}}),
        answer=answer("gemini-2.5-flash", usage(1_100, 50, heard=800)),
        content_type=JSON,
        nanos=1_015_000,
        arithmetic="300 in x 300 + 800 heard x 1,000 + 50 out x 2,500 = 1,015,000",
    ),
    Bill(
        name="gemini-two-candidates",
        url=FLASH,
        request=ask(30, 50, config={"candidateCount": 2, "thinkingConfig": {"thinkingBudget": 0}}),
        answer=answer("gemini-2.5-flash", usage(30, 80), candidates=2),
        content_type=JSON,
        nanos=209_000,
        arithmetic="30 in x 300 + 80 out x 2,500 = 209,000",
    ),
    Bill(
        name="gemini-as-long-as-the-short-rate-goes",
        url=PRO,
        request=ask(200_000, 500),
        answer=answer("gemini-2.5-pro", usage(200_000, 60, thoughts=40)),
        content_type=JSON,
        nanos=251_000_000,
        arithmetic="200,000 in x 1,250 + 60 out x 10,000 + 40 thought x 10,000 = 251,000,000",
    ),
    Bill(
        name="gemini-one-token-into-the-long-rate",
        url=PRO,
        request=ask(200_001, 500),
        answer=answer("gemini-2.5-pro", usage(200_001, 60, thoughts=40, cached=50_000)),
        content_type=JSON,
        nanos=389_002_500,
        arithmetic="150,001 in x 2,500 + 50,000 cached x 250 + 60 out x 15,000 + 40 thought x 15,000 = 389,002,500",
    ),
    Bill(
        name="gemini-long",
        url=PRO,
        request=ask(300_000, 500),
        answer=answer("gemini-2.5-pro", usage(300_000, 60, thoughts=40)),
        content_type=JSON,
        nanos=751_500_000,
        arithmetic="300,000 in x 2,500 + 60 out x 15,000 + 40 thought x 15,000 = 751,500,000",
    ),
    Bill(
        name="gemini-stream-the-last-chunk-counts",
        url=STREAM,
        request=ask(12, 1_000),
        stream=_CHUNKS,
        content_type=SSE,
        nanos=4_515_000,
        arithmetic="12 in x 1,250 + 150 out x 10,000 + 300 thought x 10,000 = 4,515,000",
    ),
    Bill(
        name="gemini-stream-cut-off",
        url=STREAM,
        request=ask(12, 1_000),
        stream=cut(_CHUNKS, before="界 🌍"),
        content_type=SSE,
        nanos=CEILING,
        arithmetic="1,000 out x 10,000 = 10,000,000",
        genai="would take the usage so far for the usage",
        evidence="assumed",
    ),
]

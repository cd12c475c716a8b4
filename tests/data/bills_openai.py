"""OpenAI and Azure: chat completions and embeddings in one piece.

Cached, written and audio tokens lie inside ``prompt_tokens``, reasoning and audio inside ``completion_tokens``. The
answer's ``service_tier`` decides the rate, whatever was asked for.
"""

from typing import Any

from tests.data.bills_shape import Bill, text

CHAT = "https://api.openai.com/v1/chat/completions"
EMBEDDINGS = "https://api.openai.com/v1/embeddings"
AZURE = "https://myres.openai.azure.com/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21"


def ask(model: str, words: int, limit: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": text(words)}]
    return {"model": model, "messages": messages, "max_completion_tokens": limit, **more}


def usage(
    prompt: int,
    completion: int,
    *,
    cached: int = 0,
    written: int | None = None,
    audio_in: int = 0,
    reasoning: int = 0,
    audio_out: int = 0,
) -> dict[str, Any]:
    writes = {} if written is None else {"cache_write_tokens": written}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, **writes, "audio_tokens": audio_in},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": audio_out,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def choice(
    index: int = 0, content: str | None = "Grüße, 世界 🌍", finish: str = "stop", **message: Any
) -> dict[str, Any]:
    said = {"role": "assistant", "content": content, "refusal": None, "annotations": [], **message}
    return {"index": index, "message": said, "logprobs": None, "finish_reason": finish}


def completion(model: str, used: dict[str, Any], *choices: dict[str, Any], tier: str = "default") -> dict[str, Any]:
    return {
        "id": "chatcmpl-CfQ3nXw0v9LJ0m2hZk1T7yUu4dQeR",
        "object": "chat.completion",
        "created": 1795348800,
        "model": model,
        "choices": list(choices) or [choice()],
        "usage": used,
        "service_tier": tier,
        "system_fingerprint": "fp_560af6e559",
    }


_FUNCTION = {
    "name": "get_opinion",
    "description": "An opinion by its docket number",
    "parameters": {"type": "object", "properties": {"docket": {"type": "string"}}, "required": ["docket"]},
}
_SAFE = {kind: {"filtered": False, "severity": "safe"} for kind in ("hate", "self_harm", "sexual", "violence")}
_SPEECH = {"id": "audio_1", "data": "UklGRv////9XQVZFZm10IBAAAAAB", "expires_at": 1795352400, "transcript": "Yes."}

OPENAI: list[Bill] = [
    Bill(
        name="openai-chat",
        url=CHAT,
        request=ask("gpt-4o-mini", 20, limit=50),
        answer=completion("gpt-4o-mini-2024-07-18", usage(20, 18)),
        nanos=13_800,
        arithmetic="20 in x 150 + 18 out x 600 = 13,800",
    ),
    Bill(
        name="openai-chat-cached-lies-inside-the-prompt",
        url=CHAT,
        request=ask("gpt-4o", 2_006, limit=400),
        answer=completion("gpt-4o-2024-08-06", usage(2_006, 300, cached=1_920)),
        nanos=5_615_000,
        arithmetic="86 in x 2,500 + 1,920 cached x 1,250 + 300 out x 10,000 = 5,615,000",
    ),
    Bill(
        name="openai-chat-reasoning-lies-inside-the-completion",
        url=CHAT,
        request=ask("o3", 75, limit=2_000, reasoning_effort="medium"),
        answer=completion("o3-2025-04-16", usage(75, 1_186, reasoning=1_024)),
        nanos=9_638_000,
        arithmetic="75 in x 2,000 + 1,186 out x 8,000 = 9,638,000",
    ),
    Bill(
        name="openai-chat-two-choices",
        url=CHAT,
        request=ask("gpt-4o-mini", 20, limit=20, n=2),
        answer=completion("gpt-4o-mini-2024-07-18", usage(20, 36), choice(0), choice(1, "Ja.")),
        nanos=24_600,
        arithmetic="20 in x 150 + 36 out x 600 = 24,600",
    ),
    Bill(
        name="openai-chat-legacy-fields",
        url=CHAT,
        request={
            "model": "gpt-3.5-turbo",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text(82)}],
            "functions": [_FUNCTION],
            "function_call": "auto",
            "max_tokens": 30,
        },
        answer={
            "id": "chatcmpl-8s9Bq1dPp7y3cWm0aRk6Z2Ue",
            "object": "chat.completion",
            "created": 1795348800,
            "model": "gpt-3.5-turbo-0125",
            "choices": [
                choice(content=None, finish="function_call", function_call={"name": "get_opinion", "arguments": "{}"})
            ],
            "usage": {"prompt_tokens": 82, "completion_tokens": 18, "total_tokens": 100},
            "system_fingerprint": None,
        },
        nanos=68_000,
        arithmetic="82 in x 500 + 18 out x 1,500 = 68,000",
    ),
    Bill(
        name="openai-chat-a-date-nobody-knows",
        url=CHAT,
        request=ask("gpt-4o-2025-06-15", 100, limit=60),
        answer=completion("gpt-4o-2025-06-15", usage(100, 50)),
        nanos=750_000,
        arithmetic="100 in x 2,500 + 50 out x 10,000 = 750,000",
        genai="knows no gpt-4o-2025-06-15; a snapshot without its own price has its family's",
    ),
    Bill(
        name="openai-chat-audio-lies-inside-both",
        url=CHAT,
        request={
            "model": "gpt-audio",
            "modalities": ["text", "audio"],
            "audio": {"voice": "alloy", "format": "wav"},
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": text(1_130)},
                        {"type": "input_audio", "input_audio": {"data": "UklGRiQA" * 100, "format": "wav"}},
                    ],
                }
            ],
            "max_completion_tokens": 300,
        },
        answer=completion(
            "gpt-audio-2025-08-28", usage(1_130, 250, audio_in=130, audio_out=200), choice(content=None, audio=_SPEECH)
        ),
        nanos=19_960_000,
        arithmetic="1,000 in x 2,500 + 130 heard x 32,000 + 50 out x 10,000 + 200 spoken x 64,000 = 19,960,000",
    ),
    Bill(
        name="openai-chat-cache-writes-lie-inside-the-prompt",
        url=CHAT,
        request=ask("gpt-5.6-sol", 3_000, limit=200),
        answer=completion("gpt-5.6-sol", usage(3_000, 100, cached=1_000, written=1_500)),
        nanos=11_900_000,
        arithmetic="500 in x 4,000 + 1,000 cached x 400 + 1,500 written x 5,000 + 100 out x 20,000 = 11,900,000",
    ),
    Bill(
        name="openai-chat-auto-became-priority",
        url=CHAT,
        request=ask("gpt-4o", 1_000, limit=300, service_tier="auto"),
        answer=completion("gpt-4o-2024-08-06", usage(1_000, 200, cached=400), tier="priority"),
        nanos=6_800_000,
        arithmetic="600 in x 4,250 + 400 cached x 2,125 + 200 out x 17,000 = 6,800,000",
        genai="takes the tier from its caller, not from the answer: priority",
    ),
    Bill(
        name="openai-chat-auto-became-flex",
        url=CHAT,
        request=ask("gpt-5", 1_001, limit=900, service_tier="auto"),
        answer=completion("gpt-5-2025-08-07", usage(1_001, 500, cached=401, reasoning=448), tier="flex"),
        nanos=2_900_063,
        arithmetic="600 in x 625 + 401 cached x 62.5 + 500 out x 5,000 = 2,900,062.5, up to 2,900,063",
        genai="takes the tier from its caller, not from the answer: flex",
    ),
    Bill(
        name="openai-chat-priority-became-default",
        url=CHAT,
        request=ask("gpt-4o", 1_000, limit=300, service_tier="priority"),
        answer=completion("gpt-4o-2024-08-06", usage(1_000, 200), tier="default"),
        nanos=4_500_000,
        arithmetic="1,000 in x 2,500 + 200 out x 10,000 = 4,500,000",
    ),
    Bill(
        name="openai-chat-batch",
        url=CHAT,
        request=ask("gpt-4o", 1_000, limit=600),
        answer=completion("gpt-4o-2024-08-06", usage(1_000, 500, cached=200), tier="default"),
        nanos=3_750_000,
        arithmetic="800 in x 1,250 + 200 cached x 1,250 + 500 out x 5,000 = 3,750,000",
        genai="asked without a context it knows of no batch; the answer says default too",
        price_context={"processing": "batch"},
    ),
    Bill(
        name="openai-chat-as-long-as-the-short-rate-goes",
        url=CHAT,
        request=ask("gpt-5.4", 272_000, limit=2_000),
        answer=completion("gpt-5.4-2026-03-05", usage(272_000, 1_000, reasoning=512)),
        nanos=695_000_000,
        arithmetic="272,000 in x 2,500 + 1,000 out x 15,000 = 695,000,000",
    ),
    Bill(
        name="openai-chat-one-token-into-the-long-rate",
        url=CHAT,
        request=ask("gpt-5.4", 272_001, limit=2_000),
        answer=completion("gpt-5.4-2026-03-05", usage(272_001, 1_000, cached=100_000)),
        nanos=932_505_000,
        arithmetic="172,001 in x 5,000 + 100,000 cached x 500 + 1,000 out x 22,500 = 932,505,000",
    ),
    Bill(
        name="openai-embeddings",
        url=EMBEDDINGS,
        request={"model": "text-embedding-3-small", "input": text(8), "encoding_format": "float"},
        answer={
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.0023064255, -0.009327292, -0.0028842222]}],
            "model": "text-embedding-3-small",
            "usage": {"prompt_tokens": 8, "total_tokens": 8},
        },
        nanos=160,
        arithmetic="8 in x 20 = 160",
    ),
    Bill(
        name="openai-embeddings-of-many",
        url=EMBEDDINGS,
        request={
            "model": "text-embedding-3-large",
            "input": [text(999), text(1_000)],
            "dimensions": 256,
            "encoding_format": "base64",
        },
        answer={
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": "zczMPQAAgD8="} for index in range(2)],
            "model": "text-embedding-3-large",
            "usage": {"prompt_tokens": 1_999, "total_tokens": 1_999},
        },
        nanos=259_870,
        arithmetic="1,999 in x 130 = 259,870",
    ),
    Bill(
        name="azure-chat-names-its-model-in-the-url",
        url=AZURE,
        request={"messages": [{"role": "user", "content": text(150)}], "max_tokens": 100},
        answer={
            **completion("gpt-4o-2024-11-20", usage(150, 60), {**choice(), "content_filter_results": _SAFE}),
            "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": _SAFE}],
        },
        nanos=975_000,
        arithmetic="150 in x 2,500 + 60 out x 10,000 = 975,000",
    ),
]

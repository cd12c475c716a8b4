"""Providers that speak OpenAI's chat completions, each with an accent of its own.

Mistral and DeepSeek send the usage on the last chunk that has a choice, Groq in ``x_groq``. DeepSeek's
``prompt_cache_hit_tokens`` are cached input; its price at ``AT`` is the one of the day.
"""

from typing import Any

from tests.data.bills_shape import CEILING, SSE, Bill, cut, sse, text

MISTRAL = "https://api.mistral.ai/v1/chat/completions"
GROQ = "https://api.groq.com/openai/v1/chat/completions"
DEEPSEEK = "https://api.deepseek.com/chat/completions"


def ask(model: str, words: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text(words)}], **more}


def total(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, **more}


def whole(model: str, used: dict[str, Any], /, message: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": "Grüße, 世界 🌍", **(message or {})}
    return {
        "id": "d8f1b7a0-6f3e-4f7e-9d0c-0c6f3a8f1a11",
        "object": "chat.completion",
        "created": 1795348800,
        "model": model,
        "choices": [{"index": 0, "message": said, "logprobs": None, "finish_reason": "stop"}],
        "usage": used,
        **more,
    }


def chunk(model: str, said: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": "d8f1b7a0-6f3e-4f7e-9d0c-0c6f3a8f1a12",
        "object": "chat.completion.chunk",
        "created": 1795348800,
        "model": model,
        "choices": [{"index": 0, "delta": said, "logprobs": None, "finish_reason": finish}],
        **more,
    }


def spoken(model: str, **more: Any) -> list[dict[str, Any]]:
    parts = ({"role": "assistant", "content": ""}, *({"content": word} for word in ("Grü", "ße, ", "世界", " 🌍")))
    return [chunk(model, said, **more) for said in parts]


def groq_times(used: dict[str, Any]) -> dict[str, Any]:
    return {"queue_time": 0.0512, **used, "prompt_time": 0.0019, "completion_time": 0.2211, "total_time": 0.223}


def hits(hit: int, miss: int) -> dict[str, int]:
    return {"prompt_cache_hit_tokens": hit, "prompt_cache_miss_tokens": miss}


_MISTRAL_SMALL = sse(
    *spoken("mistral-small-latest"),
    chunk(
        "mistral-small-latest",
        {"content": ""},
        "stop",
        usage=total(100, 40, prompt_tokens_details={"cached_tokens": 64}),
    ),
    "[DONE]",
)
_GROQ_LLAMA = sse(
    chunk("llama-3.3-70b-versatile", {"role": "assistant", "content": ""}, x_groq={"id": "req_01"}),
    *spoken("llama-3.3-70b-versatile")[1:],
    chunk("llama-3.3-70b-versatile", {}, "stop", x_groq={"id": "req_01", "usage": groq_times(total(44, 61))}),
    "[DONE]",
)
_DEEPSEEK_CHAT = ": keep-alive\n\n: keep-alive\n\n" + sse(
    *spoken("deepseek-chat", system_fingerprint="fp_a49d71b8a1", usage=None),
    chunk(
        "deepseek-chat",
        {"content": "", "role": None},
        "stop",
        system_fingerprint="fp_a49d71b8a1",
        usage=total(17, 9, prompt_tokens_details={"cached_tokens": 0}, **hits(0, 17)),
    ),
    "[DONE]",
)

COMPATIBLE: list[Bill] = [
    Bill(
        name="mistral",
        url=MISTRAL,
        request=ask("mistral-large-latest", 15, max_tokens=200),
        answer=whole("mistral-large-latest", total(15, 120), {"tool_calls": None, "prefix": False}),
        nanos=750_000,
        arithmetic="15 in x 2,000 + 120 out x 6,000 = 750,000",
    ),
    Bill(
        name="mistral-stream-without-asking-for-usage",
        url=MISTRAL,
        request=ask("mistral-small-latest", 100, max_tokens=60, stream=True),
        stream=_MISTRAL_SMALL,
        content_type=SSE,
        nanos=30_360,
        arithmetic="36 in x 150 + 64 cached x 15 + 40 out x 600 = 30,360",
    ),
    Bill(
        name="groq-on-demand-is-the-plain-rate",
        url=GROQ,
        request=ask("openai/gpt-oss-120b", 1_200, max_completion_tokens=400, service_tier="auto"),
        answer=whole(
            "openai/gpt-oss-120b",
            groq_times(
                total(
                    1_200,
                    300,
                    prompt_tokens_details={"cached_tokens": 1_024},
                    completion_tokens_details={"reasoning_tokens": 210},
                )
            ),
            {"reasoning": "Let me see."},
            usage_breakdown=None,
            system_fingerprint="fp_64b7c1a2e0",
            x_groq={"id": "req_01"},
            service_tier="on_demand",
        ),
        nanos=283_200,
        arithmetic="176 in x 150 + 1,024 cached x 75 + 300 out x 600 = 283,200",
    ),
    Bill(
        name="groq-stream",
        url=GROQ,
        request=ask("llama-3.3-70b-versatile", 44, max_completion_tokens=100, stream=True),
        stream=_GROQ_LLAMA,
        content_type="text/event-stream",
        nanos=74_150,
        arithmetic="44 in x 590 + 61 out x 790 = 74,150",
    ),
    Bill(
        name="groq-stream-cut-off",
        url=GROQ,
        request=ask("llama-3.3-70b-versatile", 44, max_completion_tokens=100, stream=True),
        stream=cut(_GROQ_LLAMA, before='"usage"'),
        content_type="text/event-stream",
        nanos=CEILING,
        arithmetic="100 out x 790 = 79,000",
        genai="no usage ever came",
        evidence="assumed",
    ),
    Bill(
        name="deepseek-hits-are-cached-input",
        url=DEEPSEEK,
        request=ask("deepseek-chat", 1_000, max_tokens=300),
        answer=whole(
            "deepseek-chat",
            total(1_000, 200, prompt_tokens_details={"cached_tokens": 640}, **hits(640, 360)),
            system_fingerprint="fp_a49d71b8a1",
        ),
        nanos=362_000,
        arithmetic="360 in x 270 + 640 cached x 70 + 200 out x 1,100 = 362,000",
    ),
    Bill(
        name="deepseek-hits-in-its-own-words-only",
        url=DEEPSEEK,
        request=ask("deepseek-reasoner", 500, max_tokens=1_000),
        answer=whole(
            "deepseek-reasoner",
            total(500, 900, completion_tokens_details={"reasoning_tokens": 700}, **hits(384, 116)),
            {"reasoning_content": "Let me see."},
            system_fingerprint="fp_393bca965e",
        ),
        nanos=2_088_560,
        arithmetic="116 in x 550 + 384 cached x 140 + 900 out x 2,190 = 2,088,560",
        genai="reads cached tokens in prompt_tokens_details only",
    ),
    Bill(
        name="deepseek-stream-behind-comments",
        url=DEEPSEEK,
        request=ask("deepseek-chat", 17, max_tokens=50, stream=True, stream_options={"include_usage": True}),
        stream=_DEEPSEEK_CHAT,
        content_type=SSE,
        nanos=14_490,
        arithmetic="17 in x 270 + 9 out x 1,100 = 14,490",
    ),
]

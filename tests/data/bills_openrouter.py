"""OpenRouter says what it charged: ``cost``, in dollars, whatever the tokens would come to.

Where it calls with the customer's own key, ``cost`` is its fee alone, and the provider charges
``upstream_inference_cost`` on top; where it does not, that field says once more what ``cost`` says.
"""

from typing import Any

from tests.data.bills_shape import CEILING, Bill, cut, sse, text

URL = "https://openrouter.ai/api/v1/chat/completions"
SSE = "text/event-stream"
WAIT = ": OPENROUTER PROCESSING\n\n"


def ask(model: str, words: int, limit: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text(words)}], "max_tokens": limit, **more}


def usage(
    prompt: int, completion: int, cost: float, *, own_key: bool = False, upstream: float | None = None
) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "cost": cost,
        "is_byok": own_key,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, "audio_tokens": 0, "video_tokens": 0},
        "cost_details": {
            "upstream_inference_cost": upstream,
            "upstream_inference_prompt_cost": 0,
            "upstream_inference_completions_cost": 0 if upstream is None else upstream,
        },
        "completion_tokens_details": {"reasoning_tokens": 0, "image_tokens": 0, "audio_tokens": 0},
    }


def answer(
    model: str, provider: str, used: dict[str, Any], said: str = "Grüße, 世界 🌍", finish: str | None = "stop"
) -> dict[str, Any]:
    message = {"role": "assistant", "content": said, "refusal": None, "reasoning": None}
    ending = {"finish_reason": finish, "native_finish_reason": finish}
    return {
        "id": "gen-1795348800-Qm3b1V0nYc5TzL8k",
        "object": "chat.completion",
        "created": 1795348800,
        "model": model,
        "provider": provider,
        "system_fingerprint": None,
        "service_tier": None,
        "choices": [{"index": 0, "logprobs": None, **ending, "message": message}],
        "usage": used,
    }


def chunk(said: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    ending = {"finish_reason": finish, "native_finish_reason": finish}
    return {
        "id": "gen-1795348800-Qm3b1V0nYc5TzL8m",
        "object": "chat.completion.chunk",
        "created": 1795348800,
        "model": "openai/gpt-4o-mini",
        "provider": "OpenAI",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": said}, **ending, "logprobs": None}],
        **more,
    }


_STREAM = (
    WAIT
    + WAIT
    + sse(*(chunk(word) for word in ("Grü", "ße, ", "世界", " 🌍")), chunk("", "stop"))
    + WAIT
    + sse(chunk("", usage=usage(40, 30, 0.00007145, upstream=0.00007145)), "[DONE]")
)

OPENROUTER: list[Bill] = [
    Bill(
        name="openrouter-cost-is-the-charge",
        url=URL,
        request=ask("openai/gpt-4o-mini", 10, limit=200),
        answer=answer("openai/gpt-4o-mini", "Azure", usage(10, 4, 0.0000616)),
        nanos=61_600,
        arithmetic="0.0000616 dollars x 1,000,000,000 = 61,600",
        genai="counts tokens: 10 x 150 + 4 x 600 = 3,900",
    ),
    Bill(
        name="openrouter-cost-is-rounded-up",
        url=URL,
        request=ask("openai/gpt-4o-mini", 50, limit=200),
        answer=answer("openai/gpt-4o-mini", "OpenAI", usage(50, 8, 0.0000123456789)),
        nanos=12_346,
        arithmetic="0.0000123456789 dollars x 1,000,000,000 = 12,345.6789, up to 12,346",
        genai="counts tokens: 50 x 150 + 8 x 600 = 12,300",
    ),
    Bill(
        name="openrouter-upstream-cost-is-no-second-charge",
        url=URL,
        request=ask("anthropic/claude-sonnet-4.5", 1_000, limit=500),
        answer=answer("anthropic/claude-sonnet-4.5", "Anthropic", usage(1_000, 440, 0.0096, upstream=0.0096)),
        nanos=9_600_000,
        arithmetic="0.0096 dollars x 1,000,000,000 = 9,600,000",
    ),
    Bill(
        name="openrouter-own-key-pays-fee-and-provider",
        url=URL,
        request=ask("anthropic/claude-sonnet-4.5", 1_000, limit=500),
        answer=answer(
            "anthropic/claude-sonnet-4.5", "Anthropic", usage(1_000, 440, 0.00048336, own_key=True, upstream=0.0096672)
        ),
        nanos=10_150_560,
        arithmetic="0.00048336 dollars x 1,000,000,000 + 0.0096672 dollars x 1,000,000,000 = 10,150,560",
        genai="counts tokens, and no fee: 1,000 x 3,000 + 440 x 15,000 = 9,600,000",
    ),
    Bill(
        name="openrouter-own-key-without-a-fee",
        url=URL,
        request=ask("openai/gpt-4o-mini", 600, limit=200),
        answer=answer("openai/gpt-4o-mini", "OpenAI", usage(600, 36, 0, own_key=True, upstream=0.0001116)),
        nanos=111_600,
        arithmetic="0 dollars x 1,000,000,000 + 0.0001116 dollars x 1,000,000,000 = 111,600",
    ),
    Bill(
        name="openrouter-zero-is-a-price",
        url=URL,
        request=ask("openai/gpt-4o-mini", 30, limit=200),
        answer=answer("openai/gpt-4o-mini", "OpenAI", usage(30, 0, 0), said="", finish=None),
        nanos=0,
        arithmetic="0 dollars x 1,000,000,000 = 0",
        genai="counts tokens: 30 x 150 = 4,500; an answer without one is free",
    ),
    Bill(
        name="openrouter-stream-behind-comments",
        url=URL,
        request=ask("openai/gpt-4o-mini", 40, limit=200, stream=True),
        stream=_STREAM,
        content_type=SSE,
        nanos=71_450,
        arithmetic="0.00007145 dollars x 1,000,000,000 = 71,450",
        genai="counts tokens: 40 x 150 + 30 x 600 = 24,000",
    ),
    Bill(
        name="openrouter-stream-cut-off",
        url=URL,
        request=ask("openai/gpt-4o-mini", 40, limit=200, stream=True),
        stream=cut(_STREAM, before='"usage"'),
        content_type=SSE,
        nanos=CEILING,
        arithmetic="200 out x 600 = 120,000",
        genai="no usage ever came",
        evidence="assumed",
    ),
]

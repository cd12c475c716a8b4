"""Answers like the OpenAI-compatible providers Mistral, Groq, DeepSeek and OpenRouter, with their differences."""

import secrets

from x402guard.testing.engine import JSON
from x402guard.testing.llm_calls import Completion, LlmCall
from x402guard.testing.llm_chat import Chat, ChatDialect
from x402guard.testing.llm_openai import embeddings, models, openai_error
from x402guard.testing.llm_shapes import Document, Endpoint, Provider, reported, tier

_CHAT = ("model", "messages")


class _Plain(ChatDialect):
    """A message has only a role, a content and tool calls."""

    null_usage = False
    whole_tool_calls = True

    def message(self, chat: Chat) -> dict[str, JSON]:
        spoken = super().message(chat)
        return {name: spoken[name] for name in ("role", "content", "tool_calls") if name in spoken}

    def first_delta(self) -> dict[str, JSON]:
        return {"role": "assistant", "content": ""}


class _Mistral(_Plain):
    """A stream's usage is always in its last chunk, and a tool call is always in one chunk."""

    id_prefix = ""

    def usage(self, chat: Chat) -> dict[str, JSON]:
        served = tier(chat.call, chat.completion, None)
        details = {"prompt_tokens_details": {"cached_tokens": chat.completion.cached_tokens}}
        return chat.counts | details | ({"service_tier": served} if served else {})

    def about(self, chat: Chat) -> dict[str, JSON]:
        del chat
        return {}

    def choice(self, index: int, finish_reason: str | None, **content: JSON) -> dict[str, JSON]:
        return {"index": index, "finish_reason": finish_reason, **content}

    def message(self, chat: Chat) -> dict[str, JSON]:
        spoken = super().message(chat)
        return {"role": "assistant", "tool_calls": spoken.get("tool_calls"), "content": spoken["content"] or ""}

    def last_delta(self) -> dict[str, JSON]:
        return {"content": ""}

    def ending(self, chat: Chat, finish: dict[str, JSON]) -> list[dict[str, JSON]]:
        return [finish | reported(chat.completion, "usage", self.usage(chat))]


class _DeepSeek(_Plain):
    """A stream's usage is in its last chunk, as at Mistral, and splits the prompt into cache hits and misses."""

    id_prefix = ""
    null_usage = True
    whole_tool_calls = False

    def usage(self, chat: Chat) -> dict[str, JSON]:
        hit = chat.completion.cached_tokens
        reasoning = {"completion_tokens_details": {"reasoning_tokens": chat.reasoning}} if chat.reasoning else {}
        cache = {"prompt_cache_hit_tokens": hit, "prompt_cache_miss_tokens": chat.completion.input_tokens - hit}
        return chat.counts | {"prompt_tokens_details": {"cached_tokens": hit}} | reasoning | cache

    def about(self, chat: Chat) -> dict[str, JSON]:
        del chat
        return {"system_fingerprint": "fp_x402guard"}

    def last_delta(self) -> dict[str, JSON]:
        return {"content": ""}

    def ending(self, chat: Chat, finish: dict[str, JSON]) -> list[dict[str, JSON]]:
        return [finish | reported(chat.completion, "usage", self.usage(chat))]


class _Groq(_Plain):
    """A stream's usage is in its finishing chunk under `x_groq`; if requested, also twice under `usage`."""

    def usage(self, chat: Chat) -> dict[str, JSON]:
        hit = chat.completion.cached_tokens
        times = {"queue_time": 0.05, "prompt_time": 0.002, "completion_time": 0.03, "total_time": 0.032}
        details = {"prompt_tokens_details": {"cached_tokens": hit}} if hit else {}
        if chat.reasoning:
            details["completion_tokens_details"] = {"reasoning_tokens": chat.reasoning}
        return chat.counts | times | details

    def about(self, chat: Chat) -> dict[str, JSON]:
        del chat
        return {"system_fingerprint": "fp_x402guard"}

    def beside(self, chat: Chat) -> dict[str, JSON]:
        numbered = {"x_groq": {"id": f"req_{secrets.token_hex(13)}"}}
        return numbered | {"service_tier": tier(chat.call, chat.completion, "on_demand"), "usage_breakdown": None}

    def ending(self, chat: Chat, finish: dict[str, JSON]) -> list[dict[str, JSON]]:
        used = reported(chat.completion, "usage", self.usage(chat))
        finish |= {"x_groq": {"id": f"req_{secrets.token_hex(13)}", **used}}
        if not chat.asks_usage:
            return [finish]
        return [
            finish | used,
            self.chunk(chat) | used | {"service_tier": tier(chat.call, chat.completion, "on_demand")},
        ]


class _OpenRouter(_Plain):
    """A stream begins with a comment and has two finishing chunks, the second one with the cost."""

    id_prefix = "gen-"
    comment = b": OPENROUTER PROCESSING\n\n"

    def usage(self, chat: Chat) -> dict[str, JSON]:
        completion, cost = chat.completion, chat.completion.cost or 0
        cost_details = {"upstream_inference_prompt_cost": 0, "upstream_inference_completions_cost": cost}
        return chat.counts | {
            "cost": cost,
            "is_byok": False,
            "prompt_tokens_details": {
                "cached_tokens": completion.cached_tokens,
                "cache_write_tokens": completion.cache_write_tokens,
                "audio_tokens": 0,
                "video_tokens": 0,
            },
            "cost_details": {"upstream_inference_cost": cost} | cost_details,
            "completion_tokens_details": {"reasoning_tokens": chat.reasoning, "image_tokens": 0, "audio_tokens": 0},
        }

    def about(self, chat: Chat) -> dict[str, JSON]:
        return {
            "provider": "x402guard",
            "system_fingerprint": None,
            "service_tier": tier(chat.call, chat.completion, None),
        }

    def choice(self, index: int, finish_reason: str | None, **content: JSON) -> dict[str, JSON]:
        return super().choice(index, finish_reason, **content) | {"native_finish_reason": finish_reason}

    def last_delta(self) -> dict[str, JSON]:
        return {"role": "assistant", "content": ""}

    def ending(self, chat: Chat, finish: dict[str, JSON]) -> list[dict[str, JSON]]:
        return [finish, finish | reported(chat.completion, "usage", self.usage(chat))]


def _mistral_embeddings(call: LlmCall, completion: Completion) -> Document:
    content = embeddings(call, completion).content
    used = {"prompt_tokens": completion.input_tokens, "completion_tokens": 0, "total_tokens": completion.input_tokens}
    return Document({"id": secrets.token_hex(16), **content, **reported(completion, "usage", used)})


def _mistral_models(call: LlmCall, completion: Completion) -> Document:
    content = models(call, completion).content
    card = {"type": "base", "capabilities": {"completion_chat": True, "function_calling": True}}
    return Document({**content, "data": [model | card for model in content["data"]]})


def _mistral_error(_call: LlmCall, status: int, message: str) -> JSON:
    kind = {401: "unauthorized", 429: "rate_limited"}.get(status, "invalid_request_error")
    numbered = {"param": None, "code": str(10 * status), "raw_status_code": status}
    return {"object": "error", "message": message, "type": kind, **numbered}


def _openrouter_error(_call: LlmCall, status: int, message: str) -> JSON:
    return {"error": {"message": message, "code": status}}


def _listing(path: str) -> Endpoint:
    return Endpoint(path, models, method="GET")


MISTRAL = Provider(
    "mistral",
    (
        Endpoint("/v1/chat/completions", _Mistral(), _CHAT),
        Endpoint("/v1/embeddings", _mistral_embeddings, ("model", "input")),
        Endpoint("/v1/models", _mistral_models, method="GET"),
    ),
    _mistral_error,
)
"""Replaces https://api.mistral.ai."""

_groq, _deepseek = _Groq(), _DeepSeek()

GROQ = Provider(
    "groq",
    (Endpoint("/openai/v1/chat/completions", _groq, _CHAT), _listing("/openai/v1/models")),
    openai_error,
)
"""Replaces https://api.groq.com."""

DEEPSEEK = Provider(
    "deepseek",
    (
        Endpoint("/chat/completions", _deepseek, _CHAT),
        Endpoint("/v1/chat/completions", _deepseek, _CHAT),
        _listing("/models"),
        _listing("/v1/models"),
    ),
    openai_error,
)
"""Replaces https://api.deepseek.com, with and without the version in the path."""

OPENROUTER = Provider(
    "openrouter",
    (Endpoint("/api/v1/chat/completions", _OpenRouter(), _CHAT), _listing("/api/v1/models")),
    _openrouter_error,
)
"""Replaces https://openrouter.ai."""

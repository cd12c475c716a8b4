"""Builds chat completions, as a document and as a stream, and defines where providers differ."""

import secrets
import time
from dataclasses import dataclass, field

from x402guard.testing.engine import JSON
from x402guard.testing.llm_calls import Completion, LlmCall, ToolCall
from x402guard.testing.llm_shapes import Document, Rendered, Stream, compact, pieces, reported, sse, tier, within

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Chat:
    """One answer, with the values that all of its chunks repeat."""

    call: LlmCall
    completion: Completion
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def choices(self) -> int:
        """The number of requested answers."""
        wanted = self.call.body.get("n")
        return wanted if isinstance(wanted, int) and wanted > 1 else 1

    @property
    def output(self) -> tuple[int, bool]:
        """The output tokens of all choices, and whether the request's limit cut any off."""
        body = self.call.body
        limit = next(
            (body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None), None
        )
        return within(limit * self.choices if isinstance(limit, int) else None, self.completion.output_tokens)

    @property
    def counts(self) -> dict[str, int]:
        """The counts in every usage object."""
        prompt, output = self.completion.input_tokens, self.output[0]
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    @property
    def reasoning(self) -> int:
        """How many of the output tokens are hidden reasoning."""
        return min(self.completion.reasoning_tokens, self.output[0])

    @property
    def finish_reason(self) -> str:
        """Why the answer ended."""
        if self.output[1]:
            return "length"
        return "tool_calls" if self.completion.tool_calls else "stop"

    @property
    def asks_usage(self) -> bool:
        """Whether the request asks for usage at the end of the stream."""
        options = self.call.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True


class ChatDialect:
    """OpenAI's chat completions. Other providers' dialects override the parts that differ."""

    id_prefix = "chatcmpl-"
    null_usage = True
    """Whether a stream with usage at its end has `usage: null` in the earlier chunks."""
    whole_tool_calls = False
    """Whether a tool call is sent in one chunk instead of several."""
    comment = b""
    """The bytes before a stream's first event."""

    def __call__(self, call: LlmCall, completion: Completion) -> Rendered:
        """Answer a call."""
        chat = Chat(call, completion, self.id_prefix + secrets.token_hex(12))
        return Stream(self._events(chat)) if call.streams else Document(self._document(chat))

    # ---- parts that differ between providers ----

    def usage(self, chat: Chat) -> dict[str, JSON]:
        """The usage object."""
        completion = chat.completion
        return chat.counts | {
            "prompt_tokens_details": {
                "cached_tokens": completion.cached_tokens,
                "audio_tokens": 0,
                "cache_write_tokens": completion.cache_write_tokens,
            },
            "completion_tokens_details": {
                "reasoning_tokens": chat.reasoning,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def about(self, chat: Chat) -> dict[str, JSON]:
        """The fields beside the choices of every document and chunk."""
        return {"service_tier": tier(chat.call, chat.completion, "default"), "system_fingerprint": "fp_x402guard"}

    def beside(self, chat: Chat) -> dict[str, JSON]:
        """The fields of a document that a chunk does not have."""
        del chat
        return {}

    def choice(self, index: int, finish_reason: str | None, **content: JSON) -> dict[str, JSON]:
        """One choice, of a document or a chunk."""
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

    def message(self, chat: Chat) -> dict[str, JSON]:
        """The whole message of a document."""
        calls = [_tool_call(call) for call in chat.completion.tool_calls]
        spoken: dict[str, JSON] = {
            "role": "assistant",
            "content": chat.completion.text or None,
            "refusal": None,
            "annotations": [],
        }
        return spoken | ({"tool_calls": calls} if calls else {})

    def first_delta(self) -> dict[str, JSON]:
        """The delta in the first chunk of a choice."""
        return {"role": "assistant", "content": "", "refusal": None}

    def last_delta(self) -> dict[str, JSON]:
        """The delta in the chunk with the finish reason of a choice."""
        return {}

    def opening(self, chat: Chat) -> list[bytes]:
        """The events at the start of a stream, before any choice."""
        del chat
        return []

    def ending(self, chat: Chat, finish: dict[str, JSON]) -> list[dict[str, JSON]]:
        """The last chunks of a stream: the last choice's `finish` chunk, as this provider sends it, and later ones."""
        if not chat.asks_usage:
            return [finish]
        return [finish, self.chunk(chat) | reported(chat.completion, "usage", self.usage(chat))]

    # ---- parts that all providers share ----

    def chunk(self, chat: Chat, *choices: JSON) -> dict[str, JSON]:
        """One event of a stream."""
        content = _frame(chat, "chat.completion.chunk") | self.about(chat) | {"choices": list(choices)}
        return content | ({"usage": None} if self.null_usage and chat.asks_usage else {})

    def _document(self, chat: Chat) -> dict[str, JSON]:
        message = self.message(chat)
        choices = [self.choice(index, chat.finish_reason, message=message) for index in range(chat.choices)]
        content = _frame(chat, "chat.completion") | {"choices": choices}
        return content | reported(chat.completion, "usage", self.usage(chat)) | self.about(chat) | self.beside(chat)

    def _events(self, chat: Chat) -> tuple[bytes, ...]:
        chunks = []
        for index in range(chat.choices):
            chunks += [self.chunk(chat, self.choice(index, None, delta=delta)) for delta in self._deltas(chat)]
        for index in range(chat.choices):
            chunks.append(self.chunk(chat, self.choice(index, chat.finish_reason, delta=self.last_delta())))
        chunks[-1:] = self.ending(chat, chunks[-1])
        first, *others = (*self.opening(chat), *(sse(chunk) for chunk in chunks), _DONE)
        return (self.comment + first, *others)

    def _deltas(self, chat: Chat) -> list[dict[str, JSON]]:
        deltas = [self.first_delta()]
        deltas += [{"content": piece} for piece in pieces(chat.completion.text)]
        for index, tool in enumerate(chat.completion.tool_calls):
            call = {"index": index, **_tool_call(tool)}
            if self.whole_tool_calls:
                deltas.append({"tool_calls": [call]})
                continue
            written = call["function"]["arguments"]
            deltas.append({"tool_calls": [call | {"function": call["function"] | {"arguments": ""}}]})
            for part in (written[: len(written) // 2], written[len(written) // 2 :]):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
        return deltas


def _frame(chat: Chat, kind: str) -> dict[str, JSON]:
    model = chat.completion.model or chat.call.model
    return {"id": chat.id, "object": kind, "created": chat.created, "model": model}


def _tool_call(call: ToolCall) -> dict[str, JSON]:
    function = {"name": call.name, "arguments": compact(dict(call.arguments))}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

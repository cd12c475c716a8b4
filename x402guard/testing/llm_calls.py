"""Defines the data between a test and the LLM server: the received call, and the answer to it."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias

from x402guard.testing.engine import JSON


@dataclass(frozen=True)
class ToolCall:
    """The model's call of the tool `name`, with `arguments` as a JSON object."""

    name: str
    arguments: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """The model's answer and its reported usage. Each provider's own field names are made from these.

    Counts are sent unchanged, so they have the provider's meaning: `cached_tokens` and `cache_write_tokens` are part of
    `input_tokens` except for Anthropic, where they are added to it; `reasoning_tokens` are part of `output_tokens`;
    `thoughts_tokens`, which only Gemini reports, are added. If the request sets a limit below `output_tokens`, the
    limit is reported and the answer ends because of its length.
    """

    text: str = "The motion was granted in part."
    _: KW_ONLY
    tool_calls: tuple[ToolCall, ...] = ()
    input_tokens: int = 20
    output_tokens: int = 18
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    """How many of `cache_write_tokens` Anthropic keeps for an hour; the others it keeps for five minutes."""
    reasoning_tokens: int = 0
    thoughts_tokens: int = 0
    model: str | None = None
    """The model that the answer names, if it differs from the requested one."""
    service_tier: str | None = None
    """The tier that the answer names, if it differs from the requested one."""
    cost: float | None = None
    """The cost that OpenRouter reports, in dollars."""
    usage: JSON = None
    """Replaces the whole usage object unchanged, for providers that report wrong usage."""
    omit_usage: bool = False
    """Omits the usage object, for providers that report none."""
    cut_after: int | None = None
    """Breaks the connection: a stream's after that many events, any other answer's after half of its body."""
    delay_s: float = 0.0
    """Seconds to wait before the first byte."""
    gap_s: float = 0.0
    """Seconds to wait between the events of a stream."""


@dataclass(frozen=True)
class Failure:
    """An answer with an error `status`, in the provider's shape. The default `message` is the status' HTTP phrase."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    _: KW_ONLY
    message: str = ""
    delay_s: float = 0.0


@dataclass(frozen=True)
class LlmCall:
    """A received request. `path` is the path below the provider's origin; `headers` have lower-case names.

    `body` is empty if the request has no JSON body. `provider` is empty if no provider has this path.
    """

    provider: str
    path: str
    model: str
    body: Mapping[str, JSON]
    headers: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether the request asks for a stream of events."""
        return self.body.get("stream") is True or self.path.endswith(":streamGenerateContent")


Reply: TypeAlias = Completion | Failure | Callable[[LlmCall], Completion | Failure]
"""The answer: always the same one, or the result of a function of the call."""

"""What a test and the LLM server say to each other: the call that arrived, and what to answer."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias

from x402guard.testing.engine import JSON


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes, of the tool `name`, with `arguments` as a JSON object."""

    name: str
    arguments: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What the model answers and what it says that it used. Every provider's own names are made from these.

    Counts go on the wire as they stand, so they mean what the provider means by them: `cached_tokens` and
    `cache_write_tokens` are part of `input_tokens` everywhere but at Anthropic, where they come on top;
    `reasoning_tokens` are part of `output_tokens`; `thoughts_tokens`, which only Gemini reports, come on top. Where the
    request sets a lower limit than `output_tokens`, the limit is reported, and the answer ends for its length.
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
    """The model that the answer names, if it is not the one that was asked for."""
    service_tier: str | None = None
    """The tier that the answer names, if it is not the one that was asked for."""
    cost: float | None = None
    """What OpenRouter says that the answer cost, in dollars."""
    usage: JSON = None
    """Put in place of the whole usage object, as it stands: for providers that lie."""
    omit_usage: bool = False
    """Leave the usage object out: for providers that keep silent."""
    cut_after: int | None = None
    """Break the connection: a stream's after so many events, any other answer's after half of its body."""
    delay_s: float = 0.0
    """Wait so many seconds before the first byte."""
    gap_s: float = 0.0
    """Wait so many seconds between the events of a stream."""


@dataclass(frozen=True)
class Failure:
    """An answer with an error `status`, in the provider's own shape. `message` is by default the status' own phrase."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    _: KW_ONLY
    message: str = ""
    delay_s: float = 0.0


@dataclass(frozen=True)
class LlmCall:
    """A request that arrived. `path` is what stands below the provider's origin, `headers` have lower-case names.

    `body` is empty if the request had none, or none in JSON. `provider` is empty if no provider has such a path.
    """

    provider: str
    path: str
    model: str
    body: Mapping[str, JSON]
    headers: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether the answer is asked for event by event."""
        return self.body.get("stream") is True or self.path.endswith(":streamGenerateContent")


Reply: TypeAlias = Completion | Failure | Callable[[LlmCall], Completion | Failure]
"""What to answer: always the same, or what a function makes of the call."""

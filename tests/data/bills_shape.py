"""The shape of a bill, and what the rows of every provider are written with."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

AT = datetime(2026, 11, 22, 12, tzinfo=UTC)
"""When every call of the table is made: some prices depend on the day, some on the hour."""

CEILING = -1
"""``Bill.nanos`` of a call whose usage never came: it costs what was held for it."""

JSON = "application/json"
SSE = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Bill:
    """One call: what is asked, what is answered, and what it costs in nano-dollars, worked out by hand.

    ``arithmetic`` is the sum: ``count label x nanos`` for each kind of token, joined by ``+``, then ``= total``, and
    ``, up to N`` where the total is no whole nano-dollar. Of a ``CEILING`` it is what must have been held at least.
    ``beyond`` is True where the answer costs more than its request can have caused, so that no hold can cover it.
    ``genai`` is None where genai-prices, asked without a context, comes to the same amount; else why it does not.
    """

    name: str
    url: str
    request: dict[str, Any]
    answer: dict[str, Any] | None = None
    stream: str | None = None
    content_type: str = JSON
    nanos: int
    arithmetic: str
    genai: str | None = None
    price_context: dict[str, str] = field(default_factory=dict)
    evidence: str = "provider_usage"
    beyond: bool = False

    @property
    def body(self) -> bytes:
        """The answer as it comes over the wire."""
        text = json.dumps(self.answer, ensure_ascii=False) if self.stream is None else self.stream
        return text.encode()


@cache
def text(words: int) -> str:
    """So many words. No token is shorter than a byte, and no word here needs more than one."""
    return "word " * words


def sse(*payloads: dict[str, Any] | str, end: str = "\n") -> str:
    """Server-sent events of data alone, as OpenAI and all who copy it send them. Text is sent as it stands."""
    return "".join(f"data: {line}{end}{end}" for line in map(_line, payloads))


def events(*payloads: dict[str, Any]) -> str:
    """Server-sent events named after their ``type``, as Anthropic, Cohere and OpenAI's Responses send them."""
    return "".join(f"event: {payload['type']}\ndata: {_line(payload)}\n\n" for payload in payloads)


def cut(stream: str, before: str) -> str:
    """What came of a stream that broke off in the middle of the event that has *before* in it."""
    return stream[: stream.index(before)]


def _line(payload: dict[str, Any] | str) -> str:
    return payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"), ensure_ascii=False)

"""Defines what the LLM server's providers share: documents, event streams, usage reports and vectors."""

import hashlib
import json
import math
import re
import struct
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

from x402guard.testing.engine import JSON
from x402guard.testing.llm_calls import Completion, LlmCall

_DIMENSIONS = 8


@dataclass(frozen=True)
class Document:
    """An answer in one piece."""

    content: JSON


@dataclass(frozen=True)
class Stream:
    """An answer in events, each with its framing."""

    events: tuple[bytes, ...]
    media_type: str = "text/event-stream"


Rendered: TypeAlias = Document | Stream


@dataclass(frozen=True)
class Endpoint:
    """One route of a provider: `path` is a Starlette template, `required` lists the fields that the body must have."""

    path: str
    answer: Callable[[LlmCall, Completion], Rendered]
    required: tuple[str, ...] = ()
    method: str = "POST"


@dataclass(frozen=True)
class Provider:
    """A provider: its routes, the shape of its errors, and the header with its request ids."""

    name: str
    endpoints: tuple[Endpoint, ...]
    error: Callable[[LlmCall, int, str], JSON]
    id_header: str = "x-request-id"


def compact(content: JSON) -> str:
    """JSON without whitespace, as providers write it."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def sse(content: JSON, *, event: str | None = None, end: str = "\n") -> bytes:
    """One server-sent event with JSON data. `end` is the line ending."""
    name = f"event: {event}{end}" if event else ""
    return f"{name}data: {compact(content)}{end}{end}".encode()


def pieces(text: str) -> list[str]:
    """The parts of the text in a stream: word by word."""
    return re.findall(r"\s*\S+\s*$|\s*\S+|\s+", text)


def within(limit: JSON, tokens: int) -> tuple[int, bool]:
    """How many of `tokens` fit into a request's limit, if there is one, and whether the limit cuts any off."""
    if isinstance(limit, int) and not isinstance(limit, bool) and limit < tokens:
        return limit, True
    return tokens, False


def reported(completion: Completion, name: str, honest: JSON) -> dict[str, JSON]:
    """The usage object under its `name`: the honest one, unless the test sets another one or none."""
    if completion.omit_usage:
        return {}
    return {name: honest if completion.usage is None else completion.usage}


def tier(call: LlmCall, completion: Completion, default: str | None) -> str | None:
    """The service tier of the answer: the test's, or the requested one, or the `default`."""
    asked = call.body.get("service_tier")
    return completion.service_tier or (asked if isinstance(asked, str) and asked != "auto" else default)


def phrase(status: int) -> str:
    """The HTTP phrase of a status."""
    return HTTPStatus(status).phrase if status in set(HTTPStatus) else f"Status {status}"


def vector(content: JSON, size: JSON = None) -> list[float]:
    """A deterministic embedding of any content: of length one, exact in 32 bits."""
    dimensions = size if isinstance(size, int) and size > 0 else _DIMENSIONS
    noise = hashlib.shake_256(compact(content).encode()).digest(2 * dimensions)
    raw = [int.from_bytes(noise[2 * n : 2 * n + 2], "big") - 32767.5 for n in range(dimensions)]
    length = math.hypot(*raw)
    return list(struct.unpack(f"<{dimensions}f", struct.pack(f"<{dimensions}f", *(number / length for number in raw))))


def packed(numbers: list[float]) -> str:
    """A vector as base64 of its 32-bit numbers."""
    return b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()

"""Tells the answers of an outage, for which nothing was generated, from those that may have been billed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from x402guard.strict_json import NotReadable, objects_in, read_object

_TIMED_OUT: Final = frozenset({504, 524, 598, 599})
"""A gateway gave up waiting: the provider may go on, and bill."""

_CONTENT: Final = frozenset(
    {"candidates", "choices", "completion", "content", "data", "embedding", "embeddings", "generations", "meta", "output",
     "response", "results", "text", "tool_usage", "usage", "usageMetadata"}
)  # fmt: skip
"""Keys, at any depth, of what is more than an error."""

_LONGEST_LINE: Final = 1_000
"""The most bytes of a proxy's line of text; a page of HTML may be longer."""


def says_error(body: bytes, status: int) -> str:
    """Return what a 5xx without content is, in words; "" for one that may have been billed."""
    text = body.strip()
    told = _read(text)
    if told is None:
        return "a proxy's error" if _is_of_a_proxy(text) and status not in _TIMED_OUT else ""
    return "provider error" if all(map(is_error, told)) else ""


def may_have_content(body: bytes) -> bool:
    """True if the body of a 4xx has content or a usage, or cannot be read as JSON or as the line of a proxy."""
    text = body.strip()
    told = _read(text)
    if told is not None:
        return any(map(has_content, told))
    return bool(text) and (text[:1] in b"{[" or b"data:" in text)


def _read(text: bytes) -> list[Mapping[str, Any]] | None:
    """Return the objects in a body: one, or those of an array, as Gemini streams them; None if it is neither."""
    try:
        listed = read_object(b'{"errors":' + text + b"}")["errors"] if text[:1] == b"[" else [read_object(text)]
    except NotReadable:
        return None
    return listed if listed and all(isinstance(each, dict) for each in listed) else None


def _is_of_a_proxy(text: bytes) -> bool:
    """True for a page of HTML, or for a short line of words."""
    try:
        words = text.decode()
    except UnicodeDecodeError:
        return False
    if not words or not all(each.isprintable() or each.isspace() for each in words) or "data:" in words:
        return False
    return words[:1] == "<" or (len(words) <= _LONGEST_LINE and words[:1].isalnum() and "{" not in words)


def is_error(told: Mapping[str, Any]) -> bool:
    """True for an object that is an error, and has no content and no usage."""
    says = any(told.get(key) for key in ("error", "message", "detail"))
    return says and not isinstance(told.get("message"), dict | list) and not has_content(told)


def is_error_event(event: Mapping[str, Any]) -> bool:
    """True for the error that a stream, or an answer with status 200, consists of."""
    says = event.get("type") == "error" or (isinstance(event.get("error"), dict | str) and bool(event["error"]))
    return says and not isinstance(event.get("message"), dict | list) and not has_content(event)


def has_content(told: Mapping[str, Any]) -> bool:
    """True if an answer has content or a usage, at any depth: then it is one, whatever its status says."""
    return any(each.get(key) for each in objects_in(told) for key in _CONTENT)

"""Tells the answers of an outage, for which nothing was generated, from those that may have been billed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from x402guard.strict_json import NotReadable, read_object

_TIMED_OUT: Final = frozenset({504, 524, 598, 599})
"""A gateway gave up waiting: the provider may go on, and bill."""

_STREAMED: Final = (b"data:", b"event:")


def says_error(body: bytes, status: int) -> str:
    """Return what a 5xx without content is, in words; "" for one that may have been billed."""
    text = body.strip()
    try:
        # Gemini streams an error as an array with one element.
        listed = read_object(b'{"errors":' + text + b"}")["errors"] if text[:1] == b"[" else None
        told = read_object(text) if listed is None else listed[0] if listed else {}
    except NotReadable:
        # The page or the line of a proxy, which has no answer of a model in it.
        is_words = bool(text) and text[:1] not in (b"{", b"[") and not any(mark in text for mark in _STREAMED)
        return "a proxy's error" if is_words and status not in _TIMED_OUT else ""
    return "provider error" if isinstance(told, dict) and is_error(told) else ""


def is_error(told: Mapping[str, Any]) -> bool:
    """True for an object that is an error, and has no content and no usage."""
    return any(told.get(key) for key in ("error", "message", "detail")) and not has_content(told)


def is_error_event(event: Mapping[str, Any]) -> bool:
    """True for the error that a stream, or an answer with status 200, consists of."""
    says = event.get("type") == "error" or (isinstance(event.get("error"), dict | str) and bool(event["error"]))
    return says and not has_content(event)


def has_content(told: Mapping[str, Any]) -> bool:
    """True if an answer has content or a usage: then it is one, whatever its status says."""
    return any(
        told.get(key) for key in ("choices", "candidates", "output", "content", "usage", "usageMetadata", "response")
    )

"""Collects the events of a streamed answer that state its usage. One class per flavour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Protocol, TypeGuard

from x402guard.llm.leaves import count_of
from x402guard.vendors.routes import Flavour


class EventReader(Protocol):
    """Collects the usage from the events of one stream, and detects when it is complete."""

    final: bool
    """True once the collected usage covers the whole call."""

    over: bool
    """True once the provider has ended the stream."""

    def passes(self, event: Mapping[str, Any]) -> bool:
        """Note an event that is content alone, read leniently; False for one that may state a usage or an end."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Process one event's data, read strictly."""

    def end(self, *, done: bool) -> None:
        """Handle the end of the stream. *done*: the provider sent an end marker."""

    def body(self) -> dict[str, Any]:
        """Return the events as one answer in the shape of one that is not streamed."""


class _Kept:
    types: ClassVar[frozenset[str]] = frozenset()
    """The values of an event's ``type`` that count; none for a flavour without types."""

    def __init__(self) -> None:
        self.final = self.over = False
        self._body: dict[str, Any] = {}

    def passes(self, event: Mapping[str, Any]) -> bool:
        """Default: an event of another type changes nothing."""
        kind = event.get("type")
        return isinstance(kind, str) and bool(self.types) and kind not in self.types

    def end(self, *, done: bool) -> None:
        """Default: do nothing, because most flavours end with their own event."""

    def body(self) -> dict[str, Any]:
        return self._body


class _Chat(_Kept):
    """OpenAI's chunks, also used by compatible providers, with *choices* answers in them."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self._choices = choices
        self._ended: set[object] = set()
        self._stale = self._finished = False

    def end(self, *, done: bool) -> None:
        """The last stated usage is the call's, unless content came after it or the stream broke off."""
        self.final = "usage" in self._body and not self._stale and (done or self._finished)

    def passes(self, event: Mapping[str, Any]) -> bool:
        """An event with choices that go on, and without a usage: what was stated before it does not count."""
        choices = event.get("choices")
        if event.get("usage") is not None or "x_groq" in event or not isinstance(choices, list) or not choices:
            return False
        for choice in choices:
            if not isinstance(choice, dict) or choice.get("finish_reason") is not None:
                return False
        self._name(event)
        self.final, self._stale = False, True
        return True

    def _name(self, event: Mapping[str, Any]) -> None:
        for key in ("model", "service_tier"):
            if isinstance(event.get(key), str):
                self._body[key] = event[key]

    def take(self, event: Mapping[str, Any]) -> None:
        self._name(event)
        usage = event.get("usage")
        groq = event.get("x_groq")
        if not isinstance(usage, dict) and isinstance(groq, dict):
            usage = groq.get("usage")
        choices = event.get("choices")
        listed = choices if isinstance(choices, list) else []
        self._ended.update(choice.get("index", 0) for choice in listed if _has_ended(choice))
        self._finished = self._finished or len(self._ended) >= self._choices or is_usage_only(event)
        if choices and not isinstance(usage, dict):
            self.final, self._stale = False, True
        if isinstance(usage, dict):
            before = self._body.get("usage", {})
            falls = _summed(usage, _TOKENS) < _summed(before, _TOKENS)
            self._body["usage"], self._stale = before if falls else usage, False
            # Some providers state a running usage on every chunk: it is whole once each choice has ended.
            self.final = len(self._ended) >= self._choices and all(map(_has_ended, listed))


_TOKENS: Final = ("prompt_tokens", "completion_tokens")


def _has_ended(choice: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(choice, dict) and choice.get("finish_reason") is not None


class _Responses(_Kept):
    """OpenAI's Responses: the last event holds the whole answer."""

    types = frozenset({"response.completed", "response.incomplete", "response.failed"})

    def take(self, event: Mapping[str, Any]) -> None:
        response = event.get("response")
        if event.get("type") in self.types and isinstance(response, dict):
            self._body, self.final, self.over = response, isinstance(response.get("usage"), dict), True


class _Messages(_Kept):
    """Anthropic: the counts of ``message_start`` hold until a ``message_delta``, whose counts are cumulative."""

    types = frozenset({"message_start", "message_delta", "message_stop"})

    def take(self, event: Mapping[str, Any]) -> None:
        message = event.get("message")
        if event.get("type") == "message_start" and isinstance(message, dict):
            stated = message["usage"] if isinstance(message.get("usage"), dict) else {}
            self._body = {**message, "usage": _grown(self._body.get("usage", {}), stated)}
        elif event.get("type") == "message_delta":
            counts = event.get("usage")
            if isinstance(counts, dict):
                self._body["usage"] = _grown(self._body.get("usage", {}), counts)
            delta = event.get("delta")
            ends = isinstance(delta, dict) and delta.get("stop_reason") is not None
            # Without it, an earlier count would pass for the whole answer's.
            self.final = ends and isinstance(counts, dict) and isinstance(counts.get("output_tokens"), int)
        elif event.get("type") == "message_stop":
            self.over = True


_INPUT: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def _grown(before: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts that are stated again: each is cumulative, so that none falls.

    The last counts may say of the input that more of it was cached: its kinds fall only if their sum does not.
    """
    grown = {**before, **{key: value for key, value in newer.items() if value is not None}}
    if _summed(grown, _INPUT) < _summed(before, _INPUT):
        grown |= {key: before[key] for key in _INPUT if key in before}
    if count_of(grown.get("output_tokens")) < count_of(before.get("output_tokens")):
        grown["output_tokens"] = before["output_tokens"]
    return grown


def _summed(counts: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    return sum(count_of(counts.get(key)) for key in keys)


SEARCHED: Final = ("webSearchQueries", "imageSearchQueries")
"""Where Gemini lists its searches."""


class _Gemini(_Kept):
    """Gemini: each chunk states running counts; they are final at the stream's end if a candidate has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._finished = False

    def end(self, *, done: bool) -> None:  # noqa: ARG002 - Gemini sends no end marker
        """Only the end of the stream is final: with several candidates, the first that ends is not the last."""
        self.final = "usageMetadata" in self._body and self._finished

    def take(self, event: Mapping[str, Any]) -> None:
        usage = event.get("usageMetadata")
        if isinstance(usage, dict):
            self._body["usageMetadata"] = {**self._body.get("usageMetadata", {}), **usage}
        if isinstance(event.get("modelVersion"), str):
            self._body["modelVersion"] = event["modelVersion"]
        listed = event.get("candidates")
        candidates = [c for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
        grounded = [c for c in candidates if isinstance(c.get("groundingMetadata"), dict)]
        if grounded:
            self._ground([each["groundingMetadata"] for each in grounded])
        ended = any(c.get("finishReason") is not None for c in candidates)
        feedback = event.get("promptFeedback")
        blocked = isinstance(feedback, dict) and feedback.get("blockReason") is not None
        self._finished = self._finished or ended or blocked

    def _ground(self, found: list[Mapping[str, Any]]) -> None:
        """Keep every query that a chunk or a candidate states: a later chunk may state others, or none."""
        before = self._body.get("candidates", [{"groundingMetadata": {}}])[0]["groundingMetadata"]
        merged = {**before}
        for each in found:
            merged |= each
        for name in SEARCHED:
            listed = [each.get(name) for each in (before, *found)]
            queries = [query for each in listed if isinstance(each, list) for query in each if isinstance(query, str)]
            if queries:
                merged[name] = list(dict.fromkeys(queries))
        self._body["candidates"] = [{"groundingMetadata": merged}]


class _Cohere(_Kept):
    """Cohere: ``message-end`` states the usage."""

    types = frozenset({"message-end"})

    def take(self, event: Mapping[str, Any]) -> None:
        delta = event.get("delta")
        if event.get("type") == "message-end" and isinstance(delta, dict) and isinstance(delta.get("usage"), dict):
            self._body, self.final, self.over = {"usage": delta["usage"]}, True, True


class _Converse(_Kept):
    """Bedrock: the event ``metadata`` states the usage, in a stream's last frame."""

    def take(self, event: Mapping[str, Any]) -> None:
        if isinstance(event.get("usage"), dict):
            self._body, self.final, self.over = dict(event), True, True


def event_reader(flavour: Flavour, choices: int = 1) -> EventReader:
    """Return a reader for a new stream of a flavour, with *choices* answers in it."""
    kinds: dict[str, type[_Responses | _Messages | _Gemini | _Cohere | _Converse]] = {
        "responses": _Responses,
        "messages": _Messages,
        "gemini": _Gemini,
        "cohere": _Cohere,
        "converse": _Converse,
    }
    return kinds[flavour]() if flavour in kinds else _Chat(choices)


def is_usage_only(event: Mapping[str, Any]) -> bool:
    """True for the extra chunk at the end of an OpenAI stream if usage was requested."""
    return event.get("choices") == [] and isinstance(event.get("usage"), dict)

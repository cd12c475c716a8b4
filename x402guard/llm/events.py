"""What is kept of a streamed answer: the few events that say what was used. One class a flavour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from x402guard.llm.routes import Flavour


class EventReader(Protocol):
    """Takes the events of one stream, and knows when the provider has said all that it bills."""

    final: bool
    """True once the usage that stands is the whole call's."""

    over: bool
    """True once the provider has said that the stream has ended."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event's data."""

    def end(self, *, done: bool) -> None:
        """The stream has come to its end; *done*: by the provider's word, and not only because nothing more came."""

    def body(self) -> dict[str, Any]:
        """Return the events as one answer, shaped like one that was not streamed."""


class _Kept:
    """What was kept so far."""

    def __init__(self) -> None:
        self.final = self.over = False
        self._body: dict[str, Any] = {}

    def end(self, *, done: bool) -> None:
        """Most say with an event of their own that they have ended."""

    def body(self) -> dict[str, Any]:
        """See ``EventReader.body``."""
        return self._body


class _Chat(_Kept):
    """OpenAI's chunks, and those of all who copy them."""

    def __init__(self) -> None:
        super().__init__()
        self._stale = self._finished = False

    def end(self, *, done: bool) -> None:
        """What was stated last is the call's, unless more was said after it, or it broke off in the middle."""
        self.final = "usage" in self._body and not self._stale and (done or self._finished)

    def take(self, event: Mapping[str, Any]) -> None:
        for key in ("model", "service_tier"):
            if isinstance(event.get(key), str):
                self._body[key] = event[key]
        usage = event.get("usage")
        groq = event.get("x_groq")
        if not isinstance(usage, dict) and isinstance(groq, dict):
            usage = groq.get("usage")
        choices = event.get("choices")
        listed = choices if isinstance(choices, list) else []
        self._finished = self._finished or any(map(_has_ended, listed)) or is_usage_only(event)
        if choices and not isinstance(usage, dict):
            self.final, self._stale = False, True
        if isinstance(usage, dict):
            self._body["usage"], self._stale = usage, False
            # Some state the usage so far on every chunk; the last comes with an end, or with no choice at all.
            self.final = not choices or (isinstance(choices, list) and all(map(_has_ended, choices)))


def _has_ended(choice: object) -> bool:
    return isinstance(choice, dict) and choice.get("finish_reason") is not None


class _Responses(_Kept):
    """OpenAI's Responses: the last event has the whole answer."""

    def take(self, event: Mapping[str, Any]) -> None:
        response = event.get("response")
        if event.get("type") in ("response.completed", "response.incomplete", "response.failed") and isinstance(
            response, dict
        ):
            self._body, self.final, self.over = response, isinstance(response.get("usage"), dict), True


class _Messages(_Kept):
    """Anthropic: what ``message_start`` says stands until a ``message_delta``, whose counts are cumulative."""

    def take(self, event: Mapping[str, Any]) -> None:
        message = event.get("message")
        if event.get("type") == "message_start" and isinstance(message, dict):
            self._body = {**message, "usage": dict(message["usage"]) if isinstance(message.get("usage"), dict) else {}}
        elif event.get("type") == "message_delta":
            counts = event.get("usage")
            if isinstance(counts, dict):
                newer = {key: value for key, value in counts.items() if value is not None}
                self._body["usage"] = {**self._body.get("usage", {}), **newer}
            delta = event.get("delta")
            self.final = isinstance(counts, dict) and isinstance(delta, dict) and delta.get("stop_reason") is not None
        elif event.get("type") == "message_stop":
            self.over = True


class _Gemini(_Kept):
    """Gemini: each chunk states the counts so far; they are the call's once a candidate has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._finished = False

    def end(self, *, done: bool) -> None:  # noqa: ARG002 - it has no word for its end
        """With several candidates the first that ends is not the last: only the stream's own end is."""
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
            self._body["candidates"] = [{"groundingMetadata": grounded[-1]["groundingMetadata"]}]
        ended = any(c.get("finishReason") is not None for c in candidates)
        feedback = event.get("promptFeedback")
        blocked = isinstance(feedback, dict) and feedback.get("blockReason") is not None
        self._finished = self._finished or ended or blocked


class _Cohere(_Kept):
    """Cohere: ``message-end`` has the usage."""

    def take(self, event: Mapping[str, Any]) -> None:
        delta = event.get("delta")
        if event.get("type") == "message-end" and isinstance(delta, dict) and isinstance(delta.get("usage"), dict):
            self._body, self.final, self.over = {"usage": delta["usage"]}, True, True


def event_reader(flavour: Flavour) -> EventReader:
    """Return a reader for a new stream of a flavour."""
    kinds: dict[str, type[_Responses | _Messages | _Gemini | _Cohere]] = {
        "responses": _Responses,
        "messages": _Messages,
        "gemini": _Gemini,
        "cohere": _Cohere,
    }
    return kinds[flavour]() if flavour in kinds else _Chat()


def is_usage_only(event: Mapping[str, Any]) -> bool:
    """True for the extra chunk that an OpenAI stream ends with where usage was asked for."""
    return event.get("choices") == [] and isinstance(event.get("usage"), dict)

"""What vendors' libraries answer with, as the mapping that went over the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["as_mapping"]


def as_mapping(answer: object, *, field: str) -> Mapping[str, Any]:
    """Return an answer of a vendor's library, or a part of it, as plain values: dictionaries, lists, texts and numbers.

    Takes mappings, pydantic models (OpenAI, Anthropic, Mistral, Cohere, google-genai), dataclasses, protocol buffers (Google's gRPC
    clients), and what has ``to_dict``. Raises ``TypeError`` naming the argument for everything else: a stream, say, whose usage
    has to be recorded when it is over.
    """
    if isinstance(answer, Mapping):
        return {str(key): _plain(value) for key, value in answer.items()}
    found = _dumped(answer)
    if isinstance(found, Mapping):
        return found
    raise TypeError(
        f"{field}: a {type(answer).__name__} states no usage; give the whole answer, or report what it used with "
        "session.record_usage(provider, model, usage)"
    )


def _plain(value: Any) -> Any:
    """Return nested parts as plain values; what is not known how to take apart stays as it is."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    found = _dumped(value)
    return value if found is None else found


def _dumped(value: Any) -> Any:
    if value is None or isinstance(value, (str, bytes, int, float, type)):
        return None
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(by_alias=True, exclude_none=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    wrapped = getattr(type(value), "pb", None)  # proto-plus wraps a message of protocol buffers
    message = wrapped(value) if callable(wrapped) else value
    if hasattr(message, "DESCRIPTOR"):
        from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]  # whoever has a message has it

        return MessageToDict(message)
    to_dict = getattr(value, "to_dict", None)
    return to_dict() if callable(to_dict) else None

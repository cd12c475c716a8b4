"""Converts the answer objects of vendors' libraries back to the JSON mapping of the API."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

_DEEPEST: Final = 32


def as_mapping(answer: object, *, field: str) -> Mapping[str, Any]:
    """Return an answer of a vendor's library, or a part of it, as plain dictionaries, lists, strings and numbers.

    Accepts mappings, pydantic models (OpenAI, Anthropic, Mistral, Cohere, google-genai), dataclasses, protocol buffers
    (Google's gRPC clients), and objects with ``to_dict``. Raises ``TypeError`` naming the argument for anything else,
    for example a stream, whose usage has to be recorded after its end.
    """
    found = _plain(answer, _DEEPEST)
    if isinstance(found, Mapping):
        return found
    if inspect.isawaitable(answer):
        getattr(answer, "close", lambda: None)()
        raise TypeError(f"{field}: it was not awaited; write await before it")
    fix = (
        'write {"input_tokens": 200, "output_tokens": 100}, or the usage as the provider states it'
        if field == "usage"
        else "give the whole answer, or report its usage with session.record_usage(provider, model, usage)"
    )
    raise TypeError(f"{field}: a value of type {type(answer).__name__} states no usage; {fix}")


def _plain(value: Any, deeper: int) -> Any:
    """Return nested parts as plain values, floats as exact decimals; other objects are returned unchanged."""
    if isinstance(value, float):
        return Decimal(repr(value))
    if deeper == 0:
        return value  # no field that is read is nested this deep
    if isinstance(value, Mapping):
        return {str(key): _plain(item, deeper - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, deeper - 1) for item in value]
    found = _dumped(value)
    return value if found is None else _plain(found, deeper - 1)


def _dumped(value: Any) -> Any:
    if value is None or isinstance(value, (str, bytes, int, float, type)):
        return None
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        # No warnings for values that do not match the library's types: a warning filter may raise them as errors.
        return value.model_dump(by_alias=True, exclude_none=True, warnings=False)
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    wrapped = getattr(type(value), "pb", None)  # proto-plus wraps a message of protocol buffers
    message = wrapped(value) if callable(wrapped) else value
    if hasattr(message, "DESCRIPTOR"):
        from google.protobuf.json_format import MessageToDict  # installed with any message

        return MessageToDict(message)
    to_dict = getattr(value, "to_dict", None)
    return to_dict() if callable(to_dict) else None

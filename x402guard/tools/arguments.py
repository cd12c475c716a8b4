"""Converts a tool's arguments to plain JSON, to compare uses without storing their values in the ledger. Pure."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.strict_json import json_writer

_SAYS_ITSELF: Final = (Decimal, UUID, dt.date, dt.time, PurePath, Enum)
_DEEPEST: Final = 64
_MOST_VALUES: Final = 10_000
_MOST_SHOWN: Final = 500
_MOST_LISTED: Final = 100
_LONGEST_SHOWN: Final = 2_000
_DEEPEST_SHOWN: Final = 8
_LARGE: Final = 10**30
_MOST_READ: Final = 2_000_000


_ENCODED: Final = json_writer(sort_keys=True)
_PLAIN: Final = json_writer()


def fingerprint(plain: Mapping[str, Any] | None) -> str:
    """Return the SHA-256 of plain arguments in hex, independent of their order; "" for None."""
    return "" if plain is None else hashlib.sha256(_ENCODED(plain).encode()).hexdigest()


def plain_arguments(arguments: object) -> Mapping[str, Any] | None:
    """Return a tool's arguments as plain JSON for comparison; None if they are unknown or not comparable.

    Dates, decimals, paths, dataclasses and models are compared by value, bytes by their hash; any other object makes
    them not comparable. Raises ``ConfigError`` naming the argument if it is not a mapping, is nested deeper than 64
    levels, or has more than 10,000 values or a million characters.
    """
    if arguments is None:
        return None
    if not isinstance(arguments, Mapping):
        raise ConfigError(f'arguments: a {type(arguments).__name__} is not a mapping; write {{"query": …}}')
    left = [_MOST_VALUES]
    try:
        plain = _plain(arguments, _DEEPEST, left)
        _PLAIN(plain)
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"arguments: {error}") from error
    return plain if isinstance(plain, dict) and len(left) == 1 else None


def _plain(value: object, deeper: int, left: list[int]) -> object:
    left[0] -= 1 + (len(value) // 100 if isinstance(value, (str, bytes)) else 0)
    if left[0] < 0:
        raise ConfigError(f"arguments: more than {_MOST_VALUES:,} values; give those that distinguish the calls")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if deeper == 0:
        raise ConfigError(f"arguments: nested deeper than {_DEEPEST} levels")
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, deeper - 1, left) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, deeper - 1, left) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(item, deeper - 1, left)) for item in value)
    name = type(value).__qualname__
    if isinstance(value, bytes):
        return [name, hashlib.sha256(value).hexdigest()]
    if isinstance(value, _SAYS_ITSELF):
        return [name, hashlib.sha256(str(value).encode("utf-8", "replace")).hexdigest()]
    fields = _fields(value)
    if fields is not None:
        return [name, _plain(fields, deeper - 1, left)]
    left.append(0)  # marks the arguments as not comparable
    return [name]


def _fields(value: object, *, shown: bool = False) -> Mapping[str, Any] | None:
    """Return the fields of a dataclass or a model; None for another object, and for one that cannot be read.

    *shown*: without those that the class itself does not show.
    """
    if isinstance(value, type):
        return None
    try:
        if dataclasses.is_dataclass(value):
            return {
                each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.repr or not shown
            }
        dump = getattr(value, "model_dump", None)
        if not callable(dump):
            return None
        known = getattr(type(value), "model_fields", None) or {}
        hidden = {name for name, field in known.items() if shown and getattr(field, "repr", True) is False}
        return {name: item for name, item in dump().items() if name not in hidden}
    except Exception:  # noqa: BLE001 - it is the caller's code
        return None


def _key(key: object) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    return (
        f"{type(key).__qualname__}:{key}"
        if isinstance(key, (int, float, bool, *_SAYS_ITSELF))
        else type(key).__qualname__
    )


class _As(Struct, frozen=True):
    """A value that is no plain JSON: the name of its class, and what it says."""

    name: str
    value: object


_OBJECT: Final = "an object"
_ITSELF: Final = "itself"


def _said(read: object) -> Any:
    """Return what was read as plain values: a new copy, without the names of classes."""
    if isinstance(read, dict):
        return {key: _said(value) for key, value in read.items()}
    if isinstance(read, list):
        return [_said(value) for value in read]
    if not isinstance(read, _As):
        return read
    if read.name == _OBJECT:
        return f"<{read.value}>"
    return "…" if read.name == _ITSELF else _said(read.value)


def _told(value: object) -> list[object]:
    """Return what stands for a value in a digest; nothing else is left that is no JSON."""
    if isinstance(value, _As):
        return ["\0", value.name, value.value]
    return ["\0", "bytes", hashlib.sha256(value if isinstance(value, bytes) else b"").hexdigest()]


_TELLING: Final = json.JSONEncoder(sort_keys=True, default=_told).encode


class Seen(Struct, frozen=True):
    """Arguments as they were when they were judged, and when an approver is asked about them.

    Attributes:
        shown: what the approver is shown.
        read: all of them, with the names of classes; or why they cannot be read.
    """

    shown: Mapping[str, Any]
    read: Mapping[str, Any] | ConfigError

    @property
    def digest(self) -> str:
        """SHA-256 of the whole arguments in hex, independent of their order; of what is shown, if they cannot be read."""
        read = self.shown if isinstance(self.read, ConfigError) else self.read
        return hashlib.sha256(_TELLING(read).encode()).hexdigest()

    def whole(self) -> Mapping[str, Any]:
        """Return all of them as plain values, a new copy each time. Raises ``ConfigError`` if they cannot be read."""
        if isinstance(self.read, ConfigError):
            raise self.read
        return {key: _said(value) for key, value in self.read.items()}

    def cut(self) -> Mapping[str, Any]:
        """Return what the approver is shown."""
        return self.shown

    def without(self, removed: Iterable[str]) -> Seen:
        """Return it without what a rule removes."""
        read = self.read if isinstance(self.read, ConfigError) else _without(removed, self.read)
        return Seen(_without(removed, self.shown), read)


def _without(removed: Iterable[str], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in arguments.items() if name not in removed}


class Readable:
    """A tool's arguments as plain values for the owner's code and for approvers. Read when one of them needs them.

    Dates, decimals and paths are strings; an unsupported object is the name of its class.

    Args:
        arguments: as the caller gave them; they may change until they are read.
        removed: names that a rule removes.
    """

    def __init__(self, arguments: Mapping[Any, Any], removed: Iterable[str] = ()) -> None:
        self._arguments, self._removed = arguments, frozenset(removed)

    def without(self, removed: Iterable[str]) -> Readable:
        """Return these arguments without those that a rule removes."""
        return Readable(self._arguments, self._removed.union(removed))

    def whole(self) -> Mapping[str, Any]:
        """Return all of them, for the owner's ``classify``. Bytes stay bytes; what holds itself is "…" inside itself.

        Raises ``ConfigError`` if they are nested deeper than 64 levels, have more than two million values, or cannot be
        read.
        """
        return Seen({}, self._read()).whole()

    def cut(self) -> Mapping[str, Any]:
        """Return what a person can read of them, for approvers. An omitted part is "…"."""
        return _shown_items(self._kept(), _DEEPEST_SHOWN, [_MOST_SHOWN])

    def seen(self) -> Seen:
        """Return them as they are now."""
        return Seen(self.cut(), self._read())

    def _read(self) -> Mapping[str, Any] | ConfigError:
        left = [_MOST_READ]
        try:
            return _read_items(self._kept(), (), left)
        except ConfigError as error:
            return error
        except Exception as error:  # noqa: BLE001 - it is the caller's code
            return ConfigError(f"arguments: they cannot be read: {type(error).__name__}")

    def _kept(self) -> Mapping[Any, Any]:
        return {key: value for key, value in self._arguments.items() if key not in self._removed}


def readable(arguments: object) -> Readable | None:
    """Return a tool's arguments for those who read them; None if they are unknown."""
    return Readable(arguments) if isinstance(arguments, Mapping) else None


def _read_items(items: Mapping[Any, Any], inside: tuple[int, ...], left: list[int]) -> dict[str, Any]:
    read = {_key(key): _read(value, inside, left) for key, value in items.items()}
    if len(read) < len(items):
        raise ConfigError("arguments: two keys of a mapping read the same; use text as keys")
    return read


def _read(value: object, inside: tuple[int, ...], left: list[int]) -> object:
    left[0] -= 1
    if left[0] < 0:
        raise ConfigError(f"arguments: more than {_MOST_READ:,} values")
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if isinstance(value, int):
        if abs(value) >= _LARGE:
            return _As(kind.__qualname__, hex(value))  # Python writes no number of thousands of digits
        return value if kind is int else _As(kind.__qualname__, int(value))
    return _As(kind.__qualname__, _scalar(value)) if isinstance(value, _SCALARS) else _nested(value, inside, left)


_SCALARS: Final = (str, float, bytes, bytearray, memoryview, *_SAYS_ITSELF)


def _scalar(value: object) -> object:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else str(value)


def _nested(value: object, inside: tuple[int, ...], left: list[int]) -> object:
    kind = type(value)
    if id(value) in inside:
        return _As(_ITSELF, inside.index(id(value)))
    if len(inside) == _DEEPEST:
        raise ConfigError(f"arguments: nested deeper than {_DEEPEST} levels")
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        items = _read_items(value, inside, left)
        return items if kind is dict else _As(kind.__qualname__, items)
    if isinstance(value, (list, tuple)):
        listed = [_read(item, inside, left) for item in value]
        return listed if kind is list else _As(kind.__qualname__, listed)
    if isinstance(value, (set, frozenset)):
        return _As(kind.__qualname__, sorted((_read(item, inside, left) for item in value), key=_TELLING))
    fields = _fields(value)
    return _As(_OBJECT, kind.__qualname__) if fields is None else _As(kind.__qualname__, _read(fields, inside, left))


def _shown_items(items: Mapping[Any, Any], deeper: int, left: list[int]) -> dict[str, Any]:
    some = itertools.islice(items.items(), _MOST_SHOWN)
    shown = {_key(key): _shown(value, deeper, left) for key, value in some}
    return shown if len(items) <= _MOST_SHOWN else {**shown, "…": f"({len(items):,} in all)"}


def _shown(value: object, deeper: int, left: list[int]) -> object:
    left[0] -= 1
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) < _LARGE else f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        text = str.__str__(value)
        return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({len(text):,} characters)"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes, SHA-256 {hashlib.sha256(value).hexdigest()[:16]}…"
    if isinstance(value, _SAYS_ITSELF):
        return _shown(str(value), deeper, left)
    if deeper == 0 or left[0] <= 0:
        return "…"
    if isinstance(value, Mapping):
        return _shown_items(value, deeper - 1, left)
    if isinstance(value, (list, tuple, set, frozenset)):
        listed = [_shown(item, deeper - 1, left) for item in itertools.islice(value, _MOST_LISTED)]
        return listed if len(value) <= _MOST_LISTED else [*listed, f"… ({len(value):,} in all)"]
    fields = _fields(value, shown=True)
    if fields is not None:
        return _shown(fields, deeper - 1, left)
    return f"<{type(value).__qualname__}>"

"""Reads decoded JSON as rows, and copies frozen rows with changes: the ledger's own, which are msgspec's, and dataclasses."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, TypeVar

from msgspec import Struct, convert
from msgspec.json import Decoder
from msgspec.structs import replace as _copied

T = TypeVar("T")
S = TypeVar("S", bound=Struct)

_READABLE: Final[set[type[Struct]]] = set()


def readable(model: type[S]) -> type[S]:
    """Let ``read_struct`` read a struct. A decorator, so that msgspec describes the struct while its module is imported.

    msgspec keeps a struct's description with the struct at its first use. Two threads that use it first end the process.
    """
    Decoder(model)
    _READABLE.add(model)
    return model


def read_struct(value: Any, model: type[S]) -> S:
    """Return decoded JSON as a struct that is ``readable``.

    Raises ``ValidationError`` if it does not fit, ``TypeError`` for a struct that is not ``readable``.
    """
    if model not in _READABLE:
        raise TypeError(f"{model.__name__} is not decorated with @readable")
    return convert(value, model)


def replace(row: T, /, **changes: Any) -> T:
    """Return a copy of a row with other values in some fields. Its checks run again.

    Raises ``TypeError`` for a field that the row does not have.
    """
    if isinstance(row, Struct):
        return _copied(row, **changes)
    kind = type(row)
    known = _READ.get(kind) or _reading(kind)
    values = dict(zip(known[0], known[1](row), strict=True))
    values.update(changes)
    return kind(**values)


_READ: Final[dict[type, tuple[tuple[str, ...], attrgetter[tuple[Any, ...]]]]] = {}


def _reading(kind: type[Any]) -> tuple[tuple[str, ...], attrgetter[tuple[Any, ...]]]:
    names = tuple(field.name for field in fields(kind) if field.init)
    if len(names) < 2:
        raise TypeError(f"{kind.__name__} has too few fields to be copied; write it out")
    _READ[kind] = names, attrgetter(*names)
    return _READ[kind]

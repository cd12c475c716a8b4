"""JSON as a meter reads it: numbers exact, and nothing that two readers could read differently."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Final, NoReturn

__all__ = ["NotReadable", "read_object", "write_object"]

_MAX_DIGITS: Final = 400
_MAX_DEPTH: Final = 200


class NotReadable(ValueError):  # noqa: N818 - becomes a refusal, or a ceiling
    """A body that is not one JSON object that everybody reads alike."""


def read_object(body: bytes | str) -> dict[str, Any]:
    """Return the JSON object that *body* is; numbers with a fraction become ``Decimal``.

    Raises ``NotReadable`` for anything else, and for what readers disagree on: a key that stands twice in one object (one
    reader takes the first, another the last), NaN and infinities.
    """
    try:
        value = json.loads(
            body,
            object_pairs_hook=_unique,
            parse_float=_decimal,
            parse_int=_integer,
            parse_constant=_no_constant,
        )
    except NotReadable:
        raise
    except RecursionError:
        raise NotReadable("nested too deeply") from None
    except ValueError as error:
        raise NotReadable(f"not JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise NotReadable(f"a JSON {type(value).__name__} where an object belongs")
    _check_depth(value)
    return value


def write_object(value: dict[str, Any]) -> bytes:
    """Return *value* as compact JSON in ASCII; what ``read_object`` read is written back with the same meaning."""
    return json.dumps(value, separators=(",", ":"), default=_number).encode("ascii")


def _check_depth(value: object) -> None:
    """What can be read can be written: Python reads deeper nesting than it writes."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inside = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [item for items in inside for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise NotReadable("nested too deeply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in {other for other, _ in pairs[:i]})
        raise NotReadable(f"the key {twice[:60]!r} stands twice in one object")
    return found


def _decimal(text: str) -> Decimal:
    if len(text) > _MAX_DIGITS:
        raise NotReadable("a number of hundreds of digits")
    try:
        number = Decimal(text)
    except ArithmeticError:
        raise NotReadable("a number beyond all measure") from None
    # 1e999999999 is eleven characters, and a gigabyte as an integer.
    if number and abs(number.adjusted()) > _MAX_DIGITS:
        raise NotReadable("a number of hundreds of digits")
    return number


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise NotReadable("a number of hundreds of digits")
    return int(text)


def _no_constant(name: str) -> NoReturn:
    raise NotReadable(f"{name} is no number of JSON")


def _number(value: object) -> float:
    if isinstance(value, Decimal):
        return float(value)  # as every JSON reader takes it; a temperature, never money
    raise TypeError(f"{type(value).__name__} is not JSON")

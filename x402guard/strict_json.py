"""Reads JSON strictly: numbers are exact, and JSON that two readers could read differently is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from json import encoder
from typing import Any, Final, NoReturn

_MAX_DIGITS: Final = 400
_MAX_EXPONENT: Final = 300
"""Numbers are written back as floats, so their exponent must fit one."""

_MAX_DEPTH: Final = 200
_BRACKETS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


class NotReadable(ValueError):  # noqa: N818 - becomes a refusal, or a ceiling
    """A body that is not one JSON object with only one possible reading. ``words``: the part of it that is wrong."""

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words


def json_writer(
    *,
    sort_keys: bool = False,
    separators: tuple[str, str] = (", ", ": "),
    default: Callable[[Any], Any] | None = None,
) -> Callable[[Any], str]:
    """Return a function that writes the same text as ``json.JSONEncoder(…).encode``, by its C encoder alone.

    ``JSONEncoder.encode`` decides anew for each text how it is written, which takes longer than a short text.
    """
    plain = json.JSONEncoder(sort_keys=sort_keys, separators=separators, default=default)
    make = getattr(encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    item, key = separators
    usual = (plain.default, encoder.encode_basestring_ascii, None, key, item, sort_keys, False, True)

    def text(value: Any) -> str:
        return "".join(make({}, *usual)(value, 0))  # a new one for each text: the dict finds what contains itself

    return text


def finite(text: str) -> float:
    """Return a number. Raises ``NotReadable`` for one that a float cannot hold."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise NotReadable("a number that is out of range")
    return value


def read_object(body: bytes | str) -> dict[str, Any]:
    """Return the JSON object in *body*. Numbers with a fraction become ``Decimal``.

    Raises ``NotReadable`` for anything else, and for JSON that readers disagree on: a key that appears twice in one
    object (one reader takes the first, another the last), NaN and infinities.
    """
    value = read_json(body, parse_float=_decimal)
    if not isinstance(value, dict):
        raise NotReadable(f"a JSON {type(value).__name__} instead of an object")
    return value


def objects_in(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield each object in a value that was read, at any depth, the value itself among them."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, Mapping):
            yield found
            pending.extend(found.values())
        elif isinstance(found, list):
            pending.extend(found)


def read_json(
    body: bytes | str,
    *,
    most_depth: int = _MAX_DEPTH,
    parse_float: Callable[[str], object] = finite,
    marks_doubled: bool = False,
) -> Any:
    """Return the JSON value in *body*, nested at most *most_depth* levels deep. Raises ``NotReadable`` as ``read_object`` does.

    With *marks_doubled* an object with a key twice is ``Doubled``, and its reader decides.
    """
    check_depth(body, most_depth)
    try:
        text = body if isinstance(body, str) else body.decode(json.detect_encoding(body), "surrogatepass")
        return _decoder(parse_float, marks_doubled=marks_doubled).decode(text)
    except NotReadable:
        raise
    except RecursionError:
        raise NotReadable("nested too deeply") from None
    except ValueError as error:
        raise NotReadable(f"not JSON: {str(error)[:120]}") from None


@lru_cache(maxsize=16)
def _decoder(parse_float: Callable[[str], object], *, marks_doubled: bool) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_marked if marks_doubled else _unique,
        parse_float=parse_float,
        parse_int=_integer,
        parse_constant=_no_constant,
    )


def write_object(value: dict[str, Any]) -> bytes:
    """Return *value* as compact ASCII JSON. The result of ``read_object`` keeps its meaning."""
    return json.dumps(value, separators=(",", ":"), default=_number).encode("ascii")


def plain_values(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of Python as the values that a reader of its JSON gets: those of subclasses, keys as text.

    Raises ``TypeError`` or ``ValueError`` for what is no JSON, such as NaN, or has two readings, and ``RecursionError``.
    """
    plain: dict[str, Any] = read_json(json.dumps(value, allow_nan=False, ensure_ascii=False))
    return plain


def check_depth(body: bytes | str, most: int = _MAX_DEPTH) -> None:
    """Raise ``NotReadable`` for JSON that is nested more than *most* levels deep.

    It is checked before the parser runs: with a raised recursion limit, the parser would crash the interpreter.
    """
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    if raw.count(b"[") + raw.count(b"{") <= most:
        return
    depth = 0
    for match in _BRACKETS.finditer(raw):
        first = match[0][:1]
        if first in b"[{":
            depth += 1
            if depth > most:
                raise NotReadable(f"nested too deeply: more than {most} levels")
        elif first in b"]}":
            depth -= 1


class Doubled(dict[str, Any]):
    """A JSON object with keys that appear twice: *twice*. Of two readers one takes the first of them, another the last."""

    twice: frozenset[str] = frozenset()


def doubled(value: object) -> frozenset[str]:
    """Return the keys that appear twice in an object that was read with ``marks_doubled``."""
    return value.twice if isinstance(value, Doubled) else frozenset()


def _marked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    marked = Doubled(found)
    marked.twice = frozenset(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
    return marked


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set[str]()
        for key, _ in pairs:
            if key in seen:
                raise NotReadable("a key appears twice in one object", key)
            seen.add(key)
    return found


def _decimal(text: str) -> Decimal:
    if len(text) > _MAX_DIGITS:
        raise NotReadable("a number with hundreds of digits")
    try:
        number = Decimal(text)
    except ArithmeticError:
        raise NotReadable("a number that is out of range") from None
    # 1e999999999 has eleven characters, but takes a gigabyte as an integer.
    if number and abs(number.adjusted()) > _MAX_EXPONENT:
        raise NotReadable("a number with hundreds of digits")
    return number


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise NotReadable("a number with hundreds of digits")
    return int(text)


def _no_constant(name: str) -> NoReturn:
    raise NotReadable(f"{name} is not a JSON number")


def _number(value: object) -> float:
    if isinstance(value, Decimal):
        return float(value)  # as other JSON readers do; it is a temperature or the like, never money
    raise TypeError(f"{type(value).__name__} is not JSON")

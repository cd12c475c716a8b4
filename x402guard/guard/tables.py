"""The tables of ``x402guard.toml``, made from the classes that they set: each argument of ``Policy`` is one key.

A table is a pydantic model with the fields of a dataclass; any other key is an error. The dataclass checks the values
and names the setting.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from x402guard.errors import ConfigError
from x402guard.policy import Bulkhead, Loop, Seller, Timeouts, Velocity
from x402guard.policy.checks import WITHOUT_SIGN

ZERO_IS_NONE: Final = (Bulkhead, Timeouts, Velocity)
"""TOML has no null: in these classes, and in ``loop.own``, 0 means no limit."""


def _no_flag(given: object) -> object:
    if isinstance(given, bool):
        raise PydanticCustomError("float_type", "it is not a number")
    return given


def _no_number(given: object) -> object:
    if given is not False:
        raise PydanticCustomError("model_type", "it is not a table")
    return given


Off = Annotated[Literal[False], BeforeValidator(_no_number)]
"""``false`` instead of a table. Python, and pydantic with it, takes 0 for the same."""

Whole = Annotated[int, BeforeValidator(_no_flag)]
"""A whole number in a table, where ``true`` is none."""

Number = Annotated[float, BeforeValidator(_no_flag)]
"""A number in a table, where ``true`` is none."""


class Table(BaseModel):
    """One table. ``build`` makes the object that it sets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def build(self) -> Any:
        """Return the object that the table sets. A missing key keeps its default. Raises ``ConfigError``."""
        kind = _KINDS[type(self)]
        given: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value is None:
                continue
            is_off = value is False and bool not in get_args(field.annotation)  # false instead of a table: None
            if kind is Velocity and isinstance(value, str) and not value.strip().strip(" $0."):
                raise ConfigError(
                    f"policy.velocity.{name}: {value!r:.40} lets nothing pass; for no limit, leave it out. {WITHOUT_SIGN}"
                )
            no_limit = kind in ZERO_IS_NONE and value == 0
            given[name] = None if is_off or no_limit else _built(value, zero_is_none=kind is Loop)
        return kind(**given)


_KINDS: Final[dict[type[Table], type[Any]]] = {}


class ProxySettings(BaseModel):
    """The table ``[proxy]``.

    Args:
        paths: what the key of an LLM provider may be used for through `x402guard proxy`, beside priced calls and `GET
            /models`: `METHOD /NAME/path`, such as "GET /openai/files*". DELETE never.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    paths: list[Annotated[str, Field(pattern=r"^[A-Z]+ /[a-z]")]] = []


def table_of(kind: type[Any]) -> type[Table]:
    """Return the table whose keys are the arguments of a dataclass. What replaces a built-in token is said in code alone."""
    hints = get_type_hints(kind)
    fields: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        is_setting = each.init and each.name != "unsafe_replace_builtin"
        annotation = _in_toml(hints[each.name]) if is_setting else None
        if annotation is not None:
            needed = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
            fields[each.name] = (annotation, ...) if needed else (annotation | None, None)
    table = create_model(f"{kind.__name__}Settings", __base__=Table, **fields)
    _KINDS[table] = kind
    return table


def _in_toml(annotation: Any) -> Any:
    """Return the type of an argument in TOML; None if TOML cannot express it, as for a function."""
    args = [each for each in get_args(annotation) if each is not type(None)]
    if get_origin(annotation) in (types.UnionType, Union):
        if float in args:
            return list[Number] | Number
        if Decimal in args or str in args:
            tables = [table_of(each) for each in args if isinstance(each, type) and dataclasses.is_dataclass(each)]
            return str | tables[0] if tables else str
        [only] = args
        inner = _in_toml(only)
        return inner | Off if dataclasses.is_dataclass(only) else inner  # false means None
    match get_origin(annotation):
        case origin if origin is Callable:
            return None
        case origin if origin is Mapping:
            return dict[str, _in_toml(args[1])]  # type: ignore[misc]
        case origin if origin is Collection:
            return list[_in_toml(args[0])]  # type: ignore[misc]
        case origin if origin is Literal:
            return str
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return table_of(annotation)
    return {int: Whole, float: Number}.get(annotation, annotation) if annotation in (str, int, float, bool) else None


def _built(value: Any, *, zero_is_none: bool) -> Any:
    if isinstance(value, Table):
        return value.build()
    if isinstance(value, list):
        return [_built(each, zero_is_none=False) for each in value]
    if isinstance(value, dict):
        return {key: None if zero_is_none and each == 0 else _of_host(key, each) for key, each in value.items()}
    return value


def _of_host(key: str, value: Any) -> Any:
    """Return what one key of a table of tables sets. A seller's own error says whose it is."""
    try:
        return _built(value, zero_is_none=False)
    except ConfigError as error:
        if not isinstance(value, Table) or _KINDS[type(value)] is not Seller:
            raise
        wrong = str(error).removeprefix("policy.sellers.")
    raise ConfigError(f'policy.sellers."{key}".{wrong}')


def two_readings(value: object) -> str:
    """Return what is wrong with decoded JSON that pydantic would read in its own way; "" for nothing.

    It takes null for no rule, and the last of two names that differ in capitals.
    """
    if value is None:
        return "null is no value; leave out what is not set"
    if isinstance(value, dict) and len({name.lower() for name in value}) != len(value):
        return f"a name appears twice, in capitals and small letters: {', '.join(value):.80}"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(two_readings, inner)), "")

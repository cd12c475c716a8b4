"""The two messages of a delegation. ``docs/reference/`` has their JSON Schema; both ends validate them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from x402guard.delegation.names import LONGEST_NAME, MOST_NAMES, is_name
from x402guard.errors import ConfigError
from x402guard.evm import parse_address
from x402guard.flow.surroundings import here
from x402guard.kernel.rows import Nanos
from x402guard.ledger.token_budget import MOST_TOKENS
from x402guard.money import dollars_to_nanos, nanos_to_decimal
from x402guard.policy.reach import as_tool
from x402guard.policy.settings import as_host
from x402guard.strict_json import NotReadable, read_json

MOST_CHARS: Final = 65_536
"""The most characters of a payload or an output, as JSON."""

_LAST_SECOND: Final = 253_402_300_799  # the end of the year 9999
_DOLLARS: Final = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]{1,9})?$", "description": "dollars, as a decimal"}


def check_json(field: str, value: object) -> None:
    """Raise ``ConfigError`` unless *value* is plain JSON of at most ``MOST_CHARS`` characters."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
        same = read_json(text, most_depth=100) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{field}: it is not plain JSON ({type(error).__name__}); write dicts, lists and texts"
        ) from None
    if not same:
        raise ConfigError(
            f"{field}: it changes when it is written as JSON and read again; write dicts, lists and texts"
        )
    if len(text) > MOST_CHARS:
        raise ConfigError(f"{field}: it has {len(text):,} characters as JSON, and may have {MOST_CHARS:,}")


def _plain(value: JsonValue) -> JsonValue:
    try:
        check_json("", value)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix(": ")) from None
    return value


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"{text!r:.80} is no name: it is empty or too long, cannot be printed, or means the wallet")
    return text


def _name_or_none(text: str) -> str:
    return _name(text[:LONGEST_NAME]) + text[LONGEST_NAME:] if text else text  # the id of a session may be long


def _dollars(value: object) -> Decimal:
    if not isinstance(value, (str, int, Decimal)) or isinstance(value, bool):
        raise ValueError(f'{value!r:.80} is no amount; write text such as "$0.40"')  # noqa: TRY004 - pydantic turns it into its error
    try:
        return nanos_to_decimal(dollars_to_nanos(value, field="dollars"))
    except ValueError as error:
        raise ValueError(str(error).removeprefix("dollars: ")) from None


def _written(amount: object) -> str:
    if not isinstance(amount, Decimal):
        raise TypeError(f"{type(amount).__name__} is no Decimal")
    return format(amount, "f")


def _each(check: Callable[[str], str]) -> AfterValidator:
    return AfterValidator(lambda values: tuple(sorted({check(_name(each)) for each in values})))


def _as_tuple(values: object) -> object:
    return tuple(values) if isinstance(values, Collection) and not isinstance(values, (str, Mapping)) else values


Name = Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(_name)]
Amount = Annotated[
    Decimal,
    BeforeValidator(_dollars),
    PlainSerializer(_written, when_used="json"),
    WithJsonSchema(_DOLLARS),
]
Plain = Annotated[JsonValue, AfterValidator(_plain)]
Names = Annotated[tuple[Annotated[str, Field(max_length=LONGEST_NAME)], ...], Field(max_length=MOST_NAMES)]
Listed = BeforeValidator(_as_tuple)


def _new_id() -> str:
    return f"t_{here().random_bytes(8).hex()}"


class Message(BaseModel):
    """What both messages share: they are frozen, take no other field, and raise ``ConfigError`` naming the field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError(_words(cls, error)) from None

    @classmethod
    def read(cls, text: str | bytes | Mapping[str, Any]) -> Self:
        """Return the message in JSON text, or in a decoded JSON object. Every field has to be there.

        Raises ``ConfigError`` naming the first field that is missing or wrong.
        """
        try:
            found = read_json(text) if isinstance(text, (str, bytes)) else text
        except NotReadable as error:
            raise ConfigError(f"{cls.__name__}: it cannot be read: {error}") from None
        if not isinstance(found, Mapping):
            raise ConfigError(f"{cls.__name__}: it is a {type(found).__name__}, not a JSON object")
        for name in cls.model_fields:
            if name not in found:
                raise ConfigError(f"{name}: it is missing in the {cls.__name__}")
        return cls(**{str(name): value for name, value in found.items()})

    def checked(self, **changes: Any) -> Self:
        """Return the message with other fields, checked again: one that was made past its checks is none.

        Raises ``ConfigError`` naming the field.
        """
        try:
            found = self.model_copy(update=changes).model_dump(mode="json", warnings=False)
        except (TypeError, ValueError):
            raise ConfigError(f"{type(self).__name__}: it was changed past its checks, and cannot be read") from None
        return type(self).read({name: found[name] for name in type(self).model_fields if name in found})

    def to_dict(self) -> dict[str, Any]:
        """Return the message as JSON values; amounts are decimal text, in dollars."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Return the message as JSON text, which ``read`` takes."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


_WORDS: Final = {
    "int_type": "is not a whole number",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "string_type": "is not text",
    "bool_type": "is neither True nor False",
    "tuple_type": "is not a list",
    "greater_than_equal": "is less than {ge}",
    "less_than_equal": "is more than {le}",
    "string_too_long": "has more than {max_length} characters",
    "too_long": "has more than {max_length} names",
    "literal_error": "is not one of {expected}",
}


def _words(model: type[BaseModel], error: ValidationError) -> str:
    """Return the first mistake as a sentence, without the value of a payload or an output."""
    first = error.errors(include_url=False)[0]
    name, kind, context = model.__name__, first["type"], first.get("ctx", {})
    field = str(first["loc"][0]) if first["loc"] else name
    if kind == "missing":
        return f"{field}: it is missing in the {name}"
    if kind == "extra_forbidden":
        near = get_close_matches(field, model.model_fields, n=1, cutoff=0.5)
        return f"{field:.100}: {name} has no such field" + (f"; did you mean {near[0]!r}?" if near else "")
    if kind == "value_error":
        return f"{field}: {context['error']}"
    if field in ("payload", "output"):
        return f"{field}: it is not plain JSON; write dicts, lists and texts"
    words = _WORDS[kind].format(**context) if kind in _WORDS else f"is wrong: {first['msg']}"
    return f"{field}: {shown(first['input'])} {words}"


def shown(value: object) -> str:
    """Return the beginning of a value for an error."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "a number of many digits"  # Python writes none of more than 4,300


class TaskRequest(Message):
    """A task for another agent, and what it may spend and use for it.

    Attributes:
        request_id: names the task; a new one by default. The same one again in a session is the same task.
        issuer_id: who delegates; by default the session's id.
        task_type: what is asked for, in a word.
        payload: the task, as plain JSON of at most 65,536 characters.
        budget: the most that it may spend, in dollars.
        token_budget: the most tokens of its LLM calls; None for those of the session.
        deadline: when nothing more may be paid for it, in unix seconds.
        allowed_tools: names, or patterns such as ``search_*``; None for those of the session, empty for none.
        allowed_hosts: hosts that may be paid, as in the policy; None for those of the session, empty for none.
        allowed_payees: addresses that may be paid; None for those of the session, empty for none.
        structured_output: True if the output has to be a JSON object.
        withheld: names of what the issuer knows and does not give, so that the worker can ask for it.

    Raises ``ConfigError`` naming the field.
    """

    request_id: Name = Field(default_factory=_new_id)
    issuer_id: Annotated[str, Field(max_length=20_000), AfterValidator(_name_or_none)] = ""
    task_type: Name
    payload: Plain = Field(repr=False)
    budget: Amount
    token_budget: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    deadline: Annotated[int, Field(ge=0, le=_LAST_SECOND, description="unix seconds")]
    allowed_tools: Annotated[Annotated[Names, _each(as_tool)] | None, Listed] = None
    allowed_hosts: Annotated[Annotated[Names, _each(as_host)] | None, Listed] = None
    allowed_payees: Annotated[Annotated[Names, _each(parse_address)] | None, Listed] = None
    structured_output: bool = False
    withheld: Annotated[tuple[Name, ...], Field(max_length=MOST_NAMES), Listed] = ()

    @model_validator(mode="after")
    def _given_is_not_withheld(self) -> Self:
        both = sorted(set(self.withheld) & set(self.payload)) if isinstance(self.payload, dict) else []
        if both:
            raise ConfigError(f"withheld: {both[0]!r} is in the payload")
        return self

    @property
    def limit(self) -> Nanos:
        """The budget in nano-dollars."""
        return dollars_to_nanos(self.budget, field="budget")


Status = Literal["completed", "failed", "partial", "needs_clarification"]


class TaskResult(Message):
    """What has become of a task.

    Attributes:
        request_id: of its request.
        responder_id: who answers; by default the worker's process.
        status: ``completed``, ``partial`` (a part of it), ``failed``, or ``needs_clarification``.
        output: the result; with ``needs_clarification``, what is asked. Plain JSON of at most 65,536 characters.
        error: why it has failed, or what is missing.
        cost: what was spent for it, in dollars.
        tokens: of its LLM calls.
        confidence: of the worker in its output, from 0 to 1; None if it states none.

    Raises ``ConfigError`` naming the field.
    """

    request_id: Name
    responder_id: Name
    status: Status
    output: Plain = Field(None, repr=False)
    error: Annotated[str, Field(max_length=1000)] | None = None
    cost: Amount
    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _says_what_it_claims(self) -> Self:
        if self.status == "failed" and not self.error:
            raise ConfigError("error: it is missing; a task that has failed says why")
        if self.status == "completed" and self.error:
            raise ConfigError("error: a completed task has none; write status='partial' or 'failed'")
        if self.status == "failed" and self.output is not None:
            raise ConfigError(
                "output: a task that has failed has none; what happened stands in error, or it is 'partial'"
            )
        if self.status != "failed" and self.output is None:
            raise ConfigError(f"output: it is missing, and the status is {self.status!r}")
        return self

    @property
    def spent(self) -> Nanos:
        """The cost in nano-dollars."""
        return dollars_to_nanos(self.cost, field="cost")

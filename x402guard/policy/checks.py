"""Checks that all settings share. Each error names the setting, the value and the fix."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

from x402guard.errors import ConfigError
from x402guard.kernel.rows import Nanos
from x402guard.ledger.budgets import PARTS
from x402guard.money import Dollars, dollars_to_nanos

SoftLimits = float | str | Decimal | Collection[float | str | Decimal]
"""One part of a budget, such as 0.9, or several. They are not money, so floats are allowed."""

_MOST_PARTS: Final = 20
_LONGEST: Final = 100
_DIGITS: Final = 6


def check_whole(
    name: str, value: object, least: int, most: int | None = None, *, optional: bool = False, what: str = ""
) -> int:
    """Return a whole number within its bounds, or 0 for None if *optional*. Raises ``ConfigError``, also for a bool."""
    if (type(value) is int and least <= value and (most is None or value <= most)) or (optional and value is None):
        return value or 0
    bounds = f"from {least} to {most:,}" if most is not None else f"of {least} or more"
    raise ConfigError(f"{name}: {value!r:.80} is not a whole number {what}{bounds}{', or None' if optional else ''}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ``ConfigError`` if *value* is not one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}: {value!r:.80} is not one of {', '.join(map(repr, choices))}")


WITHOUT_SIGN: Final = "write it without the $, which a shell reads as a variable: 20.00"


def check_dollars(name: str, value: Dollars) -> Nanos:
    """Return dollars as nano-dollars. Raises ``ConfigError`` naming the setting."""
    try:
        return dollars_to_nanos(value, field=name)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def check_flag(name: str, value: object) -> None:
    """Raise ``ConfigError`` if *value* is neither True nor False: the text ``"false"`` would count as true."""
    if type(value) is not bool:
        raise ConfigError(f"{name}: {value!r} is neither True nor False")


def check_flags(**flags: object) -> None:
    """Raise ``ConfigError`` naming the first setting that is neither True nor False."""
    for name, value in flags.items():
        check_flag(name, value)


def check_name(setting: str, name: object) -> str:
    """Return the name or id of a session, a budget or a hold. Raises ``ConfigError`` for what is no text."""
    if not isinstance(name, str):
        raise ConfigError(f"{setting}: {name!r:.60} is no name or id; write it as text")
    return name


def check_kind(setting: str, value: object, kind: type, advice: str) -> None:
    """Raise ``ConfigError`` for a value of another class. *advice* says where the right one comes from."""
    if not isinstance(value, kind):
        raise ConfigError(f"{setting}: a {type(value).__name__} is not a {kind.__name__}; {advice}")


def check_texts(name: str, values: object, what: str) -> frozenset[str]:
    """Return a collection of texts as a set. Raises ``ConfigError`` for a single text, a mapping, or anything else."""
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise ConfigError(f"{name}: {values!r:.80} is not a list of {what}")
    listed = tuple(values)
    if not all(isinstance(value, str) and value for value in listed):
        raise ConfigError(f"{name}: {listed!r:.80} is not a list of {what}")
    return frozenset(listed)


def parts_of(setting: str, limits: SoftLimits) -> tuple[int, ...]:
    """Return the soft limits in millionths, lowest first. Raises ``ConfigError`` naming *setting*."""
    listed = [limits] if isinstance(limits, (float, int, str, Decimal)) else limits
    if not isinstance(listed, Collection) or len(listed) > _MOST_PARTS:
        raise ConfigError(
            f"{setting}: {limits!r:.80} is neither a part such as 0.9 nor a list of at most {_MOST_PARTS}"
        )
    return tuple(sorted({_part(setting, value) for value in listed}))


def _part(setting: str, value: object) -> int:
    try:
        part = Decimal(str(value)[:_LONGEST]) if isinstance(value, (float, str, Decimal)) else None
    except InvalidOperation:
        part = None
    if (
        part is None
        or not part.is_finite()
        or not 0 < part < 1
        or part.adjusted() < -_DIGITS
        or part != round(part, _DIGITS)
    ):
        raise ConfigError(
            f"{setting}: {value!r:.60} is not a part of a budget; write a number between 0 and 1, such as 0.9"
        )
    return int(part * PARTS)

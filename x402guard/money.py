"""Reads and shows amounts of money: what users write becomes nano-dollars, exactly, and back.

Floats are refused, because the float 0.1 is not exactly a tenth of a dollar.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from x402guard.kernel.rows import MAX_NANOS, NANOS_PER_DOLLAR, Nanos

Dollars = str | int | Decimal
"""An amount as a user may write it: ``"$1.50"``, ``"1.50"``, ``Decimal("1.50")`` or ``2`` (whole dollars)."""

_MOST_PLACES: Final = 100

_AMOUNT = re.compile(r"\$?(?P<whole>[0-9]{1,12})(?:\.(?P<part>[0-9]{1,9}))?", re.ASCII)


def dollars_to_nanos(amount: Dollars, *, field: str = "amount") -> Nanos:
    """Return *amount* (US dollars, at most nine decimal places, not negative) in nano-dollars, exactly.

    ``field`` names the argument in the error. Raises ``TypeError`` for a float or any other type, and ``ValueError``
    for text that is not a dollar amount, a negative amount, more than nine decimal places or more than a billion
    dollars.
    """
    if type(amount) is str and (known := _READ.get(amount)) is not None:
        return known
    if isinstance(amount, bool) or not isinstance(amount, (str, int, Decimal)):
        shown = _as_text(amount) if isinstance(amount, float) else "1.50"
        raise TypeError(
            f'{field}: money is never a {type(amount).__name__}; write it as text, "${shown}", or as a Decimal'
        )
    text = _written(amount)
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f'{field}: {text[:40]!r} is not a dollar amount; write "$1.50" (not negative, at most nine decimals)'
        )
    nanos = int(match["whole"]) * NANOS_PER_DOLLAR + int((match["part"] or "0").ljust(9, "0"))
    if nanos > MAX_NANOS:
        raise ValueError(f"{field}: {text[:40]} is more than a billion dollars, the largest amount the ledger takes")
    if type(amount) is str and len(_READ) < _MOST_READ:
        _READ[amount] = Nanos(nanos)
    return Nanos(nanos)


_READ: Final[dict[str, Nanos]] = {}
"""Amounts as they were written → their value: code names the same few again and again."""
_MOST_READ: Final = 1_024


def _as_text(amount: float) -> str:
    """Return the decimal that the user of a float probably meant, rounded to nine places, for the error message."""
    if not 0 <= amount <= MAX_NANOS // NANOS_PER_DOLLAR:
        return "1.50"
    return format_dollars(round(Decimal(repr(amount)) * NANOS_PER_DOLLAR))


def _written(amount: Dollars) -> str:
    """Return an amount as short text. Numbers such as 1E-400000000 and 10**5000 are not written out."""
    if isinstance(amount, int):
        return str(amount) if abs(amount) <= MAX_NANOS else "a number of many digits"
    if not isinstance(amount, Decimal):
        return str(amount)
    exponent = amount.as_tuple().exponent
    short = isinstance(exponent, int) and -_MOST_PLACES <= exponent <= _MOST_PLACES
    return format(amount, "f") if short else str(amount)


def nanos_to_decimal(nanos: int) -> Decimal:
    """Return *nanos* (nano-dollars) as an exact ``Decimal`` number of dollars, with at least two places."""
    return Decimal(format_dollars(nanos))


def format_dollars(nanos: int) -> str:
    """Return *nanos* (nano-dollars) as a decimal string in dollars, exact, with at least two places: ``"0.10"``."""
    sign, magnitude = ("-", -nanos) if nanos < 0 else ("", nanos)
    whole, part = divmod(magnitude, NANOS_PER_DOLLAR)
    return f"{sign}{whole}.{f'{part:09d}'.rstrip('0').ljust(2, '0')}"


def atomic_to_nanos(atomic: int, *, decimals: int, peg_nanos: int = NANOS_PER_DOLLAR) -> Nanos:
    """Return the value of *atomic* units of a token in nano-dollars, rounded up.

    ``decimals`` is the token's number of decimals; ``peg_nanos`` is the value of one whole token, in nano-dollars. The
    result may be above ``MAX_NANOS``; the caller has to refuse it. Raises ``TypeError`` for a value that is not an
    ``int``, ``ValueError`` for a negative amount.
    """
    if type(atomic) is not int:
        raise TypeError(f"atomic units are an int, not {type(atomic).__name__}")
    if atomic < 0:
        raise ValueError(f"atomic units are not negative: {atomic}")
    return Nanos(-(-atomic * peg_nanos // 10**decimals))
